"""Addresses, and transports by scheme."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prfaas.transport
from prfaas.errors import AddressError
from prfaas.transport import transport_for
from prfaas.transport.address import Address, is_loopback, parse
from prfaas.transport.inproc import InProcTransport
from prfaas.transport.tcp import TcpConfig, TcpTransport


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:0", "127.0.0.1", 0),
        ("127.0.0.1:7070", "127.0.0.1", 7070),
        ("127.0.0.1", "127.0.0.1", 0),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("localhost:0", "localhost", 0),
        ("tcp://[::1]:0", "::1", 0),
        ("[::1]:0", "::1", 0),
        ("[::1]:65535", "::1", 65535),
        ("[::1]", "::1", 0),
        ("::1", "::1", 0),
        ("tcp://fe80::1%eth0", "fe80::1%eth0", 0),
        ("tcp://", "127.0.0.1", 0),
        (":8080", "127.0.0.1", 8080),
        ("tcp://node-7.cluster.example:1", "node-7.cluster.example", 1),
    ],
)
def test_h30_forms_that_are_read(text: str, host: str, port: int) -> None:
    address = parse(text)
    assert address == Address("tcp", host, port)
    assert parse(str(address)) == address


def test_a_scheme_is_kept_and_lowered() -> None:
    assert parse("GRPC://h:1") == Address("grpc", "h", 1)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:port",
        "127.0.0.1:65536",
        "127.0.0.1:-1",
        "127.0.0.1: 1",
        "127.0.0.1:",
        "127.0.0.1:1e3",
        "127.0.0.1:" + "9" * 5000,
        "127.0.0.1:٣",
        "[::1:0",
        "[::1]0",
        "[127.0.0.1]:0",
        "::1::2",
        "1:2:3",
        "tcp://user@host:1",
        "tcp://host/path",
        "tcp://ho st:1",
        "://host:1",
        "t c p://host:1",
    ],
)
def test_forms_that_are_refused(text: str) -> None:
    with pytest.raises(AddressError, match="address"):
        parse(text)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        address = parse(text)
    except AddressError:
        return
    assert parse(str(address)) == address
    assert 0 <= address.port <= 65535


def test_dialling_needs_a_port() -> None:
    address = parse("localhost:1")
    assert address.require_port() is address
    with pytest.raises(AddressError, match="no port"):
        parse("localhost").require_port()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_transports_are_found_by_scheme() -> None:
    assert isinstance(transport_for("inproc://a"), InProcTransport)
    assert isinstance(transport_for("[::1]:0"), TcpTransport)
    assert "chunk_bytes=77" in repr(transport_for("tcp://", TcpConfig(chunk_bytes=77)))


def test_an_unknown_scheme_names_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("pigeon", "prfaas.transport.inproc:InProcTransport", "prfaas.transports")
    monkeypatch.setattr(prfaas.transport, "entry_points", lambda *, group: EntryPoints([point]))
    assert isinstance(transport_for("pigeon://roof"), InProcTransport)
    with pytest.raises(AddressError, match="'smoke'; known are inproc, pigeon, tcp"):
        transport_for("smoke://signal")
