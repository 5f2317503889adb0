"""Reference counts and deadlines over anybody's block ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache import LeaseTable
from prfaas.core import BlockId, GroupId, RequestId
from prfaas.errors import LocalProtocolError

PAGES = GroupId(0)
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def test_a_shared_block_is_free_when_its_last_owner_lets_go() -> None:
    table = LeaseTable()
    table.open(A)
    table.open(B)
    assert table.pin(A, PAGES, ids(1, 2)) == (1, 2)
    assert table.pin(B, PAGES, ids(2, 3)) == (3,)
    assert table.count(PAGES, BlockId(2)) == 2
    assert table.num_pinned(PAGES) == 3
    assert table.release(A) == {PAGES: (1,)}
    assert table.unpin(B, PAGES, ids(3)) == (3,)
    assert table.pinned(PAGES) == {2}
    assert table.release(B) == {PAGES: (2,)}
    table.check()


def test_release_is_idempotent() -> None:
    table = LeaseTable()
    table.open(A, lease_until_s=1.0)
    table.pin(A, PAGES, ids(1))
    assert table.release(A) == {PAGES: (1,)}
    assert table.release(A) == {}
    assert table.release(RequestId("never seen")) == {}
    assert table.expired(100.0) == ()


def test_what_is_out_of_order_is_refused_and_changes_nothing() -> None:
    table = LeaseTable()
    table.open(A)
    table.pin(A, PAGES, ids(1))
    before = repr(table)
    with pytest.raises(LocalProtocolError, match="holds blocks already"):
        table.open(A)
    with pytest.raises(LocalProtocolError, match=r"already holds blocks \[1\]"):
        table.pin(A, PAGES, ids(2, 1))
    with pytest.raises(LocalProtocolError, match=r"does not hold blocks \[2\]"):
        table.unpin(A, PAGES, ids(1, 2))
    for call in (
        lambda: table.pin(B, PAGES, ids(1)),
        lambda: table.unpin(B, PAGES, ids(1)),
        lambda: table.renew(B, 1.0),
    ):
        with pytest.raises(LocalProtocolError, match="'b' holds nothing"):
            call()
    assert repr(table) == before
    table.check()


def test_leases_expire_in_order_and_can_be_renewed() -> None:
    table = LeaseTable()
    table.open(A, lease_until_s=2.0)
    table.open(B, lease_until_s=1.0)
    table.open(C)
    assert table.next_deadline() == 1.0
    assert table.expired(0.5) == ()
    assert table.expired(2.0) == (B, A)
    assert table.expired(2.0) == (B, A)
    table.renew(B, 3.0)
    table.renew(C, 1.5)
    assert table.expired(2.0) == (C, A)
    assert (len(table), table.num_leases) == (3, 3)
    table.release(A)
    assert table.next_deadline() == 1.5
    assert A not in table
    assert B in table


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.sampled_from("pur"), st.integers(0, 3))))
def test_counts_equal_what_the_owners_hold(steps: list[tuple[RequestId, str, int]]) -> None:
    table = LeaseTable()
    held: dict[RequestId, set[int]] = {}
    for owner, action, number in steps:
        mine = held.get(owner, set())
        others = set().union(*(blocks for other, blocks in held.items() if other != owner))
        if action == "r":
            expected = mine - others
            assert set(table.release(owner).get(PAGES, ())) == expected
            held.pop(owner, None)
        elif action == "p" and number not in mine:
            if owner not in held:
                table.open(owner)
            held[owner] = {*mine, number}
            assert bool(table.pin(owner, PAGES, ids(number))) == (number not in others)
        elif action == "u" and number in mine:
            mine.remove(number)
            assert bool(table.unpin(owner, PAGES, ids(number))) == (number not in others)
        table.check()
        assert table.pinned(PAGES) == set().union(*held.values())
