"""Arrival processes: at what times requests come, and how long they are.

Every process is a pure generator: the same arguments and the same state of ``rng`` give the same
arrivals. Lengths are drawn by inversion, ``lengths.quantile(rng.random())``, rounded to whole
tokens. A process ends after ``duration_s`` or ``num_requests``, whichever comes first; at least one
of the two is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from random import Random
from typing import TypeAlias

import attrs

from prfaas.capacity import LengthDistribution
from prfaas.core import RequestId
from prfaas.errors import ConfigError
from prfaas.workload.arrival import Arrival

Tokens: TypeAlias = LengthDistribution | int
"""A law of lengths, or one length for all."""


def draw_tokens(tokens: Tokens, rng: Random) -> int:
    """Draw a length of at least 1 token; a constant takes nothing from ``rng``."""
    if isinstance(tokens, int):
        return tokens
    return max(1, round(tokens.quantile(rng.random())))


def check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a finite number greater than 0")


def end_after(
    arrivals: Iterator[Arrival], duration_s: float | None, num_requests: int | None, start_s: float
) -> Iterator[Arrival]:
    """Cut an endless stream at ``start_s + duration_s`` or after ``num_requests``."""
    if duration_s is None and num_requests is None:
        raise ConfigError("the workload has no end; pass duration_s, num_requests or both")
    if not 0 <= start_s < math.inf:
        raise ConfigError(f"start_s is {start_s!r}; it must be a finite number of at least 0")
    if num_requests is not None:
        if num_requests < 0:
            raise ConfigError(f"num_requests is {num_requests}; it must be 0 or more")
        arrivals = islice(arrivals, num_requests)
    if duration_s is None:
        return arrivals
    check_positive("duration_s", duration_s)
    return takewhile(lambda arrival: arrival.arrived_s < start_s + duration_s, arrivals)


def poisson(
    rate_rps: float,
    lengths: Tokens,
    output_tokens: Tokens,
    rng: Random,
    *,
    duration_s: float | None = None,
    num_requests: int | None = None,
    start_s: float = 0.0,
) -> Iterator[Arrival]:
    """Independent arrivals: gaps are exponential with mean ``1 / rate_rps``.

    Args:
        rate_rps: mean requests per second.
        lengths: law of the prompt lengths, or one length.
        output_tokens: law of the generated lengths, or one length.
        rng: source of all randomness.
        duration_s, num_requests: where to end, at least one of them.
        start_s: the process runs from here on; the first gap is drawn too.
    """
    check_positive("rate_rps", rate_rps)
    times = _poisson_times(rate_rps, start_s, rng)
    stream = _numbered(times, lengths, output_tokens, rng)
    return end_after(stream, duration_s, num_requests, start_s)


def bursty(
    rate_rps: float,
    lengths: Tokens,
    output_tokens: Tokens,
    rng: Random,
    *,
    burstiness: float,
    mean_burst_s: float,
    duration_s: float | None = None,
    num_requests: int | None = None,
    start_s: float = 0.0,
) -> Iterator[Arrival]:
    """Bursts and silences: an interrupted Poisson process of mean rate ``rate_rps``.

    A burst lasts an exponential time of mean ``mean_burst_s`` and carries Poisson arrivals of
    ``burstiness * rate_rps``; the silence after it lasts an exponential time of mean
    ``(burstiness - 1) * mean_burst_s``. The process starts in its steady state, in a burst with
    probability ``1 / burstiness``, so its mean rate is ``rate_rps`` at every time. Over a long
    window the variance of the count is ``1 + 2 b r (k - 1)**2 / k`` times its mean, with b the mean
    burst, r the rate and k the burstiness; k = 1 is Poisson.

    Args:
        burstiness: rate within a burst over the mean rate, at least 1.
        mean_burst_s: mean length of a burst, in seconds.
    """
    check_positive("rate_rps", rate_rps)
    check_positive("mean_burst_s", mean_burst_s)
    if not 1 <= burstiness < math.inf:
        raise ConfigError(f"burstiness is {burstiness!r}; it must be a finite number of at least 1")
    times = _interrupted_times(rate_rps * burstiness, burstiness, mean_burst_s, start_s, rng)
    stream = _numbered(times, lengths, output_tokens, rng)
    return end_after(stream, duration_s, num_requests, start_s)


@attrs.frozen(kw_only=True)
class Phase:
    """A stretch of Poisson arrivals; ``rate_rps`` 0 is a pause."""

    duration_s: float
    rate_rps: float
    lengths: Tokens
    output_tokens: Tokens

    def __attrs_post_init__(self) -> None:
        check_positive("duration_s", self.duration_s)
        if not 0 <= self.rate_rps < math.inf:
            raise ConfigError(
                f"rate_rps is {self.rate_rps!r}; it must be a finite number of at least 0"
            )


def phases(parts: Sequence[Phase], rng: Random, *, start_s: float = 0.0) -> Iterator[Arrival]:
    """One phase after the other: steps, shifts of the length mix, pauses.

    Ids are numbered across phases, so that the whole is one workload.
    """
    number = 0
    for part in parts:
        if part.rate_rps:
            times = _poisson_times(part.rate_rps, start_s, rng)
            stream = _numbered(times, part.lengths, part.output_tokens, rng, first=number)
            for arrival in end_after(stream, part.duration_s, None, start_s):
                yield arrival
                number += 1
        start_s += part.duration_s


def diurnal(
    rate_rps: float,
    lengths: Tokens,
    output_tokens: Tokens,
    rng: Random,
    *,
    period_s: float,
    rate_swing: float = 0.0,
    length_swing: float = 0.0,
    duration_s: float | None = None,
    num_requests: int | None = None,
    start_s: float = 0.0,
) -> Iterator[Arrival]:
    """A day that repeats: rate and lengths move along a sine of period ``period_s``.

    At time t after the start the rate is ``rate_rps * (1 + rate_swing * s)`` and a drawn prompt
    length is multiplied by ``1 + length_swing * s``, with ``s = sin(2 pi t / period_s)``. Over
    whole periods the mean rate is ``rate_rps``. Times come from a Poisson process of the highest
    rate that is thinned (Lewis and Shedler, 1979).

    Args:
        rate_swing: 0 to 1; 1 falls to silence three quarters into the period.
        length_swing: above -1 and below 1; negative means that busy hours have short prompts.
    """
    check_positive("rate_rps", rate_rps)
    check_positive("period_s", period_s)
    if not 0 <= rate_swing <= 1:
        raise ConfigError(f"rate_swing is {rate_swing!r}; it must be from 0 to 1")
    if not -1 < length_swing < 1:
        raise ConfigError(f"length_swing is {length_swing!r}; it must be between -1 and 1")

    def sine(at_s: float) -> float:
        return math.sin(2 * math.pi * (at_s - start_s) / period_s)

    highest = 1 + rate_swing
    times = (
        at_s
        for at_s in _poisson_times(rate_rps * highest, start_s, rng)
        if rng.random() * highest < 1 + rate_swing * sine(at_s)
    )
    stream = _numbered(
        times, lengths, output_tokens, rng, scale=lambda at_s: 1 + length_swing * sine(at_s)
    )
    return end_after(stream, duration_s, num_requests, start_s)


def _numbered(
    times: Iterable[float],
    lengths: Tokens,
    output_tokens: Tokens,
    rng: Random,
    *,
    first: int = 0,
    scale: Callable[[float], float] | None = None,
) -> Iterator[Arrival]:
    for number, at_s in enumerate(times, first):
        num_tokens = draw_tokens(lengths, rng)
        if scale is not None:
            num_tokens = max(1, round(num_tokens * scale(at_s)))
        yield Arrival(
            request_id=RequestId(str(number)),
            arrived_s=at_s,
            num_tokens=num_tokens,
            output_tokens=draw_tokens(output_tokens, rng),
        )


def _poisson_times(rate_rps: float, start_s: float, rng: Random) -> Iterator[float]:
    at_s = start_s
    while True:
        at_s += rng.expovariate(rate_rps)
        yield at_s


def _interrupted_times(
    burst_rps: float, burstiness: float, mean_burst_s: float, start_s: float, rng: Random
) -> Iterator[float]:
    at_s = start_s
    bursting = rng.random() * burstiness < 1
    mean_silence_s = mean_burst_s * (burstiness - 1)
    while True:
        if bursting:
            end_s = at_s + rng.expovariate(1 / mean_burst_s)
            for arrived_s in _poisson_times(burst_rps, at_s, rng):
                if arrived_s >= end_s:
                    break
                yield arrived_s
            at_s = end_s
        if mean_silence_s:
            at_s += rng.expovariate(1 / mean_silence_s)
        bursting = True
