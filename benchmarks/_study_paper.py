"""The measured profiles beside Table 3 of arXiv 2604.15039, and its case study with each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from _study import SLO_STEP_S, Pair, Profile
from _study_cases import spec_of
from prfaas.capacity import Deployment, PrefillProfile, RateForm, best_split
from prfaas.paper.profiles import CASE_STUDY, H20, H20_PRICE, H200, H200_PRICE, LENGTHS
from prfaas.paper.tables import TABLE_3

_MODELS = ("qwen3.5-397b", "mimo-v2-flash", "minimax-m2.5", "qwen3-235b")
_TOKENS = (1024, 8192, 32_000, 130_000)
_GRID = tuple(range(1024, 131_073, 1024))


@attrs.frozen(kw_only=True)
class ProfileRow:
    """One length: seconds from the printed KV throughput, and from the database."""

    model: str
    tokens: int
    printed_s: float
    printed_gbps: float
    fp8_s: float
    bf16_s: float

    def cells(self) -> list[str]:
        fp8_gbps = spec_of(self.model).kv_bytes(self.tokens) * 8 / self.fp8_s / 1e9
        return [
            self.model,
            f"{self.tokens:,}",
            f"{self.printed_s:.3f}",
            f"{self.fp8_s:.3f}",
            f"{self.bf16_s:.3f}",
            f"{self.printed_s / self.fp8_s:.1f}",
            f"{self.printed_gbps:g}, {fp8_gbps:.1f}",
        ]


@attrs.frozen(kw_only=True)
class CaseRow:
    """The case study with one model and one source of prefill times."""

    model: str
    source: str
    rate_rps: float
    threshold_tokens: float
    offload: float
    num_prfaas: float
    num_prefill: float
    num_decode: float
    egress_gbps: float
    over_homogeneous: float
    at_equal_cost: float

    def cells(self) -> list[str]:
        return [
            self.model,
            self.source,
            f"{self.rate_rps:.2f}",
            f"{self.threshold_tokens:,.0f}",
            f"{self.offload:.0%}",
            f"{self.num_prfaas:g} / {self.num_prefill:g} / {self.num_decode:g}",
            f"{self.egress_gbps:.1f}",
            f"{self.over_homogeneous:.2f}",
            f"{self.at_equal_cost:.2f}",
        ]


def _on_h200(profiles: Sequence[Profile], model: str, weights: str) -> Profile:
    return next(p for p in profiles if (p.model, p.weights, p.system) == (model, weights, "H200"))


def printed_profile(model: str) -> PrefillProfile:
    """T = S / Phi of Table 3, in Gbit of 10^9 bits as Table 5 next to it shows."""
    spec = spec_of(model)
    return PrefillProfile(
        tuple(
            (tokens, spec.kv_bytes(tokens) * 8 / (printed.value * 1e9))
            for tokens, printed in zip(_TOKENS, TABLE_3[model].values(), strict=True)
        )
    )


def profile_rows(profiles: Sequence[Profile]) -> Iterator[ProfileRow]:
    """Four models at four lengths."""
    for model in _MODELS:
        printed = printed_profile(model)
        fp8, bf16 = (_on_h200(profiles, model, w).prefill for w in ("fp8_block", "bfloat16"))
        for tokens, rate in zip(_TOKENS, TABLE_3[model].values(), strict=True):
            yield ProfileRow(
                model=model,
                tokens=tokens,
                printed_s=printed.prefill_s(tokens),
                printed_gbps=rate.value,
                fp8_s=fp8.prefill_s(tokens),
                bf16_s=bf16.prefill_s(tokens),
            )


def paper_pairs() -> Iterator[Pair]:
    """H200 and H20 of the case study, with H200 decoding 1 to 2 times what H20 does.

    The paper prints no decode rate of H200, for there it never decodes.
    """
    for batch in (20, 24, 30, 40):
        yield Pair(dear=_of_the_paper("H200", H200, batch), cheap=_of_the_paper("H20", H20, 20))


def _of_the_paper(system: str, prefill: PrefillProfile, batch: int) -> Profile:
    return Profile(
        model="paper-1t",
        weights="fitted",
        system=system,
        num_gpus=8,
        prefill=prefill,
        decode={"paper": ((batch, SLO_STEP_S),)},
    )


def case_rows(profiles: Sequence[Profile]) -> Iterator[CaseRow]:
    """4 instances of H200 for 8 of H20, 100 Gbit/s, the paper's lengths and output."""
    yield _case("paper's 1T model", "Table 5", CASE_STUDY)
    for model in _MODELS:
        fp8 = _on_h200(profiles, model, "fp8_block")
        for source, remote in (("Table 3", printed_profile(model)), ("database", fp8.prefill)):
            case = attrs.evolve(
                CASE_STUDY,
                model=spec_of(model),
                remote_profile=remote,
                local_profile=_on_h20(remote),
                batch_size=fp8.batch("paper", SLO_STEP_S),
                decode_step_s=fp8.step_s("paper"),
            )
            yield _case(model, source, case)


def _on_h20(remote: PrefillProfile) -> PrefillProfile:
    """Slower by what H20 is slower than H200 in the paper's case, at each length."""
    knots: list[tuple[float, float]] = []
    for tokens in _GRID:
        seconds = remote.prefill_s(tokens) * H20.prefill_s(tokens) / H200.prefill_s(tokens)
        knots.append((tokens, max(seconds, knots[-1][1] if knots else 0.0)))
    return PrefillProfile(tuple(knots))


def _case(model: str, source: str, deployment: Deployment) -> CaseRow:
    form = RateForm.EXPECTATION
    split, point = best_split(deployment, LENGTHS, form)
    alone = attrs.evolve(deployment, num_prfaas=0, num_prefill=9, num_decode=3)
    _, homogeneous = best_split(alone, LENGTHS, form)
    gain = point.max_rate.requests_per_s / homogeneous.max_rate.requests_per_s
    num_local = split.num_prefill + split.num_decode
    cost = split.num_prfaas * H200_PRICE + num_local * H20_PRICE
    return CaseRow(
        model=model,
        source=source,
        rate_rps=point.max_rate.requests_per_s,
        threshold_tokens=point.threshold_tokens,
        offload=LENGTHS.share_above(point.threshold_tokens),
        num_prfaas=split.num_prfaas,
        num_prefill=split.num_prefill,
        num_decode=split.num_decode,
        egress_gbps=point.max_rate.egress_bps / 1e9,
        over_homogeneous=gain,
        at_equal_cost=gain * (split.num_prfaas + num_local) * H20_PRICE / cost,
    )
