"""The gateway's door for clients, and the client: requests in, phases and answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prfaas.core import Request, RequestId
from prfaas.errors import (
    DeadlineExceeded,
    PrfaasError,
    RemoteProtocolError,
    RequestError,
    TransportError,
)
from prfaas.runtime.attempt import Generation
from prfaas.runtime.gateway import Gateway
from prfaas.runtime.messages import (
    Answer,
    AskStatus,
    Message,
    Progress,
    Status,
    Submit,
    Watch,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)
from prfaas.seams import Channel, Hello, Listener, Transport

WATCH_S = 0.1
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
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(channel))
                while True:
                    message = decode(await channel.receive())
                    match message:
                        case Submit():
                            tasks.create_task(self._answer(channel, message))
                        case AskStatus():
                            tasks.create_task(self._statuses(channel))
                        case _:
                            raise RemoteProtocolError(
                                f"a gateway takes no {type(message).__name__} from a client"
                            )
        except* (TransportError, RemoteProtocolError):
            channel.abort()  # the client is gone, or may as well be

    async def _answer(self, channel: Channel, submit: Submit) -> None:
        async def on_phase(request_id: str, phase: str) -> None:
            await channel.send(encode(Progress(request_id=request_id, phase=phase)))

        try:
            request = Request(
                request_id=RequestId(submit.request_id),
                tokens=unpack_tokens(submit.tokens),
                max_new_tokens=submit.max_new_tokens,
                tenant=submit.tenant,
                deadline_s=submit.deadline_s,
                return_logits=submit.return_logits,
            )
            generation = await self._gateway.generate(request, on_phase)
        except TransportError:
            raise
        except PrfaasError as error:
            answer = Answer(
                request_id=submit.request_id,
                tokens=(),
                logits=(),
                record={},
                error=f"{type(error).__name__}: {error}",
            )
        else:
            answer = Answer(
                request_id=submit.request_id,
                tokens=generation.tokens,
                logits=generation.logits,
                record=generation.record,
            )
        await channel.send(encode(answer))

    async def _watch(self, channel: Channel) -> None:
        while True:
            watch = Watch(
                threshold_tokens=self._gateway.threshold_tokens,
                link_bps=self._gateway.link_bps,
                num_active=self._gateway.num_active,
            )
            await channel.send(encode(watch))
            await asyncio.sleep(WATCH_S)

    async def _statuses(self, channel: Channel) -> None:
        for status in await self._gateway.statuses():
            await channel.send(encode(status))
        await channel.send(
            encode(
                Status(
                    node_id=self._hello.node_id,
                    counts={
                        "requests": self._gateway.num_active,
                        "retries": self._gateway.num_retries,
                    },
                    config={},
                )
            )
        )


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
        self._channel = channel
        self._on_progress = on_progress
        self._on_watch = on_watch
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._statuses: asyncio.Queue[Status] = asyncio.Queue()
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
        """Runs one request. Raises RequestError, DeadlineExceeded, ChannelBroken, PrfaasError."""
        if request.request_id in self._waiting:
            raise RequestError(f"request {request.request_id!r} is running already; use a new id")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        submit = Submit(
            request_id=request.request_id,
            attempt=0,
            tokens=pack_tokens(request.tokens),
            max_new_tokens=request.max_new_tokens,
            tenant=request.tenant,
            return_logits=request.return_logits,
            deadline_s=request.deadline_s,
        )
        try:
            await self._channel.send(encode(submit))
            answer = await future
        finally:
            self._waiting.pop(request.request_id, None)
        if answer.error:
            name, _, text = answer.error.partition(": ")
            raise {"RequestError": RequestError, "DeadlineExceeded": DeadlineExceeded}.get(
                name, PrfaasError
            )(text)
        return Generation(tokens=answer.tokens, logits=answer.logits, record=answer.record)

    async def statuses(self, timeout_s: float = 10.0) -> tuple[Status, ...]:
        """Counts of every worker that answers and, last, of the gateway itself."""
        await self._channel.send(encode(AskStatus()))
        found: list[Status] = []
        async with asyncio.timeout(timeout_s):
            while not found or found[-1].node_id != self._channel.peer.node_id:
                found.append(await self._statuses.get())
        return tuple(found)

    async def aclose(self) -> None:
        """Hangs up. Idempotent."""
        await self._channel.aclose()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                self._take(decode(await self._channel.receive()))
        except (TransportError, RemoteProtocolError) as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)

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
