"""One request on its way through the simulated clusters."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

from prfaas.core import NodeId
from prfaas.seams import RoutingDecision
from prfaas.simulator.agenda import Call, Job
from prfaas.workload import Arrival

if TYPE_CHECKING:
    from prfaas.simulator.link import FluidLink
    from prfaas.simulator.node import Node


class Place(enum.Enum):
    """Where a request is; at every moment in exactly one of them."""

    WAITING = "waiting"  # at the gateway: no node can take it
    PAUSED = "paused"  # at the gateway: until its next attempt
    PREFIX = "prefix"  # a prefix for it is on its way
    QUEUED = "queued"  # for prefill
    PREFILLING = "prefilling"
    TRANSFER = "transfer"
    DECODE_WAIT = "decode_wait"
    DECODING = "decoding"
    ENDED = "ended"


class Flight:
    """A request and its current attempt. Times are nan until they are known.

    Attributes:
        job: what runs for it in a node, if anything does.
        flow: what flows for it, if anything does, and over which direction of the link.
        timer: the call that moves it on, if it waits for nothing else.
        prefix_source: node that sends it a prefix.
        seconds, segment_s: prefill time of its prompt and of one segment, alone on the node.
        is_prefilled: its prompt is computed.
    """

    __slots__ = (
        "arrival",
        "arrived_s",
        "cached_tokens",
        "crossing_bytes",
        "decision",
        "decode",
        "decode_start_s",
        "excluded",
        "flow",
        "held_tokens",
        "is_prefilled",
        "job",
        "landed_s",
        "num_attempts",
        "num_failed",
        "pause_s",
        "place",
        "prefill",
        "prefill_start_s",
        "prefilled_s",
        "prefix_source",
        "seconds",
        "segment_s",
        "timer",
    )

    def __init__(self, arrival: Arrival, arrived_s: float, pause_s: float) -> None:
        self.arrival = arrival
        self.arrived_s = arrived_s
        self.place = Place.WAITING
        self.excluded: frozenset[NodeId] = frozenset()
        self.num_attempts = 0
        self.num_failed = 0
        self.pause_s = pause_s
        self.timer: Call | None = None
        self.begin(None)

    def begin(self, decision: RoutingDecision | None) -> None:
        """Forgets the attempt before."""
        self.decision = decision
        self.prefill: Node | None = None
        self.decode: Node | None = None
        self.prefix_source: Node | None = None
        self.job: Job | None = None
        self.flow: tuple[FluidLink, Job] | None = None
        self.is_prefilled = False
        self.cached_tokens = 0
        self.held_tokens = 0
        self.crossing_bytes = 0
        self.seconds = self.segment_s = 0.0
        self.prefill_start_s = self.prefilled_s = math.nan
        self.landed_s = self.decode_start_s = math.nan

    def __repr__(self) -> str:
        return f"<Flight {self.arrival.request_id!r} {self.place.value}, {self.num_attempts} tried>"
