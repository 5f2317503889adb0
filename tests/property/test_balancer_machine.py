"""The role balancer under any order of events, against a small model of its changes."""

from __future__ import annotations

import math
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.policy import BalancerSettings, ThroughputBalancer
from prfaas.policy.swing import Swing
from prfaas.seams import (
    Arrived,
    BalancerEvent,
    ChangePhase,
    LinkRate,
    NodeDown,
    NodeLoad,
    NodeUp,
    Plan,
    RoleChanged,
    Served,
)
from prfaas.spec import preset

SPEC = preset("paper-1t")
REMOTE = NodeId("r")
CLUSTERS = {
    **{NodeId(f"a{i}"): ClusterId("a") for i in range(6)},
    **{NodeId(f"b{i}"): ClusterId("b") for i in range(2)},
    REMOTE: ClusterId("r"),
}
BASELINE = {n: Role.PREFILL if n.endswith("0") else Role.DECODE for n in CLUSTERS if n != REMOTE}
DEADLINE_S = 5.0
names = st.sampled_from(sorted(CLUSTERS))
shares = st.one_of(st.floats(0, 1), st.sampled_from([math.nan, -1.0, 7.0]))


class BalancerMachine(RuleBasedStateMachine):
    """`pending` is the model: what each asked change was, until its end."""

    @initialize(
        fractional=st.sampled_from(["off", "slices", "mixed", "auto"]),
        output_tokens=st.sampled_from([20, 60, 100, 150]),
        is_obedient=st.booleans(),
    )
    def start(self, fractional: str, output_tokens: int, is_obedient: bool) -> None:
        self.balancer = ThroughputBalancer(
            SPEC,
            baseline=BASELINE,
            band=(0, 100_000),
            settings=BalancerSettings(
                period_s=1.0,
                window_s=5.0,
                window_arrivals=1,
                min_arrivals=1,
                high_utilisation=0.1,
                min_gain=0.0,
                num_confirmations=1,
                cooldown_s=0.0,
                reversal_gain=0.0,
                change_deadline_s=DEADLINE_S,
                backoff_s=10.0,
                silence_s=30.0,
                fractional=fractional,
                slice_period_s=20.0,
                decode_base_share=0.05,
            ),
            remote_prefill_s=lambda n: n / 20_000,
            local_prefill_s=lambda n: n / 8_000,
            num_slots=4,
            decode_step_s=0.02,
        )
        self.now = 0.0
        self.epochs = count(1)
        self.up: dict[NodeId, int] = {}
        self.pending: dict[NodeId, tuple[int, Role, Role, float]] = {}
        self.last = self.balancer.plan(0.0)
        for node_id in sorted(CLUSTERS):
            self.come_up(node_id, BASELINE.get(node_id, Role.PREFILL))
        self.serve(20_000, output_tokens, 8, 12, is_obedient)

    # What happens.

    def come_up(self, node_id: NodeId, role: Role) -> None:
        self.up[node_id] = epoch = next(self.epochs)
        kind = ClusterKind.PRFAAS if node_id == REMOTE else ClusterKind.PD
        event = NodeUp(
            node_id=node_id, cluster_id=CLUSTERS[node_id], kind=kind, role=role, epoch=epoch
        )
        self.pending.pop(node_id, None)
        self.observe(event, disturbed=CLUSTERS[node_id])

    @rule(node_id=names, role=st.sampled_from(Role), goes=st.booleans())
    def come_or_go(self, node_id: NodeId, role: Role, goes: bool) -> None:
        if not goes or node_id not in self.up:
            self.come_up(node_id, role)
            return
        self.pending.pop(node_id, None)
        event = NodeDown(node_id=node_id, epoch=self.up.pop(node_id))
        self.observe(event, disturbed=CLUSTERS[node_id])

    @rule(
        tokens=st.sampled_from([100, 3_000, 20_000, 90_000]),
        output_tokens=st.sampled_from([0, 10, 200, 2_000]),
        num_per_s=st.integers(1, 20),
        seconds=st.integers(1, 12),
        is_obedient=st.booleans(),
    )
    def serve(
        self, tokens: int, output_tokens: int, num_per_s: int, seconds: int, is_obedient: bool
    ) -> None:
        """Traffic; an obedient fleet carries out every change within a second."""
        for _ in range(seconds):
            for k in range(num_per_s):
                self.observe(Arrived(routed_tokens=tokens * (1 + k % 3)))
                self.observe(Served(output_tokens=output_tokens, step_s=0.02))
            self.now += 1.0
            self.look(None)
            for node_id in sorted(self.pending) if is_obedient else ():
                epoch, _, new, _ = self.pending.pop(node_id)
                self.tell(node_id, epoch, new, ChangePhase.DONE, disturbed=CLUSTERS[node_id])

    @rule(node_id=names, prefill=shares, decode=shares, queued=st.integers(0, 10**6))
    def report(self, node_id: NodeId, prefill: float, decode: float, queued: int) -> None:
        event = NodeLoad(
            node_id=node_id,
            epoch=self.up.get(node_id, 0),
            prefill_busy=prefill,
            decode_busy=decode,
            queued_tokens=queued,
            num_waiting=queued // 10**5,
        )
        self.observe(event)

    @rule(
        bps=st.sampled_from([None, 0.0, math.nan, 1e8, 1e11]),
        node_id=names,
        epoch=st.integers(0, 60),
        role=st.sampled_from(Role),
    )
    def say_little(self, bps: float | None, node_id: NodeId, epoch: int, role: Role) -> None:
        """A link rate, and news of a change that nobody asked for."""
        self.observe(LinkRate(link_bps=bps))
        if node_id not in self.pending:
            self.tell(node_id, epoch, role, ChangePhase.DONE)

    @rule(dt=st.sampled_from([0.1, 1.0, 2.0, 6.0, 40.0]))
    def wait(self, dt: float) -> None:
        self.now += dt
        self.look(None)

    @rule()
    def wait_for_the_deadline(self) -> None:
        deadline_s = self.balancer.next_deadline()
        assert (deadline_s is None) == (not self.up)
        if deadline_s is not None:
            self.now = max(self.now, deadline_s)
            self.look(None)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), phase=st.sampled_from(ChangePhase), is_other=st.booleans())
    def hear(self, data: st.DataObject, phase: ChangePhase, is_other: bool) -> None:
        """News of a change; ``is_other`` is of an earlier or a foreign plan, and means nothing."""
        node_id = data.draw(st.sampled_from(sorted(self.pending)))
        epoch, old, new, _ = self.pending[node_id]
        role = new if phase is ChangePhase.DONE else old
        self.look(None)
        if node_id not in self.pending:
            return
        if is_other or phase is ChangePhase.STARTED:
            epoch += data.draw(st.sampled_from([-1, 1])) if is_other else 0
            self.tell(node_id, epoch, role, phase)
            return
        del self.pending[node_id]
        self.tell(node_id, epoch, role, phase, disturbed=CLUSTERS[node_id])
        expected = new if phase is ChangePhase.DONE else old
        assert self.role_of(node_id) in (expected, Role.MIXED)

    # What it must look like.

    def tell(
        self,
        node_id: NodeId,
        epoch: int,
        role: Role,
        phase: ChangePhase,
        disturbed: ClusterId | None = None,
    ) -> None:
        event = RoleChanged(node_id=node_id, plan_epoch=epoch, role=role, phase=phase)
        self.observe(event, disturbed)

    def observe(self, event: BalancerEvent, disturbed: ClusterId | None = None) -> None:
        self.balancer.observe(event, self.now)
        self.look(disturbed)

    def role_of(self, node_id: NodeId) -> Role:
        return self.last.roles[node_id]

    def look(self, disturbed: ClusterId | None) -> None:
        """Compares the plan with the last one and the model."""
        before, plan = self.last, self.balancer.plan(self.now)
        assert self.balancer.plan(self.now) is plan
        assert plan is before or plan.epoch > before.epoch
        assert plan.roles.keys() == self.up.keys()
        self.last = plan
        late = {n for n, change in self.pending.items() if change[3] <= self.now}
        for node_id in late:
            _, old, _, _ = self.pending.pop(node_id)
            assert plan.roles[node_id] in (old, Role.MIXED), "not rolled back"
        restless = {CLUSTERS[n] for n in late} | {disturbed}
        for cluster_id in set(CLUSTERS.values()):
            self.look_at(cluster_id, before, plan, is_restless=cluster_id in restless)

    def look_at(
        self, cluster_id: ClusterId, before: Plan, plan: Plan, *, is_restless: bool
    ) -> None:
        ids = [n for n in plan.roles if CLUSTERS[n] == cluster_id]
        changed = {n for n in ids if before.roles.get(n) not in (None, plan.roles[n])}
        pending = {n for n in ids if n in self.pending}
        if is_restless:
            # Where a role was lost, what is under way may be taken back.
            for node_id in pending:
                if plan.roles[node_id] is not self.pending[node_id][2]:
                    del self.pending[node_id]
            changed -= set(self.pending)
            changed &= {n for n in changed if plan.roles[n] is not Role.MIXED}
        elif pending:
            assert not changed, f"{changed} change while {pending} do"
        if is_restless or not changed:
            self.adopt(cluster_id, plan)
            return
        olds = {before.roles[n] for n in changed}
        assert len(olds) == 1
        donors = sum(before.roles[n] in olds for n in ids)
        assert len(changed) <= max(1, donors // 2)
        for node_id in changed:
            self.pending[node_id] = (
                plan.epoch,
                before.roles[node_id],
                plan.roles[node_id],
                self.now + DEADLINE_S,
            )

    def adopt(self, cluster_id: ClusterId, plan: Plan) -> None:
        """After a disturbance the model asks the balancer which changes are under way."""
        for change in self.balancer.changes():
            if CLUSTERS[change.node_id] == cluster_id:
                assert plan.roles[change.node_id] is change.new
                self.pending[change.node_id] = (
                    change.plan_epoch,
                    change.old,
                    change.new,
                    change.deadline_s,
                )

    @invariant()
    def holds(self) -> None:
        self.balancer.check()
        assert len(repr(self.balancer)) > 20
        for cluster_id in ("a", "b"):
            roles = [r for n, r in self.last.roles.items() if CLUSTERS[n] == cluster_id]
            assert not roles or any(r.prefills for r in roles)
            assert not roles or any(r.decodes for r in roles)
        assert self.last.roles.get(REMOTE, Role.PREFILL) is Role.PREFILL
        assert {c.node_id for c in self.balancer.changes()} == set(self.pending)
        for node_id, tokens in self.last.prefill_budgets.items():
            assert self.last.roles[node_id] is Role.MIXED
            assert tokens >= 1


BalancerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_balancer_machine = BalancerMachine.TestCase


@given(
    share=st.floats(0.1, 0.9),
    period_s=st.floats(50, 500),
    steps=st.lists(st.tuples(st.floats(0.1, 5.0), st.booleans()), min_size=400, max_size=400),
)
@settings(max_examples=20, deadline=None)
def test_a_swing_node_is_never_far_from_its_share(
    share: float, period_s: float, steps: list[tuple[float, bool]]
) -> None:
    swing = Swing(NodeId("n"), role=Role.DECODE, share=share, period_s=period_s, now=0.0)
    role, now, prefill_s = Role.DECODE, 0.0, 0.0
    for dt, is_idle in steps:
        now += dt
        prefill_s += dt * (role is Role.PREFILL)
        wanted = swing.wanted(now, is_idle=is_idle)
        if wanted is not role:
            swing.serves(wanted, now)
            role = wanted
        limit_s = share * (1 - share) * period_s / 2
        assert abs(prefill_s - share * now) <= limit_s + 5.0 + 1e-6
