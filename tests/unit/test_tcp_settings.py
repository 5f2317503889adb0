"""Addresses that TCP listens on and dials, and its settings."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import (
    AddressError,
    ConfigError,
    ConnectError,
    ListenError,
)
from prfaas.testing.transport import (
    DIALLER,
    LISTENER,
    accepting,
    check_transport,
)
from prfaas.transport.tcp import TcpChannel, TcpConfig, TcpTransport
from tcp_kit import ANY, opened, run

pytestmark = pytest.mark.timeout(30)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="the host has no IPv6 loopback")
@pytest.mark.parametrize("address", ["[::1]:0", "::1"])
def test_ipv6(address: str) -> None:
    async def main() -> None:
        async with accepting(TcpTransport(), address) as (listener, _):
            assert listener.address.startswith("tcp://[::1]:")
        await check_transport(TcpTransport(), address)

    run(main())


def test_localhost() -> None:
    async def main() -> None:
        async with accepting(TcpTransport(), "localhost:0") as (listener, _):
            port = listener.address.rpartition(":")[2]
            (await TcpTransport().connect(f"localhost:{port}", DIALLER)).abort()

    run(main())


def test_a_taken_port_is_named() -> None:
    async def main() -> None:
        async with accepting(TcpTransport(), ANY) as (listener, _):
            with pytest.raises(ListenError, match=f"{listener.address}: .*another port"):
                await TcpTransport().listen(listener.address, LISTENER, lambda _: asyncio.sleep(0))

    run(main())


@pytest.mark.parametrize("address", ["0.0.0.0:0", "tcp://[::]:0"])
def test_other_hosts_are_let_in_only_if_asked_for(address: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="allow_remote=True"):
            await TcpTransport().listen(address, LISTENER, lambda _: asyncio.sleep(0))
        config = TcpConfig(allow_remote=True, advertise_host="node-7")
        async with accepting(TcpTransport(config), address) as (listener, _):
            assert listener.address.startswith("tcp://node-7:")

    run(main())


def test_hosts_outside_the_allow_list_are_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with accepting(TcpTransport(), ANY) as (listener, _):
            allowed = TcpConfig(allowed_hosts=frozenset({"127.0.0.1"}))
            (await TcpTransport(allowed).connect(listener.address, DIALLER)).abort()
            monkeypatch.setattr(socket, "socket", None)
            with pytest.raises(AddressError, match="allowed_hosts"):
                await TcpTransport(allowed).connect("tcp://169.254.169.254:80", DIALLER)
            monkeypatch.undo()

    run(main())


@pytest.mark.parametrize("address", ["inproc://a", "tcp://localhost:0", "localhost"])
def test_addresses_that_cannot_be_dialled(address: str) -> None:
    with pytest.raises(AddressError):
        run(TcpTransport().connect(address, DIALLER))


def test_unresolvable_hosts() -> None:
    async def main() -> None:
        with pytest.raises(ConnectError, match="cannot connect"):
            await TcpTransport().connect("no-such-host.invalid:1", DIALLER)
        with pytest.raises(ListenError, match="check the host name"):
            await TcpTransport().listen("no-such-host.invalid:1", LISTENER, lambda _: _)

    run(main())


def test_congestion_control_is_set_or_refused() -> None:
    names = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()

    async def main() -> None:
        config = TcpConfig(congestion=names[0])
        async with opened(config) as (near, far):
            for channel in (near, far):
                lane = channel._outgoing._lanes[0].sock
                name = lane.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert name.rstrip(b"\0").decode() == names[0]
        wrong = TcpTransport(TcpConfig(congestion="no-such"))
        with pytest.raises(ConfigError, match="'no-such' cannot be set"):
            await wrong.listen(ANY, LISTENER, lambda _: asyncio.sleep(0))
        async with accepting(TcpTransport(), ANY) as (listener, _):
            with pytest.raises(ConfigError, match="'no-such' cannot be set"):
                await wrong.connect(listener.address, DIALLER)

    run(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_connections": 0},
        {"num_connections": 65},
        {"chunk_bytes": 0},
        {"chunk_bytes": (16 << 20) + 1},
        {"stall_timeout_s": 0},
        {"connect_timeout_s": -1},
        {"max_handshakes": 0},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TcpConfig(**wrong)


def test_the_smaller_wish_for_connections_holds() -> None:
    async def main() -> None:
        async with accepting(TcpTransport(TcpConfig(num_connections=2)), ANY) as (listener, accept):
            for wish, granted in ((1, 1), (2, 2), (5, 2)):
                transport = TcpTransport(TcpConfig(num_connections=wish))
                near, far = await transport.connect(listener.address, DIALLER), await accept()
                for channel in (near, far):
                    assert isinstance(channel, TcpChannel)
                    assert f"{granted} lanes" in repr(channel)
                near.abort()

    run(main())
