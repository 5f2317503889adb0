"""The study's figures, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from _study import USUAL, Demand, Pair, Profile, pairs
from _study_paper import CaseRow, ProfileRow, case_rows, profile_rows
from _study_plan import PlanRow, plan_rows

LINKS_GBPS = (1, 2, 5, 10, 20, 50, 100, 200, 400)
PRICES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
WORTH = 1.05
"""A gain below 5 % is called none: the profiles are not that good."""
DEMANDS = {
    "paper, 256 out": Demand(output_tokens=256),
    "paper, 1,024": USUAL,
    "paper, 4,096": Demand(output_tokens=4096),
    "chat, 256": Demand(law="chat", output_tokens=256),
    "chat, 1,024": Demand(law="chat"),
    "agent, 1,024": Demand(law="agent"),
    "agent, 4,096": Demand(law="agent", output_tokens=4096),
    "paper, 20 tokens/s": Demand(slo_s=0.05),
    "paper, +0.35 s": Demand(overhead_s=0.35),
}


@attrs.frozen(kw_only=True)
class Peak:
    """Where one direction of a pair gains most over the better homogeneous fleet."""

    gain: float
    price: float


@attrs.frozen(kw_only=True)
class PairRow:
    """What one pair comes to for the usual demand."""

    pair: Pair
    prefill_speed: float
    decode_speed: float
    dear: Peak
    cheap: Peak
    window: tuple[float, float] | None
    unlimited: float
    by_price: tuple[tuple[float, bool], ...]
    by_link: tuple[float, ...]
    by_demand: dict[str, tuple[float, float, bool]]

    @property
    def dear_prefills(self) -> bool:
        return self.dear.gain > self.cheap.gain

    @property
    def peak(self) -> Peak:
        return self.dear if self.dear_prefills else self.cheap


@attrs.frozen(kw_only=True)
class Results:
    rows: tuple[PairRow, ...]
    profiles: tuple[ProfileRow, ...]
    cases: tuple[CaseRow, ...]
    plans: tuple[PlanRow, ...]

    def as_json(self) -> dict[str, object]:
        """Everything the tables show, for programs."""
        return {
            "pairs": [
                {
                    "pair": row.pair.name,
                    "prefill_speed": row.prefill_speed,
                    "decode_speed": row.decode_speed,
                    "peak_gain_dear_prefills": row.dear.gain,
                    "peak_gain_cheap_prefills": row.cheap.gain,
                    "peak_price": row.peak.price,
                    "price_window": row.window,
                    "gain_by_price": dict(zip(map(str, PRICES), row.by_price, strict=True)),
                    "gain_by_link_gbps": dict(zip(map(str, LINKS_GBPS), row.by_link, strict=True)),
                    "peak_by_demand": row.by_demand,
                }
                for row in self.rows
            ],
            "profiles": [attrs.asdict(row) for row in self.profiles],
            "paper_case": [attrs.asdict(row) for row in self.cases],
            "whole_instances": [attrs.asdict(row) for row in self.plans],
        }


def results(profiles: Sequence[Profile], *, quick: bool = False) -> Results:
    """Compute the study; ``quick`` takes a coarser grid of prices."""
    rows = tuple(_pair_row(pair, 1.1 if quick else 1.025) for pair in pairs(profiles))
    best: dict[str, PairRow] = {}
    for row in sorted(rows, key=lambda row: -row.peak.gain):
        best.setdefault(row.pair.dear.model, row)
    asked = [
        (row.pair.name, row.pair.ask(row.peak.price, 100e9, dear_prefills=row.dear_prefills))
        for row in best.values()
        if row.peak.gain >= WORTH
    ]
    return Results(
        rows=rows,
        profiles=tuple(profile_rows(profiles)),
        cases=tuple(case_rows(profiles)),
        plans=tuple(plan_rows(asked[:1] if quick else asked)),
    )


def price_grid(step: float) -> list[float]:
    prices = [1.0]
    while prices[-1] < 20:
        prices.append(prices[-1] * step)
    return prices


def _pair_row(pair: Pair, step: float) -> PairRow:
    prices, link = price_grid(step), 100e9
    peaks, window = peaks_of(pair, prices)
    best_dear = peaks[True].gain > peaks[False].gain
    prefill, decode = pair.speeds()
    return PairRow(
        pair=pair,
        prefill_speed=prefill,
        decode_speed=decode,
        dear=peaks[True],
        cheap=peaks[False],
        window=window,
        unlimited=max(pair.gain(price, math.inf)[0] for price in prices),
        by_price=tuple(pair.gain(price, link) for price in PRICES),
        by_link=tuple(
            pair.ask(peaks[best_dear].price, gbps * 1e9, dear_prefills=best_dear).gain()
            for gbps in LINKS_GBPS
        ),
        by_demand={
            name: max(_gain_at(pair, price, demand) for price in prices[::4])
            for name, demand in DEMANDS.items()
        },
    )


def peaks_of(
    pair: Pair, prices: Sequence[float]
) -> tuple[dict[bool, Peak], tuple[float, float] | None]:
    """The peak with the dear system prefilling or not, and the prices at which either pays."""
    gains = {
        dear: [pair.ask(price, 100e9, dear_prefills=dear).gain() for price in prices]
        for dear in (True, False)
    }
    worth = [p for p, *both in zip(prices, *gains.values(), strict=True) if max(both) >= WORTH]
    peaks = {dear: _peak(of, prices) for dear, of in gains.items()}
    return peaks, (worth[0], worth[-1]) if worth else None


def _gain_at(pair: Pair, price: float, demand: Demand) -> tuple[float, float, bool]:
    gain, dear = pair.gain(price, 100e9, demand)
    return gain, price, dear


def _peak(gains: Sequence[float], prices: Sequence[float]) -> Peak:
    gain, price = max(zip(gains, (-p for p in prices), strict=True))
    return Peak(gain=gain, price=-price)
