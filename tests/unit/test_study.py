"""The study's arithmetic against the planner, and its document against its data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from _study import BUDGET, PROFILES, USUAL, Demand, Pair, Profile, Question, load, pairs
from _study import prefill_up_to as up_to
from _study_cases import CASES, LAWS, law_mean, spec_of
from _study_paper import case_rows, paper_pairs, printed_profile, profile_rows
from _study_plan import plan_rows
from _study_report import case_table, profile_table, size_table
from _study_results import Results, peaks_of, price_grid
from prfaas.capacity import PrefillProfile
from study import _as_text

DOCUMENT = Path(__file__).parents[2] / "docs" / "study.md"
ALL = load()


def pair_of(model: str, weights: str, dear: str, cheap: str) -> Pair:
    def one(system: str) -> Profile:
        return next(p for p in ALL if (p.model, p.weights, p.system) == (model, weights, system))

    return Pair(dear=one(dear), cheap=one(cheap))


HYBRID = pair_of("qwen3.5-397b", "fp8_block", "B200", "H100")
DENSE = pair_of("minimax-m2.5", "fp8_block", "B200", "H100")


def cost_of(question: Question) -> float:
    best = question.mixed()
    return question.instance_price * best.num_remote + best.num_prefill + best.num_decode


def test_every_instance_of_the_study_was_measured() -> None:
    asked = {(c.model, c.weights or "as published", s.name) for c in CASES for s in c.systems}
    assert {(p.model, p.weights, p.system) for p in ALL} == asked
    assert all(p.batch(law) > 0 for p in ALL for law in LAWS)


def test_the_data_name_their_source() -> None:
    data = json.loads(PROFILES.read_text())
    assert data["source"].startswith("aiconfigurator 0.12.")
    assert all(row["backend"].startswith("sglang ") for row in data["instances"])


def test_new_data_are_one_instance_per_line() -> None:
    measured = {"source": "x", "instances": [{"model": "a", "n": [1]}, {"model": "b"}]}
    text = _as_text(measured)
    assert json.loads(text) == measured
    assert [line.strip()[:9] for line in text.splitlines()].count('{"model":') == 2


def test_sizes_of_the_models_that_have_no_preset() -> None:
    assert spec_of("qwen3.5-35b").bytes_per_token == 10 * 2 * 2 * 256 * 2
    assert spec_of("kimi-k3").bytes_per_token == 24 * (512 + 64) * 2
    assert spec_of("kimi-k3").fixed_bytes == 69 * 96 * 128 * (128 * 4 + 3 * 3 * 2)


@pytest.mark.parametrize("dear_prefills", [True, False])
@pytest.mark.parametrize("pair", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_the_planner_agrees(pair: Pair, dear_prefills: bool) -> None:
    """With many instances, rounding to whole ones and the grid of t cost less than 3 %."""
    question = pair.ask(1.3, 50e9, dear_prefills=dear_prefills)
    large = attrs.evolve(question, price=0.9 * question.price, budget=question.budget)
    (row,) = plan_rows([("pair", large)], scale=12)
    assert 0.97 < row.rate_rps / row.fractional_rps < 1.001


@given(price=st.floats(0.5, 6), gbps=st.floats(0.5, 400), dear=st.booleans())
def test_no_fleet_exceeds_its_budget_or_its_link(price: float, gbps: float, dear: bool) -> None:
    question = HYBRID.ask(price, gbps * 1e9, dear_prefills=dear)
    best = question.mixed()
    assert cost_of(question) <= question.budget * (1 + 1e-9)
    assert best.egress_bps <= question.link_bps * (1 + 1e-9)
    assert best.rate_rps >= question.all_local_rps() * (1 - 1e-9)


@given(price=st.floats(0.5, 6), gbps=st.floats(0.5, 200), more=st.floats(1, 4))
def test_a_wider_link_never_carries_less(price: float, gbps: float, more: float) -> None:
    narrow, wide = (HYBRID.ask(price, g * 1e9).mixed() for g in (gbps, gbps * more))
    assert wide.rate_rps >= narrow.rate_rps


def test_an_idle_budget_is_the_link_s_fault() -> None:
    question = HYBRID.ask(0.1, 1e9)
    assert question.mixed().egress_bps == pytest.approx(1e9, rel=0.05)
    assert cost_of(HYBRID.ask(1.2, 400e9)) == pytest.approx(BUDGET)


def test_both_directions_have_the_same_homogeneous_fleets() -> None:
    one = HYBRID.ask(1.7, 100e9)
    other = HYBRID.ask(1.7, 100e9, dear_prefills=False)
    assert one.all_local_rps() == pytest.approx(other.all_remote_rps())
    assert one.all_remote_rps() == pytest.approx(other.all_local_rps())


def test_both_directions_agree_where_instances_differ_in_size() -> None:
    kimi = pair_of("kimi-k3", "as published", "B300", "GB200")
    one, other = (kimi.ask(1.7, 1e11, dear_prefills=dear) for dear in (True, False))
    assert one.all_remote_rps() == pytest.approx(other.all_local_rps())


def test_equal_hardware_gains_nothing() -> None:
    control = next(pair for pair in pairs(ALL) if pair.dear is pair.cheap)
    assert all(control.gain(price, math.inf)[0] <= 1 + 1e-9 for price in (1.0, 1.5, 3.0))


def test_the_gain_is_over_the_better_fleet() -> None:
    question = HYBRID.ask(0.5, 100e9)
    assert question.all_remote_rps() > question.all_local_rps()
    assert question.gain() == question.mixed().rate_rps / question.all_remote_rps()


def test_prefill_goes_to_the_chip_that_is_less_behind_in_it() -> None:
    prefill, decode = HYBRID.speeds()
    assert prefill < decode
    gain, dear_prefills = HYBRID.gain(1.3, 100e9)
    assert gain > 1.1
    assert not dear_prefills
    paper = next(paper_pairs())
    prefill, decode = paper.speeds()
    assert prefill > decode
    assert peaks_of(paper, price_grid(1.1))[0][True].gain > 1.2


def test_what_the_findings_count() -> None:
    unequal = [pair for pair in pairs(ALL) if pair.dear is not pair.cheap]
    speeds = [pair.speeds() for pair in unequal]
    assert (sum(decode > prefill for prefill, decode in speeds), len(speeds)) == (30, 32)
    asked = [pair.ask(2.0, 100e9) for pair in unequal]
    flattered = [one for one in asked if one.mixed().rate_rps >= 1.05 * one.all_local_rps()]
    assert len(flattered) == 9
    assert all(one.mixed().rate_rps < one.all_remote_rps() for one in flattered)


def test_an_overhead_is_paid_once_per_request() -> None:
    plain, slow = (up_to(HYBRID.dear, Demand(overhead_s=s)) for s in (0.0, 0.35))
    assert slow[-1] - plain[-1] == pytest.approx(0.35)
    assert slow[0] == plain[0] == 0.0


def test_batches_between_the_measured_ones() -> None:
    steps = ((1, 0.010), (11, 0.020), (21, 0.040))
    profile = Profile(
        model="m",
        weights="w",
        system="s",
        num_gpus=8,
        prefill=PrefillProfile(((0, 1.0), (1, 1.0))),
        decode={"paper": steps},
    )
    found = [profile.batch("paper", slo) for slo in (0.009, 0.010, 0.0151, 0.030, 0.05)]
    assert found == [0, 1, 6, 16, 21]
    assert profile.step_s("paper", 0.030) == pytest.approx(0.030)
    assert profile.decode_s(Demand(slo_s=0.030, output_tokens=100)) == pytest.approx(3 / 16)
    assert profile.decode_s(Demand(slo_s=0.009)) == math.inf


def test_more_output_needs_more_decode() -> None:
    one, four = (HYBRID.cheap.decode_s(Demand(output_tokens=n)) for n in (1024, 4096))
    assert four == pytest.approx(4 * one)
    assert HYBRID.cheap.decode_s(USUAL) == one


def test_times_behind_the_printed_throughput() -> None:
    printed = printed_profile("qwen3.5-397b")
    assert printed.prefill_s(1024) == pytest.approx(0.433, abs=1e-3)
    assert printed.prefill_s(130_000) == pytest.approx(4.48, abs=1e-2)


def test_the_laws_have_the_means_that_decode_was_measured_at() -> None:
    assert {name: law_mean(name) for name in LAWS} == {
        "paper": 27_486,
        "chat": 6_070,
        "agent": 64_784,
    }


def test_the_document_is_that_of_the_data() -> None:
    found = Results(
        rows=(), profiles=tuple(profile_rows(ALL)), cases=tuple(case_rows(ALL)), plans=()
    )
    text = DOCUMENT.read_text()
    assert "{{" not in text
    assert profile_table(found) in text
    assert case_table(found).strip() in text
    assert size_table(found).splitlines()[0] in text
