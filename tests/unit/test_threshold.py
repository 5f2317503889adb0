from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import attrs
import pytest

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError
from prfaas.policy import (
    LoadCurve,
    PrefillStage,
    ThresholdController,
    ThresholdSettings,
    lognormal_quantiles,
)
from prfaas.seams import NodeView
from prfaas.spec import preset
from prfaas.testing.router import StillView

SPEC = preset("paper-1t")
BAND = (128, 131_072)
GBPS = 10**9


def h200_prefill_s(num_tokens: int) -> float:
    """T_prefill of the case study's PRFAAS nodes: table 5, with two knots from table 6."""
    knots = [(1024, 0.443), (8192, 0.72), (16_000, 1.1), (32_000, 1.84), (64_000, 3.48)]
    for (left, low), (right, high) in pairwise([*knots, (130_000, 7.4)]):
        if num_tokens <= right or right == 130_000:
            return low + (high - low) * (num_tokens - left) / (right - left)
    raise AssertionError


def h20_prefill_s(num_tokens: int) -> float:
    """T_prefill of its PD nodes, fitted to table 6."""
    return 0.46 + 1.306e-4 * num_tokens + 2.855e-10 * num_tokens**2


def nodes(
    kind: ClusterKind, num: int, *, rate: float | None = None, role: Role = Role.PREFILL
) -> list[NodeView]:
    return [
        NodeView(
            node_id=NodeId(f"{kind.value}-{role.value}-{i}"),
            cluster_id=ClusterId(kind.value),
            kind=kind,
            role=role,
            epoch=1,
            num_active=0,
            queued_tokens=0,
            prefill_tokens_per_s=rate,
            decode_step_s=None,
        )
        for i in range(num)
    ]


def view(
    *,
    remote: float | None = 20_000.0,
    local: float | None = 8_000.0,
    num_remote: int = 4,
    num_local: int = 3,
    link_bps: float | None = 100.0 * GBPS,
) -> StillView:
    return StillView(
        views=[
            *nodes(ClusterKind.PRFAAS, num_remote, rate=remote),
            *nodes(ClusterKind.PD, num_local, rate=local),
            *nodes(ClusterKind.PD, 5, rate=1e9, role=Role.DECODE),
        ],
        rate_bps=link_bps,
    )


def case_study(num: int = 2000, *, link_bps: float | None = 100.0 * GBPS) -> LoadCurve:
    return LoadCurve(
        SPEC,
        dict.fromkeys(lognormal_quantiles(num=num), 1.0),
        remote=PrefillStage(num_nodes=4, prefill_s=h200_prefill_s),
        local=PrefillStage(num_nodes=3, prefill_s=h20_prefill_s),
        link_bps=link_bps,
    )


def max_request_rate(lengths: Sequence[int], t: int, link_bps: float) -> float:
    """Eq. 6 without its decode term, expectation form, spelled out from Eq. 3 and Eq. 4."""
    long = [n for n in lengths if n > t]
    short = [n for n in lengths if n <= t]
    p = len(long) / len(lengths)
    bounds = []
    if long:
        mean_s = sum(map(h200_prefill_s, long)) / len(long)
        mean_bits = 8 * sum(map(SPEC.kv_bytes, long)) / len(long)
        bounds.append(min(4 / mean_s, link_bps / mean_bits) / p)
    if short:
        bounds.append(3 / (sum(map(h20_prefill_s, short)) / len(short)) / (1 - p))
    return min(bounds)


@pytest.mark.parametrize("link_bps", [100e9, 10e9, 5e9, 1e9])
def test_the_least_load_is_the_greatest_rate_of_equation_6(link_bps: float) -> None:
    lengths = lognormal_quantiles(num=150)
    curve = case_study(150, link_bps=link_bps)
    rates = {t: max_request_rate(lengths, t, link_bps) for t in (BAND[0], *lengths)}
    best = curve.best(BAND)
    assert max_request_rate(lengths, best, link_bps) == max(rates.values())
    assert best == min(t for t, rate in rates.items() if rate == max(rates.values()))
    for t, rate in rates.items():
        assert len(set(lengths)) / curve.load_s(t) == pytest.approx(rate)


