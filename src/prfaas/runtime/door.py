"""The gateway's door for clients, and the client: requests in, phases and answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prfaas.core import Request, RequestId
from prfaas.errors import (
    CapacityError,
    ChannelBroken,
    ConfigError,
    DeadlineExceeded,
    PrfaasError,
    RemoteProtocolError,
    RequestError,
    TransportError,
)
from prfaas.runtime.attempt import Generation
from prfaas.runtime.gateway import Gateway
from prfaas.runtime.line import Line
from prfaas.runtime.messages import (
    Answer,
    AskStatus,
    Cancel,
    Message,
    Progress,
    Status,
    Submit,
    Watch,
    decode,
    plain_text,
    prompt_fields,
    unpack_tokens,
)
from prfaas.runtime.tasks import report
from prfaas.seams import Channel, Hello, Listener, Transport

WATCH_S = 0.1
ANSWER_GRACE_S = 5.0
"""A gateway reports a deadline itself; a client waits so much longer for one that stands still."""
OnProgress = Callable[[str, str], None]
OnWatch = Callable[[Watch], None]


class Door:
    """Accepts clients of one gateway.

    Args:
        gateway: does the work.
        transport, hello: what it listens with and declares.
    """

    def __init__(self, gateway: Gateway, transport: Transport, hello: Hello) -> None:
        self._gateway = gateway
        self._transport = transport
        self._hello = hello
        self._listener: Listener | None = None

    async def start(self, address: str) -> str:
        """Listens; returns the address to dial. Raises AddressError, ListenError."""
        self._listener = await self._transport.listen(address, self._hello, self._serve)
        return self._listener.address

    async def aclose(self) -> None:
        """Turns clients away; running requests are cancelled. Idempotent."""
        if self._listener is not None:
            await self._listener.aclose()

    async def _serve(self, channel: Channel) -> None:
        client = _ClientLine(self._gateway, self._hello, Line(channel))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(client.watch())
                while True:
                    client.take(decode(await client.line.receive()), tasks)
        except* (TransportError, RemoteProtocolError):
            pass  # the client is gone, or may as well be
        finally:
            client.line.abort()


class _ClientLine:
    """What one client has asked for. The end of its line cancels it."""

    def __init__(self, gateway: Gateway, hello: Hello, line: Line) -> None:
        self.line = line
        self._gateway = gateway
        self._hello = hello
        self._running: dict[str, asyncio.Task[None]] = {}

    def take(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        """Begins what a message asks for. Raises RemoteProtocolError."""
        match message:
            case Submit():
                task = tasks.create_task(self._answer(message))
                # A second one of a name is turned away; the first can still be cancelled.
                if self._running.setdefault(message.request_id, task) is task:
                    task.add_done_callback(lambda _: self._running.pop(message.request_id))
            case Cancel():
                if message.request_id in self._running:
                    self._running[message.request_id].cancel()
            case AskStatus():
                tasks.create_task(self._tell_statuses())
            case _:
                raise RemoteProtocolError(
                    f"a gateway takes no {type(message).__name__} from a client"
                )

    async def watch(self) -> None:
        """Tells what moves, until the line ends."""
        while True:
            self.line.post(
                Watch(
                    threshold_tokens=self._gateway.threshold_tokens,
                    link_bps=self._gateway.link_bps,
                    num_active=self._gateway.num_active,
                )
            )
            await asyncio.sleep(WATCH_S)

    async def _answer(self, submit: Submit) -> None:
        try:
            request = Request(
                request_id=RequestId(submit.request_id),
                tokens=unpack_tokens(submit.tokens),
                max_new_tokens=submit.max_new_tokens,
                tenant=submit.tenant,
                deadline_s=submit.deadline_s,
                return_logits=submit.return_logits,
            )
            generation = await self._gateway.generate(request, self._tell_phase)
        except Exception as error:
            # A bug that one request hits must not take the client's others with it.
            if not isinstance(error, PrfaasError):
                report(f"request {submit.request_id!r} failed unexpectedly", error)
            self.line.post(_failure(submit, error))
            return
        answer = Answer(
            request_id=submit.request_id,
            tokens=generation.tokens,
            logits=generation.logits,
            record=generation.record,
        )
        try:
            self.line.post(answer)
        except ConfigError as error:  # logits of many steps can outgrow a frame
            self.line.post(_failure(submit, error))

    def _tell_phase(self, request_id: str, phase: str) -> None:
        self.line.post(Progress(request_id=request_id, phase=phase))

    async def _tell_statuses(self) -> None:
        for status in await self._gateway.statuses():
            self.line.post(status)
        counts = {"requests": self._gateway.num_active, "retries": self._gateway.num_retries}
        self.line.post(Status(node_id=self._hello.node_id, counts=counts, config={}))


def _failure(submit: Submit, error: Exception) -> Answer:
    return Answer(
        request_id=submit.request_id,
        tokens=(),
        logits=(),
        record={},
        error=f"{type(error).__name__}: {plain_text(error)}",
    )


_ERRORS: dict[str, type[PrfaasError]] = {
    kind.__name__: kind for kind in (RequestError, DeadlineExceeded, CapacityError)
}
"""What a client tells apart; everything else is a PrfaasError with the gateway's text."""


