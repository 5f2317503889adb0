"""The requests of the experiments. The same seed gives every policy the same requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import attrs

from experiment_parts.deployments import LENGTHS, OUTPUT_TOKENS
from prfaas.capacity import EmpiricalLengths, LogNormalLengths
from prfaas.core import RequestId
from prfaas.traces import Trace, read_mooncake
from prfaas.workload import (
    Arrival,
    SessionShape,
    at_rate,
    bursty,
    mean_rate_rps,
    poisson,
    sessions,
)

_GOLDEN = (math.sqrt(5) - 1) / 2
_MOST_TOKENS = 131_072


def even_prompts(
    seed: int = 0, scale: Callable[[int], float] = lambda _: 1.0, output_tokens: int = OUTPUT_TOKENS
) -> Iterator[Arrival]:
    """Prompts of the case study without end, for closed loops.

    Their lengths are a low-discrepancy sequence in random order of blocks: the mean of a few
    hundred has next to no noise. ``scale`` stretches request i.
    """
    rng = Random(seed)
    number = 0
    while True:
        block = [LENGTHS.quantile((i + rng.random()) / 64) for i in range(64)]
        rng.shuffle(block)
        for num_tokens in block:
            yield Arrival(
                request_id=RequestId(str(number)),
                arrived_s=0.0,
                num_tokens=min(_MOST_TOKENS, max(1, round(num_tokens * scale(number)))),
                output_tokens=output_tokens,
            )
            number += 1


def evenly(rate_rps: float, duration_s: float, seed: int = 0) -> Iterator[Arrival]:
    """The same prompts, one every ``1 / rate_rps`` seconds."""
    num = int(rate_rps * duration_s)
    for i, arrival in enumerate(islice(even_prompts(seed), num)):
        yield attrs.evolve(arrival, arrived_s=i / rate_rps)


def steady(rate_rps: float, duration_s: float, seed: int = 0) -> Iterator[Arrival]:
    """Poisson arrivals."""
    return poisson(rate_rps, LENGTHS, OUTPUT_TOKENS, Random(seed), duration_s=duration_s)


def bursts(rate_rps: float, duration_s: float, seed: int = 0) -> Iterator[Arrival]:
    """Bursts of 20 s on average at three times the mean rate, and silences of 40 s."""
    return bursty(
        rate_rps,
        LENGTHS,
        OUTPUT_TOKENS,
        Random(seed),
        burstiness=3.0,
        mean_burst_s=20.0,
        duration_s=duration_s,
    )


def length_factor(at_s: float, period_s: float) -> float:
    """A day of lengths: from 1 up to 2, down to 0.5, and back."""
    return 2.0 ** math.sin(2 * math.pi * at_s / period_s)


def shifting(
    rate_rps: float, duration_s: float, seed: int = 0, *, period_s: float | None = None
) -> Iterator[Arrival]:
    """Poisson arrivals whose lengths follow `length_factor`, one period in the run."""
    for arrival in steady(rate_rps, duration_s, seed):
        factor = length_factor(arrival.arrived_s, period_s or duration_s)
        num_tokens = min(_MOST_TOKENS, max(1, round(arrival.num_tokens * factor)))
        yield attrs.evolve(arrival, num_tokens=num_tokens)


@cache
def shifting_lengths() -> EmpiricalLengths:
    """The lengths of a whole day, for the capacity model."""
    num = 4000
    sample = (
        round(LENGTHS.quantile((i * _GOLDEN) % 1) * length_factor(i / num, 1.0)) for i in range(num)
    )
    return EmpiricalLengths(tuple(min(_MOST_TOKENS, max(1, n)) for n in sample))


def _law(mean_log: float, sigma: float, most: float) -> LogNormalLengths:
    return LogNormalLengths(mu=mean_log, sigma=sigma, min_tokens=8, max_tokens=most)


SESSION_SHAPE = SessionShape(
    user_tokens=_law(8.2, 1.25, 100_000),
    output_tokens=_law(5.5, 0.8, 2_000),
    mean_turns=1.7,
    mean_gap_s=45.0,
    system_tokens=512,
    num_system_prompts=1,
    max_tokens=_MOST_TOKENS,
    granule_tokens=512,
)
"""Near the conversation trace: mean prompt 12K, 343 output tokens, about 40 % shared."""


@cache
def synthetic_trace(num_requests: int = 6000) -> Trace:
    """Conversations without a trace file; labelled as such in every report."""
    turns = sessions(1.0, SESSION_SHAPE, Random(5), num_requests=num_requests + 600)
    # The first turns find no conversation under way.
    kept = list(turns)[600:]
    first_s = kept[0].arrived_s
    arrivals = tuple(attrs.evolve(a, arrived_s=a.arrived_s - first_s) for a in kept)
    return Trace(name="synthetic sessions", arrivals=arrivals, granule_tokens=512)


@cache
def trace_of(path: str | None, num_requests: int = 6000) -> Trace:
    """The head of the conversation trace, or synthetic sessions if there is no file."""
    if path is None:
        return synthetic_trace(num_requests)
    with Path(path).open() as lines:
        whole = read_mooncake(lines, name="conversation trace")
    return attrs.evolve(whole, arrivals=whole.arrivals[:num_requests])


@cache
def uncached_lengths(trace: Trace) -> EmpiricalLengths:
    """What an unlimited cache would leave of the prompts."""
    return EmpiricalLengths(
        tuple(
            max(1, arrival.num_tokens - cached)
            for arrival, cached in zip(trace.arrivals, trace.cached_tokens(), strict=True)
        )
    )


def replayed(trace: Trace, rate_rps: float) -> Sequence[Arrival]:
    """The trace in less time, at this mean rate."""
    return tuple(at_rate(trace.arrivals, rate_rps))


def trace_rate_rps(trace: Trace) -> float:
    """The rate at which it was recorded."""
    return mean_rate_rps(trace.arrivals)
