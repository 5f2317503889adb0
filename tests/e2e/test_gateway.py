"""The gateway against workers that say the wrong thing, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import msgspec
import pytest

from clusters import Deployment
from prfaas.core import NodeId, Role
from prfaas.errors import (
    CapacityError,
    ChannelBroken,
    ConfigError,
    DeadlineExceeded,
    PrfaasError,
    RemoteProtocolError,
)
from prfaas.runtime.gateway import GatewayConfig
from prfaas.runtime.messages import (
    AskSnapshot,
    AskStatus,
    CacheBody,
    CacheChanged,
    CacheSnapshot,
    Cancel,
    Generate,
    Message,
    NodeInfo,
    Rates,
    Register,
    RoleSet,
    SetRole,
    Status,
    decode,
    encode,
)
from prfaas.seams import Channel
from toys import LOCAL, a_request, check_answer, in_loop, toys, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(30)]

FAST = GatewayConfig(retry_s=0.002, max_retry_s=0.01)
INFO = NodeInfo(node_id="odd", cluster_id="pd", kind="pd", role="mixed", epoch=1, block_size=16)


class OddWorker:
    """A worker's listener without a worker: the test says what it says."""

    def __init__(self, info: Message | bytes | None = INFO) -> None:
        self.info = info
        self.heard: list[Message] = []

    async def serve(self, channel: Channel) -> None:
        self.channel, self.has_ended = channel, False
        try:
            while True:
                self.take(decode(await channel.receive()))
                if isinstance(self.heard[-1], Register) and self.info is not None:
                    said = self.info if isinstance(self.info, bytes) else encode(self.info)
                    await channel.send(said)
        finally:
            self.has_ended = True

    def take(self, message: Message) -> None:
        self.heard.append(message)

    async def say(self, message: Message) -> None:
        await self.channel.send(encode(message))

    async def hears(self, kind: type, count: int = 1) -> Any:
        await until(lambda: sum(isinstance(m, kind) for m in self.heard) >= count)
        return next(m for m in reversed(self.heard) if isinstance(m, kind))


@asynccontextmanager
async def odd_worker(d: Deployment, odd: OddWorker) -> AsyncIterator[str]:
    hello = attrs.evolve(d.hello, node_id=NodeId("odd"))
    listener = await d.transport().listen("inproc://odd", hello, odd.serve)
    try:
        yield listener.address
    finally:
        await listener.aclose()


async def check_serves(d: Deployment) -> None:
    request = a_request(seed=99)
    check_answer(await d.gateway.generate(request), request)
    await d.settle()
    d.check_empty()


def info(**fields: Any) -> NodeInfo:
    return msgspec.structs.replace(INFO, **fields)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (None, "did not introduce itself within 0.3 s"),
        (Register(), "began with Register"),
        (b"\x01rubbish", "cannot read"),
        (b"", "starts with"),
        (info(kind="club"), "introduced itself wrongly.*club"),
        (info(role="king"), "introduced itself wrongly.*king"),
    ],
)
@in_loop
async def test_a_worker_that_does_not_introduce_itself(said: Any, error: str) -> None:
    async with toys(config=attrs.evolve(FAST, register_s=0.3)) as d:
        odd = OddWorker(said)
        async with odd_worker(d, odd) as address:
            with pytest.raises(RemoteProtocolError, match=error):
                await d.gateway.add_worker(address)
            await until(lambda: odd.has_ended)
        await check_serves(d)


@in_loop
async def test_a_worker_that_hangs_up_at_once() -> None:
    async with toys(config=FAST) as d:

        async def hang_up(channel: Channel) -> None:
            channel.abort()

        hello = attrs.evolve(d.hello, node_id=NodeId("odd"))
        listener = await d.transport().listen("inproc://odd", hello, hang_up)
        with pytest.raises(ChannelBroken):
            await d.gateway.add_worker("inproc://odd")
        await listener.aclose()
        await check_serves(d)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (info(node_id="remote", kind="prfaas"), r"connected already, at inproc://remote"),
        (info(block_size=8), "block_size"),
    ],
)
@in_loop
async def test_a_worker_that_cannot_be_taken_in_changes_nothing(said: NodeInfo, error: str) -> None:
    async with toys(config=FAST) as d:
        odd = OddWorker(said)
        async with odd_worker(d, odd) as address:
            views = list(d.ledger.nodes())
            with pytest.raises(ConfigError, match=error):
                await d.gateway.add_worker(address)
            assert list(d.ledger.nodes()) == views
            await until(lambda: odd.has_ended)
        await check_serves(d)


