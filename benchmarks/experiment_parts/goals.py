"""What the policies are for: each goal with its measured value beside its reference."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import attrs

from experiment_parts import workloads
from experiment_parts.deployments import HETERO, SLOW_BPS, at_split, optimum
from experiment_parts.measures import Window
from experiment_parts.policies import POLICIES, Policy
from experiment_parts.runs import Outcome, execute
from experiment_parts.scenarios import NUM_CLIENTS, Setup, drop_schedule, world_of
from prfaas.capacity import RateForm
from prfaas.workload import Arrival

T_ONLY_RPS, FULL_RPS = 1.77, 2.25
"""Best rate at 5 Gbps with N_p = 3 and with the best N_p, mean form; see `link_references`."""
PERIOD_S = 10.0
LINK_CLIENTS = 120
"""Enough to fill five decode nodes twice; more only wait for the slow link, and give up there."""


@attrs.frozen(kw_only=True)
class Goal:
    """A number to reach, and whether it was."""

    name: str
    value: float
    goal: float
    at_most: bool = False
    note: str = ""

    @property
    def is_met(self) -> bool:
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def link_references() -> dict[str, float]:
    """What the capacity model says of 5 Gbps, in both forms."""
    found = {}
    for form in RateForm:
        at = {"egress_bps": SLOW_BPS, "form": form}
        found[f"t only, {form.value}"] = at_split(HETERO, 3, **at).limit_rps  # type: ignore[arg-type]
        found[f"full, {form.value}"] = optimum(HETERO, **at).limit_rps  # type: ignore[arg-type]
    return found


def closed_link_drop(
    policy: Policy, *, drop_s: float, from_s: float, for_s: float, back_s: float = 0.0
) -> Outcome:
    """A saturated deployment whose link falls to 5 Gbps at ``drop_s``.

    Counts from ``from_s`` after the drop, for ``for_s`` seconds; the link comes back then, and the
    run goes on for ``back_s``.
    """
    end_s = drop_s + from_s + for_s
    schedule = drop_schedule(drop_s, from_s + for_s)
    setup = Setup(
        world=world_of(HETERO, 3, schedule=schedule),
        arrivals=workloads.even_prompts(1),
        window=Window(from_s=drop_s + from_s, until_s=end_s),
        planned=optimum(HETERO),
        num_clients=LINK_CLIENTS,
    )
    return execute(policy, setup, until_s=end_s + back_s)


def link_drop_t_only(name: str = "adaptive", *, quick: bool = False) -> Outcome:
    """At fixed roles, from a minute after the drop on."""
    for_s = 1200.0 if quick else 1800.0
    return closed_link_drop(
        POLICIES[name], drop_s=120.0 if quick else 600.0, from_s=60.0, for_s=for_s
    )


def link_drop_full(name: str = "balancer", *, quick: bool = False, back_s: float = 0.0) -> Outcome:
    """With a balancer, from ten minutes after the drop on."""
    for_s = 1200.0 if quick else 1800.0
    return closed_link_drop(
        POLICIES[name],
        drop_s=120.0 if quick else 600.0,
        from_s=600.0,
        for_s=for_s,
        back_s=back_s,
    )


def constant_load(
    name: str, *, poisson: bool, load: float = 0.9, num_periods: int = 200, seed: int = 0
) -> Outcome:
    """A balancer with nothing to do, for so many control periods after ten of warm-up."""
    rate_rps = load * optimum(HETERO).limit_rps
    duration_s = (num_periods + 10) * PERIOD_S
    make = workloads.steady if poisson else workloads.evenly
    setup = Setup(
        world=world_of(HETERO, 3),
        arrivals=make(rate_rps, duration_s, seed),
        window=Window(from_s=10 * PERIOD_S, until_s=duration_s),
        planned=optimum(HETERO),
        offered_rps=rate_rps,
    )
    return execute(POLICIES[name], setup, until_s=duration_s)


def conversions_per_200(outcome: Outcome) -> float:
    """Changes of role in 200 control periods of the window."""
    window = outcome.setup.window
    num = sum(c.at_s >= window.from_s for c in outcome.result.conversions)
    return num * 200 * PERIOD_S / window.length_s


def stepped_prompts(at_number: int, output_tokens: int, seed: int = 2) -> Iterator[Arrival]:
    """Prompts of the case study; from number ``at_number`` on with other outputs."""
    yield from islice(workloads.even_prompts(seed), at_number)
    changed = workloads.even_prompts(seed, output_tokens=output_tokens)
    yield from islice(changed, at_number, None)


def mix_step(name: str, output_tokens: int, *, num_prefill: int = 3, step: bool = True) -> Outcome:
    """Outputs change in a saturated deployment, some 300 s after the start; counts from ten
    minutes after that on. Without ``step`` the new mix holds from the start."""
    step_s = 300.0
    number = round(step_s * optimum(HETERO).limit_rps) if step else 0
    planned = optimum(HETERO, output_tokens=output_tokens)
    setup = Setup(
        world=world_of(HETERO, num_prefill),
        arrivals=stepped_prompts(number, output_tokens),
        window=Window(from_s=step_s + 600.0 + 60.0, until_s=step_s + 600.0 + 60.0 + 1200.0),
        planned=planned,
        num_clients=NUM_CLIENTS,
    )
    return execute(POLICIES[name], setup)
