"""The Transport seam: small control frames, and puts into memory that the receiver named.

The receiver exposes a *window*: a linear byte space laid over spans of its own registered memory.
It sends the window's reference to the peer inside a control frame; the peer puts ranges into it.
Since the destination is known before the bytes are read, nothing is staged, and one-sided fabrics
can serve the same contract.

A reference only *names* a window. A one-sided fabric also needs to know where the window's spans
lie; its channel tells that to its peer by itself, in a frame of its own, when the window is
exposed. Frames keep their order, so it is known before the reference arrives, unless that came by
another way: then the put waits for it. So thousands of spans never burden a control message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

import attrs

from prfaas.core import PROTOCOL_VERSION, Handoff, NodeId
from prfaas.errors import ConfigError

MAX_NAME_CHARS = 1024
MAX_FINGERPRINT_BYTES = 64
MAX_GRANULE_TOKENS = 2**31


@attrs.frozen(kw_only=True, eq=False)
class Memory:
    """One contiguous piece of memory that may take part in transfers.

    Attributes:
        address: virtual address of the first byte, on ``device``.
        num_bytes: length.
        device: ``"cpu"`` or the name of an accelerator.
        buffer: writable memoryview (format ``B``) of the same bytes where the host can touch them,
            else None. A transport that needs it refuses memory without one in `Channel.expose` and
            `Channel.put`. The memory must outlive every transfer that names it.
    """

    address: int
    num_bytes: int
    device: str = "cpu"
    buffer: memoryview | None = attrs.field(default=None, repr=False)


@attrs.frozen
class Span:
    """``num_bytes`` bytes at ``offset`` of a `Memory`."""

    offset: int
    num_bytes: int


@attrs.frozen
class WindowRef:
    """The receiver's name for a window; opaque to the sender, carried in control frames.

    ``token`` is not guessable: knowing it is the permission to write ``num_bytes`` bytes. It is
    short (`prfaas.transfer` carries up to 8 KiB) and does not list the window's spans.
    """

    token: bytes
    num_bytes: int


@attrs.frozen(kw_only=True)
class Hello:
    """What each side declares when a channel opens. Differences are found here or never.

    Attributes:
        node_id: name of the node.
        epoch: grows with every start of the node; what is known of an earlier one is forgotten.
        fingerprint: `ModelSpec.fingerprint` of the cache that this node speaks for.
        model: human name of the model, for messages.
        granule_tokens: tokens per hash granule.
        layout: tag of the canonical order of bytes in a window.
        handoff: where the recurrent state stands when a request changes sides.
        protocol_version: version of frames and control messages.
    """

    node_id: NodeId = attrs.field()
    epoch: int = attrs.field()
    fingerprint: bytes = attrs.field()
    model: str = ""
    granule_tokens: int = attrs.field(default=64)
    layout: str = "group.layer.token"
    handoff: Handoff = attrs.field(default=Handoff.AFTER_PROMPT)
    protocol_version: int = PROTOCOL_VERSION

    @node_id.validator
    def _check_node_id(self, _: object, value: str) -> None:
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARS:
            raise ConfigError(
                f"node_id is {str(value)[:64]!r}; it must be a string of 1 to {MAX_NAME_CHARS} "
                "characters"
            )

    @epoch.validator
    def _check_epoch(self, _: object, value: int) -> None:
        if type(value) is not int or not 0 <= value < 2**63:
            raise ConfigError(f"epoch is {value!r}; it must be a whole number that fits 63 bits")

    @fingerprint.validator
    def _check_fingerprint(self, _: object, value: bytes) -> None:
        if not isinstance(value, bytes):
            raise ConfigError(f"fingerprint is {value!r}; use the bytes of ModelSpec.fingerprint()")
        if len(value) > MAX_FINGERPRINT_BYTES:
            raise ConfigError(
                f"fingerprint has {len(value)} bytes, at most {MAX_FINGERPRINT_BYTES} can be "
                "declared; use those of ModelSpec.fingerprint()"
            )

    @granule_tokens.validator
    def _check_granule(self, _: object, value: int) -> None:
        if type(value) is not int or not 1 <= value <= MAX_GRANULE_TOKENS:
            raise ConfigError(
                f"granule_tokens is {value!r}; it must be a whole number from 1 to "
                f"{MAX_GRANULE_TOKENS}, as in ModelSpec"
            )

    @handoff.validator
    def _check_handoff(self, _: object, value: Handoff) -> None:
        if not isinstance(value, Handoff):
            raise ConfigError(
                f"handoff is {value!r}; use Handoff.AFTER_PROMPT or Handoff.BEFORE_LAST"
            )


@attrs.frozen(kw_only=True)
class Delivery:
    """Bytes that arrived at the peer while this channel always had more to send.

    Attributes:
        num_bytes: payload bytes acknowledged in the interval.
        start_s, end_s: the interval, on the transport's clock; round-trip time is taken off.
    """

    num_bytes: int
    start_s: float
    end_s: float


class Channel(ABC):
    """A connection to one peer. Only one task may receive frames; sends and puts may overlap."""

    @property
    @abstractmethod
    def local(self) -> Hello:
        """What we declared."""

    @property
    @abstractmethod
    def peer(self) -> Hello:
        """What the peer declared; already checked against ours."""

    @abstractmethod
    async def send(self, frame: bytes) -> None:
        """Queues one control frame, in order. Returns when it may be forgotten by the caller.

        Raises: ChannelClosed, ChannelBroken; ConfigError if the frame exceeds the frame limit.
        """

    @abstractmethod
    async def receive(self) -> bytes:
        """Next control frame. Raises ChannelClosed (we closed), ChannelBroken (they did, or sent
        garbage), ChannelBusy (another task is receiving)."""

    @abstractmethod
    def expose(self, memory: Memory, spans: Sequence[Span]) -> WindowRef:
        """Opens a window over ``spans``, concatenated in this order, for this peer only.

        Raises: ConfigError for spans outside ``memory`` and for memory that this transport cannot
        reach; ChannelBroken, ChannelClosed.
        """

    @abstractmethod
    async def withdraw(self, window: WindowRef) -> int | None:
        """Closes a window. When it returns, no byte will be written through it any more; a late put
        is refused. Where only the peer can stop a write, this waits until it has, or breaks the
        channel. Idempotent, also on a channel that has ended.

        Returns the payload bytes that landed through it, repeats included; 0 from the second call
        on, None where the fabric does not tell its receiver.
        """

    @abstractmethod
    async def put(
        self, window: WindowRef, offset: int, memory: Memory, spans: Sequence[Span]
    ) -> None:
        """Writes the concatenation of ``spans`` at ``offset`` of the peer's window.

        The source holds its final bytes before the call: on a device, what computes them is done,
        not merely launched. Returns when the bytes are at their destination and verified there. The
        source may be overwritten only then. Puts may run concurrently; order among them is not
        kept.

        Raises: PutRefused (unknown or withdrawn window, out of bounds), IntegrityError,
        ChannelBroken, ChannelClosed; ConfigError as `expose` does; LocalProtocolError for a
        reference that no such channel made. The channel has ended after ChannelBroken and
        ChannelClosed only.
        """

    @abstractmethod
    def take_deliveries(self) -> tuple[Delivery, ...]:
        """Link-rate samples since the last call."""

    def take_resent(self) -> tuple[int, int]:
        """Packets of payload that were sent since the last call, and how many of them were sent
        because others had been lost; (0, 0) where the fabric does not tell."""
        return 0, 0

    @abstractmethod
    async def aclose(self) -> None:
        """Flushes frames and ends the channel. Idempotent."""

    @abstractmethod
    def abort(self) -> None:
        """Ends the channel now, for destructors and failures. Idempotent."""


OnChannel = Callable[[Channel], Awaitable[None]]


class Listener(ABC):
    """An address that accepts channels until it is closed."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address that peers dial, with the real port."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stops listening and aborts the channels it accepted. Idempotent."""


class Transport(ABC):
    """Makes channels for one address scheme."""

    @abstractmethod
    async def listen(self, address: str, hello: Hello, on_channel: OnChannel) -> Listener:
        """Listens; each accepted and checked channel runs ``on_channel`` in its own task.

        Raises: AddressError, ListenError.
        """

    @abstractmethod
    async def connect(self, address: str, hello: Hello) -> Channel:
        """Dials and shakes hands.

        Raises: AddressError, ConnectError, PeerMismatch.
        """
