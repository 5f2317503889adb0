"""What a worker tells its gateways of itself: its role, its cache, the speed of its links."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from prfaas.core import Role
from prfaas.errors import TransportError
from prfaas.runtime.line import Line
from prfaas.runtime.messages import (
    CacheBody,
    CacheChanged,
    CacheSnapshot,
    Message,
    NodeInfo,
    Rates,
    RoleSet,
    Status,
)
from prfaas.runtime.node import Node
from prfaas.seams import ChangePhase, Delivery

MAX_HASHES = 100_000
"""In one message, which must fit into a frame."""


class Reports:
    """Every gateway that registered with a worker hears the same."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._gateways: set[Line] = set()

    def __repr__(self) -> str:
        return f"<Reports to {sorted(line.peer_id for line in self._gateways)}>"

    def register(self, line: Line) -> None:
        """Introduces the worker to a gateway, and reports to it from now on."""
        config = self._node.config
        line.post(
            NodeInfo(
                node_id=config.node_id,
                cluster_id=config.cluster_id,
                kind=config.kind.value,
                role=self._node.role.value,
                epoch=config.epoch,
                block_size=self._node.geometry.block_size,
                max_active=config.max_requests,
                num_slots=config.decode_slots,
            )
        )
        self.cache()  # earlier events are in the snapshot
        self.snapshot(line)
        conversion = self._node.conversion
        if conversion.is_draining:
            line.post(_role_set(conversion.role, conversion.plan_epoch, ChangePhase.STARTED))
        self._gateways.add(line)

    def remove(self, line: Line) -> None:
        """Forgets a gateway. Idempotent."""
        self._gateways.discard(line)

    def snapshot(self, line: Line) -> None:
        """Everything that the cache can serve."""
        self.cache()
        sequence, stored = self._node.cache.snapshot()
        line.post(CacheSnapshot(sequence=sequence, stored=dict(stored.items())))

    def cache(self) -> None:
        """What changed in the cache since the last call."""
        bodies: list[CacheBody] = []
        num_hashes = 0
        for event in self._node.cache.take_events():
            num_hashes += len(event.stored) + len(event.removed)
            if bodies and num_hashes > MAX_HASHES:
                self._tell(CacheChanged(events=tuple(bodies)))
                bodies, num_hashes = [], len(event.stored) + len(event.removed)
            bodies.append(
                CacheBody(
                    sequence=event.sequence,
                    group_id=event.group_id,
                    stored=event.stored,
                    removed=event.removed,
                )
            )
        if bodies:
            self._tell(CacheChanged(events=tuple(bodies)))

    def rates(self, deliveries: Iterable[Delivery], packets: tuple[int, int]) -> None:
        """Link samples, in seconds before now, since clocks differ; packets sent and resent."""
        now = self._node.clock()
        samples = tuple((d.num_bytes, now - d.start_s, now - d.end_s) for d in deliveries)
        num_packets, num_resent = packets
        if samples or num_packets:
            self._tell(Rates(deliveries=samples, num_packets=num_packets, num_resent=num_resent))

    def role(self, plan_epoch: int, phase: ChangePhase) -> None:
        """The role that is in force, after a plan asked for one."""
        self._tell(_role_set(self._node.role, plan_epoch, phase))

    def status(self, line: Line, num_jobs: int) -> None:
        """Counts and configuration, for whoever asks."""
        line.post(
            Status(
                node_id=self._node.config.node_id,
                counts={**self._node.counts(), "jobs": num_jobs},
                config=dict(self._node.effective_config()),
            )
        )

    def _tell(self, message: Message) -> None:
        for line in self._gateways:
            with suppress(TransportError):  # its reader is about to remove it
                line.post(message)


def _role_set(role: Role, plan_epoch: int, phase: ChangePhase) -> RoleSet:
    return RoleSet(role=role.value, plan_epoch=plan_epoch, phase=phase.value)
