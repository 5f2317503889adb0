"""How transfers end, in every order, and what that leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from helpers import TransferPair
from prfaas.errors import TransferAborted
from prfaas.transfer import (
    Abort,
    Cancel,
    Command,
    Done,
    EndCode,
    Installed,
    Landed,
    OpenWindow,
    PeerLost,
    Progress,
    RankDone,
    ReceiverControl,
    Reject,
    Renew,
    Send,
    StopSending,
    TransferControl,
    TransferState,
)
from transfer_parts import (
    ACCEPT,
    CLOSE,
    ID,
    INSTALL,
    NUM_BYTES,
    RELEASE,
    TERMS,
    accepted_receiver,
    accepted_sender,
    complete_receiver,
    offer,
    said,
    sender,
)


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
    target.receive(offer(), 0.0)
    assert said(target) == [], "the sender has its answer"

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
    sent = [type(message) for message in pair.messages(pair.to_sender)]
    assert Abort not in sent, "an Abort is not answered"


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
    assert source.ended is not None
    assert "aborted on this side (cancelled): no reason given" in str(source.ended.error)


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


@pytest.mark.parametrize("installs", [True, False])
def test_h24_every_order_of_ends_frees_the_receiver_once(installs: bool) -> None:
    for order in orders(RECEIVER_STEPS):
        machine = accepted_receiver()
        commands: list[Command] = []
        for name in order:
            RECEIVER_STEPS[name](machine, 2.0)
            commands += said(machine)
            if installs and INSTALL in commands:
                machine.receive(Installed(), 2.0)
                commands += said(machine)
        assert machine.state.is_end
        landed = machine.state is TransferState.LANDED
        assert landed == (installs and order[0] == "complete"), order
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
