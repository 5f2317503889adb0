"""The worker: one process of a cluster. Its role is only an admission policy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from prfaas.core import GroupId, Role
from prfaas.errors import (
    ChannelClosed,
    LocalProtocolError,
    PrfaasError,
    RemoteProtocolError,
    TransportError,
)
from prfaas.runtime.decode import DecodeJob
from prfaas.runtime.job import Job, Reply
from prfaas.runtime.messages import (
    CONTROL,
    TRANSFER,
    AskSnapshot,
    AskStatus,
    CacheBody,
    CacheChanged,
    CacheSnapshot,
    Cancel,
    Expect,
    Failed,
    Generate,
    Message,
    NodeInfo,
    Prefill,
    Rates,
    Register,
    RoleSet,
    SetRole,
    Status,
    decode,
    encode,
)
from prfaas.runtime.node import Node
from prfaas.runtime.peers import PeerChannels
from prfaas.runtime.prefill import PrefillJob
from prfaas.runtime.schedule import PrefillStep
from prfaas.seams import Channel, Hello, Listener, Transport
from prfaas.transfer import EndCode, Offer, Reject
from prfaas.transfer import decode as decode_transfer
from prfaas.transfer import encode as encode_transfer


class Worker:
    """Serves prefill, decode or both, for gateways that register and peers that offer entries.

    Args:
        node: its resources; closed together with the worker.
        transport: carries control frames and entries.
    """

    def __init__(self, node: Node, transport: Transport) -> None:
        self._node = node
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
        self._peers = PeerChannels(transport, self._hello, self._serve)
        self._listener: Listener | None = None
        self._gateways: set[Channel] = set()
        self._jobs: dict[str, Job] = {}
        self._replies: dict[str, Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def address(self) -> str:
        """Where gateways and peers reach this worker."""
        if self._listener is None:
            raise LocalProtocolError("the worker does not listen yet; await start() first")
        return self._listener.address

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    async def start(self, address: str) -> None:
        """Listens and begins to work. Raises AddressError, ListenError."""
        self._listener = await self._transport.listen(address, self._hello, self._accept)
        self._spawn(self._run_engine())
        self._spawn(self._tick())

    async def aclose(self) -> None:
        """Gives up all jobs, frees what they hold, and ends. Idempotent."""
        for job in tuple(self._jobs.values()):
            await job.cancel("the worker shuts down")
        await self._idle.wait()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peers.aclose()
        if self._listener is not None:
            await self._listener.aclose()
        self._node.close()

    async def _accept(self, channel: Channel) -> None:
        try:
            await self._serve(channel)
        finally:
            self._gateways.discard(channel)
            for key, reply in tuple(self._replies.items()):
                if reply is channel and key in self._jobs:
                    await self._jobs[key].cancel("the gateway is gone")

    async def _serve(self, channel: Channel) -> None:
        """Reads a channel until it ends; tells the jobs that used it."""
        try:
            while True:
                await self._dispatch(channel, await channel.receive())
        except RemoteProtocolError as error:
            self._node.counters["protocol_errors"] += 1
            channel.abort()
            self._lose_peer(channel, str(error))
        except ChannelClosed as error:
            self._lose_peer(channel, str(error))
        except TransportError as error:
            self._node.counters["channels_broken"] += 1
            self._lose_peer(channel, str(error))

    def _lose_peer(self, channel: Channel, reason: str) -> None:
        for job in tuple(self._jobs.values()):
            if _transfer_channel(job) is channel:
                job.peer_lost(reason)

    async def _dispatch(self, channel: Channel, frame: bytes) -> None:
        family = frame[:1]
        if family == TRANSFER:
            await self._dispatch_transfer(channel, frame[1:])
        elif family == CONTROL:
            await self._dispatch_control(channel, decode(frame))
        else:
            raise RemoteProtocolError(f"a frame starts with {family!r}; known are 1 and 2")

    async def _dispatch_transfer(self, channel: Channel, body: bytes) -> None:
        message = decode_transfer(body)
        job = self._jobs.get(message.transfer_id)
        if isinstance(job, DecodeJob):
            job.feed(channel, message)
        elif isinstance(job, PrefillJob) and job.outgoing is not None:
            job.outgoing.feed(message)
        else:
            self._node.counters["late_transfer_messages"] += 1
            if isinstance(message, Offer):
                refusal = Reject(
                    transfer_id=message.transfer_id,
                    code=EndCode.UNKNOWN,
                    reason=f"{self._hello.node_id} expects no such entry",
                )
                await channel.send(TRANSFER + encode_transfer(refusal))

    async def _dispatch_control(self, channel: Channel, message: Message) -> None:
        match message:
            case Register():
                await self._register(channel)
            case Prefill() | Expect() | Generate():
                await self._admit(channel, message)
            case Cancel():
                job = self._jobs.get(message.key)
                if job is not None:
                    await job.cancel(message.reason)
            case SetRole():
                await self._set_role(channel, message)
            case AskSnapshot():
                await channel.send(encode(self._snapshot()))
            case AskStatus():
                status = Status(
                    node_id=self._hello.node_id,
                    counts={**self._node.counts(), "jobs": len(self._jobs)},
                    config=dict(self._node.effective_config()),
                )
                await channel.send(encode(status))
            case _:
                raise RemoteProtocolError(f"a worker takes no {type(message).__name__}")

    async def _register(self, channel: Channel) -> None:
        config = self._node.config
        await channel.send(
            encode(
                NodeInfo(
                    node_id=config.node_id,
                    cluster_id=config.cluster_id,
                    kind=config.kind.value,
                    role=self._node.role.value,
                    epoch=config.epoch,
                    block_size=self._node.geometry.block_size,
                )
            )
        )
        await self._report_cache()
        await channel.send(encode(self._snapshot()))
        self._gateways.add(channel)

    def _snapshot(self) -> CacheSnapshot:
        sequence, stored = self._node.cache.snapshot()
        return CacheSnapshot(sequence=sequence, stored=dict(stored))

    async def _set_role(self, channel: Channel, message: SetRole) -> None:
        try:
            self._node.role = Role(message.role)
        except ValueError as error:
            raise RemoteProtocolError(f"unknown role {message.role!r}") from error
        await channel.send(encode(RoleSet(role=message.role, plan_epoch=message.plan_epoch)))

    async def _admit(self, channel: Channel, work: Prefill | Expect | Generate) -> None:
        node = self._node

        async def reply(message: Message) -> None:
            try:
                await channel.send(encode(message))
            except TransportError:
                node.counters["replies_lost"] += 1

        refusal = self._refusal(work)
        if refusal is None:
            try:
                self._jobs[work.key] = job = self._make_job(work, reply)
            except PrfaasError as error:
                refusal = str(error)
        if refusal is not None:
            node.counters["refused"] += 1
            await reply(
                Failed(
                    request_id=work.request_id,
                    attempt=work.attempt,
                    stage="admission",
                    reason=f"{node.config.node_id}: {refusal}",
                    retryable=True,
                )
            )
            return
        node.counters["admitted"] += 1
        self._replies[work.key] = channel
        self._idle.clear()
        if isinstance(job, DecodeJob):
            await job.announce()
        elif isinstance(job, PrefillJob) and isinstance(work, Prefill):
            self._spawn(self._send_over(job, work))

    def _refusal(self, work: Prefill | Expect | Generate) -> str | None:
        role = self._node.role
        num_tokens = len(work.tokens) // 4
        # A prompt of one token leaves nothing to ship under Handoff.BEFORE_LAST.
        is_replay = num_tokens == 1 and role.decodes
        allowed = {
            Prefill: role.prefills,
            Expect: role.decodes,
            Generate: role is Role.MIXED or is_replay,
        }[type(work)]
        if not allowed:
            return f"role {role.value} admits no {type(work).__name__}; wait for the next plan"
        if work.key in self._jobs:
            return f"attempt {work.key!r} is here already"
        limit = self._node.config.max_requests
        if len(self._jobs) >= limit:
            return f"{len(self._jobs)} requests are here, at most {limit} may be; try another node"
        return None

    def _make_job(self, work: Prefill | Expect | Generate, reply: Reply) -> Job:
        if isinstance(work, Expect):
            return DecodeJob(self._node, work, reply, self._job_over)
        return PrefillJob(self._node, work, reply, self._job_over)

    async def _send_over(self, job: PrefillJob, work: Prefill) -> None:
        try:
            channel = await self._peers.get(work.decode_address)
        except PrfaasError as error:
            if not job.is_over:
                await job.fail(str(error), at_fault=work.decode_node)
                await job.release()
            return
        if not job.is_over:
            job.send_over(channel)

    def _job_over(self, job: Job) -> None:
        self._jobs.pop(job.key, None)
        self._replies.pop(job.key, None)
        if not self._jobs:
            self._idle.set()

    async def _run_engine(self) -> None:
        node = self._node
        while True:
            step = node.schedule.next_step()
            if step is None:
                node.work_arrived.clear()
                await node.work_arrived.wait()
                continue
            job = self._jobs.get(step.key)
            if job is None:
                raise LocalProtocolError(f"the schedule names {step.key!r}, which is no job here")
            try:
                if isinstance(step, PrefillStep):
                    await job.prefill_segment()
                else:
                    await job.decode_step()
            except Exception as error:
                # One request's failure, even a bug of ours, must not take the others down.
                node.counters["steps_failed"] += 1
                if not isinstance(error, PrfaasError):
                    _report("a step failed unexpectedly", error)
                await job.fail(str(error), at_fault=node.config.node_id)
                await job.cancel(str(error))
            # Let frames and deliveries in: one step may follow another without a pause.
            await asyncio.sleep(0)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._node.config.report_s)
            for job in tuple(self._jobs.values()):
                await job.tick()
            await self._report_cache()
            await self._report_rates()

    async def _report_cache(self) -> None:
        events = self._node.cache.take_events()
        if not events or not self._gateways:
            return
        bodies = tuple(
            CacheBody(
                sequence=event.sequence,
                group_id=GroupId(event.group_id),
                stored=tuple(event.stored),
                removed=tuple(event.removed),
            )
            for event in events
        )
        await self._tell_gateways(CacheChanged(events=bodies))

    async def _report_rates(self) -> None:
        deliveries = self._peers.take_deliveries()
        if deliveries and self._gateways:
            now = self._node.clock()
            await self._tell_gateways(
                Rates(
                    deliveries=tuple(
                        (d.num_bytes, now - d.start_s, now - d.end_s) for d in deliveries
                    )
                )
            )

    async def _tell_gateways(self, message: Message) -> None:
        for channel in tuple(self._gateways):
            try:
                await channel.send(encode(message))
            except TransportError:
                self._gateways.discard(channel)

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.ensure_future(run())
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _report("a worker task failed", error)


def _report(message: str, error: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


def _transfer_channel(job: Job) -> Channel | None:
    if isinstance(job, DecodeJob):
        return job.channel
    if isinstance(job, PrefillJob) and job.outgoing is not None:
        return job.outgoing.channel
    return None
