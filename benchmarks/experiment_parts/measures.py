"""From a simulation to numbers: goodput, phases of the TTFT, egress, endings, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from experiment_parts.deployments import Hardware
from prfaas.simulator import Ending, RequestRecord, SimulationResult

SLOS_S = (10.0, 30.0)
PEAK_WINDOW_S = 10.0
PHASES = ("queue_s", "prefill_s", "transfer_s", "decode_wait_s")


@attrs.frozen(kw_only=True)
class Window:
    """The part of a run that counts: arrivals and endings from ``from_s`` to ``until_s``."""

    from_s: float
    until_s: float

    @property
    def length_s(self) -> float:
        return self.until_s - self.from_s


def first_token_s(record: RequestRecord) -> float:
    """Seconds until decoding began: TTFT with the wait for a slot, so that a split that is short
    of decode nodes does not look fast."""
    return record.ttft_s + record.decode_wait_s


def quantile(ascending: Sequence[float], share: float) -> float:
    """nan if there is nothing."""
    at = min(len(ascending) - 1, int(share * len(ascending)))
    return ascending[at] if ascending else math.nan


def mean(values: Sequence[float]) -> float:
    """nan if there is nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def row_of(
    result: SimulationResult, hardware: Hardware, window: Window, num_clients: int | None
) -> dict[str, object]:
    """One line of the report. Latencies are of the requests that arrived in the window."""
    served = [r for r in result.records() if r.ending is Ending.OK]
    inside = [r for r in served if window.from_s <= r.arrived_s < window.until_s]
    firsts = sorted(first_token_s(r) for r in inside)
    ended = sum(window.from_s < r.ended_s <= window.until_s for r in served)
    row: dict[str, object] = {
        "throughput_rps": ended / window.length_s,
        "num_served": len(inside),
    }
    for slo_s in SLOS_S:
        num_good = sum(first_s <= slo_s for first_s in firsts)
        row[f"goodput_{slo_s:.0f}s_rps"] = num_good / window.length_s
        hours = window.length_s / 3600 * hardware.price
        row[f"cost_{slo_s:.0f}s"] = 1000 * hours / num_good if num_good else math.inf
    row["ttft_mean_s"] = mean(firsts)
    for share in (50, 90, 99):
        row[f"ttft_p{share}_s"] = quantile(firsts, share / 100)
    for phase in PHASES:
        row[phase] = mean([getattr(r, phase) for r in inside])
    egress = egress_series_bps(result, window)
    row["egress_mean_gbps"] = mean(egress) / 1e9
    row["egress_peak_gbps"] = max(egress, default=0.0) / 1e9
    row["conversions"] = len(result.conversions)
    row["lost"] = result.num_lost
    row["rejected"] = result.num_rejected
    row["timed_out"] = result.num_timed_out
    row["failed"] = result.num_ended(Ending.FAILED)
    row["num_clients"] = num_clients
    return row


def egress_series_bps(result: SimulationResult, window: Window) -> list[float]:
    """Mean egress in pieces of `PEAK_WINDOW_S`, each entry counted when it had landed."""
    pieces = [0.0] * max(1, math.ceil(window.length_s / PEAK_WINDOW_S))
    for record in result.records():
        if record.ending is not Ending.OK or not record.crossing_bytes:
            continue
        landed_s = record.arrived_s + record.ttft_s
        if window.from_s <= landed_s < window.until_s:
            at = int((landed_s - window.from_s) / PEAK_WINDOW_S)
            pieces[at] += 8 * record.crossing_bytes / PEAK_WINDOW_S
    return pieces


def throughput_series(
    result: SimulationResult, piece_s: float, until_s: float
) -> list[tuple[float, float]]:
    """(middle of the piece, requests served per second)."""
    counts = [0] * math.ceil(until_s / piece_s)
    for record in result.records():
        if record.ending is Ending.OK and record.ended_s < until_s:
            counts[int(record.ended_s / piece_s)] += 1
    return [((i + 0.5) * piece_s, num / piece_s) for i, num in enumerate(counts)]


def first_tokens_s(result: SimulationResult, window: Window) -> list[float]:
    """For a CDF, ascending."""
    return sorted(
        first_token_s(r)
        for r in result.records()
        if r.ending is Ending.OK and window.from_s <= r.arrived_s < window.until_s
    )
