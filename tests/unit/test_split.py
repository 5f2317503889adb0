"""Splits of a cluster's nodes against the case study of arXiv 2604.15039, in expectation form."""

from __future__ import annotations

import math

import attrs
import pytest

from fluid import LENGTHS, OUTPUT, SLOTS, STEP_S, split_model
from prfaas.policy import LoadCurve, PrefillStage


def whole(num_prefill: int) -> float:
    return split_model().at(num_prefill, 8 - num_prefill).sustainable_rps


def test_the_case_studys_best_whole_split() -> None:
    best = split_model().best_whole(8)
    assert (best.num_prefill, best.num_decode) == (3, 5)
    assert best.sustainable_rps == pytest.approx(3.174, rel=0.003)
    assert best.threshold_tokens == pytest.approx(19_500, rel=0.02)
    assert best.binding in ("remote", "prefill")
    assert split_model().at(4, 4).binding == "decode"
    # Decode of N_d nodes: N_d * 20 / (25.6 s).
    assert whole(4) == pytest.approx(4 * SLOTS / (STEP_S * OUTPUT))


def test_the_case_studys_best_fractional_split() -> None:
    found = split_model().fractional("slices", 8)
    assert found is not None
    assert found.num_others == 3
    assert 3.65 <= found.load.num_prefill <= 3.75
    assert found.load.sustainable_rps == pytest.approx(3.34, rel=0.005)
    load = found.load
    assert load.prefill_s == pytest.approx(load.decode_s, rel=0.01)
    assert load.gain_over(split_model().best_whole(8)) == pytest.approx(0.053, abs=0.003)


@pytest.mark.parametrize("num_nodes", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("output_tokens", [40, 300, 1024, 9000])
def test_bisection_finds_what_trying_all_finds(num_nodes: int, output_tokens: int) -> None:
    model = split_model(LENGTHS[::8], output_tokens)
    best = min(model.at(n, num_nodes - n).worst_s for n in range(1, num_nodes))
    assert model.best_whole(num_nodes).worst_s == best


@pytest.mark.parametrize("band", [(0, 131_072), (0, 9_000), (25_000, 60_000), (7, 7), (0, 0)])
@pytest.mark.parametrize("link_bps", [None, 1e9, 1e11])
@pytest.mark.parametrize("num_prefill", [0.3, 1, 3.7, 8, 50])
def test_t_is_that_of_the_load_curve(
    band: tuple[int, int], link_bps: float | None, num_prefill: float
) -> None:
    model = attrs.evolve(split_model(LENGTHS[::4]), band=band, link_bps=link_bps)
    curve = LoadCurve(
        model.spec,
        model.weights,
        remote=PrefillStage(num_nodes=4, prefill_s=model.remote_prefill_s),
        local=PrefillStage(num_nodes=num_prefill, prefill_s=model.local_prefill_s),
        link_bps=link_bps,
    )
    load = model.at(num_prefill, 1)
    assert load.threshold_tokens == curve.best(band)
    assert load.produce_s == pytest.approx(curve.load_s(curve.best(band)))


def test_mixed_nodes_count_half_for_each_stage() -> None:
    model = split_model()
    best = model.best_whole(6, num_mixed=2)
    assert best == model.at(best.num_prefill, best.num_decode)
    assert best.num_prefill + best.num_decode == 8
    assert best.num_prefill % 1 == 0
    assert model.best_whole(2, num_mixed=1).num_prefill == 1.5


def test_slices_pay_for_their_drains() -> None:
    model = attrs.evolve(split_model(), slice_loss=0.1)
    found = model.fractional("slices", 8)
    assert found is not None
    assert found.load.num_prefill + found.load.num_decode == pytest.approx(7.9)
    free = split_model().fractional("slices", 8)
    assert free is not None
    assert found.load.sustainable_rps < free.load.sustainable_rps


def test_a_mixed_node_pays_in_decode_slots() -> None:
    model = attrs.evolve(split_model(), decode_base_share=0.5)
    found = model.fractional("mixed", 8)
    assert found is not None
    assert found.load.num_prefill == pytest.approx(3 + found.share)
    assert found.load.num_decode == pytest.approx(5 - 2 * found.share)
    assert found.load.sustainable_rps > whole(3)
    costly = attrs.evolve(model, decode_base_share=0.9).fractional("mixed", 8)
    assert costly is not None
    assert costly.load.sustainable_rps < found.load.sustainable_rps


def test_a_fraction_needs_a_node_for_each_role_besides() -> None:
    assert split_model().fractional("slices", 2) is None
    for output_tokens in (1, 100_000):
        found = split_model(output_tokens=output_tokens).fractional("slices", 3)
        assert found is not None
        assert found.num_others == 1


def test_other_prefill_nodes_can_be_fixed() -> None:
    found = split_model().fractional("slices", 8, 5)
    assert found is not None
    assert (found.num_others, found.share) == (5, pytest.approx(0.1, abs=1e-3))


def test_without_remote_nodes_everything_is_local() -> None:
    load = split_model(num_remote=0).at(9, 3)
    assert load.threshold_tokens is None
    assert (load.remote_s, load.egress_s) == (0, 0)
    # The homogeneous deployment: 2.026 in expectation form.
    assert load.sustainable_rps == pytest.approx(2.026, rel=0.005)


def test_a_slow_link_is_a_stage() -> None:
    load = attrs.evolve(split_model(), link_bps=1e9).at(3, 5)
    assert load.binding in ("egress", "prefill")
    assert load.egress_s == pytest.approx(load.prefill_s, rel=0.1)
    assert load.sustainable_rps < 2


def test_no_decode_nodes_sustain_nothing() -> None:
    load = split_model().at(8, 0)
    assert (load.decode_s, load.sustainable_rps) == (math.inf, 0)
    assert whole(3) > 0
    assert split_model().at(3, 5).gain_over(load) == 0


def test_prefill_tokens_per_second_are_those_of_the_short_lengths() -> None:
    model = split_model([1_000, 50_000])
    assert model.tokens_per_prefill_s(1_000) == pytest.approx(1_000 / model.local_prefill_s(1_000))
    assert model.tokens_per_prefill_s(None) > model.tokens_per_prefill_s(1_000)
    assert model.tokens_per_prefill_s(10) == model.tokens_per_prefill_s(None)
