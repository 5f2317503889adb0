"""Every role balancer against the contract, and the contract against broken ones."""

from __future__ import annotations

import attrs
import pytest

from fluid import BAND, EAGER, SPEC, STEP_S
from prfaas.core import NodeId, Role
from prfaas.policy import BalancerSettings, FixedRoles, ThroughputBalancer
from prfaas.seams import NodeDown, NodeLoad, Plan
from prfaas.testing import check_balancer


def test_fixed_roles() -> None:
    check_balancer(lambda baseline: FixedRoles(baseline, BAND))


@pytest.mark.parametrize("fractional", ["off", "auto"])
def test_throughput_balancer(fractional: str) -> None:
    check_balancer(
        lambda baseline: ThroughputBalancer(
            SPEC,
            baseline=baseline,
            band=BAND,
            settings=BalancerSettings(
                period_s=5.0,
                min_arrivals=1,
                fractional=fractional,
                **EAGER,  # type: ignore[arg-type]
            ),
            decode_step_s=STEP_S,
            remote_prefill_s=lambda n: n / 10_000,
            local_prefill_s=lambda n: n / 5_000,
        )
    )


class Restless(FixedRoles):
    def plan(self, now: float) -> Plan:
        return attrs.evolve(super().plan(now))


class SameEpoch(FixedRoles):
    def plan(self, now: float) -> Plan:
        plan = super().plan(now)
        self._kept = getattr(self, "_kept", {})
        return self._kept.setdefault(plan.epoch, attrs.evolve(plan, epoch=min(plan.epoch, 3)))


class OnlyPrefill(FixedRoles):
    """Takes whatever is up for prefill, without a thought for decode."""

    def plan(self, now: float) -> Plan:
        plan = super().plan(now)
        if Role.DECODE in plan.roles.values() and len(plan.roles) == 10:
            self._plan = attrs.evolve(plan, epoch=plan.epoch + 1, roles=self._all_prefill(plan))
        return self._plan

    def _all_prefill(self, plan: Plan) -> dict[NodeId, Role]:
        return dict.fromkeys(plan.roles, Role.PREFILL)


class ConvertsRemote(FixedRoles):
    def plan(self, now: float) -> Plan:
        plan = super().plan(now)
        if plan.roles.get(NodeId("remote0")) is Role.PREFILL:
            roles = {**plan.roles, NodeId("remote0"): Role.MIXED}
            self._plan = attrs.evolve(plan, epoch=plan.epoch + 1, roles=roles)
        return self._plan


class BelievesStrangers(FixedRoles):
    """Counts the loads of nodes that it does not know."""

    def observe(self, event: object, now: float) -> None:
        super().observe(event, now)  # type: ignore[arg-type]
        if isinstance(event, NodeLoad | NodeDown) and event.node_id not in self._plan.roles:
            self._plan = attrs.evolve(self._plan, epoch=self._plan.epoch + 1)


class Fidgets(FixedRoles):
    """Changes its mind as time goes by."""

    def plan(self, now: float) -> Plan:
        if now > 500 and self._plan.epoch < 100:
            self._plan = attrs.evolve(self._plan, epoch=100)
        return self._plan


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Restless, "is another object at the same time"),
        (SameEpoch, "epochs grow with every plan"),
        (OnlyPrefill, "without decode"),
        (ConvertsRemote, "converts PRFAAS nodes"),
        (BelievesStrangers, "it means nothing"),
        (Fidgets, "without any event"),
    ],
)
def test_a_broken_balancer_is_found_out(broken: type[FixedRoles], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_balancer(lambda baseline: broken(baseline, BAND))
