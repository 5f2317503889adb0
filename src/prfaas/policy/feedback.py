"""What the queues say about the model: a bounded correction of the balance that it computes."""

from __future__ import annotations

import math

_KEEP = 0.9
"""Share of the past that one tick leaves standing in the usual gap."""


class QueueFeedback:
    """Learns by how much the model misjudges the two prefill sides, from which queue stays long.

    The state is the logarithm of a factor on the local nodes' strength: above 1 sends more work to
    them. It grows by one ``step`` per tick while the remote queue is the longer one by more than
    ``gap_s`` *and* the gap is not below what it has been lately, and falls for the opposite. A
    queue integrates imbalance already: to go on while the gap closes would swing for ever. Where
    the queues agree the factor stays, as it says something about the nodes that holds for other
    links and lengths too.

    Args:
        step: change of the logarithm per tick.
        limit: greatest absolute value of the logarithm.
        gap_s: difference of the queues that is no noise.
    """

    def __init__(self, *, step: float, limit: float, gap_s: float) -> None:
        self._step = step
        self._limit = limit
        self._gap_s = gap_s
        self._log = 0.0
        self._usual_s = 0.0

    @property
    def factor(self) -> float:
        """How many of the model's local nodes one local node is worth."""
        return math.exp(self._log)

    def tick(
        self, remote_queue_s: float, local_queue_s: float, *, can_rise: bool, can_fall: bool
    ) -> bool:
        """Takes in the queues, in seconds of work per node. Returns whether the factor changed.

        Args:
            remote_queue_s, local_queue_s: finite, at least 0.
            can_rise, can_fall: whether t can still move that way. Where it cannot, the factor does
                not go on in that direction either, or it would have to come all the way back.
        """
        gap_s = remote_queue_s - local_queue_s
        usual_s = self._usual_s
        self._usual_s += (1 - _KEEP) * (gap_s - usual_s)
        if gap_s > self._gap_s and gap_s >= usual_s and can_rise:
            wanted = self._log + self._step
        elif gap_s < -self._gap_s and gap_s <= usual_s and can_fall:
            wanted = self._log - self._step
        else:
            return False
        before, self._log = self._log, min(self._limit, max(-self._limit, wanted))
        return self._log != before

    def check(self) -> None:
        """Asserts the invariants."""
        assert abs(self._log) <= self._limit, f"correction {self._log}"
