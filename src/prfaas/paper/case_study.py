"""The case study solved by our model: the cells of Table 6, figure 5 and section 4."""

from __future__ import annotations

import attrs

from prfaas.capacity import (
    Deployment,
    RateForm,
    best_split,
    best_threshold,
    max_request_rate,
    stage_rates,
)
from prfaas.paper.cells import Cell, Kind
from prfaas.paper.profiles import (
    ALL_LOCAL_TOKENS,
    ALL_REMOTE_TOKENS,
    CASE_STUDY,
    H20_PRICE,
    H200_PRICE,
    HOMOGENEOUS,
    LENGTHS,
    NAIVE,
    THRESHOLD_TOKENS,
)
from prfaas.paper.tables import CLAIMS, TABLE_6, Printed
from prfaas.paper.ttft import mean_ttft_s, p90_ttft_s

FRACTION = 0.01
"""Step of N_p in the fractional optimum, in instances."""

_DEPLOYMENTS = (
    ("PrfaaS-PD", CASE_STUDY, THRESHOLD_TOKENS),
    ("homogeneous", HOMOGENEOUS, ALL_LOCAL_TOKENS),
    ("naive", NAIVE, ALL_REMOTE_TOKENS),
)


@attrs.frozen(kw_only=True)
class Rates:
    """Lambda_max in requests/s of one form; PrfaaS-PD with its own best threshold and split.

    Attributes:
        fractional_rps, homogeneous_fractional_rps: instances may serve both roles in shares.
        num_prefill, fractional_num_prefill: the N_p of the two optima of PrfaaS-PD.
    """

    prfaas_rps: float
    homogeneous_rps: float
    naive_rps: float
    fractional_rps: float
    homogeneous_fractional_rps: float
    num_prefill: float
    fractional_num_prefill: float
    threshold_tokens: float
    egress_bps: float

    @property
    def vs_homogeneous(self) -> float:
        return self.prfaas_rps / self.homogeneous_rps

    @property
    def vs_naive(self) -> float:
        return self.prfaas_rps / self.naive_rps

    @property
    def fractional_gain(self) -> float:
        return self.fractional_rps / self.prfaas_rps

    @property
    def equal_cost(self) -> float:
        """``vs_homogeneous`` if the homogeneous deployment had the same money, not GPU count."""
        return self.vs_homogeneous * _price(HOMOGENEOUS) / _price(CASE_STUDY)


def _price(deployment: Deployment) -> float:
    """Relative price of all instances; each has 8 GPUs."""
    num_local = deployment.num_prefill + deployment.num_decode
    return deployment.num_prfaas * H200_PRICE + num_local * H20_PRICE


def solve(form: RateForm = RateForm.MEAN) -> Rates:
    """Lambda_max of the three deployments, and of the two that have roles to share, in fractions.

    The naive and the homogeneous thresholds are given; the homogeneous split is searched too.
    """
    split, point = best_split(CASE_STUDY, LENGTHS, form)
    _, homogeneous = best_split(HOMOGENEOUS, LENGTHS, form)
    fractional_split, fractional = best_split(CASE_STUDY, LENGTHS, form, granularity=FRACTION)
    _, mixed = best_split(HOMOGENEOUS, LENGTHS, form, granularity=FRACTION)
    naive = max_request_rate(stage_rates(NAIVE, LENGTHS, ALL_REMOTE_TOKENS, form))
    return Rates(
        prfaas_rps=point.max_rate.requests_per_s,
        homogeneous_rps=homogeneous.max_rate.requests_per_s,
        naive_rps=naive.requests_per_s,
        fractional_rps=fractional.max_rate.requests_per_s,
        homogeneous_fractional_rps=mixed.max_rate.requests_per_s,
        num_prefill=split.num_prefill,
        fractional_num_prefill=fractional_split.num_prefill,
        threshold_tokens=point.threshold_tokens,
        egress_bps=point.max_rate.egress_bps,
    )


