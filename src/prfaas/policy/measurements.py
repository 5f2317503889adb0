"""Everything that the balancer measures, and the situation of a cluster that it makes of it."""

from __future__ import annotations

import math

import attrs

from prfaas.core import NodeId, Role
from prfaas.policy.balancer_settings import BalancerSettings
from prfaas.policy.demand import Demand, MeasuredDemand
from prfaas.policy.load_curve import PrefillSeconds
from prfaas.policy.node_loads import NodeLoads
from prfaas.policy.planned_roles import PlannedRoles
from prfaas.policy.role_changes import Change
from prfaas.policy.situation import ClusterNodes, Situation
from prfaas.policy.split import SplitModel
from prfaas.seams import Arrived, LinkRate, NodeLoad, NodeUp, Served
from prfaas.spec import ModelSpec

_NEW_DRAIN_SHARE = 0.3
"""Weight of the newest drain in the smoothed drain time."""
_WAITING_REQUESTS = 2
"""Mean requests per prefill node from which prompts count as waiting."""


@attrs.frozen(kw_only=True)
class Profiles:
    """What is known beforehand; see `ThroughputBalancer`, which takes the same arguments."""

    spec: ModelSpec
    remote_prefill_s: PrefillSeconds | None
    local_prefill_s: PrefillSeconds | None
    num_slots: int
    decode_step_s: float | None
    output_tokens: float


class Measurements:
    """Demand, node loads, link rate and drain times.

    Args:
        profiles: what is known beforehand.
        settings: windows.
        link_bps: B_out until it is measured.
        planned: the nodes and their planned roles, read only.
    """

    def __init__(
        self,
        profiles: Profiles,
        settings: BalancerSettings,
        link_bps: float | None,
        planned: PlannedRoles,
    ) -> None:
        self._profiles = profiles
        self._settings = settings
        self._link_bps = link_bps
        self._planned = planned
        self._loads = NodeLoads(settings.num_ignored_samples)
        self._demand = Demand(
            window_s=settings.window_s,
            max_window_s=settings.max_window_s,
            window_arrivals=settings.window_arrivals,
            output_tokens=profiles.output_tokens,
            decode_step_s=profiles.decode_step_s,
        )
        self._measured: MeasuredDemand | None = None
        self._drain_s: float | None = None

    def __repr__(self) -> str:
        return f"<Measurements {self._demand!r}, {self._loads!r}, link {self._link_bps}>"

    def observe(self, event: Arrived | Served | NodeLoad | LinkRate, now: float) -> None:
        """Takes in one event; what is not a measurement (nan, 0, stale) changes nothing."""
        if isinstance(event, Arrived):
            self._demand.arrived(event.routed_tokens, now)
        elif isinstance(event, Served):
            self._demand.served(event, now)
        elif isinstance(event, NodeLoad):
            up = self._planned.nodes.get(event.node_id)
            if up is not None and up.epoch == event.epoch:
                busy_s = self._loads.observe(event, now)
                self._demand.busy(up.kind, busy_s or 0.0, now)
        elif event.link_bps is not None and 0 < event.link_bps < math.inf:
            self._link_bps = event.link_bps

    def begin(self, node_id: NodeId, now: float) -> None:
        """A node came up: its first samples are cold."""
        self._loads.begin(node_id, now)

    def forget(self, node_id: NodeId) -> None:
        """A node went."""
        self._loads.forget(node_id)

    def converted(self, change: Change, now: float) -> None:
        """A change is done: the node is cold, and its drain, if it had one, was measured."""
        self._loads.begin(change.node_id, now)
        if change.old is Role.DECODE and change.new is Role.PREFILL:
            drain_s = now - change.asked_s
            share = 1.0 if self._drain_s is None else _NEW_DRAIN_SHARE
            self._drain_s = (1 - share) * (self._drain_s or 0.0) + share * drain_s

    def start_period(self, now: float) -> None:
        """Measures the window that ends now, and begins a new control period."""
        queued_tokens = self._loads.queued_tokens(self._planned.nodes.ids())
        self._measured = self._demand.measure(now, queued_tokens)
        self._demand.start_period(now, queued_tokens)

    def is_silent(self, now: float) -> bool:
        """Whether requests came once, but none for long."""
        last_s = self._demand.last_arrival_s
        return last_s is not None and now - last_s >= self._settings.silence_s

    def is_idle(self, nodes: ClusterNodes, role: Role) -> bool:
        """Whether the stage of the swing node's role has nothing waiting while the other one has.

        An alternating node in a role counts as one of that stage.
        """
        swing = () if nodes.swing is None else (nodes.swing,)
        num_waiting = self._loads.num_waiting((*nodes.decode, *swing))
        queued_tokens = self._loads.queued_tokens((*nodes.prefill, *swing))
        if role is Role.PREFILL:
            return queued_tokens == 0 and num_waiting > 0
        if num_waiting > 0 or self._measured is None:
            return False
        waiting = _WAITING_REQUESTS * self._measured.mean_tokens * len(nodes.prefill)
        return queued_tokens > waiting > 0

    def situation(
        self, ups: list[NodeUp], nodes: ClusterNodes, band: tuple[int, int], now: float
    ) -> Situation | None:
        """One PD cluster at the end of the period; None while there is too little to go by."""
        demand, profiles, settings = self._measured, self._profiles, self._settings
        if demand is None or demand.num_arrivals < max(1, settings.min_arrivals):
            return None
        prices = demand.prefill_s(profiles.remote_prefill_s, profiles.local_prefill_s)
        if prices is None or demand.step_s is None or nodes.num_nodes < 2:
            return None
        share = len(ups) / sum(map(len, self._planned.nodes.pd_clusters().values()))
        num_slots = sum(up.num_slots or profiles.num_slots for up in ups) / len(ups)
        generate_s = demand.output_tokens * demand.step_s
        # A drain leaves half of the batch idle on average.
        idle_s = (generate_s if self._drain_s is None else self._drain_s) / 2
        period_s = settings.slice_period_s or max(
            2 * settings.period_s, idle_s / settings.slice_loss
        )
        model = SplitModel(
            spec=profiles.spec,
            weights=demand.weights,
            num_remote=len(self._planned.nodes.remote()) * share,
            remote_prefill_s=prices[0],
            local_prefill_s=prices[1],
            decode_node_s=generate_s / num_slots,
            link_bps=self._link_bps and self._link_bps * share,
            band=band,
            slice_loss=idle_s / period_s,
            decode_base_share=settings.decode_base_share,
        )
        changes = self._planned.changes
        return Situation(
            model=model,
            nodes=nodes,
            loads=self._loads,
            arrival_rps=demand.arrival_rps * share,
            num_arrivals=demand.num_arrivals,
            step_s=demand.step_s,
            slice_period_s=period_s,
            may_try=lambda node_id: changes.may_try(node_id, now),
            is_changing=bool(changes.pending(up.node_id for up in ups)),
            now=now,
        )
