"""Calls and messages that the control machines refuse."""

from __future__ import annotations

import msgspec
import pytest

from helpers import TransferPair
from pools import FULL, MLA, STATE, WINDOW
from prfaas.core import TransferId
from prfaas.errors import (
    ConfigError,
    LocalProtocolError,
    RemoteProtocolError,
)
from prfaas.seams.transport import WindowRef
from prfaas.spec import ModelSpec
from prfaas.transfer import (
    Abort,
    BytesLanded,
    Cancel,
    Done,
    EndCode,
    Installed,
    Landed,
    PeerLost,
    Progress,
    RankDone,
    ReceiverControl,
    Reject,
    Renew,
    SenderControl,
    TransferControl,
    TransferState,
    WindowOpened,
)
from transfer_parts import (
    ACCEPT,
    ID,
    NUM_BYTES,
    TERMS,
    WINDOW_REF,
    accepted_receiver,
    accepted_sender,
    complete_receiver,
    offer,
    said,
    sender,
)


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
    RankDone(sent_bytes=1),
    WindowOpened(WindowRef(b"other", NUM_BYTES)),
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
            machine.commands()
            before = (repr(machine), machine.next_deadline())
            is_message = hasattr(happened, "transfer_id")
            error = RemoteProtocolError if is_message else LocalProtocolError
            with pytest.raises(error, match=f"{type(happened).__name__} is not allowed in"):
                machine.receive(happened, 1.0)
            assert (repr(machine), machine.next_deadline()) == before
            assert said(machine) == []
            num_refused += 1
    assert num_refused == 66


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