class Client:
    """One connection to a gateway. Made by `Client.connect`.

    Args:
        channel: to the gateway's door.
        on_progress: called with a request's id and the phase that it entered.
        on_watch: called about ten times a second with what moves.
    """

    def __init__(
        self,
        channel: Channel,
        on_progress: OnProgress | None = None,
        on_watch: OnWatch | None = None,
    ) -> None:
        self._line = Line(channel)
        self._on_progress = on_progress
        self._on_watch = on_watch
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._statuses: asyncio.Queue[Status | PrfaasError] = asyncio.Queue()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def connect(
        cls,
        transport: Transport,
        address: str,
        hello: Hello,
        on_progress: OnProgress | None = None,
        on_watch: OnWatch | None = None,
    ) -> Client:
        """Raises AddressError, ConnectError, PeerMismatch."""
        return cls(await transport.connect(address, hello), on_progress, on_watch)

    async def generate(self, request: Request) -> Generation:
        """Runs one request; a caller who gives up has the gateway give it up, too.

        Raises: RequestError, DeadlineExceeded, CapacityError, ChannelBroken, PrfaasError.
        """
        name = request.request_id
        if name in self._waiting:
            raise RequestError(f"request {name!r} is running already; use a new id")
        submit = Submit(attempt=0, deadline_s=request.deadline_s, **prompt_fields(request))
        self._line.post(submit)
        self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(request.deadline_s + ANSWER_GRACE_S):
                answer = await self._waiting[name]
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the gateway did not answer request {name!r} within {request.deadline_s} s nor "
                f"{ANSWER_GRACE_S} s later; is it still there?"
            ) from error
        except asyncio.CancelledError:
            if self._line.is_open:
                self._line.post(Cancel(request_id=name, attempt=0, reason="the client gave it up"))
            raise
        finally:
            del self._waiting[name]
        if answer.error:
            kind, _, text = answer.error.partition(": ")
            raise _ERRORS.get(kind, PrfaasError)(text)
        return Generation(tokens=answer.tokens, logits=answer.logits, record=answer.record)

    async def statuses(self, timeout_s: float = 10.0) -> tuple[Status, ...]:
        """Counts of every worker that answers and, last, of the gateway itself.

        One call at a time. Raises: ChannelBroken; TimeoutError.
        """
        self._line.post(AskStatus())
        found: list[Status] = []
        async with asyncio.timeout(timeout_s):
            while not found or found[-1].node_id != self._line.peer_id:
                status = await self._statuses.get()
                if isinstance(status, PrfaasError):
                    raise status
                found.append(status)
        return tuple(found)

    async def aclose(self) -> None:
        """Hangs up. Idempotent."""
        await self._line.aclose()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            while True:
                self._take(decode(await self._line.receive()))
        except Exception as error:
            # Also if it is a callback that failed: whoever waits must not wait for ever.
            self._line.abort()
            broken = error if isinstance(error, PrfaasError) else ChannelBroken(repr(error))
            broken.__cause__ = None if broken is error else error
            self._statuses.put_nowait(broken)
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(broken)

    def _take(self, message: Message) -> None:
        match message:
            case Progress():
                if self._on_progress is not None:
                    self._on_progress(message.request_id, message.phase)
            case Watch():
                if self._on_watch is not None:
                    self._on_watch(message)
            case Answer():
                future = self._waiting.get(message.request_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case Status():
                self._statuses.put_nowait(message)
            case _:
                raise RemoteProtocolError(f"a client takes no {type(message).__name__}")
