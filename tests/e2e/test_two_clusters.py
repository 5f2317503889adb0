"""The main example as its user runs it: real processes, real sockets, a shaped link."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_clusters.py"
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def start(*options: str) -> subprocess.Popen[str]:
    """The example in a process group of its own, so that what it leaves behind can be found."""
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--quick", "--json", "--plot", "", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def group_members(group: int) -> list[int]:
    """Processes of a session, by pid."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def left_over(process: subprocess.Popen[str]) -> list[int]:
    """Processes that stay when the example has ended; kills them.

    The standard library's own resource tracker ends a moment after its parent.
    """
    deadline = time.monotonic() + 5
    while (left := group_members(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def run(*options: str) -> tuple[int, dict[str, object]]:
    """Exit status and the JSON object; no process may be left."""
    process = start(*options)
    try:
        out, err = process.communicate(timeout=200)
    finally:
        left = left_over(process)
    assert not left, f"processes left: {left}\n{err}"
    assert out.strip(), err
    return process.returncode, json.loads(out)


def test_every_output_is_identical_and_nothing_leaks() -> None:
    status, totals = run("--link-mbps", "200")
    assert status == 0, totals
    assert totals["identical"] == totals["total"] == 14
    assert totals["max_logit_diff"] == 0.0
    assert totals["offloaded"] >= 4
    assert totals["decode_prefilled_tokens"] == 0
    assert totals["leaked_blocks"] == 0
    assert totals["shipped_bytes"] * 2 < totals["dense_bytes"]
    assert totals["link_bps_true"] == 200e6
    assert totals["link_bps_estimated"] is not None
    assert totals["relayed_bytes"] >= totals["shipped_bytes"]


def test_a_worker_killed_in_mid_transfer_loses_no_request() -> None:
    status, totals = run("--model", "random:qwen3_5", "--kill", "prefill@mid-transfer")
    assert status == 0, totals
    assert totals["identical"] == totals["total"]
    assert totals["retried"] >= 1
    assert totals["offloaded"] >= 4
    assert not totals["errors"]


@pytest.mark.parametrize("kind", ["state", "kv"])
def test_sabotage_is_noticed(kind: str) -> None:
    status, totals = run("--sabotage", kind)
    assert status == 1
    assert totals["identical"] < totals["total"]
    assert totals["max_logit_diff"] > 1e-3
    assert totals["leaked_blocks"] == 0


def test_ctrl_c_ends_every_process() -> None:
    process = start("--model", "random:qwen3_5")
    try:
        deadline = time.monotonic() + 60
        while len(group_members(process.pid)) < 6:  # driver, 3 workers, relay, gateway
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        for pid in group_members(process.pid):  # a terminal sends it to the whole group
            os.kill(pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        left = left_over(process)
    assert process.returncode == 130, err
    assert not left


def test_wrong_arguments_are_refused_at_once() -> None:
    for options, message in (
        (("--link-mbps", "-3"), "greater than 0"),
        (("--deadline-s", "0"), "greater than 0"),
        (("--model", "random:gpt"), "random families are kimi_linear"),
        (("--model", "nowhere"), "holds no config.json"),
    ):
        process = start(*options)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2, err
        assert message in err
        assert "Traceback" not in err
