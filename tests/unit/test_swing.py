"""Slices of one node."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from prfaas.core import NodeId, Role
from prfaas.policy.swing import Swing


def swing_for(share: float, role: Role = Role.DECODE) -> Swing:
    return Swing(NodeId("n"), role=role, share=share, period_s=100.0, now=0.0)


def drive(swing: Swing, seconds: float, *, drain_s: float = 0.0, idle: float = 0.0) -> float:
    """Returns the share of time in prefill; a drain still serves the old role."""
    rng = Random(1)
    role, now, prefill_s, ends_s = Role.DECODE, 0.0, 0.0, None
    while now < seconds:
        now += 0.5
        prefill_s += 0.5 * (role is Role.PREFILL)
        if ends_s is None and swing.wanted(now, is_idle=rng.random() < idle) is not role:
            ends_s = now + (drain_s if role is Role.DECODE else 0.0)
        if ends_s is not None and now >= ends_s:
            role = Role.DECODE if role is Role.PREFILL else Role.PREFILL
            swing.serves(role, now)
            ends_s = None
        swing.check()
    return prefill_s / seconds


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.68, 0.9])
@pytest.mark.parametrize(("drain_s", "idle"), [(0.0, 0.0), (25.0, 0.0), (0.0, 0.05), (9.0, 0.01)])
def test_the_average_duty_is_the_target(share: float, drain_s: float, idle: float) -> None:
    found = drive(swing_for(share), 10_000.0, drain_s=drain_s, idle=idle)
    assert found == pytest.approx(share, abs=0.02)


def test_slices_have_the_length_of_their_share() -> None:
    swing = swing_for(0.7)
    flips, role = [], Role.DECODE
    for _ in range(6):
        flips.append(swing.flip_s())
        assert swing.wanted(flips[-1] - 0.01, is_idle=False) is role
        role = swing.wanted(flips[-1], is_idle=False)
        swing.serves(role, flips[-1])
    lengths = [after - before for before, after in pairwise(flips)]
    assert lengths == pytest.approx([70, 30, 70, 30, 70])


def test_half_a_slice_is_enough_when_the_other_stage_waits() -> None:
    swing = swing_for(0.5, Role.PREFILL)
    assert swing.wanted(24.0, is_idle=True) is Role.PREFILL
    assert swing.wanted(24.5, is_idle=False) is Role.PREFILL
    swing = swing_for(0.5, Role.PREFILL)
    swing.serves(Role.DECODE, 25.0)
    assert swing.wanted(49.0, is_idle=True) is Role.DECODE
    assert swing.wanted(50.0, is_idle=True) is Role.PREFILL


def test_a_new_target_forgives_no_debt() -> None:
    swing = swing_for(0.5)
    swing.wanted(60.0, is_idle=False)
    swing.retune(0.5, 20.0, 60.0)
    swing.serves(Role.PREFILL, 60.0)
    # 30 s behind, then 2.5 s too far ahead.
    assert swing.flip_s() == pytest.approx(60 + 65)
    assert swing.share == 0.5
    assert "prefill" in repr(swing)
