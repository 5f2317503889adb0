"""Moving one entry from a prefill to a decode worker: layout, plan, messages and both machines."""

from __future__ import annotations

from prfaas.transfer.control import TransferControl, TransferTerms
from prfaas.transfer.data import DataReceiver, DataSender, PutRange
from prfaas.transfer.events import (
    BytesLanded,
    Cancel,
    CloseWindow,
    Command,
    Ended,
    Installed,
    InstallEntry,
    LocalEvent,
    OpenWindow,
    PeerLost,
    Progress,
    RankDone,
    ReleaseEntry,
    Send,
    StartSending,
    StopSending,
    TransferState,
    WindowOpened,
)
from prfaas.transfer.intervals import IntervalSet
from prfaas.transfer.layout import EntryLayout, LayerPart
from prfaas.transfer.messages import (
    Abort,
    Accept,
    Done,
    EndCode,
    Landed,
    Message,
    Offer,
    Reject,
    Renew,
    decode,
    encode,
)
from prfaas.transfer.placement import EntryPlace, Geometry, place
from prfaas.transfer.receiver import ReceiverControl
from prfaas.transfer.sender import SenderControl

__all__ = [
    "Abort",
    "Accept",
    "BytesLanded",
    "Cancel",
    "CloseWindow",
    "Command",
    "DataReceiver",
    "DataSender",
    "Done",
    "EndCode",
    "Ended",
    "EntryLayout",
    "EntryPlace",
    "Geometry",
    "InstallEntry",
    "Installed",
    "IntervalSet",
    "Landed",
    "LayerPart",
    "LocalEvent",
    "Message",
    "Offer",
    "OpenWindow",
    "PeerLost",
    "Progress",
    "PutRange",
    "RankDone",
    "ReceiverControl",
    "Reject",
    "ReleaseEntry",
    "Renew",
    "Send",
    "SenderControl",
    "StartSending",
    "StopSending",
    "TransferControl",
    "TransferState",
    "TransferTerms",
    "WindowOpened",
    "decode",
    "encode",
    "place",
]
