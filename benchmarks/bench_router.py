"""Time of one decision, with its ledger updates, for clusters of 16, 1,000 and 10,000 nodes.

A decision is: look up a hashed 128K-token prompt in the caches of all nodes, route it, and tell the
ledger admit, prefilled and finished. Every node holds the system prompt and blocks of its own, and
5 % of the nodes hold a long prefix of the prompt, each of another length ("depths apart", the
harder case) or all of the same ("depths alike"). "naive" is the same router over the plain bodies
of `ClusterView`, which ask every node.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from random import Random

from _common import emit, parser
from prfaas.core import BlockHash, ClusterId, ClusterKind, NodeId, RequestId, Role
from prfaas.policy import LoadLedger, ThresholdController, ThresholdRouter
from prfaas.seams import (
    CacheEvent,
    ClusterView,
    NodeHit,
    NodeUp,
    NodeView,
    RoutedRequest,
    RouteReason,
    RoutingDecision,
)
from prfaas.spec import preset

SPEC = preset("kimi-linear-48b")
NUM_TOKENS = 128 * 1024
NUM_GRANULES = NUM_TOKENS // SPEC.granule_tokens
NUM_SYSTEM = 64
NUM_OWN = 32
NUM_PROMPTS = 4
DEEP_SHARE = 0.05
THRESHOLD_TOKENS = 16 * 1024
ROWS = [g.group_id for g in SPEC.groups if g.layer_spec.is_token_kind]
STATES = [g.group_id for g in SPEC.groups if not g.layer_spec.is_token_kind]
PROMPTS = [
    tuple(
        BlockHash(number.to_bytes(8, "big") + (0 if g < NUM_SYSTEM else prompt).to_bytes(8, "big"))
        for g, number in enumerate(range(NUM_GRANULES))
    )
    for prompt in range(1, NUM_PROMPTS + 1)
]


class NaiveView(ClusterView):
    """The ledger seen through the plain bodies of `ClusterView`."""

    def __init__(self, ledger: LoadLedger) -> None:
        self._ledger = ledger

    @property
    def version(self) -> int:
        return self._ledger.version

    def nodes(self) -> Sequence[NodeView]:
        return self._ledger.nodes()

    def hit(self, node_id: NodeId, request: RoutedRequest) -> NodeHit:
        return self._ledger.hit(node_id, request)

    def link_bps(self) -> float | None:
        return self._ledger.link_bps()


def deep_nodes(num_nodes: int, is_apart: bool) -> list[dict[int, int]]:
    """For every prompt: nodes that hold a long prefix of it, and how many granules."""
    rng = Random(num_nodes)
    num_deep = max(1, round(num_nodes * DEEP_SHARE))
    depths = []
    for _ in PROMPTS:
        nodes = rng.sample(range(num_nodes), num_deep)
        alike = rng.randrange(NUM_SYSTEM, NUM_GRANULES)
        depths.append(
            {n: rng.randrange(NUM_SYSTEM, NUM_GRANULES) if is_apart else alike for n in nodes}
        )
    return depths


def new_ledger(num_nodes: int, is_apart: bool) -> LoadLedger:
    """40 % PRFAAS nodes, 30 % for prefill and 30 % for decode in a PD cluster, with some work."""
    ledger = LoadLedger.for_spec(SPEC)
    rng = Random(1)
    kinds = [
        (ClusterKind.PRFAAS, Role.PREFILL),
        (ClusterKind.PD, Role.PREFILL),
        (ClusterKind.PD, Role.DECODE),
    ]
    nodes = [
        (NodeId(f"n{i}"), *kinds[(0, 1, 2, 0, 1, 2, 0, 1, 2, 0)[i % 10]]) for i in range(num_nodes)
    ]
    for node_id, kind, role in nodes:
        ledger.node_up(
            NodeUp(node_id=node_id, cluster_id=ClusterId(kind.value), kind=kind, role=role, epoch=1)
        )
        ledger.observe_prefill(node_id, 30_000, 1.0)
    fill(ledger, [node_id for node_id, _, _ in nodes], deep_nodes(num_nodes, is_apart))
    by_role = {role: [n for n, _, r in nodes if r is role] for role in Role}
    for number in range(2 * num_nodes):
        ledger.admit(
            some_decision(
                f"before{number}",
                prefill=rng.choice(by_role[Role.PREFILL]),
                decode=rng.choice(by_role[Role.DECODE]),
                uncached_tokens=rng.randrange(1, 65_536),
            )
        )
    return ledger


def fill(ledger: LoadLedger, node_ids: Sequence[NodeId], deep: Sequence[dict[int, int]]) -> None:
    """The system prompt, blocks of their own, and long prefixes."""
    for number, node_id in enumerate(node_ids):
        sequence = 0
        own = [
            BlockHash(i.to_bytes(8, "big") + (1 << 32 | number).to_bytes(8, "big"))
            for i in range(NUM_OWN)
        ]
        paths = [PROMPTS[0][:NUM_SYSTEM], own]
        paths += [
            PROMPTS[prompt][: depths[number]]
            for prompt, depths in enumerate(deep)
            if number in depths
        ]
        for path in paths:
            for group_id in (*ROWS, *STATES):
                sequence += 1
                stored = path if group_id in ROWS else path[-1:]
                event = CacheEvent(sequence=sequence, group_id=group_id, stored=tuple(stored))
                ledger.cache_event(node_id, 1, event)


def some_decision(
    name: str, *, prefill: NodeId, decode: NodeId, uncached_tokens: int
) -> RoutingDecision:
    return RoutingDecision(
        request_id=RequestId(name),
        decode_node=decode,
        prefill_node=prefill,
        offloaded=False,
        reason=RouteReason.SHORT,
        cached_tokens=0,
        uncached_tokens=uncached_tokens,
        routed_tokens=uncached_tokens,
        held_tokens=0,
        threshold_tokens=0,
        predicted_bytes=0,
        predicted_ttft_s=None,
        view_version=0,
    )


def decisions(ledger: LoadLedger, view: ClusterView) -> Callable[[int], None]:
    """A function that makes the decision of that number."""
    band = (THRESHOLD_TOKENS, THRESHOLD_TOKENS)
    router = ThresholdRouter(SPEC, ThresholdController(SPEC, band=band))
    rng = Random(0)

    def decide(number: int) -> None:
        request_id = RequestId(f"r{number}")
        request = RoutedRequest(
            request_id=request_id,
            num_tokens=NUM_TOKENS,
            granule_hashes=PROMPTS[number % NUM_PROMPTS],
        )
        now = number * 1e-3
        ledger.admit(router.route(request, view, now, rng), now)
        ledger.prefilled(request_id, now)
        ledger.finished(request_id, now)

    return decide


def measure_each(call: Callable[[int], object], repeats: int) -> dict[str, float]:
    """Microseconds of single calls, after a few that do not count."""
    for number in range(min(repeats, 2 * NUM_PROMPTS)):
        call(number)
    samples = []
    for number in range(repeats):
        start = time.perf_counter()
        call(number)
        samples.append(time.perf_counter() - start)
    samples.sort()
    return {
        "median_us": statistics.median(samples) * 1e6,
        "p99_us": samples[int(0.99 * (len(samples) - 1))] * 1e6,
        "num_samples": len(samples),
    }


def bench_nodes(
    num_nodes: int, is_apart: bool, repeats: int
) -> tuple[list[dict[str, object]], dict[str, float]]:
    ledger = new_ledger(num_nodes, is_apart)
    index = ledger._index
    case = f"{num_nodes} nodes, depths {'apart' if is_apart else 'alike'}"
    figures = {
        "decision": measure_each(decisions(ledger, ledger), repeats),
        "lookup": measure_each(
            lambda number: index.levels(PROMPTS[number % NUM_PROMPTS], NUM_TOKENS), repeats
        ),
    }
    if is_apart and num_nodes <= 1000:
        slow = max(10, repeats // 20)
        figures["naive"] = measure_each(decisions(ledger, NaiveView(ledger)), slow)
    rows: list[dict[str, object]] = [
        {"case": case, "what": what, **figure} for what, figure in figures.items()
    ]
    if is_apart:
        rows.append({"case": case, **radix_tree_row(num_nodes, repeats)})
    return rows, {what: figure["median_us"] for what, figure in figures.items()}


def radix_tree_row(num_nodes: int, repeats: int) -> dict[str, object]:
    """The same lookup in the radix tree of ai-dynamo-runtime, which is compiled code."""
    what = "lookup, RadixTree of ai-dynamo-runtime"
    try:
        from dynamo._core import RadixTree
    except ImportError:
        return {"what": what, "skipped": "not installed"}
    tree = RadixTree()
    paths = [[int.from_bytes(h[:8], "big") << 8 | h[-1] for h in prompt] for prompt in PROMPTS]
    deep = deep_nodes(num_nodes, is_apart=True)
    for number in range(num_nodes):
        own = [1 << 62 | number << 16 | i for i in range(NUM_OWN)]
        parts = [(None, paths[0][:NUM_SYSTEM]), (None, own)]
        for path, depths in zip(paths, deep, strict=True):
            parts.append((path[NUM_SYSTEM - 1], path[NUM_SYSTEM : depths.get(number, 0)]))
        for event_id, (parent, blocks) in enumerate(parts):
            if blocks:
                tree.apply_event(number, stored_event(event_id, parent, blocks))
    found = tree.find_matches(paths[0]).scores
    wanted = {n: deep[0].get(n, NUM_SYSTEM) for n in range(num_nodes)}
    assert sorted(found.values()) == sorted(wanted.values())
    figure = measure_each(lambda number: tree.find_matches(paths[number % NUM_PROMPTS]), repeats)
    return {"what": what, **figure}


def stored_event(event_id: int, parent: int | None, blocks: Sequence[int]) -> bytes:
    """A cache event as that tree reads it."""
    stored = {
        "parent_hash": parent,
        "blocks": [{"block_hash": block, "tokens_hash": block} for block in blocks],
    }
    return json.dumps({"event_id": event_id, "data": {"stored": stored}}).encode()


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    repeats = 400 if args.quick else 4000
    rows: list[dict[str, object]] = []
    ratios = {}
    for num_nodes in (16, 1000, 10_000):
        for is_apart in (True, False):
            found, medians = bench_nodes(num_nodes, is_apart, repeats)
            rows += found
            if is_apart:
                ratios |= {f"{what}_us_{num_nodes}": us for what, us in medians.items()}
    emit(args, rows, ratios)


if __name__ == "__main__":
    main()
