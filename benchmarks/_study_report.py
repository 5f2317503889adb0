"""The study's tables and docs/study.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from _study import BUDGET, Pair
from _study_cases import LAWS, law_mean, spec_of
from _study_paper import paper_pairs
from _study_results import (
    DEMANDS,
    LINKS_GBPS,
    PRICES,
    WORTH,
    PairRow,
    Results,
    peaks_of,
    price_grid,
)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def short_name(pair: Pair) -> str:
    weights = {"fp8_block": "FP8", "bfloat16": "BF16"}.get(pair.dear.weights, "MXFP4")
    return f"{pair.dear.model} {weights}"


def chips(pair: Pair) -> str:
    return f"{pair.dear.system}, {pair.cheap.system}"


def _gain(gain: float) -> str:
    return f"{gain:.2f}" if gain >= WORTH else "-"


def _who(dear: bool) -> str:
    return "dear" if dear else "cheap"


def pair_table(found: Results) -> str:
    """One row per pair: speeds, who should prefill, at which prices, and the roles at the peak."""
    rows = []
    for row in found.rows:
        ask = row.pair.ask(row.peak.price, 100e9, dear_prefills=row.dear_prefills)
        best = ask.mixed()
        pays = row.peak.gain >= WORTH
        rows.append(
            [
                short_name(row.pair),
                chips(row.pair),
                f"{row.prefill_speed:.2f}",
                f"{row.decode_speed:.2f}",
                _gain(row.dear.gain),
                _gain(row.cheap.gain),
                _gain(row.unlimited),
                "{:.2f}-{:.2f}".format(*row.window) if row.window else "none",
                f"{row.peak.price:.2f}" if pays else "",
                f"{0 if best.offload == 1 else best.threshold_tokens or 0:,.0f}" if pays else "",
                f"{best.offload:.0%}" if pays else "",
                f"{best.num_remote:.1f} / {best.num_prefill:.1f} / {best.num_decode:.1f}"
                if pays
                else "",
                f"{best.egress_bps / 1e9:.1f}" if pays else "",
            ]
        )
    header = (
        "model|dear, cheap|prefill|decode|dear prefills|cheap prefills|any link|prices that pay|"
        "best at|t|p|N_remote / N_p / N_d|Gbit/s"
    )
    return _table(header.split("|"), rows)


def _all_remote(row: PairRow) -> bool:
    ask = row.pair.ask(row.peak.price, 100e9, dear_prefills=row.dear_prefills)
    return ask.mixed().offload == 1


def price_table(found: Results) -> str:
    """Gain by price ratio at 100 Gbit/s, with the side that prefills."""
    rows = [
        [
            short_name(row.pair),
            chips(row.pair),
            *(f"{g:.2f} {_who(dear)}" if g >= WORTH else "-" for g, dear in row.by_price),
        ]
        for row in found.rows
    ]
    return _table(["model", "dear, cheap", *(f"{p:g}" for p in PRICES)], rows)


def link_table(found: Results) -> str:
    """Gain by link at the price ratio where the pair gains most, for the pairs that gain."""
    rows = [
        [
            short_name(row.pair),
            chips(row.pair),
            f"{row.peak.price:.2f}",
            *(f"{g:.2f}" for g in row.by_link),
            _break_even(row),
        ]
        for row in found.rows
        if row.peak.gain >= WORTH
    ]
    links = [f"{gbps:g}" for gbps in LINKS_GBPS]
    return _table(["model", "dear, cheap", "price", *links, "5 % from"], rows)


def _break_even(row: PairRow) -> str:
    """The narrowest link with a 5 % gain, in Gbit/s."""
    low, high = 0.01, 400.0
    while high / low > 1.005:
        middle = (low * high) ** 0.5
        ask = row.pair.ask(row.peak.price, middle * 1e9, dear_prefills=row.dear_prefills)
        low, high = (low, middle) if ask.gain() >= WORTH else (middle, high)
    return f"{high:.1f}"


def demand_table(found: Results) -> str:
    """Peak gain over all price ratios, and the ratio, for other lengths, outputs and SLO."""
    rows = [
        [
            short_name(row.pair),
            chips(row.pair),
            *(
                f"{gain:.2f} at {price:.1f}{', dear' if dear else ''}" if gain >= WORTH else "-"
                for gain, price, dear in row.by_demand.values()
            ),
        ]
        for row in found.rows
    ]
    return _table(["model", "dear, cheap", *DEMANDS], rows)


def local_only_table(found: Results) -> str:
    """The dear system prefills at price ratio 2: over the one baseline and over the other."""
    rows = []
    for row in found.rows:
        ask = row.pair.ask(2.0, 100e9)
        rate = ask.mixed().rate_rps
        over_local, over_remote = rate / ask.all_local_rps(), rate / ask.all_remote_rps()
        if over_local >= WORTH:
            rows.append(
                [short_name(row.pair), chips(row.pair), f"{over_local:.2f}", f"{over_remote:.2f}"]
            )
    return _table(["model", "dear, cheap", "over all cheap", "over all dear"], rows)


def size_table(found: Results) -> str:
    """The caches that cross."""
    models = dict.fromkeys(row.pair.dear.model for row in found.rows)
    rows = []
    for model in models:
        spec = spec_of(model)
        rows.append(
            [model, f"{spec.bytes_per_token:,}", f"{spec.fixed_bytes / 2**20:.1f}"]
            + [f"{spec.kv_bytes(law_mean(law)) * 8 / 1e9:.2f}" for law in LAWS]
        )
    laws = [f"Gbit at {law_mean(law):,} ({law})" for law in LAWS]
    return _table(["model", "B per token", "fixed MiB", *laws], rows)


def profile_table(found: Results) -> str:
    return _table(
        ["model", "tokens", "Table 3, s", "FP8, s", "BF16, s", "FP8 ratio", "Gbit/s printed, FP8"],
        [row.cells() for row in found.profiles],
    )


def case_table(found: Results) -> str:
    header = "model|prefill times|req/s|t|p|N_prfaas / N_p / N_d|egress Gbit/s|over 12 H20|"
    header += "at equal cost, H200 = 2 H20"
    return _table(header.split("|"), [row.cells() for row in found.cases])


def paper_pair_table() -> str:
    """The paper's pair under several guesses of what H200 decodes."""
    rows = []
    for pair in paper_pairs():
        peaks, window = peaks_of(pair, price_grid(1.025))
        at_2 = pair.ask(2.0, 100e9)
        rate = at_2.mixed().rate_rps
        rows.append(
            [
                f"{pair.speeds()[1]:.1f}",
                f"{pair.speeds()[0]:.2f}",
                _gain(peaks[True].gain),
                f"{peaks[True].price:.2f}",
                "{:.2f}-{:.2f}".format(*window) if window else "none",
                f"{rate / at_2.all_local_rps():.2f}",
                f"{rate / at_2.all_remote_rps():.2f}",
            ]
        )
    header = "H200 decodes|H200 prefills|most gained|at price|prices that pay|"
    header += "at price 2: over all H20|over all H200"
    return _table(header.split("|"), rows)


