"""Decides for one PD cluster which nodes to convert, and remembers what it decided."""

from __future__ import annotations

import math

import attrs

from prfaas.core import NodeId, Role
from prfaas.policy.balancer_settings import BalancerSettings
from prfaas.policy.situation import Assessment, ClusterNodes, Situation
from prfaas.policy.split import FractionalSplit
from prfaas.policy.swing import Swing

_SWING = 2
"""The proposal that a node serves both stages; 1 and -1 move nodes to prefill and to decode."""
_CALM = 0.1
"""A swing node stops when the load falls this far below what it was started at."""
_BUDGET_CHANGE = 0.1
"""Relative change of a prefill budget that is worth a new plan."""


class ClusterBalancer:
    """The decisions for one PD cluster.

    Args:
        settings: when to convert.

    Attributes:
        assessment: what the last period found.
        swing_node: the node that serves both stages, if any.
        swing: its slices, if it alternates.
        budget_tokens: its prompt tokens per decode step, if it is MIXED.
    """

    def __init__(self, settings: BalancerSettings) -> None:
        self._settings = settings
        self._rest_until_s = -math.inf
        self._last_direction = 0
        self._last_change_s = -math.inf
        self._streak = (0, 0)
        self._queues = (0, 0)
        self._num_grown = [0, 0]
        self._mode: str | None = None
        self.assessment: Assessment | None = None
        self.swing_node: NodeId | None = None
        self.swing: Swing | None = None
        self.budget_tokens: int | None = None

    def __repr__(self) -> str:
        found = self.assessment
        if found is None:
            return "<ClusterBalancer, nothing measured>"
        return (
            f"<ClusterBalancer {found.present.num_prefill:g}P/{found.present.num_decode:g}D at "
            f"{found.worst_utilisation:.2f} of {found.present_rps:.2f} rps: {found.reason}>"
        )

    def rest(self, now: float) -> None:
        """Something changed: nothing is converted until it shows in what is measured."""
        self._rest_until_s = now + self._settings.cooldown_s
        self._streak = (0, 0)

    def end_swing(self) -> None:
        """No node serves both stages any more."""
        self._mode = self.swing_node = self.swing = self.budget_tokens = None

    def decide(self, case: Situation) -> dict[NodeId, Role]:
        """The roles to change now, usually none. Called once per control period."""
        nodes, shared = case.nodes, case.nodes.num_mixed / 2
        found = self._fractional(case)
        present = case.model.at(len(nodes.prefill) + shared, len(nodes.decode) + shared)
        if self.swing_node is not None and found is not None:
            present = found.load
        self.assessment = Assessment(
            arrival_rps=case.arrival_rps,
            present=present,
            best=case.model.best_whole(nodes.num_nodes, nodes.num_mixed),
            fractional=found,
            measured=case.measured(),
            reason="",
        )
        self._watch_queues(case)
        if case.is_changing:
            return self._stay("a change is under way")
        if self.swing_node is not None:
            return self._keep_swinging(case, found, self.assessment)
        if case.now < self._rest_until_s:
            return self._stay("resting after a change")
        if found is not None and self._wants_swing(found, case, self.assessment):
            return self._start_swing(found, case)
        return self._convert(case, self.assessment)

    def _convert(self, case: Situation, found: Assessment) -> dict[NodeId, Role]:
        distance = round(found.best.num_prefill - found.present.num_prefill)
        direction = (distance > 0) - (distance < 0)
        gain = found.best.gain_over(found.present)
        if not self._has_pressure(found):
            return self._stay("no pressure")
        if direction == 0 or gain < self._needed_gain(direction, case):
            return self._stay(f"no split is better by enough (gain {gain:.3f})")
        donor, role = _donor(case.nodes, takes_decoders=direction > 0)
        num = min(abs(distance), len(donor) // 2) if gain >= self._settings.large_gain else 1
        num = next((n for n in (num, 1) if self._is_safe(case, found, direction * n)), 0)
        if num == 0 or len(donor) < 2:
            return self._stay("the stage that gives up a node would be too busy")
        chosen = [n for n in case.loads.least_loaded(donor, role) if case.may_try(n)][:num]
        if not chosen:
            return self._stay("every node that could convert failed lately")
        if not self._is_confirmed(direction):
            return {}
        self._last_direction, self._last_change_s = direction, case.now
        new = Role.PREFILL if direction > 0 else Role.DECODE
        self._say(f"{len(chosen)} of {role.value} to {new.value} (gain {gain:.3f})")
        return dict.fromkeys(chosen, new)

    def _is_safe(self, case: Situation, found: Assessment, shift: int) -> bool:
        """Whether moving this many nodes to prefill helps and leaves the donor enough."""
        if shift == 0:
            return False
        present, rate = found.present, found.arrival_rps
        after = case.model.at(present.num_prefill + shift, present.num_decode - shift)
        donor_s = after.decode_s if shift > 0 else after.produce_s
        is_overloaded = present.worst_s * rate > 1
        return after.worst_s < present.worst_s and (
            is_overloaded or donor_s * rate <= self._settings.safe_utilisation
        )

    def _needed_gain(self, direction: int, case: Situation) -> float:
        settings = self._settings
        needed = settings.min_gain + 0.5 / math.sqrt(max(1, case.num_arrivals))
        if direction != -self._last_direction or settings.reversal_s == 0:
            return needed
        faded = min(1.0, (case.now - self._last_change_s) / settings.reversal_s)
        return max(needed, settings.reversal_gain * (1 - faded))

    def _has_pressure(self, found: Assessment) -> bool:
        busiest = max([found.worst_utilisation, *found.measured.values()])
        return (
            busiest >= self._settings.high_utilisation
            or max(self._num_grown) >= self._settings.num_growing
        )

    def _watch_queues(self, case: Situation) -> None:
        queues = (
            case.loads.queued_tokens(case.nodes.prefill),
            case.loads.num_waiting(case.nodes.decode),
        )
        for i, (before, after) in enumerate(zip(self._queues, queues, strict=True)):
            self._num_grown[i] = self._num_grown[i] + 1 if after > before else 0
        self._queues = queues

    def _is_confirmed(self, proposal: int) -> bool:
        before, num = self._streak
        self._streak = (proposal, num + 1 if before == proposal else 1)
        self._say("waiting for confirmation")
        return self._streak[1] >= self._settings.num_confirmations

    def _stay(self, reason: str) -> dict[NodeId, Role]:
        self._streak = (0, 0)
        self._say(reason)
        return {}

    def _say(self, reason: str) -> None:
        assert self.assessment is not None
        self.assessment = attrs.evolve(self.assessment, reason=reason)

    # A node that serves both stages.

    def _fractional(self, case: Situation) -> FractionalSplit | None:
        """The best split of the present mode, or of any allowed one."""
        nodes, allowed = case.nodes, self._settings.fractional
        if self._mode is not None:
            return case.model.fractional(self._mode, nodes.num_nodes, len(nodes.prefill))
        if nodes.num_mixed or allowed == "off":
            return None
        modes = ("slices", "mixed") if allowed == "auto" else (allowed,)
        found = [case.model.fractional(mode, nodes.num_nodes) for mode in modes]
        return min(
            (split for split in found if split is not None),
            key=lambda split: split.load.worst_s,
            default=None,
        )

    def _wants_swing(self, split: FractionalSplit, case: Situation, found: Assessment) -> bool:
        return (
            len(case.nodes.prefill) in (split.num_others, split.num_others + 1)
            and split.load.gain_over(found.best) >= self._settings.min_gain
            and found.best.worst_s * found.arrival_rps >= self._settings.high_utilisation
        )

    def _start_swing(self, split: FractionalSplit, case: Situation) -> dict[NodeId, Role]:
        is_decoding = len(case.nodes.prefill) == split.num_others
        donor, role = _donor(case.nodes, takes_decoders=is_decoding)
        chosen = [n for n in case.loads.least_loaded(donor, role) if case.may_try(n)]
        if not chosen:
            return self._stay("every node that could share its time failed lately")
        if not self._is_confirmed(_SWING):
            return {}
        self._mode, self.swing_node = split.mode, chosen[0]
        self._say(f"{chosen[0]} prefills {split.share:.2f} of its time, {split.mode}")
        if split.mode == "mixed":
            self.budget_tokens = case.budget_tokens(split)
            return {chosen[0]: Role.MIXED}
        self.swing = Swing(
            chosen[0],
            role=role,
            share=split.share,
            period_s=case.slice_period_s,
            now=case.now,
        )
        return {}

    def _keep_swinging(
        self, case: Situation, split: FractionalSplit | None, found: Assessment
    ) -> dict[NodeId, Role]:
        node_id, is_mixed = self.swing_node, self.swing is None
        assert node_id is not None
        if split is None or not self._is_worth_it(split, found):
            self.end_swing()
            self.rest(case.now)
            self._say("no node shares its time any more")
            prefills = found.best.num_prefill > len(case.nodes.prefill)
            new = Role.PREFILL if prefills else Role.DECODE
            return {node_id: new} if is_mixed else {}
        self._say(f"{node_id} prefills {split.share:.2f} of its time, {split.mode}")
        if self.swing is not None:
            self.swing.retune(split.share, case.slice_period_s, case.now)
            return {}
        budget, before = case.budget_tokens(split), self.budget_tokens or 0
        if abs(budget - before) > _BUDGET_CHANGE * before:
            self.budget_tokens = budget
        return {}

    def _is_worth_it(self, split: FractionalSplit, found: Assessment) -> bool:
        return (
            split.load.gain_over(found.best) >= self._settings.min_gain / 2
            and found.best.worst_s * found.arrival_rps >= self._settings.high_utilisation - _CALM
        )


def _donor(nodes: ClusterNodes, *, takes_decoders: bool) -> tuple[tuple[NodeId, ...], Role]:
    return (nodes.decode, Role.DECODE) if takes_decoders else (nodes.prefill, Role.PREFILL)
