"""The short-term controller: moves the threshold t with the link, the nodes and the lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import attrs

from prfaas.errors import ConfigError
from prfaas.policy.congestion import Congestion
from prfaas.policy.egress import SteadyClock
from prfaas.policy.feedback import QueueFeedback
from prfaas.policy.length_window import LengthWindow
from prfaas.policy.link_watch import LinkWatch, is_link_rate
from prfaas.policy.load_curve import LoadCurve, PrefillSeconds
from prfaas.policy.probe import Probe
from prfaas.policy.sides import SideMeter, Sides
from prfaas.policy.threshold_settings import ThresholdSettings, lognormal_quantiles
from prfaas.seams import ClusterView
from prfaas.spec import ModelSpec

_PROBE_QUANTILE = 0.9
"""A probe lets the requests through that are at least as long as this quantile."""


class ThresholdController:
    """Searches t on measured lengths, rates, node counts and link rate (short-term scheduling).

    Section 3.4.3 of arXiv 2604.15039 names the signals and leaves the reaction open. Here:

    - *Search*, once per period: the t that minimises `LoadCurve` over the uncached lengths of the
      last requests, mixed with prior quantiles until there are enough of them. At rest t moves
      only for a gain that is neither small nor the luck of the sample; once it moves it goes all
      the way.
    - *Back-off*, at once: a measured rate that falls; offered egress near the rate while the link
      is the longest queue and grows; packet loss. The last two plan with a smaller share of the
      rate, what was delivered lately if that is known, and each quiet period gives some back.
    - *Return*, slowly: t falls by `max_fall` per period and not within `quiet_s` of a back-off. A
      link that recovers is believed after three periods, so from t0 the optimum t1 is reached
      after at most 3 + quiet_s / period_s + log(t0 / t1) / -log(1 - max_fall) periods more than
      the share needs. Only the first search, and the first one in another band, jump.
    - *Feedback*: a side whose queue stays the longer one is weaker than the model says; see
      `QueueFeedback`.
    - *Probes*: where t is so high for the link's sake that nothing crosses, a few of the longest
      requests may, from time to time, and bring a new sample. While the link is down t is the
      band's top, with the same probes.

    t is a whole number inside the plan's band, whatever comes in. What counts as unmeasured (None,
    0, negative, not finite, and less than 1 bit/s):

    - a link rate: the last measured one stands; before the first, ``link_bps``; without that,
      egress is left out of account;
    - a node's prefill rate: it takes the mean of its stage, or of the other stage if nobody in its
      own was measured. While nothing at all is measured, nodes count as equally fast and egress,
      which cannot be compared with that, is left out of account.

    While a stage has no node, t stays where it is.

    Args:
        spec: gives S_kv.
        band: the plan's least and greatest t.
        prior_tokens: uncached lengths to expect before any are seen, equally likely.
        settings: how fast t may move.
        link_bps: B_out to assume until it is measured.
        remote_prefill_s, local_prefill_s: profiles of one node; None takes the measured rates.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        band: tuple[int, int],
        prior_tokens: Sequence[int] | None = None,
        settings: ThresholdSettings | None = None,
        link_bps: float | None = None,
        remote_prefill_s: PrefillSeconds | None = None,
        local_prefill_s: PrefillSeconds | None = None,
    ) -> None:
        if link_bps is not None and not is_link_rate(link_bps):
            raise ConfigError(
                f"link_bps is {link_bps}; it must be finite and at least 1 bit/s, or None if "
                "nobody knows it"
            )
        self._settings = chosen = settings or ThresholdSettings()
        prior = lognormal_quantiles() if prior_tokens is None else tuple(prior_tokens)
        self._lengths = LengthWindow(prior, size=chosen.window, prior_weight=chosen.prior_weight)
        size = 2 * (chosen.window + len(prior))
        self._spec = spec
        self._kv_bytes = lru_cache(maxsize=size)(spec.kv_bytes)
        self._side_meter = SideMeter(remote_prefill_s, local_prefill_s, size=size)
        self._clock = SteadyClock()
        self._watch = LinkWatch(
            rate_bps=link_bps, link_change=chosen.link_change, down_after_s=chosen.down_after_s
        )
        self._probe = Probe(
            after_s=chosen.probe_after_s,
            num_requests=chosen.probe_requests,
            num_bytes=chosen.probe_bytes,
        )
        self._feedback = QueueFeedback(
            step=chosen.correction_step, limit=chosen.max_correction, gap_s=chosen.queue_gap_s
        )
        self._congestion = Congestion(
            high_utilisation=chosen.high_utilisation,
            surge_s=chosen.surge_s,
            max_loss=chosen.max_loss,
            period_s=chosen.period_s,
        )
        self._next_search_s = self._hold_until_s = -math.inf
        self._local_queue_s = 0.0
        self._settled_bps: float | None = None
        self._is_moving = True
        self._may_jump = True
        self._resting_tokens = self._threshold_tokens = sorted(prior)[len(prior) // 2]
        self._band = (0, 0)
        self.set_band(band)

    def __repr__(self) -> str:
        low, high = self._band
        return (
            f"<ThresholdController t={self._threshold_tokens} in {low}..{high}, "
            f"{len(self._lengths)} lengths, link {self._watch.rate_bps}>"
        )

    @property
    def threshold_tokens(self) -> int:
        """t now. Before the first search, the median of the prior."""
        return self._threshold_tokens

    def set_band(self, band: tuple[int, int]) -> None:
        """Takes over the band of a new plan; t moves into it at once."""
        low, high = band
        if not (type(low) is int and type(high) is int and 0 <= low <= high):
            raise ConfigError(f"band is {band}; it needs whole numbers, 0 <= low <= high")
        self._may_jump = self._may_jump or band != self._band
        self._band = band
        self._resting_tokens = self._clip(self._resting_tokens)
        self._threshold_tokens = self._clip(self._threshold_tokens)

    def observe(self, uncached_tokens: int) -> None:
        """Records the uncached length of one request.

        Raises:
            ConfigError: not a whole number of at least 1.
        """
        self._lengths.observe(uncached_tokens)

    def observe_offered(self, num_bytes: int, now: float) -> None:
        """Records that a request was sent to a PRFAAS node, and what it will put on the link.

        Raises:
            ConfigError: not a whole number from 0 to 2**63.
        """
        self._watch.offer(num_bytes, self._clock.advance(now))
        self._probe.spend(num_bytes)

    def utilisation(self, now: float) -> float | None:
        """Offered egress over the link's rate; None as long as no rate is known."""
        return self._watch.utilisation(self._clock.read(now))

    def is_link_down(self, now: float) -> bool:
        """Whether the link carries nothing, by the last view, and no probe may cross either.

        While a probe is open this is False, so that a request longer than t goes and finds out.
        """
        now = self._clock.read(now)
        return self._watch.is_down(now) and not self._probe.is_open(now)

    def update(self, view: ClusterView, now: float) -> int:
        """Returns t, after a new search if the last one is a period old or the link got worse.

        A search costs O(n log n) in the lengths, and a look at each node while a profile is
        missing; what is left of an update costs no more than reading the link.
        """
        now = self._clock.advance(now)
        watch = self._watch
        num_samples = watch.num_samples
        must_rise = watch.see(view.link_bps(), view.link_backlog_bytes(), now)
        if watch.num_samples > num_samples and self._probe.is_open(now):
            self._probe.stop(now)
        must_rise |= self._congestion.relieves(watch, view.link_loss(), self._local_queue_s, now)
        is_due, is_down = now >= self._next_search_s, watch.is_down(now)
        if is_down:
            self._resting_tokens = self._band[1]
            self._may_jump = False
        if must_rise or is_down:
            self._hold_until_s = now + self._settings.quiet_s
            self._is_moving = True
        if is_due:
            self._next_search_s = now + self._settings.period_s
            self._congestion.tick(watch.backlog_s, is_quiet=now >= self._hold_until_s)
            watch.tick()
            self._side_meter.ask_nodes(view)
        if is_due or must_rise:
            self._search(view, now, is_due=is_due)
        self._threshold_tokens = self._published(now)
        return self._threshold_tokens

    def check(self) -> None:
        """Asserts the invariants."""
        low, high = self._band
        for t in (self._threshold_tokens, self._resting_tokens):
            assert type(t) is int, f"t is {t!r}"
            assert low <= t <= high, f"t is {t}, outside {low}..{high}"
        for part in (self._watch, self._congestion, self._probe, self._feedback, self._lengths):
            part.check()

    def _clip(self, tokens: int) -> int:
        low, high = self._band
        return min(high, max(low, tokens))

    def _published(self, now: float) -> int:
        """t as routers see it: the resting one, unless a probe is open."""
        t = self._resting_tokens
        if self._probe.is_open(now):
            t = min(t, self._clip(self._lengths.quantile(_PROBE_QUANTILE) - 1))
        return t

    def _search(self, view: ClusterView, now: float, *, is_due: bool) -> None:
        sides = self._side_meter.read(view, self._lengths.mean)
        if sides is None:
            return
        if is_due:
            self._heed_queues(sides)
        is_down = self._watch.is_down(now)
        if not is_down:
            curve = self._curve(sides, self._link_bps if sides.is_timed else None)
            self._move(curve, now, is_due=is_due)
        if is_due and self._probe.is_due(self._watch.silence_s(now), now):
            if is_down or self._is_worth_a_probe(sides):
                self._probe.start(now)
            else:
                self._probe.stop(now)

    @property
    def _link_bps(self) -> float | None:
        """B_out to plan with."""
        rate = self._watch.rate_bps
        return None if rate is None else rate * self._congestion.share

    def _heed_queues(self, sides: Sides) -> None:
        self._local_queue_s = sides.local_queue_s
        is_settled = sides.is_timed and not self._is_moving
        low, high = self._band
        self._is_moving |= self._feedback.tick(
            # What is sent away waits for its nodes or for the link, whichever is the longer.
            max(sides.remote_queue_s, self._watch.backlog_s),
            sides.local_queue_s,
            can_rise=is_settled and self._resting_tokens < min(high, self._lengths.longest),
            can_fall=is_settled and self._resting_tokens > low,
        )

    def _move(self, curve: LoadCurve, now: float, *, is_due: bool) -> None:
        t, best = self._resting_tokens, curve.best(self._band)
        if curve.load_s(t) <= curve.load_s(best):
            best = t
        if not (self._is_moving or self._may_jump or self._is_worth_a_move(curve, best)):
            return
        self._is_moving = True
        if best > t or self._may_jump:
            self._resting_tokens = best
        elif is_due and now >= self._hold_until_s:
            # Above the longest request every t is the same.
            lowered = int(min(t, self._lengths.longest) * (1 - self._settings.max_fall))
            self._resting_tokens = self._clip(max(best, lowered))
        self._may_jump = False
        if self._resting_tokens == best and self._congestion.share == 1:
            self._is_moving = False
            self._settled_bps = self._watch.rate_bps

    def _is_worth_a_move(self, curve: LoadCurve, best: int) -> bool:
        rate, settled = self._watch.rate_bps, self._settled_bps
        if rate is None or settled is None:
            if rate is not settled:
                return True
        elif abs(rate / settled - 1) > self._settings.link_change / 2:
            return True
        t, chosen = self._resting_tokens, self._settings
        return (
            curve.load_s(t) > curve.load_s(best) * (1 + chosen.min_gain)
            and abs(curve.imbalance(t)) > chosen.min_errors
        )

    def _is_worth_a_probe(self, sides: Sides) -> bool:
        """Whether nothing crosses, and something would if the link were better."""
        longest = self._lengths.longest
        if not sides.is_timed or self._resting_tokens < longest:
            return False
        return self._curve(sides, None).best(self._band) < longest

    def _curve(self, sides: Sides, link_bps: float | None) -> LoadCurve:
        worth = sides.local.num_nodes * self._feedback.factor
        return LoadCurve(
            self._spec,
            self._lengths.weights(),
            remote=sides.remote,
            local=attrs.evolve(sides.local, num_nodes=worth),
            link_bps=link_bps,
            kv_bytes=self._kv_bytes,
        )