def table_6_cells(rates: Rates) -> list[Cell]:
    """Stage rates and times at the published thresholds, Lambda_max at our own best ones."""
    max_rates = {
        "PrfaaS-PD": rates.prfaas_rps,
        "homogeneous": rates.homogeneous_rps,
        "naive": rates.naive_rps,
    }
    fitted_decode = "BS_max = 20 was chosen for it"
    cells = []
    for name, deployment, threshold in _DEPLOYMENTS:
        column = TABLE_6[name]
        at_t = stage_rates(deployment, LENGTHS, threshold)
        mean_s = mean_ttft_s(deployment, LENGTHS, threshold)
        p90_s = p90_ttft_s(deployment, LENGTHS, threshold)
        decode = Kind.FITTED if name == "naive" else Kind.PREDICTED
        rows: list[tuple[str, str, float | None, Printed | None, Kind, str]] = [
            ("Theta_prfaas", "req/s", at_t.prfaas_rps, column.prfaas_rps, Kind.FITTED, ""),
            ("Theta_pd-p", "req/s", at_t.prefill_rps, column.prefill_rps, Kind.FITTED, ""),
            (
                "Theta_pd-d",
                "req/s",
                at_t.decode_rps,
                column.decode_rps,
                decode,
                fitted_decode if name == "naive" else "BS_max of the naive deployment",
            ),
            (
                "Lambda_max",
                "req/s",
                max_rates[name],
                column.max_rate_rps,
                Kind.FITTED,
                "Eq. 6 on fitted rates",
            ),
            ("mean TTFT", "s", mean_s, column.mean_ttft_s, Kind.FITTED, ""),
            ("P90 TTFT", "s", p90_s, column.p90_ttft_s, Kind.FITTED, ""),
        ]
        cells += [
            Cell(
                name=f"{name}: {metric}",
                where="Table 6",
                unit=unit,
                ours=ours,
                printed=printed,
                kind=kind,
                note=note,
            )
            for metric, unit, ours, printed, kind, note in rows
            if ours is not None and printed is not None
        ]
    return cells + _split_cells()


def _split_cells() -> list[Cell]:
    """The best splits of 8 and of 12 local instances: what the search finds, not what we set."""
    cells = []
    for name, deployment in (("PrfaaS-PD", CASE_STUDY), ("homogeneous", HOMOGENEOUS)):
        split, _ = best_split(deployment, LENGTHS)
        column = TABLE_6[name]
        for metric, ours, printed in (
            ("N_p", split.num_prefill, column.num_prefill),
            ("N_d", split.num_decode, column.num_decode),
        ):
            if printed is not None:
                cells.append(
                    Cell(
                        name=f"{name}: best {metric}",
                        where="Table 6, figure 5a" if name == "PrfaaS-PD" else "Table 6",
                        unit="instances",
                        ours=ours,
                        printed=printed,
                        kind=Kind.PREDICTED,
                        note="Eq. 8, of every split",
                    )
                )
    return cells


def claim_cells(rates: Rates) -> list[Cell]:
    """What section 4 says in words."""
    at_t = LENGTHS.share_above(THRESHOLD_TOKENS)
    l_long = LENGTHS.mean_above(THRESHOLD_TOKENS) or 0.0
    mean = LENGTHS.mean_below(ALL_LOCAL_TOKENS) or 0.0
    best_t = best_threshold(CASE_STUDY, LENGTHS).threshold_tokens
    times = {
        metric: quantity(CASE_STUDY, LENGTHS, THRESHOLD_TOKENS)
        / quantity(HOMOGENEOUS, LENGTHS, ALL_LOCAL_TOKENS)
        for metric, quantity in (("mean TTFT", mean_ttft_s), ("P90 TTFT", p90_ttft_s))
    }
    saved = HOMOGENEOUS.num_prefill - CASE_STUDY.num_prfaas - rates.num_prefill
    predicted, fitted = Kind.PREDICTED, Kind.FITTED
    arithmetic = "follows from fitted figures"
    rows: tuple[tuple[str, str, float, Kind, str], ...] = (
        ("mean length", "Ki tokens", mean / 1024, predicted, "the printed log-normal law"),
        ("mean offloaded length", "Ki tokens", l_long / 1024, predicted, "E[L | L > t]"),
        ("offloaded share", "%", 100 * at_t, fitted, "what 128K and 19.4K mean was chosen for it"),
        ("threshold", "1000 tokens", best_t / 1000, fitted, "Eq. 7 on rates fitted at 19.4K"),
        ("egress", "Gbps", rates.egress_bps / 1e9, predicted, "Lambda p S_kv(l_long)"),
        ("saved prefill instances", "instances", saved, predicted, "9 against 4 + 3"),
        ("against homogeneous", "x", rates.vs_homogeneous, fitted, arithmetic),
        ("against naive", "x", rates.vs_naive, fitted, arithmetic),
        (
            "naive against homogeneous",
            "x",
            rates.naive_rps / rates.homogeneous_rps,
            fitted,
            arithmetic,
        ),
        ("mean TTFT against homogeneous", "x", times["mean TTFT"], fitted, arithmetic),
        ("P90 TTFT against homogeneous", "x", times["P90 TTFT"], fitted, arithmetic),
        ("at equal cost", "x", rates.equal_cost, fitted, "the price ratio 2.0 was chosen for it"),
    )
    places = {"threshold": "Table 6, figure 5b"}
    return [
        Cell(
            name=name,
            where=places.get(name, "section 4"),
            unit=unit,
            ours=ours,
            printed=CLAIMS[name],
            kind=kind,
            note=note,
        )
        for name, unit, ours, kind, note in rows
    ]
