"""The gateway's connections to its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import attrs

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import RemoteProtocolError
from prfaas.runtime.line import Line
from prfaas.runtime.messages import NodeInfo, Register, decode
from prfaas.seams import Hello, NodeUp, Transport


@attrs.frozen(kw_only=True, eq=False)
class WorkerLink:
    """One connection to a worker. A worker that comes back gets another one.

    Attributes:
        node: what it said of itself.
        block_size: tokens per block of its pool.
        address: where the gateway reaches it.
        peer_addresses: where nodes of other clusters reach it, if not there.
    """

    node: NodeUp
    block_size: int
    line: Line = attrs.field(repr=False)
    address: str
    peer_addresses: Mapping[ClusterId, str] = attrs.field(factory=dict)

    @property
    def node_id(self) -> NodeId:
        return self.node.node_id

    def address_for(self, peer: WorkerLink) -> str:
        """Where ``peer`` dials this worker."""
        return self.peer_addresses.get(peer.node.cluster_id, self.address)


async def register(
    transport: Transport,
    hello: Hello,
    address: str,
    *,
    peer_addresses: Mapping[ClusterId, str],
    timeout_s: float,
) -> WorkerLink:
    """Dials a worker and has it introduce itself.

    Raises:
        AddressError, ConnectError, PeerMismatch: as the transport does. ChannelBroken, or
        RemoteProtocolError if it does not introduce itself in order and in time.
    """
    line = Line(await transport.connect(address, hello))
    try:
        line.post(Register())
        async with asyncio.timeout(timeout_s):
            info = decode(await line.receive())
        if not isinstance(info, NodeInfo):
            raise RemoteProtocolError(f"{address} began with {type(info).__name__}, not NodeInfo")
        return WorkerLink(
            node=_node_up(info),
            block_size=info.block_size,
            line=line,
            address=address,
            peer_addresses=dict(peer_addresses),
        )
    except TimeoutError as error:
        line.abort()
        raise RemoteProtocolError(
            f"{address} did not introduce itself within {timeout_s} s; is it a worker?"
        ) from error
    except BaseException:
        line.abort()
        raise


def _node_up(info: NodeInfo) -> NodeUp:
    try:
        return NodeUp(
            node_id=NodeId(info.node_id),
            cluster_id=ClusterId(info.cluster_id),
            kind=ClusterKind(info.kind),
            role=Role(info.role),
            epoch=info.epoch,
            max_active=info.max_active,
            num_slots=info.num_slots,
        )
    except ValueError as error:
        raise RemoteProtocolError(f"a worker introduced itself wrongly: {error}") from error
