from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.policy.load_order import LoadOrder
from prfaas.policy.node_set import members, random_member

SPREAD = 100_003
"""Loads apart from each other, so that an order of many nodes has many chunks."""


def set_of(*positions: int) -> int:
    return sum(1 << position for position in positions)


def order_of(*loads: int) -> LoadOrder:
    order = LoadOrder()
    for position, load in enumerate(loads):
        order.put(position, load)
        order.check()
    return order


@given(st.sets(st.integers(0, 3000), max_size=40))
def test_members_are_the_positions_in_the_set(positions: set[int]) -> None:
    assert list(members(set_of(*positions))) == sorted(positions)


@given(st.sets(st.integers(0, 3000), min_size=1, max_size=40), st.integers())
def test_a_random_member_is_a_member(positions: set[int], seed: int) -> None:
    assert random_member(set_of(*positions), Random(seed)) in positions


@pytest.mark.parametrize(
    "positions",
    [(0, 1, 2, 3), (0, 63, 64, 9999), (*range(10), 5000, 9000), (*range(0, 10_000, 501),)],
)
def test_every_member_is_drawn_equally_often(positions: tuple[int, ...]) -> None:
    rng, nodes = Random(1), set_of(*positions)
    drawn = Counter(random_member(nodes, rng) for _ in range(500 * len(positions)))
    assert set(drawn) == set(positions)
    assert all(400 <= count <= 600 for count in drawn.values())


def test_the_least_load_is_found_in_any_set() -> None:
    order = order_of(50, 20, 30, 20, 10)
    rng = Random(0)
    assert order.least(rng) == 4
    assert order.least(rng, set_of(0, 2)) == 2
    assert order.least(rng, set_of(0)) == 0
    assert order.least(rng, set_of(7, 8)) is None, "positions that are not in the order"
    assert order.least(rng, set_of(0, 7)) == 0
    assert order.least(rng, 0) is None
    assert LoadOrder().least(rng) is None
    assert {order.least(rng, set_of(0, 1, 2, 3)) for _ in range(50)} == {1, 3}


def test_a_load_changes_in_place() -> None:
    order = order_of(5, 6, 7)
    order.put(2, 1)
    order.check()
    assert order.least(Random(0)) == 2
    assert (len(order), order.load(2), order.nodes) == (3, 1, 0b111)
    order.put(2, 1)
    assert len(order) == 3
    order.remove(2)
    order.remove(2)
    order.check()
    assert (len(order), order.load(2), order.nodes) == (2, None, 0b011)
    assert order.least(Random(0)) == 0
    assert repr(order) == "<LoadOrder 2 nodes, 2 different loads>"


def test_H37_equal_nodes_are_chosen_equally_often() -> None:
    order = order_of(*[3] * 40, 9, 9)
    rng = Random(2)
    for within in (None, set_of(*range(1, 42, 2)), set_of(0, 7, 39, 40)):
        drawn = Counter(order.least(rng, within) for _ in range(2000))
        idle = set_of(*range(40)) & (order.nodes if within is None else within)
        assert set(drawn) == set(members(idle))
        fair = 2000 / len(drawn)
        assert all(fair * 0.4 <= count <= fair * 1.8 for count in drawn.values())


def test_many_nodes_of_different_load_come_in_chunks() -> None:
    rng = Random(3)
    loads = [(position * SPREAD) % 1009 for position in range(1000)]
    order = LoadOrder()
    for position, load in enumerate(loads):
        order.put(position, load)
    order.check()
    busiest = sorted(range(1000), key=loads.__getitem__)[-20:]
    assert order.least(rng, set_of(*busiest)) == busiest[0]
    for position in range(0, 1000, 2):
        order.put(position, loads[position] + 5000)
    order.check()
    assert order.least(rng, set_of(*range(0, 1000, 2))) == min(
        range(0, 1000, 2), key=loads.__getitem__
    )
    for position in range(1000):
        order.remove(position)
        if position % 97 == 0:
            order.check()
    assert order.least(rng) is None


def test_chunks_that_empty_become_one() -> None:
    order = order_of(*range(300))
    order.check()
    num_before = len(order._chunks)
    assert num_before >= 3
    for position in range(300):
        if position % 20:
            order.remove(position)
    order.check()
    assert len(order._chunks) < num_before
    assert order.least(Random(0), set_of(*range(1, 300))) == 20


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 300),
            st.one_of(st.none(), st.integers(-3, 3), st.integers(0, 10**6)),
        ),
        max_size=400,
    ),
    wanted=st.sets(st.integers(0, 310)),
    seed=st.integers(),
)
def test_the_order_agrees_with_a_plain_dict(
    steps: list[tuple[int, int | None]], wanted: set[int], seed: int
) -> None:
    order, loads = LoadOrder(), {}
    for position, load in steps:
        if load is None:
            order.remove(position)
            loads.pop(position, None)
        else:
            order.put(position, load)
            loads[position] = load
    order.check()
    assert order.nodes == set_of(*loads)
    for within in (None, set_of(*wanted)):
        among = set(loads) if within is None else set(loads) & wanted
        found = order.least(Random(seed), within)
        assert (found is None) == (not among)
        if found is not None:
            assert found in among
            assert loads[found] == min(loads[position] for position in among)


def test_a_change_of_load_that_fills_the_only_chunk_splits_it() -> None:
    order = order_of(*range(0, 254, 2), 0)  # 127 different loads, one of them twice
    order.put(127, 1)
    order.check()
    assert order.least(Random(0), set_of(1, 127)) == 127
