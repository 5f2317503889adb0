"""Every transport holds the contract, whatever its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from prfaas.errors import PutRefused, TransportError
from prfaas.seams.transport import Hello, Memory, Span, WindowRef
from prfaas.testing.transport import check_transport, host_memory, pair
from prfaas.transport.inproc import InProcChannel, InProcTransport
from prfaas.transport.tcp import TcpConfig, TcpTransport

pytestmark = pytest.mark.timeout(60)

TCP = "tcp://127.0.0.1:0"
INPROC = "inproc://conformance"


def test_h12_inproc_with_every_size() -> None:
    asyncio.run(check_transport(InProcTransport({}), INPROC, large=True))


def test_h12_tcp_with_every_size() -> None:
    asyncio.run(check_transport(TcpTransport(), TCP, large=True))


@pytest.mark.parametrize(
    "config",
    [
        TcpConfig(num_connections=1, chunk_bytes=16 << 20),
        TcpConfig(num_connections=3, chunk_bytes=5001),
        TcpConfig(checksum=False),
    ],
    ids=["one connection", "small chunks", "no checksum"],
)
def test_tcp_with_other_settings(config: TcpConfig) -> None:
    asyncio.run(check_transport(TcpTransport(config), TCP))


Put = Callable[[InProcChannel, WindowRef, int, Memory, Sequence[Span]], Awaitable[None]]


async def early(
    channel: InProcChannel, window: WindowRef, offset: int, memory: Memory, spans: Sequence[Span]
) -> None:
    """Returns before the bytes have landed."""
    asyncio.create_task(InProcChannel.put(channel, window, offset, memory, spans))  # noqa: RUF006


async def shifted(
    channel: InProcChannel, window: WindowRef, offset: int, memory: Memory, spans: Sequence[Span]
) -> None:
    """Puts the spans in another order."""
    await InProcChannel.put(channel, window, offset, memory, spans[1:] + spans[:1])


async def silent(
    channel: InProcChannel, window: WindowRef, offset: int, memory: Memory, spans: Sequence[Span]
) -> None:
    """Says nothing of a refusal."""
    try:
        await InProcChannel.put(channel, window, offset, memory, spans)
    except TransportError:
        return


class FaultyTransport(InProcTransport):
    """In-process channels whose dialler puts in a wrong way."""

    def __init__(self, put: Put) -> None:
        super().__init__({})
        self._put = put

    async def connect(self, address: str, hello: Hello) -> InProcChannel:
        channel = await super().connect(address, hello)
        assert isinstance(channel, InProcChannel)
        channel.put = self._put.__get__(channel)  # type: ignore[method-assign]
        return channel


@pytest.mark.parametrize("put", [early, shifted, silent])
def test_the_checks_find_a_faulty_put(put: Put) -> None:
    with pytest.raises(AssertionError):
        asyncio.run(check_transport(FaultyTransport(put), INPROC))


def test_inproc_puts_give_way_and_can_be_refused_half_way() -> None:
    async def main() -> None:
        async with pair(InProcTransport({}), INPROC) as ends:
            buffer = bytearray(3 << 20)
            spans = [Span(0, len(buffer))]
            window = ends.far.expose(host_memory(buffer), spans)
            source = host_memory(bytearray(b"x" * len(buffer)))
            putting = asyncio.create_task(ends.near.put(window, 0, source, spans))
            while not buffer[0]:
                assert not putting.done()
                await asyncio.sleep(0)
            await ends.far.withdraw(window)
            with pytest.raises(PutRefused):
                await putting
            assert 0 < buffer.count(b"x") < len(buffer)
            assert isinstance(ends.near, InProcChannel)
            assert ends.near._meter.outstanding_bytes == 0

    asyncio.run(main())


def test_inproc_senders_wait_for_a_full_inbox() -> None:
    async def main() -> None:
        async with pair(InProcTransport({}), INPROC) as ends:
            frame = bytes(8 << 20)

            async def flood() -> None:
                for _ in range(6):
                    await ends.near.send(frame)

            flooding = asyncio.create_task(flood())
            for _ in range(50):
                await asyncio.sleep(0)
            assert not flooding.done()
            assert isinstance(ends.far, InProcChannel)
            assert repr(ends.far._inbox) == "<Inbox 2 frames, 16777344 bytes, open>"
            for _ in range(6):
                assert len(await ends.far.receive()) == len(frame)
            await flooding

    asyncio.run(main())
