"""What every job of a worker has: one attempt at one request, its blocks, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from prfaas.core import RequestId
from prfaas.runtime.messages import (
    Expect,
    Failed,
    Finished,
    Generate,
    Message,
    Prefill,
    Token,
    unpack_tokens,
)
from prfaas.runtime.node import Node
from prfaas.seams import DecodeResult, Reservation

Reply = Callable[[Message], Awaitable[None]]


class Job:
    """One attempt at one request on this worker.

    The engine loop calls `prefill_segment` and `decode_step` when the schedule says so. `release` may
    come at any time and in any order; it waits until the engine no longer touches the job's memory.

    Args:
        node: the worker's resources.
        work: what the gateway asked for.
        reply: says something to that gateway.
        on_over: called once, when nothing of the job is left.
    """

    stage = "job"

    def __init__(
        self,
        node: Node,
        work: Prefill | Expect | Generate,
        reply: Reply,
        on_over: Callable[[Job], None],
    ) -> None:
        self.node = node
        self.work = work
        self.key = RequestId(work.key)
        self.tokens = unpack_tokens(work.tokens)
        self.until_s = node.clock() + work.deadline_s
        self.reply = reply
        self.reservation: Reservation | None = None
        self._on_over = on_over
        self._engine_turn = asyncio.Lock()
        self._is_over = False

    async def prefill_segment(self) -> None:
        """Runs one prefill segment in the engine."""
        raise NotImplementedError(f"{self.stage} job {self.key!r} was scheduled to prefill")

    async def decode_step(self) -> None:
        """Runs one decode step in the engine."""
        raise NotImplementedError(f"{self.stage} job {self.key!r} was scheduled to decode")

    async def tick(self) -> None:
        """Called about ten times a second."""

    async def cancel(self, reason: str) -> None:
        """The gateway gave up. Idempotent."""
        raise NotImplementedError

    def peer_lost(self, reason: str) -> None:
        """The channel to the job's peer is gone."""

    @property
    def is_over(self) -> bool:
        return self._is_over

    async def in_engine(self, work: Callable[[], DecodeResult]) -> DecodeResult | None:
        """Runs one engine call, unless the job ended first; nothing is released meanwhile."""
        async with self._engine_turn:
            if self._is_over:
                return None
            return await self.node.in_engine(work)

    async def fail(self, reason: str, *, retryable: bool = True, at_fault: str = "") -> None:
        """Reports failure to the gateway. The caller releases."""
        self.node.counters["failed"] += 1
        await self.reply(
            Failed(
                request_id=self.work.request_id,
                attempt=self.work.attempt,
                stage=self.stage,
                reason=reason,
                retryable=retryable,
                at_fault=at_fault,
            )
        )

    async def release(self) -> None:
        """Lets go of schedule, engine and blocks, exactly once."""
        if self._is_over:
            return
        self._is_over = True
        self.node.schedule.remove(self.key)
        async with self._engine_turn:
            await self.node.in_engine(partial(self.node.engine.close, self.key))
            self.node.cache.release(self.key)
        self._on_over(self)


class TokenStream:
    """The decoding part of a job: feeds tokens back until enough are out."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._token: int | None = None
        self._num_out = 0
        self._ready_s = 0.0
        self._wait_s: float | None = None
        self._steps_s = 0.0
        self._num_steps = 0

    def start(self, first_token: int) -> bool:
        """Takes the first token, which the client already has. True if it is the last as well."""
        self._token = first_token
        self._num_out = 1
        self._ready_s = self._job.node.clock()
        return self._num_out >= self._job.work.max_new_tokens

    async def step(self) -> bool:
        """One decode step, and the token that it makes. True after the last one."""
        job, work = self._job, self._job.work
        assert self._token is not None
        started_s = job.node.clock()
        if self._wait_s is None:
            self._wait_s = started_s - self._ready_s
        result = await job.in_engine(partial(job.node.engine.decode, job.key, self._token))
        if result is None:
            return False
        self._steps_s += job.node.clock() - started_s
        self._num_steps += 1
        self._token = result.token
        await job.reply(
            Token(
                request_id=work.request_id,
                attempt=work.attempt,
                index=self._num_out,
                token=result.token,
                logits=result.logits if work.return_logits else b"",
            )
        )
        self._num_out += 1
        return self._num_out >= work.max_new_tokens

    def finished(
        self,
        *,
        received_bytes: int = 0,
        expected_bytes: int = 0,
        held_tokens: int = 0,
        decode_prefilled_tokens: int = 0,
    ) -> Finished:
        """The message that ends the request."""
        work = self._job.work
        return Finished(
            request_id=work.request_id,
            attempt=work.attempt,
            received_bytes=received_bytes,
            expected_bytes=expected_bytes,
            held_tokens=held_tokens,
            decode_prefilled_tokens=decode_prefilled_tokens,
            decode_wait_s=self._wait_s or 0.0,
            decode_step_s=self._steps_s / self._num_steps if self._num_steps else 0.0,
        )