def test_the_case_study_is_reproduced_in_expectation_form() -> None:
    num = len(set(lognormal_quantiles(num=2000)))
    assert case_study().best(BAND) == pytest.approx(19_600, rel=0.01)
    assert num / case_study().load_s(case_study().best(BAND)) == pytest.approx(3.17, rel=0.005)
    slow = case_study(link_bps=5.0 * GBPS)
    assert num / slow.load_s(slow.best(BAND)) == pytest.approx(1.77, rel=0.01)
    assert num / slow.load_s(19_400) == pytest.approx(1.31, rel=0.01)


def test_the_prior_is_the_case_studys_distribution() -> None:
    quantiles = lognormal_quantiles(num=4000)
    assert sum(quantiles) / len(quantiles) == pytest.approx(27_486, rel=0.005)
    assert sorted(quantiles)[2000] == pytest.approx(19_199, rel=0.005)
    assert min(quantiles) >= 128
    assert max(quantiles) <= 131_072
    for options in ({"num": 0}, {"low": 9, "high": 9}, {"sigma": math.nan}, {"low": 0}):
        with pytest.raises(ConfigError, match="num is"):
            lognormal_quantiles(**options)
    with pytest.raises(ConfigError, match="no length of mu"):
        lognormal_quantiles(sigma=0.001, high=256)


def test_equal_loads_take_the_smallest_threshold() -> None:
    flat = PrefillStage(num_nodes=1, prefill_s=lambda _: 1.0)
    curve = LoadCurve(SPEC, {10: 1.0, 20: 1.0, 30: 1.0}, remote=flat, local=flat, link_bps=None)
    assert [curve.load_s(t) for t in (9, 10, 19, 20, 29, 30)] == [3, 2, 2, 2, 2, 3]
    assert curve.best((0, 100)) == 10
    assert curve.best((11, 100)) == 11
    assert curve.best((15, 17)) == 15
    assert curve.best((25, 100)) == 25
    assert curve.best((0, 5)) == 0


def test_a_cold_start_is_defined_and_inside_the_band() -> None:
    controller = ThresholdController(SPEC, band=(1000, 9000))
    assert controller.threshold_tokens == 9000
    controller = ThresholdController(SPEC, band=BAND)
    assert controller.threshold_tokens == pytest.approx(19_199, rel=0.03)
    unmeasured = view(remote=None, local=None, link_bps=None)
    # Nodes count as equally fast: 3 of 7 tokens prefill locally.
    t = controller.update(unmeasured, 0.0)
    short = sum(n for n in lognormal_quantiles() if n <= t)
    assert short / sum(lognormal_quantiles()) == pytest.approx(3 / 7, abs=0.03)
    controller.check()
    assert "t=" in repr(controller)
    # A link rate cannot be compared with prefill rates that nobody knows.
    with_link = ThresholdController(SPEC, band=BAND)
    assert with_link.update(view(remote=None, local=None, link_bps=1e3), 0.0) == t
    # Without any weight the prior still answers as long as nothing else can.
    bare = ThresholdController(SPEC, band=BAND, settings=ThresholdSettings(prior_weight=0))
    assert bare.update(unmeasured, 0.0) == t


def test_an_unmeasured_stage_is_taken_to_be_as_fast_as_the_other() -> None:
    thresholds = [
        ThresholdController(SPEC, band=BAND).update(view(remote=remote, local=local), 0.0)
        for remote, local in ((9e3, 9e3), (9e3, None), (None, 9e3), (math.nan, 9e3), (0.0, 9e3))
    ]
    assert len(set(thresholds)) == 1


