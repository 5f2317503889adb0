"""One request at the gateway, told by its workers in any order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prfaas.core import ClusterId, ClusterKind, Handoff, NodeId, Role
from prfaas.runtime.attempt import Attempt, AttemptFailed, Generation
from prfaas.runtime.line import Line
from prfaas.runtime.links import WorkerLink
from prfaas.runtime.messages import (
    Cancel,
    Expect,
    Expecting,
    Failed,
    Finished,
    Generate,
    Prefill,
    Prefilled,
    Sent,
    Token,
    decode,
)
from prfaas.seams import NodeUp, RouteReason, RoutingDecision
from prfaas.testing.engine import toy_spec
from prfaas.testing.transport import DIALLER, LISTENER
from prfaas.transport.inproc import InProcChannel
from toys import a_request, in_loop


class Far:
    """A worker's end of a link."""

    def __init__(self, name: str) -> None:
        near, self.channel = InProcChannel.pair(DIALLER, LISTENER, lambda: 0.0)
        node = NodeUp(
            node_id=NodeId(name),
            cluster_id=ClusterId(name),
            kind=ClusterKind.PD,
            role=Role.MIXED,
            epoch=1,
        )
        self.link = WorkerLink(node=node, block_size=16, line=Line(near), address=f"at {name}")

    async def hear(self) -> Any:
        async with asyncio.timeout(5):
            return decode(await self.channel.receive())


class Case:
    """An attempt between two workers, and everything that they could say."""

    def __init__(
        self,
        *,
        local: bool = False,
        num_new: int = 3,
        num_tokens: int = 90,
        handoff: Handoff = Handoff.AFTER_PROMPT,
    ) -> None:
        self.phases: list[str] = []
        self.request = a_request(num_tokens, max_new_tokens=num_new)
        self.attempt = Attempt(
            self.request,
            toy_spec(),
            handoff,
            lambda _, phase: self.phases.append(phase),
            lambda: 0.0,
        )
        self.decode, self.prefill = Far("decode"), Far("prefill")
        if local:
            self.prefill = self.decode

    @property
    def of(self) -> dict[str, Any]:
        return {"request_id": self.request.request_id, "attempt": self.attempt.number}

    def start(self) -> asyncio.Task[Generation]:
        decision = RoutingDecision(
            request_id=self.request.request_id,
            decode_node=self.decode.link.node_id,
            prefill_node=self.prefill.link.node_id,
            offloaded=True,
            reason=RouteReason.LONG,
            cached_tokens=0,
            uncached_tokens=90,
            routed_tokens=90,
            held_tokens=0,
            threshold_tokens=0,
            predicted_bytes=0,
            predicted_ttft_s=None,
            view_version=1,
        )
        run = self.attempt.run(decision, self.prefill.link, self.decode.link)
        return asyncio.create_task(run)

    async def sent_off(self) -> asyncio.Task[Generation]:
        """The attempt up to where both workers know of it."""
        running = self.start()
        assert isinstance(await self.decode.hear(), Expect)
        self.says(self.decode, Expecting(**self.of, held_tokens=0))
        prefill = await self.prefill.hear()
        assert isinstance(prefill, Prefill)
        assert prefill.decode_address == "at decode"
        return running

    def says(self, far: Far, message: Any) -> None:
        assert self.attempt.hear(far.link, message)

    def prefilled(self) -> Prefilled:
        return Prefilled(
            **self.of,
            token=50,
            logits=b"",
            cached_tokens=0,
            prefilled_tokens=90,
            queue_s=0.0,
            prefill_s=0.0,
        )

    def token(self, index: int) -> Token:
        return Token(**self.of, index=index, token=50 + index, logits=b"")

    def finished(self, *, decode_prefilled_tokens: int = 0) -> Finished:
        zeros = dict.fromkeys(("received_bytes", "expected_bytes", "held_tokens"), 0)
        more = {"decode_wait_s": 0.0, "decode_step_s": 0.0}
        return Finished(**self.of, **zeros, **more, decode_prefilled_tokens=decode_prefilled_tokens)

    def sent(self) -> Sent:
        return Sent(**self.of, sent_bytes=1, transfer_s=0.25)


@in_loop
async def test_the_last_token_may_overtake_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prfaas.runtime.attempt.SENT_GRACE_S", 0.005)
    case = Case()
    running = await case.sent_off()
    for message in (case.token(1), case.token(2), case.finished()):
        case.says(case.decode, message)
    await asyncio.sleep(0.02)
    assert not running.done()
    case.says(case.prefill, case.prefilled())
    case.says(case.prefill, case.sent())
    generation = await running
    assert generation.tokens == (50, 51, 52)
    assert generation.record["transfer_s"] == 0.25
    assert case.phases == ["prefill", "decode", "done"]


