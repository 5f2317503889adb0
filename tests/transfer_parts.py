"""Terms, messages and machines of one transfer in a given state."""

from __future__ import annotations

import msgspec

from pools import HYBRID
from prfaas.core import RequestId, TransferId
from prfaas.seams.transport import WindowRef
from prfaas.transfer import (
    Accept,
    CloseWindow,
    Command,
    Done,
    InstallEntry,
    Offer,
    ReceiverControl,
    ReleaseEntry,
    Send,
    SenderControl,
    TransferControl,
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
