"""The worker: one process of a cluster. Its role is only an admission policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial

from prfaas.core import RequestId, Role
from prfaas.errors import (
    CapacityError,
    ChannelClosed,
    LocalProtocolError,
    PrfaasError,
    RemoteProtocolError,
    TransportError,
)
from prfaas.policy.schedule import DecodeStep, PrefillStep, decode_rounds
from prfaas.runtime.decode import DecodeJob
from prfaas.runtime.job import Job, admits
from prfaas.runtime.line import Line
from prfaas.runtime.messages import (
    CONTROL,
    TRANSFER,
    AskSnapshot,
    AskStatus,
    Cancel,
    Expect,
    Failed,
    Generate,
    Message,
    Prefill,
    Register,
    SetRole,
    Work,
    decode,
    plain_text,
)
from prfaas.runtime.node import Node
from prfaas.runtime.peers import PeerLines
from prfaas.runtime.prefill import PrefillJob
from prfaas.runtime.reports import Reports
from prfaas.runtime.tasks import Tasks, report
from prfaas.seams import ChangePhase, Channel, Hello, Listener, Transport
from prfaas.transfer import EndCode, Offer, Reject
from prfaas.transfer import decode as decode_transfer


class Worker:
    """Serves prefill, decode or both, for gateways that register and peers that offer entries.

    Args:
        node: its resources; closed together with the worker.
        transport: carries control frames and entries.
        on_role: called in the engine's thread when the work of an earlier role has ended, before
            the node counts as converted, e.g. to recapture graphs. If it raises, the worker ends.
    """

    def __init__(
        self, node: Node, transport: Transport, *, on_role: Callable[[Role], None] | None = None
    ) -> None:
        self._node = node
        self._on_role = on_role
        self._transport = transport
        config = node.config
        self._hello = Hello(
            node_id=config.node_id,
            epoch=config.epoch,
            fingerprint=node.spec.fingerprint(),
            model=node.spec.name,
            granule_tokens=node.spec.granule_tokens,
            handoff=config.handoff,
        )
        self._peers = PeerLines(transport, self._hello, self._serve)
        self._reports = Reports(node)
        self._listener: Listener | None = None
        self._lines: set[Line] = set()
        self._jobs: dict[str, Job] = {}
        self._tasks = Tasks()
        self._is_closing = False
        self._is_converting = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __repr__(self) -> str:
        return f"<Worker {self._hello.node_id!r} {self._node.role.value}, {self.num_jobs} jobs>"

    @property
    def address(self) -> str:
        """Where gateways and peers reach this worker."""
        if self._listener is None:
            raise LocalProtocolError("the worker does not listen yet; await start() first")
        return self._listener.address

    @property
    def num_jobs(self) -> int:
        """Attempts that still hold something here."""
        return len(self._jobs)

    async def start(self, address: str) -> None:
        """Listens and begins to work. Raises AddressError, ListenError."""
        self._listener = await self._transport.listen(address, self._hello, self._accept)
        self._tasks.spawn(self._until_it_fails(self._run_engine()))
        self._tasks.spawn(self._until_it_fails(self._tick()))

    async def aclose(self) -> None:
        """Gives up all jobs, frees what they hold, and ends. Idempotent."""
        self._stop("the worker shuts down")
        await self._is_idle.wait()
        await asyncio.gather(*(line.aclose() for line in tuple(self._lines)))
        await self._peers.aclose()
        await self._tasks.aclose()
        await self._node.tasks.aclose()
        if self._listener is not None:
            await self._listener.aclose()
        self._node.close()

    def _stop(self, reason: str) -> None:
        self._is_closing = True
        for job in tuple(self._jobs.values()):
            job.fail(reason, at_fault=self._hello.node_id)
            job.cancel(reason, EndCode.CLOSING)

    async def _until_it_fails(self, work: Coroutine[object, object, None]) -> None:
        """A worker without its engine loop must not look alive."""
        try:
            await work
        except Exception as error:
            report(f"{self!r} cannot go on", error)
            self._stop(f"the worker failed: {plain_text(error)}")
            await self._is_idle.wait()
            for line in tuple(self._lines):
                line.abort()

    async def _accept(self, channel: Channel) -> None:
        line = Line(channel)
        self._lines.add(line)
        try:
            await self._serve(line)
        finally:
            self._lines.discard(line)

    async def _serve(self, line: Line) -> None:
        """Reads a line until it ends; tells the jobs that used it."""
        reason = "the line was closed"
        try:
            while True:
                self._dispatch(line, await line.receive())
        except RemoteProtocolError as error:
            self._node.counters["protocol_errors"] += 1
            reason = str(error)
        except ChannelClosed as error:
            reason = str(error)
        except TransportError as error:
            self._node.counters["lines_broken"] += 1
            reason = str(error)
        finally:
            line.abort()
            self._reports.remove(line)
            for job in tuple(self._jobs.values()):
                if job.gateway is line:
                    job.cancel("the gateway is gone")
                elif job.peer_line is line:
                    job.peer_lost(reason)

    def _dispatch(self, line: Line, frame: bytes) -> None:
        family = frame[:1]
        if family == TRANSFER:
            self._dispatch_transfer(line, frame[1:])
        elif family == CONTROL:
            self._dispatch_control(line, decode(frame))
        else:
            raise RemoteProtocolError(f"a frame starts with {family!r}; known are 1 and 2")

    def _dispatch_transfer(self, line: Line, body: bytes) -> None:
        message = decode_transfer(body)
        job = self._jobs.get(message.transfer_id)
        if job is not None and job.feed(line, message):
            return
        self._node.counters["late_transfer_messages"] += 1
        if isinstance(message, Offer):
            line.post_transfer(
                Reject(
                    transfer_id=message.transfer_id,
                    code=EndCode.UNKNOWN,
                    reason=f"{self._hello.node_id} expects no such entry",
                )
            )

    def _dispatch_control(self, line: Line, message: Message) -> None:
        match message:
            case Register():
                self._reports.register(line)
            case Prefill() | Expect() | Generate():
                self._admit(line, message)
            case Cancel():
                job = self._jobs.get(message.key)
                if job is not None and job.gateway is line:
                    job.cancel(message.reason)
            case SetRole():
                self._set_role(message)
            case AskSnapshot():
                self._reports.snapshot(line)
            case AskStatus():
                self._reports.status(line, self.num_jobs)
            case _:
                raise RemoteProtocolError(f"a worker takes no {type(message).__name__}")

    def _set_role(self, message: SetRole) -> None:
        node = self._node
        try:
            wanted = Role(message.role)
        except ValueError as error:
            raise RemoteProtocolError(f"unknown role {message.role!r}") from error
        if message.prefill_budget < 0:
            raise RemoteProtocolError(f"prefill_budget is {message.prefill_budget}")
        phase = ChangePhase.FAILED
        if node.config.allows(wanted):
            phase = node.conversion.ask(wanted, message.plan_epoch)
        if phase is not ChangePhase.FAILED:
            segment = node.engine.segment_tokens
            node.schedule.pace(decode_rounds(segment, message.prefill_budget or None))
        if phase is ChangePhase.STARTED:
            self._give_back()
            if self._is_drained and self._on_role is None:
                node.conversion.drained()
                phase = ChangePhase.DONE
        self._reports.role(message.plan_epoch, phase)
        self._check_drained()

    def _give_back(self) -> None:
        """Prompts that nobody has begun are sent elsewhere: they need not wait for this node."""
        for job in tuple(self._jobs.values()):
            if not job.is_allowed and not job.is_begun:
                reason = f"{self._hello.node_id} changes its role to {self._node.role.value}"
                job.fail(reason, at_fault=self._hello.node_id, busy=True)
                job.cancel(reason)

    @property
    def _is_drained(self) -> bool:
        """Whether the present role would admit everything that is here."""
        return all(job.is_allowed for job in self._jobs.values())

    def _check_drained(self) -> None:
        is_due = self._node.conversion.is_draining and self._is_drained
        if is_due and not self._is_converting and not self._is_closing:
            self._is_converting = True
            self._tasks.spawn(self._until_it_fails(self._convert()))

    async def _convert(self) -> None:
        node = self._node
        try:
            # Other roles, and work for them, may come before this begins and while it rebuilds.
            while node.conversion.is_draining and self._is_drained:
                role = node.role
                if self._on_role is not None:
                    await node.in_engine(partial(self._on_role, role))
                if node.role is role and self._is_drained:
                    self._reports.role(node.conversion.drained(), ChangePhase.DONE)
        finally:
            self._is_converting = False

    def _admit(self, line: Line, work: Work) -> None:
        refusal, busy = self._refusal(work), True
        if refusal is None:
            try:
                self._start_job(line, work)
            except CapacityError as error:
                # With nobody else here it will not fit a little later either.
                refusal, busy = str(error), bool(self._jobs)
            except Exception as error:
                if not isinstance(error, PrfaasError):
                    report(f"{work.key!r} could not be admitted", error)
                refusal, busy = plain_text(error), False
        if refusal is None:
            self._node.counters["admitted"] += 1
            return
        self._node.counters["refused"] += 1
        line.post(
            Failed(
                request_id=work.request_id,
                attempt=work.attempt,
                stage="admission",
                reason=f"{self._hello.node_id}: {refusal}",
                retryable=True,
                at_fault=self._hello.node_id,
                busy=busy,
            )
        )

    def _refusal(self, work: Work) -> str | None:
        role = self._node.role
        if self._is_closing:
            return "the worker shuts down"
        if not admits(role, work):
            return f"role {role.value} admits no {type(work).__name__}; wait for the next plan"
        if work.key in self._jobs:
            return f"attempt {work.key!r} is here already"
        limit = self._node.config.max_requests
        if len(self._jobs) >= limit:
            return f"{len(self._jobs)} requests are here, at most {limit} may be; try another node"
        return None

    def _start_job(self, line: Line, work: Work) -> None:
        node = self._node
        try:
            if isinstance(work, Expect):
                job: Job = DecodeJob(node, work, line, self._job_over)
            else:
                job = PrefillJob(node, work, line, self._job_over)
        except BaseException:
            node.cache.release(RequestId(work.key))
            raise
        self._jobs[work.key] = job
        self._is_idle.clear()
        if isinstance(job, PrefillJob) and isinstance(work, Prefill):
            self._tasks.spawn(job.dial(self._peers, work))

    def _job_over(self, job: Job) -> None:
        del self._jobs[job.key]
        if not self._jobs:
            self._is_idle.set()
        self._check_drained()

    async def _run_engine(self) -> None:
        node = self._node
        while True:
            step = node.schedule.next_step()
            if step is None:
                node.work_arrived.clear()
                await node.work_arrived.wait()
            else:
                await self._run_step(step)
                # Let frames and deliveries in: one step may follow another without a pause.
                await asyncio.sleep(0)

    async def _run_step(self, step: PrefillStep | DecodeStep) -> None:
        job = self._jobs[step.key]
        try:
            if isinstance(step, PrefillStep):
                await job.prefill_segment()
            else:
                await job.decode_step()
        except Exception as error:
            # One request's failure, even a bug of ours, must not take the others down.
            job.fail_step(error)
            job.cancel(plain_text(error), EndCode.FAILED)

    async def _tick(self) -> None:
        node = self._node
        while True:
            await asyncio.sleep(node.config.report_s)
            delivered = self._peers.take_deliveries()
            now = node.clock()
            for job in tuple(self._jobs.values()):
                if job.until_s <= now:
                    reason = "its deadline has passed, and the gateway has not called it off"
                    job.fail(reason, retryable=False)
                    job.cancel(reason, EndCode.EXPIRED)
                else:
                    job.tick(delivered.keys())
            self._reports.cache()
            self._reports.rates(
                (d for samples in delivered.values() for d in samples), self._peers.take_resent()
            )
