"""Drives one run of the demo: starts the processes, sends the requests, compares, reports."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import signal
import sys
import time
from typing import Any

import attrs
import numpy as np
from rich.console import Console

from cluster.models import (
    SEGMENT_TOKENS,
    check_model,
    generate_alone,
    load_model,
    make_engine,
)
from cluster.plot import plot
from cluster.processes import (
    Child,
    GatewaySetup,
    WorkerPlace,
    WorkerSetup,
    gateway_process,
    worker_process,
)
from cluster.report import Progress, print_report
from cluster.workload import Prompt, make_workload
from prfaas.core import ClusterKind, NodeId, Request, RequestId, Role
from prfaas.errors import PrfaasError
from prfaas.runtime.attempt import Generation
from prfaas.runtime.door import Client
from prfaas.runtime.messages import Watch
from prfaas.seams import Hello
from prfaas.testing.relay import RelayConfig, Route, relay_process
from prfaas.transport.address import parse
from prfaas.transport.tcp import TcpTransport

TOLERANCE = 1e-3
EGRESS_PERIOD_S = 0.5
MIN_WIDTH = 130


@attrs.define
class Run:
    """What one run collects."""

    args: argparse.Namespace
    prompts: list[Prompt]
    model: Any
    spec: Any
    started_s: float = attrs.field(factory=time.monotonic)
    rows: list[dict[str, Any]] = attrs.field(factory=list)
    samples: list[dict[str, Any]] = attrs.field(factory=list)
    errors: list[str] = attrs.field(factory=list)
    thresholds: list[tuple[float, int]] = attrs.field(factory=list)
    estimates: list[tuple[float, float]] = attrs.field(factory=list)
    answers: dict[str, Generation] = attrs.field(factory=dict)
    sent_s: dict[str, float] = attrs.field(factory=dict)


class Clusters:
    """The processes of both clusters, the link between them, and the gateway."""

    def __init__(self, run: Run) -> None:
        args = run.args
        self._run = run
        self.workers: dict[str, Child] = {}
        setups = [
            WorkerSetup(
                name=f"prfaas-{i}",
                kind=ClusterKind.PRFAAS,
                role=Role.PREFILL,
                model=args.model,
                block_size=SEGMENT_TOKENS,
                pool_bytes=256 << 20,
            )
            for i in range(args.prfaas_workers)
        ]
        for name, role in (("pd-prefill", Role.PREFILL), ("pd-decode", Role.DECODE)):
            setups.append(
                attrs.evolve(
                    setups[0], name=name, kind=ClusterKind.PD, role=role, sabotage=args.sabotage
                )
            )
        self._setups = setups
        for setup in setups:
            self.workers[setup.name] = Child(setup.name, worker_process, setup)
        self.relay: Child | None = None
        self.gateway: Child | None = None
        self.gateway_address = ""
        self.final_counts: dict[str, dict[str, int]] = {}
        self.killed: str | None = None
        self._is_started = False
        self._asking = asyncio.Lock()

    async def start(self) -> None:
        addresses = {name: await child.receive() for name, child in self.workers.items()}
        routes = [
            Route(target_host=address.host, target_port=address.port)
            for address in (parse(text) for text in addresses.values())
        ]
        rate_bps = self._run.args.link_mbps * 1e6
        self.relay = Child("relay", relay_process, RelayConfig(routes=routes, rate_bps=rate_bps))
        ports = await self.relay.receive()
        relayed = {
            name: f"tcp://127.0.0.1:{port}" for name, port in zip(addresses, ports, strict=True)
        }
        places = tuple(
            WorkerPlace(
                name=setup.name,
                role=setup.role,
                # The gateway lives in the PD cluster: it reaches PRFAAS workers over the link too.
                address=(relayed if setup.kind is ClusterKind.PRFAAS else addresses)[setup.name],
                address_for_prfaas=relayed[setup.name],
            )
            for setup in self._setups
        )
        longest = max(len(prompt.tokens) for prompt in self._run.prompts)
        setup = GatewaySetup(
            spec=self._run.spec, workers=places, max_tokens=longest, seed=self._run.args.seed
        )
        self.gateway = Child("gateway", gateway_process, setup)
        self.gateway_address = await self.gateway.receive()
        self._is_started = True

    async def relay_stats(self) -> dict[str, Any]:
        assert self.relay is not None
        async with self._asking:
            self.relay.pipe.send(("stats",))
            return await self.relay.receive(5.0)

    def set_rate(self, mbps: float) -> None:
        assert self.relay is not None
        self.relay.pipe.send(("rate", mbps * 1e6))

    def kill(self, name: str) -> None:
        self.killed = name
        self.workers[name].kill()

    async def stop(self) -> None:
        """Ends every process, workers last, and collects what workers counted at their end."""
        if not self._is_started:  # they hold nothing yet, and may not listen for a while
            for child in filter(None, (*self.workers.values(), self.gateway, self.relay)):
                child.kill()
        if self.gateway is not None:
            await asyncio.to_thread(self.gateway.join)
        for name, child in self.workers.items():
            if name != self.killed and child.process.is_alive():
                with contextlib.suppress(SystemExit, OSError):
                    child.pipe.send("stop")
                    self.final_counts[name] = await child.receive(10.0)
        for child in self.workers.values():
            await asyncio.to_thread(child.join)
        if self.relay is not None:
            await asyncio.to_thread(self.relay.join)

    def leaked(self) -> int:
        """What is left besides prefix entries; a worker that cannot say counts as one block."""
        leaked = 0
        for name in self.workers:
            if name == self.killed:
                continue
            counts = self.final_counts.get(name)
            if counts is None:
                leaked += 1
                continue
            leaked += counts["reserved_blocks"] + counts["blocks"] - counts["indexed_blocks"]
            leaked += counts["requests"] + counts["leases"] + counts["open_in_engine"]
        return leaked


async def submit(run: Run, client: Client, prompt: Prompt, done: dict[str, asyncio.Event]) -> None:
    if prompt.after is not None:
        await done[prompt.after].wait()
    await asyncio.sleep(max(0.0, run.started_s + prompt.arrival_s - time.monotonic()))
    run.sent_s[prompt.request_id] = time.monotonic() - run.started_s
    request = Request(
        request_id=RequestId(prompt.request_id),
        tokens=prompt.tokens,
        max_new_tokens=run.args.new_tokens,
        deadline_s=run.args.deadline_s,
        return_logits=True,
    )
    try:
        run.answers[prompt.request_id] = await client.generate(request)
    except PrfaasError as error:
        run.errors.append(f"{prompt.request_id}: {type(error).__name__}: {error}")
    finally:
        done[prompt.request_id].set()


async def disturb(
    run: Run, clusters: Clusters, client: Client, done: dict[str, asyncio.Event]
) -> None:
    """Changes the link in mid run, or kills a worker while its cache is on the way."""
    if run.args.link_change is not None:
        while sum(event.is_set() for event in done.values()) < len(done) // 2:
            await asyncio.sleep(0.02)
        clusters.set_rate(run.args.link_change)
    if run.args.kill is not None:
        role = run.args.kill.partition("@")[0]
        sender = await in_mid_transfer(client, "pd-prefill" if role == "local" else "prfaas-")
        clusters.kill("pd-decode" if role == "decode" else sender)


async def in_mid_transfer(client: Client, prefix: str) -> str:
    """The first worker of this kind that has sent a part of an entry and is not done with it."""
    sent: dict[str, int] = {}
    while True:
        for status in await client.statuses():
            if status.node_id.startswith(prefix):
                num_bytes = status.counts.get("sent_bytes", 0)
                if num_bytes > sent.get(status.node_id, 0) and status.counts["jobs"]:
                    return status.node_id
                sent[status.node_id] = num_bytes


async def serve_all(run: Run, clusters: Clusters, progress: Progress) -> dict[str, Any]:
    def on_progress(request_id: str, phase: str) -> None:
        progress.phase(request_id, phase)

    def on_watch(watch: Watch) -> None:
        now = time.monotonic() - run.started_s
        run.thresholds.append((now, watch.threshold_tokens))
        if watch.link_bps is not None:
            run.estimates.append((now, watch.link_bps))
        progress.link(
            threshold_tokens=watch.threshold_tokens,
            link_bps=watch.link_bps,
            egress_bps=egress_bps,
        )

    egress_bps: float | None = None

    async def watch_link() -> None:
        nonlocal egress_bps
        before = 0
        while True:
            num_bytes = (await clusters.relay_stats())["up_bytes"]
            egress_bps, before = 8 * (num_bytes - before) / EGRESS_PERIOD_S, num_bytes
            await asyncio.sleep(EGRESS_PERIOD_S)

    hello = Hello(node_id=NodeId("driver"), epoch=0, fingerprint=run.spec.fingerprint())
    client = await Client.connect(
        TcpTransport(), clusters.gateway_address, hello, on_progress, on_watch
    )
    run.started_s = time.monotonic()
    done = {prompt.request_id: asyncio.Event() for prompt in run.prompts}
    helpers = [
        asyncio.ensure_future(disturb(run, clusters, client, done)),
        asyncio.ensure_future(watch_link()),
    ]
    try:
        await asyncio.gather(*(submit(run, client, prompt, done) for prompt in run.prompts))
        return await clusters.relay_stats()
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        await client.aclose()


def compare(run: Run) -> None:
    """Runs every request again in this process alone, and makes a row of each."""
    dense = run.spec.as_full_attention()
    for prompt in run.prompts:
        answer = run.answers.get(prompt.request_id)
        if answer is None:
            continue
        tokens, logits = generate_alone(run.model, prompt.tokens, run.args.new_tokens)
        ours = np.stack([np.frombuffer(step, np.float32) for step in answer.logits])
        diff = float(np.abs(ours - logits).max())
        record = answer.record
        num_held = int(record["held_tokens"] or 0)
        run.rows.append(
            {
                **record,
                "kind": prompt.kind,
                "arrived_s": run.sent_s[prompt.request_id],
                "dense_bytes": dense.kv_bytes_delta(len(prompt.tokens), num_held),
                "identical": list(answer.tokens) == tokens and diff <= TOLERANCE,
                "max_logit_diff": diff,
            }
        )
        if len(run.samples) < 3 and prompt.kind in ("document", "chat", "short"):
            run.samples.append(
                {
                    "request_id": prompt.request_id,
                    "prompt": prompt.text[-80:],
                    "text": bytes(answer.tokens),
                }
            )


def totals_of(run: Run, clusters: Clusters, stats: dict[str, Any], wall_s: float) -> dict[str, Any]:
    offloaded = [row for row in run.rows if row["offloaded"]]
    return {
        "identical": sum(row["identical"] for row in run.rows),
        "total": len(run.prompts),
        "max_logit_diff": max((row["max_logit_diff"] for row in run.rows), default=None),
        "offloaded": len(offloaded),
        "decode_prefilled_tokens": sum(row["decode_prefilled_tokens"] for row in offloaded),
        "shipped_bytes": sum(row["received_bytes"] for row in offloaded),
        "dense_bytes": sum(row["dense_bytes"] for row in offloaded),
        "relayed_bytes": stats["up_bytes"],
        "egress_bps": 8 * stats["up_bytes"] / max(wall_s, 1e-9),
        "link_bps_true": stats["rate_bps"],
        "link_bps_estimated": run.estimates[-1][1] if run.estimates else None,
        "threshold_tokens": run.thresholds[-1][1] if run.thresholds else None,
        "leaked_blocks": clusters.leaked(),
        "retried": sum(row["attempts"] > 1 for row in run.rows),
        "errors": run.errors,
        "model": run.args.model,
    }


async def run_demo(args: argparse.Namespace, console: Console) -> tuple[Run, dict[str, Any], Any]:
    begun_s = time.monotonic()
    # KDA runs through a slow pure-torch path, so its prompts are shorter.
    max_tokens = 2500 if "kimi" in args.model else 9000
    prompts = make_workload(
        args.seed, size="quick" if args.quick else "full", max_tokens=max_tokens, arrivals_per_s=2
    )
    run = Run(args, prompts, model=None, spec=None)
    clusters = Clusters(run)  # processes load their models while this one loads its own
    stopper = asyncio.current_task()
    assert stopper is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stopper.cancel)
    stats: dict[str, Any] = {}
    try:
        run.model = load_model(args.model)
        run.spec = make_engine(run.model, args.model).spec
        await clusters.start()
        with Progress(len(prompts), console) as progress:
            stats = await serve_all(run, clusters, progress)
        wall_s = time.monotonic() - run.started_s
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the processes end first, then this one
        await clusters.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    compare(run)
    totals = totals_of(run, clusters, stats, wall_s)
    totals["wall_s"] = time.monotonic() - begun_s
    return run, totals, stats


def series_of(run: Run, stats: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    zero_s, interval_s = run.started_s, stats["interval_s"]
    shown = [point for point in stats["series"] if point[0] >= zero_s]
    return {
        "threshold": list(run.thresholds),
        "link_estimate": list(run.estimates),
        "link_true": [(t - zero_s, rate) for t, _, _, rate in shown],
        "egress": [(t - zero_s, 8 * up / interval_s) for t, up, _, _ in shown],
    }


def main(args: argparse.Namespace) -> int:
    """Runs the demo as the command line says; returns the exit status."""
    wrong = check_model(args.model)
    if wrong is not None:
        print(
            f"--model {args.model}: {wrong}; use pocket, random:FAMILY or a folder", file=sys.stderr
        )
        return 2
    console = Console(stderr=args.json)
    if not console.is_terminal:
        console = Console(stderr=args.json, width=MIN_WIDTH)
    try:
        run, totals, stats = asyncio.run(run_demo(args, console))
    except asyncio.CancelledError:
        left = multiprocessing.active_children()
        print(f"interrupted; {len(left)} processes left", file=sys.stderr)
        return 130
    if args.plot:
        plot(args.plot, run.rows, totals, series_of(run, stats))
    if args.json:
        print(json.dumps(totals))
    else:
        print_report(run.rows, totals, run.samples, console)
    for error in run.errors:
        print(f"failed: {error}", file=sys.stderr)
    is_good = totals["identical"] == totals["total"] and totals["leaked_blocks"] == 0
    return 0 if is_good else 1
