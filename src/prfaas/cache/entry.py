"""A live reservation, and the record of what became findable."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from prfaas.core import BlockHash, BlockId, GroupId
from prfaas.errors import ConfigError, LocalProtocolError
from prfaas.seams.cache import CacheEvent, Reservation


@attrs.define(kw_only=True)
class Entry:
    """A reservation and how much of it is findable.

    Attributes:
        reservation: what the request was given.
        chains: per token group and depth, the indexed block: ours, or the equal one of another,
            which is then pinned too, so that the parents of everything we index stay.
        waiting: slots by position that `commit` has not reached.
        depth: blocks reused or committed.
        last_hash: hash at that depth; None at depth 0.
    """

    reservation: Reservation
    chains: dict[GroupId, list[BlockId]]
    waiting: dict[int, Mapping[GroupId, BlockId]]
    depth: int
    last_hash: BlockHash | None

    def check_commit(
        self, block_hashes: Sequence[BlockHash], num_tokens: int, block_size: int
    ) -> None:
        """Raises LocalProtocolError unless these hashes continue what was committed before."""
        reserved = self.reservation.num_tokens
        if not 0 <= num_tokens <= reserved or len(block_hashes) != num_tokens // block_size:
            raise LocalProtocolError(
                f"commit of {num_tokens} tokens with {len(block_hashes)} hashes, of {reserved} "
                f"reserved tokens; give one hash per complete block of {block_size} tokens: a "
                "block that is not full cannot be found by others"
            )
        depth = self.depth
        if len(block_hashes) >= depth > 0 and block_hashes[depth - 1] != self.last_hash:
            raise LocalProtocolError(
                f"hash {depth} of request {self.reservation.request_id!r} differs from the one "
                "matched or committed before; commit the hashes of the same prompt"
            )


class EventLog:
    """Cache events in order, numbered from 1 without gaps.

    Args:
        max_events: events kept; the oldest are dropped, which a reader sees as a gap.
    """

    def __init__(self, max_events: int) -> None:
        if max_events < 1:
            raise ConfigError(f"max_events is {max_events}; keep at least 1")
        self._events: deque[CacheEvent] = deque(maxlen=max_events)
        self.sequence = 0

    def append(
        self,
        group_id: GroupId,
        *,
        stored: Sequence[BlockHash] = (),
        removed: Sequence[BlockHash] = (),
    ) -> None:
        """Records a change of one group, unless it is empty."""
        if stored or removed:
            self.sequence += 1
            event = CacheEvent(
                sequence=self.sequence,
                group_id=group_id,
                stored=tuple(stored),
                removed=tuple(removed),
            )
            self._events.append(event)

    def take(self) -> tuple[CacheEvent, ...]:
        """Returns and forgets what is kept."""
        events = tuple(self._events)
        self._events.clear()
        return events
