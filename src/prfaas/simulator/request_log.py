"""The requests that ended, in columns."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from prfaas.core import NodeId, RequestId
from prfaas.simulator.flight import Flight


class Ending(enum.Enum):
    """How a request ended."""

    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    REJECTED = "rejected"


_ENDINGS = tuple(Ending)
OK = _ENDINGS.index(Ending.OK)
"""How `RequestLog.endings` spells it."""
_TIMES = ("arrived_s", "ended_s", "queue_s", "prefill_s", "transfer_s", "decode_wait_s", "decode_s")
_COUNTS = (
    "num_tokens",
    "output_tokens",
    "cached_tokens",
    "held_tokens",
    "crossing_bytes",
    "num_attempts",
)


@attrs.frozen(kw_only=True)
class RequestRecord:
    """One request that ended. Phases belong to its last attempt, and are nan where it had none.

    Attributes:
        arrived_s, ended_s: when.
        queue_s: from arrival to the start of its prefill: waiting at the gateway, failed attempts,
            a prefix that was sent for it, and the node's queue.
        prefill_s: until its prompt was computed.
        transfer_s: until its cache had landed at the decode node; 0 inside a cluster.
        decode_wait_s: until it had a decode slot.
        decode_s: until its last token.
        cached_tokens: tokens that the prefill node did not have to compute.
        held_tokens: rows that the decode node had already.
        crossing_bytes: what crossed between the clusters.
        num_attempts: attempts, refused ones included.
        prefill_node, decode_node: of the last attempt.
    """

    request_id: RequestId
    ending: Ending
    arrived_s: float
    ended_s: float
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_wait_s: float
    decode_s: float
    num_tokens: int
    output_tokens: int
    cached_tokens: int
    held_tokens: int
    crossing_bytes: int
    num_attempts: int
    prefill_node: NodeId | None
    decode_node: NodeId | None

    @property
    def ttft_s(self) -> float:
        """Queue, prefill and transfer; the wait for a decode slot comes on top."""
        return self.queue_s + self.prefill_s + self.transfer_s


class RequestLog:
    """Columns of the requests that ended, in that order: about 180 bytes for each."""

    def __init__(self) -> None:
        self.request_ids: list[RequestId] = []
        self.endings = array("b")
        self.times = {name: array("d") for name in _TIMES}
        self.counts = {name: array("q") for name in _COUNTS}
        self._columns: tuple[array[Any], ...] = (*self.times.values(), *self.counts.values())
        self.prefill_nodes: list[NodeId | None] = []
        self.decode_nodes: list[NodeId | None] = []

    def __len__(self) -> int:
        return len(self.request_ids)

    def append(self, flight: Flight, ending: Ending, now: float) -> None:
        """Adds a request that ends now."""
        arrival = flight.arrival
        self.request_ids.append(arrival.request_id)
        self.endings.append(_ENDINGS.index(ending))
        start_s, prefilled_s = flight.prefill_start_s, flight.prefilled_s
        landed_s, decode_s = flight.landed_s, flight.decode_start_s
        row = (
            flight.arrived_s,
            now,
            start_s - flight.arrived_s,
            prefilled_s - start_s,
            landed_s - prefilled_s,
            decode_s - landed_s,
            now - decode_s,
            arrival.num_tokens,
            arrival.output_tokens,
            flight.cached_tokens,
            flight.held_tokens,
            flight.crossing_bytes,
            flight.num_attempts,
        )
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)
        self.prefill_nodes.append(flight.prefill.node_id if flight.prefill else None)
        self.decode_nodes.append(flight.decode.node_id if flight.decode else None)

    def __iter__(self) -> Iterator[RequestRecord]:
        columns: dict[str, Sequence[Any]] = {
            "request_id": self.request_ids,
            **self.times,
            **self.counts,
            "prefill_node": self.prefill_nodes,
            "decode_node": self.decode_nodes,
        }
        for i, ending in enumerate(self.endings):
            row = {name: column[i] for name, column in columns.items()}
            yield RequestRecord(ending=_ENDINGS[ending], **row)

    def num_ended(self, ending: Ending) -> int:
        """Requests that ended so."""
        return self.endings.count(_ENDINGS.index(ending))
