"""Lines that a worker dials to other workers: one per address, on demand, renewed when lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from prfaas.runtime.line import Line
from prfaas.runtime.tasks import Tasks
from prfaas.seams import Delivery, Hello, Transport

Serve = Callable[[Line], Awaitable[None]]


class PeerLines:
    """Keeps one line per peer address.

    Args:
        transport: dials.
        hello: what we declare.
        serve: reads a line until it ends; the line is forgotten then.
    """

    def __init__(self, transport: Transport, hello: Hello, serve: Serve) -> None:
        self._transport = transport
        self._hello = hello
        self._serve = serve
        self._dials: dict[str, asyncio.Task[Line]] = {}
        self._lines: dict[str, Line] = {}
        self._tasks = Tasks()

    def __repr__(self) -> str:
        return f"<PeerLines to {sorted(self._lines)}, {len(self._dials)} being dialled>"

    async def get(self, address: str) -> Line:
        """The line to ``address``; concurrent callers share one dial.

        Raises: AddressError, ConnectError, PeerMismatch.
        """
        line = self._lines.get(address)
        if line is not None and line.is_open:
            return line
        if address not in self._dials:
            dial = self._dials[address] = asyncio.ensure_future(self._dial(address))
            # Whoever asked may be gone when it fails.
            dial.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._dials[address])

    def take_deliveries(self) -> Mapping[Line, tuple[Delivery, ...]]:
        """Link samples since the last call, of the lines that have some."""
        taken = {line: line.channel.take_deliveries() for line in self._lines.values()}
        return {line: deliveries for line, deliveries in taken.items() if deliveries}

    def take_resent(self) -> tuple[int, int]:
        """Packets sent since the last call, and those of them that were sent again."""
        counts = [line.channel.take_resent() for line in self._lines.values()]
        return sum(sent for sent, _ in counts), sum(again for _, again in counts)

    async def aclose(self) -> None:
        """Ends every line. Idempotent."""
        dials = tuple(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        await asyncio.gather(*(line.aclose() for line in tuple(self._lines.values())))
        await self._tasks.aclose()

    async def _dial(self, address: str) -> Line:
        try:
            line = Line(await self._transport.connect(address, self._hello))
        finally:
            del self._dials[address]
        self._lines[address] = line
        self._tasks.spawn(self._read(address, line))
        return line

    async def _read(self, address: str, line: Line) -> None:
        try:
            await self._serve(line)
        finally:
            if self._lines.get(address) is line:
                del self._lines[address]
            line.abort()
