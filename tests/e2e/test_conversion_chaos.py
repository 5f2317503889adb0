"""Orders of roles, kills, restarts, cancels and requests at random: nothing is lost or left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

import attrs
import pytest

from clusters import Deployment
from orders import NAMES, Orders, role_of
from prfaas.core import Request, Role
from prfaas.errors import DeadlineExceeded
from prfaas.policy.up_nodes import can_serve
from prfaas.runtime.gateway import GatewayConfig
from prfaas.runtime.messages import Failed, Generate, Token
from prfaas.seams import RoutingDecision
from toys import (
    LOCAL,
    REMOTE,
    RawPeer,
    a_request,
    check_answer,
    check_serves,
    in_loop,
    start,
    toys,
    until,
    work,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]
CONFIG = GatewayConfig(
    retry_s=0.001, max_retry_s=0.01, tick_s=0.005, control_s=0.01, max_attempts=20
)
PD = NAMES[1:]
ENDLESS = {"max_new_tokens": 1_000_000}


class Storm:
    """Does one random thing after another to a deployment, and keeps the plan servable."""

    def __init__(self, d: Deployment, orders: Orders, rng: Random, *, kills: bool) -> None:
        self.d, self.orders, self.rng = d, orders, rng
        self.requests: list[Request] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.epochs = dict.fromkeys(NAMES, 1)
        self.kills = kills

    async def blow(self) -> None:
        match self.rng.choices(("ask", "order", "cancel", "kill", "back"), (12, 6, 2, 1, 2))[0]:
            case "ask":
                self._ask()
            case "order":
                self._order()
            case "cancel" if self.tasks:
                self.rng.choice(self.tasks).cancel()
            case "kill" if self.kills and sum(name in self.d.workers for name in PD) > 2:
                await self.d.kill(self.rng.choice([n for n in NAMES if n in self.d.workers]))
                self._order()
            case "back":
                await self.bring_back()

    async def bring_back(self, num: int = 1) -> None:
        for name in [name for name in NAMES if name not in self.d.workers][:num]:
            self.epochs[name] += 1
            await self.d.start(name, epoch=self.epochs[name])
            await self.d.add(name)

    def _ask(self) -> None:
        # A few prompts only, so that caches hit, across nodes that change what they do.
        request = a_request(self.rng.choice((1, 16, 40, 90)), seed=self.rng.randrange(8))
        self.requests.append(request)
        self.tasks.append(start(self.d, request))

    def _order(self) -> None:
        up = [name for name in PD if name in self.d.workers]
        roles = {name: self.rng.choice(tuple(Role)) for name in up if self.rng.random() < 0.5}
        planned = {name: role for name, role in self.orders.ordered.roles.items() if name in up}
        if not can_serve({**planned, **roles}.values()):
            roles = dict.fromkeys(up, Role.MIXED)
        merged = {**planned, **roles}
        mixed = [name for name in merged if merged[name] is Role.MIXED]
        self.orders.order(
            roles, {n: self.rng.randint(1, 40) for n in mixed if self.rng.random() < 0.5}
        )


@pytest.mark.parametrize("kills", [True, False])
@pytest.mark.parametrize("threshold", [REMOTE, LOCAL])
@pytest.mark.parametrize("seed", range(3))
@in_loop
async def test_H42_whatever_is_ordered_killed_and_cancelled_nothing_is_lost(
    seed: int, threshold: int, kills: bool
) -> None:
    """Without kills nothing even fails: what is given back, or refused, is no failed attempt."""
    orders, rng = Orders(threshold), Random(seed)
    config = CONFIG if kills else attrs.evolve(CONFIG, max_attempts=1)
    options = {name: {"decode_slots": 2} for name in PD}
    async with toys(
        names=NAMES, threshold=threshold, balancer=orders, config=config, options=options
    ) as d:
        _watch(d)
        storm = Storm(d, orders, rng, kills=kills)
        for _ in range(150):
            await storm.blow()
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.004)))
        await storm.bring_back(len(NAMES))
        num_ended = 0
        for request, task in zip(storm.requests, storm.tasks, strict=True):
            with suppress(asyncio.CancelledError):
                check_answer(await task, request)
                num_ended += 1
        assert num_ended > 30
        await until(lambda: not any(view.is_draining for view in d.ledger.nodes()))
        await until(
            lambda: all(
                role_of(d, name)[0] is d.nodes[name].role is orders.ordered.roles[name]  # type: ignore[index]
                for name in PD
            )
        )
        assert not any(node.conversion.is_draining for node in d.nodes.values())
        assert d.gateway.workers == set(NAMES)
        await check_serves(d)


def _watch(d: Deployment) -> None:
    """No decision may name a node that drains, or that does not do such work."""
    route = d.gateway._router.route

    def watched(*args: Any) -> RoutingDecision:
        decision = route(*args)
        views = {view.node_id: view for view in d.ledger.nodes()}
        prefill, decode = views[decision.prefill_node], views[decision.decode_node]
        assert prefill.role.prefills
        assert decode.role.decodes
        assert not prefill.is_draining
        assert not decode.is_draining
        return decision

    d.gateway._router.route = watched  # type: ignore[method-assign]


class Steps:
    """What an engine ran, in order."""

    def __init__(self, engine: Any) -> None:
        self.ran: list[str] = []
        engine.before = lambda method, request_id: self.ran.append(method)

    def runs(self) -> Sequence[int]:
        """Decode steps between two prefill segments."""
        text = "".join({"prefill": "p", "decode": "d"}.get(method, "") for method in self.ran)
        return [len(run) for run in text.strip("d").split("p")[1:-1]]


@pytest.mark.parametrize(("budget", "rounds"), [(0, 1), (16, 1), (8, 2), (5, 4), (1, 16)])
@in_loop
async def test_a_mixed_node_computes_no_more_of_a_prompt_per_step_than_its_budget(
    budget: int, rounds: int
) -> None:
    """Segments are of 16 tokens, and three requests decode all the time."""
    orders = Orders(LOCAL)
    async with toys(names=NAMES, threshold=LOCAL, balancer=orders) as d:
        orders.order({"decode1": Role.MIXED}, {"decode1": budget} if budget else {})
        await until(lambda: d.nodes["decode1"].role is Role.MIXED)
        raw = await RawPeer.dial(d, d.workers["decode1"].address)
        for i in range(3):
            await raw.say(Generate(**work(f"d{i}", 16) | ENDLESS))
        names = set()
        while len(names) < 3:
            names.add((await raw.hear(Token)).request_id)
        steps = Steps(d.nodes["decode1"].engine)
        await raw.say(Generate(**work("long", 112)))  # 16 of them are cached
        while (await raw.hear(Token)).request_id != "long":
            pass
        assert steps.runs() == [3 * rounds] * 5
        raw.channel.abort()
        await check_serves(d)


@pytest.mark.parametrize("way", ["cancel", "deadline", "order"])
@in_loop
async def test_a_request_that_waits_for_a_decode_slot(way: str) -> None:
    orders = Orders(REMOTE)
    options = {"decode1": {"decode_slots": 1}}
    async with toys(names=("remote", "decode1"), balancer=orders, options=options) as d:
        orders.order({"decode1": Role.MIXED})
        await until(lambda: d.nodes["decode1"].role is Role.MIXED)
        schedule = d.nodes["decode1"].schedule
        raw = await RawPeer.dial(d, d.workers["decode1"].address)
        await raw.say(Generate(**work("endless", 16) | ENDLESS))
        await raw.hear(Token)
        late = a_request(deadline_s=0.2 if way == "deadline" else 20.0)
        waiting = start(d, late)
        await until(lambda: schedule._waiting or waiting.done())
        if way == "cancel":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        elif way == "deadline":
            with pytest.raises(DeadlineExceeded):
                await waiting
        else:
            orders.order({"decode1": Role.DECODE})
            await until(lambda: role_of(d, "decode1") == (Role.DECODE, True))
            assert schedule._waiting
        if way != "order":
            await until(lambda: not schedule._waiting and d.workers["decode1"].num_jobs == 1)
            assert d.ledger.num_in_flight == 0
        raw.channel.abort()
        if way == "order":
            check_answer(await waiting, late)
            assert waiting.result().record["attempts"] == 1
            await until(lambda: role_of(d, "decode1") == (Role.DECODE, False))
        await check_serves(d)


@in_loop
async def test_what_waits_for_a_slot_and_is_forgotten_ends_at_its_own_deadline() -> None:
    names = ("decode",)
    options = {"decode": {"decode_slots": 1}}
    async with toys(
        names=names, threshold=LOCAL, roles={"decode": Role.MIXED}, options=options
    ) as d:
        raw = await RawPeer.dial(d, d.workers["decode"].address)
        await raw.say(Generate(**work("endless", 16) | ENDLESS))
        await raw.hear(Token)
        await raw.say(Generate(**work("late", 16, deadline_s=0.05)))
        failed = await raw.hear(Failed)
        assert failed.request_id == "late"
        assert not failed.retryable
        assert not d.nodes["decode"].schedule._waiting
        raw.channel.abort()
        await check_serves(d)
