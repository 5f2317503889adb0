"""The error tree, split by cause: you, they, closed, busy.

    PrfaasError
    +-- ConfigError (ValueError)          your arguments or configuration
    |   +-- AddressError                  an unreadable address or an unknown scheme
    +-- RequestError (ValueError)         a request refused at the door
    +-- CapacityError                     no room now; nothing was taken
    +-- DeadlineExceeded                  the request's time ran out
    +-- TransferAborted                   a transfer ended without its bytes; says who and why
    +-- ProtocolError
    |   +-- LocalProtocolError            you called out of order; nothing changed
    |   +-- RemoteProtocolError           the peer sent what the protocol forbids
    +-- TransportError
    |   +-- ListenError                   the address cannot be listened on (taken, forbidden)
    |   +-- ConnectError                  nobody answers there
    |   +-- PeerMismatch                  the peer speaks for another model, layout or version
    |   +-- ChannelClosed                 you closed the channel
    |   +-- ChannelBroken                 they or the network did
    |   +-- ChannelBusy                   two users at once
    |   +-- PutRefused                    the receiver refused the destination
    |   +-- IntegrityError                bytes changed on the way
    +-- EngineError                       the engine failed on one request
    +-- MissingExtra (ImportError)        an optional dependency is not installed

Every message states the value, the limit and the remedy.
"""

from __future__ import annotations


class PrfaasError(Exception):
    """Root of every error that prfaas raises on purpose."""


class ConfigError(PrfaasError, ValueError):
    """An argument or a configuration value is wrong; fix the caller."""


class AddressError(ConfigError):
    """An address cannot be parsed, or its scheme is not known."""


class RequestError(PrfaasError, ValueError):
    """A request was refused at the door; it was never queued."""


class CapacityError(PrfaasError):
    """There is no room now. Nothing was taken; try later or elsewhere."""


class DeadlineExceeded(PrfaasError):
    """The request's deadline passed before it finished."""


class TransferAborted(PrfaasError):
    """A transfer ended without delivering its entry; both sides have let go of it."""


class ProtocolError(PrfaasError):
    """Something happened in the wrong order or the wrong form."""


class LocalProtocolError(ProtocolError):
    """This side called out of order. State is as it was before the call."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes or events that the protocol does not allow."""


class TransportError(PrfaasError):
    """Moving bytes failed."""


class ListenError(TransportError):
    """The address cannot be listened on."""


class ConnectError(TransportError):
    """Nobody answered at the address in time."""


class PeerMismatch(TransportError):
    """The handshake failed: the two sides could never exchange a cache.

    Args:
        field: the first field that differs, e.g. ``"granule_tokens"``.
        ours: our value, as text.
        theirs: the peer's value, as text.
        remedy: what an operator should change.
    """

    def __init__(self, *, field: str, ours: str, theirs: str, remedy: str) -> None:
        super().__init__(f"peers differ in {field}: ours {ours}, theirs {theirs}; {remedy}")
        self.field = field
        self.ours = ours
        self.theirs = theirs
        self.remedy = remedy


class ChannelClosed(TransportError):
    """This side closed the channel."""


class ChannelBroken(TransportError):
    """The peer or the network ended the channel."""


class ChannelBusy(TransportError):
    """Two users tried to do at once what only one may do."""


class PutRefused(TransportError):
    """The receiver does not accept the bytes: unknown or withdrawn window, or out of its bounds."""


class IntegrityError(TransportError):
    """The bytes that landed are not the bytes that were sent."""


class EngineError(PrfaasError):
    """The engine failed on one request; other requests are not affected."""


class MissingExtra(PrfaasError, ImportError):
    """An optional dependency is missing.

    Args:
        package: the module that could not be imported.
        extra: the extra of prfaas that brings it.
    """

    def __init__(self, *, package: str, extra: str) -> None:
        super().__init__(f'{package} is not installed; run: pip install "prfaas[{extra}]"')
        self.package = package
        self.extra = extra
