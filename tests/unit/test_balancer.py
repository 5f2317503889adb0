from __future__ import annotations

import pytest

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError
from prfaas.policy import FixedRoles
from prfaas.seams import ChangePhase, NodeDown, NodeUp, RoleChanged

P1, P2, D1, R1 = (NodeId(name) for name in ("p1", "p2", "d1", "r1"))
BASELINE = {P1: Role.PREFILL, P2: Role.PREFILL, D1: Role.DECODE}
BAND = (1000, 50_000)


def up(
    node_id: NodeId,
    *,
    epoch: int = 1,
    kind: ClusterKind = ClusterKind.PD,
    role: Role = Role.MIXED,
    cluster: str = "pd",
) -> NodeUp:
    return NodeUp(node_id=node_id, cluster_id=ClusterId(cluster), kind=kind, role=role, epoch=epoch)


def make_balancer(*nodes: NodeId) -> FixedRoles:
    balancer = FixedRoles(BASELINE, BAND)
    for node_id in nodes:
        observe(balancer, up(node_id))
    return balancer


def observe(balancer: FixedRoles, event: NodeUp | NodeDown | RoleChanged) -> None:
    balancer.observe(event, 0.0)
    balancer.check()


def roles(balancer: FixedRoles) -> dict[NodeId, Role]:
    return dict(balancer.plan(0.0).roles)


def test_the_configured_roles_are_published() -> None:
    balancer = make_balancer(P1, P2, D1)
    assert roles(balancer) == BASELINE
    assert balancer.plan(5.0).threshold_band == BAND
    assert "d1 decode" in repr(balancer)


def test_no_nodes_no_roles() -> None:
    balancer = FixedRoles(BASELINE, BAND)
    assert roles(balancer) == {}
    assert "no nodes" in repr(balancer)


def test_a_node_that_is_not_configured_keeps_its_role() -> None:
    balancer = make_balancer(P1, D1)
    observe(balancer, up(NodeId("new"), role=Role.DECODE))
    assert roles(balancer)[NodeId("new")] is Role.DECODE


@pytest.mark.parametrize("dying", [P1, D1])
def test_survivors_of_a_lost_role_do_both_until_one_comes_back(dying: NodeId) -> None:
    balancer = make_balancer(P1, D1)
    observe(balancer, up(R1, kind=ClusterKind.PRFAAS, cluster="remote"))
    (survivor,) = {P1, D1} - {dying}
    observe(balancer, NodeDown(node_id=dying, epoch=1))
    assert roles(balancer) == {survivor: Role.MIXED, R1: Role.PREFILL}
    observe(balancer, up(dying, epoch=2))
    assert roles(balancer) == {P1: Role.PREFILL, D1: Role.DECODE, R1: Role.PREFILL}


def test_all_survivors_become_mixed_and_clusters_are_judged_apart() -> None:
    balancer = make_balancer(P1, P2, D1)
    other = NodeId("other")
    observe(balancer, up(other, role=Role.MIXED, cluster="pd2"))
    observe(balancer, NodeDown(node_id=D1, epoch=1))
    assert roles(balancer) == {P1: Role.MIXED, P2: Role.MIXED, other: Role.MIXED}
    observe(balancer, NodeDown(node_id=P1, epoch=1))
    assert roles(balancer) == {P2: Role.MIXED, other: Role.MIXED}
    observe(balancer, up(D1, epoch=2))
    assert roles(balancer) == {P2: Role.PREFILL, other: Role.MIXED, D1: Role.DECODE}


def test_prfaas_nodes_are_never_converted() -> None:
    balancer = make_balancer(D1)
    observe(balancer, up(R1, kind=ClusterKind.PRFAAS, cluster="pd", role=Role.MIXED))
    assert roles(balancer) == {D1: Role.MIXED, R1: Role.PREFILL}


def test_a_prfaas_node_may_not_be_configured_to_decode() -> None:
    balancer = FixedRoles({R1: Role.DECODE}, BAND)
    with pytest.raises(ConfigError, match="'r1' is configured as decode"):
        balancer.observe(up(R1, kind=ClusterKind.PRFAAS), 0.0)
    assert roles(balancer) == {}
    observe(balancer, NodeDown(node_id=R1, epoch=0))


def test_the_epoch_grows_only_when_the_plan_changes() -> None:
    balancer = make_balancer(P1, P2, D1)
    plan = balancer.plan(0.0)
    for event in (
        up(P1),
        up(P1, epoch=2),
        NodeDown(node_id=NodeId("stranger"), epoch=1),
        RoleChanged(node_id=P1, plan_epoch=plan.epoch, role=Role.PREFILL, phase=ChangePhase.DONE),
        RoleChanged(node_id=P1, plan_epoch=plan.epoch, role=Role.PREFILL, phase=ChangePhase.FAILED),
    ):
        observe(balancer, event)
        assert balancer.plan(9.0) is plan
    observe(balancer, NodeDown(node_id=P2, epoch=1))
    assert balancer.plan(9.0).epoch == plan.epoch + 1
    assert P2 not in roles(balancer)


def test_late_news_of_an_earlier_life_change_nothing() -> None:
    balancer = make_balancer(P1, D1)
    observe(balancer, up(D1, epoch=4))
    observe(balancer, NodeDown(node_id=D1, epoch=3))
    assert roles(balancer)[D1] is Role.DECODE
    observe(balancer, NodeDown(node_id=D1, epoch=4))
    observe(balancer, up(D1, epoch=3))
    assert roles(balancer) == {P1: Role.MIXED}


def test_the_band_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"threshold_band is \(5, 4\)"):
        FixedRoles({}, (5, 4))
