"""Synthetic conversations: prompts that grow turn by turn over shared system prompts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from hashlib import blake2b
from random import Random

import attrs

from prfaas.core import BlockHash, RequestId
from prfaas.errors import ConfigError
from prfaas.hashing import HASH_BYTES
from prfaas.workload.arrival import Arrival
from prfaas.workload.processes import Tokens, check_positive, draw_tokens, end_after

_SYSTEM_DOMAIN = b"prfaas.system.1"
_SESSION_DOMAIN = b"prfaas.session.1"


@attrs.frozen(kw_only=True)
class SessionShape:
    """What conversations look like.

    Attributes:
        user_tokens: new tokens that the user adds per turn.
        output_tokens: tokens that the model answers; they are part of the next turn's prompt.
        mean_turns: mean of the geometric number of turns, at least 1.
        mean_gap_s: mean of the exponential time from one turn's arrival to the next. The answer's
            own time is not known here and is part of the gap.
        system_tokens: length of a system prompt, 0 for none.
        num_system_prompts: how many different system prompts there are; each session takes one
            at random.
        max_tokens: a session ends before the turn whose prompt would be longer.
        granule_tokens: tokens per hash.
    """

    user_tokens: Tokens
    output_tokens: Tokens
    mean_turns: float = attrs.field(default=4.0)
    mean_gap_s: float = 30.0
    system_tokens: int = attrs.field(default=1024)
    num_system_prompts: int = attrs.field(default=1)
    max_tokens: int = 131_072
    granule_tokens: int = attrs.field(default=64)

    def __attrs_post_init__(self) -> None:
        check_positive("mean_gap_s", self.mean_gap_s)
        shortest = (
            self.user_tokens if isinstance(self.user_tokens, int) else (self.user_tokens.min_tokens)
        )
        for name, value, least in (
            ("mean_turns", self.mean_turns, 1),
            ("system_tokens", self.system_tokens, 0),
            ("num_system_prompts", self.num_system_prompts, 1),
            ("granule_tokens", self.granule_tokens, 1),
            ("user_tokens", shortest, 1),
            ("max_tokens", self.max_tokens, self.system_tokens + shortest),
        ):
            if not value >= least:
                raise ConfigError(f"{name} is {value!r}; it must be at least {least}")


def sessions(
    rate_rps: float,
    shape: SessionShape,
    rng: Random,
    *,
    duration_s: float | None = None,
    num_requests: int | None = None,
    start_s: float = 0.0,
) -> Iterator[Arrival]:
    """Conversations that start as a Poisson process, their turns merged in order of time.

    The prompt of a turn is the system prompt, every earlier user message and answer, and the new
    message. Granules wholly inside a system prompt have the same hash in all sessions that share
    it, all others belong to one session; hashes of different seeds never meet.

    Args:
        rate_rps: new sessions per second. Requests per second settle at ``rate_rps`` times the mean
            number of turns, after the time that a session takes.
        shape: what a session looks like.
        duration_s, num_requests: where to end, at least one of them; ``num_requests`` counts turns.

    Yields:
        Arrivals with ids ``"session.turn"`` and one hash per complete granule of the prompt.
    """
    check_positive("rate_rps", rate_rps)
    return end_after(_merged(rate_rps, shape, rng, start_s), duration_s, num_requests, start_s)


def _merged(rate_rps: float, shape: SessionShape, rng: Random, start_s: float) -> Iterator[Arrival]:
    seed = rng.getrandbits(128).to_bytes(16, "little")
    number, next_start_s = 0, start_s + rng.expovariate(rate_rps)
    waiting: list[tuple[float, int, Arrival, Iterator[Arrival]]] = []
    while True:
        while not waiting or next_start_s <= waiting[0][0]:
            turns = _turns(number, next_start_s, shape, seed, rng)
            _push(waiting, number, turns)
            number += 1
            next_start_s += rng.expovariate(rate_rps)
        _, owner, arrival, turns = heapq.heappop(waiting)
        yield arrival
        _push(waiting, owner, turns)


def _push(
    waiting: list[tuple[float, int, Arrival, Iterator[Arrival]]],
    number: int,
    turns: Iterator[Arrival],
) -> None:
    arrival = next(turns, None)
    if arrival is not None:
        heapq.heappush(waiting, (arrival.arrived_s, number, arrival, turns))


def _turns(
    number: int, at_s: float, shape: SessionShape, seed: bytes, rng: Random
) -> Iterator[Arrival]:
    system = rng.randrange(shape.num_system_prompts)
    num_shared = shape.system_tokens // shape.granule_tokens
    hashes = [_key(_SYSTEM_DOMAIN, seed, system, i) for i in range(num_shared)]
    num_tokens, turn = shape.system_tokens, 0
    while True:
        num_tokens += draw_tokens(shape.user_tokens, rng)
        if num_tokens > shape.max_tokens:
            return
        granules = range(len(hashes), num_tokens // shape.granule_tokens)
        hashes += [_key(_SESSION_DOMAIN, seed, number, i) for i in granules]
        output_tokens = draw_tokens(shape.output_tokens, rng)
        yield Arrival(
            request_id=RequestId(f"{number}.{turn}"),
            arrived_s=at_s,
            num_tokens=num_tokens,
            output_tokens=output_tokens,
            granule_hashes=tuple(hashes),
        )
        if rng.random() * shape.mean_turns < 1:
            return
        num_tokens += output_tokens
        at_s += rng.expovariate(1 / shape.mean_gap_s)
        turn += 1


def _key(domain: bytes, seed: bytes, owner: int, position: int) -> BlockHash:
    """Name the prefix up to a granule: its owner's text up to that position is always the same."""
    named = owner.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = blake2b(named, digest_size=HASH_BYTES, key=seed, person=domain)
    return BlockHash(digest.digest())
