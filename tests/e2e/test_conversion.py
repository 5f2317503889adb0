"""Nodes that change their role while they serve: drained first, nothing lost."""

from __future__ import annotations

import asyncio
import threading

import pytest

from orders import NAMES, Orders, role_of
from prfaas.core import Role
from prfaas.runtime.messages import Expect, Expecting, Failed, RoleSet, SetRole
from prfaas.seams import Arrived, ChangePhase, NodeLoad, Served
from toys import (
    LOCAL,
    REMOTE,
    Pause,
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

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(30)]


@in_loop
async def test_prompts_that_wait_go_elsewhere_and_the_one_that_runs_is_finished() -> None:
    orders = Orders(LOCAL)
    async with toys(names=NAMES, threshold=LOCAL, balancer=orders) as d:
        pauses = [Pause(d.nodes[name].engine, "prefill") for name in ("local1", "local2")]
        requests = [a_request(seed=i) for i in range(40)]
        tasks = [start(d, request) for request in requests]
        for pause in pauses:
            await pause.reached()
        await until(lambda: d.nodes["local1"].counters["admitted"] == 20)
        orders.order({"local1": Role.DECODE})
        await until(lambda: orders.phases("local1") == [ChangePhase.STARTED])
        assert role_of(d, "local1") == (Role.DECODE, True)
        await until(lambda: d.nodes["local2"].counters["admitted"] == 39)
        assert d.nodes["local1"].counters["given_back"] == 19
        for pause in pauses:
            pause.release()
        generations = await asyncio.gather(*tasks)
        for generation, request in zip(generations, requests, strict=True):
            check_answer(generation, request)
        nodes = [generation.record["prefill_node"] for generation in generations]
        assert nodes.count("local1") == 1
        await until(lambda: orders.phases("local1")[1:] == [ChangePhase.DONE])
        assert role_of(d, "local1") == (Role.DECODE, False)
        decoded = {
            (await d.gateway.generate(a_request(seed=100 + i))).record["decode_node"]
            for i in range(20)
        }
        assert "local1" in decoded
        await check_serves(d)


@in_loop
async def test_a_decode_node_converts_when_its_last_answer_is_out() -> None:
    orders = Orders(REMOTE)
    async with toys(names=NAMES, balancer=orders) as d:
        pauses = {name: Pause(d.nodes[name].engine, "decode") for name in ("decode1", "decode2")}
        requests = [a_request(seed=i) for i in range(40)]
        tasks = [start(d, request) for request in requests]
        for pause in pauses.values():
            await pause.reached()
        orders.order({"decode1": Role.PREFILL})
        await until(lambda: orders.phases("decode1") == [ChangePhase.STARTED])
        pauses["decode2"].release()
        late = a_request(seed=50)
        generation = await d.gateway.generate(late)
        assert generation.record["decode_node"] == "decode2"
        check_answer(generation, late)
        assert orders.phases("decode1") == [ChangePhase.STARTED]
        pauses["decode1"].release()
        for task, request in zip(tasks, requests, strict=True):
            check_answer(await task, request)
        await until(lambda: orders.phases("decode1")[1:] == [ChangePhase.DONE])
        assert {task.result().record["attempts"] for task in tasks} == {1}
        await check_serves(d)


@in_loop
async def test_a_node_that_drains_goes_on_to_another_role_or_back() -> None:
    orders = Orders(REMOTE)
    async with toys(names=NAMES, balancer=orders) as d:
        pause = Pause(d.nodes["decode1"].engine, "decode")
        raw = await RawPeer.dial(d, d.workers["decode1"].address)
        tasks = [start(d, a_request(seed=i)) for i in range(4)]
        await pause.reached()
        orders.order({"decode1": Role.PREFILL})
        await until(lambda: orders.phases("decode1") == [ChangePhase.STARTED])
        await raw.say(Expect(**work(), prefill_node="remote"))
        assert (await raw.hear(Failed)).busy
        orders.order({"decode1": Role.MIXED})
        await until(lambda: orders.phases("decode1") == [ChangePhase.DONE])
        assert role_of(d, "decode1") == (Role.MIXED, False)
        orders.order({"decode1": Role.PREFILL})
        await until(lambda: orders.phases("decode1") == [ChangePhase.STARTED])
        orders.order({"decode1": Role.DECODE})
        await until(lambda: orders.phases("decode1") == [ChangePhase.DONE])
        assert role_of(d, "decode1") == (Role.DECODE, False)
        await raw.say(Expect(**work(attempt=1), prefill_node="remote"))
        await raw.hear(Expecting)
        raw.channel.abort()
        pause.release()
        await asyncio.gather(*tasks)
        await check_serves(d)


