"""Deployments of toy engines that can be stopped at any point."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import attrs

from clusters import Deployment, deployment
from prfaas.core import NodeId, Request, RequestId, Role
from prfaas.errors import ChannelBroken
from prfaas.runtime.attempt import Generation
from prfaas.runtime.gateway import GatewayConfig
from prfaas.runtime.messages import Message, decode, encode, pack_tokens
from prfaas.seams import Channel, Hello, Memory, Span, WindowRef
from prfaas.testing.engine import FakeEngine
from prfaas.transport.inproc import InProcChannel, InProcTransport

TOY_BLOCK = 16
REMOTE, LOCAL = 0, 1_000_000  # thresholds that force a route
NUM_NEW = 4
WAIT_S = 5.0
_ids = itertools.count()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(1000), k=num_tokens)


def a_request(num_tokens: int = 90, seed: int = 0, **options: Any) -> Request:
    """A request of a new name."""
    options = {
        "request_id": RequestId(f"r{next(_ids)}"),
        "tokens": prompt(num_tokens, seed),
        "max_new_tokens": NUM_NEW,
        "return_logits": True,
        "deadline_s": 20.0,
    } | options
    return Request(**options)


def alone(request: Request) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
    """Tokens and logits of one engine that shares nothing with anybody."""
    engine, key = FakeEngine(), request.request_id
    engine.open(key)
    results = [engine.prefill(key, request.tokens, 0)]
    while len(results) < request.max_new_tokens:
        results.append(engine.decode(key, results[-1].token))
    return tuple(r.token for r in results), tuple(r.logits for r in results)


def check_answer(generation: Generation, request: Request) -> None:
    tokens, logits = alone(request)
    assert generation.tokens == tokens
    assert generation.logits == logits


@asynccontextmanager
async def toys(**options: Any) -> AsyncIterator[Deployment]:
    """A deployment of `FakeEngine`; in one process unless a transport is given."""
    network: dict[str, Any] = {}
    defaults: dict[str, Any] = {
        "threshold": REMOTE,
        "pool_bytes": 1 << 18,
        "block_size": TOY_BLOCK,
        "config": GatewayConfig(retry_s=0.002, max_retry_s=0.01),
    }
    if "transport" not in options:
        defaults["transport"] = lambda: InProcTransport(network)
        defaults["address"] = lambda name: f"inproc://{name}"
    async with deployment(FakeEngine, **(defaults | options)) as d:
        yield d


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


class Pause:
    """Stops an engine's thread at a call until it is let go, or makes the call raise.

    Args:
        engine: of a running node.
        method: open, prefill or decode.
        nth: which call of it, from now on.
    """

    def __init__(
        self, engine: FakeEngine, method: str, nth: int = 1, error: Exception | None = None
    ) -> None:
        self._method = method
        self._left = nth
        self._error = error
        self._is_reached = threading.Event()
        self._go = threading.Event()
        if error is not None:
            self._go.set()
        engine.before = self._before

    def _before(self, method: str, request_id: RequestId) -> None:
        if method == self._method:
            self._left -= 1
            if self._left == 0:
                self._is_reached.set()
                assert self._go.wait(WAIT_S), "the test has not let the engine go"
                if self._error is not None:
                    raise self._error

    async def reached(self) -> None:
        await until(self._is_reached.is_set)

    def release(self) -> None:
        self._go.set()


class HeldChannel(InProcChannel):
    """Puts wait for a gate, and those that are cancelled for another one."""

    gate: asyncio.Event
    quiet: asyncio.Event
    num_held: list[int]
    errors: list[Exception | None]

    async def put(
        self, window: WindowRef, offset: int, memory: Memory, spans: Sequence[Span]
    ) -> None:
        self.num_held[0] += 1
        try:
            await self.gate.wait()
            if self.errors:
                error = self.errors.pop()
                if error is None:
                    return
                raise error
            await super().put(window, offset, memory, spans)
        except asyncio.CancelledError:
            await self.quiet.wait()
            raise


class HeldTransport(InProcTransport):
    """All channels that it dials hold their puts back, or fail them.

    Attributes:
        gate: lets puts through.
        quiet: lets cancelled puts end; set at first.
        errors: what the next puts raise; None sends nothing and says that it did.
        num_held: counts puts.
    """

    def __init__(self, network: dict[str, Any]) -> None:
        super().__init__(network)
        self.gate = asyncio.Event()
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.num_held = [0]
        self.errors: list[Exception | None] = []

    async def connect(self, address: str, hello: Hello) -> Channel:
        channel: Any = await super().connect(address, hello)
        channel.__class__ = HeldChannel
        channel.gate, channel.quiet = self.gate, self.quiet
        channel.num_held, channel.errors = self.num_held, self.errors
        return channel

    async def holds(self) -> None:
        await until(lambda: self.num_held[0])


@asynccontextmanager
async def held_toys(**options: Any) -> AsyncIterator[tuple[Deployment, HeldTransport]]:
    """As `toys`, with the puts of every worker behind one gate."""
    held = HeldTransport({})
    options = {"transport": lambda: held, "address": lambda name: f"inproc://{name}"} | options
    async with toys(**options) as d:
        yield d, held
        held.gate.set()


class RawPeer:
    """Speaks to a worker or a door message by message."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.heard: list[Message] = []

    @classmethod
    async def dial(cls, d: Deployment, address: str) -> RawPeer:
        hello = attrs.evolve(d.hello, node_id=NodeId("raw"))
        return cls(await d.transport().connect(address, hello))

    async def say(self, message: Message) -> None:
        await self.channel.send(encode(message))

    async def hear(self, kind: type) -> Any:
        """The next message of one kind; others are kept in ``heard``."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = decode(await self.channel.receive())
                self.heard.append(message)
                if isinstance(message, kind):
                    return message

    async def is_cut_off(self) -> None:
        async with asyncio.timeout(WAIT_S):
            with suppress(ChannelBroken):
                while True:
                    await self.channel.receive()
        self.channel.abort()


def work(name: str = "raw", num_tokens: int = 40, **fields: Any) -> dict[str, Any]:
    """Fields of a work message."""
    return {
        "request_id": name,
        "attempt": 0,
        "tokens": pack_tokens(prompt(num_tokens)),
        "max_new_tokens": 2,
        "deadline_s": 10.0,
    } | fields


ROUTES = {
    "remote": {"threshold": REMOTE},
    "local": {"threshold": LOCAL},
    "mixed": {"threshold": LOCAL, "names": ("decode",), "roles": {"decode": Role.MIXED}},
}


def start(d: Deployment, request: Request) -> asyncio.Task[Any]:
    return asyncio.create_task(d.gateway.generate(request))


async def check_serves(d: Deployment, **options: Any) -> None:
    """A probe gets its answer, and nothing is left of anything."""
    request = a_request(**({"seed": 99} | options))
    check_answer(await d.gateway.generate(request), request)
    await d.settle()
    d.check_empty()
