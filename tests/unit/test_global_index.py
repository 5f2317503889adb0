from __future__ import annotations

from collections.abc import Sequence

import pytest

from prfaas.core import BlockHash, DType, GroupId, NodeId
from prfaas.errors import ConfigError, RemoteProtocolError
from prfaas.policy import GlobalPrefixIndex
from prfaas.policy.node_set import members
from prfaas.seams import CacheEvent, NodeHit
from prfaas.spec import FullAttentionSpec, LinearStateSpec, MLASpec, ModelSpec, SlidingWindowSpec

SPEC = ModelSpec(
    name="four-groups",
    layers=(
        FullAttentionSpec(num_kv_heads=2, key_dim=8, value_dim=8, dtype=DType.BFLOAT16),
        MLASpec(kv_lora_rank=8, rope_dim=4, dtype=DType.BFLOAT16),
        SlidingWindowSpec(
            num_kv_heads=2, key_dim=8, value_dim=8, window_tokens=32, dtype=DType.BFLOAT16
        ),
        LinearStateSpec.delta_rule(
            num_heads=2, key_dim=8, value_dim=8, conv_channels=16, conv_columns=3
        ),
    ),
    granule_tokens=64,
)
FULL, MLA, WINDOW, LINEAR = (group.group_id for group in SPEC.groups)
NODE = NodeId("n")
HASHES = [BlockHash(i.to_bytes(16, "big")) for i in range(32)]
LONG = 64 * len(HASHES) + 1


def make_index(*, epoch: int = 1, block_size: int = 1) -> GlobalPrefixIndex:
    index = GlobalPrefixIndex(SPEC.groups, granule_tokens=SPEC.granule_tokens)
    index.add(NODE, epoch, block_size=block_size)
    return index


def feed(
    index: GlobalPrefixIndex,
    *changes: tuple[GroupId, Sequence[BlockHash]],
    removed: bool = False,
    first: int = 1,
) -> None:
    for sequence, (group_id, hashes) in enumerate(changes, first):
        field = {"removed" if removed else "stored": tuple(hashes)}
        assert index.apply(NODE, 1, CacheEvent(sequence=sequence, group_id=group_id, **field))
        index.check()


def at(*blocks: int) -> list[BlockHash]:
    """Hashes at which a prefix of so many granules ends."""
    return [HASHES[block - 1] for block in blocks]


def test_the_groups_of_the_model_are_two_token_and_two_slot_kinds() -> None:
    assert [g.layer_spec.is_token_kind for g in SPEC.groups] == [True, True, False, False]


def test_H39_a_hit_needs_rows_of_every_token_group_and_state_of_every_slot_group() -> None:
    index = make_index()
    feed(index, (FULL, HASHES[:20]), (MLA, HASHES[:12]))
    assert index.hit(NODE, HASHES, LONG) == NodeHit(num_held_tokens=12 * 64)
    feed(index, (LINEAR, at(4, 8, 16)), first=3)
    assert index.hit(NODE, HASHES, LONG).num_cached_tokens == 0
    feed(index, (WINDOW, at(4, 10, 16)), first=4)
    assert index.hit(NODE, HASHES, LONG) == NodeHit(num_cached_tokens=256, num_held_tokens=768)
    feed(index, (WINDOW, at(8)), first=5)
    assert index.hit(NODE, HASHES, LONG).num_cached_tokens == 512
    feed(index, (MLA, HASHES[12:16]), first=6)
    assert index.hit(NODE, HASHES, LONG).num_cached_tokens == 1024


def test_H39_slot_groups_alone_never_make_a_hit() -> None:
    index = make_index()
    feed(index, (LINEAR, HASHES), (WINDOW, HASHES), (FULL, HASHES))
    assert index.hit(NODE, HASHES, LONG) == NodeHit()
    slots_only = GlobalPrefixIndex(SPEC.groups[2:], granule_tokens=64)
    slots_only.add(NODE, 1)
    for sequence, group_id in enumerate((WINDOW, LINEAR), 1):
        event = CacheEvent(sequence=sequence, group_id=group_id, stored=tuple(HASHES))
        slots_only.apply(NODE, 1, event)
    assert slots_only.hit(NODE, HASHES, LONG) == NodeHit()


def test_a_model_without_slot_groups_hits_as_far_as_its_rows() -> None:
    index = GlobalPrefixIndex(SPEC.groups[:1], granule_tokens=64)
    index.add(NODE, 1)
    index.apply(NODE, 1, CacheEvent(sequence=1, group_id=FULL, stored=tuple(HASHES[:5])))
    assert index.hit(NODE, HASHES, LONG) == NodeHit(num_cached_tokens=320, num_held_tokens=320)


