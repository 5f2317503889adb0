"""Runs one transfer machine: feeds it, executes its commands in order, sleeps to its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from prfaas.errors import RemoteProtocolError
from prfaas.transfer import Cancel, Command, Ended, EndCode, Message, TransferControl
from prfaas.transfer.control import Input

Execute = Callable[[Command], Awaitable[None]]
OnEnded = Callable[[Ended], Awaitable[None]]


class TransferLoop:
    """The shell around one side of one transfer.

    Args:
        machine: decides.
        execute: carries out one command; if it raises, the transfer is given up and says so.
        on_ended: called once, after the last command.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        machine: TransferControl,
        execute: Execute,
        on_ended: OnEnded,
        clock: Callable[[], float],
    ) -> None:
        self._machine = machine
        self._execute = execute
        self._on_ended = on_ended
        self._clock = clock
        self._inputs: asyncio.Queue[Input] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._run())

    @property
    def task(self) -> asyncio.Task[None]:
        """Done when the transfer is over and everything it held is free."""
        return self._task

    def feed(self, happened: Message | Input) -> None:
        """Takes in a message of the peer or a local event; ignored after the end."""
        self._inputs.put_nowait(happened)

    async def _run(self) -> None:
        ended: tuple[Ended, ...] = ()
        while True:
            for command in self._machine.commands():
                try:
                    await self._execute(command)
                except Exception as error:
                    # A command that fails ends this transfer, never the peer's patience.
                    context = {"message": f"{command!r} failed", "exception": error}
                    asyncio.get_running_loop().call_exception_handler(context)
                    self.feed(Cancel(EndCode.FAILED, f"{type(error).__name__}: {error}"))
            if ended:
                break
            ended = await self._step()
        for end in ended:
            await self._on_ended(end)

    async def _step(self) -> tuple[Ended, ...]:
        deadline = self._machine.next_deadline()
        timeout = None if deadline is None else max(0.0, deadline - self._clock())
        try:
            happened = await asyncio.wait_for(self._inputs.get(), timeout)
        except TimeoutError:
            return self._machine.on_deadline(self._clock())
        try:
            return self._machine.receive(happened, self._clock())
        except RemoteProtocolError as error:
            return self._machine.receive(Cancel(EndCode.PROTOCOL, str(error)), self._clock())
