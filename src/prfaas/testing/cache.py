"""Conformance of a `HybridKVCache`: what every cache must hold, whatever its policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import attrs

from prfaas.core import BlockHash, BlockId, GroupId, RequestId, cdiv
from prfaas.errors import CapacityError, LocalProtocolError
from prfaas.hashing import hash_granules, root_hash
from prfaas.seams import CacheUsage, HybridKVCache, PrefixMatch, Reservation

MakeCache: TypeAlias = Callable[[], HybridKVCache]

_ROOT = root_hash(b"prfaas.testing.cache")
_NUM_PRESSURE = 200
_MAX_REQUESTS = 10_000


@attrs.frozen
class _Prompt:
    """A prompt of whole blocks, one per letter, and a tail of ``num_tail`` tokens."""

    letters: str
    num_tail: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        return len(self.letters) * self.block_size + self.num_tail

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        tokens = [ord(letter) for letter in self.letters for _ in range(self.block_size)]
        return hash_granules(_ROOT, tokens, self.block_size)


def check_cache(make_cache: MakeCache, *, block_size: int, hits: bool = True) -> None:
    """Runs every check of the `HybridKVCache` contract on fresh caches.

    Args:
        make_cache: returns a new empty cache, with room for a few dozen blocks and, for models with
            states, a dozen slots; small, because the checks fill it many times over.
        block_size: tokens per block, at least 2.
        hits: False for a cache that keeps nothing after a release.

    Raises:
        AssertionError: the contract is broken; the message says where.
    """
    user = _User(make_cache, block_size)
    _check_empty(user)
    _check_reservation(user)
    _check_protocol(user)
    _check_refusal(user)
    _check_leases(user)
    _check_endings(user)
    _check_pressure(user)
    if hits:
        _check_hit(user)
        _check_states(user)
        _check_duplicates(user)
        _check_staleness(user)


class _User:
    """Makes caches and calls them with short arguments."""

    def __init__(self, make_cache: MakeCache, block_size: int) -> None:
        self.make_cache = make_cache
        self.block_size = block_size
        self.cache = make_cache()

    def start_afresh(self) -> HybridKVCache:
        self.cache = self.make_cache()
        return self.cache

    def prompt(self, letters: str, num_tail: int = 1) -> _Prompt:
        return _Prompt(letters, num_tail, self.block_size)

    def match(self, prompt: _Prompt) -> PrefixMatch:
        return self.cache.match(prompt.hashes, max_tokens=max(0, prompt.num_tokens - 1))

    def reserve(
        self,
        name: str,
        prompt: _Prompt,
        *,
        blocks: Sequence[int] = (),
        receive: bool = False,
        lease_until_s: float | None = None,
    ) -> Reservation:
        """Reserves with checkpoints after so many blocks, unless they are cached."""
        match = self.match(prompt)
        positions = [block * self.block_size for block in blocks]
        return self.cache.reserve(
            RequestId(name),
            prompt.num_tokens,
            match,
            now=0.0,
            checkpoints=[p for p in positions if p > match.num_cached_tokens],
            receive=receive,
            lease_until_s=lease_until_s,
        )

    def commit(self, name: str, prompt: _Prompt) -> None:
        self.cache.commit(RequestId(name), prompt.hashes, prompt.num_tokens, 0.0)

    def serve(self, name: str, prompt: _Prompt, blocks: Sequence[int] = ()) -> Reservation:
        reservation = self.reserve(name, prompt, blocks=blocks)
        self.commit(name, prompt)
        self.cache.release(RequestId(name))
        return reservation


def _check_empty(user: _User) -> None:
    cache = user.start_afresh()
    prompt = user.prompt("ab")
    match = user.match(prompt)
    _require(match.num_cached_tokens == match.num_held_tokens == 0, f"an empty cache hits: {match}")
    _require(not any(match.block_ids.values()), f"an empty cache names blocks: {match}")
    _require(not match.slot_ids, f"an empty cache names slots: {match}")
    _require(cache.take_events() == (), "an empty cache has events")
    usage = cache.usage()
    _require(usage.num_requests == usage.num_leases == 0, f"an empty cache is in use: {usage}")
    _require(not any(usage.blocks.values()), f"an empty cache holds blocks: {usage}")
    cache.check()


def _check_reservation(user: _User) -> None:
    cache = user.start_afresh()
    prompt = user.prompt("abc")
    reservation = user.reserve("a", prompt, blocks=(2, 1))
    num_blocks = cdiv(prompt.num_tokens, user.block_size)
    for group_id, table in reservation.block_tables.items():
        _require(
            len(table) == num_blocks, f"group {group_id}: {len(table)} blocks, not {num_blocks}"
        )
        _require(len(set(table)) == len(table), f"group {group_id}: a block twice in {table}")
    _require(reservation.num_reused_tokens == 0, f"reuses from an empty cache: {reservation}")
    _require(not reservation.resume_slots, f"resumes from an empty cache: {reservation}")
    asked = {user.block_size, 2 * user.block_size}
    _require(set(reservation.checkpoint_slots) <= asked, f"checkpoints not asked: {reservation}")
    slots = list(_fresh_slots(reservation))
    _require(len(set(slots)) == len(slots), f"a slot twice in {reservation}")
    other = user.reserve("b", prompt)
    _require(not _units(reservation) & _units(other), f"{other} shares unwritten blocks")
    reserved = cache.usage().reserved
    for group_id in reservation.block_tables:
        _require(reserved[group_id] == 2 * num_blocks, f"group {group_id} reserved {reserved}")
    cache.check()


def _check_protocol(user: _User) -> None:
    cache = user.start_afresh()
    prompt = user.prompt("ab")
    user.reserve("a", prompt)
    before = cache.usage()
    _expect(LocalProtocolError, lambda: user.reserve("a", prompt), "a second reservation")
    _expect(
        LocalProtocolError,
        lambda: cache.commit(RequestId("a"), prompt.hashes, prompt.num_tokens + 1, 0.0),
        "a commit of more tokens than reserved",
    )
    _expect(
        LocalProtocolError,
        lambda: cache.commit(RequestId("a"), prompt.hashes, 2 * user.block_size - 1, 0.0),
        "a commit of a block that is not complete",
    )
    _expect(LocalProtocolError, lambda: cache.renew(RequestId("b"), 1.0), "renewing nothing")
    _expect(LocalProtocolError, lambda: cache.complete(1), "completing an unknown command")
    _require(cache.usage() == before, "a refused call changed the usage")
    _require(cache.take_events() == (), "a refused call made events")
    cache.check()


def _check_refusal(user: _User) -> None:
    """Holds requests until the pool refuses one; all that was there must still be there."""
    cache = user.start_afresh()
    held = user.prompt("abcde")
    for number in range(_MAX_REQUESTS):
        before, match = cache.usage(), user.match(held)
        cache.take_events()
        try:
            user.reserve(f"r{number}", user.prompt("abcde"), blocks=(1,), lease_until_s=1.0)
        except CapacityError:
            break
        user.commit(f"r{number}", held)
    else:
        raise AssertionError(f"{_MAX_REQUESTS} requests fit; make a smaller cache for this check")
    _require(cache.usage() == before, "a refused reservation changed the usage")
    _require(user.match(held) == match, "a refused reservation changed a match")
    _require(cache.take_events() == (), "a refused reservation made events")
    cache.check()
    cache.release(RequestId("r0"))
    cache.release(RequestId("r1"))
    user.reserve("again", user.prompt("abcde"))
    cache.check()


def _check_leases(user: _User) -> None:
    cache = user.start_afresh()
    user.reserve("late", user.prompt("a"), lease_until_s=2.0)
    user.reserve("later", user.prompt("b"), lease_until_s=3.0)
    user.reserve("never", user.prompt("c"))
    before = cache.usage()
    _require(before.num_leases == 2, f"two leases are counted as {before.num_leases}")
    _require(cache.expired(1.9) == (), "a lease expired too early")
    _require(cache.expired(2.0) == ("late",), f"at its deadline: {cache.expired(2.0)}")
    _require(cache.usage() == before, "looking for expired leases changed the usage")
    cache.renew(RequestId("late"), 4.0)
    _require(cache.expired(3.5) == ("later",), f"after a renewal: {cache.expired(3.5)}")
    cache.release(RequestId("later"))
    _require(cache.expired(3.5) == (), "a released request expired")
    cache.check()


def _check_endings(user: _User) -> None:
    prompt = user.prompt("ab")
    for is_committed in (False, True):
        cache = user.start_afresh()
        user.reserve("a", prompt, lease_until_s=1.0)
        for _ in range(2):
            if is_committed:
                user.commit("a", prompt)
        for _ in range(2):
            cache.release(RequestId("a"))
            user.commit("a", prompt)
        usage = cache.usage()
        _require(usage.num_requests == usage.num_leases == 0, f"still held: {usage}")
        _require(not any(usage.reserved.values()), f"still reserved: {usage}")
        _require(usage.blocks == usage.indexed, f"blocks that nobody can use: {usage}")
        cache.check()


def _check_pressure(user: _User) -> None:
    """Fills the pool many times over, next to a request that must keep its blocks."""
    cache = user.start_afresh()
    kept = user.prompt("abc")
    mine = _units(user.reserve("kept", kept))
    user.commit("kept", kept)
    found: dict[GroupId, set[BlockHash]] = {}
    sequence = 0
    for number in range(_NUM_PRESSURE):
        prompt = user.prompt(chr(1000 + number) + "xyz"[: number % 4])
        reservation = user.reserve(f"p{number}", prompt, blocks=(1,))
        _require(not mine & _units(reservation), f"{reservation} got blocks of another request")
        user.commit(f"p{number}", prompt)
        cache.release(RequestId(f"p{number}"))
        for event in cache.take_events():
            _require(event.sequence > sequence, f"{event} is out of order")
            sequence = event.sequence
            group = found.setdefault(event.group_id, set())
            _require(group.isdisjoint(event.stored), f"{event} stores what is stored")
            group.update(event.stored)
            _require(group.issuperset(event.removed), f"{event} removes what is not stored")
            group.difference_update(event.removed)
        _check_counts(cache.usage(), found)
    cache.release(RequestId("kept"))
    cache.check()


def _check_counts(usage: CacheUsage, found: Mapping[GroupId, set[BlockHash]]) -> None:
    for group_id, count in usage.indexed.items():
        told = len(found.get(group_id, ()))
        _require(told == count, f"group {group_id} finds {count} entries, its events say {told}")


def _check_hit(user: _User) -> None:
    cache = user.start_afresh()
    first = user.serve("a", user.prompt("abc", 0), blocks=(1, 2))
    longer = user.prompt("abcd")
    match = user.match(longer)
    _require(match.num_held_tokens == 3 * user.block_size, f"rows of 3 blocks are there: {match}")
    _require(match.num_cached_tokens == 3 * user.block_size, f"a state at 3 blocks: {match}")
    _require(match.block_ids == first.block_tables, f"{match} is not what was written: {first}")
    hashes = (match.cached_hash, match.held_hash)
    _require(hashes == (longer.hashes[2],) * 2, f"the hashes are not those of 3 blocks: {match}")
    before = cache.usage()
    whole = user.match(user.prompt("abc", 0))
    _require(whole.num_cached_tokens < 3 * user.block_size, f"a hit of the whole prompt: {whole}")
    _require(cache.usage() == before, "a lookup changed the usage")
    second = user.reserve("b", longer)
    _require(second.num_reused_tokens == 3 * user.block_size, f"does not reuse the hit: {second}")
    for group_id, table in second.block_tables.items():
        _require(table[:3] == first.block_tables[group_id], f"reuses other blocks: {second}")
    _require(second.resume_slots == match.slot_ids, f"resumes from other states: {second}")
    _require(set(second.resume_slots) == set(second.tail_slots), f"a state is missing: {second}")
    cache.check()


def _check_states(user: _User) -> None:
    cache = user.start_afresh()
    first = user.serve("a", user.prompt("abcd"), blocks=(2,))
    if not first.tail_slots or not first.block_tables:
        return
    match = user.match(user.prompt("abcd", 2))
    _require(match.num_held_tokens == 4 * user.block_size, f"rows of 4 blocks are there: {match}")
    _require(match.num_cached_tokens == 2 * user.block_size, f"the state is at 2 blocks: {match}")
    _require(match.slot_ids == first.checkpoint_slots[2 * user.block_size], f"wrong slot: {match}")
    hashes = user.prompt("abcd").hashes
    _require(match.cached_hash == hashes[1], f"not the hash of 2 blocks: {match}")
    _require(match.held_hash == hashes[3], f"not the hash of 4 blocks: {match}")
    receiving = user.reserve("b", user.prompt("abcx"), receive=True)
    _require(receiving.num_reused_tokens == 3 * user.block_size, f"rows not reused: {receiving}")
    _require(not receiving.resume_slots, f"a receiver needs no state: {receiving}")
    cache.check()


def _check_duplicates(user: _User) -> None:
    cache = user.start_afresh()
    prompt = user.prompt("ab", 0)
    first, second = user.reserve("a", prompt), user.reserve("b", prompt)
    user.commit("a", prompt)
    user.commit("b", prompt)
    match = user.match(user.prompt("ab"))
    _require(match.block_ids == first.block_tables, f"{match} is not what was stored: {first}")
    cache.release(RequestId("a"))
    cache.release(RequestId("b"))
    usage = cache.usage()
    _require(usage.blocks == usage.indexed, f"a duplicate was not freed: {usage}, {second}")
    _require(user.match(user.prompt("ab")) == match, "a duplicate took the first one's place")
    cache.check()


def _check_staleness(user: _User) -> None:
    cache = user.start_afresh()
    prompt = user.prompt("a")
    user.serve("a", prompt, blocks=(1,))
    stale = user.match(prompt)
    for number in range(_MAX_REQUESTS):
        if user.match(prompt).num_held_tokens == 0:
            break
        user.serve(f"p{number}", user.prompt(chr(1000 + number) + "bcdefghi"), blocks=(1,))
    before = cache.usage()
    _require(user.match(prompt).num_held_tokens == 0, "make a smaller cache for this check")
    _expect(
        CapacityError,
        lambda: cache.reserve(RequestId("b"), prompt.num_tokens, stale, now=0.0),
        "a match whose blocks are gone",
    )
    _require(cache.usage() == before, "a refused match changed the usage")
    cache.check()


def _fresh_slots(reservation: Reservation) -> list[tuple[GroupId, BlockId]]:
    slots = [reservation.tail_slots, *reservation.checkpoint_slots.values()]
    return [unit for by_group in slots for unit in by_group.items()]


def _units(reservation: Reservation) -> set[tuple[GroupId, BlockId]]:
    """Everything that a reservation without a hit may write to."""
    blocks = {(g, block) for g, table in reservation.block_tables.items() for block in table}
    return blocks | set(_fresh_slots(reservation))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _expect(error: type[Exception], call: Callable[[], object], what: str) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"{what} did not raise {error.__name__}")
