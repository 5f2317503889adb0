"""What a simulation came to, in numbers that two runs can be compared by."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from prfaas.cli.scenario import Run
from prfaas.core import NodeId
from prfaas.simulator import Ending, SimulationResult

_WARM_UP_SHARE = 0.1


@attrs.frozen(kw_only=True)
class Summary:
    """The figures of one run.

    Rates and times leave out the first tenth of the arrivals' time, while the clusters fill, and
    rates also what happens after the last arrival, while they empty.

    Attributes:
        num_requests: that arrived; num_served, num_failed, num_timed_out, num_rejected, num_lost:
            how they ended.
        served_rps: requests served per second; goodput_rps: those within ``ttft_slo_s``, None
            without an SLO.
        mean_ttft_s, p50_ttft_s, p90_ttft_s, p99_ttft_s: None if nothing was served.
        threshold_tokens: t of the last decision; None for a policy without t.
        offload_share: share of the decisions that went to a PRFAAS cluster.
        cached_share: share of the prompt tokens that a cache served.
        egress_bps: mean; link_utilisation: of what the link could carry.
        busy_prefill: nodes of each cluster that prefilled, on average over the run.
        busy_decode: nodes' worth of decode slots that were taken, on average.
        num_conversions: changes of role.
        cost_per_million: price of a million requests at ``served_rps``; None without prices.
    """

    num_requests: int
    num_served: int
    num_failed: int
    num_timed_out: int
    num_rejected: int
    num_lost: int
    served_rps: float
    goodput_rps: float | None
    mean_ttft_s: float | None
    p50_ttft_s: float | None
    p90_ttft_s: float | None
    p99_ttft_s: float | None
    threshold_tokens: int | None
    offload_share: float
    cached_share: float
    egress_bps: float
    link_utilisation: float
    busy_prefill: dict[str, float]
    busy_decode: dict[str, float]
    num_conversions: int
    cost_per_million: float | None


def summarise(run: Run, result: SimulationResult) -> Summary:
    """Reduce a result to its figures."""
    last_s = result.duration_s if run.config.simulate.clients else run.arrivals[-1].arrived_s
    from_s, until_s = _WARM_UP_SHARE * last_s, last_s
    served_rps = result.throughput_rps(from_s, until_s)
    decisions, counts = result.decisions, result.log.counts
    num_tokens = sum(counts["num_tokens"])
    slo_s = run.config.simulate.ttft_slo_s
    cost = None
    if run.cost_per_hour is not None and served_rps > 0:
        cost = run.cost_per_hour / 3600 / served_rps * 1e6
    return Summary(
        num_requests=len(run.arrivals),
        num_served=result.num_ended(Ending.OK),
        num_failed=result.num_ended(Ending.FAILED),
        num_timed_out=result.num_timed_out,
        num_rejected=result.num_rejected,
        num_lost=result.num_lost,
        served_rps=served_rps,
        goodput_rps=None if slo_s is None else result.goodput_rps(slo_s, from_s, until_s),
        mean_ttft_s=result.mean_ttft_s(from_s),
        p50_ttft_s=result.ttft_s(0.5, from_s),
        p90_ttft_s=result.ttft_s(0.9, from_s),
        p99_ttft_s=result.ttft_s(0.99, from_s),
        threshold_tokens=(
            decisions[-1].threshold_tokens
            if decisions and run.threshold_tokens is not None
            else None
        ),
        offload_share=sum(d.offloaded for d in decisions) / max(1, len(decisions)),
        cached_share=sum(counts["cached_tokens"]) / num_tokens if num_tokens else 0.0,
        egress_bps=result.egress_bps,
        link_utilisation=result.link_utilisation,
        busy_prefill=_by_cluster(run, result.prefill_utilisation),
        busy_decode=_by_cluster(run, result.decode_utilisation),
        num_conversions=len(result.conversions),
        cost_per_million=cost,
    )


def summary_cells(summary: Summary) -> dict[str, str]:
    """The figures as text, by name, for a table of one or more runs."""
    cells = {
        "requests": f"{summary.num_requests:,}",
        "served": f"{summary.num_served:,}",
        "failed / timed out / rejected": (
            f"{summary.num_failed:,} / {summary.num_timed_out:,} / {summary.num_rejected:,}"
        ),
        "served, req/s": f"{summary.served_rps:.3f}",
        "TTFT mean, s": _seconds(summary.mean_ttft_s),
        "TTFT P50 / P90 / P99, s": " / ".join(
            _seconds(value)
            for value in (summary.p50_ttft_s, summary.p90_ttft_s, summary.p99_ttft_s)
        ),
        "threshold t at the end": (
            "-" if summary.threshold_tokens is None else f"{summary.threshold_tokens:,}"
        ),
        "prefilled remotely": f"{summary.offload_share:.1%}",
        "prompt tokens from a cache": f"{summary.cached_share:.1%}",
        "egress, Gbit/s": f"{summary.egress_bps / 1e9:.2f}",
        "link used": f"{summary.link_utilisation:.1%}",
        "changes of role": f"{summary.num_conversions}",
    }
    if summary.num_lost:
        cells["lost"] = f"{summary.num_lost:,}"
    if summary.goodput_rps is not None:
        cells["within the SLO, req/s"] = f"{summary.goodput_rps:.3f}"
    for cluster, prefilling in summary.busy_prefill.items():
        decoding = summary.busy_decode[cluster]
        cells[f"{cluster}: nodes busy, prefill / decode"] = f"{prefilling:.1f} / {decoding:.1f}"
    if summary.cost_per_million is not None:
        cells["cost per million requests"] = f"{summary.cost_per_million:,.0f}"
    return cells


def _by_cluster(run: Run, per_node: Mapping[NodeId, float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for node in run.scenario.nodes:
        sums[node.cluster_id] = sums.get(node.cluster_id, 0.0) + per_node[node.node_id]
    return sums


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
