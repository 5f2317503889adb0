"""Runs one transfer machine: feeds it, executes its commands in order, sleeps to its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from prfaas.errors import ProtocolError, RemoteProtocolError, TransportError
from prfaas.runtime.line import Line
from prfaas.runtime.messages import plain_text
from prfaas.runtime.tasks import Tasks, report
from prfaas.transfer import (
    Cancel,
    Command,
    EndCode,
    Ended,
    Message,
    PeerLost,
    TransferControl,
    TransferState,
)
from prfaas.transfer.control import Input

Execute = Callable[[Command], Awaitable[None]]
OnEnded = Callable[[Ended], None]


class TransferLoop:
    """The shell around one side of one transfer.

    Args:
        machine: decides.
        execute: carries out one command; if it raises, the transfer is given up and says so.
        on_ended: called once, after the last command.
        clock: monotonic seconds.
        tasks: where it runs.
    """

    def __init__(
        self,
        machine: TransferControl,
        execute: Execute,
        on_ended: OnEnded,
        *,
        clock: Callable[[], float],
        tasks: Tasks,
    ) -> None:
        self._machine = machine
        self._execute = execute
        self._on_ended = on_ended
        self._clock = clock
        self._inputs: asyncio.Queue[Input] = asyncio.Queue()
        self._task = tasks.spawn(self._run())

    def __repr__(self) -> str:
        return f"<TransferLoop {self._machine!r}>"

    @property
    def state(self) -> TransferState:
        return self._machine.state

    @property
    def is_over(self) -> bool:
        """Whether ``on_ended`` was called; inputs are ignored since."""
        return self._task.done()

    def feed(self, happened: Message | Input) -> None:
        """Takes in a message of the peer or a local event."""
        if not self.is_over:
            self._inputs.put_nowait(happened)

    def say(self, line: Line, message: Message) -> None:
        """Says something to the peer; if it is gone, the machine is told."""
        try:
            line.post_transfer(message)
        except TransportError as error:
            self.feed(PeerLost(str(error)))

    async def _run(self) -> None:
        ended: tuple[Ended, ...] = ()
        while True:
            for command in self._machine.commands():
                try:
                    await self._execute(command)
                except Exception as error:
                    # A command that fails ends this transfer, never the peer's patience.
                    report(f"{command!r} failed", error)
                    self.feed(Cancel(EndCode.FAILED, plain_text(error)))
            if ended:
                break
            ended = await self._step()
        for end in ended:
            self._on_ended(end)

    async def _step(self) -> tuple[Ended, ...]:
        deadline = self._machine.next_deadline()
        timeout_s = None if deadline is None else max(0.0, deadline - self._clock())
        try:
            happened = await asyncio.wait_for(self._inputs.get(), timeout_s)
        except TimeoutError:
            return self._machine.on_deadline(self._clock())
        try:
            return self._machine.receive(happened, self._clock())
        except ProtocolError as error:
            is_theirs = isinstance(error, RemoteProtocolError)
            if not is_theirs:
                report(f"{self!r} was fed out of order", error)
            code = EndCode.PROTOCOL if is_theirs else EndCode.FAILED
            return self._machine.receive(Cancel(code, plain_text(error)), self._clock())
