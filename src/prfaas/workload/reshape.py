"""Workloads made from workloads: the same requests at another rate, or several times over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import attrs

from prfaas.core import BlockHash, RequestId
from prfaas.errors import ConfigError
from prfaas.hashing import HASH_BYTES
from prfaas.workload.arrival import Arrival
from prfaas.workload.processes import check_positive

_REPEAT_DOMAIN = b"prfaas.repeat.1"


def mean_rate_rps(arrivals: Sequence[Arrival]) -> float:
    """Gaps per second between the first and the last arrival, which must be in order.

    Raises:
        ConfigError: fewer than 2 arrivals, or all at one time.
    """
    span_s = arrivals[-1].arrived_s - arrivals[0].arrived_s if arrivals else 0.0
    if len(arrivals) < 2 or not span_s > 0:
        raise ConfigError(
            f"{len(arrivals)} arrivals within {span_s} s have no rate; at least 2 at different "
            "times, in order, are needed"
        )
    return (len(arrivals) - 1) / span_s


def at_rate(arrivals: Iterable[Arrival], rate_rps: float) -> Iterator[Arrival]:
    """Stretch or compress the time between arrivals until their mean rate is ``rate_rps``.

    The first arrival stays where it is. Bursts keep their shape and take another length.
    """
    check_positive("rate_rps", rate_rps)
    kept = tuple(arrivals)
    scale = mean_rate_rps(kept) / rate_rps
    first_s = kept[0].arrived_s
    return (
        attrs.evolve(arrival, arrived_s=first_s + (arrival.arrived_s - first_s) * scale)
        for arrival in kept
    )


def repeated(arrivals: Iterable[Arrival], times: int) -> Iterator[Arrival]:
    """Play a workload ``times`` times, one after the other, one mean gap apart.

    From the second time on every granule hash is another one: prefixes are shared within a
    repetition as before and never across, so a cache cannot learn the trace by heart. Ids get the
    number of the repetition behind them, ``"17.2"``.
    """
    if times < 1:
        raise ConfigError(f"times is {times}; it must be at least 1")
    kept = tuple(arrivals)
    if times == 1:
        return iter(kept)
    period_s = len(kept) / mean_rate_rps(kept)
    return _repetitions(kept, times, period_s)


def _repetitions(kept: Sequence[Arrival], times: int, period_s: float) -> Iterator[Arrival]:
    yield from kept
    for number in range(1, times):
        fresh: dict[BlockHash, BlockHash] = {}
        for arrival in kept:
            hashes = tuple(
                fresh.get(key) or fresh.setdefault(key, _renewed(key, number))
                for key in arrival.granule_hashes
            )
            yield attrs.evolve(
                arrival,
                request_id=RequestId(f"{arrival.request_id}.{number}"),
                arrived_s=arrival.arrived_s + number * period_s,
                granule_hashes=hashes,
            )


def _renewed(key: BlockHash, number: int) -> BlockHash:
    digest = blake2b(
        key,
        digest_size=HASH_BYTES,
        salt=number.to_bytes(16, "little"),
        person=_REPEAT_DOMAIN,
    )
    return BlockHash(digest.digest())
