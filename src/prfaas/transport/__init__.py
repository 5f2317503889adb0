"""Transports by address scheme. A transport is imported when its scheme is first used."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from prfaas.errors import AddressError
from prfaas.seams.transport import Channel, Hello, Listener, OnChannel, Transport
from prfaas.transport.address import split_scheme

__all__ = ["ENTRY_POINT_GROUP", "connect", "listen", "transport_for"]

ENTRY_POINT_GROUP = "prfaas.transports"
"""Other packages add a scheme by an entry point of this group: scheme = "module:TransportClass"."""

_TRANSPORTS = {
    "inproc": "prfaas.transport.inproc:InProcTransport",
    "tcp": "prfaas.transport.tcp:TcpTransport",
}


def transport_for(address: str, config: object | None = None) -> Transport:
    """A transport for the scheme of ``address`` (``tcp`` if it has none).

    Args:
        address: any address of the scheme.
        config: settings of that transport, e.g. `prfaas.transport.tcp.TcpConfig`.

    Raises: AddressError for an unknown scheme; MissingExtra if the transport needs one.
    """
    scheme, _ = split_scheme(address)
    path = _TRANSPORTS.get(scheme)
    if path is None:
        found = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
        path = found.get(scheme)
        if path is None:
            raise AddressError(
                f"address {address!r} has the unknown scheme {scheme!r}; known are "
                f"{', '.join(sorted({*_TRANSPORTS, *found}))}, and packages with an entry point in "
                f"{ENTRY_POINT_GROUP!r} add more"
            )
    module, _, name = path.partition(":")
    make = getattr(import_module(module), name)
    transport: Transport = make() if config is None else make(config)
    return transport


async def connect(address: str, hello: Hello, *, config: object | None = None) -> Channel:
    """Dials ``address``. See `Transport.connect` and `transport_for`."""
    return await transport_for(address, config).connect(address, hello)


async def listen(
    address: str, hello: Hello, on_channel: OnChannel, *, config: object | None = None
) -> Listener:
    """Listens on ``address``. See `Transport.listen` and `transport_for`."""
    return await transport_for(address, config).listen(address, hello, on_channel)
