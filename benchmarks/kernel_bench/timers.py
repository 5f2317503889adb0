"""Seconds of calls that take turns, on the host or on a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import torch

Call = Callable[[], object]


@attrs.frozen(kw_only=True)
class Samples:
    """Of one of the calls: seconds per call in each round, and the seconds the host was busy."""

    seconds: Sequence[float]
    host_seconds: Sequence[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_host_s(self) -> float:
        return statistics.median(self.host_seconds)


class Timer(Protocol):
    """Times calls that take turns: one of each, again and again, so that all see the same load."""

    def rounds(self, calls: Sequence[Call], *, inner: int = 1) -> list[Samples]:
        """Per call its samples; each is the mean of ``inner`` calls. Every call ran before."""

    def finish(self) -> None:
        """Waits until everything that was started has ended; errors of a device show here."""


@attrs.frozen(kw_only=True)
class HostTimer:
    """`time.perf_counter`, in ``min_rounds`` to ``max_rounds`` rounds.

    Rounds go on until ``budget_s`` are over, for the least number of them until ``limit_s`` are.
    From ``deadline`` on, a value of `time.perf_counter`, one round has to do. So a run ends in time
    on a machine that others keep busy, with fewer samples, which the rows tell.
    """

    min_rounds: int
    max_rounds: int
    budget_s: float
    limit_s: float = math.inf
    deadline: float = math.inf

    def rounds(self, calls: Sequence[Call], *, inner: int = 1) -> list[Samples]:
        found: list[list[float]] = [[] for _ in calls]
        began = time.perf_counter()
        for number in range(self.max_rounds):
            now = time.perf_counter()
            seconds = self.limit_s if number < self.min_rounds else self.budget_s
            if number and (now > self.deadline or now - began > seconds):
                break
            for call, samples in zip(calls, found, strict=True):
                start = time.perf_counter()
                for _ in range(inner):
                    call()
                samples.append((time.perf_counter() - start) / inner)
        return [Samples(seconds=samples, host_seconds=samples) for samples in found]

    def finish(self) -> None:
        """Nothing runs on the side."""


class CudaTimer:
    """CUDA events around each call, with the caches of the device flushed before it.

    The flush writes a buffer that is much larger than the L2 cache. It also keeps the device busy
    while the host launches the call, so that what lies between the events is the device's time, as
    long as the host needs less than the flush (about a quarter of a millisecond); the host's own
    seconds are reported beside it.
    """

    def __init__(
        self, device: torch.device, *, num_rounds: int, flush_bytes: int = 1 << 30
    ) -> None:
        self._num_rounds = num_rounds
        self._device = device
        self._flushed = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def rounds(self, calls: Sequence[Call], *, inner: int = 1) -> list[Samples]:
        events = [
            [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in calls]
            for _ in range(self._num_rounds)
        ]
        host: list[list[float]] = [[] for _ in calls]
        for pairs in events:
            for (start, stop), call, samples in zip(pairs, calls, host, strict=True):
                self._flushed.zero_()
                start.record()
                began = time.perf_counter()
                for _ in range(inner):
                    call()
                samples.append((time.perf_counter() - began) / inner)
                stop.record()
        self.finish()
        return [
            Samples(
                seconds=[
                    pairs[index][0].elapsed_time(pairs[index][1]) / 1e3 / inner for pairs in events
                ],
                host_seconds=host[index],
            )
            for index in range(len(calls))
        ]

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


def pair_ratio(ours: Samples, theirs: Samples) -> float:
    """Our speed over theirs: the median over rounds of their seconds by our seconds."""
    return statistics.median(b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True))
