"""The controller's invariants under any order of calls, signals and clocks."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prfaas.core import ClusterKind
from prfaas.errors import ConfigError
from prfaas.policy import ThresholdController, ThresholdSettings
from prfaas.spec import preset
from signals import SignalView, h20_prefill_s, h200_prefill_s

SPEC = preset("paper-1t")
odd = st.sampled_from([None, 0.0, -1.0, math.nan, math.inf, -math.inf, 1e-300, 1e300])
bands = st.tuples(st.integers(0, 200_000), st.integers(0, 10**9)).map(sorted).map(tuple)
lengths = st.one_of(st.integers(1, 200_000), st.sampled_from([1, 10**9, 10**15]))
counts = st.sampled_from([0, 0, 1, 3, 10_000])


class ThresholdMachine(RuleBasedStateMachine):
    """t is a whole number inside the band; it rises at once and falls by bounded steps."""

    @initialize(
        band=bands,
        prior=st.lists(lengths, min_size=1, max_size=5),
        link_bps=st.sampled_from([None, 1e6, 1e10]),
        has_profiles=st.booleans(),
    )
    def start(
        self, band: tuple[int, int], prior: list[int], link_bps: float | None, has_profiles: bool
    ) -> None:
        self.settings = ThresholdSettings(window=8, prior_weight=4, probe_requests=2)
        self.controller = ThresholdController(
            SPEC,
            band=band,
            prior_tokens=prior,
            settings=self.settings,
            link_bps=link_bps,
            remote_prefill_s=h200_prefill_s if has_profiles else abs,
            local_prefill_s=h20_prefill_s,
        )
        self.band = band
        self.now = 0.0
        self.view = SignalView(link_bps=link_bps)

    @rule(band=bands)
    def plan(self, band: tuple[int, int]) -> None:
        self.controller.set_band(band)
        self.band = band

    @rule(length=lengths, times=st.integers(1, 10))
    def finish(self, length: int, times: int) -> None:
        for _ in range(times):
            self.controller.observe(length)

    @rule(num_bytes=st.one_of(st.integers(0, 10**10), st.just(2**63)), is_lost=st.booleans())
    def offload(self, num_bytes: int, is_lost: bool) -> None:
        self.controller.observe_offered(num_bytes, self.now)
        if not is_lost:
            self.view.backlog_bytes += num_bytes

    @rule(bad=st.sampled_from([-1, 0.5, None, math.nan, True]))
    def offer_nonsense(self, bad: object) -> None:
        with pytest.raises(ConfigError):
            self.controller.observe_offered(bad, self.now)  # type: ignore[arg-type]

    @rule(rate=st.one_of(odd, st.floats(1e5, 1e12)))
    def measure(self, rate: float | None) -> None:
        self.view.rate_bps = rate

    @rule(share=st.floats(0, 1))
    def land(self, share: float) -> None:
        self.view.backlog_bytes = int(self.view.backlog_bytes * share)

    @rule(loss=st.one_of(odd, st.floats(0, 1)))
    def lose(self, loss: float | None) -> None:
        self.view.loss = loss

    @rule(remote=counts, local=counts)
    def come_and_go(self, remote: int, local: int) -> None:
        self.view.num_nodes = {ClusterKind.PRFAAS: remote, ClusterKind.PD: local}

    @rule(remote=st.integers(0, 10**9), local=st.integers(0, 10**9))
    def queue(self, remote: int, local: int) -> None:
        self.view.queued_tokens = {ClusterKind.PRFAAS: remote, ClusterKind.PD: local}

    @rule(step_s=st.sampled_from([0.0, 0.01, 1.0, 1.0, 10.0, 30.0, 1e6, -0.1, -100.0]))
    def update(self, step_s: float) -> None:
        self.now += step_s
        t = self.controller.update(self.view, self.now)
        assert t == self.controller.threshold_tokens
        if self.controller.is_link_down(self.now):
            assert t == self.band[1]

    @rule(now=st.sampled_from([math.nan, math.inf, -math.inf]))
    def update_at_no_time(self, now: float) -> None:
        self.controller.update(self.view, now)
        self.controller.observe_offered(1, now)

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.update(1.0)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "controller"):
            self.controller.check()
            t, (low, high) = self.controller.threshold_tokens, self.band
            assert type(t) is int
            assert low <= t <= high
            utilisation = self.controller.utilisation(self.now)
            assert utilisation is None or 0 <= utilisation < math.inf


ThresholdMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None
)
test_threshold_machine = ThresholdMachine.TestCase
