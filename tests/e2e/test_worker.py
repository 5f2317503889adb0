"""One worker, spoken to message by message: admission, roles, deadlines, strangers."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest

from clusters import Deployment
from hostile import Bomb, throw_at
from prfaas.core import NodeId, Role, TransferId
from prfaas.errors import ConfigError, PeerMismatch
from prfaas.runtime.messages import (
    CONTROL,
    AskStatus,
    CacheChanged,
    CacheSnapshot,
    Cancel,
    Expect,
    Expecting,
    Failed,
    Finished,
    Generate,
    Message,
    NodeInfo,
    Prefill,
    Prefilled,
    Register,
    RoleSet,
    SetRole,
    Status,
    Submit,
    Token,
    encode_transfer,
)
from prfaas.seams import Channel
from prfaas.transfer import Abort, Done, EndCode, Installed, Renew
from prfaas.transport.tcp import TcpTransport
from toys import (
    Pause,
    RawPeer,
    a_request,
    check_answer,
    held_toys,
    in_loop,
    toys,
    until,
    work,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(30)]


async def dial(d: Deployment, name: str) -> RawPeer:
    return await RawPeer.dial(d, d.workers[name].address)


async def check_serves(d: Deployment) -> None:
    request = a_request(seed=99)
    check_answer(await d.gateway.generate(request), request)
    await d.settle()
    d.check_empty()


def shipped(name: str, d: Deployment, **fields: Any) -> Prefill:
    place = {"decode_node": "decode", "decode_address": d.workers["decode"].address}
    return Prefill(**(work(name) | place | fields))


@in_loop
async def test_a_worker_introduces_itself_and_reports_to_every_gateway() -> None:
    async with toys(names=("decode",), roles={"decode": Role.MIXED}) as d:
        one, two = await dial(d, "decode"), await dial(d, "decode")
        for raw in (one, two):
            await raw.say(Register())
            info = await raw.hear(NodeInfo)
            assert (info.node_id, info.role, info.kind) == ("decode", "mixed", "pd")
            assert (await raw.hear(CacheSnapshot)).sequence == 0
        await one.say(Generate(**work()))
        finished = await one.hear(Finished)
        assert finished.request_id == "raw"
        kinds = [type(m) for m in one.heard if not isinstance(m, CacheChanged)]
        assert kinds == [NodeInfo, CacheSnapshot, Prefilled, Token, Finished]
        for raw in (one, two):
            if not any(isinstance(m, CacheChanged) for m in raw.heard):
                await raw.hear(CacheChanged)
        await d.settle()
        await two.say(AskStatus())
        status = await two.hear(Status)
        one.channel.abort()
        reports = d.workers["decode"]._reports
        await until(lambda: repr(reports) == "<Reports to ['gateway', 'raw']>")
        assert status.counts["jobs"] == 0
        assert status.counts["admitted"] == 1
        await check_serves(d)


@in_loop
async def test_a_role_is_an_admission_policy() -> None:
    async with toys() as d:
        raw = await dial(d, "local")
        await raw.say(Register())
        for attempt, (role, kind, admitted) in enumerate(
            [
                ("prefill", Generate, False),
                ("prefill", Expect, False),
                ("mixed", Generate, True),
                ("mixed", Expect, True),
                ("decode", Prefill, False),
                ("decode", Expect, True),
            ]
        ):
            await raw.say(SetRole(role=role, plan_epoch=attempt))
            assert await raw.hear(RoleSet) == RoleSet(role=role, plan_epoch=attempt)
            fields = work(attempt=attempt)
            if kind is Prefill:
                fields |= {"decode_node": "decode", "decode_address": "inproc://decode"}
            elif kind is Expect:
                fields["prefill_node"] = "remote"
            await raw.say(kind(**fields))
            if admitted:
                await raw.hear(Prefilled if kind is Generate else Expecting)
            else:
                failed = await raw.hear(Failed)
                assert failed.reason.startswith(f"local: role {role} admits no {kind.__name__}")
                assert (failed.busy, failed.retryable, failed.at_fault) == (True, True, "local")
            await raw.say(Cancel(request_id="raw", attempt=attempt, reason="enough"))
            await d.settle()  # or the next change of role would have to wait for it
        await raw.say(SetRole(role="prefill", plan_epoch=9))
        await raw.hear(RoleSet)
        await check_serves(d)


@in_loop
async def test_other_gateways_hear_of_a_new_role_and_prfaas_keeps_its_own() -> None:
    async with toys() as d:
        raw = await dial(d, "local")
        await raw.say(SetRole(role="mixed", plan_epoch=1))
        view = {v.node_id: v for v in d.ledger.nodes()}["local"]
        assert view.role is Role.PREFILL
        await until(lambda: {v.node_id: v.role for v in d.ledger.nodes()}["local"] is Role.MIXED)
        far = await dial(d, "remote")
        await far.say(Register())
        await far.say(SetRole(role="decode", plan_epoch=1))
        assert (await far.hear(RoleSet)).role == "prefill"
        assert d.nodes["remote"].role is Role.PREFILL
        await far.say(SetRole(role="king", plan_epoch=1))
        await far.is_cut_off()
        await check_serves(d)


@in_loop
async def test_an_attempt_that_is_here_already_is_refused_and_goes_on() -> None:
    async with toys(names=("decode",), roles={"decode": Role.MIXED}) as d:
        pause = Pause(d.nodes["decode"].engine, "prefill")
        raw = await dial(d, "decode")
        await raw.say(Generate(**work()))
        await pause.reached()
        await raw.say(Generate(**work()))
        assert "is here already" in (await raw.hear(Failed)).reason
        pause.release()
        await raw.hear(Finished)
        await check_serves(d)


@in_loop
async def test_only_the_gateway_that_asked_can_cancel() -> None:
    async with toys(names=("decode",), roles={"decode": Role.MIXED}) as d:
        pause = Pause(d.nodes["decode"].engine, "prefill")
        raw, other = await dial(d, "decode"), await dial(d, "decode")
        await raw.say(Generate(**work()))
        await pause.reached()
        await other.say(Cancel(request_id="raw", attempt=0, reason="no"))
        await other.say(AskStatus())
        await other.hear(Status)
        pause.release()
        await raw.hear(Finished)
        await check_serves(d)


@in_loop
async def test_nothing_is_said_of_an_attempt_that_was_cancelled() -> None:
    async with toys(names=("decode",), roles={"decode": Role.MIXED}) as d:
        for method in ("prefill", "decode"):
            raw = await dial(d, "decode")
            pause = Pause(d.nodes["decode"].engine, method)
            await raw.say(Generate(**work(num_tokens=10)))
            await pause.reached()
            await raw.say(Cancel(request_id="raw", attempt=0, reason="enough"))
            await raw.say(AskStatus())
            status = await raw.hear(Status)
            assert status.counts["jobs"] == 1  # the engine is not done with it
            raw.heard.clear()
            pause.release()
            await d.settle()
            await raw.say(AskStatus())
            await raw.hear(Status)
            assert len(raw.heard) == 1
            raw.channel.abort()
        await check_serves(d)


@in_loop
async def test_a_cancel_that_crosses_the_installation() -> None:
    async with toys() as d:
        raw, far = await dial(d, "decode"), await dial(d, "remote")
        await raw.say(Expect(**work(), prefill_node="remote"))
        await raw.hear(Expecting)
        (job,) = d.workers["decode"]._jobs.values()
        feed = job._transfer.feed

        def feed_and_cancel(happened: object) -> None:
            feed(happened)
            if isinstance(happened, Installed):
                job.cancel("too late for the transfer to hear of it")

        job._transfer.feed = feed_and_cancel
        await far.say(shipped("raw", d))
        await d.settle()
        await raw.say(AskStatus())
        await raw.hear(Status)
        assert len(raw.heard) == 2
        await check_serves(d)


@in_loop
async def test_a_cancel_while_the_decode_node_is_dialled() -> None:
    async with held_toys() as (d, held):
        connect, may_connect = held.connect, asyncio.Event()

        async def connect_late(*arguments: Any) -> Channel:
            await may_connect.wait()
            return await connect(*arguments)

        far = await dial(d, "remote")
        held.connect = connect_late
        await far.say(shipped("raw", d))
        await far.hear(Prefilled)
        await far.say(Cancel(request_id="raw", attempt=0, reason="enough"))
        await d.settle()
        may_connect.set()
        held.gate.set()
        await check_serves(d)
        assert d.nodes["decode"].counters["late_transfer_messages"] == 0


@in_loop
async def test_a_decode_node_that_hangs_up_at_once() -> None:
    async with toys() as d:

        async def hang_up(channel: Channel) -> None:
            channel.abort()

        hello = attrs.evolve(d.hello, node_id=NodeId("odd"))
        listener = await d.transport().listen("inproc://odd", hello, hang_up)
        far = await dial(d, "remote")
        await far.say(shipped("raw", d, decode_address="inproc://odd"))
        failed = await far.hear(Failed)
        assert (failed.at_fault, failed.retryable) == ("remote", True)
        await listener.aclose()
        await d.settle()
        await check_serves(d)


@in_loop
async def test_a_worker_that_closes_says_so_and_takes_nothing_more() -> None:
    async with toys(roles={"local": Role.MIXED}) as d:
        raw = await dial(d, "local")
        pause = Pause(d.nodes["local"].engine, "prefill")
        await raw.say(Generate(**work("first")))
        await pause.reached()
        closing = asyncio.create_task(d.workers["local"].aclose())
        for name in ("first", "second"):
            if name == "second":
                await raw.say(Generate(**work(name)))
            failed = await raw.hear(Failed)
            assert failed.request_id == name
            assert "the worker shuts down" in failed.reason
            assert failed.at_fault == "local"
        pause.release()
        await closing
        await raw.is_cut_off()
        d.check_node("local")
        del d.workers["local"], d.nodes["local"]
        await check_serves(d)


@pytest.mark.parametrize("kind", ["generate", "prefill", "expect"])
@in_loop
async def test_work_that_the_gateway_forgot_ends_at_its_deadline(kind: str) -> None:
    async with toys(names=("decode", "local"), roles={"decode": Role.MIXED}) as d:
        raw = await dial(d, "decode")
        fields = work(deadline_s=0.05)
        pause = Pause(d.nodes["decode"].engine, "prefill")
        match kind:
            case "generate":
                await raw.say(Generate(**fields))
            case "prefill":
                await raw.say(shipped("raw", d, deadline_s=0.05, decode_address="inproc://local"))
            case _:
                await raw.say(Expect(**fields, prefill_node="local"))
        failed = await raw.hear(Failed)
        assert (
            "deadline" in failed.reason or "expired" in failed.reason or "expects" in failed.reason
        )
        pause.release()
        await d.settle()
        await check_serves(d)


@in_loop
async def test_decoding_that_the_gateway_forgot_ends_at_its_deadline() -> None:
    async with toys() as d:
        raw, far = await dial(d, "decode"), await dial(d, "remote")
        pause = Pause(d.nodes["decode"].engine, "decode", 2)
        await raw.say(Expect(**work(deadline_s=0.15, max_new_tokens=9), prefill_node="remote"))
        await raw.hear(Expecting)
        await far.say(shipped("raw", d))
        await pause.reached()
        failed = await raw.hear(Failed)
        assert "its deadline has passed" in failed.reason
        assert not failed.retryable
        pause.release()
        await d.settle()
        await check_serves(d)


@in_loop
async def test_a_job_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with toys() as d:

        def fail(*_: object, **__: object) -> None:
            raise ConfigError("no such layout")

        def crash(*_: object, **__: object) -> None:
            raise RuntimeError("a bug")

        raw = await dial(d, "decode")
        for attempt, error in enumerate((fail, crash)):
            monkeypatch.setattr("prfaas.runtime.decode.EntryLayout", error)
            await raw.say(Expect(**work(attempt=attempt), prefill_node="remote"))
            failed = await raw.hear(Failed)
            assert (failed.busy, failed.retryable) == (False, True)
            d.check_node("decode")
        far = await dial(d, "remote")
        monkeypatch.setattr("prfaas.runtime.prefill.SenderControl", crash)
        await far.say(shipped("raw", d))
        assert (await far.hear(Failed)).reason == "a bug"
        await d.settle()
        monkeypatch.undo()
        assert len(d.reports) == 2
        d.reports.clear()
        await check_serves(d)


@in_loop
async def test_a_decode_node_that_cannot_be_reached_is_an_error_at_once() -> None:
    async with toys() as d:
        far = await dial(d, "remote")
        await far.say(shipped("raw", d, decode_address="inproc://nobody"))
        failed = await far.hear(Failed)
        assert failed.at_fault == "remote"  # another node may know a way
        assert "nobody listens" in failed.reason
        await d.settle()
        await check_serves(d)


@in_loop
async def test_an_entry_that_nobody_expects_is_refused_at_once() -> None:
    async with toys() as d:
        far = await dial(d, "remote")
        await far.say(shipped("raw", d))
        failed = await far.hear(Failed)
        assert "decode expects no such entry" in failed.reason
        assert failed.at_fault == "decode"
        await d.settle()
        await check_serves(d)


@in_loop
async def test_a_stranger_cannot_speak_for_the_other_side_of_a_transfer() -> None:
    async with toys() as d:
        raw, stranger = await dial(d, "decode"), await dial(d, "decode")
        await raw.say(Expect(**work(), prefill_node="remote"))
        await raw.hear(Expecting)
        lies = [
            Done(transfer_id=TransferId("raw#0"), sender_rank=0, sent_bytes=1),
            Abort(transfer_id=TransferId("raw#0"), code=EndCode.FAILED),
            Renew(transfer_id=TransferId("raw#0")),
        ]
        for lie in lies:
            await stranger.channel.send(encode_transfer(lie))
        await until(lambda: d.nodes["decode"].counters["late_transfer_messages"] == len(lies))
        far = await dial(d, "remote")
        await far.say(shipped("raw", d))
        finished = await raw.hear(Finished)
        assert finished.received_bytes == finished.expected_bytes
        await d.settle()
        await check_serves(d)


@pytest.mark.parametrize("change", [{"fingerprint": b"other"}, {"granule_tokens": 32}])
@in_loop
async def test_H26_another_model_is_turned_away_at_the_door(change: dict[str, Any]) -> None:
    async with toys() as d:
        hello = attrs.evolve(d.hello, **change)
        with pytest.raises(PeerMismatch, match=next(iter(change))):
            await d.transport().connect(d.workers["remote"].address, hello)
        await check_serves(d)


@pytest.mark.parametrize(
    "message",
    [
        Submit(**work()),
        Failed(request_id="r", attempt=0, stage="s", reason="r", retryable=True),
        RoleSet(role="mixed", plan_epoch=0),
    ],
    ids=lambda message: type(message).__name__,
)
@in_loop
async def test_messages_for_others_end_the_line(message: Message) -> None:
    async with toys() as d:
        raw = await dial(d, "remote")
        await raw.say(message)
        await raw.is_cut_off()
        assert d.nodes["remote"].counters["protocol_errors"] == 1
        await check_serves(d)


@in_loop
async def test_H31_a_worker_survives_whatever_is_thrown_at_it(tmp_path: Path) -> None:
    async with toys(transport=TcpTransport) as d:
        await throw_at(d.workers["decode"].address, tmp_path / "pwned")
        claim = b"\x82\xa4type\xacCacheChanged\xa6events\xdd\xff\xff\xff\xff"
        frames = [
            b"",
            b"\x03",
            CONTROL,
            CONTROL + b"\x93" * 3000,
            CONTROL + claim,
            CONTROL + msgspec.msgpack.encode({"type": "Cancel", "request_id": "", "attempt": 0}),
            b"\x02" + os.urandom(64),
            b"\x02" + bytes(70_000),
            CONTROL + os.urandom(64),
            Bomb.frame(tmp_path),
        ]
        tracemalloc.start()
        for frame in frames:
            raw = await dial(d, "decode")
            await raw.channel.send(frame)
            await raw.is_cut_off()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
        tracemalloc.stop()
        assert d.nodes["decode"].counters["protocol_errors"] == len(frames)
        assert not os.listdir(tmp_path)
        await check_serves(d)


@in_loop
async def test_an_explicit_port_that_is_taken_is_named() -> None:
    from prfaas.errors import ListenError

    async with toys(names=("remote", "decode"), transport=TcpTransport) as d:
        address = d.workers["remote"].address
        with pytest.raises(ListenError, match=address.rpartition(":")[2]):
            await d.start("local", address=address)
        await d.workers.pop("local").aclose()
        del d.nodes["local"]
        await check_serves(d)


@in_loop
async def test_closing_twice_and_without_a_start() -> None:
    async with toys() as d:
        worker = d.workers.pop("local")
        await asyncio.gather(worker.aclose(), worker.aclose())
        await worker.aclose()
        await check_serves(d)
