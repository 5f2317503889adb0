"""The relay as a process of its own, led over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from prfaas.testing.relay import RelayConfig, Route, relay_process


@pytest.fixture
def spawned() -> Iterator[tuple[multiprocessing.process.BaseProcess, Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    route = Route(target_host="127.0.0.1", target_port=1)
    config = RelayConfig(routes=[route, route], rate_bps=1e8)
    process = context.Process(target=relay_process, args=(theirs, config), daemon=True)
    process.start()
    theirs.close()
    yield process, ours
    ours.close()
    process.kill()
    process.join()
    process.close()


def test_process_obeys_its_pipe_and_ignores_interrupts(spawned: Any) -> None:
    process, conn = spawned
    ports = conn.recv()
    assert len(set(ports)) == 2
    os.kill(process.pid, signal.SIGINT)
    conn.send(("rate", 5e7))
    conn.send(("stats",))
    stats = conn.recv()
    assert stats["rate_bps"] == 5e7
    assert stats["up_bytes"] == stats["down_bytes"] == 0
    conn.send(("stop",))
    process.join(10)
    assert process.exitcode == 0
    with socket.socket() as dialler:
        assert dialler.connect_ex(("127.0.0.1", ports[0])) != 0


def test_process_ends_with_its_parent(spawned: Any) -> None:
    process, conn = spawned
    conn.recv()
    conn.close()
    process.join(10)
    assert process.exitcode == 0
