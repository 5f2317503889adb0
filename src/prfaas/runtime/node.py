"""What the jobs of one worker share: cache, memory, engine thread, schedule, and counters."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import attrs

from prfaas.cache import PoolGeometry
from prfaas.core import (
    BlockHash,
    ClusterId,
    ClusterKind,
    Handoff,
    NodeId,
    Role,
)
from prfaas.errors import ConfigError
from prfaas.hashing import block_hashes, hash_granules, root_hash
from prfaas.policy.conversion import Conversion
from prfaas.policy.schedule import StepSchedule
from prfaas.runtime.tasks import Tasks
from prfaas.seams import (
    Engine,
    EntryMemory,
    HybridKVCache,
    Memory,
    ReportsConfig,
    Reservation,
)
from prfaas.spec import ModelSpec
from prfaas.store import PoolMemory
from prfaas.transfer import EntryLayout
from prfaas.transfer.messages import MAX_LEASE_S

MAX_PUT_BYTES = 64 << 20
T = TypeVar("T")
LandingHook = Callable[[EntryLayout, EntryMemory, Reservation], None]
"""Test hook: sees, and may change, an entry between its landing and its installation."""


@attrs.frozen(kw_only=True)
class WorkerConfig:
    """One worker.

    Attributes:
        node_id, cluster_id, kind: who it is.
        role: what it admits at first; the balancer may change it.
        epoch: grows with every start of the node.
        handoff: convention for the state; equal on all nodes.
        lease_s: a transfer without progress for so long is given up.
        put_bytes: pieces of an entry are sent once so many bytes are ready, or at the end.
        max_requests: requests held at a time; more are refused with a reason.
        decode_slots: requests that decode at a time, others wait their turn; None: no limit.
        report_s: period of link samples and lease renewals.
        engine_niceness: added to the nice value of the engine's thread, where it computes on the
            same cores that move bytes; 0 leaves it alone.
    """

    node_id: NodeId = attrs.field()
    cluster_id: ClusterId = attrs.field()
    kind: ClusterKind = attrs.field()
    role: Role = attrs.field()
    epoch: int = attrs.field(default=1)
    handoff: Handoff = attrs.field(default=Handoff.AFTER_PROMPT)
    lease_s: float = 30.0
    put_bytes: int = 512 << 10
    max_requests: int = 256
    decode_slots: int | None = None
    report_s: float = 0.1
    engine_niceness: int = 0

    @node_id.validator
    @cluster_id.validator
    def _check_name(self, attribute: attrs.Attribute[str], value: str) -> None:
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{attribute.name} is {value!r}; it must be a non-empty string")

    @kind.validator
    def _check_kind(self, _: object, value: ClusterKind) -> None:
        if not isinstance(value, ClusterKind):
            raise ConfigError(f"kind is {value!r}; use ClusterKind.PRFAAS or ClusterKind.PD")

    @role.validator
    def _check_role(self, _: object, role: Role) -> None:
        if not isinstance(role, Role):
            raise ConfigError(f"role is {role!r}; use Role.PREFILL, Role.DECODE or Role.MIXED")
        if not self.allows(role):
            raise ConfigError(
                f"node {self.node_id!r} of a PRFAAS cluster has role {role.value}; such clusters "
                f"only prefill"
            )

    @epoch.validator
    def _check_epoch(self, _: object, value: int) -> None:
        if type(value) is not int or not 0 <= value < 2**63:
            raise ConfigError(f"epoch is {value!r}; it must be a whole number that fits 63 bits")

    @handoff.validator
    def _check_handoff(self, _: object, value: Handoff) -> None:
        if not isinstance(value, Handoff):
            raise ConfigError(
                f"handoff is {value!r}; use Handoff.AFTER_PROMPT or Handoff.BEFORE_LAST"
            )

    def __attrs_post_init__(self) -> None:
        if not 0 < self.lease_s <= MAX_LEASE_S or not self.report_s > 0:
            raise ConfigError(
                f"lease_s is {self.lease_s} and report_s {self.report_s}; they must be above 0, "
                f"and a lease at most {MAX_LEASE_S} s"
            )
        if self.decode_slots is not None and self.decode_slots < 1:
            raise ConfigError(
                f"decode_slots is {self.decode_slots}; it must be at least 1, or None for no limit"
            )
        if not 1 <= self.put_bytes <= MAX_PUT_BYTES or self.max_requests < 1:
            raise ConfigError(
                f"put_bytes is {self.put_bytes} and max_requests {self.max_requests}; both must be "
                f"at least 1, and put_bytes at most {MAX_PUT_BYTES}"
            )

    def allows(self, role: Role) -> bool:
        """Whether a node of this kind of cluster can have a role."""
        return self.kind is ClusterKind.PD or role is Role.PREFILL


class Node:
    """Resources of a worker. Owned by its event loop; only `in_engine` leaves it.

    Args:
        config: who this worker is.
        engine: used by one thread at a time.
        cache: bookkeeping of blocks.
        pool: the bytes of these blocks.
        clock: monotonic seconds.
        landing_hook: test hook.
    """

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        cache: HybridKVCache,
        pool: PoolMemory,
        *,
        clock: Callable[[], float],
        landing_hook: LandingHook | None = None,
    ) -> None:
        if pool.geometry.spec.fingerprint() != engine.spec.fingerprint():
            raise ConfigError(
                f"the pool is cut for {pool.geometry.spec.name}, the engine runs "
                f"{engine.spec.name}; make the geometry from engine.spec"
            )
        self.config = config
        self.engine = engine
        self.spec: ModelSpec = engine.spec
        self.cache = cache
        self.pool = pool
        self.clock = clock
        self.landing_hook = landing_hook
        self.schedule = StepSchedule(max_decodes=config.decode_slots)
        self.conversion = Conversion(config.role)
        self.counters: Counter[str] = Counter()
        self.tasks = Tasks()
        self.work_arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(
            1,
            thread_name_prefix=f"engine-{config.node_id}",
            initializer=_be_nice,
            initargs=(config.engine_niceness,),
        )

    @property
    def geometry(self) -> PoolGeometry:
        return self.pool.geometry

    @property
    def role(self) -> Role:
        """What it admits now."""
        return self.conversion.role

    @property
    def memory(self) -> Memory:
        return self.pool.memory

    def hashes(self, tokens: tuple[int, ...], tenant: str) -> tuple[BlockHash, ...]:
        """One hash per complete block of ``tokens``."""
        root = root_hash(self.spec.fingerprint(), tenant.encode())
        granules = hash_granules(root, tokens, self.spec.granule_tokens)
        return block_hashes(granules, self.geometry.block_size // self.spec.granule_tokens)

    async def in_engine(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def wake(self) -> None:
        """Tells the engine loop that the schedule has work."""
        self.work_arrived.set()

    def counts(self) -> dict[str, int]:
        """Everything that can be counted, for status and leak checks."""
        usage = self.cache.usage()
        return {
            **self.counters,
            "slabs": usage.num_slabs,
            "free_slabs": usage.num_free_slabs,
            "blocks": sum(usage.blocks.values()),
            "indexed_blocks": sum(usage.indexed.values()),
            "reserved_blocks": sum(usage.reserved.values()),
            "requests": usage.num_requests,
            "leases": usage.num_leases,
            "checkpoints_skipped": usage.num_checkpoints_skipped,
        }

    def effective_config(self) -> Mapping[str, str]:
        """What is really in force, for the status report."""
        segment = self.engine.segment_tokens
        exact = self.geometry.block_size % segment == 0
        engine = self.engine.effective_config() if isinstance(self.engine, ReportsConfig) else {}
        return {
            "model": self.spec.name,
            "fingerprint": self.spec.fingerprint().hex(),
            "role": self.role.value,
            "handoff": self.config.handoff.value,
            "block_size": str(self.geometry.block_size),
            "segment_tokens": str(segment),
            "resumed_prefill": "bit-equal" if exact else "equal within rounding",
            "pool_bytes": str(self.geometry.pool_bytes),
            **engine,
        }

    def close(self) -> None:
        """Ends the engine's thread after its current step."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _be_nice(niceness: int) -> None:
    """On Linux the nice value belongs to the calling thread."""
    if niceness:
        os.nice(niceness)