@in_loop
async def test_a_node_that_cannot_be_rebuilt_for_its_role_serves_in_none() -> None:
    orders = Orders(REMOTE)

    def rebuild(role: Role) -> None:
        raise RuntimeError(f"no kernels for {role.value}")

    async with toys(names=NAMES, balancer=orders, on_role=rebuild) as d:
        orders.order({"decode1": Role.PREFILL})
        await until(lambda: "decode1" not in d.gateway.workers)
        assert ChangePhase.DONE not in orders.phases("decode1")
        assert [str(r["exception"]) for r in d.reports] == ["no kernels for prefill"]
        d.reports.clear()
        await check_serves(d)


@in_loop
async def test_a_change_called_back_while_a_node_rebuilds_is_over_only_in_the_role_it_has() -> None:
    orders, rebuilt, go = Orders(REMOTE), [], threading.Event()

    def rebuild(role: Role) -> None:
        rebuilt.append(role)
        assert go.wait(5)

    async with toys(names=NAMES, balancer=orders, on_role=rebuild) as d:
        orders.order({"decode1": Role.PREFILL})
        await until(lambda: rebuilt)
        orders.order({"decode1": Role.DECODE})
        await until(lambda: d.nodes["decode1"].role is Role.DECODE)
        go.set()
        await until(lambda: ChangePhase.DONE in orders.phases("decode1"))
        assert rebuilt == [Role.PREFILL, Role.DECODE]
        assert role_of(d, "decode1") == (Role.DECODE, False)
        await check_serves(d)


@in_loop
async def test_a_budget_of_prompt_tokens_paces_a_mixed_node() -> None:
    orders = Orders(LOCAL)
    async with toys(names=NAMES, threshold=LOCAL, balancer=orders) as d:
        assert d.nodes["decode1"].schedule._decode_rounds == 1
        orders.order({"decode1": Role.MIXED}, {"decode1": 4})
        await until(lambda: d.nodes["decode1"].schedule._decode_rounds == 4)
        assert role_of(d, "decode1")[0] is Role.MIXED
        orders.order({}, {"decode1": 8})
        await until(lambda: d.nodes["decode1"].schedule._decode_rounds == 2)
        orders.order({"decode1": Role.DECODE})
        await until(lambda: d.nodes["decode1"].schedule._decode_rounds == 1)
        raw = await RawPeer.dial(d, d.workers["decode1"].address)
        await raw.say(SetRole(role="mixed", plan_epoch=9, prefill_budget=-1))
        await raw.is_cut_off()
        await check_serves(d)


@in_loop
async def test_the_balancer_hears_of_arrivals_of_answers_and_of_load() -> None:
    orders = Orders(REMOTE)
    async with toys(names=NAMES, balancer=orders) as d:
        request = a_request(num_tokens=90)
        await d.gateway.generate(request)
        assert Arrived(routed_tokens=90) in orders.heard
        served = [event for event in orders.heard if isinstance(event, Served)]
        assert [event.output_tokens for event in served] == [request.max_new_tokens]
        assert served[0].step_s > 0
        await until(lambda: any(isinstance(event, NodeLoad) for event in orders.heard))
        await check_serves(d)


def test_a_role_set_needs_a_known_phase() -> None:
    assert RoleSet(role="mixed", plan_epoch=1).phase == "done"
