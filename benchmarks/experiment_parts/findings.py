"""All that the experiments find, and the goals that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from experiment_parts import cache_gain, fractions, goal_rows, goals, ladder
from experiment_parts.cache_gain import Best
from experiment_parts.deployments import HETERO
from experiment_parts.goals import FULL_RPS, T_ONLY_RPS, Goal
from experiment_parts.measures import Window
from experiment_parts.runs import Task, row
from experiment_parts.workloads import trace_of

Rows = Sequence[Mapping[str, Any]]
T_ONLY, FULL = ("adaptive", "max_weight"), ("balancer", "max_weight_balancer")


@attrs.frozen(kw_only=True)
class Findings:
    """Rows of a whole run.

    Attributes:
        trace_name: what the conversations were.
        ladder: see `ladder.rows`; noise: see `ladder.noise_tasks`.
        goal_rows: see `goal_rows.run`.
        arms, cache_rows: the search over caches.
    """

    trace_name: str
    ladder: Rows
    noise: Rows
    goal_rows: Rows
    arms: Sequence[tuple[str, Task]]
    cache_rows: Rows

    @property
    def best_arms(self) -> dict[str, Best]:
        """The best run of every way to use caches, at its best N_p and rate."""
        return cache_gain.best_of(self.arms, self.cache_rows)

    @property
    def num_lost(self) -> int:
        """Requests that vanished, over all runs."""
        every = (*self.ladder, *self.noise, *self.goal_rows, *self.cache_rows)
        return sum(int(r["lost"]) for r in every)

    def fractional_gain(self, name: str) -> dict[str, float]:
        """Way to share a node -> throughput over the best whole split of that hardware.

        ``held`` keeps 25 ms per token on the shared node, ``mixed`` does not look at it.
        """
        rows = [r for r in self.goal_rows if str(r["run"]).startswith(f"{name}, ")]
        whole = max(float(r["throughput_rps"]) for r in rows if r["goal"] == "whole")
        gains = {"slices": goal_rows.rate(rows, "balanced", f"{name}, slices") / whole}
        for share in fractions.BASE_SHARES:
            label = f"{name}, mixed, a = {share:g}"
            gains[f"mixed, a = {share:g}"] = goal_rows.rate(rows, "balanced", label) / whole
            held = [
                float(r["throughput_rps"])
                for r in rows
                if r["goal"] == "shared"
                and f", a = {share:g}, " in str(r["run"])
                and float(r["token_ms"]) <= 1000 * fractions.STEP_S * 1.04
            ]
            if held:
                gains[f"held, a = {share:g}"] = max(held) / whole
        return gains

    def goals(self) -> list[Goal]:
        """Each with what was reached."""
        best = self.best_arms
        t_only = {p: goal_rows.rate(self.goal_rows, "t_only", p) for p in T_ONLY}
        full = {p: goal_rows.rate(self.goal_rows, "full", p) for p in FULL}
        constant = [r for r in self.goal_rows if r["goal"] == "constant"]
        found = [
            Goal(
                name="link_drop_t_only",
                value=t_only["adaptive"] / T_ONLY_RPS,
                goal=0.95,
                note=f"max-weight {t_only['max_weight'] / T_ONLY_RPS:.3f}",
            ),
            Goal(
                name="link_drop_full",
                value=full["balancer"] / FULL_RPS,
                goal=0.95,
                note=f"max-weight + balancer {full['max_weight_balancer'] / FULL_RPS:.3f}",
            ),
            Goal(
                name="cache_aware_gain",
                value=cache_gain.gain(best),
                goal=1.15,
                note="over the paper's rule with the t that is best for this very trace, each at "
                "its best N_p and rate",
            ),
            Goal(
                name="cache_aware_gain_adaptive",
                value=cache_gain.gain(best, "paper, adaptive t"),
                goal=1.15,
                note="over the paper's rule with the t that it finds while it runs",
            ),
            Goal(
                name="conversions_per_200_periods",
                value=max(float(r["conversions_per_200_periods"]) for r in constant),
                goal=1.0,
                at_most=True,
                note="even and Poisson arrivals, 0.9 of the limit",
            ),
            Goal(name="mix_step", value=self.mix_step(), goal=0.95, note="the worst of the steps"),
            Goal(name="lost_requests", value=float(self.num_lost), goal=0.0, at_most=True),
        ]
        gains = self.fractional_gain("hetero")
        own = self.fractional_gain("homogeneous")
        note = f"slices; {_listed(gains)}; homogeneous: {_listed(own)}"
        found.append(Goal(name="fractional_gain", value=gains["slices"], goal=1.03, note=note))
        return found

    def mix_step(self) -> float:
        """Throughput from ten minutes after a step on, over that of the best roles; the worst."""
        shares = []
        for out in goal_rows.STEP_OUTPUTS:
            best = goal_rows.rate(self.goal_rows, "step", f"best roles from the start, {out}")
            for policy in FULL:
                label = f"{policy}, 1024 to {out}"
                shares.append(goal_rows.rate(self.goal_rows, "step", label) / best)
        return min(shares)


def _listed(gains: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {gain:.3f}" for name, gain in gains.items())


def full(path: str | None, num_processes: int) -> Findings:
    """Everything."""
    arms = cache_gain.tasks(path, cache_gain.FULL)
    return Findings(
        trace_name=trace_of(path).name,
        ladder=ladder.rows(path, num_processes),
        noise=ladder.in_parallel(row, ladder.noise_tasks(), num_processes),
        goal_rows=ladder.in_parallel(goal_rows.run, goal_rows.jobs(), num_processes),
        arms=arms,
        cache_rows=ladder.in_parallel(row, [task for _, task in arms], num_processes),
    )


def quick(path: str | None) -> tuple[list[dict[str, object]], dict[str, float]]:
    """The ratios from short runs, one after the other."""
    lines: list[dict[str, object]] = []
    window = Window(from_s=400.0, until_s=1680.0)
    runs = {
        "t only": goals.link_drop_t_only(quick=True),
        "full": goals.link_drop_full(quick=True),
        "even": goals.constant_load("max_weight_balancer", poisson=False, num_periods=100),
        "Poisson": goals.constant_load("max_weight_balancer", poisson=True),
        "whole": fractions.whole(HETERO, 3, window),
        "slices": fractions.balanced(HETERO, "slices", window),
    }
    for name, outcome in runs.items():
        lines.append(
            {
                "run": name,
                "throughput_rps": outcome.throughput_rps,
                "conversions": len(outcome.result.conversions),
                "conversions_per_200_periods": goals.conversions_per_200(outcome),
                "lost": outcome.result.num_lost,
            }
        )
    arms = [
        (arm, task)
        for arm, task in cache_gain.tasks(path, cache_gain.QUICK)
        if arm in (cache_gain.PAPER, "max-weight + prefix transfers")
    ]
    made = [row(task) for _, task in arms]
    lines += [{"run": arm, **line} for (arm, _), line in zip(arms, made, strict=True)]
    ratios = {
        "link_drop_t_only": runs["t only"].throughput_rps / T_ONLY_RPS,
        "link_drop_full": runs["full"].throughput_rps / FULL_RPS,
        "cache_aware_gain": cache_gain.gain(cache_gain.best_of(arms, made)),
        "conversions_per_200_periods": max(
            goals.conversions_per_200(runs[name]) for name in ("even", "Poisson")
        ),
        "lost_requests": float(sum(int(str(line["lost"])) for line in lines)),
        "fractional_gain": runs["slices"].throughput_rps / runs["whole"].throughput_rps,
    }
    return lines, ratios
