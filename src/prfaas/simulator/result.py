"""What came of a simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import attrs

from prfaas.core import NodeId, Role
from prfaas.seams import RoutingDecision
from prfaas.simulator.request_log import OK, Ending, RequestLog, RequestRecord


@attrs.frozen(kw_only=True)
class RoleConversion:
    """A change of role: asked for at ``at_s``, over at ``done_s`` (None: not in this run)."""

    node_id: NodeId
    role: Role
    plan_epoch: int
    at_s: float
    done_s: float | None


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
        return self.goodput_rps(math.inf, from_s, until_s)

    def ttfts_s(self, from_s: float = 0.0) -> list[float]:
        """TTFT of every request that was served and arrived from ``from_s`` on, ascending."""
        times = self.log.times
        columns = (times["arrived_s"], times["queue_s"], times["prefill_s"], times["transfer_s"])
        return sorted(
            queue_s + prefill_s + transfer_s
            for ending, arrived_s, queue_s, prefill_s, transfer_s in zip(
                self.log.endings, *columns, strict=True
            )
            if ending == OK and arrived_s >= from_s
        )

    def mean_ttft_s(self, from_s: float = 0.0) -> float | None:
        values = self.ttfts_s(from_s)
        return math.fsum(values) / len(values) if values else None

    def ttft_s(self, share: float, from_s: float = 0.0) -> float | None:
        """Quantile of the TTFT, e.g. 0.9; None if nothing was served."""
        values = self.ttfts_s(from_s)
        return values[min(len(values) - 1, int(share * len(values)))] if values else None

    def goodput_rps(
        self, ttft_slo_s: float, from_s: float = 0.0, until_s: float | None = None
    ) -> float:
        """Of `throughput_rps` in the same window, the requests with a TTFT of at most
        ``ttft_slo_s``. The wait for a decode slot is no part of TTFT; where decode binds, look at
        `RequestRecord.decode_wait_s` too."""
        until_s = self.duration_s if until_s is None else until_s
        times = self.log.times
        columns = (times["ended_s"], times["queue_s"], times["prefill_s"], times["transfer_s"])
        good = sum(
            ending == OK
            and from_s < ended_s <= until_s
            and queue_s + prefill_s + transfer_s <= ttft_slo_s
            for ending, ended_s, queue_s, prefill_s, transfer_s in zip(
                self.log.endings, *columns, strict=True
            )
        )
        return good / (until_s - from_s) if until_s > from_s else 0.0
