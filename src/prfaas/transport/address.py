"""Addresses: ``tcp://127.0.0.1:7070``, ``tcp://[::1]:7070``, ``localhost:7070``, ``inproc://name``."""

from __future__ import annotations

import ipaddress

import attrs

from prfaas.errors import AddressError

DEFAULT_SCHEME = "tcp"
LOOPBACK_HOST = "127.0.0.1"
_MAX_PORT = 65535


@attrs.frozen
class Address:
    """A host and a port; `str` gives the form that `parse` reads.

    Attributes:
        scheme: transport.
        host: name, IPv4 or IPv6 address, without brackets.
        port: 0 lets the system choose when listening.
    """

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def require_port(self) -> Address:
        """This address, for dialling. Raises: AddressError if the port is 0."""
        if not self.port:
            raise AddressError(f"address {self} has no port; name the one that the peer listens on")
        return self


def split_scheme(address: str) -> tuple[str, str]:
    """Scheme (``tcp`` if none is written) and the rest."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return DEFAULT_SCHEME, address
    if not scheme.isidentifier():
        raise AddressError(f"address {address!r} has no scheme before '://'; write tcp://host:port")
    return scheme.lower(), rest


def parse(address: str) -> Address:
    """Reads ``[scheme://]host[:port]``.

    An IPv6 address needs brackets only if a port follows it. Without a host the address is the
    loopback, without a port the port is 0.

    Raises: AddressError.
    """
    scheme, rest = split_scheme(address)
    host, port = _split_port(address, rest)
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise AddressError(
                f"address {address!r}: {host!r} is no IPv6 address; write [address]:port"
            ) from None
    elif any(c.isspace() or c in "/?#@[]" for c in host):
        raise AddressError(f"address {address!r}: {host!r} is no host; write scheme://host:port")
    return Address(scheme, host or LOOPBACK_HOST, _port(address, port))


def is_loopback(host: str) -> bool:
    """Whether a numeric address is the loopback; False for names."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _split_port(address: str, rest: str) -> tuple[str, str | None]:
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket or ":" not in host or (tail and not tail.startswith(":")):
            raise AddressError(f"address {address!r}: write an IPv6 address as [address]:port")
        return host, tail[1:] if tail else None
    if rest.count(":") > 1:
        return rest, None
    host, colon, port = rest.partition(":")
    return host, port if colon else None


def _port(address: str, text: str | None) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdecimal()) or int(text[:9]) > _MAX_PORT or len(text) > 9:
        raise AddressError(
            f"address {address!r}: port {text!r} is not a number from 0 to {_MAX_PORT}"
        )
    return int(text)
