"""The CPU part: contests of operations and of whole models, with 1 and 2 threads."""

from __future__ import annotations

import os
import time

import torch
import transformers

from kernel_bench import contests, cpu, models
from kernel_bench.timers import HostTimer

THREADS = (2, 1)
NUM_TOKENS, QUICK_TOKENS = 4096, 2048
PROMPT_TOKENS = {"pocket": 2048, "kimi": 1024}
"""The fallback of kimi_linear is slow: 1,024 tokens leave time for several samples."""
QUICK_S = 25.0
"""After this a quick run takes one sample of each."""


def names() -> list[str]:
    """Of every contest."""
    return [*cpu.contests(QUICK_TOKENS), *(f"{name}_prefill" for name in models.MODELS)]


def run(*, is_quick: bool, only: str) -> tuple[list[dict[str, object]], dict[str, float]]:
    """Rows and ratios of the contests whose name has ``only`` in it."""
    timer = HostTimer(min_rounds=9, max_rounds=200, budget_s=6.0, limit_s=20.0)
    if is_quick:
        deadline = time.perf_counter() + QUICK_S
        timer = HostTimer(min_rounds=3, max_rounds=40, budget_s=0.3, limit_s=4.0, deadline=deadline)
    rows: list[dict[str, object]] = [
        {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        }
    ]
    ratios: dict[str, float] = {}

    def add(contest: contests.Contest) -> None:
        made = contests.run(contest, timer, THREADS)
        rows.extend(made[0])
        ratios.update(made[1])

    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            builds = cpu.contests(QUICK_TOKENS if is_quick else NUM_TOKENS)
            for name in cpu.FIRST:
                if only in name:
                    add(builds.pop(name)())
            for name in models.MODELS:
                if only in f"{name}_prefill":
                    contest, engines = models.prefill_contest(name, PROMPT_TOKENS[name])
                    add(contest)
                    decode = models.decode_rows(name, engines, 10 if is_quick else 60)
                    rows += decode
                    ours, theirs = (row["median_ms"] for row in decode)
                    ratios[f"{name}_decode_vs_transformers"] = theirs / ours
            for name, build in builds.items():
                if only in name:
                    add(build())
    finally:
        torch.set_num_threads(before)
    return rows, ratios