def plan_table(found: Results) -> str:
    header = "model: dear, cheap|price|whole instances req/s|in fractions|less|t|"
    header += "N_remote / N_p / N_d|Gbit/s|bound by"
    return _table(header.split("|"), [row.cells() for row in found.plans])


def report(found: Results) -> str:
    """docs/study.md."""
    text = Path(__file__).with_name("study_text.md").read_text(encoding="utf-8")
    usual = [row for row in found.rows if row.pair.dear is not row.pair.cheap]
    values = {
        "pairs": pair_table(found),
        "prices": price_table(found),
        "links": link_table(found),
        "demands": demand_table(found),
        "local_only": local_only_table(found),
        "sizes": size_table(found),
        "profiles": profile_table(found),
        "cases": case_table(found),
        "plans": plan_table(found),
        "paper_pair": paper_pair_table(),
        "budget": f"{BUDGET:g}",
        "num_pairs": str(len(usual)),
        "num_paying": str(sum(row.peak.gain >= WORTH for row in usual)),
        "num_all_remote": str(sum(row.peak.gain >= WORTH and _all_remote(row) for row in usual)),
        "num_dear": str(sum(row.dear.gain >= WORTH for row in usual)),
        "num_cheap": str(sum(row.cheap.gain >= WORTH for row in usual)),
        "num_none": str(sum(row.peak.gain < WORTH for row in usual)),
        "num_decode_faster": str(sum(row.decode_speed > row.prefill_speed for row in usual)),
    }
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", value.rstrip("\n"))
    return text
