"""Cancelled, refused or failed in the engine: a request ends cleanly, and nothing is left."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from prfaas.core import Role
from prfaas.errors import (
    ChannelClosed,
    DeadlineExceeded,
    EngineError,
    PrfaasError,
    RequestError,
)
from toys import (
    LOCAL,
    NUM_NEW,
    ROUTES,
    Pause,
    a_request,
    check_answer,
    check_serves,
    held_toys,
    in_loop,
    start,
    toys,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(30)]

# Nobody wants it any more.

PHASES = {
    "queued": ("remote", "prefill", 1),
    "prefill": ("remote", "prefill", 3),
    "transfer": None,
    "install": ("decode", "open", 1),
    "first decode": ("decode", "decode", 1),
    "last decode": ("decode", "decode", NUM_NEW - 1),
}


@pytest.mark.parametrize("phase", PHASES)
@in_loop
async def test_H24_cancel_in_every_phase(phase: str) -> None:
    async with held_toys() as (d, held):
        where = PHASES[phase]
        pause = None
        if where is not None:
            held.gate.set()
            name, method, nth = where
            pause = Pause(d.nodes[name].engine, method, nth)
        other, request = a_request(seed=3), a_request()
        others = [start(d, other)] if phase == "queued" else []
        if others and pause is not None:
            await pause.reached()
        generating = start(d, request)
        if others:
            await until(lambda: d.workers["remote"].num_jobs == 2)
        await (held.holds() if pause is None else pause.reached())
        generating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generating
        assert d.gateway.num_active == len(others)
        if where is not None and pause is not None:
            node = d.nodes[where[0]]
            await until(lambda: len(node.schedule) == len(others))
            await asyncio.sleep(0.005)
            # What the engine works on is not given back before it is done with it.
            assert node.engine.num_open or where[1] == "open"
            assert node.cache.usage().num_requests or where[1] == "decode"
            pause.release()
        held.gate.set()
        for task in others:
            check_answer(await task, other)
        await d.settle()
        d.check_empty()
        await check_serves(d)


@pytest.mark.parametrize("seed", range(3))
@in_loop
async def test_H28_many_cancelled_at_random(seed: int) -> None:
    rng = Random(seed)
    async with toys(threshold=60, pool_bytes=1 << 16) as d:
        requests = [a_request(rng.randint(1, 150), rng.randrange(9)) for _ in range(30)]
        tasks = [start(d, request) for request in requests]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(rng.random() * 0.004)
            rng.choice(tasks).cancel()
        for task, request in zip(tasks, requests, strict=True):
            if not task.cancelled():
                check_answer(task.result(), request)
        await d.settle()
        d.check_empty()
        await check_serves(d)


@pytest.mark.parametrize("route", ROUTES)
@in_loop
async def test_H36_the_ledger_goes_back_to_nothing(route: str) -> None:
    async with toys(**ROUTES[route]) as d:
        engine = d.nodes["decode"].engine
        engine.fail_at["decode"] = 2
        await d.gateway.generate(a_request())  # an error, then success
        pause = Pause(engine, "decode", 1)
        with pytest.raises(DeadlineExceeded):
            await d.gateway.generate(a_request(deadline_s=0.03))
        pause.release()
        assert d.ledger.num_in_flight == 0
        assert all(v.num_active == v.queued_tokens == 0 for v in d.ledger.nodes())
        await d.settle()
        await check_serves(d)


@in_loop
async def test_H23_an_abort_of_the_prefill_reaches_decode_and_gateway() -> None:
    async with held_toys() as (d, held):
        request = a_request()
        generating = start(d, request)
        await held.holds()
        (job,) = d.workers["remote"]._jobs.values()
        job.cancel("told to abort")
        async with asyncio.timeout(1):
            await until(lambda: d.gateway.num_retries)
        held.gate.set()
        generation = await generating
        check_answer(generation, request)
        assert generation.record["prefill_node"] == "local"
        await check_serves(d)


@in_loop
async def test_a_cancelled_job_keeps_no_other_from_the_engine() -> None:
    async with toys(names=("remote", "decode")) as d:
        pause = Pause(d.nodes["remote"].engine, "prefill", 2)
        request, other = a_request(), a_request(seed=7)
        generating, others = start(d, request), start(d, other)
        await pause.reached()
        job = d.workers["remote"]._jobs[f"{request.request_id}#0"]
        num_scheduled = len(d.nodes["remote"].schedule)
        job.cancel("told to")
        assert len(d.nodes["remote"].schedule) == num_scheduled - 1
        pause.release()
        check_answer(await others, other)
        check_answer(await generating, request)
        await check_serves(d)


@in_loop
async def test_a_gateway_that_is_gone_takes_its_jobs_with_it() -> None:
    async with held_toys() as (d, held):
        generating = start(d, a_request())
        await held.holds()
        for link in tuple(d.gateway._fleet.links.values()):
            link.line.abort()
        await d.settle()
        for name in d.workers:
            d.check_node(name)
        generating.cancel()
        for name in d.workers:
            await d.add(name)
        held.gate.set()
        await check_serves(d)


@in_loop
async def test_a_closed_gateway_ends_its_requests() -> None:
    async with held_toys() as (d, held):
        generating = [start(d, a_request()), start(d, a_request())]
        await held.holds()
        await d.gateway.aclose()
        await d.gateway.aclose()
        for task in generating:
            with pytest.raises(ChannelClosed, match="gateway was closed"):
                await task
        await d.settle()
        d.check_empty()
        with pytest.raises(ChannelClosed):
            await d.gateway.generate(a_request())
        with pytest.raises(ChannelClosed):
            await d.add("remote")


# The engine fails.

BROKEN = {
    "prefill, open": ("remote", "open", 1),
    "prefill, first segment": ("remote", "prefill", 1),
    "prefill, later segment": ("remote", "prefill", 4),
    "installation": ("decode1", "open", 1),
    "decode": ("decode1", "decode", 2),
}


@pytest.mark.parametrize("error", [EngineError("it broke"), RuntimeError("a bug")])
@pytest.mark.parametrize("where", BROKEN)
@in_loop
async def test_H08_a_failing_engine_costs_one_retry_elsewhere(where: str, error: Exception) -> None:
    name, method, nth = BROKEN[where]
    async with toys(names=("remote", "local", "decode1")) as d:
        Pause(d.nodes[name].engine, method, nth, error)
        request = a_request()
        generation = await d.gateway.generate(request)
        check_answer(generation, request)
        assert generation.record["attempts"] == 2
        if name == "remote":
            assert generation.record["prefill_node"] == "local"
        assert d.nodes[name].counters["steps_failed"] == 1
        assert d.nodes[name].counters["failed"] == 1
        assert bool(d.reports) == isinstance(error, RuntimeError)
        d.reports.clear()
        await check_serves(d)


@in_loop
async def test_a_failing_engine_leaves_others_alone() -> None:
    async with toys(threshold=LOCAL) as d:
        requests = [a_request(50, seed) for seed in range(6)]
        d.nodes["local"].engine.fail_at["prefill"] = 5
        d.nodes["decode"].engine.fail_at["decode"] = 7
        generations = await asyncio.gather(*(d.gateway.generate(r) for r in requests))
        for generation, request in zip(generations, requests, strict=True):
            check_answer(generation, request)
        assert d.gateway.num_retries == 2
        await check_serves(d)


@in_loop
async def test_a_request_that_breaks_every_engine_is_reported() -> None:
    async with toys() as d:

        def fail(method: str, request_id: str) -> None:
            if method == "prefill":
                raise EngineError("token 7 is not in the vocabulary \udc80")

        for node in d.nodes.values():
            node.engine.before = fail
        with pytest.raises(PrfaasError, match=r"prefill of request .* failed: token 7 is not in"):
            await d.gateway.generate(a_request())
        assert d.gateway.num_retries == 3
        for node in d.nodes.values():
            node.engine.before = None
        await d.settle()
        await check_serves(d)


@in_loop
async def test_an_engine_that_cannot_close_leaks_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    async with toys() as d:
        engine = d.nodes["decode"].engine
        close = engine.close

        def fail(request_id: str) -> None:
            close(request_id)
            raise RuntimeError("no")

        monkeypatch.setattr(engine, "close", fail)
        await d.gateway.generate(a_request())
        await d.settle()
        monkeypatch.undo()
        assert len(d.reports) == 1
        d.reports.clear()
        await check_serves(d)


# Names and other input.


@pytest.mark.parametrize(
    "name", ["x" * 200, "x" * 1000, "zwölf 漢字 🚀", "a/b:c d", "r#0", "#", " ", "\x00"]
)
@pytest.mark.parametrize("route", ["remote", "mixed"])
@in_loop
async def test_H27_ids_travel_verbatim(route: str, name: str) -> None:
    async with toys(**ROUTES[route]) as d:
        phases: list[tuple[str, str]] = []
        request = a_request(request_id=name)
        generation = await d.gateway.generate(request, lambda *phase: phases.append(phase))
        check_answer(generation, request)
        assert generation.record["request_id"] == name
        transfer = ["transfer"] if route == "remote" else []
        assert phases == [(name, p) for p in ("prefill", *transfer, "decode", "done")]
        await check_serves(d)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_id": "x" * 1001}, "1 to 1000 characters"),
        ({"request_id": "\ud800"}, "surrogate"),
        ({"tenant": "\ud800"}, "surrogate"),
        ({"max_new_tokens": 2**70}, "cannot be sent"),
        ({"tokens": [1] * 2**21}, "a frame holds"),
    ],
)
@in_loop
async def test_what_no_message_can_carry_is_refused_at_the_door(
    options: dict[str, Any], message: str
) -> None:
    async with toys(names=("decode",), roles={"decode": Role.MIXED}) as d:
        with pytest.raises(RequestError, match=message):
            await d.gateway.generate(a_request(**options))
        await check_serves(d)


@in_loop
async def test_a_name_in_use_is_refused_and_free_again_afterwards() -> None:
    async with toys() as d:
        request = a_request()
        first = start(d, request)
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="running already"):
            await d.gateway.generate(request)
        check_answer(await first, request)
        check_answer(await d.gateway.generate(request), request)
        await check_serves(d)
