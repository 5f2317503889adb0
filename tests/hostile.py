"""What a stranger may send to a port."""

from __future__ import annotations

import asyncio
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

from prfaas.wire.frames import Kind, encode_header


class Bomb:
    """A pickle of it makes a directory when somebody loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)

    @classmethod
    def frame(cls, folder: Path) -> bytes:
        return b"\x01" + pickle.dumps(cls(folder / "pwned"))


async def throw_at(address: str, path: Path) -> None:
    """Random bytes, a pickle, an endless frame and another protocol, each on a new connection."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    endless = encode_header(Kind.HELLO, 2**63)
    for data in (os.urandom(4096), pickle.dumps(Bomb(path)), endless, b"GET / HTTP/1.1\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        async with asyncio.timeout(10):
            with suppress(ConnectionError):
                while await reader.read(4096):
                    pass
        writer.close()
