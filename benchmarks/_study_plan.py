"""The best pairs once more with whole instances, by the planner that users have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs

from _study import Profile, Question
from _study_cases import LAWS, spec_of
from prfaas.capacity import PlanningCluster, PlanningProblem, System, plan_deployment
from prfaas.core import ClusterKind


@attrs.frozen(kw_only=True)
class PlanRow:
    """What `plan_deployment` finds for one question, beside the study's arithmetic."""

    name: str
    price: float
    rate_rps: float
    fractional_rps: float
    threshold_tokens: float
    num_remote: float
    num_prefill: float
    num_decode: float
    egress_gbps: float
    binding: str

    def cells(self) -> list[str]:
        return [
            self.name,
            f"{self.price:.2f}",
            f"{self.rate_rps:.2f}",
            f"{self.fractional_rps:.2f}",
            f"{1 - self.rate_rps / self.fractional_rps:.0%}",
            f"{self.threshold_tokens:,.0f}",
            f"{self.num_remote:g} / {self.num_prefill:g} / {self.num_decode:g}",
            f"{self.egress_gbps:.1f}",
            self.binding.replace("_", " "),
        ]


def plan_rows(asked: Sequence[tuple[str, Question]], *, scale: int = 4) -> Iterator[PlanRow]:
    """Plan ``scale`` times the budget and the link, where rounding to instances costs little."""
    for name, question in asked:
        large = attrs.evolve(
            question, budget=scale * question.budget, link_bps=scale * question.link_bps
        )
        mixed = large.mixed()
        local = min(round(mixed.num_prefill + mixed.num_decode), math.floor(large.budget))
        remote = math.floor((large.budget - local) / large.instance_price + 1e-9)
        best = plan_deployment(_problem(large, remote, local)).expectation.best
        yield PlanRow(
            name=name,
            price=max(question.price, 1 / question.price),
            rate_rps=best.requests_per_s,
            fractional_rps=mixed.rate_rps,
            threshold_tokens=best.threshold_tokens or 0.0,
            num_remote=best.num_prfaas,
            num_prefill=best.num_prefill,
            num_decode=best.num_decode,
            egress_gbps=best.egress_bps / 1e9,
            binding=best.binding.value,
        )


def _problem(question: Question, remote: int, local: int) -> PlanningProblem:
    demand = question.demand

    def system(profile: Profile, price: float) -> System:
        return System(
            name=profile.system,
            prefill=profile.prefill,
            num_gpus=profile.num_gpus,
            price_per_hour=price,
            decode_step_s=profile.step_s(demand.law, demand.slo_s),
            batch_size=profile.batch(demand.law, demand.slo_s),
        )

    return PlanningProblem(
        model=spec_of(question.local.model),
        lengths=LAWS[demand.law],
        output_tokens=demand.output_tokens,
        systems={
            "remote": system(question.remote, question.instance_price),
            "local": system(question.local, 1.0),
        },
        clusters=(
            PlanningCluster(
                cluster_id="remote", kind=ClusterKind.PRFAAS, system="remote", num_nodes=remote
            ),
            PlanningCluster(
                cluster_id="local", kind=ClusterKind.PD, system="local", num_nodes=local
            ),
        ),
        egress_bps=question.link_bps,
    )
