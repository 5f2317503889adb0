"""``prfaas reproduce``: the joint fit, the JSON object, the tables and the charts."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from prfaas.cli import charts, reproduce
from prfaas.cli.fit import joint_fit, solve
from prfaas.errors import ConfigError, MissingExtra, PrfaasError
from prfaas.paper import fit

pytest.importorskip("numpy")


def call(*words):
    parser = argparse.ArgumentParser()
    reproduce.add_arguments(parser)
    return reproduce.run(parser.parse_args(words))


@pytest.fixture(scope="module")
def fitted():
    return joint_fit()


# --- the fit


def test_the_start_knows_nothing_of_the_answer():
    start = fit.start()
    assert start[:2] == pytest.approx((1.087, 3.656), abs=1e-3)  # straight lines of Table 5
    a, b, c = start[2:]
    for tokens, seconds in ((1024, 0.44), (32_000, 1.84), (130_000, 7.40)):
        assert a + b * tokens + c * tokens**2 == pytest.approx(2.5 * seconds)
    figures = fit.figures(start)
    errors = [abs(figures[name] / theirs - 1) for name, theirs in fit.PUBLISHED.items()]
    assert max(errors) > 0.1


def test_the_fit_lands_at_the_profile_in_use(fitted):
    assert fitted.parameters == pytest.approx(fit.DERIVED, rel=1e-3)
    assert fitted.largest_error_pct == pytest.approx(0.944, abs=0.005)
    assert fitted.num_steps < 10


def test_no_neighbour_of_the_solution_is_better(fitted):
    def loss(parameters):
        figures = fit.figures(tuple(parameters))
        return sum((figures[name] / theirs - 1) ** 2 for name, theirs in fit.PUBLISHED.items())

    least = loss(fitted.parameters)
    for at in range(5):
        for factor in (0.998, 1.002):
            parameters = list(fitted.parameters)
            parameters[at] *= factor
            assert loss(parameters) > least


def test_the_figures_of_the_derived_profile():
    golden = {
        "PrfaaS-PD rate of PrfaaS": 1.595,
        "PrfaaS-PD rate of PD-P": 1.644,
        "homogeneous rate of PD-P": 2.110,
        "naive rate of PrfaaS": 2.452,
        "PrfaaS-PD mean TTFT": 2.231,
        "PrfaaS-PD P90 TTFT": 3.499,
        "homogeneous mean TTFT": 4.442,
        "homogeneous P90 TTFT": 9.724,
        "naive mean TTFT": 1.740,
        "naive P90 TTFT": 3.499,
    }
    assert list(fit.figures(fit.DERIVED)) == list(fit.PUBLISHED)
    assert fit.figures(fit.DERIVED) == pytest.approx(golden, abs=0.0015)


LEFT_OUT_PCT = {
    "PrfaaS-PD rate of PrfaaS": -1.10,
    "PrfaaS-PD rate of PD-P": 1.22,
    "homogeneous rate of PD-P": -3.94,
    "naive rate of PrfaaS": 0.19,
    "PrfaaS-PD mean TTFT": 0.58,
    "PrfaaS-PD P90 TTFT": -1.84,
    "homogeneous mean TTFT": 0.08,
    "homogeneous P90 TTFT": -0.15,
    "naive mean TTFT": -0.05,
    "naive P90 TTFT": -1.84,
}


def test_each_figure_predicted_from_the_others(fitted):
    found = {left.name: left.error_pct for left in fitted.leave_one_out}
    assert found == pytest.approx(LEFT_OUT_PCT, abs=0.02)
    for left in fitted.leave_one_out:
        assert left.theirs == fit.PUBLISHED[left.name]
        assert left.error_pct == pytest.approx(100 * (left.ours / left.theirs - 1))


def test_what_the_ten_figures_pin(fitted):
    """Five parameters from ten figures; one figure alone bends the H20 curve."""
    leverages = {left.name: left.leverage for left in fitted.leave_one_out}
    assert sum(leverages.values()) == pytest.approx(5, abs=1e-6)
    assert max(leverages, key=leverages.__getitem__) == "homogeneous rate of PD-P"
    assert leverages["homogeneous rate of PD-P"] > 0.99
    assert fitted.condition == pytest.approx(52, abs=1)
    conditions = {left.name: left.condition for left in fitted.leave_one_out}
    assert conditions.pop("homogeneous rate of PD-P") > 1000
    assert max(conditions.values()) < 60
    pinned = dict(zip(fit.PARAMETERS, fitted.pinned_by, strict=True))
    assert set(pinned["H200 T(64,000)"]) == fit.TWINS
    assert pinned["H20 c"][0] == "homogeneous rate of PD-P"
    deviations = dict(zip(fit.PARAMETERS, fitted.std_errors_pct, strict=True))
    assert deviations["H20 c"] == pytest.approx(15, abs=1)
    assert deviations["H200 T(64,000)"] == pytest.approx(0.36, abs=0.02)


def test_a_fit_that_does_not_converge_says_so(monkeypatch):
    monkeypatch.setattr("prfaas.cli.fit._MAX_STEPS", 2)
    with pytest.raises(PrfaasError, match="did not converge in 2 steps"):
        solve(tuple(fit.PUBLISHED), fit.start())


@pytest.mark.parametrize(
    "begin",
    [(0.8, 7.0, 0.92, 3.9e-5, 8.6e-10), (1.8, 3.2, 0.02, 1.4e-4, 1.4e-11)],
)
def test_the_fit_forgets_where_it_began(begin):
    parameters, _ = solve(tuple(fit.PUBLISHED), begin)
    assert parameters == pytest.approx(fit.DERIVED, rel=1e-3)


# --- the command


def test_json(capsys):
    assert call("--json", "--quick") == 0
    result = json.loads(capsys.readouterr().out)
    assert {"name", "where", "ours", "theirs", "error_pct", "kind", "inside_rounding"} <= set(
        result["cells"][0]
    )
    assert {cell["kind"] for cell in result["cells"]} == {"input", "fitted", "predicted"}
    counted = [cell["error_pct"] for cell in result["cells"] if cell["counts"]]
    assert result["max_error_pct"] == max(map(abs, counted)) <= 1.0
    golden = {
        "lambda_prfaas": 3.226,
        "lambda_homogeneous": 2.110,
        "lambda_naive": 2.452,
        "lambda_fractional": 3.386,
        "lambda_homogeneous_fractional": 2.164,
        "lambda_prfaas_expectation": 3.174,
        "lambda_homogeneous_expectation": 2.026,
        "lambda_naive_expectation": 2.371,
        "lambda_fractional_expectation": 3.348,
        "lambda_homogeneous_fractional_expectation": 2.096,
    }
    assert {name: result[name] for name in golden} == pytest.approx(golden, abs=6e-4)
    assert result["ratios"] == pytest.approx(
        {"vs_homogeneous": 1.529, "vs_naive": 1.316, "fractional_gain": 1.049, "equal_cost": 1.147},
        abs=6e-4,
    )
    assert (result["fit"], result["leave_one_out"]) == (None, [])
    assert [len(result["curves"][name]) for name in ("figure_5a", "figure_5b")] == [7, 8]
    assert set(result["machine"]) == {"cpu", "cores", "system", "python"}


def test_json_with_the_fit(capsys, monkeypatch, fitted):
    monkeypatch.setattr(reproduce, "joint_fit", lambda: fitted)
    assert call("--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in result["leave_one_out"]] == list(fit.PUBLISHED)
    assert [row["fitted"] for row in result["fit"]["parameters"]] == list(fitted.parameters)
    assert [row["used"] for row in result["fit"]["parameters"]] == list(fit.DERIVED)


def test_tables_show_ours_beside_theirs(capsys, monkeypatch, fitted):
    monkeypatch.setattr(reproduce, "joint_fit", lambda: fitted)
    assert call() == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for expected in (
        "PrfaaS-PD: Lambda_max Table 6 req/s 3.226 3.24 -0.43 fitted",
        "homogeneous: best N_p Table 6 instances 9 9 +0.00 predicted as printed",
        "egress section 4 Gbps 12.25 ~13 -5.77 predicted loose",
        "512 GPUs, Ring-2.5-1T, 128K section 2.3 Gbps 93.44 < 100 -6.56 predicted as printed",
        "PrfaaS-PD, shared instances 3.386 3.348",
        "MiniMax-M2.5 0.42 0.51 1.08 5.52",
        "3 19547 3.226 3.217",
        "H20 c 2.8546e-10 2.855e-10 15.4 homogeneous rate of PD-P, homogeneous P90 TTFT",
        "homogeneous rate of PD-P 2.027 2.11 -3.94 1.00 1080",
        "largest error of the others, loose ones aside: 0.96 %",
    ):
        assert expected.split() in lines, expected


def test_a_figure_too_far_off_fails_the_comparison(capsys, monkeypatch):
    monkeypatch.setattr(reproduce, "LIMIT_PCT", 0.9)
    assert call("--json", "--quick") == 1
    assert json.loads(capsys.readouterr().out)["max_error_pct"] > 0.9


def test_without_numpy_the_rest_is_still_compared(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert call("--json") == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["fit"] is None
    assert "numpy is not installed" in output.err


def test_charts(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "charts"
    assert call("--quick", "--json", "--png", str(folder)) == 0
    output = capsys.readouterr()
    json.loads(output.out)
    for name in ("fig5a.png", "fig5b.png", "table3.png"):
        written = (folder / name).read_bytes()
        assert written.startswith(b"\x89PNG")
        assert len(written) > 10_000
        assert f"wrote {folder / name}" in output.err


def test_charts_need_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match="matplotlib"):
        charts.write_charts(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    pytest.importorskip("matplotlib")
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ConfigError, match="name another folder"):
        call("--quick", "--png", str(taken))
