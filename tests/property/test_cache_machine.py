"""The reference cache against a small model, in pools so tiny that it must evict and refuse."""

from __future__ import annotations

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from prfaas.cache import PagedHybridCache, PoolGeometry, checkpoint_positions
from prfaas.core import BlockHash, BlockId, GroupId, RequestId, cdiv
from prfaas.errors import CapacityError, LocalProtocolError
from prfaas.seams import PageState, PrefixMatch, Reservation
from strategies import BLOCK_SIZE, LAYERS, chain_of, forked_prompts, small_geometry


@attrs.define
class Held:
    """What the model knows of a live reservation."""

    reservation: Reservation
    hashes: tuple[BlockHash, ...]
    until_s: float | None
    num_committed: int
    extra: dict[GroupId, set[BlockId]]

    def blocks(self, group_id: GroupId) -> set[BlockId]:
        entry = self.reservation
        slots = [entry.resume_slots, entry.tail_slots, *entry.checkpoint_slots.values()]
        named = {s[group_id] for s in slots if group_id in s}
        return named | set(entry.block_tables.get(group_id, ())) | self.extra[group_id]


class Model:
    """The cache as the seam describes it. It learns evictions from events and judges them."""

    def __init__(self, geometry: PoolGeometry) -> None:
        self.geometry = geometry
        self.tokens, self.slots = geometry.token_groups, geometry.slot_groups
        self.found: dict[GroupId, dict[BlockHash, BlockId]] = {
            g: {} for g in (*self.tokens, *self.slots)
        }
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.held: dict[RequestId, Held] = {}

    def pinned(self, group_id: GroupId) -> set[BlockId]:
        return set().union(*(held.blocks(group_id) for held in self.held.values()))

    def match(self, hashes: tuple[BlockHash, ...], max_tokens: int) -> tuple[int, int]:
        limit = max(0, min(len(hashes), max_tokens // BLOCK_SIZE))
        depths = [
            next((i for i in range(limit) if hashes[i] not in self.found[g]), limit)
            for g in self.tokens
        ]
        held = min(depths, default=limit)
        usable = [
            d for d in range(1, held + 1) if all(hashes[d - 1] in self.found[g] for g in self.slots)
        ]
        cached = max(usable, default=0)
        return cached, held if self.tokens else cached

    def fits(self, needs: dict[GroupId, int], pins: dict[GroupId, set[BlockId]]) -> bool:
        """Throws everything out that nobody uses, and counts."""
        free_slabs, missing = self.geometry.num_slabs, 0
        for g, need in needs.items():
            units = self.geometry.units[g].units_per_slab
            pinned = self.pinned(g) | pins.get(g, set())
            slabs = {block // units for block in pinned}
            free_slabs -= len(slabs)
            missing += cdiv(max(0, need - (len(slabs) * units - len(pinned))), units)
        return missing <= free_slabs

    def remove(self, group_id: GroupId, removed: tuple[BlockHash, ...]) -> None:
        for block_hash in removed:
            block = self.found[group_id].pop(block_hash)
            assert block not in self.pinned(group_id), "a block in use was evicted"
            if group_id in self.tokens:
                orphans = [h for h in self.found[group_id] if self.parents[h] == block_hash]
                assert not orphans, "a block went before its children"


class CacheMachine(RuleBasedStateMachine):
    @initialize(layers=st.sampled_from(LAYERS), num_spare=st.integers(0, 10))
    def start(self, layers: tuple, num_spare: int) -> None:
        num_groups = len({layer for layer in layers if layer is not None})
        geometry = small_geometry(layers, num_slabs=num_groups + num_spare)
        self.cache = PagedHybridCache(geometry)
        self.model = Model(geometry)
        self.stale: tuple[tuple[BlockHash, ...], PrefixMatch] | None = None
        self.num_requests = self.sequence = self.num_skipped = 0
        self.now = 0.0

    def learn(self) -> dict[GroupId, list[BlockHash]]:
        """Takes events in; returns what was stored."""
        stored: dict[GroupId, list[BlockHash]] = {g: [] for g in self.model.found}
        for event in self.cache.take_events():
            self.sequence += 1
            assert event.sequence == self.sequence
            self.model.remove(event.group_id, event.removed)
            stored[event.group_id] += event.stored
        return stored

    @rule(
        prompt=forked_prompts(5),
        receive=st.booleans(),
        all_tokens=st.booleans(),
        lease_s=st.none() | st.floats(0, 5),
    )
    def hold(
        self, prompt: tuple[int, ...], receive: bool, all_tokens: bool, lease_s: float | None
    ) -> None:
        self.reserve(prompt, receive, all_tokens, lease_s)

    def reserve(
        self, prompt: tuple[int, ...], receive: bool, all_tokens: bool, lease_s: float | None
    ) -> None:
        hashes = chain_of(prompt)
        match = self.cache.match(hashes, max_tokens=len(prompt) - (not all_tokens))
        expected = self.model.match(hashes, len(prompt) - (not all_tokens))
        assert (match.num_cached_tokens, match.num_held_tokens) == tuple(
            d * BLOCK_SIZE for d in expected
        )
        found, (cached, held) = self.model.found, expected
        assert match.block_ids == {
            g: tuple(found[g][h] for h in hashes[:held]) for g in self.model.tokens
        }
        assert match.slot_ids == {
            g: found[g][hashes[cached - 1]] for g in self.model.slots if cached
        }
        self.stale = (hashes, match)
        self.reserve_match(prompt, match, receive, lease_s)

    def reserve_match(
        self, prompt: tuple[int, ...], match: PrefixMatch, receive: bool, lease_s: float | None
    ) -> None:
        model, hashes = self.model, chain_of(prompt)
        reused = match.num_held_tokens if receive else match.num_cached_tokens
        positions = checkpoint_positions(len(prompt), match, BLOCK_SIZE)
        pins = {g: set(match.block_ids[g][: reused // BLOCK_SIZE]) for g in model.tokens}
        if not receive:
            pins |= {g: {slot} for g, slot in match.slot_ids.items()}
        needs = {g: cdiv(len(prompt) - reused, BLOCK_SIZE) for g in model.tokens}
        granted = next(
            (
                n
                for n in range(len(positions), -1, -1)
                if model.fits({**needs, **dict.fromkeys(model.slots, 1 + n)}, pins)
            ),
            None,
        )
        self.num_requests += 1
        request = RequestId(f"r{self.num_requests}")
        until_s = None if lease_s is None else self.now + lease_s
        before = (self.cache.usage(), self.cache.snapshot(), repr(self.cache))
        try:
            reservation = self.cache.reserve(
                request,
                len(prompt),
                match,
                now=self.now,
                checkpoints=positions,
                receive=receive,
                lease_until_s=until_s,
            )
        except CapacityError:
            assert granted is None, "refused although there is room"
            assert (self.cache.usage(), self.cache.snapshot(), repr(self.cache)) == before
            assert self.cache.take_events() == ()
            return
        assert granted is not None, "granted without room"
        assert not any(self.learn().values())
        kept = set(positions[:granted]) if model.slots else set()
        assert set(reservation.checkpoint_slots) == kept
        self.num_skipped += len(positions) - granted if model.slots else 0
        self.check_reservation(reservation, match, reused, receive)
        model.held[request] = Held(
            reservation, hashes, until_s, reused // BLOCK_SIZE, {g: set() for g in model.found}
        )

    def check_reservation(
        self, reservation: Reservation, match: PrefixMatch, reused: int, receive: bool
    ) -> None:
        model, depth = self.model, reused // BLOCK_SIZE
        assert reservation.num_reused_tokens == reused
        assert reservation.resume_slots == ({} if receive else match.slot_ids)
        fresh_slots = [reservation.tail_slots, *reservation.checkpoint_slots.values()]
        for g, found in model.found.items():
            fresh = [slots[g] for slots in fresh_slots if g in slots]
            if g in model.tokens:
                table = reservation.block_tables[g]
                assert table[:depth] == match.block_ids[g][:depth]
                assert len(table) == cdiv(reservation.num_tokens, BLOCK_SIZE)
                fresh = list(table[depth:])
            else:
                assert len(fresh) == 1 + len(reservation.checkpoint_slots)
            assert len(set(fresh)) == len(fresh)
            assert not set(fresh) & (model.pinned(g) | set(found.values())), "handed out twice"

    @precondition(lambda self: self.stale is not None)
    @rule(receive=st.booleans(), num_more=st.integers(1, 5))
    def reserve_by_an_old_match(self, receive: bool, num_more: int) -> None:
        hashes, match = self.stale  # type: ignore[misc]
        reused = match.num_held_tokens if receive else match.num_cached_tokens
        last = hashes[reused // BLOCK_SIZE - 1] if reused else None
        groups = self.model.tokens if receive else tuple(self.model.found)
        gone = reused and any(last not in self.model.found[g] for g in groups)
        before = self.cache.usage()
        request = RequestId("stale")
        try:
            found = self.cache.reserve(request, reused + num_more, match, now=0.0, receive=receive)
        except CapacityError:
            assert self.cache.usage() == before
            return
        assert not gone, "reused blocks that are gone"
        self.learn()
        for g in self.model.tokens:
            now = [self.model.found[g][h] for h in hashes[: reused // BLOCK_SIZE]]
            assert list(found.block_tables[g][: len(now)]) == now
        self.cache.release(request)

    @rule(prompt=forked_prompts(5), receive=st.booleans())
    def serve(self, prompt: tuple[int, ...], receive: bool) -> None:
        """A whole request, so that the pool fills with what can be evicted."""
        before = set(self.model.held)
        self.reserve(prompt, receive, False, None)
        for request in set(self.model.held) - before:
            self.commit_share(request, 1.0)
            self.release_request(request)

    @precondition(lambda self: self.model.held)
    @rule(pick=st.integers(0, 99), share=st.sampled_from([0.3, 0.6, 1.0]))
    def commit(self, pick: int, share: float) -> None:
        self.commit_share(sorted(self.model.held)[pick % len(self.model.held)], share)

    def commit_share(self, request: RequestId, share: float) -> None:
        held, model = self.model.held[request], self.model
        num_tokens = round(share * held.reservation.num_tokens)
        hashes = held.hashes[: num_tokens // BLOCK_SIZE]
        self.now += 1.0
        self.cache.commit(request, hashes, num_tokens, self.now)
        expected: dict[GroupId, list[BlockHash]] = {g: [] for g in model.found}
        for depth in range(held.num_committed + 1, len(hashes) + 1):
            block_hash = hashes[depth - 1]
            model.parents[block_hash] = hashes[depth - 2] if depth > 1 else None
            for g in model.tokens:
                self.store(
                    held, g, block_hash, held.reservation.block_tables[g][depth - 1], expected
                )
            position = depth * BLOCK_SIZE
        states = dict(held.reservation.checkpoint_slots)
        if held.reservation.num_tokens % BLOCK_SIZE == 0:
            states[held.reservation.num_tokens] = held.reservation.tail_slots
        for position, slots in states.items():
            if position <= num_tokens:
                for g, slot in slots.items():
                    self.store(held, g, hashes[position // BLOCK_SIZE - 1], slot, expected)
        held.num_committed = max(held.num_committed, len(hashes))
        assert self.learn() == expected

    def store(
        self,
        held: Held,
        group_id: GroupId,
        block_hash: BlockHash,
        block: BlockId,
        expected: dict[GroupId, list[BlockHash]],
    ) -> None:
        found = self.model.found[group_id]
        if block_hash not in found:
            found[block_hash] = block
            expected[group_id].append(block_hash)
        held.extra[group_id].add(found[block_hash])

    @precondition(lambda self: self.model.held)
    @rule(pick=st.integers(0, 99))
    def commit_another_prompt(self, pick: int) -> None:
        request = sorted(self.model.held)[pick % len(self.model.held)]
        held = self.model.held[request]
        num_tokens = held.reservation.num_tokens
        wrong = chain_of([9] * num_tokens)
        before = (self.cache.usage(), self.cache.snapshot())
        if held.num_committed:
            try:
                self.cache.commit(request, wrong, num_tokens, self.now)
            except LocalProtocolError:
                assert (self.cache.usage(), self.cache.snapshot()) == before
            else:
                raise AssertionError("took the hashes of another prompt")

    @precondition(lambda self: self.model.held)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        self.release_request(sorted(self.model.held)[pick % len(self.model.held)])

    def release_request(self, request: RequestId) -> None:
        del self.model.held[request]
        for _ in range(2):
            self.cache.release(request)
        self.cache.commit(request, (), 0, self.now)
        assert self.cache.take_events() == ()

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = {
            r for r, h in self.model.held.items() if h.until_s is not None and h.until_s <= self.now
        }
        expired = self.cache.expired(self.now)
        assert set(expired) == late
        for request in expired[1:]:
            self.cache.release(request)
            del self.model.held[request]
        for request in expired[:1]:
            self.cache.renew(request, self.now + 1.0)
            self.model.held[request].until_s = self.now + 1.0

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        model, usage = self.model, self.cache.usage()
        assert usage.num_requests == len(model.held)
        assert usage.num_leases == sum(h.until_s is not None for h in model.held.values())
        assert self.cache.num_checkpoints_skipped >= self.num_skipped
        _, found = self.cache.snapshot()
        for g, blocks in model.found.items():
            pinned = model.pinned(g)
            assert set(found[g]) == set(blocks)
            assert usage.indexed[g] == len(blocks)
            assert usage.reserved[g] == len(pinned)
            assert usage.blocks[g] == len(pinned | set(blocks.values()))
            for block in pinned | set(blocks.values()):
                kept = block in blocks.values()
                state = (PageState.PINNED if kept else PageState.WRITING) if block in pinned else (
                    PageState.VALID
                )  # fmt: skip
                assert self.cache.page_state(g, block) is state
        slabs = {
            (g, block // model.geometry.units[g].units_per_slab)
            for g, blocks in model.found.items()
            for block in model.pinned(g) | set(blocks.values())
        }
        assert len({slab for _, slab in slabs}) == len(slabs), "a slab serves two groups"
        assert usage.num_free_slabs == usage.num_slabs - len(slabs)


CacheMachine.TestCase.settings = settings(stateful_step_count=40)
TestCacheMachine = CacheMachine.TestCase
