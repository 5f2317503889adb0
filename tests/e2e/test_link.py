"""The measured link against a real shaped one, and what the threshold makes of it."""

from __future__ import annotations

import asyncio
import time

import pytest

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.policy import GlobalPrefixIndex, LinkEstimator, LoadLedger, ThresholdController
from prfaas.seams import Channel, Hello, NodeUp, Span, WindowRef
from prfaas.spec import preset
from prfaas.store import HostArena
from prfaas.testing.relay import Relay, Route
from prfaas.transport.address import parse
from prfaas.transport.tcp import TcpTransport

pytestmark = pytest.mark.e2e

NUM_BYTES = 1 << 20
RATE_BPS = 24e6
"""Slow enough that the scheduling noise of a busy machine is small beside a transfer."""
HELLO = Hello(node_id=NodeId("node"), epoch=1, fingerprint=b"f" * 16)


def test_the_estimate_follows_the_relay_and_less_bandwidth_raises_t() -> None:
    spec = preset("kimi-linear-48b")
    ledger = LoadLedger(
        GlobalPrefixIndex(spec.groups, granule_tokens=spec.granule_tokens),
        LinkEstimator(window_s=0.5),
    )
    for name, kind, role in (
        ("remote", ClusterKind.PRFAAS, Role.PREFILL),
        ("local", ClusterKind.PD, Role.PREFILL),
        ("decode", ClusterKind.PD, Role.DECODE),
    ):
        cluster_id = ClusterId(kind.value)
        ledger.node_up(
            NodeUp(node_id=NodeId(name), cluster_id=cluster_id, kind=kind, role=role, epoch=1)
        )
        ledger.observe_prefill(NodeId(name), 1000, 1.0)
    controller = ThresholdController(spec, band=(64, 100_000), prior_tokens=range(500, 30_000, 250))

    async def work() -> None:
        window: asyncio.Future[WindowRef] = asyncio.get_running_loop().create_future()
        arena = HostArena(2 * NUM_BYTES)

        async def accept(channel: Channel) -> None:
            spans = [Span(0, NUM_BYTES)]
            window.set_result(channel.expose(arena.memory, spans))
            with pytest.raises(Exception, match="node"):
                await channel.receive()

        transport = TcpTransport()
        listener = await transport.listen("tcp://127.0.0.1:0", HELLO, accept)
        target = parse(listener.address)
        route = Route(target_host=target.host, target_port=target.port)
        async with Relay([route], RATE_BPS) as relay:
            channel = await transport.connect(f"tcp://127.0.0.1:{relay.ports[0]}", HELLO)
            thresholds = []
            for rate in (RATE_BPS, RATE_BPS / 2):
                relay.set_rate(rate)
                for _ in range(3):
                    await channel.put(await window, 0, arena.memory, [Span(0, NUM_BYTES)])
                now = time.monotonic()  # over a second later each time: a search is due
                ledger.observe_link(channel.take_deliveries(), now)
                assert ledger.link_bps() == pytest.approx(rate, rel=0.1)
                thresholds.append(controller.update(ledger, now))
            await channel.aclose()
        await listener.aclose()
        assert thresholds[0] < thresholds[1], thresholds

    asyncio.run(work())
