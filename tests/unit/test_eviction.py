"""What a pool gives up, in which order, and that it is never more than needed."""

from __future__ import annotations

from prfaas.cache.eviction import Evictor
from prfaas.cache.leases import LeaseTable
from prfaas.cache.prefix_index import PrefixIndex
from prfaas.cache.slabs import SlabAllocator
from prfaas.core import BlockHash, BlockId, GroupId, RequestId
from strategies import BLOCK_SIZE, LINEAR, WINDOW, chain_of, small_geometry

SMALL, LARGE = GroupId(1), GroupId(0)
"""Two groups of states: 4 windows or 2 linear states to a slab."""


class Pool:
    """A pool of states, each its own entry, so that tests place them freely."""

    def __init__(self, num_slabs: int) -> None:
        geometry = small_geometry((LINEAR, WINDOW), num_slabs=num_slabs)
        self.allocator = SlabAllocator(geometry)
        self.index = PrefixIndex(token_groups=(), slot_groups=(LARGE, SMALL), block_size=BLOCK_SIZE)
        self.leases = LeaseTable()
        self.evictor = Evictor(self.allocator, self.index, self.leases)
        self.names: dict[BlockHash, str] = {}

    def keep(self, group_id: GroupId, name: str, now: float) -> BlockId:
        """One state that can be evicted, last used at ``now``."""
        owner, block_hash = RequestId(name), chain_of([ord(name)] * BLOCK_SIZE)[0]
        self.names[block_hash] = name
        slot = self.hold(group_id, name)
        self.index.insert_slot(group_id, block_hash, 1, slot)
        self.leases.release(owner)
        self.index.set_idle(group_id, [slot], now)
        self.evictor.on_unpinned(group_id, [slot], now)
        return slot

    def hold(self, group_id: GroupId, name: str) -> BlockId:
        """One state in use."""
        (slot,) = self.allocator.allocate(group_id, 1)
        self.leases.open(RequestId(name))
        self.evictor.on_pinned(group_id, self.leases.pin(RequestId(name), group_id, [slot]))
        return slot

    def evict_for(self, small: int = 0, large: int = 0) -> str:
        """Names of what goes for so many units, in order."""
        needs = {LARGE: large, SMALL: small}
        assert self.evictor.room({}).fits(needs)
        removed = self.evictor.make_room(needs)
        self.evictor.check()
        assert self.allocator.can_allocate(needs)
        return "".join(self.names[h] for hashes in removed.values() for h in hashes)


def test_a_group_gives_up_its_oldest_leaf_before_younger_slabs_of_others() -> None:
    pool = Pool(num_slabs=2)
    for name, now in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)):
        pool.keep(SMALL, name, now)
    pool.keep(LARGE, "X", 5.0)
    pool.keep(LARGE, "Y", 6.0)
    assert pool.evict_for(small=2) == "ab"


def test_an_older_idle_slab_of_another_group_goes_first() -> None:
    pool = Pool(num_slabs=2)
    pool.keep(LARGE, "X", 1.0)
    pool.keep(LARGE, "Y", 2.0)
    for name, now in (("a", 3.0), ("b", 4.0), ("c", 5.0), ("d", 6.0)):
        pool.keep(SMALL, name, now)
    assert pool.evict_for(small=1) == "XY"
    assert pool.allocator.num_free_slabs == 1


def test_leaves_go_only_as_long_as_they_are_older_than_the_slab() -> None:
    pool = Pool(num_slabs=2)
    for name, now in (("a", 1.0), ("b", 2.0)):
        pool.keep(SMALL, name, now)
    pool.keep(LARGE, "X", 3.0)
    pool.keep(LARGE, "Y", 4.0)
    for name, now in (("c", 5.0), ("d", 6.0)):
        pool.keep(SMALL, name, now)
    assert set(pool.evict_for(small=4)) == set("abXY")


def test_no_more_leaves_go_than_save_a_slab() -> None:
    pool = Pool(num_slabs=2)
    for name, now in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)):
        pool.keep(SMALL, name, now)
    assert pool.evict_for(small=5) == "a"


def test_no_leaf_goes_where_a_slab_must_move_anyway() -> None:
    pool = Pool(num_slabs=2)
    pool.keep(SMALL, "a", 1.0)
    for name in "pqr":
        pool.hold(SMALL, name)
    pool.keep(LARGE, "X", 2.0)
    pool.keep(LARGE, "Y", 3.0)
    assert pool.evict_for(small=4) == "XY"


def test_a_group_keeps_the_slabs_that_it_needs_itself() -> None:
    pool = Pool(num_slabs=3)
    for name, now in (("X", 1.0), ("Y", 2.0), ("Z", 3.0)):
        pool.keep(LARGE, name, now)
    for name in "pqrs":
        pool.hold(SMALL, name)
    assert not pool.evictor.room({}).fits({LARGE: 3, SMALL: 1})
    assert pool.evictor.room({}).fits({LARGE: 4, SMALL: 0})
    assert pool.evict_for(large=1, small=1) == "XY"


def test_slabs_that_a_match_will_pin_do_not_count_as_idle() -> None:
    pool = Pool(num_slabs=2)
    slots = {name: pool.keep(SMALL, name, 1.0) for name in "abcdefgh"}
    needs = {LARGE: 1, SMALL: 0}
    for pins, fits in (("", True), ("a", True), ("abcd", True), ("ae", False)):
        room = pool.evictor.room({SMALL: [slots[name] for name in pins]})
        assert room.fits(needs) is fits, pins


def test_what_is_pinned_already_is_not_counted_twice() -> None:
    pool = Pool(num_slabs=2)
    slot = pool.hold(SMALL, "p")
    assert pool.evictor.room({SMALL: [slot]}).fits({LARGE: 0, SMALL: 7})
    assert not pool.evictor.room({SMALL: [slot]}).fits({LARGE: 0, SMALL: 8})
