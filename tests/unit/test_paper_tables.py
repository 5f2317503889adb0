"""The paper's figures from our model, and what we derived, each within its own tolerance."""

from __future__ import annotations

import math

import attrs
import pytest

from prfaas.capacity import (
    Deployment,
    EmpiricalLengths,
    RateForm,
    best_split,
    max_request_rate,
    stage_rates,
)
from prfaas.errors import ConfigError
from prfaas.paper import (
    ALL_LOCAL_TOKENS,
    ALL_REMOTE_TOKENS,
    CASE_STUDY,
    H20,
    H200,
    HOMOGENEOUS,
    LENGTHS,
    NAIVE,
    THRESHOLD_TOKENS,
    Cell,
    Kind,
    Printed,
    all_cells,
    implied_profile,
    max_error_pct,
    mean_ttft_s,
    p90_ttft_s,
    printed,
    solve,
)
from prfaas.paper.tables import MODELS, TABLE_3, TABLE_5_SECONDS, TABLE_5_SIZES
from prfaas.spec import preset


@pytest.fixture(scope="module")
def rates():
    return solve()


@pytest.fixture(scope="module")
def cells(rates):
    return {cell.name: cell for cell in all_cells(rates)}


# --- printed numbers and cells


@pytest.mark.parametrize(
    ("text", "step", "expected"),
    [
        ("3.24", None, Printed(value=3.24, half_width=0.005)),
        ("21.50", None, Printed(value=21.5, half_width=0.005)),
        ("3", None, Printed(value=3, half_width=0.5)),
        ("about 170", 10, Printed(value=170, half_width=5, loose=True)),
        ("< 100", None, Printed(value=100, half_width=0.5, upper_bound=True)),
    ],
)
def test_a_printed_number_knows_its_precision(text, step, expected):
    assert printed(text, step=step) == expected


def test_text_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="roughly 3"):
        printed("roughly 3")


def test_a_printed_number_holds_what_rounds_to_it():
    number = printed("3.24")
    assert [number.holds(x) for x in (3.2349, 3.235, 3.245, 3.2451)] == [False, True, True, False]
    assert [printed("< 100").holds(x) for x in (1, 99.9, 100)] == [True, True, False]


def cell(ours, text, kind=Kind.PREDICTED):
    return Cell(name="x", where="y", unit="z", ours=ours, printed=printed(text), kind=kind)


def test_the_largest_error_counts_only_cells_that_say_something():
    assert cell(3.1, "3.00").error_pct == pytest.approx(10 / 3)
    assert cell(2.9, "3.00").error_pct == pytest.approx(-10 / 3)
    silent = [
        cell(9.0, "3.00", Kind.INPUT),  # fed in
        cell(3.004, "3.00"),  # rounds to it
        cell(12.0, "about 13"),  # loose
        cell(50, "< 100"),
    ]
    assert max_error_pct(silent) == 0
    assert max_error_pct([*silent, cell(2.9, "3.00", Kind.FITTED)]) == pytest.approx(10 / 3)


def test_every_figure_that_counts_is_within_one_per_cent(cells):
    assert len(cells) == 79
    assert max_error_pct(cells.values()) <= 1.0
    assert all(abs(c.error_pct) < 7 for c in cells.values())


def test_the_kinds_are_honest(cells):
    kinds = {kind: {c.name for c in cells.values() if c.kind is kind} for kind in Kind}
    assert {c.name for c in cells.values() if c.where == "Table 3"} <= kinds[Kind.INPUT]
    assert len(kinds[Kind.INPUT]) == 24 + 4 + 1
    table_6 = {c.name for c in cells.values() if c.where == "Table 6"}
    assert table_6 & kinds[Kind.PREDICTED] == {
        "PrfaaS-PD: Theta_pd-d",
        "homogeneous: Theta_pd-d",
        "homogeneous: best N_p",
        "homogeneous: best N_d",
    }


