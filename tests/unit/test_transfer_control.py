"""The control machines: the good case, what both sides must agree on, and when it is complete."""

from __future__ import annotations

import attrs
import pytest

from helpers import Put, TransferPair
from pools import FULL, HYBRID, MLA, STATE, WINDOW, tiny_spec
from prfaas.core import DType, GroupId, RequestId
from prfaas.errors import (
    ConfigError,
    LocalProtocolError,
    RemoteProtocolError,
    TransferAborted,
)
from prfaas.seams.transport import WindowRef
from prfaas.spec import FullAttentionSpec
from prfaas.transfer import (
    Abort,
    BytesLanded,
    Cancel,
    Done,
    EndCode,
    Ended,
    Installed,
    Landed,
    Offer,
    OpenWindow,
    Progress,
    RankDone,
    ReceiverControl,
    Reject,
    ReleaseEntry,
    Send,
    SenderControl,
    StartSending,
    TransferState,
    TransferTerms,
    WindowOpened,
)
from transfer_parts import (
    ACCEPT,
    CLOSE,
    ID,
    INSTALL,
    NUM_BYTES,
    RELEASE,
    TERMS,
    WINDOW_REF,
    accepted_receiver,
    accepted_sender,
    offer,
    said,
    sender,
)


def test_a_transfer_from_offer_to_landed() -> None:
    source = sender(lease_s=10.0)
    target = ReceiverControl(TERMS, 0.0)
    (offered,) = source.commands()
    assert isinstance(offered, Send)
    assert offered.message == Offer(
        transfer_id=ID,
        request_id=RequestId("r"),
        num_tokens=19,
        kv_tokens=19,
        state_tokens=19,
        num_senders=1,
        group_bytes={g.group_id: g.entry_bytes(19) for g in HYBRID.groups},
        lease_s=10.0,
    )
    assert target.receive(offered.message, 1.0) == ()
    assert said(target) == [OpenWindow(transfer_id=ID, start_token=0, num_bytes=NUM_BYTES)]
    assert target.receive(WindowOpened(WINDOW_REF), 1.0) == ()
    assert said(target) == [Send(ACCEPT)]
    assert target.state is TransferState.ACCEPTED

    assert source.receive(ACCEPT, 2.0) == ()
    assert said(source) == [StartSending(transfer_id=ID, window=WINDOW_REF, start_token=0)]
    assert source.state is TransferState.ACCEPTED
    source.receive(Progress(), 3.0)
    assert source.state is TransferState.SENDING
    source.receive(RankDone(sent_bytes=NUM_BYTES, first_token=7), 3.1)
    done = Done(transfer_id=ID, sender_rank=0, sent_bytes=NUM_BYTES, first_token=7)
    assert said(source) == [Send(done)]
    assert source.state is TransferState.DONE

    assert target.receive(done, 4.0) == ()
    assert target.state is TransferState.COMPLETE
    assert said(target) == [CLOSE, INSTALL]
    assert target.next_deadline() is None
    (landed,) = target.receive(Installed(), 99.0)
    assert landed == target.ended
    assert landed.error is None
    assert said(target) == [Send(Landed(transfer_id=ID))]

    (ended,) = source.receive(Landed(transfer_id=ID), 5.0)
    assert ended == Ended(transfer_id=ID, request_id=RequestId("r"), state=TransferState.LANDED)
    assert said(source) == [RELEASE]
    assert source.next_deadline() is None
    assert source.commands() == ()


def test_a_receiver_that_holds_rows_asks_for_the_rest() -> None:
    target = ReceiverControl(TERMS, 0.0, start_token=8)
    target.receive(offer(), 0.0)
    needed = HYBRID.kv_bytes_delta(19, 8)
    assert said(target) == [OpenWindow(transfer_id=ID, start_token=8, num_bytes=needed)]
    target.receive(WindowOpened(WindowRef(b"w", needed)), 0.0)
    (send,) = said(target)
    assert isinstance(send, Send)
    source = sender()
    source.commands()
    source.receive(send.message, 0.0)
    assert said(source) == [
        StartSending(transfer_id=ID, window=WindowRef(b"w", needed), start_token=8)
    ]


# H09, H13, H14, H26: the two sides must mean the same entry.


def other_spec(*layers: object) -> TransferTerms:
    return attrs.evolve(TERMS, spec=tiny_spec(*layers))  # type: ignore[arg-type]