@pytest.mark.parametrize(
    ("num_tokens", "cached", "held"),
    [(1, 0, 0), (64, 0, 64), (65, 64, 64), (128, 64, 128), (129, 128, 128), (130, 128, 128)],
)
def test_the_usable_hit_ends_before_the_last_token(num_tokens: int, cached: int, held: int) -> None:
    index = make_index()
    feed(index, *((group.group_id, HASHES) for group in SPEC.groups))
    hit = index.hit(NODE, HASHES[: num_tokens // 64], num_tokens)
    assert hit == NodeHit(num_cached_tokens=cached, num_held_tokens=held)
    assert index.hit(NODE, HASHES, num_tokens) == hit, "surplus hashes reach beyond the prompt"


def test_blocks_of_several_granules_are_found_by_their_last_granule() -> None:
    index = make_index(block_size=4)
    ends = HASHES[3::4]
    feed(index, (FULL, ends[:5]), (MLA, ends[:6]), (WINDOW, ends), (LINEAR, ends[:3]))
    hit = index.hit(NODE, HASHES, LONG)
    assert hit == NodeHit(num_cached_tokens=3 * 256, num_held_tokens=5 * 256)
    assert index.hit(NODE, HASHES[:11], 11 * 64) == NodeHit(
        num_cached_tokens=512, num_held_tokens=512
    )
    assert index.hit(NODE, HASHES[:3], 255) == NodeHit()


def test_removed_hashes_no_longer_serve() -> None:
    index = make_index()
    feed(index, *((group.group_id, HASHES[:8]) for group in SPEC.groups))
    feed(index, (LINEAR, at(8, 7)), removed=True, first=5)
    assert index.hit(NODE, HASHES, LONG) == NodeHit(num_cached_tokens=384, num_held_tokens=512)
    feed(index, (FULL, at(8, 7, 6, 5)), removed=True, first=6)
    assert index.hit(NODE, HASHES, LONG) == NodeHit(num_cached_tokens=256, num_held_tokens=256)
    feed(index, (FULL, at(5, 6)), first=7)
    assert index.hit(NODE, HASHES, LONG) == NodeHit(num_cached_tokens=384, num_held_tokens=384)


def test_H39_a_gap_is_reported_and_nothing_is_served_until_a_snapshot() -> None:
    index = make_index()
    feed(index, *((group.group_id, HASHES[:4]) for group in SPEC.groups))
    assert not index.needs_resync(NODE)
    late = CacheEvent(sequence=7, group_id=FULL, stored=(HASHES[4],))
    assert index.apply(NODE, 1, late)
    assert index.needs_resync(NODE)
    assert index.num_gaps == 1
    assert index.hit(NODE, HASHES, LONG) == NodeHit()
    assert not index.apply(NODE, 1, CacheEvent(sequence=8, group_id=MLA, stored=(HASHES[0],)))
    index.check()
    snapshot = {group.group_id: HASHES[:6] for group in SPEC.groups}
    assert not index.resync(NODE, 1, 7, snapshot), "event 8 is not in it"
    assert index.needs_resync(NODE)
    assert index.resync(NODE, 1, 9, snapshot)
    assert not index.needs_resync(NODE)
    assert index.hit(NODE, HASHES, LONG).num_cached_tokens == 384
    feed(index, *((group.group_id, at(7)) for group in SPEC.groups), first=10)
    assert index.hit(NODE, HASHES, LONG).num_cached_tokens == 448
    assert "0 of them need a resync" in repr(index)


def test_H39_sequence_1_2_5_asks_for_a_resync() -> None:
    index = make_index()
    for sequence in (1, 2, 5):
        index.apply(NODE, 1, CacheEvent(sequence=sequence, group_id=FULL))
    assert index.needs_resync(NODE)


def test_H39_the_first_event_of_an_epoch_may_not_be_missing() -> None:
    index = make_index()
    index.apply(NODE, 1, CacheEvent(sequence=2, group_id=FULL, stored=(HASHES[0],)))
    assert index.needs_resync(NODE)


def test_a_snapshot_replaces_what_was_known() -> None:
    index = make_index()
    feed(index, *((group.group_id, HASHES[:9]) for group in SPEC.groups))
    assert index.resync(NODE, 1, 4, {FULL: HASHES[:3], MLA: HASHES[:3], LINEAR: at(2)})
    index.check()
    assert index.hit(NODE, HASHES, LONG) == NodeHit(num_held_tokens=192)


def test_repeated_events_and_events_of_other_epochs_are_counted_and_ignored() -> None:
    index = make_index(epoch=1)
    event = CacheEvent(sequence=1, group_id=FULL, stored=(HASHES[0],))
    assert index.apply(NODE, 1, event)
    ignored = [(NODE, 1), (NODE, 0), (NODE, 2), (NodeId("stranger"), 1)]
    for count, (node_id, epoch) in enumerate(ignored, 1):
        assert not index.apply(node_id, epoch, event)
        assert index.num_ignored_events == count
    assert not index.resync(NODE, 0, 9, {FULL: HASHES})
    assert index.num_ignored_events == 5
    assert not index.needs_resync(NODE)
    assert not index.needs_resync(NodeId("stranger"))


def test_H38_a_node_that_is_gone_serves_nothing_and_returns_empty() -> None:
    index = make_index()
    feed(index, *((group.group_id, HASHES[:9]) for group in SPEC.groups))
    index.drop(NODE)
    index.drop(NODE)
    assert index.hit(NODE, HASHES, LONG) == NodeHit()
    assert not index.apply(NODE, 1, CacheEvent(sequence=5, group_id=FULL))
    index.add(NODE, 2)
    assert index.hit(NODE, HASHES, LONG) == NodeHit()
    assert not index.apply(NODE, 1, CacheEvent(sequence=5, group_id=FULL))
    assert index.apply(NODE, 2, CacheEvent(sequence=1, group_id=FULL, stored=(HASHES[0],)))


def test_an_unknown_group_is_the_peers_error_and_changes_nothing() -> None:
    index = make_index()
    stranger = CacheEvent(sequence=1, group_id=GroupId(9), stored=(HASHES[0],))
    with pytest.raises(RemoteProtocolError, match=r"group 9.*\[0, 1, 2, 3\].*same model spec"):
        index.apply(NODE, 1, stranger)
    with pytest.raises(RemoteProtocolError, match="group 9"):
        index.resync(NODE, 1, 5, {FULL: HASHES, GroupId(9): []})
    feed(index, (FULL, HASHES[:1]), (MLA, HASHES[:1]))
    assert index.hit(NODE, HASHES, LONG).num_held_tokens == 64


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="granule_tokens is 0"):
        GlobalPrefixIndex(SPEC.groups, granule_tokens=0)
    index = make_index()
    with pytest.raises(ConfigError, match="block_size of node 'n' is 0 granules"):
        index.add(NODE, 2, block_size=0)
    assert index.apply(NODE, 1, CacheEvent(sequence=1, group_id=FULL)), "epoch 1 still stands"


NODES = tuple(NodeId(f"n{i}") for i in range(6))


def levels_of(
    index: GlobalPrefixIndex, num_tokens: int = LONG, hashes: Sequence[BlockHash] = HASHES
) -> dict[tuple[int, int], set[NodeId]]:
    """Nodes by (cached, held) tokens; asserts that each is named once and agrees with `hit`."""
    positions = {index.position(node_id): node_id for node_id in index_nodes(index)}
    levels: dict[tuple[int, int], set[NodeId]] = {}
    for level in index.levels(hashes, num_tokens):
        key = level.hit.num_cached_tokens, level.hit.num_held_tokens
        assert key not in levels
        levels[key] = {positions[position] for position in members(level.nodes)}
    named = [node_id for nodes in levels.values() for node_id in nodes]
    assert len(named) == len(set(named))
    for node_id in positions.values():
        hit = index.hit(node_id, hashes, num_tokens)
        key = hit.num_cached_tokens, hit.num_held_tokens
        assert key == (0, 0) if node_id not in named else node_id in levels[key]
    return levels


def index_nodes(index: GlobalPrefixIndex) -> list[NodeId]:
    return list(index._mirrors)


def filled(depths: dict[NodeId, int], *, block_size: int = 1) -> GlobalPrefixIndex:
    """Nodes that hold so many granules of the prompt, state at the end of them included."""
    index = GlobalPrefixIndex(SPEC.groups, granule_tokens=SPEC.granule_tokens)
    for node_id, depth in depths.items():
        index.add(node_id, 1, block_size=block_size)
        store(index, node_id, HASHES[block_size - 1 : depth : block_size])
    return index


def store(index: GlobalPrefixIndex, node_id: NodeId, hashes: Sequence[BlockHash]) -> None:
    for sequence, group in enumerate(SPEC.groups, 1):
        stored = hashes if group.layer_spec.is_token_kind else hashes[-1:]
        event = CacheEvent(sequence=sequence, group_id=group.group_id, stored=tuple(stored))
        assert index.apply(node_id, 1, event)
    index.check()


def test_levels_part_the_nodes_by_their_hit() -> None:
    index = filled(dict(zip(NODES, (3, 20, 3, 0, 32, 20), strict=True)))
    assert levels_of(index) == {
        (192, 192): {NODES[0], NODES[2]},
        (1280, 1280): {NODES[1], NODES[5]},
        (2048, 2048): {NODES[4]},
    }
    assert levels_of(index, hashes=HASHES[:2], num_tokens=130) == {
        (0, 128): {NODES[0], NODES[1], NODES[2], NODES[4], NODES[5]}
    }
    assert levels_of(index, hashes=HASHES[:2], num_tokens=63) == {}
    assert levels_of(index, hashes=(), num_tokens=9) == {}
    assert levels_of(index, hashes=[BlockHash(b"x" * 16)], num_tokens=64) == {}


def test_rows_without_state_are_held_and_serve_only_as_far_as_the_state() -> None:
    index = filled(dict(zip(NODES[:3], (4, 9, 20), strict=True)))
    # The second node loses its state, and the third gets more rows than state.
    slots = (WINDOW, LINEAR)
    for sequence, group_id in enumerate(slots, 5):
        event = CacheEvent(sequence=sequence, group_id=group_id, removed=tuple(at(9)))
        assert index.apply(NODES[1], 1, event)
    for sequence, group_id in enumerate((FULL, MLA), 5):
        event = CacheEvent(sequence=sequence, group_id=group_id, stored=tuple(HASHES[20:30]))
        assert index.apply(NODES[2], 1, event)
    index.check()
    assert levels_of(index) == {
        (256, 256): {NODES[0]},
        (0, 576): {NODES[1]},
        (1280, 1920): {NODES[2]},
    }
    index.apply(NODES[1], 1, CacheEvent(sequence=7, group_id=LINEAR, stored=tuple(at(2, 7))))
    index.apply(NODES[1], 1, CacheEvent(sequence=8, group_id=WINDOW, stored=tuple(at(2, 8))))
    assert levels_of(index)[128, 576] == {NODES[1]}


def test_of_two_nodes_with_equal_rows_each_serves_from_its_own_state() -> None:
    index = filled(dict(zip(NODES[:3], (9, 9, 4), strict=True)))
    for sequence, group_id in enumerate((WINDOW, LINEAR), 5):
        event = CacheEvent(
            sequence=sequence, group_id=group_id, stored=tuple(at(6)), removed=tuple(at(9))
        )
        assert index.apply(NODES[1], 1, event)
    assert levels_of(index) == {
        (576, 576): {NODES[0]},
        (384, 576): {NODES[1]},
        (256, 256): {NODES[2]},
    }


def test_the_usable_level_ends_before_the_last_token() -> None:
    index = filled(dict(zip(NODES[:3], (4, 5, 6), strict=True)))
    for node_id, before in zip(NODES[:3], (4, 5, 6), strict=True):
        for sequence, group_id in enumerate((WINDOW, LINEAR), 5):
            event = CacheEvent(
                sequence=sequence, group_id=group_id, stored=tuple(at(*range(1, before)))
            )
            index.apply(node_id, 1, event)
    assert levels_of(index, num_tokens=5 * 64) == {
        (256, 256): {NODES[0]},
        (256, 320): {NODES[1], NODES[2]},
    }


def test_nodes_of_several_block_sizes_meet_in_one_level() -> None:
    index = filled({NODES[0]: 8, NODES[1]: 4})
    for node_id, size in ((NODES[2], 4), (NODES[3], 2)):
        index.add(node_id, 1, block_size=size)
        store(index, node_id, HASHES[size - 1 : 8 : size])
    assert levels_of(index) == {
        (512, 512): {NODES[0], NODES[2], NODES[3]},
        (256, 256): {NODES[1]},
    }
    index.drop(NODES[3])
    index.check()
    assert levels_of(index, num_tokens=8 * 64) == {
        (256, 256): {NODES[1]},
        (0, 512): {NODES[0], NODES[2]},
    }


def test_H38_a_position_is_reused_and_brings_nothing_along() -> None:
    index = filled(dict(zip(NODES[:3], (9, 9, 5), strict=True)))
    position = index.position(NODES[0])
    version = index.version
    index.drop(NODES[0])
    index.check()
    assert index.version > version
    assert levels_of(index) == {(576, 576): {NODES[1]}, (320, 320): {NODES[2]}}
    index.add(NODES[3], 1, block_size=2)
    assert index.position(NODES[3]) == position
    assert levels_of(index) == {(576, 576): {NODES[1]}, (320, 320): {NODES[2]}}
    index.add(NODES[2], 2)
    index.check()
    assert levels_of(index) == {(576, 576): {NODES[1]}}
    with pytest.raises(KeyError):
        index.position(NODES[0])


def test_H39_after_a_gap_no_level_names_the_node() -> None:
    index = filled({NODES[0]: 9, NODES[1]: 9})
    index.apply(NODES[0], 1, CacheEvent(sequence=99, group_id=FULL, stored=(HASHES[9],)))
    index.check()
    assert levels_of(index) == {(576, 576): {NODES[1]}}
    snapshot = {g.group_id: HASHES[:12] for g in SPEC.groups}
    version = index.version
    assert index.resync(NODES[0], 1, 99, snapshot)
    index.check()
    assert index.version > version
    assert levels_of(index) == {(768, 768): {NODES[0]}, (576, 576): {NODES[1]}}


def test_a_hash_that_is_named_twice_counts_once() -> None:
    index = filled({NODES[0]: 4, NODES[1]: 4})
    twice = (HASHES[4], HASHES[4])
    for sequence, group in enumerate(SPEC.groups, 5):
        index.apply(
            NODES[0], 1, CacheEvent(sequence=sequence, group_id=group.group_id, stored=twice)
        )
    index.check()
    assert levels_of(index) == {(320, 320): {NODES[0]}, (256, 256): {NODES[1]}}
    index.apply(NODES[0], 1, CacheEvent(sequence=9, group_id=FULL, removed=twice))
    index.check()
    assert levels_of(index) == {(256, 256): {NODES[0], NODES[1]}}


@pytest.mark.parametrize(("said", "true"), [(1, 4), (4, 1), (2, 3), (3, 2), (1, 3), (4, 2)])
def test_H39_blocks_of_another_size_than_said_are_found(said: int, true: int) -> None:
    index = filled({NODES[0]: 24}, block_size=true)
    index.add(NODES[1], 1, block_size=said)
    store(index, NODES[1], HASHES[said - 1 : 24 : said])
    levels_of(index)
    assert index.misfits == frozenset()
    index.add(NODES[2], 1, block_size=said)
    store(index, NODES[2], HASHES[true - 1 : 24 : true])
    levels_of(index)
    assert index.misfits == {NODES[2]}
    assert "1 of another block size than said" in repr(index)
    index.add(NODES[2], 2, block_size=true)
    levels_of(index)
    assert index.misfits == frozenset()


def test_hundreds_of_nodes_of_any_depth_agree_with_hit() -> None:
    index = filled({NodeId(f"m{i}"): (i * 7) % 33 for i in range(300)})
    levels = levels_of(index)
    assert len(levels) == 32
    assert sum(map(len, levels.values())) == 300 - 10, "every 33rd holds nothing"
    for i in range(0, 300, 2):
        index.drop(NodeId(f"m{i}"))
    index.check()
    assert sum(map(len, levels_of(index).values())) == 150 - 5


def test_many_nodes_of_one_depth_cost_no_more_than_one() -> None:
    looks = []
    for num_nodes in (1, 200):
        index = filled({NodeId(f"m{i}"): 20 for i in range(num_nodes)})
        hashes = CountingHashes(HASHES)
        assert len(index.levels(hashes, LONG)) == 1
        looks.append(hashes.looks)
    assert looks[0] == looks[1] <= 8


class CountingHashes(list[BlockHash]):
    """A prompt's hashes that count how often one is looked at."""

    looks = 0

    def __getitem__(self, item):  # type: ignore[no-untyped-def]
        self.looks += 1
        return super().__getitem__(item)


def test_a_long_prompt_is_searched_by_bisection() -> None:
    hashes = CountingHashes(BlockHash(i.to_bytes(16, "big")) for i in range(2048))
    index = make_index()
    feed(index, *((group.group_id, list(hashes)[:1500]) for group in SPEC.groups))
    hashes.looks = 0
    hit = index.hit(NODE, hashes, 131_072)
    assert hit == NodeHit(num_cached_tokens=96_000, num_held_tokens=96_000)
    assert hashes.looks <= 13
    hashes.looks = 0
    index.add(NODE, 2)
    assert index.hit(NODE, hashes, 131_072) == NodeHit()
    assert hashes.looks <= 1