def test_an_unmeasured_node_takes_the_mean_of_its_stage() -> None:
    equal = view(remote=30_000.0, num_remote=3)
    rates = (None, 20_000.0, 40_000.0)
    mixed = attrs.evolve(
        equal,
        views=[
            *(
                attrs.evolve(node, prefill_tokens_per_s=rate)
                for node, rate in zip(equal.views, rates, strict=False)
            ),
            *equal.views[3:],
        ],
    )
    one, two = (ThresholdController(SPEC, band=BAND) for _ in range(2))
    assert one.update(equal, 0.0) == two.update(mixed, 0.0)


def test_mixed_nodes_prefill_and_decode_nodes_do_not() -> None:
    separate = view(num_local=3)
    mixed = attrs.evolve(
        separate,
        views=[
            *separate.views[:4],
            *nodes(ClusterKind.PD, 3, rate=8_000.0, role=Role.MIXED),
        ],
    )
    one, two = (ThresholdController(SPEC, band=BAND) for _ in range(2))
    assert one.update(separate, 0.0) == two.update(mixed, 0.0)


def test_more_local_nodes_raise_t_and_more_remote_nodes_lower_it() -> None:
    def t(**options: int) -> int:
        return ThresholdController(SPEC, band=BAND).update(view(**options), 0.0)

    assert t(num_local=1) < t() < t(num_local=6)
    assert t(num_remote=8) < t() < t(num_remote=2)


@pytest.mark.parametrize("missing", ["num_remote", "num_local"])
def test_without_one_stage_t_stays(missing: str) -> None:
    controller = ThresholdController(SPEC, band=BAND)
    t = controller.update(view(), 0.0)
    assert controller.update(view(**{missing: 0}, link_bps=1e6), 5.0) == t
    assert controller.update(view(link_bps=1e6), 10.0) > t


def test_profiles_take_the_place_of_measured_rates() -> None:
    controller = ThresholdController(
        SPEC,
        band=BAND,
        prior_tokens=lognormal_quantiles(num=2000),
        remote_prefill_s=h200_prefill_s,
        local_prefill_s=h20_prefill_s,
    )
    t = controller.update(view(remote=1.0, local=1e9), 0.0)
    assert t == pytest.approx(case_study().best(BAND), rel=0.01)


def test_t_follows_the_lengths_that_are_seen() -> None:
    rng, controller = Random(2), ThresholdController(SPEC, band=BAND)
    cold = controller.update(view(), 0.0)
    steps = [cold]
    for second in range(1, 400):
        controller.observe(rng.randint(1000, 3000))
        steps.append(controller.update(view(), float(second)))
    assert 1000 < steps[-1] < 3000
    assert 3000 < steps[200] < cold, "the prior fades, it does not vanish at the first sample"


def test_only_recent_lengths_count() -> None:
    controller = ThresholdController(SPEC, band=BAND, settings=ThresholdSettings(window=100))
    for length in [*range(50_000, 50_500), *range(2000, 2100)]:
        controller.observe(length)
    assert 2000 <= controller.update(view(), 0.0) < 2100


def test_at_most_one_search_per_period() -> None:
    controller = ThresholdController(SPEC, band=BAND, settings=ThresholdSettings(period_s=2.0))
    t = controller.update(view(), 10.0)
    for _ in range(1000):
        controller.observe(3000)
    assert controller.update(view(), 11.9) == t
    assert controller.update(view(), 12.0) < t


def test_halving_the_link_raises_t_at_once_and_doubling_it_lowers_t_slowly() -> None:
    controller = ThresholdController(SPEC, band=BAND)
    fast = controller.update(view(link_bps=8.0 * GBPS), 0.0)
    slow = controller.update(view(link_bps=4.0 * GBPS), 0.1)
    assert slow > fast
    steps = [controller.update(view(link_bps=8.0 * GBPS), float(second)) for second in range(1, 12)]
    # A rise is believed when it was measured in three periods, and the back-off is 3 s old.
    assert steps[:2] == [slow, slow]
    falls = [slow, *steps[2:]]
    assert all(after >= int(0.8 * before) for before, after in pairwise(falls))
    assert steps[2:6] == sorted(steps[2:6], reverse=True)
    assert fast < steps[3] < slow
    assert steps[-1] == fast


