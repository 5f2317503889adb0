"""Channels that a worker dials to other workers: one per address, made on demand, renewed when lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from prfaas.seams import Channel, Delivery, Hello, Transport

Serve = Callable[[Channel], Awaitable[None]]


class PeerChannels:
    """Keeps one channel per peer address.

    Args:
        transport: dials.
        hello: what we declare.
        serve: reads a channel until it ends; the channel is forgotten then.
    """

    def __init__(self, transport: Transport, hello: Hello, serve: Serve) -> None:
        self._transport = transport
        self._hello = hello
        self._serve = serve
        self._dials: dict[str, asyncio.Task[Channel]] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._channels: dict[str, Channel] = {}

    async def get(self, address: str) -> Channel:
        """The channel to ``address``; concurrent callers share one dial.

        Raises: AddressError, ConnectError, PeerMismatch.
        """
        if address in self._channels:
            return self._channels[address]
        if address not in self._dials:
            self._dials[address] = asyncio.ensure_future(self._dial(address))
        return await asyncio.shield(self._dials[address])

    def take_deliveries(self) -> tuple[Delivery, ...]:
        """Link samples of all channels since the last call."""
        return tuple(d for channel in self._channels.values() for d in channel.take_deliveries())

    async def aclose(self) -> None:
        """Ends every channel. Idempotent."""
        for dial in self._dials.values():
            dial.cancel()
        for channel in tuple(self._channels.values()):
            await channel.aclose()
        await asyncio.gather(*self._readers, *self._dials.values(), return_exceptions=True)

    async def _dial(self, address: str) -> Channel:
        try:
            channel = await self._transport.connect(address, self._hello)
        finally:
            self._dials.pop(address, None)
        self._channels[address] = channel
        reader = asyncio.ensure_future(self._read(address, channel))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return channel

    async def _read(self, address: str, channel: Channel) -> None:
        try:
            await self._serve(channel)
        finally:
            if self._channels.get(address) is channel:
                del self._channels[address]
            channel.abort()
