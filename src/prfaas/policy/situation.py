"""What a decision about one PD cluster looks at, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from prfaas.core import NodeId
from prfaas.policy.node_loads import NodeLoads
from prfaas.policy.split import FractionalSplit, SplitLoad, SplitModel


@attrs.frozen(kw_only=True)
class ClusterNodes:
    """The nodes of a PD cluster by role; the swing node is in neither list."""

    prefill: tuple[NodeId, ...]
    decode: tuple[NodeId, ...]
    num_mixed: int = 0
    swing: NodeId | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes that can be converted."""
        return len(self.prefill) + len(self.decode) + (self.swing is not None)


@attrs.frozen(kw_only=True)
class Situation:
    """One PD cluster at the end of a control period.

    Attributes:
        model: what splits of its nodes sustain.
        nodes, loads: its nodes, and what was measured on them.
        arrival_rps, num_arrivals: this cluster's part of the arrivals, and those of the window.
        step_s: a decode step.
        slice_period_s: a cycle of an alternating node.
        may_try: whether a node can be asked to convert.
        is_changing: a change of one of its nodes is under way.
        now: seconds.
    """

    model: SplitModel
    nodes: ClusterNodes
    loads: NodeLoads
    arrival_rps: float
    num_arrivals: int
    step_s: float
    slice_period_s: float
    may_try: Callable[[NodeId], bool]
    is_changing: bool
    now: float

    def measured(self) -> dict[str, float]:
        """Busy shares of the prefill and the decode nodes, where measured."""
        found = {
            "prefill": self.loads.prefill_busy(self.nodes.prefill),
            "decode": self.loads.decode_busy(self.nodes.decode),
        }
        return {name: busy for name, busy in found.items() if busy is not None}

    def budget_tokens(self, split: FractionalSplit) -> int:
        """Prompt tokens per decode step that take the split's share of the time of a step."""
        rate = self.model.tokens_per_prefill_s(split.load.threshold_tokens)
        return max(1, round(split.share * self.step_s * rate))


@attrs.frozen(kw_only=True)
class Assessment:
    """What the last control period found about one PD cluster.

    Attributes:
        arrival_rps: measured rate, this cluster's part of it.
        present: the split that is planned now.
        best: the best split of whole nodes.
        fractional: the best split in which one node shares its time, if that is allowed.
        measured: busy shares of the prefill and the decode nodes, where measured.
        reason: why nodes are, or are not, converted.
    """

    arrival_rps: float
    present: SplitLoad
    best: SplitLoad
    fractional: FractionalSplit | None
    measured: Mapping[str, float]
    reason: str

    @property
    def utilisations(self) -> dict[str, float]:
        """Predicted for each stage of the present split at the measured rate."""
        stages_s = self.present.stages_s()
        return {name: self.arrival_rps * seconds for name, seconds in stages_s.items()}

    @property
    def worst_utilisation(self) -> float:
        return self.arrival_rps * self.present.worst_s

    @property
    def binding(self) -> str:
        """The stage that the present split saturates first."""
        return self.present.binding

    @property
    def present_rps(self) -> float:
        return self.present.sustainable_rps

    @property
    def best_rps(self) -> float:
        """The greater of what whole and fractional splits sustain."""
        fractional_rps = self.fractional.load.sustainable_rps if self.fractional else 0.0
        return max(self.best.sustainable_rps, fractional_rps)