def test_t_moves_only_for_a_gain_or_another_link() -> None:
    lengths = range(1000, 1100)

    def controller(**settings: float) -> ThresholdController:
        return ThresholdController(
            SPEC, band=BAND, prior_tokens=lengths, settings=ThresholdSettings(**settings)
        )

    def at_gbps(rate: float) -> StillView:
        return view(link_bps=rate * GBPS)

    eager, settled = controller(min_gain=0.0, min_errors=0.0), controller(min_errors=0.0)
    certain, stubborn = controller(), controller(min_gain=9.0)
    t = settled.update(at_gbps(40), 0.0)
    for other in (eager, certain, stubborn):
        assert other.update(at_gbps(40), 0.0) == t
    assert eager.update(at_gbps(39), 1.0) > t
    assert settled.update(at_gbps(39), 1.0) == t, "not worth a move"
    assert settled.update(at_gbps(34), 2.0) > t, "worth a move"
    assert certain.update(at_gbps(37), 1.0) == t, "no more than the luck of the sample"
    assert stubborn.update(at_gbps(37), 1.0) == t
    assert stubborn.update(at_gbps(34), 2.0) == t
    lowered = stubborn.update(at_gbps(32), 3.0)
    assert lowered > t, "the mean rate is more than a tenth off that at which t was set"


def test_a_first_link_rate_always_moves_t() -> None:
    controller = ThresholdController(
        SPEC, band=BAND, settings=ThresholdSettings(min_gain=1e6), prior_tokens=[9000, 90_000]
    )
    assert controller.update(view(link_bps=None), 0.0) == 9000
    assert controller.update(view(link_bps=1e6), 1.0) == 90_000


@pytest.mark.parametrize("silence", [None, 0.0, -1.0, math.nan, math.inf])
def test_silence_of_the_link_keeps_its_last_rate(silence: float | None) -> None:
    controller = ThresholdController(SPEC, band=BAND)
    t = controller.update(view(link_bps=1.0 * GBPS), 0.0)
    for second in range(1, 5):
        assert controller.update(view(link_bps=silence), float(second)) == t
    assumed = ThresholdController(SPEC, band=BAND, link_bps=1.0 * GBPS)
    assert assumed.update(view(link_bps=silence), 0.0) == t


def test_the_plans_band_holds_at_once() -> None:
    controller = ThresholdController(SPEC, band=BAND)
    controller.update(view(), 0.0)
    controller.set_band((5, 100))
    assert controller.threshold_tokens == 100
    assert controller.update(view(), 1.0) == 100
    controller.set_band((60_000, 60_000))
    assert controller.threshold_tokens == 60_000
    for band in ((-1, 5), (6, 5), (1, math.inf), (math.nan, 5)):
        with pytest.raises(ConfigError, match="band is"):
            controller.set_band(band)  # type: ignore[arg-type]
    assert controller.threshold_tokens == 60_000


@pytest.mark.parametrize("bad", [0, -1, None, math.nan, 12.5, True])
def test_lengths_are_whole_numbers(bad: object) -> None:
    controller = ThresholdController(SPEC, band=BAND)
    with pytest.raises(ConfigError, match="uncached_tokens is"):
        controller.observe(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prior_tokens is"):
        ThresholdController(SPEC, band=BAND, prior_tokens=[5, bad])  # type: ignore[list-item]


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="prior_tokens is"):
        ThresholdController(SPEC, band=BAND, prior_tokens=[])
    for rate in (0.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="link_bps is"):
            ThresholdController(SPEC, band=BAND, link_bps=rate)
    for name, bad in (
        ("window", 0),
        ("period_s", math.nan),
        ("min_gain", -0.1),
        ("max_fall", 0.0),
        ("link_change", 1.0),
    ):
        with pytest.raises(ConfigError, match=name):
            ThresholdSettings(**{name: bad})  # type: ignore[arg-type]
