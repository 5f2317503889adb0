"""What the benchmarks share: timing, the machine's description, and output."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def measure(fn: Callable[[], object], repeats: int, *, warm_ups: int = 1) -> list[float]:
    """Seconds of each of ``repeats`` calls, after some calls that do not count."""
    for _ in range(warm_ups):
        fn()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        samples.append(time.perf_counter() - start)
    return samples


def summary(samples: Sequence[float], calls: int = 1) -> dict[str, float]:
    """Median, best and worst seconds per call, if each sample made ``calls`` of them."""
    return {
        "median_s": statistics.median(samples) / calls,
        "min_s": min(samples) / calls,
        "max_s": max(samples) / calls,
        "num_samples": len(samples),
    }


def machine() -> dict[str, object]:
    """Where the numbers come from."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def parser(description: str) -> argparse.ArgumentParser:
    """Arguments that every benchmark has: --quick and --json."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--quick", action="store_true", help="fewer repeats, rough numbers")
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    return arguments


def emit(
    args: argparse.Namespace, rows: Sequence[Mapping[str, object]], ratios: Mapping[str, float]
) -> None:
    """Prints the result: one JSON object, or a table for people."""
    if args.json:
        result = {"machine": machine(), "rows": list(rows), "ratios": dict(ratios)}
        json.dump(result, sys.stdout)
        print()
        return
    print("  ".join(f"{key}: {value}" for key, value in machine().items()))
    for row in rows:
        cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
        print("  ".join(f"{key} {cell}" for key, cell in zip(row, cells, strict=True)))
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3g}x")
