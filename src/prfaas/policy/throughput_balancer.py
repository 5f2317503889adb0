"""The role balancer: keeps each PD cluster's split of prefill and decode nodes near its best."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError
from prfaas.policy.balancer_settings import BalancerSettings
from prfaas.policy.cluster_balancer import ClusterBalancer
from prfaas.policy.load_curve import PrefillSeconds
from prfaas.policy.measurements import Measurements, Profiles
from prfaas.policy.planned_roles import PlannedRoles
from prfaas.policy.role_changes import Change, RoleChanges
from prfaas.policy.situation import Assessment
from prfaas.policy.swing import Swing
from prfaas.policy.up_nodes import can_serve
from prfaas.seams import (
    Arrived,
    BalancerEvent,
    LinkRate,
    NodeDown,
    NodeLoad,
    NodeUp,
    Plan,
    RoleBalancer,
    RoleChanged,
    Served,
)
from prfaas.spec import ModelSpec


class ThroughputBalancer(RoleBalancer):
    """Long-term scheduling of arXiv 2604.15039, section 3.4.3: moves N_p and N_d towards Eq. 7-8.

    Once per control period it measures the demand, predicts the load of each stage for the present
    and the best split, and converts nodes if there is pressure and the gain is worth it
    (`BalancerSettings`). A cluster has one change at a time under way, which may be of several
    nodes. A change that fails, or is not done in time, is rolled back.

    Where a PD cluster lacks a role all its nodes become MIXED, as with `FixedRoles`, and it is not
    balanced until the planned roles suffice again. PD clusters take arrivals, remote nodes and the
    link in proportion to their nodes, for an arrival does not tell its cluster.

    Args:
        spec: gives S_kv.
        baseline: configured roles of PD nodes; a node that is not named keeps the role that it
            came up with. After a long silence nodes return to these. MIXED nodes stay as they are.
        band: least and greatest t of every plan, tokens.
        settings: when to convert.
        remote_prefill_s, local_prefill_s: T_prefill of one node; None takes the measured busy
            time per token.
        link_bps: B_out to assume until it is measured; None leaves egress out of account.
        num_slots: decode slots of a node that does not say.
        decode_step_s: a step with a full batch; None takes the measured mean.
        output_tokens: decode steps to expect of a request before endings are seen.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        baseline: Mapping[NodeId, Role],
        band: tuple[int, int],
        settings: BalancerSettings | None = None,
        remote_prefill_s: PrefillSeconds | None = None,
        local_prefill_s: PrefillSeconds | None = None,
        link_bps: float | None = None,
        num_slots: int = 16,
        decode_step_s: float | None = None,
        output_tokens: float = 256.0,
    ) -> None:
        for name, value in (
            ("link_bps", link_bps),
            ("num_slots", num_slots),
            ("decode_step_s", decode_step_s),
            ("output_tokens", output_tokens),
        ):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite and above 0")
        self._band = band
        self._settings = settings = settings or BalancerSettings()
        self._clusters: dict[ClusterId, ClusterBalancer] = {}
        changes = RoleChanges(deadline_s=settings.change_deadline_s, backoff_s=settings.backoff_s)
        self._planned = PlannedRoles(baseline, changes)
        self._changes, self._nodes = changes, self._planned.nodes
        profiles = Profiles(
            spec=spec,
            remote_prefill_s=remote_prefill_s,
            local_prefill_s=local_prefill_s,
            num_slots=num_slots,
            decode_step_s=decode_step_s,
            output_tokens=output_tokens,
        )
        self._measurements = Measurements(profiles, settings, link_bps, self._planned)
        self._now = -math.inf
        self._next_control_s: float | None = None
        self._plan = Plan(epoch=0, roles={}, threshold_band=band)
        self.num_rolled_back = 0

    def __repr__(self) -> str:
        clusters = "; ".join(f"{name} {state!r}" for name, state in self._clusters.items())
        return (
            f"<ThroughputBalancer plan {self._plan.epoch}, {self.num_conversions} conversions, "
            f"{self.num_slices} slices, {self._changes!r}: {clusters or 'no clusters'}>"
        )

    @property
    def num_conversions(self) -> int:
        """Changes of role that were asked for, without slices."""
        return self._planned.num_conversions

    @property
    def num_slices(self) -> int:
        """Flips of alternating nodes."""
        return self._planned.num_slices

    def changes(self) -> list[Change]:
        """The changes that are under way."""
        return self._changes.all()

    @property
    def assessments(self) -> dict[ClusterId, Assessment]:
        """What the last control period found, for the PD clusters that could be assessed."""
        found = {name: state.assessment for name, state in self._clusters.items()}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def assessment(self) -> Assessment | None:
        """That of the PD cluster that is predicted to be the busiest."""
        return max(self.assessments.values(), key=lambda a: a.worst_utilisation, default=None)

    def observe(self, event: BalancerEvent, now: float) -> None:
        """Takes in one event, after whatever was due before it.

        Raises:
            ConfigError: a PRFAAS node is configured for a role other than PREFILL.
        """
        if isinstance(event, Arrived | Served | NodeLoad | LinkRate):
            # The frequent ones: no walk over the nodes, unless a control period ends.
            self._now = max(self._now, now)
            if self._next_control_s is None or self._now >= self._next_control_s:
                self.plan(now)
            self._measurements.observe(event, self._now)
            return
        self._advance(now)
        if isinstance(event, NodeUp):
            self._node_up(event)
        elif isinstance(event, NodeDown):
            self._node_down(event)
        elif isinstance(event, RoleChanged):
            self._role_changed(event)
        self._publish()

    def plan(self, now: float) -> Plan:
        """The plan that holds now; a call also does what time made due (`next_deadline`)."""
        self._advance(now)
        self._publish()
        return self._plan

    def next_deadline(self) -> float | None:
        """When `plan` may next differ without an event; None while no node is up."""
        if not self._nodes.ids() or self._next_control_s is None:
            return None
        changes = self._changes.all()
        changing = {change.node_id for change in changes}
        flips = [swing.flip_s() for _, swing in self._swings() if swing.node_id not in changing]
        return min([self._next_control_s, *(change.deadline_s for change in changes), *flips])

    def check(self) -> None:
        """Asserts the invariants."""
        roles = self._plan.roles
        assert roles.keys() == self._nodes.ids()
        for name, ups in self._nodes.pd_clusters().items():
            assert can_serve(roles[up.node_id] for up in ups), f"{name} is left with {roles}"
        for up in self._nodes.remote():
            assert roles[up.node_id] is Role.PREFILL, up
        for ids, swing in self._swings():
            assert swing.node_id in ids, swing
            swing.check()
        self._planned.check(self._plan.epoch)

    # What comes in.

    def _node_up(self, event: NodeUp) -> None:
        if not self._planned.up(event):
            return
        self._measurements.begin(event.node_id, self._now)
        if event.kind is ClusterKind.PD:
            self._cluster(event.cluster_id).rest(self._now)
        self._has_new_life(event.node_id)

    def _node_down(self, event: NodeDown) -> None:
        ended = self._planned.down(event)
        if ended is None:
            return
        self._measurements.forget(event.node_id)
        if ended.kind is ClusterKind.PD:
            self._cluster(ended.cluster_id).rest(self._now)
        self._has_new_life(event.node_id)

    def _has_new_life(self, node_id: NodeId) -> None:
        """A node that came or went shares its time no more."""
        for state in self._clusters.values():
            if state.swing_node == node_id:
                state.end_swing()
                self._planned.unshare(node_id)
        self._rescue()

    def _rescue(self) -> None:
        """Where a cluster lost a role, takes back what is under way in it."""
        for name, ups in self._nodes.pd_clusters().items():
            ids = [up.node_id for up in ups]
            if not self._planned.can_serve(ids):
                self._planned.cancel(ids)
                self._cluster(name).end_swing()

    def _role_changed(self, event: RoleChanged) -> None:
        ended = self._changes.ended(event, self._now)
        if ended is None:
            return
        change, ok = ended
        if not ok:
            self._roll_back(change)
            return
        self._measurements.converted(change, self._now)
        state = self._cluster(self._nodes[change.node_id].cluster_id)
        if not change.is_slice:
            state.rest(self._now)
        if state.swing is not None and state.swing.node_id == change.node_id:
            state.swing.serves(change.new, self._now)

    def _roll_back(self, change: Change) -> None:
        self.num_rolled_back += 1
        self._planned.take_back(change)
        state = self._cluster(self._nodes[change.node_id].cluster_id)
        state.rest(self._now)
        if state.swing_node == change.node_id:
            state.end_swing()
        self._rescue()

    # What time brings.

    def _advance(self, now: float) -> None:
        self._now = max(self._now, now)
        if self._next_control_s is None:
            self._next_control_s = self._now + self._settings.period_s
            self._measurements.start_period(self._now)
        for change in self._changes.expire(self._now):
            self._roll_back(change)
        if self._now >= self._next_control_s:
            self._next_control_s = self._now + self._settings.period_s
            self._control()
        self._flip()

    def _control(self) -> None:
        self._measurements.start_period(self._now)
        is_silent = self._measurements.is_silent(self._now)
        clusters = self._nodes.pd_clusters()
        self._clusters = {name: self._cluster(name) for name in clusters}
        for name, ups in clusters.items():
            ids = [up.node_id for up in ups]
            state = self._clusters[name]
            if not self._planned.can_serve(ids):
                state.assessment = None
            elif is_silent:
                state.assessment = None
                state.end_swing()
                if not self._changes.pending(ids):
                    self._ask(self._planned.homecoming(ids, self._now))
            else:
                if not self._changes.pending(ids):
                    self._ask(self._planned.stray(ids, state.swing_node, self._now))
                nodes = self._planned.split(ids, state.swing_node)
                case = self._measurements.situation(ups, nodes, self._band, self._now)
                self._ask({} if case is None else state.decide(case))

    def _flip(self) -> None:
        for ids, swing in self._swings():
            if self._changes.pending(ids):
                continue
            old = self._planned[swing.node_id]
            nodes = self._planned.split(ids, swing.node_id)
            is_idle = self._measurements.is_idle(nodes, old)
            new = {swing.node_id: swing.wanted(self._now, is_idle=is_idle)}
            if new[swing.node_id] is not old and self._planned.can_serve(ids, new):
                self._ask(new, is_slice=True)

    def _ask(self, roles: Mapping[NodeId, Role], *, is_slice: bool = False) -> None:
        epoch = self._plan.epoch + 1
        self._planned.ask(roles, plan_epoch=epoch, is_slice=is_slice, now=self._now)

    def _publish(self) -> None:
        roles = self._planned.all_roles()
        budgets = {
            state.swing_node: state.budget_tokens
            for state in self._clusters.values()
            if state.swing_node is not None
            and state.budget_tokens is not None
            and roles.get(state.swing_node) is Role.MIXED
        }
        band = self._narrowed()
        plan = self._plan
        if (roles, budgets, band) != (plan.roles, plan.prefill_budgets, plan.threshold_band):
            self._plan = Plan(
                epoch=plan.epoch + 1, roles=roles, threshold_band=band, prefill_budgets=budgets
            )

    def _narrowed(self) -> tuple[int, int]:
        """The band around the optimum; it moves when that nears its edge."""
        margin = self._settings.band_margin
        found = self.assessment
        if margin is None or found is None or found.present.threshold_tokens is None:
            return self._plan.threshold_band
        best, (low, high) = found.present.threshold_tokens, self._plan.threshold_band
        centre = (low + high) / 2
        if (low, high) != self._band and abs(best - centre) <= margin / 2 * centre:
            return low, high
        first, last = self._band
        return (
            min(last, max(first, math.floor(best * (1 - margin)))),
            max(first, min(last, math.ceil(best * (1 + margin)))),
        )

    def _cluster(self, name: ClusterId) -> ClusterBalancer:
        return self._clusters.setdefault(name, ClusterBalancer(self._settings))

    def _swings(self) -> list[tuple[list[NodeId], Swing]]:
        found = []
        for name, ups in self._nodes.pd_clusters().items():
            state = self._clusters.get(name)
            if state is not None and state.swing is not None:
                found.append(([up.node_id for up in ups], state.swing))
        return found
