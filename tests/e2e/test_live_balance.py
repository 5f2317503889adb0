"""The role balancer at work in a running stack: load shifts, nodes follow, nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from clusters import ROLES, Deployment, deployment
from prfaas.core import NodeId, Request, Role
from prfaas.policy import BalancerSettings, MaxWeightRouter, ThroughputBalancer
from prfaas.runtime.attempt import Generation
from prfaas.runtime.gateway import GatewayConfig
from prfaas.testing.engine import FakeEngine, toy_spec
from prfaas.transport.inproc import InProcTransport
from toys import (
    LOCAL,
    TOY_BLOCK,
    Pause,
    a_request,
    check_answer,
    check_serves,
    in_loop,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(30)]
PREFILL_S, DECODE_S, SLOTS = 2e-4, 4e-3, 4
CONFIG = GatewayConfig(retry_s=0.002, max_retry_s=0.02, tick_s=0.01, control_s=0.02)
LONG, SHORT = (160, 2), (32, 16)
"""Tokens of prompt and answer: 32 and 4 ms of the two stages, or 6 and 60."""


def balancer_for(
    names: tuple[str, ...], *, threshold: int = LOCAL, **settings: Any
) -> ThroughputBalancer:
    """Impatient, but not deaf to its own noise."""
    hasty = {
        "period_s": 0.05,
        "window_s": 0.4,
        "max_window_s": 0.8,
        "window_arrivals": 10,
        "min_arrivals": 8,
        "cooldown_s": 0.3,
        "num_growing": 1000,
        "change_deadline_s": 3.0,
        "backoff_s": 0.2,
        "num_ignored_samples": 1,
    }
    return ThroughputBalancer(
        toy_spec(),
        baseline={NodeId(name): ROLES[name.rstrip("0123456789")][1] for name in names},
        band=(threshold, threshold),
        settings=BalancerSettings(**(hasty | settings)),
        remote_prefill_s=lambda num_tokens: PREFILL_S * num_tokens,
        local_prefill_s=lambda num_tokens: PREFILL_S * num_tokens,
        decode_step_s=SLOTS * DECODE_S,
        output_tokens=8,
    )


@asynccontextmanager
async def live(
    names: tuple[str, ...], balancer: ThroughputBalancer, *, threshold: int = LOCAL
) -> AsyncIterator[Deployment]:
    """Workers whose engines take their time."""
    network: dict[str, Any] = {}
    async with deployment(
        lambda: FakeEngine(prefill_s_per_token=PREFILL_S, decode_s=DECODE_S),
        names=names,
        threshold=threshold,
        balancer=balancer,
        config=CONFIG,
        pool_bytes=1 << 18,
        block_size=TOY_BLOCK,
        transport=lambda: InProcTransport(network),
        address=lambda name: f"inproc://{name}",
        options={name: {"decode_slots": SLOTS} for name in names},
    ) as d:
        yield d


class Traffic:
    """Requests at a steady rate, until it is told otherwise."""

    def __init__(self, d: Deployment, rps: float, shape: tuple[int, int]) -> None:
        self._d = d
        self._rng = Random(0)
        self.rps, self.shape = rps, shape
        self._running: list[tuple[Request, asyncio.Task[Generation]]] = []
        self._task = asyncio.create_task(self._send())

    @property
    def num_sent(self) -> int:
        return len(self._running)

    async def _send(self) -> None:
        while True:
            num_tokens, num_new = self.shape
            request = a_request(num_tokens, seed=self._rng.random(), max_new_tokens=num_new)
            task = asyncio.create_task(self._d.gateway.generate(request))
            self._running.append((request, task))
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) / self.rps)

    async def more(self, num: int) -> None:
        """Until so many more were sent."""
        stop = self.num_sent + num
        await until(lambda: self.num_sent >= stop)

    async def end(self) -> list[Generation]:
        """Stops sending, and checks every answer."""
        self._task.cancel()
        generations = []
        for request, task in self._running:
            generation = await task
            check_answer(generation, request)
            generations.append(generation)
        return generations


def roles(d: Deployment) -> Mapping[Role, int]:
    return Counter(node.role for name, node in d.nodes.items() if name != "remote")


async def check_quiet(d: Deployment, balancer: ThroughputBalancer) -> None:
    """Ledger, plan and workers agree, and nothing is left."""
    await until(lambda: not balancer.changes() or balancer.num_slices)
    await check_serves(d)
    balancer.check()
    if not balancer.num_slices:
        plan = balancer.plan(0.0)
        assert {view.node_id: view.role for view in d.ledger.nodes()} == plan.roles
        assert {name: node.role for name, node in d.nodes.items()} == plan.roles
        assert not any(view.is_draining for view in d.ledger.nodes())


@pytest.mark.parametrize("router", ["threshold", "max-weight"])
@in_loop
async def test_H41_H42_nodes_follow_a_shift_of_load_once_and_lose_nothing(router: str) -> None:
    names = ("local1", "local2", "local3", "decode1")
    if router == "max-weight":
        names = ("remote", *names)
    balancer = balancer_for(names)
    async with live(names, balancer) as d:
        if router == "max-weight":
            d.gateway._router = MaxWeightRouter(toy_spec())
        traffic = Traffic(d, 24, LONG)
        await traffic.more(16)
        assert roles(d) == {Role.PREFILL: 3, Role.DECODE: 1}
        assert balancer.num_conversions == 0
        traffic.shape = SHORT
        await until(lambda: roles(d)[Role.DECODE] > 1 and not balancer.changes())
        await traffic.more(20)
        await until(lambda: not balancer.changes())
        generations = await traffic.end()
        # One or two, as fast as this machine sends; but all of them in one direction.
        num = balancer.num_conversions
        assert roles(d) == {Role.PREFILL: 3 - num, Role.DECODE: 1 + num}
        assert balancer.num_rolled_back == 0
        assert {g.record["decode_node"] for g in generations} > {"decode1"}
        await check_quiet(d, balancer)


@asynccontextmanager
async def stuck(
    names: tuple[str, ...], balancer: ThroughputBalancer, d: Deployment
) -> AsyncIterator[tuple[Traffic, str, dict[str, Pause]]]:
    """Prompts pile up, and a decode node is asked to help, but all of those stand still."""
    pauses = {n: Pause(d.nodes[n].engine, "decode") for n in names if n.startswith("decode")}
    traffic = Traffic(d, 60, (160, 8))
    try:
        for pause in pauses.values():
            await pause.reached()
        await until(balancer.changes)
        (change,) = balancer.changes()
        assert (change.old, change.new) == (Role.DECODE, Role.PREFILL)
        await until(lambda: d.nodes[change.node_id].conversion.is_draining)
        yield traffic, change.node_id, pauses
    finally:
        for pause in pauses.values():
            pause.release()


DECODERS = ("local1", "decode1", "decode2", "decode3")


@in_loop
async def test_H42_a_node_that_dies_while_it_converts_takes_nothing_with_it() -> None:
    balancer = balancer_for(DECODERS)
    async with live(DECODERS, balancer) as d:
        async with stuck(DECODERS, balancer, d) as (traffic, node_id, pauses):
            pauses[node_id].release()
            await d.kill(node_id)
            await until(lambda: node_id not in d.gateway.workers)
            assert node_id not in {change.node_id for change in balancer.changes()}
        await d.start(node_id, epoch=2)
        await d.add(node_id)
        await traffic.more(10)
        generations = await traffic.end()
        assert max(g.record["attempts"] for g in generations) > 1
        await check_quiet(d, balancer)


@in_loop
async def test_H41_a_conversion_that_does_not_finish_is_rolled_back_and_the_node_serves() -> None:
    balancer = balancer_for(DECODERS, change_deadline_s=0.2, backoff_s=60.0)
    async with live(DECODERS, balancer) as d:
        async with stuck(DECODERS, balancer, d) as (traffic, node_id, _):
            await until(lambda: balancer.num_rolled_back)
            assert balancer.plan(0.0).roles[NodeId(node_id)] is Role.DECODE
            await until(lambda: d.nodes[node_id].role is Role.DECODE)
            await until(lambda: not d.nodes[node_id].conversion.is_draining)
            num_before = traffic.num_sent
        await until(lambda: not any(v.is_draining for v in d.ledger.nodes()))
        await traffic.more(10)
        generations = await traffic.end()
        assert node_id in {g.record["decode_node"] for g in generations[num_before:]}
        await check_quiet(d, balancer)


@in_loop
async def test_a_node_that_alternates_loses_nothing_over_several_slices() -> None:
    """1.5 nodes for each stage are worth much more than 1 and 2."""
    names = ("local1", "decode1", "decode2")
    balancer = balancer_for(names, fractional="slices", slice_period_s=0.2, high_utilisation=0.5)
    async with live(names, balancer) as d:
        traffic = Traffic(d, 32, (144, 8))
        await until(lambda: balancer.num_slices >= 5)
        generations = await traffic.end()
        assert balancer.num_conversions == balancer.num_rolled_back == 0
        # The alternating node did work of both kinds.
        prefilled = {g.record["prefill_node"] for g in generations}
        decoded = {g.record["decode_node"] for g in generations}
        assert len(prefilled & decoded) == 1
        await check_quiet(d, balancer)


@in_loop
async def test_a_draining_node_takes_both_roles_when_the_others_are_lost() -> None:
    """The last one that is left was on its way to another role."""
    balancer = balancer_for(DECODERS)
    async with live(DECODERS, balancer) as d:
        async with stuck(DECODERS, balancer, d) as (traffic, node_id, pauses):
            for name in DECODERS:
                if name != node_id:
                    if name in pauses:
                        pauses[name].release()
                    await d.kill(name)
            await until(lambda: d.gateway.workers == {node_id})
            await until(lambda: d.nodes[node_id].role is Role.MIXED)
            await traffic.more(5)
            traffic.rps = 1.0
        await traffic.end()
        await check_quiet(d, balancer)
