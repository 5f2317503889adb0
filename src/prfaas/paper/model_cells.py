"""Cells about cache sizes and KV throughput: Tables 3 and 5, section 2 and figure 2."""

from __future__ import annotations

from prfaas.capacity import PrefillProfile, kv_throughput_bps
from prfaas.paper.cells import Cell, Kind
from prfaas.paper.profiles import CASE_STUDY, H200
from prfaas.paper.tables import (
    BANDWIDTH_EXAMPLES,
    CLAIMS,
    LENGTHS_PRINTED,
    MODELS,
    TABLE_3,
    TABLE_5_RATES,
    TABLE_5_SECONDS,
    TABLE_5_SIZES,
    Printed,
)
from prfaas.spec import ModelSpec, preset

_GIGA = 1e9
_MIB = 2**20
_GPUS_PER_INSTANCE = 8


def implied_profile(name: str) -> PrefillProfile:
    """T_prefill of a model of Table 3, which prints no times: S_kv of our preset over its rate."""
    model = preset(name)
    return PrefillProfile(
        tuple(
            (tokens, 8 * model.kv_bytes(tokens) / (TABLE_3[name][label].value * _GIGA))
            for label, tokens in LENGTHS_PRINTED.items()
        )
    )


def egress_gbps(num_gpus: int, name: str, label: str) -> float:
    """Eq. 2 with a printed rate: what ``num_gpus`` H200 send if all prefill this length."""
    return num_gpus / _GPUS_PER_INSTANCE * TABLE_3[name][label].value


def table_3_cells() -> list[Cell]:
    """Every rate of Table 3; circular, since the times behind ours come from the same rates."""
    cells = []
    for name, title in MODELS.items():
        model, profile = preset(name), implied_profile(name)
        for label, tokens in LENGTHS_PRINTED.items():
            cells.append(
                Cell(
                    name=f"{title}, {label}",
                    where="Table 3",
                    unit="Gbps",
                    ours=kv_throughput_bps(model, profile, tokens) / _GIGA,
                    printed=TABLE_3[name][label],
                    kind=Kind.INPUT,
                    note="the times are S_kv / rate",
                )
            )
    return cells


def table_5_cells() -> list[Cell]:
    """Sizes by the layer law, times as printed, and Eq. 1 from the two."""
    model = CASE_STUDY.model
    cells = []
    for label, tokens in LENGTHS_PRINTED.items():
        rows: list[tuple[str, str, float, Printed, Kind, str]] = [
            (
                "S_kv",
                "MiB",
                model.kv_bytes(tokens) / _MIB,
                TABLE_5_SIZES[label],
                Kind.FITTED,
                "15 MLA and 42 KDA layers and the lengths were chosen for the four sizes",
            ),
            ("T_prefill", "s", H200.prefill_s(tokens), TABLE_5_SECONDS[label], Kind.INPUT, ""),
            (
                "KV throughput",
                "Gbps",
                kv_throughput_bps(model, H200, tokens) / _GIGA,
                TABLE_5_RATES[label],
                Kind.PREDICTED,
                "Eq. 1; the printed time allows 1.1 % at 1K",
            ),
        ]
        cells += [
            Cell(
                name=f"{name}, {label}",
                where="Table 5",
                unit=unit,
                ours=ours,
                printed=printed,
                kind=kind,
                note=note,
            )
            for name, unit, ours, printed, kind, note in rows
        ]
    return cells


def bandwidth_cells() -> list[Cell]:
    """The egress examples of section 2.3: Eq. 2 on rates of Table 3."""
    return [
        Cell(
            name=f"{num_gpus:,} GPUs, {MODELS[name]}, {label}",
            where="section 2.3",
            unit="Gbps",
            ours=egress_gbps(num_gpus, name, label),
            printed=printed,
            kind=Kind.PREDICTED,
            note="Eq. 2 on Table 3",
        )
        for num_gpus, name, label, printed in BANDWIDTH_EXAMPLES
    ]


def _full_attention_saving(model: ModelSpec) -> float:
    """How much more each token would cost if every layer were a full-attention layer."""
    return model.as_full_attention().bytes_per_token / model.bytes_per_token


def model_claim_cells() -> list[Cell]:
    """What section 2 and figure 2 say about the models."""

    def rate_ratio(dense: str, hybrid: str) -> float:
        return TABLE_3[dense]["32K"].value / TABLE_3[hybrid]["32K"].value

    layers = _full_attention_saving(preset("ring-2.5-1t"))
    mla = CLAIMS["MLA against GQA"].value
    on_rates = "the paper's own rates at 32K"
    rows = (
        (
            "MiMo against MiniMax",
            "x",
            rate_ratio("minimax-m2.5", "mimo-v2-flash"),
            Kind.PREDICTED,
            on_rates,
        ),
        (
            "Qwen3.5 against Qwen3",
            "x",
            rate_ratio("qwen3-235b", "qwen3.5-397b"),
            Kind.PREDICTED,
            on_rates,
        ),
        ("MLA against GQA", "x", mla, Kind.INPUT, "which GQA is meant is not said"),
        ("7:1 layers", "x", layers, Kind.PREDICTED, "bytes per token, all layers MLA against 1:7"),
        ("Ring memory saving", "x", mla * layers, Kind.PREDICTED, "4.5 as printed times our 8"),
        (
            "MiniMax latency",
            "s",
            implied_profile("minimax-m2.5").prefill_s(LENGTHS_PRINTED["128K"]),
            Kind.PREDICTED,
            "S_kv of our preset over Table 3; theirs is read off figure 2",
        ),
    )
    return [
        Cell(
            name=name,
            where="figure 2" if unit == "s" else "section 2",
            unit=unit,
            ours=ours,
            printed=CLAIMS[name],
            kind=kind,
            note=note,
        )
        for name, unit, ours, kind, note in rows
    ]
