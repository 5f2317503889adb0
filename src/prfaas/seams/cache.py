"""The HybridKVCache seam: which blocks and states serve a request, and for how long.

A cache holds *bookkeeping* only: block ids and state slots. The bytes live in a block store or in
the engine's own tensors, addressed by the same ids.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import attrs

from prfaas.core import BlockHash, BlockId, GroupId, RequestId
from prfaas.errors import LocalProtocolError


class PageState(enum.Enum):
    """Life of a block or state slot."""

    FREE = "free"
    WRITING = "writing"  # reserved, content incomplete, visible to its owner only
    VALID = "valid"  # complete, immutable, findable, evictable
    LOADING = "loading"  # being filled from a slower tier
    PINNED = "pinned"  # complete and in use by at least one request


@attrs.frozen(kw_only=True)
class PrefixMatch:
    """What the cache can serve of a prompt. A value that can be stored or sent: it pins nothing.

    `HybridKVCache.reserve` resolves it by its hashes. Block ids are recycled, while a hash cannot
    come to mean something else; the ids say where things were at the time of the lookup.

    Attributes:
        num_cached_tokens: longest block-aligned length that *every* group can serve, at most the
            ``max_tokens`` of the lookup. 0 means a miss.
        num_held_tokens: longest block-aligned length whose token rows are present in every token
            group, state or not (>= num_cached_tokens). A receiver that holds rows needs only the
            rest of them; recurrent state always travels whole.
        block_ids: per token group, the blocks of the first ``num_held_tokens`` tokens.
        slot_ids: per slot group, the checkpoint exactly at ``num_cached_tokens``; empty on a miss.
        depth_tokens: how far each group alone could go, for diagnosis.
        cached_hash: hash of the first ``num_cached_tokens`` tokens; None on a miss.
        held_hash: hash of the first ``num_held_tokens`` tokens; None if there are none.
    """

    num_cached_tokens: int = 0
    num_held_tokens: int = 0
    block_ids: Mapping[GroupId, tuple[BlockId, ...]] = attrs.field(factory=dict)
    slot_ids: Mapping[GroupId, BlockId] = attrs.field(factory=dict)
    depth_tokens: Mapping[GroupId, int] = attrs.field(factory=dict)
    cached_hash: BlockHash | None = None
    held_hash: BlockHash | None = None


@attrs.frozen(kw_only=True)
class Reservation:
    """Blocks and slots that one request may use until it is released.

    Attributes:
        request_id: the owner.
        num_tokens: length the reservation covers; may end inside a block.
        num_reused_tokens: leading tokens whose blocks were already valid and are now pinned.
        block_tables: per token group, ``ceil(num_tokens / block_size)`` block ids.
        resume_slots: per slot group, the pinned checkpoint at ``num_reused_tokens`` to start from
            (empty when the request starts from nothing, or when it only receives).
        tail_slots: per slot group, a fresh slot for the state at ``num_tokens``.
        checkpoint_slots: position in tokens -> per slot group, a fresh slot for the state there.
    """

    request_id: RequestId
    num_tokens: int
    num_reused_tokens: int
    block_tables: Mapping[GroupId, tuple[BlockId, ...]]
    resume_slots: Mapping[GroupId, BlockId]
    tail_slots: Mapping[GroupId, BlockId]
    checkpoint_slots: Mapping[int, Mapping[GroupId, BlockId]]


@attrs.frozen(kw_only=True)
class CacheEvent:
    """One change of what a cache can serve; the only thing the outside may know.

    Attributes:
        sequence: +1 for each event of one cache epoch; a gap means that events were lost.
        group_id: the KV cache group that changed.
        stored: block hashes that became findable in that group, parents before children.
        removed: block hashes that are no longer findable in it.
    """

    sequence: int
    group_id: GroupId
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()


@attrs.frozen(kw_only=True)
class CacheUsage:
    """Counts for one instant; ``reserved`` goes back to 0 when every request is released.

    Attributes:
        num_slabs: slabs in the pool.
        num_free_slabs: slabs that belong to no group now.
        blocks: per group, blocks (or slots) handed out: writing, valid and pinned together.
        indexed: per group, blocks that a lookup can find (prefix entries).
        reserved: per group, blocks that a live reservation refers to, shared ones counted once.
        num_requests: live reservations.
        num_leases: live reservations that carry a deadline (transfer entries).
        num_checkpoints_skipped: checkpoints asked for and not granted so far, for want of slots.
    """

    num_slabs: int
    num_free_slabs: int
    blocks: Mapping[GroupId, int]
    indexed: Mapping[GroupId, int]
    reserved: Mapping[GroupId, int]
    num_requests: int
    num_leases: int
    num_checkpoints_skipped: int = 0


class HybridKVCache(ABC):
    """Prefix cache and transfer entries of a hybrid model; synchronous, one owner, never blocks.

    Token groups (full attention, MLA) are cached block by block and match partially; slot groups
    (linear, conv and sliding-window state) are cached per request and match only where a checkpoint
    sits exactly on the boundary. A refusal changes nothing. Lookups do not mutate.
    """

    @abstractmethod
    def match(self, block_hashes: Sequence[BlockHash], *, max_tokens: int) -> PrefixMatch:
        """Longest usable prefix of at most ``max_tokens``. Reads only.

        A prompt that is about to be computed asks for N-1, since its last token is always run; a
        receiver that only looks for rows asks for all that it will be sent.
        """

    @abstractmethod
    def reserve(
        self,
        request_id: RequestId,
        num_tokens: int,
        match: PrefixMatch,
        *,
        now: float,
        checkpoints: Sequence[int] = (),
        receive: bool = False,
        lease_until_s: float | None = None,
    ) -> Reservation:
        """Pins the matched blocks and takes fresh ones for the rest of ``num_tokens``.

        Args:
            request_id: owner; must not own a reservation already (LocalProtocolError).
            num_tokens: tokens that the entry will cover; need not end on a block.
            match: a result of `match` of this cache, or an empty one; blocks that vanished since
                make the call fail with CapacityError, so that the caller matches again.
            now: used for recency.
            checkpoints: block-aligned positions above the match's cached length and at most
                ``num_tokens``, for which state slots are wanted, the most valuable first. They are
                the first thing to be given up when slots are scarce, from the end: the reservation
                then carries fewer of them.
            receive: the entry arrives from elsewhere: reuse ``num_held_tokens`` rows and pin no
                checkpoint. Otherwise reuse ``num_cached_tokens`` and pin the checkpoint there.
            lease_until_s: deadline of a transfer entry; None for none.

        Raises:
            CapacityError: not enough evictable room. Nothing was taken, nothing was evicted.
            ConfigError: ``num_tokens`` below the reused length, or a wrong checkpoint position.
            LocalProtocolError: a second reservation, or a match that names no hash.
        """

    @abstractmethod
    def commit(
        self, request_id: RequestId, block_hashes: Sequence[BlockHash], num_tokens: int, now: float
    ) -> None:
        """Makes complete blocks and checkpoints up to ``num_tokens`` findable; a tail never is.

        May be called again with a larger ``num_tokens``. ``block_hashes`` has one hash per complete
        block of the first ``num_tokens`` tokens. A state slot counts as complete only at a position
        that the reservation names and that is at most ``num_tokens``. A block whose hash is already
        indexed stays with its owner and is freed on release. After the release there is nothing
        left to commit, which is no error: completion and abort may cross.

        Raises:
            LocalProtocolError: more tokens than reserved, not one hash per complete block, or
                hashes of another prompt than before. Nothing changed.
        """

    @abstractmethod
    def renew(self, request_id: RequestId, lease_until_s: float) -> None:
        """Moves the lease's deadline. LocalProtocolError if the request holds no reservation."""

    @abstractmethod
    def expired(self, now: float) -> tuple[RequestId, ...]:
        """Requests whose lease has run out. Reads only: the owner first stops the transport from
        touching the memory, then calls `release`."""

    @abstractmethod
    def release(self, request_id: RequestId) -> None:
        """Lets go of a reservation: findable blocks become evictable, all others free. Idempotent,
        in any order with lease expiry and commit."""

    @abstractmethod
    def take_events(self) -> tuple[CacheEvent, ...]:
        """Events since the last call, in order."""

    @abstractmethod
    def snapshot(self) -> tuple[int, Mapping[GroupId, tuple[BlockHash, ...]]]:
        """Sequence number of the last event, and everything findable after it, parents before
        children: what a listener needs to start, or after a gap. Reads only."""

    @abstractmethod
    def usage(self) -> CacheUsage:
        """Counts now. Reads only."""

    @abstractmethod
    def check(self) -> None:
        """Asserts every invariant; slow, for tests and health checks."""

    def commands(self) -> tuple[object, ...]:
        """Work for slower tiers, each with a ``command_id`` and handed out once; a cache with one
        tier has none."""
        return ()

    def complete(self, command_id: int, *, ok: bool = True) -> None:
        """Reports that a command has been carried out, or (not ``ok``) that it failed and what it
        should have brought is not there. LocalProtocolError for a command that is not pending."""
        raise LocalProtocolError(
            f"command {command_id} was never issued: this cache has one tier and gives no commands"
        )
