"""What came of a simulation."""

from __future__ import annotations

import enum
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from prfaas.core import NodeId, RequestId, Role
from prfaas.seams import RoutingDecision
from prfaas.simulator.flight import Flight


class Ending(enum.Enum):
    """How a request ended."""

    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    REJECTED = "rejected"


_ENDINGS = tuple(Ending)
_OK = _ENDINGS.index(Ending.OK)
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


@attrs.frozen(kw_only=True)
class RoleConversion:
    """A change of role: asked for at ``at_s``, over at ``done_s`` (None: not in this run)."""

    node_id: NodeId
    role: Role
    plan_epoch: int
    at_s: float
    done_s: float | None


class RequestLog:
    """Columns of the requests that ended, in that order: about 180 bytes for each."""

    def __init__(self) -> None:
        self.request_ids: list[RequestId] = []
        self.endings = array("b")
        self.times = {name: array("d") for name in _TIMES}
        self.counts = {name: array("q") for name in _COUNTS}
        self._time_columns = tuple(self.times.values())
        self._count_columns = tuple(self.counts.values())
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
        times = (
            flight.arrived_s,
            now,
            start_s - flight.arrived_s,
            prefilled_s - start_s,
            landed_s - prefilled_s,
            decode_s - landed_s,
            now - decode_s,
        )
        for time_column, seconds in zip(self._time_columns, times, strict=True):
            time_column.append(seconds)
        counts = (
            arrival.num_tokens,
            arrival.output_tokens,
            flight.cached_tokens,
            flight.held_tokens,
            flight.crossing_bytes,
            flight.num_attempts,
        )
        for count_column, count in zip(self._count_columns, counts, strict=True):
            count_column.append(count)
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


def _count(values: Sequence[object]) -> str:
    return f"<{len(values)}>"


@attrs.frozen(kw_only=True, eq=False)
class SimulationResult:
    """What came of a simulation. Rates and shares are over ``duration_s``, which starts at 0.

    Attributes:
        log: a row for every request that ended.
        num_accepted: requests that came in and were not rejected.
        num_unfinished: requests that were under way when the run was cut off.
        num_lost: accepted requests that never ended although nothing was left to happen; any
            number but 0 means that the clusters could not serve them and no client gave up.
        counters: what else happened: attempts, refusals, retries, failures of nodes, events.
        conversions: changes of role.
        decisions: every routing decision, if the scenario keeps them.
        prefill_utilisation: per node, share of the time in which it computed prompts.
        decode_utilisation: per node, mean share of its slots that were taken; 0 without a limit.
        node_roles: the last role of each node.
        egress_bytes: from PRFAAS to PD; ingress_bytes: the other way.
        link_utilisation: egress over what could have crossed.
        link_busy: share of the time in which the egress direction had something to send.
    """

    log: RequestLog = attrs.field(repr=lambda log: f"<{len(log)} requests>")
    duration_s: float
    num_accepted: int
    num_unfinished: int
    num_lost: int
    counters: Counter[str]
    conversions: tuple[RoleConversion, ...] = attrs.field(repr=_count)
    decisions: tuple[RoutingDecision, ...] = attrs.field(repr=_count)
    prefill_utilisation: Mapping[NodeId, float] = attrs.field(repr=False)
    decode_utilisation: Mapping[NodeId, float] = attrs.field(repr=False)
    node_roles: Mapping[NodeId, Role] = attrs.field(repr=False)
    egress_bytes: float
    ingress_bytes: float
    link_utilisation: float
    link_busy: float

    def records(self) -> Iterator[RequestRecord]:
        """The requests in the order in which they ended."""
        return iter(self.log)

    def num_ended(self, ending: Ending) -> int:
        return self.log.num_ended(ending)

    @property
    def num_timed_out(self) -> int:
        return self.num_ended(Ending.TIMED_OUT)

    @property
    def num_rejected(self) -> int:
        return self.num_ended(Ending.REJECTED)

    @property
    def egress_bps(self) -> float:
        """Mean bits per second from PRFAAS to PD."""
        return 8 * self.egress_bytes / self.duration_s if self.duration_s else 0.0

    def throughput_rps(self, from_s: float = 0.0, until_s: float | None = None) -> float:
        """Requests served per second in a window; until the end of the run by default."""
        until_s = self.duration_s if until_s is None else until_s
        ended = self.log.times["ended_s"]
        served = sum(
            ending == _OK and from_s < at_s <= until_s
            for ending, at_s in zip(self.log.endings, ended, strict=True)
        )
        return served / (until_s - from_s) if until_s > from_s else 0.0

    def ttfts_s(self, from_s: float = 0.0) -> list[float]:
        """TTFT of every request that was served and arrived from ``from_s`` on, ascending."""
        times = self.log.times
        columns = (times["arrived_s"], times["queue_s"], times["prefill_s"], times["transfer_s"])
        return sorted(
            queue_s + prefill_s + transfer_s
            for ending, arrived_s, queue_s, prefill_s, transfer_s in zip(
                self.log.endings, *columns, strict=True
            )
            if ending == _OK and arrived_s >= from_s
        )

    def mean_ttft_s(self, from_s: float = 0.0) -> float | None:
        values = self.ttfts_s(from_s)
        return math.fsum(values) / len(values) if values else None

    def ttft_s(self, share: float, from_s: float = 0.0) -> float | None:
        """Quantile of the TTFT, e.g. 0.9; None if nothing was served."""
        values = self.ttfts_s(from_s)
        return values[min(len(values) - 1, int(share * len(values)))] if values else None

    def goodput_rps(self, ttft_slo_s: float, from_s: float = 0.0) -> float:
        """Requests served per second with a TTFT of at most ``ttft_slo_s``."""
        good = sum(ttft <= ttft_slo_s for ttft in self.ttfts_s(from_s))
        return good / (self.duration_s - from_s) if self.duration_s > from_s else 0.0