WIDER = FullAttentionSpec(num_kv_heads=1, key_dim=3, value_dim=2, dtype=DType.BFLOAT16)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (attrs.evolve(TERMS, num_tokens=18), "num_tokens: receiver 18, sender 19"),
        (attrs.evolve(TERMS, request_id=RequestId("q")), "request_id: receiver q, sender r"),
        (other_spec(FULL), "state_tokens: receiver None, sender 19"),
        (
            other_spec(STATE, WINDOW, WIDER, None, STATE, WIDER, MLA),
            r"group_bytes\[0\] \(full_attention\): receiver 380, sender 190",
        ),
        (
            other_spec(STATE, WINDOW, FULL, None, STATE, FULL),
            r"group_bytes\[1\] \(linear_state\): receiver 108, sender 152",
        ),
    ],
)
def test_h26_an_offer_of_another_entry_is_rejected_at_the_door(
    terms: TransferTerms, message: str
) -> None:
    target = ReceiverControl(terms, 0.0)
    (ended,) = target.receive(offer(), 1.0)
    assert ended.state is TransferState.REJECTED
    assert ended.code is EndCode.MISMATCH
    assert not ended.by_peer
    with pytest.raises(TransferAborted, match=message):
        raise ended.error or AssertionError
    reject, release = said(target)
    assert reject == Send(Reject(transfer_id=ID, code=EndCode.MISMATCH, reason=ended.reason))
    assert release == ReleaseEntry(transfer_id=ID, request_id=terms.request_id)


def test_h09_the_offer_says_how_many_tokens_state_and_rows_cover() -> None:
    assert (offer().kv_tokens, offer().state_tokens) == (19, 19)
    (command,) = SenderControl(other_spec(FULL), 0.0).commands()
    assert isinstance(command, Send)
    assert isinstance(command.message, Offer)
    assert command.message.state_tokens is None
    target = ReceiverControl(TERMS, 0.0)
    (ended,) = target.receive(offer(state_tokens=None), 1.0)
    assert ended.reason.startswith("offer differs in state_tokens: receiver 19, sender None")


def test_h13_h14_a_missing_or_unknown_group_is_named() -> None:
    sizes = offer().group_bytes
    missing = {g: n for g, n in sizes.items() if g != 2}
    (ended,) = ReceiverControl(TERMS, 0.0).receive(offer(group_bytes=missing), 1.0)
    assert "group_bytes[2] (linear_state): receiver 108, sender None" in ended.reason
    unknown = {**sizes, GroupId(9): 1}
    (ended,) = ReceiverControl(TERMS, 0.0).receive(offer(group_bytes=unknown), 1.0)
    assert "group_bytes[9] (unknown group): receiver None, sender 1" in ended.reason


def test_h13_an_empty_group_and_an_idle_sender_do_not_keep_the_receiver_waiting() -> None:
    spec = tiny_spec(FULL, STATE, WINDOW)
    # The receiver holds every row, so the first group has nothing to send, and the last rank too.
    pair = TransferPair(spec, 16, start_token=16, num_senders=4)
    pair.run()
    assert pair.installed
    assert pair.ended["sender"].state is TransferState.LANDED
    assert pair.sender.num_ignored == pair.receiver.num_ignored == 0


def test_h13_every_sender_must_be_done() -> None:
    target = accepted_receiver()
    target.receive(Done(transfer_id=ID, sender_rank=0, sent_bytes=NUM_BYTES), 1.0)
    assert target.state is TransferState.ACCEPTED
    assert said(target) == []
    target.receive(Done(transfer_id=ID, sender_rank=1, sent_bytes=0), 1.0)
    assert target.state is TransferState.COMPLETE


# H11: nothing is complete before its bytes are there.


def test_h11_landed_is_said_only_when_every_byte_is_acknowledged() -> None:
    pair = TransferPair()
    pair.deliver_to_receiver()
    pair.deliver_to_sender()
    for piece in pair.pieces():
        pair.make_ready(piece)
    pair.finish()
    while not pair.senders[0].is_complete:
        assert not pair.messages(pair.to_sender), "Landed before the bytes"
        assert pair.receiver.state is TransferState.ACCEPTED
        pair.start_puts()
        one = pair.puts[0]
        pair.acknowledge(one) if one.landed else pair.land(one)
    pair.run()
    assert pair.installed


