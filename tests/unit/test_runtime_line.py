"""Lines and background tasks: posting never waits, and nothing fails unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from prfaas.errors import (
    ChannelBroken,
    ChannelClosed,
    ConfigError,
    ConnectError,
    TransportError,
)
from prfaas.runtime.line import Line
from prfaas.runtime.messages import Cancel, Register, Token, decode, encode
from prfaas.runtime.peers import PeerLines
from prfaas.runtime.tasks import Tasks
from prfaas.seams import Channel
from prfaas.testing.transport import DIALLER, LISTENER
from prfaas.transport.inproc import InProcChannel, InProcTransport
from toys import in_loop, until


class Wire(InProcChannel):
    """A channel whose frames get through only as long as it is open for them."""

    flows: asyncio.Event

    async def send(self, frame: bytes) -> None:
        await self.flows.wait()
        await super().send(frame)


@asynccontextmanager
async def a_line(**limits: float) -> AsyncIterator[tuple[Line, Wire, Channel]]:
    near, far = Wire.pair(DIALLER, LISTENER, lambda: 0.0)
    assert isinstance(near, Wire)
    near.flows = asyncio.Event()
    near.flows.set()
    line = Line(near, **limits)
    try:
        yield line, near, far
    finally:
        line.abort()


def a_token(index: int, num_bytes: int = 0) -> Token:
    return Token(request_id="r", attempt=0, index=index, token=1, logits=bytes(num_bytes))


@in_loop
async def test_frames_arrive_in_order_and_posting_does_not_wait() -> None:
    async with a_line() as (line, wire, far):
        wire.flows.clear()
        for index in range(100):
            line.post(a_token(index))
        wire.flows.set()
        assert [decode(await far.receive()).index for _ in range(100)] == list(range(100))
        line.post(Register())
        assert decode(await far.receive()) == Register()


@in_loop
async def test_closing_hands_over_what_was_posted() -> None:
    async with a_line() as (line, _, far):
        for index in range(10):
            line.post(a_token(index))
        await line.aclose()
        await line.aclose()
        assert [decode(await far.receive()).index for _ in range(10)] == list(range(10))
        with pytest.raises(ChannelBroken):
            await far.receive()
        with pytest.raises(ChannelClosed, match="was closed on this side"):
            line.post(Register())


@in_loop
async def test_a_peer_that_reads_nothing_is_given_up() -> None:
    async with a_line(stall_s=0.02) as (line, wire, _):
        wire.flows.clear()
        line.post(Register())
        for action in (line.receive, lambda: line.post(Register())):
            with pytest.raises(ChannelBroken, match="read nothing for"):
                await action()


@in_loop
async def test_a_peer_that_leaves_too_much_unread_is_given_up() -> None:
    async with a_line(max_queued_bytes=3000) as (line, wire, _):
        wire.flows.clear()
        line.post(a_token(0, 1400))
        line.post(a_token(1, 1400))
        with pytest.raises(ChannelBroken, match="at most 3000"):
            line.post(a_token(2, 1400))
        with pytest.raises(ChannelBroken, match="at most 3000"):
            await line.receive()
        assert not line.is_open


@in_loop
async def test_the_room_is_free_again_when_the_frames_are_gone() -> None:
    async with a_line(max_queued_bytes=3000) as (line, _, far):
        for index in range(5):
            line.post(a_token(index, 2000))
            assert decode(await far.receive()).index == index


@in_loop
async def test_aclose_does_not_wait_for_a_peer_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prfaas.runtime.line.FLUSH_S", 0.02)
    async with a_line() as (line, wire, _):
        wire.flows.clear()
        line.post(Register())
        await line.aclose()
        assert not line.is_open


@in_loop
async def test_the_end_of_the_channel_ends_the_line() -> None:
    async with a_line() as (line, _, far):
        far.abort()
        line.post(Register())  # it cannot know yet
        await until(lambda: not line.is_open)
        with pytest.raises(ChannelBroken):
            line.post(Register())


@in_loop
async def test_a_message_that_is_too_large_changes_nothing() -> None:
    async with a_line() as (line, _, far):
        with pytest.raises(ConfigError):
            line.post(a_token(0, 9 << 20))
        line.post(a_token(1))
        assert decode(await far.receive()).index == 1


@in_loop
async def test_a_frame_that_the_channel_refuses_ends_the_line_with_a_report() -> None:
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    async with a_line() as (line, wire, _):

        async def refuse(frame: bytes) -> None:
            raise ConfigError("not a byte more")

        wire.send = refuse  # type: ignore[method-assign]
        line.post(Cancel(request_id="r", attempt=0, reason=""))
        await until(lambda: not line.is_open)
        assert [str(report["exception"]) for report in reports] == ["not a byte more"]
        assert len(encode(Register())) < 30


@in_loop
async def test_peers_are_dialled_once_and_again_when_their_line_ends() -> None:
    transport = InProcTransport({})

    async def read(channel: Channel) -> None:
        while True:
            await channel.receive()

    async def serve(line: Line) -> None:
        with suppress(TransportError):
            while True:
                await line.receive()
        await asyncio.sleep(0.005)

    listener = await transport.listen("inproc://there", LISTENER, read)
    peers = PeerLines(transport, DIALLER, serve)
    one, two = await asyncio.gather(*(peers.get("inproc://there") for _ in range(2)))
    assert one is two
    assert peers.take_deliveries() == {}
    assert peers.take_resent() == (0, 0)
    one.abort()
    other = await peers.get("inproc://there")
    assert other is not one
    await asyncio.sleep(0.01)
    assert await peers.get("inproc://there") is other
    with pytest.raises(ConnectError):
        await peers.get("inproc://nowhere")
    await peers.aclose()
    await peers.aclose()
    assert not other.is_open
    await listener.aclose()


@in_loop
async def test_a_task_that_fails_is_reported_and_the_others_go_on() -> None:
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    tasks, ended = Tasks(), []

    async def fail() -> None:
        raise ValueError("unseen")

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    tasks.spawn(wait())
    failed = tasks.spawn(fail())
    await asyncio.wait([failed])
    await until(lambda: reports)
    assert str(reports[0]["exception"]) == "unseen"
    assert repr(tasks) == "<Tasks 1 running>"
    await tasks.aclose()
    await tasks.aclose()
    assert ended == [1]
    assert len(reports) == 1