@pytest.mark.parametrize("who", ["nobody", "prefill"])
@in_loop
async def test_an_answer_does_not_wait_for_timings(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prfaas.runtime.attempt.SENT_GRACE_S", 0.02)
    case = Case(num_new=1)
    running = await case.sent_off()
    case.says(case.prefill, case.prefilled())
    case.says(case.decode, case.finished())
    if who == "prefill":
        case.attempt.lose(case.prefill.link, "gone")
    generation = await running
    assert generation.tokens == (50,)
    assert generation.record["transfer_s"] is None
    assert case.phases == ["prefill", "transfer", "done"]


@pytest.mark.parametrize(("replayed_tokens", "offloaded"), [(0, True), (1, True), (2, False)])
@in_loop
async def test_a_prompt_that_the_decode_node_computed_was_not_offloaded(
    replayed_tokens: int, offloaded: bool
) -> None:
    case = Case(num_new=1)
    running = await case.sent_off()
    case.says(case.prefill, case.prefilled())
    case.says(case.prefill, case.sent())
    case.says(case.decode, case.finished(decode_prefilled_tokens=replayed_tokens))
    record = (await running).record
    assert record["offloaded"] is offloaded
    assert record["decode_prefilled_tokens"] == replayed_tokens


@pytest.mark.parametrize(
    "options", [{"local": True}, {"num_tokens": 1, "handoff": Handoff.BEFORE_LAST}], ids=str
)
@in_loop
async def test_where_nothing_is_shipped_nothing_is_offloaded(options: dict[str, Any]) -> None:
    case = Case(num_new=1, **options)
    running = case.start()
    assert isinstance(await case.decode.hear(), Generate)
    case.says(case.decode, case.prefilled())
    case.says(case.decode, case.finished())
    assert (await running).record["offloaded"] is False


@pytest.mark.parametrize("name", ["prefill", "decode"])
@in_loop
async def test_a_lost_node_ends_the_attempt_and_is_named(name: str) -> None:
    case = Case()
    running = await case.sent_off()
    case.attempt.lose(Far("another").link, "not ours")
    case.attempt.lose(getattr(case, name).link, "gone")
    with pytest.raises(AttemptFailed, match="gone") as failed:
        await running
    assert failed.value.at_fault == name
    assert failed.value.retryable
    assert not failed.value.busy


@in_loop
async def test_a_prefill_node_is_not_needed_once_its_cache_is_sent() -> None:
    case = Case()
    running = await case.sent_off()
    case.says(case.prefill, case.prefilled())
    case.says(case.prefill, case.sent())
    case.attempt.lose(case.prefill.link, "gone")
    for message in (case.token(1), case.token(2), case.finished()):
        case.says(case.decode, message)
    assert (await running).tokens == (50, 51, 52)


@in_loop
async def test_only_the_nodes_of_the_attempt_that_runs_are_heard() -> None:
    case = Case()
    running = await case.sent_off()
    old, stranger = case.token(1), Far("decode")
    assert not case.attempt.hear(stranger.link, case.token(1))
    case.says(case.decode, Failed(**case.of, stage="decode", reason="no", retryable=False))
    with pytest.raises(AttemptFailed, match=r"decode of request .* failed: no") as failed:
        await running
    assert not failed.value.retryable
    case.attempt.next()
    assert not case.attempt.hear(case.decode.link, old)
    for far in (case.decode, case.prefill):
        cancel = await far.hear()
        assert isinstance(cancel, Cancel)
        assert cancel.attempt == 0
    case.attempt.lose(case.decode.link, "of the time before")
    running = await case.sent_off()
    assert not case.attempt.hear(case.decode.link, old)
    assert case.attempt.hear(case.prefill.link, case.prefilled())
    await asyncio.sleep(0)
    assert not running.done()
    running.cancel()


@in_loop
async def test_an_answer_with_a_gap_is_no_answer() -> None:
    case = Case(local=True)
    running = case.start()
    assert isinstance(await case.decode.hear(), Generate)
    for message in (case.prefilled(), case.token(2), case.finished()):
        case.says(case.decode, message)
    with pytest.raises(AttemptFailed, match=r"without tokens \[1\]") as failed:
        await running
    assert failed.value.at_fault == "decode"


@in_loop
async def test_a_line_that_is_gone_already_is_the_fault_of_its_node() -> None:
    case = Case()
    case.decode.link.line.abort()
    with pytest.raises(AttemptFailed) as failed:
        await case.start()
    assert failed.value.at_fault == "decode"
    case.attempt.give_up()
    case.attempt.give_up()


@in_loop
async def test_a_busy_node_is_told_from_a_failed_one() -> None:
    case = Case()
    running = case.start()
    await case.decode.hear()
    case.says(
        case.decode,
        Failed(
            **case.of,
            stage="admission",
            reason="full",
            retryable=True,
            at_fault="decode",
            busy=True,
        ),
    )
    with pytest.raises(AttemptFailed) as failed:
        await running
    assert failed.value.busy
    assert failed.value.at_fault == "decode"
