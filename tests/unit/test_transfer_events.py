"""Events and commands of a transfer are values that can be sent: in real engines the machine that
decides and the code that moves bytes live in different processes."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from prfaas.core import RequestId, TransferId
from prfaas.seams import WindowRef
from prfaas.transfer import (
    BytesLanded,
    Cancel,
    CloseWindow,
    Command,
    EndCode,
    Ended,
    Installed,
    InstallEntry,
    LocalEvent,
    OpenWindow,
    PeerLost,
    Progress,
    PutRange,
    RankDone,
    ReleaseEntry,
    Renew,
    Send,
    StartSending,
    StopSending,
    TransferState,
    WindowOpened,
)

TRANSFER, REQUEST = TransferId("r#0"), RequestId("r")
WINDOW = WindowRef(b"w", 10)
VALUES = (
    Cancel(EndCode.CAPACITY, "full"),
    PeerLost("gone"),
    Progress(),
    RankDone(sender_rank=1, sent_bytes=2**40, first_token=3),
    WindowOpened(WINDOW),
    BytesLanded(num_bytes=2**40),
    Installed(),
    Send(Renew(transfer_id=TRANSFER)),
    StartSending(transfer_id=TRANSFER, window=WINDOW, start_token=64),
    StopSending(transfer_id=TRANSFER),
    OpenWindow(transfer_id=TRANSFER, start_token=64, num_bytes=10),
    CloseWindow(transfer_id=TRANSFER),
    InstallEntry(transfer_id=TRANSFER, request_id=REQUEST),
    ReleaseEntry(transfer_id=TRANSFER, request_id=REQUEST),
    PutRange(put_id=1, offset=2**40, num_bytes=3),
    Ended(transfer_id=TRANSFER, request_id=REQUEST, state=TransferState.LANDED),
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_it_survives_being_sent(value: object) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


def test_every_event_and_command_is_among_them() -> None:
    assert {type(value) for value in VALUES} >= {*get_args(LocalEvent), *get_args(Command)}