@in_loop
async def test_names_and_epochs_of_the_past_are_refused() -> None:
    async with toys(config=FAST) as d:
        await d.kill("decode")
        await d.start("decode", epoch=5)
        await d.add("decode")
        await d.kill("decode")
        await until(lambda: "decode" not in d.gateway.workers)
        old, other = info(node_id="decode", epoch=4), info(node_id="decode", epoch=6, kind="prfaas")
        for said, error in ((old, "with epoch 4, a later one"), (other, "configured as decode")):
            async with odd_worker(d, OddWorker(said)) as address:
                with pytest.raises(ConfigError, match=error):
                    await d.gateway.add_worker(address)
            assert sorted(view.node_id for view in d.ledger.nodes()) == ["local", "remote"]
        await d.start("decode", epoch=7)
        await d.add("decode")
        await check_serves(d)


@in_loop
async def test_a_worker_that_was_started_again_replaces_itself() -> None:
    async with toys(config=FAST, threshold=LOCAL, names=()) as d:
        odd = OddWorker(info(node_id="decode"))
        async with odd_worker(d, odd) as address:
            await d.gateway.add_worker(address)
            request = a_request()
            generating = asyncio.create_task(d.gateway.generate(request))
            await odd.hears(Generate)
            await d.start("decode", epoch=2)
            await d.add("decode")  # the old connection still looks alive
            await until(lambda: odd.has_ended)
            generation = await generating
            check_answer(generation, request)
            assert generation.record["attempts"] == 2
        await check_serves(d)


@in_loop
async def test_work_is_sent_by_the_role_that_the_plan_gives() -> None:
    async with toys(config=FAST, threshold=LOCAL, names=()) as d:
        odd = OddWorker(info(role="prefill"))
        async with odd_worker(d, odd) as address:
            await d.gateway.add_worker(address)
            # One node alone must do both; what follows the order finds it obeyed.
            assert [view.role for view in d.ledger.nodes()] == [Role.MIXED]
            generating = asyncio.create_task(d.gateway.generate(a_request()))
            await odd.hears(Generate)
            assert [type(message) for message in odd.heard] == [Register, SetRole, Generate]
            generating.cancel()
            await odd.hears(Cancel)
        await asyncio.sleep(0.01)
        d.check_empty()


@pytest.mark.parametrize(
    "said",
    [
        Register(),
        RoleSet(role="king", plan_epoch=1),
        CacheChanged(events=(CacheBody(sequence=1, group_id=77, stored=(), removed=()),)),
        CacheSnapshot(sequence=1, stored={77: ()}),
    ],
    ids=lambda message: type(message).__name__,
)
@in_loop
async def test_a_worker_that_breaks_the_protocol_is_lost(said: Message) -> None:
    async with toys(config=FAST) as d:
        odd = OddWorker()
        async with odd_worker(d, odd) as address:
            await d.gateway.add_worker(address)
            await odd.say(said)
            await until(lambda: odd.has_ended)
            assert "odd" not in d.gateway.workers
        await check_serves(d)


@in_loop
async def test_a_bug_in_the_policy_does_not_leave_a_worker_unheard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with toys(config=FAST) as d:
        odd = OddWorker()
        async with odd_worker(d, odd) as address:
            await d.gateway.add_worker(address)

            def fail(*_: object) -> None:
                raise ZeroDivisionError("a bug")

            with monkeypatch.context() as patch:
                patch.setattr(d.ledger, "role_changed", fail)
                await odd.say(RoleSet(role="mixed", plan_epoch=1))
                await until(lambda: odd.has_ended)
        assert len(d.reports) == 1
        d.reports.clear()
        await check_serves(d)


@in_loop
async def test_a_router_that_refuses_for_a_while_is_asked_again() -> None:
    async with toys(config=FAST) as d:
        route, refusals = d.gateway._router.route, iter(range(3))

        def refuse(*args: Any) -> Any:
            if next(refusals, None) is not None:
                raise CapacityError("strict: the link carries nothing")
            return route(*args)

        d.gateway._router.route = refuse
        request = a_request()
        check_answer(await d.gateway.generate(request), request)
        assert next(refusals, None) is None


