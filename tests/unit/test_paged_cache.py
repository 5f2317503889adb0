"""The reference cache: hits, refusals, commits, eviction, events. Bug numbers are in the names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import msgspec
import pytest

from prfaas.cache import NullCache, PagedHybridCache, PoolGeometry, checkpoint_positions
from prfaas.core import BlockId, GroupId, RequestId
from prfaas.errors import CapacityError, ConfigError, LocalProtocolError
from prfaas.seams import PageState, PrefixMatch, Reservation
from strategies import BLOCK_SIZE, FULL, LINEAR, WINDOW, chain_of, small_geometry, small_spec

ROWS, STATE = GroupId(0), GroupId(1)


def tokens_of(shape: str) -> list[int]:
    """One block per letter, one token per digit."""
    blocks = [[ord(c)] * (1 if c.isdigit() else BLOCK_SIZE) for c in shape]
    return list(itertools.chain.from_iterable(blocks))


def reserve(
    cache: PagedHybridCache,
    name: str,
    shape: str,
    *,
    now: float = 0.0,
    checkpoints: Sequence[int] = (),
    receive: bool = False,
    lease_until_s: float | None = None,
) -> Reservation:
    """Matches and reserves a prompt."""
    tokens = tokens_of(shape)
    match = cache.match(chain_of(tokens), max_tokens=len(tokens) - 1)
    return cache.reserve(
        RequestId(name),
        len(tokens),
        match,
        now=now,
        checkpoints=checkpoints,
        receive=receive,
        lease_until_s=lease_until_s,
    )


def commit(cache: PagedHybridCache, name: str, shape: str, now: float = 0.0) -> None:
    tokens = tokens_of(shape)
    cache.commit(RequestId(name), chain_of(tokens), len(tokens), now)


def serve(
    cache: PagedHybridCache,
    name: str,
    shape: str,
    *,
    now: float = 0.0,
    checkpoints: Sequence[int] = (),
) -> Reservation:
    """A whole request: reserve, commit, release."""
    reservation = reserve(cache, name, shape, now=now, checkpoints=checkpoints)
    commit(cache, name, shape, now)
    cache.release(RequestId(name))
    cache.check()
    return reservation


def fill(cache: PagedHybridCache) -> None:
    """Holds one-token requests until the pool refuses."""
    for number in itertools.count():
        try:
            reserve(cache, f"filler{number}", "1")
        except CapacityError:
            return


def hit(cache: PagedHybridCache, shape: str, num_more: int = 1) -> PrefixMatch:
    tokens = tokens_of(shape)
    return cache.match(chain_of(tokens), max_tokens=len(tokens) - 1 + num_more)


def test_a_prompt_is_served_from_the_cache_the_second_time() -> None:
    cache = PagedHybridCache(small_geometry())
    first = serve(cache, "a", "xyz1", checkpoints=(4, 8))
    second = reserve(cache, "b", "xyw1")
    assert first.num_reused_tokens == 0
    assert first.resume_slots == {}
    assert second.num_reused_tokens == 8
    assert second.block_tables[ROWS][:2] == first.block_tables[ROWS][:2]
    assert second.resume_slots == first.checkpoint_slots[8]
    assert set(second.block_tables[ROWS][2:]).isdisjoint(first.block_tables[ROWS][:3])
    assert len(second.block_tables[ROWS]) == 4


def test_h01_a_state_is_found_only_at_the_length_it_was_kept_at() -> None:
    cache = PagedHybridCache(small_geometry())
    kept = serve(cache, "a", "xy", checkpoints=(4,))
    assert kept.tail_slots[STATE] == hit(cache, "xy").slot_ids[STATE]
    trimmed = hit(cache, "xy", num_more=0)
    assert trimmed.num_cached_tokens == 4
    assert trimmed.slot_ids == kept.checkpoint_slots[4]
    assert trimmed.num_held_tokens == 4


def test_h01_a_chunk_that_ends_off_the_grid_files_no_state() -> None:
    cache = PagedHybridCache(small_geometry())
    reserve(cache, "a", "xy12")
    hashes = chain_of(tokens_of("xy12"))
    cache.commit(RequestId("a"), hashes[:1], 6, 0.0)
    cache.commit(RequestId("a"), hashes, 10, 0.0)
    assert hit(cache, "xy12").num_held_tokens == 8
    assert hit(cache, "xy12").num_cached_tokens == 0
    assert cache.usage().indexed == {ROWS: 2, STATE: 0}


def test_h02_a_shared_prefix_hits_at_the_second_sighting() -> None:
    geometry = PoolGeometry.for_spec(
        small_spec(granule_tokens=64), block_size=512, pool_bytes=1 << 20
    )
    cache = PagedHybridCache(geometry)
    prefix, one, two = [1] * 1500, [2] * 700, [3] * 700
    for name, prompt in (("a", prefix + one), ("b", prefix + two)):
        hashes = chain_of(prompt, 512)
        match = cache.match(hashes, max_tokens=len(prompt) - 1)
        positions = checkpoint_positions(len(prompt), match, 512)
        request = RequestId(name)
        reservation = cache.reserve(request, len(prompt), match, now=0.0, checkpoints=positions)
        cache.commit(request, hashes, len(prompt), 0.0)
        cache.release(request)
    assert match.num_cached_tokens == match.num_held_tokens == 1024
    assert reservation.num_reused_tokens == 1024


def test_h02_a_fork_gets_its_own_state() -> None:
    cache = PagedHybridCache(small_geometry())
    serve(cache, "a", "abcdef1", checkpoints=(4,))
    match = hit(cache, "abcxyz1")
    assert (match.num_cached_tokens, match.num_held_tokens) == (4, 12)
    positions = checkpoint_positions(25, match, BLOCK_SIZE)
    assert 12 in positions
    serve(cache, "b", "abcxyz1", checkpoints=positions)
    assert hit(cache, "abcuvw1").num_cached_tokens == 12


def test_h05_every_fresh_slot_is_listed_and_only_kept_states_are_resumed() -> None:
    cache = PagedHybridCache(small_geometry(num_slabs=3))
    first = reserve(cache, "a", "xy1", checkpoints=(4, 8))
    dirty = {*first.tail_slots.values(), *(s[STATE] for s in first.checkpoint_slots.values())}
    cache.release(RequestId("a"))
    second = reserve(cache, "b", "xy1", checkpoints=(4, 8))
    fresh = {*second.tail_slots.values(), *(s[STATE] for s in second.checkpoint_slots.values())}
    assert second.resume_slots == {}
    assert fresh & dirty
    assert all(cache.page_state(STATE, slot) is PageState.WRITING for slot in fresh)
    assert len(fresh) == 3


def test_h06_states_are_evicted_while_rows_are_in_use() -> None:
    cache = PagedHybridCache(small_geometry(num_slabs=4))
    serve(cache, "a", "xy", checkpoints=(4,))
    rows = cache.match(chain_of(tokens_of("xy")), max_tokens=8).block_ids[ROWS]
    reserve(cache, "holder", "xy1", receive=True)
    cache.take_events()
    fill(cache)
    cache.check()
    removed = {e.group_id: e.removed for e in cache.take_events() if e.removed}
    assert set(removed) == {STATE}
    assert len(removed[STATE]) >= 1
    assert hit(cache, "xy").num_cached_tokens == 0
    assert hit(cache, "xy").block_ids[ROWS] == rows
    assert all(cache.page_state(ROWS, block) is not PageState.FREE for block in rows)


def test_h07_checkpoints_are_given_up_when_every_slot_is_in_use() -> None:
    cache = PagedHybridCache(small_geometry(num_slabs=2))
    first = reserve(cache, "a", "x1", checkpoints=(4,))
    assert list(first.checkpoint_slots) == [4]
    cache.release(RequestId("a"))
    reserve(cache, "b", "y")
    scarce = reserve(cache, "c", "x1", checkpoints=(4,))
    assert scarce.checkpoint_slots == {}
    assert cache.num_checkpoints_skipped == 1
    commit(cache, "c", "x1")
    cache.check()
    assert hit(cache, "x1").num_cached_tokens == 0
    for name in "bc":
        cache.release(RequestId(name))
    cache.check()
    serve(cache, "d", "x1", checkpoints=(4,))
    assert hit(cache, "x1").num_cached_tokens == 4
    assert cache.num_checkpoints_skipped == 1


def test_h07_the_most_valuable_checkpoint_is_kept() -> None:
    cache = PagedHybridCache(small_geometry(num_slabs=3))
    reservation = reserve(cache, "a", "abcdef1", checkpoints=(16, 4, 8))
    assert list(reservation.checkpoint_slots) == [16]
    assert cache.num_checkpoints_skipped == 2


def test_h08_a_failure_after_the_reservation_leaks_nothing() -> None:
    cache = PagedHybridCache(small_geometry())
    serve(cache, "a", "xy1", checkpoints=(4,))
    before = cache.usage()
    for number in range(1000):
        request = RequestId(f"r{number}")
        try:
            reserve(cache, request, "xz123", checkpoints=(8,), lease_until_s=1.0)
            raise MemoryError("no host buffer")
        except MemoryError:
            cache.release(request)
        assert cache.usage() == before
    cache.check()


def test_h18_a_tail_is_never_found() -> None:
    cache = PagedHybridCache(small_geometry())
    serve(cache, "a", "x12", checkpoints=(4,))
    match = hit(cache, "x1234")
    assert match.num_cached_tokens == match.num_held_tokens == 4
    assert cache.usage().blocks[ROWS] == 1


@pytest.mark.parametrize(
    ("num_hashes", "num_tokens"), [(2, 7), (1, 8), (0, 4), (3, 12), (0, -1), (2, 11)]
)
def test_h18_hashes_of_incomplete_blocks_are_refused(num_hashes: int, num_tokens: int) -> None:
    cache = PagedHybridCache(small_geometry())
    reserve(cache, "a", "xy12")
    before = cache.usage()
    with pytest.raises(LocalProtocolError, match="one hash per complete block of 4 tokens"):
        cache.commit(RequestId("a"), chain_of(tokens_of("xyz"))[:num_hashes], num_tokens, 0.0)
    assert cache.usage() == before
    assert cache.take_events() == ()


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["commit", "release", "expiry", "close"]))
)
def test_h24_every_order_of_endings_frees_once(order: Sequence[str]) -> None:
    cache = PagedHybridCache(small_geometry())
    free = cache.usage().num_free_slabs
    reserve(cache, "a", "xy1", lease_until_s=1.0)
    for ending in [*order, *order]:
        if ending == "commit":
            commit(cache, "a", "xy1")
        elif ending == "expiry":
            for request in cache.expired(2.0):
                cache.release(request)
        else:
            cache.release(RequestId("a"))
        cache.check()
    usage = cache.usage()
    assert (usage.num_requests, usage.num_leases) == (0, 0)
    assert usage.reserved == {ROWS: 0, STATE: 0}
    assert usage.blocks == usage.indexed
    assert usage.num_free_slabs == (free - 1 if order.index("commit") == 0 else free)


def test_leases_expire_without_letting_go() -> None:
    cache = PagedHybridCache(small_geometry())
    reserve(cache, "a", "x1", lease_until_s=1.0)
    reserve(cache, "b", "x1")
    before = cache.usage()
    assert cache.expired(0.9) == ()
    assert cache.expired(1.0) == ("a",)
    assert cache.usage() == before
    cache.renew(RequestId("a"), 5.0)
    assert cache.expired(1.0) == ()
    assert cache.next_deadline() == 5.0
    cache.release(RequestId("a"))
    with pytest.raises(LocalProtocolError):
        cache.renew(RequestId("a"), 6.0)


def test_a_refusal_changes_nothing() -> None:
    cache = PagedHybridCache(small_geometry(num_slabs=4))
    serve(cache, "a", "abc1", checkpoints=(4, 8))
    reserve(cache, "b", "xyz1")
    before = (cache.usage(), cache.snapshot(), hit(cache, "abc1"), repr(cache))
    cache.take_events()
    with pytest.raises(CapacityError, match=r"'big' needs .* 1 requests hold .* 4 slabs"):
        reserve(cache, "big", "abcdefghijklm")
    assert (cache.usage(), cache.snapshot(), hit(cache, "abc1"), repr(cache)) == before
    assert cache.take_events() == ()
    cache.check()


def test_wrong_arguments_are_refused_before_anything_changes() -> None:
    cache = PagedHybridCache(small_geometry())
    reserve(cache, "a", "x")
    before = cache.usage()
    match = PrefixMatch()
    for checkpoints in ([3], [0], [12], [-4]):
        with pytest.raises(ConfigError, match="multiples of block_size 4"):
            cache.reserve(RequestId("b"), 8, match, now=0.0, checkpoints=checkpoints)
    with pytest.raises(ConfigError, match="num_tokens is -1"):
        cache.reserve(RequestId("b"), -1, match, now=0.0)
    with pytest.raises(ConfigError, match="num_tokens is 3 and the match reuses 4"):
        cache.reserve(RequestId("b"), 3, PrefixMatch(num_cached_tokens=4), now=0.0)
    with pytest.raises(LocalProtocolError, match="names no hash"):
        cache.reserve(RequestId("b"), 8, PrefixMatch(num_cached_tokens=4), now=0.0)
    with pytest.raises(LocalProtocolError, match="'a' has a reservation"):
        cache.reserve(RequestId("a"), 8, match, now=0.0)
    assert cache.usage() == before
    with pytest.raises(ConfigError, match="max_events is 0"):
        PagedHybridCache(small_geometry(), max_events=0)


def test_a_stale_match_is_refused_even_if_its_blocks_live_on_under_other_hashes() -> None:
    cache = PagedHybridCache(small_geometry(num_slabs=2))
    serve(cache, "a", "x")
    stale = hit(cache, "x1")
    assert stale.num_cached_tokens == 4
    serve(cache, "b", "stuv")
    recycled = hit(cache, "s1")
    assert recycled.num_held_tokens == 4
    before = cache.usage()
    with pytest.raises(CapacityError, match="match again"):
        cache.reserve(RequestId("c"), 5, stale, now=0.0)
    assert cache.usage() == before


def test_a_match_may_come_from_another_process_and_is_refused_if_it_does_not_fit() -> None:
    cache = PagedHybridCache(small_geometry())
    serve(cache, "a", "xyz1", checkpoints=[8])
    match = hit(cache, "xyzw")
    assert (match.num_cached_tokens, match.num_held_tokens) == (8, 12)
    sent = msgspec.msgpack.encode(match)
    told = msgspec.msgpack.decode(sent, type=PrefixMatch)
    before = cache.usage()
    for receive, name in ((False, "cached"), (True, "held")):
        for wrong in ({f"num_{name}_tokens": 4}, {f"num_{name}_tokens": 16}, {f"{name}_hash": b""}):
            misfit = attrs.evolve(told, **wrong)
            with pytest.raises(CapacityError, match="match again"):
                cache.reserve(RequestId("b"), 16, misfit, now=0.0, receive=receive)
    assert cache.usage() == before
    reservation = cache.reserve(RequestId("b"), 16, told, now=0.0)
    assert reservation.resume_slots == match.slot_ids
    assert reservation.block_tables[ROWS][:2] == match.block_ids[ROWS][:2]


def test_a_state_evicted_since_the_match_is_refused() -> None:
    cache = PagedHybridCache(small_geometry(num_slabs=2))
    serve(cache, "a", "x")
    stale = hit(cache, "x1")
    reserve(cache, "b", "1")
    reserve(cache, "c", "1")
    assert hit(cache, "x1").num_held_tokens == 4
    with pytest.raises(CapacityError, match="match again"):
        cache.reserve(RequestId("f"), 5, stale, now=0.0)
    cache.check()


def test_matched_blocks_are_never_evicted_for_the_request_that_matched_them() -> None:
    cache = PagedHybridCache(small_geometry(num_slabs=2))
    first = serve(cache, "a", "xyz")
    assert hit(cache, "xyz1").num_cached_tokens == 12
    reservation = reserve(cache, "b", "xyz1")
    assert reservation.block_tables[ROWS][:3] == first.block_tables[ROWS]
    cache.release(RequestId("b"))
    with pytest.raises(CapacityError):
        reserve(cache, "c", "xyz12345")


def test_eviction_takes_the_least_recently_used_leaf_and_nothing_more() -> None:
    cache = PagedHybridCache(small_geometry((FULL,), num_slabs=2))
    serve(cache, "a", "ab", now=1.0)
    serve(cache, "b", "xy", now=2.0)
    serve(cache, "c", "ac", now=3.0)
    cache.take_events()
    reserve(cache, "d", "11112222333", now=4.0)
    events = cache.take_events()
    assert [event.removed for event in events] == []
    reserve(cache, "e", "7", now=5.0)
    (event,) = cache.take_events()
    assert event.removed == (chain_of(tokens_of("ab"))[1],)
    assert hit(cache, "ac").num_cached_tokens == 8
    assert hit(cache, "xy").num_cached_tokens == 8


def test_memory_follows_the_traffic_from_group_to_group() -> None:
    cache = PagedHybridCache(small_geometry(num_slabs=6))
    for number in range(8):
        serve(cache, f"short{number}", f"{chr(97 + number)}", now=float(number))
    many_states = cache.usage().indexed
    for number in range(8):
        serve(cache, f"long{number}", f"{chr(107 + number)}vwxyz12", now=100.0 + number)
    cache.check()
    usage = cache.usage()
    assert many_states[STATE] >= 4
    assert usage.indexed[ROWS] > 3 * usage.indexed[STATE]
    assert hit(cache, "rvwxyz").num_held_tokens == 24


def test_a_hit_counts_as_a_use_even_if_nothing_is_committed() -> None:
    cache = PagedHybridCache(small_geometry())
    (row,) = serve(cache, "a", "x", now=1.0).block_tables[ROWS]
    reserve(cache, "b", "x1", now=3.0)
    cache.release(RequestId("b"))
    assert cache._index.oldest(ROWS, 1) == [(row, 3.0)]


def test_duplicate_content_stays_private_and_is_freed_on_release() -> None:
    cache = PagedHybridCache(small_geometry())
    one = reserve(cache, "a", "xy")
    two = reserve(cache, "b", "xyz")
    commit(cache, "a", "xy")
    commit(cache, "b", "xyz")
    cache.check()
    match = hit(cache, "xyz")
    assert match.block_ids[ROWS] == (*one.block_tables[ROWS], two.block_tables[ROWS][2])
    assert cache.page_state(ROWS, two.block_tables[ROWS][0]) is PageState.WRITING
    cache.release(RequestId("a"))
    cache.check()
    assert cache.page_state(ROWS, one.block_tables[ROWS][0]) is PageState.PINNED
    cache.release(RequestId("b"))
    cache.check()
    assert cache.page_state(ROWS, two.block_tables[ROWS][0]) is PageState.FREE
    assert cache.page_state(ROWS, one.block_tables[ROWS][0]) is PageState.VALID
    assert cache.usage().blocks == {ROWS: 3, STATE: 2}


def test_parents_that_somebody_else_indexed_stay_while_children_are_in_use() -> None:
    cache = PagedHybridCache(small_geometry((FULL,), num_slabs=2))
    reserve(cache, "a", "x")
    reserve(cache, "b", "xy")
    commit(cache, "a", "x")
    commit(cache, "b", "xy")
    cache.release(RequestId("a"))
    reserve(cache, "c", "stuv1")
    cache.check()
    assert hit(cache, "xy").num_cached_tokens == 8
    with pytest.raises(CapacityError):
        reserve(cache, "d", "1")
    cache.release(RequestId("b"))
    serve(cache, "e", "xyz")
    cache.check()


def test_commit_grows_step_by_step_and_repeats_harmlessly() -> None:
    cache = PagedHybridCache(small_geometry())
    reserve(cache, "a", "xyz", checkpoints=(4, 8))
    hashes = chain_of(tokens_of("xyz"))
    for num_tokens in (4, 4, 8, 5, 12, 12, 0):
        cache.commit(RequestId("a"), hashes[: num_tokens // 4], num_tokens, 0.0)
        cache.check()
    assert cache.usage().indexed == {ROWS: 3, STATE: 3}
    events = cache.take_events()
    assert [event.sequence for event in events] == list(range(1, 7))
    assert [h for e in events if e.group_id == ROWS for h in e.stored] == list(hashes)
    with pytest.raises(LocalProtocolError, match="differs from the one"):
        cache.commit(RequestId("a"), chain_of(tokens_of("uvw")), 12, 0.0)


def test_commit_of_another_prompt_than_the_matched_one_is_refused() -> None:
    cache = PagedHybridCache(small_geometry())
    serve(cache, "a", "xy", checkpoints=(4,))
    reserve(cache, "b", "xz")
    with pytest.raises(LocalProtocolError, match="hash 1 of request 'b' differs"):
        cache.commit(RequestId("b"), chain_of(tokens_of("uz")), 8, 0.0)
    cache.check()


def test_a_receiver_reuses_rows_that_have_no_state() -> None:
    cache = PagedHybridCache(small_geometry())
    first = serve(cache, "a", "xyz1")
    reservation = reserve(cache, "b", "xyw1", receive=True)
    assert reservation.num_reused_tokens == 8
    assert reservation.block_tables[ROWS][:2] == first.block_tables[ROWS][:2]
    assert reservation.resume_slots == {}
    assert set(reservation.tail_slots) == {STATE}
    commit(cache, "b", "xyw1")
    cache.release(RequestId("b"))
    cache.check()
    computing = reserve(cache, "c", "xyw1")
    assert computing.num_reused_tokens == 0


def test_a_receiver_may_keep_the_state_at_the_end_of_its_rows() -> None:
    cache = PagedHybridCache(small_geometry())
    serve(cache, "a", "xyz1")
    reservation = reserve(cache, "b", "xyw1", receive=True, checkpoints=(8,))
    assert list(reservation.checkpoint_slots) == [8]
    commit(cache, "b", "xyw1")
    assert hit(cache, "xyz").num_cached_tokens == 8


def test_an_aligned_tail_is_a_checkpoint_and_is_not_stored_twice() -> None:
    cache = PagedHybridCache(small_geometry())
    reservation = serve(cache, "a", "xy", checkpoints=(8,))
    assert reservation.checkpoint_slots == {}
    assert hit(cache, "xy1").slot_ids == reservation.tail_slots
    again = serve(cache, "b", "xy")
    assert again.num_reused_tokens == 0
    assert cache.usage().blocks[STATE] == 1


def test_nothing_and_everything_reused() -> None:
    cache = PagedHybridCache(small_geometry())
    empty = cache.reserve(RequestId("a"), 0, PrefixMatch(), now=0.0)
    assert empty.block_tables == {ROWS: ()}
    cache.commit(RequestId("a"), (), 0, 0.0)
    cache.release(RequestId("a"))
    serve(cache, "b", "xy")
    whole = cache.reserve(RequestId("c"), 8, hit(cache, "xy"), now=0.0)
    assert whole.num_reused_tokens == 8
    assert whole.tail_slots[STATE] != whole.resume_slots[STATE]
    commit(cache, "c", "xy")
    cache.release(RequestId("c"))
    cache.check()


def test_a_checkpoint_is_kept_in_all_slot_groups_or_in_none() -> None:
    cache = PagedHybridCache(small_geometry((LINEAR, WINDOW, FULL), num_slabs=4))
    reservation = reserve(cache, "a", "abcd1", checkpoints=(12, 8, 4))
    linear, window = GroupId(1), GroupId(2)
    assert [set(slots) for slots in reservation.checkpoint_slots.values()] == [{linear, window}]
    assert cache.num_checkpoints_skipped == 2


def test_events_drop_the_oldest_and_show_the_gap() -> None:
    cache = PagedHybridCache(small_geometry(), max_events=2)
    for name in "abc":
        serve(cache, name, name)
    events = cache.take_events()
    assert [event.sequence for event in events] == [5, 6]
    assert cache.take_events() == ()
    sequence, found = cache.snapshot()
    assert sequence == 6
    assert found == {g: tuple(chain_of(tokens_of(n))[0] for n in "abc") for g in (ROWS, STATE)}


def test_lookups_change_nothing() -> None:
    cache = PagedHybridCache(small_geometry(num_slabs=3))
    serve(cache, "a", "x", now=1.0)
    serve(cache, "b", "y", now=2.0)
    before = repr(cache)
    for _ in range(3):
        hit(cache, "x1")
    assert repr(cache) == before
    cache.take_events()
    reserve(cache, "c", "1", now=3.0)
    reserve(cache, "d", "1", now=3.0)
    removed = [h for event in cache.take_events() for h in event.removed]
    assert chain_of(tokens_of("y"))[0] not in removed


def test_one_tier_gives_no_commands() -> None:
    cache = PagedHybridCache(small_geometry())
    assert cache.commands() == ()
    with pytest.raises(LocalProtocolError):
        cache.complete(1)


def test_a_null_cache_hands_out_blocks_and_never_hits() -> None:
    cache = NullCache(small_geometry())
    for name in "ab":
        reservation = serve(cache, name, "xy1", checkpoints=(4, 8))
        assert reservation.num_reused_tokens == 0
        assert len(reservation.block_tables[ROWS]) == 3
    assert cache.usage().blocks == {ROWS: 0, STATE: 0}
    assert cache.take_events() == ()
    reserve(cache, "c", "xy1")
    with pytest.raises(LocalProtocolError):
        cache.commit(RequestId("c"), (), 9, 0.0)


def test_a_reservation_is_a_value() -> None:
    cache = PagedHybridCache(small_geometry())
    reservation = reserve(cache, "a", "x")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        reservation.num_tokens = 5  # type: ignore[misc]
    assert cache.page_state(ROWS, BlockId(60)) is PageState.FREE
