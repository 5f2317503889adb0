"""Clients at the gateway's door: what they get, and what they cannot break."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest

from clusters import ANY_PORT, Deployment
from hostile import Bomb, throw_at
from prfaas.core import NodeId, Request
from prfaas.errors import ChannelBroken, ChannelClosed, DeadlineExceeded, PrfaasError, RequestError
from prfaas.runtime.door import Client, Door
from prfaas.runtime.messages import Answer, Expecting, Submit, Watch, encode
from prfaas.transport.tcp import TcpTransport
from toys import Pause, RawPeer, a_request, check_answer, in_loop, toys, until, work

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(30)]


@asynccontextmanager
async def a_door(at: str = "inproc://door", **options: Any) -> AsyncIterator[Visit]:
    async with toys(**options) as d:
        door = Door(d.gateway, d.transport(), d.hello)
        visit = Visit(d, door, await door.start(at))
        try:
            yield visit
        finally:
            for client in visit.clients:
                await client.aclose()
            await door.aclose()


@attrs.define
class Visit:
    d: Deployment
    door: Door
    address: str
    clients: list[Client] = attrs.field(factory=list)

    async def client(self, **callbacks: Any) -> Client:
        hello = attrs.evolve(self.d.hello, node_id=NodeId("client"))
        client = await Client.connect(self.d.transport(), self.address, hello, **callbacks)
        self.clients.append(client)
        return client

    async def check_serves(self) -> None:
        client, request = await self.client(), a_request(seed=99)
        check_answer(await client.generate(request), request)
        await self.d.settle()
        self.d.check_empty()


@in_loop
async def test_answers_phases_and_what_moves() -> None:
    phases: list[tuple[str, str]] = []
    seen: list[Watch] = []
    async with a_door() as visit:
        client = await visit.client(
            on_progress=lambda *phase: phases.append(phase), on_watch=seen.append
        )
        requests = [a_request(90, seed) for seed in range(4)]
        answers = await asyncio.gather(*(client.generate(r) for r in requests))
        for answer, request in zip(answers, requests, strict=True):
            check_answer(answer, request)
            mine = [phase for name, phase in phases if name == request.request_id]
            assert mine == ["prefill", "transfer", "decode", "done"]
            assert answer.record["offloaded"] is True
        assert seen[0].num_active == 0
        statuses = await client.statuses()
        assert [s.node_id for s in statuses] == ["decode", "local", "remote", "gateway"]
        assert statuses[-1].counts == {"requests": 0, "retries": 0}
        await visit.check_serves()


@pytest.mark.parametrize("how", ["closes", "vanishes", "cancels"])
@in_loop
async def test_a_client_that_goes_has_its_request_cancelled(how: str) -> None:
    async with a_door() as visit:
        client, other = await visit.client(), await visit.client()
        pause = Pause(visit.d.nodes["remote"].engine, "prefill", 3)
        mine, theirs = a_request(), a_request(seed=2)
        waiting = asyncio.create_task(client.generate(mine))
        await pause.reached()
        others = asyncio.create_task(other.generate(theirs))
        await until(lambda: visit.d.gateway.num_active == 2)
        if how == "closes":
            await client.aclose()
        elif how == "vanishes":
            client._line.abort()
        else:
            waiting.cancel()
        await until(lambda: visit.d.gateway.num_active == 1)
        with pytest.raises((ChannelClosed, asyncio.CancelledError)):
            await waiting
        pause.release()
        check_answer(await others, theirs)
        await visit.check_serves()


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": b""},
        {"max_new_tokens": 0},
        {"max_new_tokens": -(2**40)},
        {"deadline_s": 0.0},
        {"deadline_s": float("nan")},
    ],
)
@in_loop
async def test_a_wrong_submission_is_answered_with_the_text_of_the_request(
    fields: dict[str, Any],
) -> None:
    async with a_door() as visit:
        raw = await RawPeer.dial(visit.d, visit.address)
        submit = Submit(**work(**fields))
        await raw.say(submit)
        answer = await raw.hear(Answer)
        with pytest.raises(RequestError) as error:
            Request(
                request_id=submit.request_id,
                tokens=[] if not submit.tokens else [1],
                max_new_tokens=submit.max_new_tokens,
                deadline_s=submit.deadline_s,
            )
        assert answer.error == f"RequestError: {error.value}"
        await raw.say(Submit(**work(tokens=b"abc")))
        assert "3 bytes" in (await raw.hear(Answer)).error
        await visit.check_serves()


@in_loop
async def test_errors_reach_the_client_with_their_kind_and_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_door() as visit:
        client, other = await visit.client(), await visit.client()
        pause = Pause(visit.d.nodes["remote"].engine, "prefill", 2)
        request = a_request()
        first = asyncio.create_task(client.generate(request))
        await pause.reached()
        for asking in (client, other):
            with pytest.raises(RequestError, match=rf"'{request.request_id}' is running already"):
                await asking.generate(request)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.02 s"):
            await other.generate(a_request(deadline_s=0.02))
        with pytest.raises(RequestError, match="1 to 1000"):
            await client.generate(a_request(request_id="x" * 1001))
        pause.release()
        check_answer(await first, request)
        visit.d.nodes["decode"].engine.before = lambda *_: 1 / 0
        with pytest.raises(PrfaasError, match="division by zero"):
            await client.generate(a_request())
        visit.d.nodes["decode"].engine.before = None
        with monkeypatch.context() as patch:
            patch.setattr(visit.d.gateway, "generate", lambda *_: 1 / 0)
            with pytest.raises(PrfaasError, match="division by zero"):
                await client.generate(a_request())
        visit.d.reports.clear()
        await visit.check_serves()


@in_loop
async def test_an_answer_that_outgrows_a_frame_is_an_error_and_not_a_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_door() as visit:
        client, request = await visit.client(), a_request(max_new_tokens=60)
        monkeypatch.setattr("prfaas.runtime.messages.MAX_CONTROL_BYTES", 8192)
        with pytest.raises(PrfaasError, match=r"Answer takes .* bytes"):
            await client.generate(request)
        monkeypatch.undo()
        await visit.check_serves()


@in_loop
async def test_a_client_that_does_not_read_holds_nobody_up() -> None:
    async with a_door() as visit:
        raw = await RawPeer.dial(visit.d, visit.address)
        for number in range(3):
            await raw.say(Submit(**work(f"unread {number}")))
        await visit.check_serves()
        await until(lambda: not visit.d.gateway.num_active)
        raw.channel.abort()


@pytest.mark.parametrize("how", ["door", "gateway"])
@in_loop
async def test_a_client_learns_that_the_other_side_closes(how: str) -> None:
    async with a_door() as visit:
        client = await visit.client()
        pause = Pause(visit.d.nodes["remote"].engine, "prefill")
        waiting = asyncio.create_task(client.generate(a_request()))
        await pause.reached()
        closing = visit.door if how == "door" else visit.d.gateway
        await closing.aclose()
        with pytest.raises(ChannelBroken if how == "door" else PrfaasError):
            await waiting
        pause.release()
        await visit.d.settle()
        visit.d.check_empty()


@in_loop
async def test_a_callback_that_fails_does_not_leave_the_client_waiting() -> None:
    async with a_door() as visit:
        client = await visit.client(on_progress=lambda *_: 1 / 0)
        with pytest.raises(ChannelBroken, match="division by zero"):
            await client.generate(a_request())
        with pytest.raises(ChannelClosed):
            await client.generate(a_request())
        with pytest.raises((ChannelBroken, ChannelClosed)):
            await client.statuses()
        await until(lambda: not visit.d.gateway.num_active)
        await visit.check_serves()


@in_loop
async def test_H31_a_door_survives_whatever_is_thrown_at_it(tmp_path: Any) -> None:
    async with a_door(ANY_PORT, transport=TcpTransport) as visit:
        await throw_at(visit.address, tmp_path / "pwned")
        for frame in (
            b"",
            b"\x01",
            os.urandom(200),
            b"\x02" + os.urandom(20),
            Bomb.frame(tmp_path),
        ):
            raw = await RawPeer.dial(visit.d, visit.address)
            await raw.channel.send(frame)
            await raw.is_cut_off()
        raw = await RawPeer.dial(visit.d, visit.address)
        await raw.channel.send(encode(Expecting(request_id="r", attempt=0, held_tokens=0)))
        await raw.is_cut_off()
        assert not os.listdir(tmp_path)
        await visit.check_serves()
