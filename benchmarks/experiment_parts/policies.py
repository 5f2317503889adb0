"""The ablation ladder: every row is a policy by name, and this builds it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from experiment_parts.deployments import (
    ALL_LOCAL,
    BAND,
    EQUAL_COST,
    EQUAL_GPUS,
    HETERO,
    NUM_SLOTS,
    PD,
    PROFILES,
    REMOTE,
    STEP_S,
    Hardware,
    Optimum,
)
from prfaas.capacity import LengthDistribution
from prfaas.core import NodeId, Role
from prfaas.paper.profiles import THRESHOLD_TOKENS
from prfaas.policy import (
    BalancerSettings,
    FixedRoles,
    LoadLedger,
    MaxWeightRouter,
    MaxWeightSettings,
    RouterSettings,
    ThresholdController,
    ThresholdRouter,
    ThresholdSettings,
    ThroughputBalancer,
)
from prfaas.seams import BalancerEvent, Plan, RoleBalancer, Router
from prfaas.simulator import Scenario, Simulator


@attrs.frozen(kw_only=True)
class Policy:
    """One row.

    Attributes:
        title: for tables.
        hardware: what it runs on.
        router: ``threshold``, ``max-weight``, or ``least-finish`` (max-weight without weights).
        threshold: a number; ``static`` for the optimum of the mean conditions; ``adaptive`` for
            the controller.
        num_prefill: N_p; None for the optimum of the mean conditions.
        prefix_transfers: the paper's rule for an abundant link; with ``max-weight`` prefixes as
            further choices.
        balancer: ``fixed``, ``off`` (whole nodes), ``slices``, ``mixed`` or ``auto``.
    """

    title: str
    hardware: Hardware = HETERO
    router: str = "threshold"
    threshold: int | str = "adaptive"
    num_prefill: int | None = None
    prefix_transfers: bool = False
    balancer: str = "fixed"


POLICIES: Mapping[str, Policy] = {
    "homogeneous": Policy(
        title="homogeneous, equal GPUs", hardware=EQUAL_GPUS, threshold=ALL_LOCAL
    ),
    "homogeneous_cost": Policy(
        title="homogeneous, equal cost", hardware=EQUAL_COST, threshold=ALL_LOCAL
    ),
    "naive": Policy(title="naive heterogeneous, t = 0", threshold=0, num_prefill=0),
    "least_finish": Policy(title="least predicted finish, no length rule", router="least-finish"),
    "fixed": Policy(title="fixed t = 19.4K, N_p = 3", threshold=THRESHOLD_TOKENS, num_prefill=3),
    "static": Policy(title="static t*", threshold="static"),
    "adaptive": Policy(title="adaptive t"),
    "abundant": Policy(title="adaptive t + prefix transfers", prefix_transfers=True),
    "max_weight": Policy(title="max-weight", router="max-weight"),
    "max_weight_prefixes": Policy(
        title="max-weight + prefix transfers", router="max-weight", prefix_transfers=True
    ),
    "balancer": Policy(
        title="adaptive t + prefix transfers + balancer", prefix_transfers=True, balancer="off"
    ),
    "max_weight_balancer": Policy(
        title="max-weight + balancer", router="max-weight", balancer="off"
    ),
    "slices": Policy(
        title="adaptive t + prefix transfers + balancer with slices",
        prefix_transfers=True,
        balancer="slices",
    ),
}


class Scripted(RoleBalancer):
    """One plan for ever, with prefill budgets."""

    def __init__(self, roles: Mapping[NodeId, Role], budgets: Mapping[NodeId, int]) -> None:
        self._plan = Plan(epoch=1, roles=roles, threshold_band=BAND, prefill_budgets=budgets)

    def observe(self, event: BalancerEvent, now: float) -> None:
        """Nothing to learn."""

    def plan(self, now: float) -> Plan:
        return self._plan


@attrs.frozen(kw_only=True)
class Parts:
    """What a `Simulator` takes besides the scenario."""

    router: Router
    ledger: LoadLedger
    balancer: RoleBalancer
    controller: ThresholdController

    def simulator(self, world: Scenario) -> Simulator:
        """The scenario under this policy."""
        return Simulator(
            world,
            router=self.router,
            ledger=self.ledger,
            balancer=self.balancer,
            controller=self.controller,
        )


def num_prefill_of(policy: Policy, planned: Optimum) -> int:
    """N_p at the start."""
    return round(planned.num_prefill) if policy.num_prefill is None else policy.num_prefill


def build(
    policy: Policy,
    world: Scenario,
    planned: Optimum,
    *,
    lengths: LengthDistribution,
    output_tokens: float,
    settings: BalancerSettings | None = None,
    balancer: RoleBalancer | None = None,
) -> Parts:
    """A policy that has seen nothing yet.

    Args:
        planned: the optimum of the mean conditions, for ``static``.
        lengths: uncached lengths to expect, which are what ``planned`` was made of; the prior of
            the controller, so that ``adaptive`` knows no less than ``static``.
        output_tokens: the mean, as the balancer's first guess.
        settings: of the balancer; its ``fractional`` is that of the policy.
        balancer: instead of the policy's.
    """
    spec = world.spec
    assert world.link is not None
    link_bps = world.link.schedule[0][1]
    band = BAND
    if policy.threshold != "adaptive":
        fixed = planned.threshold_tokens if policy.threshold == "static" else policy.threshold
        band = (int(fixed), int(fixed))
    # Where t cannot move, nothing is searched.
    search = ThresholdSettings(period_s=1.0 if band == BAND else 1e6)
    controller = ThresholdController(
        spec,
        band=band,
        settings=search,
        prior_tokens=[round(lengths.quantile((i + 0.5) / 64)) for i in range(64)],
        link_bps=link_bps,
        remote_prefill_s=PROFILES[REMOTE],
        local_prefill_s=PROFILES[PD],
    )
    roles = {node.node_id: node.role for node in world.nodes}
    if balancer is None and policy.balancer == "fixed":
        balancer = FixedRoles(roles, band)
    elif balancer is None:
        chosen = attrs.evolve(settings or BalancerSettings(), fractional=policy.balancer)
        balancer = ThroughputBalancer(
            spec,
            baseline=roles,
            band=band,
            settings=chosen,
            remote_prefill_s=PROFILES[REMOTE],
            local_prefill_s=PROFILES[PD],
            link_bps=link_bps,
            num_slots=NUM_SLOTS,
            decode_step_s=STEP_S,
            output_tokens=output_tokens,
        )
    return Parts(
        router=_router(policy, world, controller),
        ledger=LoadLedger.for_spec(spec),
        balancer=balancer,
        controller=controller,
    )


def _router(policy: Policy, world: Scenario, controller: ThresholdController) -> Router:
    if policy.router == "threshold":
        settings = RouterSettings(prefix_transfers=policy.prefix_transfers)
        return ThresholdRouter(world.spec, controller, settings=settings, profiles=PROFILES)
    weights = MaxWeightSettings(prefix_transfers=policy.prefix_transfers)
    if policy.router == "least-finish":
        weights = MaxWeightSettings(weight_per_s=0.0)
    return MaxWeightRouter(
        world.spec, settings=weights, profiles=PROFILES, is_link_down=controller.is_link_down
    )
