"""Runs a policy in a scenario."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import attrs

from experiment_parts.measures import row_of
from experiment_parts.policies import POLICIES, Parts, Policy, build
from experiment_parts.scenarios import SCENARIOS, Setup
from prfaas.core import Role
from prfaas.policy import BalancerSettings
from prfaas.seams import RoleBalancer
from prfaas.simulator import SimulationResult


@attrs.frozen(kw_only=True)
class Sample:
    """The state once per control period."""

    at_s: float
    threshold_tokens: int
    backlog_bytes: int
    num_prefill: int
    num_waiting: int


@attrs.frozen(kw_only=True)
class Outcome:
    """A run with what was seen on the way."""

    setup: Setup
    parts: Parts
    result: SimulationResult
    samples: list[Sample] = attrs.field(repr=False)

    @property
    def throughput_rps(self) -> float:
        window = self.setup.window
        return self.result.throughput_rps(window.from_s, window.until_s)


def execute(
    policy: Policy,
    setup: Setup,
    *,
    settings: BalancerSettings | None = None,
    balancer: RoleBalancer | None = None,
    until_s: float | None = None,
) -> Outcome:
    """Simulates; a closed loop ends with the window, an open one with the last request."""
    parts = build(
        policy,
        setup.world,
        setup.planned,
        lengths=setup.lengths,
        output_tokens=setup.output_tokens,
        settings=settings,
        balancer=balancer,
    )
    samples: list[Sample] = []

    def sample(now: float, num_ended: int) -> None:
        roles = parts.balancer.plan(now).roles
        samples.append(
            Sample(
                at_s=now,
                threshold_tokens=parts.router.threshold_tokens,
                backlog_bytes=parts.ledger.link_backlog_bytes(),
                num_prefill=sum(
                    role is Role.PREFILL for name, role in roles.items() if "local" in name
                ),
                num_waiting=parts.ledger.num_in_flight,
            )
        )

    simulator = parts.simulator(setup.world)
    if setup.num_clients is None:
        result = simulator.run(setup.arrivals, until_s=until_s, on_progress=sample)
    else:
        end_s = setup.window.until_s if until_s is None else until_s
        result = simulator.run_closed(
            setup.arrivals, setup.num_clients, until_s=end_s, on_progress=sample
        )
    return Outcome(setup=setup, parts=parts, result=result, samples=samples)


@attrs.frozen(kw_only=True)
class Task:
    """A row to make, in values that another process understands."""

    scenario: str
    policy: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
    changes: Mapping[str, Any] = attrs.field(factory=dict)

    def run(self) -> Outcome:
        """Simulates it."""
        policy = attrs.evolve(POLICIES[self.policy], **self.changes)
        return execute(policy, SCENARIOS[self.scenario](policy, **self.options))


def row(task: Task) -> dict[str, object]:
    """The line of a task."""
    return row_with_outcome(task)[0]


def row_with_outcome(task: Task) -> tuple[dict[str, object], Outcome]:
    """The line of a task, and the run behind it."""
    start = time.process_time()
    outcome = task.run()
    policy = attrs.evolve(POLICIES[task.policy], **task.changes)
    setup = outcome.setup
    line: dict[str, object] = {
        "scenario": task.scenario,
        "load": task.options.get("load"),
        "policy": task.policy,
        "hardware": policy.hardware.name,
        "num_prefill": sum(
            n.role is Role.PREFILL for n in setup.world.nodes if "local" in n.node_id
        ),
        "offered_rps": setup.offered_rps,
        **row_of(outcome.result, policy.hardware, setup.window, setup.num_clients),
        "cpu_s": time.process_time() - start,
    }
    return line, outcome
