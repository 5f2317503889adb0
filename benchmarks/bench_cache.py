"""Speed of the hybrid prefix cache: matches, whole requests, hashing.

Every match is compared in the same run with a plain scan over a dict, which is what the bisection
and the path-compressed index must beat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from _common import emit, measure, parser, summary
from prfaas.cache import PagedHybridCache, PoolGeometry, checkpoint_positions
from prfaas.core import BlockHash, BlockId, GroupId, RequestId
from prfaas.hashing import hash_granules, root_hash
from prfaas.seams import PrefixMatch
from prfaas.spec import preset

MODEL = "kimi-linear-48b"
BLOCK_SIZE = 64
LONG_TOKENS = 128 * 1024
SHORT_TOKENS = 8 * 1024
POOL_BYTES = 1 << 40
FULL_POOL_BYTES = 6 << 30
ROWS, STATE = GroupId(0), GroupId(1)
ROOT = root_hash(b"bench")
Hashes: TypeAlias = tuple[BlockHash, ...]


def hashes_of(num_tokens: int, seed: int = 0, shared: int = 0) -> Hashes:
    """Hashes of a prompt of which only the first ``shared`` tokens are common to all seeds."""
    tokens = [0] * shared + [1 + seed] * (num_tokens - shared)
    return hash_granules(ROOT, tokens, BLOCK_SIZE)


def serve(cache: PagedHybridCache, name: str, hashes: Sequence[BlockHash]) -> None:
    """Match, reserve, commit, release."""
    num_tokens = len(hashes) * BLOCK_SIZE
    match = cache.match(hashes, max_tokens=num_tokens - 1)
    request = RequestId(name)
    positions = checkpoint_positions(num_tokens, match, BLOCK_SIZE)
    cache.reserve(request, num_tokens, match, now=0.0, checkpoints=positions)
    cache.commit(request, hashes, num_tokens, 0.0)
    cache.release(request)


def new_cache(pool_bytes: int) -> PagedHybridCache:
    spec = preset(MODEL)
    return PagedHybridCache(
        PoolGeometry.for_spec(spec, block_size=BLOCK_SIZE, pool_bytes=pool_bytes)
    )


def scan(
    rows: dict[BlockHash, BlockId], states: dict[BlockHash, BlockId], hashes: Sequence[BlockHash]
) -> PrefixMatch:
    """The same answer by walking: rows from the left, states from the right."""
    table = []
    for block_hash in hashes:
        block_id = rows.get(block_hash)
        if block_id is None:
            break
        table.append(block_id)
    cached = len(table)
    while cached and hashes[cached - 1] not in states:
        cached -= 1
    return PrefixMatch(
        num_cached_tokens=cached * BLOCK_SIZE,
        num_held_tokens=len(table) * BLOCK_SIZE,
        block_ids={ROWS: tuple(table)},
        slot_ids={STATE: states[hashes[cached - 1]]} if cached else {},
        depth_tokens={ROWS: len(table) * BLOCK_SIZE, STATE: cached * BLOCK_SIZE},
    )


def long_cache(num_committed: int) -> PagedHybridCache:
    """Holds the rows of a long prompt and its states up to ``num_committed`` tokens, and forks."""
    cache = new_cache(POOL_BYTES)
    long, request = hashes_of(LONG_TOKENS, shared=LONG_TOKENS), RequestId("long")
    positions = checkpoint_positions(LONG_TOKENS, PrefixMatch(), BLOCK_SIZE)
    wanted = [position for position in positions if position <= num_committed]
    cache.reserve(request, LONG_TOKENS + 1, PrefixMatch(), now=0.0, checkpoints=wanted)
    cache.commit(request, long, LONG_TOKENS, 0.0)
    cache.release(request)
    for seed in range(8):
        serve(cache, f"fork{seed}", hashes_of(SHORT_TOKENS, seed, shared=SHORT_TOKENS // 2))
    return cache


def bench_matches(repeats: int) -> tuple[list[dict[str, object]], dict[str, float]]:
    full, sparse = long_cache(LONG_TOKENS), long_cache(SHORT_TOKENS // 2)
    cases = {
        "hit": (full, hashes_of(LONG_TOKENS, shared=LONG_TOKENS)),
        "partial hit": (full, hashes_of(LONG_TOKENS, 99, shared=LONG_TOKENS * 3 // 4)),
        "hit far below its rows": (sparse, hashes_of(LONG_TOKENS, shared=LONG_TOKENS)),
        "miss": (full, hashes_of(LONG_TOKENS, 1234)),
    }
    results: list[dict[str, object]] = []
    ratios = {}
    for name, (cache, hashes) in cases.items():
        fast, slow = compare(cache, hashes, repeats)
        results.append({"case": f"match, {name}", **fast, "matches_per_s": 1 / fast["median_s"]})
        results.append({"case": f"scan, {name}", **slow})
        ratios[f"match against scan, {name}"] = slow["median_s"] / fast["median_s"]
    return results, ratios


def compare(
    cache: PagedHybridCache, hashes: Sequence[BlockHash], repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    _, indexed = cache.snapshot()
    rows = {block_hash: BlockId(i) for i, block_hash in enumerate(indexed[ROWS])}
    states = {block_hash: BlockId(i) for i, block_hash in enumerate(indexed[STATE])}
    found = cache.match(hashes, max_tokens=LONG_TOKENS)
    truth = scan(rows, states, hashes)
    assert found.num_cached_tokens == truth.num_cached_tokens
    assert found.num_held_tokens == truth.num_held_tokens
    calls = 20

    def loop(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                call()

        return run

    fast = measure(loop(lambda: cache.match(hashes, max_tokens=LONG_TOKENS)), repeats)
    slow = measure(loop(lambda: scan(rows, states, hashes)), repeats)
    return summary(fast, calls), summary(slow, calls)


def bench_requests(repeats: int) -> list[dict[str, object]]:
    """8K-token requests: into an empty pool, into a full one, and hitting."""
    results: list[dict[str, object]] = []
    per_sample = 20
    cases = {"cold": POOL_BYTES, "evicting": FULL_POOL_BYTES, "hitting": POOL_BYTES}
    for name, pool_bytes in cases.items():
        cache = new_cache(pool_bytes)
        shared = SHORT_TOKENS - BLOCK_SIZE if name == "hitting" else 0
        num_before = 1000 if name == "evicting" else 1
        num_prompts = num_before + (repeats + 1) * per_sample
        prompts = [hashes_of(SHORT_TOKENS, seed, shared) for seed in range(num_prompts)]
        for number in range(num_before):
            serve(cache, f"before{number}", prompts.pop())

        def run(cache: PagedHybridCache = cache, prompts: list[Hashes] = prompts) -> None:
            for number in range(per_sample):
                serve(cache, f"r{number}", prompts.pop())

        figures = summary(measure(run, repeats), per_sample)
        results.append(
            {"case": f"8K request, {name}", **figures, "requests_per_s": 1 / figures["median_s"]}
        )
    return results


def bench_hashing(repeats: int) -> list[dict[str, object]]:
    tokens = list(range(LONG_TOKENS))
    figures = summary(measure(lambda: hash_granules(ROOT, tokens, BLOCK_SIZE), repeats))
    rate = LONG_TOKENS / figures["median_s"]
    return [{"case": "hash 128K tokens", **figures, "tokens_per_s": rate}]


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    repeats = 5 if args.quick else 30
    rows, ratios = bench_matches(repeats)
    rows += bench_requests(repeats)
    rows += bench_hashing(repeats)
    emit(args, rows, ratios)


if __name__ == "__main__":
    main()
