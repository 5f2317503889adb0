"""Speed of the hybrid prefix cache: matches, whole requests, hashing.

Every match is compared in the same run with a plain scan over a dict, which is what the bisection
and the path-compressed index must beat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
POOL_BYTES = 64 << 30
FULL_POOL_BYTES = 6 << 30
ROWS, STATE = GroupId(0), GroupId(1)
ROOT = root_hash(b"bench")


def hashes_of(num_tokens: int, seed: int = 0, shared: int = 0) -> tuple[BlockHash, ...]:
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


def bench_matches(repeats: int) -> tuple[list[dict[str, object]], dict[str, float]]:
    cache = new_cache(POOL_BYTES)
    long = hashes_of(LONG_TOKENS, shared=LONG_TOKENS)
    serve(cache, "long", long)
    for seed in range(8):
        serve(cache, f"fork{seed}", hashes_of(SHORT_TOKENS, seed, shared=SHORT_TOKENS // 2))
    _, found = cache.snapshot()
    rows = {h: BlockId(i) for i, h in enumerate(found[ROWS])}
    states = {h: BlockId(i) for i, h in enumerate(found[STATE])}
    cases = {
        "hit": long,
        "partial": hashes_of(LONG_TOKENS, 99, shared=LONG_TOKENS * 3 // 4),
        "miss": hashes_of(LONG_TOKENS, 1234),
    }
    results: list[dict[str, object]] = []
    ratios = {}
    for name, hashes in cases.items():
        fast, slow = compare(cache, rows, states, hashes, repeats)
        results.append({"case": f"match {name}", **fast, "matches_per_s": 1 / fast["median_s"]})
        results.append({"case": f"scan {name}", **slow})
        ratios[f"match {name} against scan"] = slow["median_s"] / fast["median_s"]
    return results, ratios


def compare(
    cache: PagedHybridCache,
    rows: dict[BlockHash, BlockId],
    states: dict[BlockHash, BlockId],
    hashes: Sequence[BlockHash],
    repeats: int,
) -> tuple[dict[str, float], dict[str, float]]:
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
        prompts = iter(
            [
                hashes_of(SHORT_TOKENS, seed, shared)
                for seed in range(1000 + (repeats + 1) * per_sample)
            ]
        )
        for warm_up in range(1 if name == "cold" else 1000):
            serve(cache, f"w{warm_up}", next(prompts))

        def run(cache: PagedHybridCache = cache, prompts=prompts) -> None:  # type: ignore[no-untyped-def]
            for number in range(per_sample):
                serve(cache, f"r{number}", next(prompts))

        figures = summary(measure(run, repeats), per_sample)
        results.append(
            {"case": f"request {name}", **figures, "requests_per_s": 1 / figures["median_s"]}
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