ROUNDED = (
    *("S_kv, 1K", "S_kv, 8K", "S_kv, 32K"),
    *("PrfaaS-PD: Theta_pd-p", "PrfaaS-PD: Theta_pd-d", "PrfaaS-PD: best N_p"),
    *("PrfaaS-PD: best N_d", "homogeneous: best N_p", "homogeneous: best N_d"),
    *("homogeneous: Theta_pd-p", "homogeneous: Lambda_max", "homogeneous: mean TTFT"),
    *("naive: Theta_prfaas", "naive: Theta_pd-d", "naive: Lambda_max", "naive: mean TTFT"),
    *("mean length", "mean offloaded length", "offloaded share", "saved prefill instances"),
    *("against naive", "naive against homogeneous", "mean TTFT against homogeneous"),
    *("P90 TTFT against homogeneous", "at equal cost", "7:1 layers", "Ring memory saving"),
    *("MiMo against MiniMax", "Qwen3.5 against Qwen3", "MiniMax latency"),
    *("512 GPUs, MiniMax-M2.5, 32K", "512 GPUs, Qwen3-235B, 32K", "512 GPUs, Ring-2.5-1T, 32K"),
    *("512 GPUs, Ring-2.5-1T, 128K", "10,000 GPUs, Ring-2.5-1T, 128K"),
)


@pytest.mark.parametrize("name", ROUNDED)
def test_figures_that_come_out_as_printed(cells, name):
    assert cells[name].inside_rounding


@pytest.mark.parametrize(
    ("name", "error_pct"),
    [
        ("KV throughput, 1K", 0.75),
        ("KV throughput, 8K", 0.25),
        ("KV throughput, 32K", 0.22),
        ("KV throughput, 128K", 0.22),
        ("PrfaaS-PD: Theta_prfaas", -0.96),
        ("PrfaaS-PD: Lambda_max", -0.43),
        ("PrfaaS-PD: mean TTFT", 0.48),
        ("PrfaaS-PD: P90 TTFT", -0.30),
        ("homogeneous: Theta_pd-d", -0.27),
        ("homogeneous: P90 TTFT", -0.07),
        ("naive: P90 TTFT", -0.30),
        ("threshold", 0.76),
        ("egress", -5.77),
        ("against homogeneous", -0.72),
    ],
)
def test_figures_that_do_not_come_out_as_printed(cells, name, error_pct):
    assert not cells[name].inside_rounding
    assert cells[name].error_pct == pytest.approx(error_pct, abs=0.01)


# --- the constants and where they come from


def test_the_size_law_fits_table_5_only_with_its_lengths():
    """32K as 32,768 tokens would be 12 MiB off, 128K as 131,072 tokens 18 MiB."""
    model = CASE_STUDY.model
    for tokens, size in zip((1024, 8192, 32_000, 130_000), TABLE_5_SIZES.values(), strict=True):
        assert model.kv_bytes(tokens) / 2**20 == pytest.approx(size.value, abs=0.06)
    assert model.kv_bytes(32_768) / 2**20 - TABLE_5_SIZES["32K"].value > 12
    assert model.kv_bytes(131_072) / 2**20 - TABLE_5_SIZES["128K"].value > 17


def test_the_h200_profile_passes_through_table_5():
    published = zip((1024, 8192, 32_000, 130_000), TABLE_5_SECONDS.values(), strict=True)
    assert all(H200.prefill_s(tokens) == seconds.value for tokens, seconds in published)
    assert (H200.prefill_s(16_000), H200.prefill_s(64_000)) == (1.10, 3.48)


