"""Which bytes are sent when, and what has landed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import TransferPair
from pools import HYBRID
from prfaas.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from prfaas.transfer import DataReceiver, DataSender, PutRange, TransferState

MIB = 1 << 20


def put(put_id: int, offset: int, num_bytes: int) -> PutRange:
    return PutRange(put_id=put_id, offset=offset, num_bytes=num_bytes)


def test_adjacent_ready_ranges_become_one_put() -> None:
    data = DataSender(100, chunk_bytes=40, max_inflight_bytes=100, min_put_bytes=1)
    for offset in (20, 0, 10):
        data.ready(offset, 10)
    assert data.next_puts() == (put(0, 0, 30),)
    assert data.next_puts() == ()
    data.ready(30, 70)
    assert data.next_puts() == (put(1, 30, 40), put(2, 70, 30))
    assert repr(data) == "<DataSender 0/100 B acknowledged, 100 in flight, 0 ready, 0 to come>"


def test_short_pieces_wait_for_neighbours_or_the_end() -> None:
    data = DataSender(100, chunk_bytes=40, max_inflight_bytes=100, min_put_bytes=16)
    data.ready(0, 15)
    data.ready(50, 45)
    assert data.next_puts() == (put(0, 50, 40),)
    data.ready(15, 1)
    assert data.next_puts() == (put(1, 0, 16),)
    data.finish()
    assert data.next_puts() == (put(2, 16, 34), put(3, 90, 10))
    data.check()


def test_bytes_in_flight_are_bounded() -> None:
    data = DataSender(1000, chunk_bytes=100, max_inflight_bytes=250, min_put_bytes=1)
    data.finish()
    first, second = data.next_puts()
    assert data.inflight_bytes == 200
    assert data.next_puts() == ()
    data.acked(second.put_id)
    assert data.next_puts() == (put(2, 200, 100),)
    assert (data.sent_bytes, data.inflight_bytes) == (100, 200)
    data.acked(first.put_id)
    assert not data.is_complete
    data.check()


def test_nothing_is_sent_twice_unless_its_put_failed() -> None:
    data = DataSender(100, chunk_bytes=50, max_inflight_bytes=100, min_put_bytes=1)
    data.ready(0, 100)
    data.ready(30, 40)
    first, second = data.next_puts()
    data.ready(0, 100)
    assert data.next_puts() == ()
    data.failed(first.put_id)
    data.acked(second.put_id)
    assert data.num_failed == 1
    (again,) = data.next_puts()
    assert again == put(2, first.offset, first.num_bytes)
    data.acked(again.put_id)
    assert data.is_complete
    assert data.sent_bytes == 100
    data.finish()
    assert data.next_puts() == ()
    data.check()


def test_a_put_is_reported_once() -> None:
    data = DataSender(10, chunk_bytes=10, max_inflight_bytes=10, min_put_bytes=1)
    data.finish()
    data.next_puts()
    data.acked(0)
    for report in (data.acked, data.failed):
        for put_id in (0, 7):
            with pytest.raises(LocalProtocolError, match=f"put {put_id} is not in flight"):
                report(put_id)
    assert data.sent_bytes == 10
    data.check()


def test_a_rank_sends_its_share_only() -> None:
    data = DataSender(
        100, share=[(60, 20), (10, 10)], chunk_bytes=50, max_inflight_bytes=50, min_put_bytes=1
    )
    for offset, num_bytes in ((0, 11), (79, 2), (-1, 5), (90, 20)):
        with pytest.raises(LocalProtocolError, match="not in this rank's"):
            data.ready(offset, num_bytes)
    data.finish()
    assert data.next_puts() == (put(0, 10, 10), put(1, 60, 20))
    data.acked(0)
    data.acked(1)
    assert data.is_complete
    assert data.sent_bytes == 30


def test_h13_a_rank_with_nothing_to_send_is_complete_at_once() -> None:
    for data in (DataSender(0), DataSender(100, share=[])):
        assert data.is_complete
        data.finish()
        assert data.next_puts() == ()
        assert data.sent_bytes == 0
        data.check()


@pytest.mark.parametrize(
    ("chunk_bytes", "max_inflight_bytes", "min_put_bytes"), [(10, 9, 1), (10, 10, 11), (10, 10, 0)]
)
def test_limits_are_checked(chunk_bytes: int, max_inflight_bytes: int, min_put_bytes: int) -> None:
    with pytest.raises(ConfigError, match="each must be at least 1 and at most the next"):
        DataSender(
            100,
            chunk_bytes=chunk_bytes,
            max_inflight_bytes=max_inflight_bytes,
            min_put_bytes=min_put_bytes,
        )


def test_a_share_is_checked() -> None:
    with pytest.raises(ConfigError, match="repeats bytes"):
        DataSender(100, share=[(0, 10), (5, 10)])
    with pytest.raises(ConfigError, match="not a range"):
        DataSender(100, share=[(95, 10)])


def test_h12_five_gib_are_covered_once_by_puts_within_the_limit() -> None:
    num_bytes = 5 * 1024 * MIB + 3
    data = DataSender(num_bytes, chunk_bytes=4 * MIB, max_inflight_bytes=64 * MIB)
    receiver = DataReceiver(num_bytes)
    data.finish()
    num_puts = 0
    while puts := data.next_puts():
        for one in puts:
            assert 0 < one.num_bytes <= 4 * MIB
            assert receiver.landed(one.offset, one.num_bytes) == one.num_bytes
            data.acked(one.put_id)
            num_puts += 1
    assert data.is_complete
    assert receiver.is_complete
    assert receiver.missing() == ()
    assert num_puts == 5 * 256 + 1


@given(
    num_bytes=st.integers(0, 300),
    limits=st.tuples(st.integers(1, 20), st.integers(0, 40), st.integers(0, 100)),
    seed=st.integers(0, 2**32),
)
def test_h15_only_ready_bytes_are_sent_and_all_of_them_in_the_end(
    num_bytes: int, limits: tuple[int, int, int], seed: int
) -> None:
    least, more, most = limits
    data = DataSender(
        num_bytes,
        min_put_bytes=least,
        chunk_bytes=least + more,
        max_inflight_bytes=least + more + most,
    )
    receiver = DataReceiver(num_bytes)
    rng = random.Random(seed)
    cuts = sorted({0, num_bytes, *(rng.randint(0, num_bytes) for _ in range(8))})
    pieces = [(a, b - a) for a, b in pairwise(cuts)]
    rng.shuffle(pieces)
    is_ready = bytearray(num_bytes)
    finished = False
    flying: list[PutRange] = []
    while not data.is_complete:
        action = rng.choice(["ready", "ready", "put", "ack", "fail"])
        if action == "ready" and pieces:
            offset, length = pieces.pop()
            is_ready[offset : offset + length] = b"\1" * length
            data.ready(offset, length)
        elif action == "ready":
            data.finish()
            finished = True
        elif action == "put":
            puts = data.next_puts()
            flying += puts
            for one in puts:
                assert all(is_ready[one.offset : one.offset + one.num_bytes])
                assert one.num_bytes >= least or finished
        elif flying:
            one = flying.pop(rng.randrange(len(flying)))
            if action == "fail":
                data.failed(one.put_id)
            else:
                data.acked(one.put_id)
                assert receiver.landed(one.offset, one.num_bytes) == one.num_bytes
        data.check()
        receiver.check()
    assert not flying
    assert receiver.is_complete
    assert data.sent_bytes == num_bytes


@pytest.mark.parametrize("seed", range(5))
def test_h15_layers_in_any_order_arrive_with_their_final_bytes(seed: int) -> None:
    """The sender's memory is 0xFF until a piece is ready; the pair compares at the receiver."""
    pair = TransferPair(HYBRID, 19, num_senders=2, seed=seed)
    pieces = pair.pieces()
    random.Random(seed).shuffle(pieces)
    pair.deliver_to_receiver()
    pair.deliver_to_sender()
    for piece in pieces:
        pair.make_ready(piece)
        pair.start_puts()
        for one in tuple(pair.puts):
            pair.land(one)
        for one in tuple(pair.puts):
            pair.acknowledge(one)
    pair.run()
    assert pair.installed
    assert pair.sender.state is pair.receiver.state is TransferState.LANDED


def test_landings_may_repeat_and_overlap() -> None:
    receiver = DataReceiver(100)
    assert receiver.landed(10, 20) == 20
    assert receiver.landed(10, 20) == 0
    assert receiver.landed(5, 10) == 5
    assert receiver.missing() == ((0, 5), (30, 70))
    assert receiver.landed_bytes == 25
    assert repr(receiver) == "<DataReceiver 25/100 B landed>"
    assert not receiver.is_complete
    assert receiver.landed(0, 100) == 75
    assert receiver.is_complete


def test_landings_outside_the_entry_are_the_peers_fault() -> None:
    receiver = DataReceiver(100, max_ranges=2)
    for offset, num_bytes in ((-1, 5), (99, 2), (2**63, 1), (5, -1)):
        with pytest.raises(RemoteProtocolError, match="of an entry of 100"):
            receiver.landed(offset, num_bytes)
    receiver.landed(0, 1)
    receiver.landed(2, 1)
    with pytest.raises(RemoteProtocolError, match="at most 2 are kept"):
        receiver.landed(4, 1)
    assert receiver.landed_bytes == 2
    receiver.check()
