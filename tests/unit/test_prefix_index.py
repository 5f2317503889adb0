"""The lookup half of the cache, alone and against a plain scan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache import PrefixIndex, checkpoint_positions
from prfaas.core import BlockHash, BlockId, GroupId
from prfaas.errors import ConfigError, LocalProtocolError
from prfaas.seams import PrefixMatch
from strategies import BLOCK_SIZE, chain_of, forked_prompts

ROWS, LATENT, LINEAR, WINDOW = GroupId(0), GroupId(1), GroupId(2), GroupId(3)


def hashes_of(shape: str) -> tuple[BlockHash, ...]:
    """One block per letter; equal letters are equal blocks."""
    return chain_of([ord(letter) for letter in shape for _ in range(BLOCK_SIZE)])


def make_index(
    token_groups: Sequence[GroupId] = (ROWS,), slot_groups: Sequence[GroupId] = (LINEAR,)
) -> PrefixIndex:
    return PrefixIndex(token_groups=token_groups, slot_groups=slot_groups, block_size=BLOCK_SIZE)


def insert_chain(
    index: PrefixIndex, shape: str, first_id: int = 0, *, start: int = 0, group: GroupId = ROWS
) -> list[BlockId]:
    """Indexes the blocks of a prompt from depth ``start`` on."""
    hashes = hashes_of(shape)
    ids = []
    for depth in range(start + 1, len(hashes) + 1):
        ids.append(BlockId(first_id + depth - 1))
        index.insert_block(group, hashes, depth, ids[-1])
    return ids


def insert_state(index: PrefixIndex, shape: str, slot: int, group: GroupId = LINEAR) -> None:
    hashes = hashes_of(shape)
    index.insert_slot(group, hashes[-1], len(hashes), BlockId(slot))


def test_rows_match_partially_and_states_exactly() -> None:
    index = make_index()
    insert_chain(index, "abcdef")
    insert_state(index, "abc", 7)
    match = index.match(hashes_of("abcdx"), 5)
    assert match.num_held_tokens == 4 * BLOCK_SIZE
    assert match.num_cached_tokens == 3 * BLOCK_SIZE
    assert match.block_ids == {ROWS: (0, 1, 2, 3)}
    assert match.slot_ids == {LINEAR: 7}
    assert match.depth_tokens == {ROWS: 16, LINEAR: 12}
    assert (match.cached_hash, match.held_hash) == (hashes_of("abc")[-1], hashes_of("abcd")[-1])


def test_h01_trimming_a_hit_falls_back_to_an_earlier_state() -> None:
    index = make_index()
    insert_chain(index, "ab")
    insert_state(index, "a", 1)
    insert_state(index, "ab", 2)
    hashes = hashes_of("ab")
    assert index.match(hashes, 2).slot_ids == {LINEAR: 2}
    trimmed = index.match(hashes, (2 * BLOCK_SIZE - 1) // BLOCK_SIZE)
    assert trimmed.num_cached_tokens == BLOCK_SIZE
    assert trimmed.slot_ids == {LINEAR: 1}
    assert index.match(hashes, 0).num_cached_tokens == 0


def test_every_slot_group_must_have_the_boundary() -> None:
    index = make_index(slot_groups=(LINEAR, WINDOW))
    insert_chain(index, "abcdef")
    for shape, slot in (("a", 1), ("abc", 3), ("abcde", 5)):
        insert_state(index, shape, slot, LINEAR)
    for shape, slot in (("a", 1), ("ab", 2), ("abcdef", 6)):
        insert_state(index, shape, slot, WINDOW)
    match = index.match(hashes_of("abcdef"), 6)
    assert match.num_cached_tokens == BLOCK_SIZE
    assert match.slot_ids == {LINEAR: 1, WINDOW: 1}
    assert match.depth_tokens == {ROWS: 24, LINEAR: 20, WINDOW: 24}


def test_every_token_group_must_hold_the_rows() -> None:
    index = make_index((ROWS, LATENT), ())
    insert_chain(index, "abcd")
    insert_chain(index, "ab", group=LATENT)
    match = index.match(hashes_of("abcd"), 4)
    assert match.num_cached_tokens == match.num_held_tokens == 2 * BLOCK_SIZE
    assert match.block_ids == {ROWS: (0, 1), LATENT: (0, 1)}
    assert match.depth_tokens == {ROWS: 16, LATENT: 8}


def test_a_model_of_states_only_matches_at_its_deepest_state() -> None:
    index = make_index(token_groups=())
    insert_state(index, "ab", 1)
    insert_state(index, "abcd", 2)
    match = index.match(hashes_of("abcxy"), 5)
    assert match.num_cached_tokens == match.num_held_tokens == 2 * BLOCK_SIZE
    assert match.block_ids == {}


def test_rows_without_any_state_are_held_but_not_cached() -> None:
    index = make_index()
    insert_chain(index, "abc")
    match = index.match(hashes_of("abc"), 3)
    assert (match.num_cached_tokens, match.num_held_tokens) == (0, 3 * BLOCK_SIZE)
    assert match.slot_ids == {}
    assert match.cached_hash is None


def test_a_state_waits_for_its_rows_and_outlives_them() -> None:
    index = make_index()
    insert_state(index, "ab", 1)
    assert index.match(hashes_of("abc"), 3).num_cached_tokens == 0
    ids = insert_chain(index, "abc")
    assert index.match(hashes_of("abc"), 3).num_cached_tokens == 2 * BLOCK_SIZE
    index.set_idle(ROWS, reversed(ids), 0.0)
    index.remove_subtree(ROWS, ids[0])
    assert index.match(hashes_of("abc"), 3).num_cached_tokens == 0
    insert_chain(index, "ab")
    assert index.match(hashes_of("abc"), 3).slot_ids == {LINEAR: 1}
    index.check()


def test_tables_run_through_forks() -> None:
    index = make_index(slot_groups=())
    insert_chain(index, "abcdef")
    insert_chain(index, "abxy", 100, start=2)
    insert_chain(index, "abxz", 200, start=3)
    insert_chain(index, "abxzq", 300, start=4)
    assert index.match(hashes_of("abxzq"), 5).block_ids == {ROWS: (0, 1, 102, 203, 304)}
    assert index.match(hashes_of("abcd"), 4).block_ids == {ROWS: (0, 1, 2, 3)}
    index.check()


def test_a_block_with_children_is_not_removed_alone() -> None:
    index = make_index()
    ids = insert_chain(index, "abc")
    index.set_idle(ROWS, reversed(ids), 0.0)
    with pytest.raises(LocalProtocolError, match="has children"):
        index.remove(ROWS, ids[1])
    assert index.match(hashes_of("abc"), 3).num_held_tokens == 12
    assert index.remove(ROWS, ids[2]) == hashes_of("abc")[2]
    assert index.remove(ROWS, ids[1]) == hashes_of("abc")[1]
    with pytest.raises(LocalProtocolError, match="not indexed"):
        index.remove(ROWS, ids[1])
    index.check()


def test_a_subtree_goes_children_first_and_only_if_nobody_uses_it() -> None:
    index = make_index()
    trunk = insert_chain(index, "abcd")
    fork = insert_chain(index, "abxy", 100, start=2)
    index.set_idle(ROWS, [*reversed(trunk), fork[1]], 0.0)
    before = index.hashes(ROWS)
    with pytest.raises(LocalProtocolError, match=f"{fork[0]}.* in use"):
        index.remove_subtree(ROWS, trunk[1])
    assert index.hashes(ROWS) == before
    index.set_idle(ROWS, [fork[0]], 0.0)
    removed = [block_id for _, block_id in index.remove_subtree(ROWS, trunk[1])]
    assert set(removed) == {*trunk[1:], *fork}
    assert removed.index(fork[1]) < removed.index(fork[0]) < removed.index(trunk[1])
    assert removed.index(trunk[3]) < removed.index(trunk[2]) < removed.index(trunk[1])
    assert index.match(hashes_of("abcd"), 4).num_held_tokens == BLOCK_SIZE
    index.check()


def test_insertion_out_of_order_is_refused() -> None:
    index = make_index()
    hashes = hashes_of("abc")
    with pytest.raises(LocalProtocolError, match="parents before children"):
        index.insert_block(ROWS, hashes, 2, BlockId(0))
    index.insert_block(ROWS, hashes, 1, BlockId(0))
    with pytest.raises(LocalProtocolError, match="indexed already"):
        index.insert_block(ROWS, hashes, 1, BlockId(5))
    with pytest.raises(LocalProtocolError, match="indexed already"):
        index.insert_block(ROWS, hashes, 2, BlockId(0))
    index.insert_slot(LINEAR, hashes[0], 1, BlockId(0))
    with pytest.raises(LocalProtocolError, match="indexed already"):
        index.insert_slot(LINEAR, hashes[0], 1, BlockId(1))
    assert index.num_indexed(ROWS) == index.num_indexed(LINEAR) == 1


def test_recency_is_the_order_in_which_entries_became_idle() -> None:
    index = make_index()
    ids = insert_chain(index, "abc")
    assert index.oldest(ROWS, 1) == []
    index.set_idle(ROWS, reversed(ids), 1.0)
    assert index.oldest(ROWS, 2) == [(ids[2], 1.0), (ids[1], 1.0)]
    index.set_busy(ROWS, ids)
    assert index.num_idle(ROWS) == 0
    index.set_idle(ROWS, [ids[2]], 2.0)
    index.set_idle(ROWS, [ids[1], ids[0]], 3.0)
    index.set_idle(ROWS, [ids[2]], 4.0)
    assert index.oldest(ROWS, 1) == [(ids[1], 3.0)]
    with pytest.raises(LocalProtocolError, match="not indexed"):
        index.set_idle(ROWS, [BlockId(99)], 5.0)


def test_an_index_needs_a_group_and_a_block() -> None:
    with pytest.raises(ConfigError):
        make_index((), ())
    with pytest.raises(ConfigError):
        PrefixIndex(token_groups=(ROWS,), slot_groups=(), block_size=0)


class Probed(list[BlockHash]):
    """Counts its reads and refuses to be walked through."""

    num_reads = 0

    def __getitem__(self, index: object) -> BlockHash:  # type: ignore[override]
        self.num_reads += 1
        return super().__getitem__(index)  # type: ignore[index, return-value]

    def __iter__(self) -> Iterator[BlockHash]:
        raise AssertionError("scanned")


def test_a_long_prompt_is_not_scanned_for_a_rare_state() -> None:
    index = make_index()
    hashes = chain_of(list(range(2048 * BLOCK_SIZE)))
    for depth in range(1, 2049):
        index.insert_block(ROWS, hashes, depth, BlockId(depth))
    index.insert_slot(LINEAR, hashes[0], 1, BlockId(0))
    probed = Probed(hashes)
    match = index.match(probed, 2048)
    assert (match.num_cached_tokens, match.num_held_tokens) == (BLOCK_SIZE, 2048 * BLOCK_SIZE)
    assert probed.num_reads <= 32


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...], GroupId, int]]:
    action = st.sampled_from(["rows", "rows", "state", "state", "drop"])
    group = st.sampled_from([ROWS, LATENT, LINEAR, WINDOW])
    steps = st.tuples(action, forked_prompts(5), group, st.integers(0, 40))
    return draw(st.lists(steps, max_size=25))


@given(history=histories(), prompts=st.lists(forked_prompts(5), min_size=1, max_size=4))
@pytest.mark.parametrize(
    ("token_groups", "slot_groups"),
    [((ROWS, LATENT), (LINEAR, WINDOW)), ((ROWS,), ()), ((), (LINEAR, WINDOW))],
)
def test_a_match_equals_a_plain_scan(
    token_groups: tuple[GroupId, ...],
    slot_groups: tuple[GroupId, ...],
    history: list[tuple[str, tuple[int, ...], GroupId, int]],
    prompts: list[tuple[int, ...]],
) -> None:
    index = make_index(token_groups, slot_groups)
    found: dict[GroupId, dict[BlockHash, BlockId]] = {g: {} for g in (*token_groups, *slot_groups)}
    new_id = iter(range(10_000))
    for action, prompt, group, pick in history:
        hashes = chain_of(prompt)
        if action == "rows" and group in token_groups:
            for depth, block_hash in enumerate(hashes, start=1):
                if block_hash not in found[group]:
                    found[group][block_hash] = BlockId(next(new_id))
                    index.insert_block(group, hashes, depth, found[group][block_hash])
                    index.set_idle(group, [found[group][block_hash]], 0.0)
        elif action == "state" and group in slot_groups and hashes:
            if hashes[-1] not in found[group]:
                found[group][hashes[-1]] = BlockId(next(new_id))
                index.insert_slot(group, hashes[-1], len(hashes), found[group][hashes[-1]])
                index.set_idle(group, [found[group][hashes[-1]]], 0.0)
        elif action == "drop" and found.get(group):
            block_id = list(found[group].values())[pick % len(found[group])]
            for block_hash, _ in index.remove_subtree(group, block_id):
                del found[group][block_hash]
        index.check()
    for prompt in prompts:
        hashes = chain_of(prompt)
        depths = [next((i for i, h in enumerate(hashes) if h not in found[g]), len(hashes))
                  for g in token_groups]  # fmt: skip
        held = min(depths, default=len(hashes))
        usable = [
            d for d in range(1, held + 1) if all(hashes[d - 1] in found[g] for g in slot_groups)
        ]
        cached = max(usable, default=0)
        held = held if token_groups else cached
        match = index.match(hashes, len(hashes))
        assert match.num_cached_tokens == cached * BLOCK_SIZE
        assert match.num_held_tokens == held * BLOCK_SIZE
        assert match.block_ids == {
            g: tuple(found[g][h] for h in hashes[:held]) for g in token_groups
        }
        assert match.slot_ids == (
            {g: found[g][hashes[cached - 1]] for g in slot_groups} if cached else {}
        )


def test_checkpoints_are_geometric_plus_the_last_block() -> None:
    assert checkpoint_positions(2200, PrefixMatch(), 512) == (2048, 1024, 512)
    assert checkpoint_positions(2048, PrefixMatch(), 512) == (1536, 1024, 512)
    assert checkpoint_positions(512, PrefixMatch(), 512) == ()
    assert checkpoint_positions(513, PrefixMatch(), 512) == (512,)
    assert checkpoint_positions(0, PrefixMatch(), 512) == ()


def test_checkpoints_name_requests_and_the_fork_first_and_nothing_cached() -> None:
    match = PrefixMatch(num_cached_tokens=8, num_held_tokens=20)
    assert checkpoint_positions(50, match, 4, requested=(31, 6, 400)) == (28, 20, 48, 32, 16)


@given(num_tokens=st.integers(0, 3000), shared=st.integers(0, 3000), block_size=st.integers(1, 64))
def test_half_of_any_shared_prefix_can_be_resumed(
    num_tokens: int, shared: int, block_size: int
) -> None:
    positions = checkpoint_positions(num_tokens, PrefixMatch(), block_size)
    num_blocks = min(shared, num_tokens - 1) // block_size if num_tokens else 0
    best = max((p for p in positions if p <= num_blocks * block_size), default=0)
    assert 2 * best > num_blocks * block_size or num_blocks == 0
    assert len(positions) <= num_tokens.bit_length() + 1
    with pytest.raises(ConfigError):
        checkpoint_positions(1, PrefixMatch(), 0)
