"""The control machines: legal orders, illegal ones, and what every order leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import attrs
import msgspec
import pytest
from helpers import FULL, HYBRID, MLA, STATE, WINDOW, Put, TransferPair, tiny_spec

from prfaas.core import DType, GroupId, RequestId, TransferId
from prfaas.errors import (
    ConfigError,
    LocalProtocolError,
    RemoteProtocolError,
    TransferAborted,
)
from prfaas.seams.transport import WindowRef
from prfaas.spec import FullAttentionSpec, ModelSpec
from prfaas.transfer import (
    Abort,
    Accept,
    BytesLanded,
    Cancel,
    CloseWindow,
    Command,
    Done,
    EndCode,
    Ended,
    Installed,
    InstallEntry,
    Landed,
    Offer,
    OpenWindow,
    PeerLost,
    Progress,
    RankDone,
    ReceiverControl,
    Reject,
    ReleaseEntry,
    Renew,
    Send,
    SenderControl,
    StartSending,
    StopSending,
    TransferControl,
    TransferState,
    TransferTerms,
    WindowOpened,
)

ID = TransferId("t")
TERMS = TransferTerms(
    transfer_id=ID, request_id=RequestId("r"), spec=HYBRID, num_tokens=19, until_s=100.0
)
NUM_BYTES = HYBRID.kv_bytes(19)
WINDOW_REF = WindowRef(b"w", NUM_BYTES)
ACCEPT = Accept(transfer_id=ID, window_token=b"w", window_bytes=NUM_BYTES, start_token=0)
RELEASE = ReleaseEntry(transfer_id=ID, request_id=RequestId("r"))
CLOSE = CloseWindow(transfer_id=ID)
INSTALL = InstallEntry(transfer_id=ID, request_id=RequestId("r"))


def sender(**options: float) -> SenderControl:
    machine = SenderControl(TERMS, 0.0, num_senders=int(options.pop("num_senders", 1)), **options)
    machine.check()
    return machine


def offer(**changes: object) -> Offer:
    (command,) = sender(lease_s=10.0).commands()
    assert isinstance(command, Send)
    assert isinstance(command.message, Offer)
    return msgspec.structs.replace(command.message, **changes)


def accepted_sender(num_senders: int = 1) -> SenderControl:
    machine = sender(lease_s=10.0, num_senders=num_senders)
    machine.receive(ACCEPT, 1.0)
    machine.commands()
    return machine


def accepted_receiver(**options: bool) -> ReceiverControl:
    machine = ReceiverControl(TERMS, 0.0, **options)
    machine.receive(offer(num_senders=2), 1.0)
    machine.receive(WindowOpened(WINDOW_REF), 1.0)
    machine.commands()
    return machine


def complete_receiver() -> ReceiverControl:
    machine = accepted_receiver()
    machine.receive(Done(transfer_id=ID, sender_rank=0, sent_bytes=NUM_BYTES), 1.0)
    machine.receive(Done(transfer_id=ID, sender_rank=1, sent_bytes=0), 1.0)
    return machine


def said(machine: TransferControl) -> list[Command]:
    machine.check()
    return list(machine.commands())


# The good case.


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
    source.receive(RankDone(sent_bytes=NUM_BYTES), 3.5)
    done = Done(transfer_id=ID, sender_rank=0, sent_bytes=NUM_BYTES)
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
    source.receive(RankDone(sender_rank=1, sent_bytes=10), 1.0)
    before = repr(source)
    for rank, sent in ((0, NUM_BYTES - 11), (0, NUM_BYTES), (0, -1), (2, 0), (1, 9)):
        with pytest.raises(LocalProtocolError):
            source.receive(RankDone(sender_rank=rank, sent_bytes=sent), 1.0)
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


# H20 to H24: ends.


def test_h20_an_aborted_receive_frees_its_blocks_after_closing_the_window() -> None:
    pair = TransferPair()
    pair.deliver_to_receiver()
    pair.kill("sender")
    pair.tell_receiver(Cancel(reason="the client left"))
    assert pair.released["receiver"] == 1
    assert not pair.window_open
    pair.tell_receiver(Done(transfer_id=pair.terms.transfer_id, sender_rank=0, sent_bytes=1))
    assert pair.receiver.num_ignored == 1
    assert pair.released["receiver"] == 1


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_h20_the_blocks_of_a_receiver_whose_sender_died_are_freed_by_the_lease(steps: int) -> None:
    pair = TransferPair(lease_s=10.0, until_s=100.0)
    for deliver in (pair.deliver_to_receiver, pair.deliver_to_sender)[:steps]:
        deliver()
    pair.kill("sender")
    deadline = 10.0 if steps else 100.0
    assert pair.receiver.next_deadline() == deadline
    pair.wait(deadline - 0.1)
    assert pair.released["receiver"] == 0
    pair.wait(0.2)
    assert pair.released["receiver"] == 1
    assert pair.ended["receiver"].code is EndCode.EXPIRED
    assert pair.receiver.next_deadline() is None


def test_h20_a_lost_peer_ends_both_sides_without_a_word() -> None:
    for happened in (1, 2, 3):
        pair = TransferPair()
        pair.deliver_to_receiver()
        if happened > 1:
            pair.deliver_to_sender()
        if happened > 2:
            pair.make_ready(pair.pieces()[0])
            pair.start_puts()
        pair.disconnect()
        assert pair.released == {"sender": 1, "receiver": 1}
        assert not pair.to_receiver
        assert not pair.to_sender
        assert {e.code for e in pair.ended.values()} == {EndCode.PEER_LOST}
        assert all(ended.by_peer for ended in pair.ended.values())


def test_h21_a_reject_frees_the_sender_at_once() -> None:
    target = ReceiverControl(TERMS, 0.0)
    target.receive(offer(), 0.0)
    target.receive(Cancel(EndCode.CAPACITY, "no slot"), 0.0)
    opened, reject, close, release = said(target)
    assert isinstance(opened, OpenWindow)
    assert reject == Send(Reject(transfer_id=ID, code=EndCode.CAPACITY, reason="no slot"))
    assert (close, release) == (CLOSE, RELEASE)

    source = sender()
    source.commands()
    (ended,) = source.receive(Reject(transfer_id=ID, code=EndCode.CAPACITY, reason="no slot"), 0.1)
    assert ended.state is TransferState.REJECTED
    assert ended.by_peer
    assert said(source) == [RELEASE]


def test_h21_a_request_refused_before_the_offer_came_still_frees_the_sender() -> None:
    pair = TransferPair()
    pair.tell_receiver(Cancel(EndCode.CANCELLED, "too long"))
    early = pair.to_sender.popleft()  # the sender's worker may not know the transfer yet
    assert pair.released["receiver"] == 1
    pair.deliver_to_receiver()
    assert list(pair.to_sender) == [early]
    pair.deliver_to_sender()
    assert pair.released["sender"] == 1
    assert pair.ended["sender"].reason == "too long"


def test_a_long_reason_is_cut_to_what_may_be_said() -> None:
    pair = TransferPair()
    pair.tell_receiver(Cancel(EndCode.FAILED, "x" * 5000))
    pair.deliver_to_receiver()
    first, again = pair.messages(pair.to_sender)
    assert first == again
    assert isinstance(first, Reject)
    assert len(first.reason) == 2000
    assert len(pair.ended["receiver"].reason) == 5000


def test_h22_nothing_is_sent_or_installed_after_the_lease() -> None:
    source = sender(lease_s=0.2)
    source.commands()
    (ended,) = source.receive(ACCEPT, 0.5)
    assert ended.state is TransferState.EXPIRED
    abort, release = said(source)
    assert abort == Send(Abort(transfer_id=ID, code=EndCode.EXPIRED, reason=ended.reason))
    assert release == RELEASE
    assert source.num_ignored == 1

    target = accepted_receiver()
    (ended,) = target.receive(Done(transfer_id=ID, sender_rank=0, sent_bytes=NUM_BYTES), 11.0)
    assert ended.code is EndCode.EXPIRED
    assert said(target)[1:] == [CLOSE, RELEASE]


def test_h22_progress_keeps_both_leases_alive_up_to_the_deadline() -> None:
    pair = TransferPair(lease_s=0.2, until_s=2.0)
    pair.deliver_to_receiver()
    pair.deliver_to_sender()
    for _ in range(19):
        pair.wait(0.1)
        pair.tell_sender(Progress())
        while pair.to_receiver:
            pair.deliver_to_receiver()
    assert not pair.ended
    assert pair.sender.next_deadline() <= 2.0
    pair.wait(0.2)
    assert pair.ended["sender"].state is TransferState.EXPIRED
    assert pair.ended["receiver"].state is TransferState.EXPIRED
    assert pair.now < 2.2


def test_progress_is_passed_on_before_the_peers_lease_runs_out_and_not_with_every_put() -> None:
    source = accepted_sender()
    for milliseconds in range(1000, 9000):
        now = milliseconds / 1000
        source.receive(Progress(), now)
    renewals = [c for c in said(source) if c == Send(Renew(transfer_id=ID))]
    assert len(renewals) == 2
    # Progress that was too early to be worth a message is said when it is due.
    assert source.next_deadline() == pytest.approx(3.333 + 3.334 + 3.333, abs=0.01)
    assert source.on_deadline(10.1) == ()
    assert said(source) == [Send(Renew(transfer_id=ID))]
    assert source.next_deadline() == pytest.approx(8.999 + 10)


def test_renew_extends_the_lease_in_every_state_before_the_end() -> None:
    renew = Renew(transfer_id=ID)
    waiting = ReceiverControl(TERMS, 0.0)
    waiting.receive(renew, 5.0)
    assert waiting.next_deadline() == 100.0
    opening = ReceiverControl(TERMS, 0.0)
    opening.receive(offer(), 0.0)
    done = accepted_sender()
    done.receive(RankDone(sent_bytes=NUM_BYTES), 1.0)
    sending = accepted_sender()
    sending.receive(Progress(), 1.0)
    for machine in (opening, accepted_receiver(), sender(lease_s=10.0), accepted_sender(), done):
        state = machine.state
        machine.receive(renew, 5.0)
        assert machine.next_deadline() == 15.0
        machine.receive(renew, 99.0 - 85)
        assert machine.state is state
    done.receive(renew, 20.0)
    done.receive(Progress(), 29.0)
    done.receive(renew, 38.0)
    assert done.next_deadline() <= 48.0
    sending.receive(renew, 10.0)
    assert sending.state is TransferState.SENDING


@pytest.mark.parametrize("code", [EndCode.CANCELLED, EndCode.FAILED, EndCode.CLOSING])
def test_h23_an_abort_of_the_sender_reaches_the_receiver(code: EndCode) -> None:
    pair = TransferPair()
    pair.deliver_to_receiver()
    pair.deliver_to_sender()
    pieces = pair.pieces()
    for piece in pieces[: len(pieces) // 2]:
        pair.make_ready(piece)
    pair.start_puts()
    pair.land(pair.puts[0])
    pair.tell_sender(Cancel(code, "prefill stopped"))
    assert pair.released["sender"] == 1
    while pair.to_receiver:
        pair.deliver_to_receiver()
    assert pair.released["receiver"] == 1
    assert not pair.installed
    error = pair.ended["receiver"].error
    assert isinstance(error, TransferAborted)
    assert "aborted by peer" in str(error)
    assert "prefill stopped" in str(error)
    assert not pair.aborts(pair.to_sender), "an Abort is not answered"


def test_h23_an_abort_of_the_receiver_reaches_the_sender() -> None:
    pair = TransferPair()
    pair.deliver_to_receiver()
    pair.deliver_to_sender()
    pair.make_ready(pair.pieces()[0])
    pair.start_puts()
    pair.tell_receiver(Cancel(EndCode.CANCELLED, "the client left"))
    assert pair.released == {"sender": 0, "receiver": 1}
    pair.deliver_to_sender()
    assert pair.released == {"sender": 1, "receiver": 1}
    assert pair.puts == []
    assert "aborted by peer (cancelled): the client left" in str(pair.ended["sender"].error)


def test_the_peer_is_told_before_sending_stops_and_the_entry_goes_last() -> None:
    source = accepted_sender()
    source.receive(Cancel(), 1.0)
    abort, stop, release = said(source)
    assert isinstance(abort, Send)
    assert stop == StopSending(transfer_id=ID)
    assert release == RELEASE
    (ended,) = [source.ended]
    assert ended is not None
    assert "aborted on this side (cancelled): no reason given" in str(ended.error)


def test_a_complete_entry_does_not_need_the_peer_any_more() -> None:
    target = complete_receiver()
    target.commands()
    abort = Abort(transfer_id=ID, code=EndCode.EXPIRED)
    for late in (abort, PeerLost(), Renew(transfer_id=ID), abort):
        assert target.receive(late, 500.0) == ()
    assert target.on_deadline(500.0) == ()
    assert target.num_ignored == 4
    (ended,) = target.receive(Installed(), 500.0)
    assert ended.state is TransferState.LANDED
    assert said(target) == [Send(Landed(transfer_id=ID))]


def test_an_installation_that_fails_frees_the_entry_and_tells_the_sender() -> None:
    target = complete_receiver()
    target.commands()
    target.receive(Cancel(EndCode.FAILED, "checksum"), 1.0)
    abort, release = said(target)
    assert abort == Send(Abort(transfer_id=ID, code=EndCode.FAILED, reason="checksum"))
    assert release == RELEASE


Step = Callable[[TransferControl, float], object]


def orders(steps: dict[str, Step]) -> list[tuple[str, ...]]:
    """Every order of every step twice."""
    found: set[tuple[str, ...]] = set()
    names = sorted(steps)
    for slots in itertools.permutations(range(2 * len(names)), len(names)):
        rest = [slot for slot in range(2 * len(names)) if slot not in slots]
        for second in itertools.permutations(rest):
            order = [""] * (2 * len(names))
            for name, first_slot, second_slot in zip(names, slots, second, strict=True):
                order[first_slot] = order[second_slot] = name
            found.add(tuple(order))
    return sorted(found)


def expire(machine: TransferControl, now: float) -> object:
    return machine.on_deadline(machine.next_deadline() or now)


SENDER_STEPS: dict[str, Step] = {
    "complete": lambda m, now: [
        m.receive(RankDone(sent_bytes=NUM_BYTES), now),
        m.receive(Landed(transfer_id=ID), now),
    ],
    "abort": lambda m, now: m.receive(Abort(transfer_id=ID, code=EndCode.FAILED), now),
    "close": lambda m, now: m.receive(Cancel(EndCode.CLOSING), now),
    "expire": expire,
}
RECEIVER_STEPS: dict[str, Step] = {
    "complete": lambda m, now: [
        m.receive(Done(transfer_id=ID, sender_rank=0, sent_bytes=NUM_BYTES), now),
        m.receive(Done(transfer_id=ID, sender_rank=1, sent_bytes=0), now),
    ],
    "install": lambda m, now: m.receive(Installed(), now) if m.state.is_end else None,
    "abort": lambda m, now: m.receive(Abort(transfer_id=ID, code=EndCode.FAILED), now),
    "close": lambda m, now: m.receive(Cancel(EndCode.CLOSING), now),
    "expire": expire,
}


def test_h24_every_order_of_ends_frees_the_sender_once() -> None:
    tried = orders(SENDER_STEPS)
    assert len(tried) == 2520
    for order in tried:
        machine = accepted_sender()
        commands: list[Command] = []
        for name in order:
            SENDER_STEPS[name](machine, 2.0)
            commands += said(machine)
        assert machine.state.is_end
        assert commands.count(RELEASE) == 1, order
        assert commands[-1] == RELEASE, order


def test_h24_every_order_of_ends_frees_the_receiver_once() -> None:
    """With and without an installation in between; "complete" alone leaves the entry to close."""
    steps = {name: step for name, step in RECEIVER_STEPS.items() if name != "install"}
    for order in orders(steps):
        machine = accepted_receiver()
        commands: list[Command] = []
        for name in order:
            steps[name](machine, 2.0)
            got = said(machine)
            commands += got
            if INSTALL in got and order[0] == "complete":
                machine.receive(Installed(), 2.0)
                RECEIVER_STEPS["install"](machine, 2.0)
                commands += said(machine)
        assert machine.state.is_end
        landed = machine.state is TransferState.LANDED
        assert commands.count(RELEASE) + landed == 1, order
        assert commands.count(CLOSE) == 1, order
        assert landed or commands.index(CLOSE) < commands.index(RELEASE), order


@pytest.mark.parametrize("end", [Landed, Reject, Abort])
def test_h24_whatever_comes_after_the_end_is_ignored_and_counted(end: type) -> None:
    source = accepted_sender()
    source.receive(Cancel(), 1.0)
    source.commands()
    late = end(transfer_id=ID) if end is Landed else end(transfer_id=ID, code=EndCode.FAILED)
    for number, happened in enumerate([late, late, ACCEPT, Progress(), RankDone(sent_bytes=1)]):
        assert source.receive(happened, 2.0) == ()
        assert source.num_ignored == number + 1
    assert said(source) == []


# Illegal calls and messages.


def every_state() -> dict[str, TransferControl]:
    sending = accepted_sender()
    sending.receive(Progress(), 1.0)
    done = accepted_sender()
    done.receive(RankDone(sent_bytes=NUM_BYTES), 1.0)
    opening = ReceiverControl(TERMS, 0.0)
    opening.receive(offer(), 0.0)
    return {
        "sender offered": sender(),
        "sender accepted": accepted_sender(),
        "sender sending": sending,
        "sender done": done,
        "receiver expecting": ReceiverControl(TERMS, 0.0),
        "receiver offered": opening,
        "receiver accepted": accepted_receiver(),
        "receiver complete": complete_receiver(),
    }


INPUTS = [
    offer(num_senders=3),
    msgspec.structs.replace(ACCEPT, window_token=b"other"),
    Reject(transfer_id=ID, code=EndCode.FAILED),
    Done(transfer_id=ID, sender_rank=0, sent_bytes=1),
    Landed(transfer_id=ID),
    Renew(transfer_id=ID),
    Abort(transfer_id=ID, code=EndCode.FAILED),
    Cancel(),
    PeerLost(),
    Progress(),
    RankDone(sent_bytes=NUM_BYTES),
    WindowOpened(WINDOW_REF),
    BytesLanded(num_bytes=0),
    Installed(),
]


def test_what_is_not_in_the_table_is_refused_and_changes_nothing() -> None:
    num_refused = 0
    for name in every_state():
        for happened in INPUTS:
            machine = every_state()[name]
            assert name.endswith(machine.state.value)
            if type(happened) in machine.transitions[machine.state]:
                continue
            before = (repr(machine), machine.next_deadline(), len(machine._commands))
            is_message = hasattr(happened, "transfer_id")
            error = RemoteProtocolError if is_message else LocalProtocolError
            with pytest.raises(error, match=f"{type(happened).__name__} is not allowed in"):
                machine.receive(happened, 1.0)
            assert (repr(machine), machine.next_deadline(), len(machine._commands)) == before
            machine.check()
            num_refused += 1
    assert num_refused == 73


def test_the_tables_are_closed() -> None:
    """Each row leads to states with a row of their own, or to an end."""
    for machine in (SenderControl, ReceiverControl):
        for row in machine.transitions.values():
            for target in row.values():
                assert target.is_end or target in machine.transitions
        for state in machine.transitions:
            assert Cancel in machine.transitions[state]
            assert PeerLost in machine.transitions[state]


def test_repetitions_are_ignored_and_counted() -> None:
    target = accepted_receiver()
    done = Done(transfer_id=ID, sender_rank=0, sent_bytes=5)
    target.receive(done, 1.0)
    for happened in (offer(num_senders=2), WindowOpened(WINDOW_REF), done):
        assert target.receive(happened, 1.0) == ()
    assert target.num_ignored == 3
    source = accepted_sender(num_senders=2)
    source.receive(RankDone(sender_rank=0, sent_bytes=5), 1.0)
    source.commands()
    for happened in (ACCEPT, RankDone(sender_rank=0, sent_bytes=5)):
        assert source.receive(happened, 1.0) == ()
    assert source.num_ignored == 2
    assert said(source) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_bytes": NUM_BYTES + 1}, f"a window of {NUM_BYTES + 1} bytes"),
        ({"start_token": 8}, "a window of"),
        ({"start_token": 20}, "wrong start_token"),
    ],
)
def test_an_accept_that_does_not_fit_is_refused(change: dict[str, int], message: str) -> None:
    source = sender()
    source.commands()
    before = repr(source)
    with pytest.raises(RemoteProtocolError, match=message):
        source.receive(msgspec.structs.replace(ACCEPT, **change), 1.0)
    assert repr(source) == before
    assert said(source) == []


def test_a_window_that_does_not_fit_is_our_own_fault() -> None:
    target = ReceiverControl(TERMS, 0.0)
    target.receive(offer(), 0.0)
    target.commands()
    with pytest.raises(LocalProtocolError, match="expose the spans of the whole entry"):
        target.receive(WindowOpened(WindowRef(b"w", 1)), 0.0)
    with pytest.raises(ConfigError, match="Accept cannot be sent"):
        target.receive(WindowOpened(WindowRef(b"", NUM_BYTES)), 0.0)
    assert target.state is TransferState.OFFERED
    assert said(target) == []


def test_inputs_of_another_transfer_or_kind_are_refused() -> None:
    source = sender()
    with pytest.raises(LocalProtocolError, match="route messages by transfer_id"):
        source.receive(Renew(transfer_id=TransferId("u")), 0.0)
    with pytest.raises(LocalProtocolError, match="neither a transfer message"):
        source.receive("landed", 0.0)  # type: ignore[arg-type]


def test_terms_that_cannot_be_offered_are_refused() -> None:
    with pytest.raises(ConfigError, match="start a transfer before its end"):
        SenderControl(TERMS, 100.0)
    with pytest.raises(ConfigError, match="Offer cannot be sent"):
        SenderControl(TERMS, 0.0, lease_s=0.0)
    with pytest.raises(ConfigError, match="Offer cannot be sent"):
        SenderControl(TERMS, 0.0, num_senders=0)
    with pytest.raises(ConfigError, match="num_held_tokens is 20"):
        ReceiverControl(TERMS, 0.0, start_token=20)


def test_machines_say_where_they_stand() -> None:
    assert repr(accepted_sender()) == (
        f"<SenderControl 't' accepted, 0/{NUM_BYTES} B, 0/1 senders done, "
        "lease until 11.000 s, 0 ignored>"
    )
    assert repr(ReceiverControl(TERMS, 0.0)) == (
        f"<ReceiverControl 't' expecting, 0/{NUM_BYTES} B sent, 0/? senders done, "
        "lease until 100.000 s, 0 ignored>"
    )


def test_a_model_of_many_kinds_needs_one_machine_per_side() -> None:
    spec = ModelSpec(name="m", layers=(FULL, MLA, WINDOW, STATE), granule_tokens=4)
    pair = TransferPair(spec, 1, block_sizes=(16, 4), num_senders=2)
    pair.run()
    assert pair.installed