def test_the_h20_profile_against_its_golden_values():
    golden = {1024: 0.59, 8192: 1.55, 16_000: 2.62, 32_000: 4.93, 64_000: 9.99, 130_000: 22.3}
    ratios = {1024: 1.35, 8192: 2.15, 16_000: 2.39, 32_000: 2.68, 64_000: 2.87, 130_000: 3.0}
    for tokens, seconds in golden.items():
        assert H20.prefill_s(tokens) == pytest.approx(seconds, abs=0.05 if seconds > 20 else 0.006)
        ratio = H20.prefill_s(tokens) / H200.prefill_s(tokens)
        assert ratio == pytest.approx(ratios[tokens], abs=0.02)
    assert H20.prefill_s(10_224) == pytest.approx(3 / 1.64, rel=0.003)
    assert H20.prefill_s(27_486) == pytest.approx(9 / 2.11, rel=0.001)


def test_the_threshold_counts_in_thousands_and_the_upper_bound_in_1024s():
    assert LENGTHS.share_above(THRESHOLD_TOKENS) == pytest.approx(0.496, abs=5e-4)
    assert LENGTHS.share_above(19.4 * 1024) == pytest.approx(0.486, abs=5e-4)
    shorter = attrs.evolve(LENGTHS, max_tokens=128_000)
    assert shorter.share_above(THRESHOLD_TOKENS) < 0.4955  # would be printed as 49.5 %


def test_the_decode_batch_follows_from_the_naive_rate():
    assert 6.25 * CASE_STUDY.decode_step_s * CASE_STUDY.output_tokens / 8 == CASE_STUDY.batch_size
    assert 1 / CASE_STUDY.decode_step_s == 40


def test_implied_times_of_table_3():
    golden = {
        "kimi-linear-48b": (0.35, 0.38, 0.62, 1.79),
        "mimo-v2-flash": (0.48, 0.60, 1.31, 5.13),
        "qwen3.5-397b": (0.43, 0.57, 1.14, 4.48),
        "ring-2.5-1t": (0.34, 0.69, 2.05, 9.8),
        "minimax-m2.5": (0.42, 0.51, 1.09, 5.5),
        "qwen3-235b": (0.38, 0.56, 1.48, 9.3),
    }
    assert set(golden) == set(TABLE_3) == set(MODELS)
    for name, seconds in golden.items():
        knots = implied_profile(name).knots
        assert [s for _, s in knots] == pytest.approx(list(seconds), rel=0.012)
        for (tokens, implied_s), rate in zip(knots, TABLE_3[name].values(), strict=True):
            gbits = preset(name).kv_bytes(tokens) * 8 / 1e9
            assert gbits / implied_s == pytest.approx(rate.value)


# --- times to first token


@pytest.mark.parametrize(
    ("deployment", "threshold_tokens", "mean_s", "p90_s"),
    [
        (CASE_STUDY, THRESHOLD_TOKENS, 2.2306, 3.4994),
        (HOMOGENEOUS, ALL_LOCAL_TOKENS, 4.4415, 9.7228),
        (NAIVE, ALL_REMOTE_TOKENS, 1.7396, 3.4994),
    ],
)
def test_times_to_first_token_against_a_fine_sum(deployment, threshold_tokens, mean_s, p90_s):
    """A midpoint sum over 20,000 lengths knows nothing of Simpson, halves or quantiles."""
    num, low, high = 20_000, math.log(128), math.log(131_072)
    samples = []
    for i in range(num):
        x = low + (i + 0.5) * (high - low) / num
        weight = math.exp(-((x - 9.9) ** 2) / 2)
        samples.append((deployment.service_ttft_s(math.exp(x), threshold_tokens), weight))
    total = sum(weight for _, weight in samples)
    fine_mean_s = sum(ttft_s * weight for ttft_s, weight in samples) / total
    assert mean_ttft_s(deployment, LENGTHS, threshold_tokens) == pytest.approx(
        fine_mean_s, rel=5e-4
    )
    left = 0.9 * total
    for fine_p90_s, weight in sorted(samples):  # noqa: B007
        left -= weight
        if left <= 0:
            break
    assert p90_ttft_s(deployment, LENGTHS, threshold_tokens) == pytest.approx(fine_p90_s, rel=5e-4)
    assert (fine_mean_s, fine_p90_s) == pytest.approx((mean_s, p90_s), rel=2e-4)