def test_h11_done_with_too_few_or_too_many_bytes_is_refused() -> None:
    target = accepted_receiver()
    before = repr(target)
    for rank, sent in ((0, NUM_BYTES + 1), (2, 0), (1023, NUM_BYTES)):
        with pytest.raises(RemoteProtocolError, match=f"Done of rank {rank}"):
            target.receive(Done(transfer_id=ID, sender_rank=rank, sent_bytes=sent), 1.0)
        assert repr(target) == before
    target.receive(Done(transfer_id=ID, sender_rank=0, sent_bytes=NUM_BYTES - 1), 1.0)
    with pytest.raises(RemoteProtocolError, match="say it once each"):
        target.receive(Done(transfer_id=ID, sender_rank=0, sent_bytes=1), 1.0)
    before = repr(target)
    with pytest.raises(RemoteProtocolError, match=rf"{NUM_BYTES - 1} bytes sent by 2 of 2 senders"):
        target.receive(Done(transfer_id=ID, sender_rank=1, sent_bytes=0), 1.0)
    assert repr(target) == before
    target.receive(Cancel(EndCode.PROTOCOL, "the sums are wrong"), 1.0)
    abort, close, release = said(target)
    assert abort == Send(Abort(transfer_id=ID, code=EndCode.PROTOCOL, reason="the sums are wrong"))
    assert (close, release) == (CLOSE, RELEASE)


def test_h11_a_receiver_that_counts_landings_waits_for_both() -> None:
    for done_first in (True, False):
        target = accepted_receiver(reports_landings=True)
        dones = [
            Done(transfer_id=ID, sender_rank=rank, sent_bytes=sent)
            for rank, sent in ((0, 10), (1, NUM_BYTES - 10))
        ]
        landings = [BytesLanded(num_bytes=n) for n in (NUM_BYTES - 1, 0, 1)]
        steps = [*dones, *landings] if done_first else [*landings, *dones]
        for step in steps[:-1]:
            target.receive(step, 1.0)
            assert target.state is TransferState.ACCEPTED
        target.receive(steps[-1], 1.0)
        assert said(target) == [CLOSE, INSTALL]


def test_h11_landings_are_counted_once_and_only_where_they_are_reported() -> None:
    target = accepted_receiver(reports_landings=True)
    target.receive(BytesLanded(num_bytes=NUM_BYTES), 1.0)
    for num_bytes in (1, -1):
        with pytest.raises(LocalProtocolError, match="report only bytes that are new"):
            target.receive(BytesLanded(num_bytes=num_bytes), 1.0)
    with pytest.raises(LocalProtocolError, match="only with reports_landings"):
        accepted_receiver().receive(BytesLanded(num_bytes=1), 1.0)


def test_h11_a_rank_is_not_done_before_its_puts_are_acknowledged() -> None:
    source = accepted_sender(num_senders=2)
    for rank, sent in ((0, -1), (0, NUM_BYTES + 1)):
        with pytest.raises(LocalProtocolError):
            source.receive(RankDone(sender_rank=rank, sent_bytes=sent), 1.0)
    source.receive(RankDone(sender_rank=1, sent_bytes=10), 1.0)
    before = repr(source)
    for rank, sent in ((0, NUM_BYTES - 11), (0, NUM_BYTES), (2, 0), (1, 9), (1, NUM_BYTES - 10)):
        with pytest.raises(LocalProtocolError):
            source.receive(RankDone(sender_rank=rank, sent_bytes=sent), 1.0)
        assert repr(source) == before
    with pytest.raises(ConfigError, match="Done cannot be sent"):
        source.receive(RankDone(sent_bytes=NUM_BYTES - 10, first_token=-1), 1.0)
    assert repr(source) == before
    source.receive(RankDone(sender_rank=0, sent_bytes=NUM_BYTES - 10), 1.0)
    assert source.state is TransferState.DONE


def test_a_failed_put_is_sent_again_and_lands() -> None:
    pair = TransferPair()
    pair.deliver_to_receiver()
    pair.deliver_to_sender()
    for piece in pair.pieces():
        pair.make_ready(piece)
    pair.start_puts()
    first, second, *_ = pair.puts
    pair.land(first, partly=True)
    pair.land(second)
    pair.fail(Put(second.rank, second.range, landed=True))
    pair.run()
    assert pair.installed