@in_loop
async def test_measurements_that_measure_nothing_change_nothing() -> None:
    async with toys(config=FAST) as d:
        odd = OddWorker(info(kind="prfaas", role="prefill"))
        async with odd_worker(d, odd) as address:
            await d.gateway.add_worker(address)
            inf, nan = float("inf"), float("nan")
            bad = ((1, 0.0, 1.0), (10**18, nan, nan), (-5, 2.0, 1.0), (7, inf, -inf))
            await odd.say(Rates(deliveries=bad, num_packets=-1, num_resent=1))
            await odd.say(Rates(deliveries=(), num_packets=1, num_resent=2))
            await odd.say(RoleSet(role="prefill", plan_epoch=0))
            await asyncio.sleep(0.01)
            assert d.gateway.link_bps is None
            assert d.ledger.link_loss() is None
            assert "odd" in d.gateway.workers
            await odd.say(Rates(deliveries=(), num_packets=100, num_resent=20))
            await until(lambda: d.ledger.link_loss() == 0.2)
        await check_serves(d)


@in_loop
async def test_a_worker_that_stands_still_is_given_up_and_one_that_is_idle_is_not() -> None:
    config = attrs.evolve(FAST, silence_s=0.2, tick_s=0.01)
    async with toys(config=config, threshold=LOCAL, names=()) as d:
        odd = OddWorker()
        async with odd_worker(d, odd) as address:
            await d.gateway.add_worker(address)
            request = a_request()
            generating = asyncio.create_task(d.gateway.generate(request))
            await odd.hears(Generate)
            await d.start("decode", role=Role.MIXED)
            await d.add("decode")
            generation = await generating
            check_answer(generation, request)
            assert generation.record["attempts"] == 2
            assert any(isinstance(message, AskStatus) for message in odd.heard)
            await until(lambda: odd.has_ended)
        for _ in range(10):
            await asyncio.sleep(0.04)
        assert d.gateway.workers == {"decode"}
        await check_serves(d)


@in_loop
async def test_a_worker_that_does_not_read_cannot_hold_a_request_beyond_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prfaas.runtime.line.FLUSH_S", 0.02)
    async with toys(config=FAST, threshold=LOCAL, names=()) as d:
        odd = OddWorker()
        async with odd_worker(d, odd) as address:
            await d.gateway.add_worker(address)
            line = d.gateway._fleet.links["odd"].line
            never = asyncio.Event()

            async def block(frame: bytes) -> None:
                await never.wait()

            monkeypatch.setattr(line.channel, "send", block)
            with pytest.raises(DeadlineExceeded):
                await d.gateway.generate(a_request(deadline_s=0.03))
            await d.gateway.aclose()
        d.check_empty()


@in_loop
async def test_lost_cache_events_are_asked_for_once() -> None:
    async with toys(config=FAST) as d:
        odd = OddWorker()
        async with odd_worker(d, odd) as address:
            await d.gateway.add_worker(address)
            await odd.say(CacheSnapshot(sequence=3, stored={}))
            for sequence in (4, 6, 7, 8):
                body = CacheBody(sequence=sequence, group_id=0, stored=(), removed=())
                await odd.say(CacheChanged(events=(body,)))
            await odd.hears(AskSnapshot)
            await asyncio.sleep(0.01)
            assert sum(isinstance(m, AskSnapshot) for m in odd.heard) == 1
            assert d.ledger.needs_resync("odd")
            await odd.say(CacheSnapshot(sequence=8, stored={0: (b"h" * 16,)}))
            await until(lambda: not d.ledger.needs_resync("odd"))
            body = CacheBody(sequence=11, group_id=0, stored=(), removed=())
            await odd.say(CacheChanged(events=(body,)))
            await odd.hears(AskSnapshot, 2)
        await check_serves(d)


@in_loop
async def test_statuses_of_those_that_answer() -> None:
    async with toys(config=FAST) as d:
        odd = OddWorker()
        async with odd_worker(d, odd) as address:
            await d.gateway.add_worker(address)
            many = await asyncio.gather(*(d.gateway.statuses(0.04) for _ in range(3)))
            for statuses in many:
                assert [s.node_id for s in statuses] == ["decode", "local", "remote"]
            asking = asyncio.create_task(d.gateway.statuses(60))
            await odd.say(Status(node_id="odd", counts={}, config={}))
            assert len(await asking) == 4
            asking = asyncio.create_task(d.gateway.statuses(60))
            await asyncio.sleep(0)
            odd.channel.abort()
            assert len(await asking) == 3
        await check_serves(d)


@in_loop
async def test_a_failed_request_names_the_last_cause_and_how_often_it_was_tried() -> None:
    async with toys(config=FAST, names=("decode",), roles={"decode": Role.MIXED}) as d:
        d.nodes["decode"].engine.before = lambda *_: 1 / 0
        with pytest.raises(PrfaasError, match=r"is given up, failures: 4, .*division by zero"):
            await d.gateway.generate(a_request())
        d.nodes["decode"].engine.before = None
        d.reports.clear()
        await d.settle()
        await check_serves(d)
