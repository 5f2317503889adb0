"""Whatever breaks, a request ends with the right answer or a clear error, and nothing is left."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from clusters import ANY_PORT, Deployment
from prfaas.core import Handoff, Role
from prfaas.errors import (
    DeadlineExceeded,
    IntegrityError,
    PrfaasError,
    PutRefused,
)
from prfaas.runtime.gateway import GatewayConfig
from prfaas.seams import RoutingDecision, Span
from prfaas.transport.tcp import TcpConfig, TcpTransport
from toys import (
    LOCAL,
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


@pytest.mark.parametrize("handoff", Handoff)
@pytest.mark.parametrize("route", ROUTES)
@in_loop
async def test_toys_give_the_answer_of_one_engine(route: str, handoff: Handoff) -> None:
    async with toys(**ROUTES[route], handoff=handoff) as d:
        for num_tokens in (1, 2, 16, 17, 90, 90):
            request = a_request(num_tokens)
            generation = await d.gateway.generate(request)
            check_answer(generation, request)
            assert generation.record["attempts"] == 1
        one = a_request(max_new_tokens=1)
        check_answer(await d.gateway.generate(one), one)
        await check_serves(d)


@in_loop
async def test_layers_travel_while_later_ones_are_computed() -> None:
    async with toys(names=("remote", "decode"), options={"remote": {"put_bytes": 1}}) as d:
        node = d.nodes["remote"]
        pause = Pause(node.engine, "prefill", 3)
        request = a_request()
        generating = start(d, request)
        await pause.reached()
        num_tokens = 2 * node.engine.segment_tokens
        rows = [layer for layer in node.spec.layers if layer is not None and layer.is_token_kind]
        ready_bytes = sum(layer.entry_bytes(num_tokens) for layer in rows)
        await until(lambda: node.counters["sent_bytes"] == ready_bytes)
        pause.release()
        check_answer(await generating, request)
        await check_serves(d)


@in_loop
async def test_an_entry_crosses_the_link_between_the_clusters() -> None:
    async with toys(transport=TcpTransport, pool_bytes=1 << 20, link_bps=1e9) as d:
        request = a_request(2000)
        generation = await d.gateway.generate(request)
        check_answer(generation, request)
        carried_bytes = sum(relay.stats()["up_bytes"] for relay in d.relays)
        received_bytes = generation.record["received_bytes"]
        assert 0 < received_bytes <= carried_bytes
        await check_serves(d)


@in_loop
async def test_the_gateway_knows_which_tenant_has_what(monkeypatch: pytest.MonkeyPatch) -> None:
    async with toys(names=("decode",), roles={"decode": Role.MIXED}) as d:
        decisions = decisions_of(d, monkeypatch)
        for tenant in ("one", "one", "two"):
            await d.gateway.generate(a_request(tenant=tenant))
            await index_is_current(d)
        assert [decision.cached_tokens > 0 for decision in decisions] == [False, True, False]
        assert [decision.held_tokens > 0 for decision in decisions] == [False, True, False]
        await check_serves(d)


@in_loop
async def test_an_index_that_missed_events_learns_them_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with toys(names=("decode",), roles={"decode": Role.MIXED}) as d:
        decisions = decisions_of(d, monkeypatch)
        with monkeypatch.context() as lost:
            lost.setattr(d.workers["decode"]._reports, "cache", lambda: None)
            await d.gateway.generate(a_request())
            assert d.nodes["decode"].cache.take_events()
        await d.gateway.generate(a_request(seed=1))
        await index_is_current(d)
        await until(lambda: not d.ledger.needs_resync("decode"))
        await d.gateway.generate(a_request())
        assert decisions[-1].cached_tokens > 0
        await check_serves(d)


def decisions_of(d: Deployment, monkeypatch: pytest.MonkeyPatch) -> list[RoutingDecision]:
    """Those that are made from now on."""
    decisions: list[RoutingDecision] = []
    admit = d.ledger.admit

    def note(decision: RoutingDecision, now: float | None = None) -> None:
        decisions.append(decision)
        admit(decision, now)

    monkeypatch.setattr(d.ledger, "admit", note)
    return decisions


async def index_is_current(d: Deployment) -> None:
    """The gateway has heard of all changes; what is said on a line keeps its order."""
    for worker in d.workers.values():
        worker._reports.cache()
    await d.gateway.statuses()


# A node dies.


@in_loop
async def test_a_prefill_node_dies_while_its_cache_crosses_a_slow_link() -> None:
    options = {"transport": TcpTransport, "pool_bytes": 1 << 20, "link_bps": 1e6}
    async with toys(**options) as d:
        request = a_request(6000)
        generating = start(d, request)
        await until(lambda: d.nodes["remote"].counters["sent_bytes"])
        assert d.workers["decode"].num_jobs == 1
        await d.kill("remote")
        generation = await generating
        check_answer(generation, request)
        assert generation.record["attempts"] == 2
        assert generation.record["prefill_node"] == "local"
        assert generation.record["offloaded"] is False
        await check_serves(d)


@pytest.mark.parametrize("stage", ["queued", "prefill", "transfer"])
@pytest.mark.parametrize("name", ["remote", "decode"])
@in_loop
async def test_a_node_dies_at_any_stage(name: str, stage: str) -> None:
    names = ("remote", "local", "decode1", "decode2")
    async with held_toys(names=names) as (d, held):
        pause = Pause(d.nodes["remote"].engine, "prefill", 3)
        blocker = start(d, a_request(seed=5)) if stage == "queued" else None
        if blocker is not None:
            await pause.reached()
        request = a_request()
        generating = start(d, request)
        if stage == "transfer":
            pause.release()
            await held.holds()
        else:
            await pause.reached()
            await until(lambda: d.workers["remote"].num_jobs == 1 + (blocker is not None))
        if name == "decode":
            name = next(n for n in ("decode1", "decode2") if d.workers[n].num_jobs)
        killing = asyncio.create_task(d.kill(name))
        await asyncio.sleep(0.01)
        pause.release()
        held.gate.set()
        await killing
        check_answer(await generating, request)
        if blocker is not None:
            await blocker
        await check_serves(d)


@pytest.mark.parametrize("stage", ["prefill", "transfer", "decode"])
@in_loop
async def test_without_a_decode_node_the_prefill_node_takes_both_roles(stage: str) -> None:
    async with held_toys(threshold=LOCAL) as (d, held):
        where = {"prefill": ("local", "prefill"), "decode": ("decode", "decode")}
        pause = None
        if stage in where:
            name, method = where[stage]
            pause = Pause(d.nodes[name].engine, method, 2)
            held.gate.set()
        request = a_request()
        generating = start(d, request)
        await (held.holds() if pause is None else pause.reached())
        killing = asyncio.create_task(d.kill("decode"))
        await asyncio.sleep(0.01)
        if pause is not None:
            pause.release()
        await killing
        generation = await generating
        check_answer(generation, request)
        assert generation.record["decode_node"] == "local"
        assert d.nodes["local"].role is Role.MIXED
        held.gate.set()
        await check_serves(d)


@in_loop
async def test_a_worker_that_closes_hands_its_requests_on() -> None:
    async with toys() as d:
        pause = Pause(d.nodes["remote"].engine, "prefill", 2)
        request = a_request()
        generating = start(d, request)
        await pause.reached()
        closing = asyncio.create_task(d.workers.pop("remote").aclose())
        await asyncio.sleep(0.01)
        pause.release()
        generation = await generating
        await closing
        check_answer(generation, request)
        assert generation.record["prefill_node"] == "local"
        d.check_node("remote")
        await check_serves(d)


@pytest.mark.parametrize("stage", ["alive", "lost"])
@in_loop
async def test_H25_a_restarted_worker_is_taken_back_with_an_empty_cache(stage: str) -> None:
    async with toys(transport=TcpTransport, address=lambda name: ANY_PORT) as d:
        await check_serves(d)
        address = d.workers["decode"].address
        await d.kill("decode")
        if stage == "lost":
            await until(lambda: "decode" not in d.gateway.workers)
        await d.start("decode", address=address, epoch=2)
        await d.add("decode")
        request = a_request(seed=99)
        generation = await d.gateway.generate(request)
        check_answer(generation, request)
        assert generation.record["attempts"] == 1
        assert generation.record["held_tokens"] == 0
        await check_serves(d)


@in_loop
async def test_a_worker_without_its_engine_loop_does_not_look_alive() -> None:
    async with toys() as d:
        d.nodes["remote"].schedule.add_prefill("no such job")
        request = a_request()
        check_answer(await d.gateway.generate(request), request)
        await until(lambda: "remote" not in d.gateway.workers)
        assert len(d.reports) == 1
        d.reports.clear()
        await check_serves(d)


# No room.


@pytest.mark.parametrize("name", ["remote", "decode1"])
@in_loop
async def test_a_node_too_small_for_a_prompt_is_left_out(name: str) -> None:
    names = ("remote", "local", "decode1", "decode2")
    async with toys(names=names, options={name: {"pool_bytes": 4096}}) as d:
        for seed in range(3):
            request = a_request(200, seed)
            generation = await d.gateway.generate(request)
            check_answer(generation, request)
            assert name not in (generation.record["prefill_node"], generation.record["decode_node"])
        await check_serves(d)


@in_loop
async def test_a_prompt_too_large_for_every_node_is_a_clear_error() -> None:
    async with toys(pool_bytes=4096) as d:
        with pytest.raises(PrfaasError, match=r"failures: 4, .*admission.*enlarge the pool"):
            await d.gateway.generate(a_request(500))
        await check_serves(d, num_tokens=20)


@pytest.mark.parametrize("route", ROUTES)
@in_loop
async def test_requests_wait_their_turn_at_a_full_node(route: str) -> None:
    options = {name: {"max_requests": 1} for name in ("remote", "local", "decode")}
    async with toys(**ROUTES[route], options=options) as d:
        requests = [a_request(30, seed) for seed in range(8)]
        for generation, request in zip(
            await asyncio.gather(*(d.gateway.generate(r) for r in requests)), requests, strict=True
        ):
            check_answer(generation, request)
        assert any(node.counters["refused"] for node in d.nodes.values())
        await check_serves(d)


@in_loop
async def test_a_full_node_is_asked_less_and_less_often() -> None:
    config = GatewayConfig(retry_s=0.005, max_retry_s=10.0)
    options = {"decode": {"max_requests": 1}}
    async with toys(**ROUTES["mixed"], options=options, config=config) as d:
        pause = Pause(d.nodes["decode"].engine, "prefill")
        first = start(d, a_request())
        await pause.reached()
        with pytest.raises(DeadlineExceeded, match=r"last failure: admission .* at most 1 may be"):
            await d.gateway.generate(a_request(deadline_s=0.2))
        assert d.nodes["decode"].counters["refused"] <= 6
        pause.release()
        await first
        await check_serves(d)


# No time.


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@in_loop
async def test_H20_a_deadline_frees_every_node(stage: str) -> None:
    async with toys() as d:
        pause = Pause(d.nodes["remote" if stage == "prefill" else "decode"].engine, stage, 2)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
            await d.gateway.generate(a_request(deadline_s=0.05))
        pause.release()
        await d.settle()
        await check_serves(d)


@in_loop
async def test_a_request_may_have_any_time() -> None:
    async with toys() as d:
        await check_serves(d, deadline_s=1e12)


@in_loop
async def test_without_a_node_a_request_waits_until_its_deadline() -> None:
    async with toys(names=("remote",)) as d:
        waiting = start(d, a_request())
        with pytest.raises(DeadlineExceeded, match="queued"):
            await d.gateway.generate(a_request(deadline_s=0.02))
        await d.start("decode")
        await d.add("decode")
        await waiting
        await check_serves(d)


@in_loop
async def test_a_prompt_that_waits_long_keeps_its_transfer_alive_on_both_sides() -> None:
    options = {name: {"lease_s": 0.1} for name in ("remote", "decode")}
    async with toys(names=("remote", "decode"), options=options) as d:
        pause = Pause(d.nodes["remote"].engine, "prefill", 2)
        requests = [a_request(60, seed) for seed in range(2)]
        generating = [start(d, request) for request in requests]
        await pause.reached()
        for _ in range(10):
            await asyncio.sleep(0.03)  # three leases
        pause.release()
        for task, request in zip(generating, requests, strict=True):
            check_answer(await task, request)
            assert (await task).record["attempts"] == 1
        await check_serves(d)


@in_loop
async def test_a_busy_decode_node_keeps_a_landed_entry_alive() -> None:
    options = {name: {"lease_s": 0.1} for name in ("remote", "decode")}
    async with toys(names=("remote", "decode"), options=options) as d:
        pause = Pause(d.nodes["decode"].engine, "open")
        request = a_request()
        generating = start(d, request)
        await pause.reached()
        for _ in range(10):
            await asyncio.sleep(0.03)
        pause.release()
        generation = await generating
        check_answer(generation, request)
        assert generation.record["attempts"] == 1
        assert d.nodes["remote"].counters["failed"] == 0
        await check_serves(d)


@in_loop
async def test_a_transfer_that_stands_still_is_given_up_after_its_lease() -> None:
    async with held_toys(options={"remote": {"lease_s": 0.1}}) as (d, held):
        request = a_request()
        generating = start(d, request)
        await held.holds()
        await until(lambda: d.gateway.num_retries)
        held.gate.set()
        generation = await generating
        check_answer(generation, request)
        assert generation.record["prefill_node"] == "local"  # which may have a better way
        await check_serves(d)


@in_loop
async def test_a_transfer_that_is_only_slow_goes_on() -> None:
    options = {"remote": {"lease_s": 0.8, "put_bytes": 1 << 20}}  # one put takes longer
    transport = partial(TcpTransport, TcpConfig(num_connections=1, chunk_bytes=16 << 10))
    async with toys(options=options, transport=transport, pool_bytes=1 << 20, link_bps=1.5e6) as d:
        request = a_request(8000)
        generation = await d.gateway.generate(request)
        check_answer(generation, request)
        assert generation.record["attempts"] == 1
        await check_serves(d)


@in_loop
async def test_the_line_between_two_nodes_breaks() -> None:
    async with held_toys() as (d, held):
        request = a_request()
        generating = start(d, request)
        await held.holds()
        (line,) = d.workers["remote"]._peers._lines.values()
        line.abort()
        await until(lambda: d.gateway.num_retries)
        held.gate.set()
        generation = await generating
        check_answer(generation, request)
        assert generation.record["prefill_node"] == "local"
        await d.settle()
        await check_serves(d)


PUT_ERRORS = {
    "damaged once": ([IntegrityError("damaged")], 1),
    "damaged always": ([IntegrityError("damaged") for _ in range(5)], 2),
    "refused": ([PutRefused("withdrawn")], 2),
    "a bug": ([RuntimeError("a bug")], 2),
}


@pytest.mark.parametrize("case", PUT_ERRORS)
@in_loop
async def test_puts_that_fail(case: str) -> None:
    errors, num_attempts = PUT_ERRORS[case]
    async with held_toys() as (d, held):
        held.errors += errors
        held.gate.set()
        request = a_request()
        generation = await d.gateway.generate(request)
        check_answer(generation, request)
        assert generation.record["attempts"] == num_attempts
        held.errors.clear()
        await check_serves(d)


@in_loop
async def test_an_entry_that_is_only_said_to_be_complete_is_not_installed() -> None:
    async with held_toys() as (d, held):
        held.errors.append(None)
        held.gate.set()
        request = a_request()
        generation = await d.gateway.generate(request)
        check_answer(generation, request)
        assert generation.record["attempts"] == 2
        assert generation.record["prefill_node"] == "local"
        await check_serves(d)


@in_loop
async def test_memory_is_not_given_back_while_a_put_reads_it() -> None:
    async with held_toys(names=("remote", "decode")) as (d, held):
        held.quiet.clear()
        generating = start(d, a_request())
        await held.holds()
        generating.cancel()
        await until(lambda: not d.workers["decode"].num_jobs)
        await asyncio.sleep(0.01)
        assert d.nodes["remote"].cache.usage().num_requests == 1
        held.quiet.set()
        held.gate.set()
        await d.settle()
        await check_serves(d)


@in_loop
async def test_a_late_put_of_a_cancelled_transfer_is_refused() -> None:
    async with held_toys(names=("remote", "decode")) as (d, held):
        generating = start(d, a_request())
        await held.holds()
        (job,) = d.workers["decode"]._jobs.values()
        window = job._window
        generating.cancel()
        await d.settle()
        d.check_empty()
        held.gate.set()
        (line,) = d.workers["remote"]._peers._lines.values()
        with pytest.raises(PutRefused, match="has withdrawn"):
            await line.channel.put(window, 0, d.nodes["remote"].memory, [Span(0, 16)])
        await check_serves(d)


@in_loop
async def test_memory_is_not_given_back_while_a_window_over_it_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with held_toys(names=("remote", "decode")) as (d, held):
        generating = start(d, a_request())
        await held.holds()
        (job,) = d.workers["decode"]._jobs.values()
        closed = asyncio.Event()
        withdraw = job.peer_line.channel.withdraw

        async def withdraw_late(window: object) -> None:
            await closed.wait()
            await withdraw(window)

        monkeypatch.setattr(job.peer_line.channel, "withdraw", withdraw_late)
        generating.cancel()
        await until(lambda: not d.workers["remote"].num_jobs)
        await asyncio.sleep(0.01)
        assert d.nodes["decode"].cache.usage().num_requests == 1
        closed.set()
        held.gate.set()
        await d.settle()
        await check_serves(d)
