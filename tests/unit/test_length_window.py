"""The window keeps its lengths in order as they come; here is what it must answer, in slow."""

from __future__ import annotations

import math
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.policy import length_window
from prfaas.policy.length_window import LengthWindow

MAX_LENGTHS = 5
"""Distinct lengths of a search here, so that few observations make groups."""


@pytest.fixture(autouse=True, scope="module")
def few_lengths():
    patch = pytest.MonkeyPatch()
    patch.setattr(length_window, "_MAX_LENGTHS", MAX_LENGTHS)
    yield
    patch.undo()


def slow_weights(prior: list[int], recent: deque[int], prior_weight: int) -> dict[int, float]:
    """Every recent length counts 1, and the prior what it still has to; then groups of equal size,
    each under its longest length."""
    assert recent.maxlen is not None
    fading = max(0, min(prior_weight, recent.maxlen) - len(recent)) / len(prior)
    shares = {length: float(num) for length, num in Counter(recent).items()}
    if fading or not shares:
        for length in prior:
            shares[length] = shares.get(length, 0.0) + (fading or 1.0)
    lengths = sorted(shares)
    size = math.ceil(len(lengths) / MAX_LENGTHS)
    groups = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    return {group[-1]: sum(shares[n] for n in group) for group in groups}


LENGTHS = st.integers(1, 30)


@given(
    prior=st.lists(LENGTHS, min_size=1, max_size=8),
    size=st.integers(1, 25),
    prior_weight=st.integers(0, 30),
    observed=st.lists(LENGTHS, max_size=60),
)
def test_the_answers_are_those_of_a_window_that_sorts_whenever_it_is_asked(
    prior: list[int], size: int, prior_weight: int, observed: list[int]
) -> None:
    window = LengthWindow(prior, size=size, prior_weight=prior_weight)
    recent: deque[int] = deque(maxlen=size)
    for length in [None, *observed]:
        if length is not None:
            window.observe(length)
            recent.append(length)
        window.check()
        known = sorted(recent) or sorted(prior)
        assert window.weights() == pytest.approx(slow_weights(prior, recent, prior_weight))
        assert len(window) == len(recent)
        assert window.longest == known[-1]
        assert window.mean == sum(known) // len(known)
        for share in (0.0, 0.5, 0.9):
            assert window.quantile(share) == known[int(share * len(known))]


def test_equal_lengths_leave_the_window_one_by_one() -> None:
    window = LengthWindow([1], size=3, prior_weight=0)
    for length in (5, 5, 5, 9):
        window.observe(length)
    assert window.weights() == {5: 2.0, 9: 1.0}
    window.observe(9)
    assert window.weights() == {5: 1.0, 9: 2.0}
