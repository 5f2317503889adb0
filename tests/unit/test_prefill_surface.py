"""Prefill time from a table over new and cached tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.capacity import PrefillProfile, PrefillSurface
from prfaas.errors import ConfigError

GRID = (
    (100, 0, 1.0),
    (200, 0, 2.0),
    (100, 1000, 1.5),
    (200, 1000, 3.5),
)


def test_bilinear_inside_a_full_grid():
    surface = PrefillSurface(GRID)
    for new, cached, seconds in GRID:
        assert surface.prefill_s(new, cached) == seconds
    assert surface.prefill_s(150, 0) == 1.5
    assert surface.prefill_s(100, 500) == 1.25
    assert surface.prefill_s(150, 500) == 2.0  # the mean of the four corners


def test_linear_outside_and_never_below_zero():
    surface = PrefillSurface(GRID)
    assert surface.prefill_s(300, 0) == 3.0
    assert surface.prefill_s(300, 1000) == 5.5
    assert surface.prefill_s(200, 2000) == 5.0
    steep = PrefillSurface(((100, 0, 1.0), (200, 0, 3.0), (100, 10, 2.0), (200, 10, 5.0)))
    assert steep.prefill_s(0, 0) == 0.0
    late = PrefillSurface(((100, 10, 1.0), (200, 10, 2.0), (100, 20, 9.0), (200, 20, 9.0)))
    assert late.prefill_s(100, 0) == 0.0


def test_rows_need_not_share_their_lengths_nor_come_in_order():
    surface = PrefillSurface(
        ((64, 512, 0.7), (16, 512, 0.4), (10, 0, 0.1), (50, 0, 0.5), (100, 0, 1.0))
    )
    assert surface.prefill_s(30, 0) == pytest.approx(0.3)
    assert surface.prefill_s(40, 512) == pytest.approx(0.55)
    assert surface.prefill_s(40, 256) == pytest.approx((0.4 + 0.55) / 2)
    assert surface.prefill_s(75) == surface.prefill_s(75, 0) == pytest.approx(0.75)


def test_three_rows_meet_in_the_middle_one():
    rows = [(n, c, 1 + n / 100 + c * c / 1e4) for c in (0, 100, 300) for n in (100, 200)]
    surface = PrefillSurface(rows)
    assert surface.prefill_s(100, 100) == pytest.approx(3.0)
    assert surface.prefill_s(100, 50) == pytest.approx(2.5)
    assert surface.prefill_s(100, 200) == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("measurements", "words"),
    [
        ((), "0 rows"),
        (GRID[:2], "1 rows"),
        (GRID[:3], "at least 2 lengths"),
        ((*GRID, (100, 0, 1.1)), "twice"),
        ((*GRID[:3], (200, 1000, math.nan)), "not usable"),
        ((*GRID[:3], (math.nan, 1000, 3.5)), "not usable"),
        ((*GRID[:3], (200, math.inf, 3.5)), "not usable"),
        ((*GRID[:3], (200, -1, 3.5)), "not usable"),
        ((*GRID[:3], (200, 1000, 0.0)), "not usable"),
        ((*GRID[:3], (200, 1000, 1.4)), "row of 1000 cached tokens"),
        ((*GRID[:2], (100, 1000, 0.9), (200, 1000, 3.5)), "cannot be faster"),
        ((*GRID[:2], (50, 1000, 0.6), (150, 1000, 1.4), (300, 1000, 9.0)), "cannot be faster"),
    ],
)
def test_a_table_is_checked_at_the_door(measurements, words):
    with pytest.raises(ConfigError, match=words):
        PrefillSurface(measurements)


def test_rows_that_do_not_overlap_are_not_compared():
    PrefillSurface(((1000, 0, 5.0), (2000, 0, 9.0), (10, 64, 0.1), (20, 64, 0.2)))


@given(st.floats(50, 300), st.floats(0, 2000), st.floats(0, 100))
def test_a_table_made_from_a_curve_reads_like_the_curve(new, cached, more):
    curve = PrefillProfile.sampled(lambda n: 0.2 + 1e-4 * n + 1e-9 * n * n, range(0, 4001, 100))
    surface = PrefillSurface(
        (n, c, curve.prefill_s(n, c)) for n in (50, 100, 200, 300) for c in range(0, 2001, 200)
    )
    here = surface.prefill_s(new, cached)
    assert here == pytest.approx(curve.prefill_s(new, cached), rel=1e-3)
    assert surface.prefill_s(new + more, cached) >= here
    assert surface.prefill_s(new, cached + more) >= here
