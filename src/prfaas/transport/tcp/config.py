"""Settings of the TCP transport."""

from __future__ import annotations

import attrs

from prfaas.errors import ConfigError
from prfaas.wire.frames import MAX_PUT_BYTES
from prfaas.wire.handshake import MAX_CONNECTIONS


@attrs.frozen(kw_only=True)
class TcpConfig:
    """How channels are made and kept.

    Attributes:
        num_connections: data connections per direction. One connection carries at most its send
            buffer per round trip (with Linux's 4 MiB limit 1.4 Gb/s at 20 ms), so that long links
            want several; the smaller wish of the two sides holds.
        chunk_bytes: most payload of one PUT frame.
        congestion: congestion control of our data connections; None keeps the system's choice.
        checksum: whether puts carry an xxh3_64 of their payload for the receiver to verify.
        allow_remote: permits listening on an address that other hosts can reach. Nothing on the
            wire is encrypted or authenticated.
        advertise_host: host that peers dial, if it is not the one that is listened on.
        allowed_hosts: hosts, as written in addresses, that may be dialled; None for any.
        connect_timeout_s: dialling and shaking hands.
        handshake_timeout_s: how long the listener waits for each step of a peer's handshake.
        stall_timeout_s: how long `withdraw`, a cancelled put and `aclose` wait for a connection
            that does not move before they break the channel.
        dead_peer_timeout_s: a peer whose host does not answer for this long is gone.
        max_handshakes: handshakes that the listener holds at a time; more are turned away.
    """

    num_connections: int = attrs.field(default=4)
    chunk_bytes: int = attrs.field(default=1 << 20)
    congestion: str | None = None
    checksum: bool = True
    allow_remote: bool = False
    advertise_host: str | None = None
    allowed_hosts: frozenset[str] | None = None
    connect_timeout_s: float = 10.0
    handshake_timeout_s: float = 5.0
    stall_timeout_s: float = 5.0
    dead_peer_timeout_s: float = 30.0
    max_handshakes: int = 256

    @num_connections.validator
    def _check_num_connections(self, _: object, value: int) -> None:
        if not 1 <= value <= MAX_CONNECTIONS:
            raise ConfigError(f"num_connections is {value}; it must be from 1 to {MAX_CONNECTIONS}")

    @chunk_bytes.validator
    def _check_chunk_bytes(self, _: object, value: int) -> None:
        if not 1 <= value <= MAX_PUT_BYTES:
            raise ConfigError(f"chunk_bytes is {value}; it must be from 1 to {MAX_PUT_BYTES}")

    def __attrs_post_init__(self) -> None:
        for field in (
            "connect_timeout_s",
            "handshake_timeout_s",
            "stall_timeout_s",
            "dead_peer_timeout_s",
            "max_handshakes",
        ):
            value = getattr(self, field)
            if not value > 0:
                raise ConfigError(f"{field} is {value}; it must be greater than 0")
