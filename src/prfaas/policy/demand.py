"""Measured demand: how many requests arrive, how long they are, and what decoding them takes."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping

import attrs

from prfaas.core import ClusterKind
from prfaas.policy.load_curve import PrefillSeconds
from prfaas.seams import Served

_BUCKETS_PER_DOUBLING = 32
"""Lengths within 2.2 % of each other count as their mean."""
_PRIOR_REQUESTS = 8
"""Endings for which the prior number of output tokens stands."""


@attrs.frozen(kw_only=True)
class MeasuredDemand:
    """What a window saw.

    Attributes:
        num_arrivals, arrival_rps: requests of the window, and per second of it.
        weights: uncached length in tokens -> share of the arrivals; empty if there were none.
        output_tokens: mean decode steps of a request.
        step_s: mean seconds of one; None if neither measured nor given.
        prefill_busy_s: node-seconds spent on prompts, by kind of cluster.
        backlog_tokens: prompt tokens that arrived but were not computed: growth of the queues.
    """

    num_arrivals: int
    arrival_rps: float
    weights: Mapping[int, float]
    output_tokens: float
    step_s: float | None
    prefill_busy_s: Mapping[ClusterKind, float]
    backlog_tokens: int = 0

    @property
    def mean_tokens(self) -> float:
        return sum(tokens * share for tokens, share in self.weights.items())

    def prefill_s(
        self, remote_s: PrefillSeconds | None, local_s: PrefillSeconds | None
    ) -> tuple[PrefillSeconds, PrefillSeconds] | None:
        """T_prefill of a remote and a local node; a missing one is the busy time per token.

        Long requests go remote, so the known profile and the busy time of its stage tell which
        tokens that stage computed; the other stage computed the rest. If nothing can be told,
        nodes count as equally fast. Returns None if there is nothing to go by at all.
        """
        if remote_s is not None and local_s is not None:
            return remote_s, local_s
        remote_busy_s = self.prefill_busy_s.get(ClusterKind.PRFAAS, 0.0)
        local_busy_s = self.prefill_busy_s.get(ClusterKind.PD, 0.0)
        total = self.mean_tokens * self.num_arrivals - self.backlog_tokens
        if remote_s is not None:
            tokens = total - self._tokens_within(remote_busy_s, remote_s, longest_first=True)
            return remote_s, _per_token(local_busy_s, tokens) or remote_s
        if local_s is not None:
            tokens = total - self._tokens_within(local_busy_s, local_s, longest_first=False)
            return _per_token(remote_busy_s, tokens) or local_s, local_s
        both_s = _per_token(remote_busy_s + local_busy_s, total)
        return None if both_s is None else (both_s, both_s)

    def _tokens_within(
        self, busy_s: float, prefill_s: PrefillSeconds, *, longest_first: bool
    ) -> float:
        """Tokens that a stage computes in ``busy_s`` if it takes lengths in this order."""
        done = 0.0
        for tokens in sorted(self.weights, reverse=longest_first):
            num = self.weights[tokens] * self.num_arrivals
            cost_s = num * prefill_s(tokens)
            if cost_s >= busy_s:
                return done + num * tokens * busy_s / cost_s if cost_s > 0 else done
            busy_s -= cost_s
            done += num * tokens
        return done


@attrs.define(kw_only=True)
class _Period:
    start_s: float
    queued_tokens: int = 0
    num_arrivals: int = 0
    counts: Counter[int] = attrs.field(factory=Counter)
    tokens: Counter[int] = attrs.field(factory=Counter)
    num_served: int = 0
    output_tokens: int = 0
    decode_s: float = 0.0
    busy_s: dict[ClusterKind, float] = attrs.field(factory=dict)


class Demand:
    """Counts per control period, so that memory does not grow with the arrival rate.

    Args:
        window_s: the newest periods of this time are measured;
        max_window_s: more of them, up to this time, while they hold fewer arrivals than
        window_arrivals.
        output_tokens: decode steps to expect of a request before endings are seen.
        decode_step_s: a step with a full batch. Steps of smaller batches are faster, so a measured
            mean counts only when it is longer. None takes the measured mean.
    """

    def __init__(
        self,
        *,
        window_s: float,
        max_window_s: float,
        window_arrivals: int,
        output_tokens: float,
        decode_step_s: float | None,
    ) -> None:
        self._window_s = window_s
        self._max_window_s = max_window_s
        self._window_arrivals = window_arrivals
        self._output_tokens = output_tokens
        self._decode_step_s = decode_step_s
        self._periods: deque[_Period] = deque()
        self.last_arrival_s: float | None = None

    def __repr__(self) -> str:
        num = sum(period.num_arrivals for period in self._periods)
        return f"<Demand {num} arrivals in {len(self._periods)} periods>"

    def start_period(self, now: float, queued_tokens: int = 0) -> None:
        """Begins a new control period; forgets those that no window can hold.

        Args:
            queued_tokens: prompt tokens that wait on all nodes now.
        """
        self._periods.append(_Period(start_s=now, queued_tokens=queued_tokens))
        while len(self._periods) > 1 and self._periods[1].start_s <= now - self._max_window_s:
            self._periods.popleft()

    def arrived(self, uncached_tokens: int, now: float) -> None:
        bucket = round(_BUCKETS_PER_DOUBLING * math.log2(max(1, uncached_tokens)))
        period = self._now(now)
        period.num_arrivals += 1
        period.counts[bucket] += 1
        period.tokens[bucket] += max(1, uncached_tokens)
        self.last_arrival_s = now

    def served(self, event: Served, now: float) -> None:
        """Takes in an ending; one without a measured step changes nothing."""
        if event.output_tokens >= 1 and 0 < event.step_s < math.inf:
            period = self._now(now)
            period.num_served += 1
            period.output_tokens += event.output_tokens
            period.decode_s += event.output_tokens * event.step_s

    def busy(self, kind: ClusterKind, seconds: float, now: float) -> None:
        """Takes in time that nodes of ``kind`` spent on prompts."""
        busy_s = self._now(now).busy_s
        busy_s[kind] = busy_s.get(kind, 0.0) + seconds

    def measure(self, now: float, queued_tokens: int = 0) -> MeasuredDemand:
        """The window that ends now, with so many prompt tokens waiting."""
        window: list[_Period] = []
        num = 0
        for period in reversed(self._periods):
            if (
                window
                and num >= self._window_arrivals
                and now - window[-1].start_s >= self._window_s
            ):
                break
            window.append(period)
            num += period.num_arrivals
        span_s = now - window[-1].start_s if window else 0.0
        counts, tokens = Counter[int](), Counter[int]()
        for period in window:
            counts.update(period.counts)
            tokens.update(period.tokens)
        weights: dict[int, float] = {}
        for bucket, count in counts.items():
            length = round(tokens[bucket] / count)
            weights[length] = weights.get(length, 0.0) + count / num
        return MeasuredDemand(
            num_arrivals=num,
            arrival_rps=num / span_s if span_s > 0 else 0.0,
            weights=weights,
            output_tokens=self._mean_output_tokens(window),
            step_s=self._mean_step_s(window),
            prefill_busy_s={
                kind: sum(period.busy_s.get(kind, 0.0) for period in window) for kind in ClusterKind
            },
            backlog_tokens=queued_tokens - window[-1].queued_tokens if window else 0,
        )

    def _mean_output_tokens(self, window: list[_Period]) -> float:
        num = sum(period.num_served for period in window)
        prior = max(0, _PRIOR_REQUESTS - num)
        total = sum(period.output_tokens for period in window)
        return (prior * self._output_tokens + total) / (prior + num)

    def _mean_step_s(self, window: list[_Period]) -> float | None:
        steps = sum(period.output_tokens for period in window)
        if not steps:
            return self._decode_step_s
        measured_s = sum(period.decode_s for period in window) / steps
        return max(measured_s, self._decode_step_s or 0.0)

    def _now(self, now: float) -> _Period:
        if not self._periods:
            self.start_period(now)
        return self._periods[-1]


def _per_token(busy_s: float, tokens: float) -> PrefillSeconds | None:
    if not (busy_s > 0 and tokens > 0):
        return None
    return lambda num_tokens: num_tokens * busy_s / tokens