def test_quantiles_of_length():
    assert LENGTHS.quantile(0.5) == pytest.approx(19_199, abs=1)
    assert LENGTHS.quantile(0.9) == pytest.approx(62_410, abs=1)
    assert LENGTHS.quantile(0.99) == pytest.approx(115_417, abs=1)
    observed = EmpiricalLengths(tuple(range(1, 11)))
    assert observed.quantile(0.9) == pytest.approx(9)


def test_a_p90_that_lengths_do_not_order_is_refused():
    with pytest.raises(ConfigError, match="lower the threshold"):
        p90_ttft_s(CASE_STUDY, LENGTHS, 60_000)


# --- optima in both forms, whole and shared


@pytest.mark.parametrize(
    ("form", "prfaas", "homogeneous", "naive", "fractional", "mixed", "num_prefill", "threshold"),
    [
        (RateForm.MEAN, 3.226, 2.110, 2.452, 3.386, 2.164, 3.66, 19_547),
        (RateForm.EXPECTATION, 3.174, 2.026, 2.371, 3.348, 2.096, 3.71, 19_726),
    ],
)
def test_the_optima(form, prfaas, homogeneous, naive, fractional, mixed, num_prefill, threshold):
    rates = solve(form)
    found = (rates.prfaas_rps, rates.homogeneous_rps, rates.naive_rps)
    assert found == pytest.approx((prfaas, homogeneous, naive), abs=6e-4)
    shared = (rates.fractional_rps, rates.homogeneous_fractional_rps)
    assert shared == pytest.approx((fractional, mixed), abs=6e-4)
    assert rates.num_prefill == 3
    assert rates.fractional_num_prefill == pytest.approx(num_prefill, abs=0.011)
    assert rates.threshold_tokens == pytest.approx(threshold, abs=3)


@pytest.mark.parametrize(
    ("form", "rate", "num_prefill"),
    [(RateForm.MEAN, 3.3835, 3.65), (RateForm.EXPECTATION, 3.3452, 3.70)],
)
def test_the_optimum_in_twentieths_of_an_instance(form, rate, num_prefill):
    split, point = best_split(CASE_STUDY, LENGTHS, form, granularity=0.05)
    assert point.max_rate.requests_per_s == pytest.approx(rate, abs=1e-3)
    assert split.num_prefill == pytest.approx(num_prefill)
    scanned = max(
        max_request_rate(stage_rates(split, LENGTHS, t, form)).requests_per_s
        for t in range(20_000, 24_000, 50)
    )
    assert point.max_rate.requests_per_s == pytest.approx(scanned, rel=2e-3)
    assert point.max_rate.requests_per_s >= scanned


def test_the_ratios(rates):
    assert rates.vs_homogeneous == pytest.approx(3.2262 / 2.1100, abs=1e-3)
    assert rates.vs_naive == pytest.approx(3.2262 / 2.4522, abs=1e-3)
    assert rates.fractional_gain == pytest.approx(1.0495, abs=1e-3)
    # 32 H200 at twice the price of an H20, beside 64 H20, cost as much as 128 H20.
    assert rates.equal_cost == pytest.approx(rates.vs_homogeneous * 96 / 128)
    assert rates.egress_bps == pytest.approx(12.25e9, rel=1e-3)


def test_the_deployments_have_the_papers_gpus():
    def num_gpus(deployment: Deployment) -> tuple[float, float]:
        return 8 * deployment.num_prfaas, 8 * (deployment.num_prefill + deployment.num_decode)

    assert num_gpus(CASE_STUDY) == num_gpus(NAIVE) == (32, 64)
    assert num_gpus(HOMOGENEOUS) == (0, 96)
