"""Sequences, slots and page tables: checked once, on the host."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.kernels import PageTable, Sequences, Slots

CPU = torch.device("cpu")


@given(
    lengths=st.lists(st.integers(0, 200), max_size=6),
    chunk_size=st.sampled_from([1, 16, 64]),
    data=st.data(),
)
def test_chunks_cover_every_token_once_and_end_at_checkpoints(
    lengths: list[int], chunk_size: int, data: st.DataObject
) -> None:
    marks = [
        sorted(data.draw(st.sets(st.integers(1, length), max_size=4))) if length else []
        for length in lengths
    ]
    sequences = Sequences.of_lengths(lengths)
    table = sequences.chunks(chunk_size, CPU, marks)
    tokens = [
        start + i
        for start, length in zip(table.host.starts, table.host.lengths, strict=True)
        for i in range(length)
    ]
    assert tokens == list(range(sum(lengths)))
    ends = []
    for index, (first, stop) in enumerate(itertools.pairwise(table.host.first_chunks)):
        for chunk in range(first, stop):
            assert 1 <= table.host.lengths[chunk] <= chunk_size
            end = table.host.starts[chunk] + table.host.lengths[chunk] - sequences.offsets[index]
            assert end <= lengths[index]
            if table.host.checkpoint_rows[chunk] >= 0:
                ends.append((index, end, table.host.checkpoint_rows[chunk]))
    wanted = [(index, mark) for index, row in enumerate(marks) for mark in row]
    assert ends == [(index, mark, row) for row, (index, mark) in enumerate(wanted)]
    assert table.num_checkpoints == len(wanted)
    for name in ("starts", "lengths", "checkpoint_rows", "first_chunks"):
        assert tuple(getattr(table, name).tolist()) == getattr(table.host, name)


@given(length=st.integers(1, 300), mark=st.integers(1, 300))
def test_what_follows_a_checkpoint_is_cut_as_a_run_that_resumes_there(
    length: int, mark: int
) -> None:
    mark = min(mark, length)
    whole = Sequences.of_lengths([length]).chunks(64, CPU, [[mark]]).host
    rest = Sequences.of_lengths([length - mark]).chunks(64, CPU).host
    after = [
        (start - mark, size)
        for start, size in zip(whole.starts, whole.lengths, strict=True)
        if start >= mark
    ]
    assert after == list(zip(rest.starts, rest.lengths, strict=True))


def test_layers_of_a_batch_share_one_table() -> None:
    sequences = Sequences.of_lengths([5, 70])
    assert sequences.chunks(64, CPU) is sequences.chunks(64, CPU, [[], []])
    assert sequences.chunks(64, CPU) is not sequences.chunks(32, CPU)
    assert sequences.offset_tensor(CPU) is sequences.offset_tensor(CPU)
    assert sequences.sequence_ids(CPU).tolist() == [0] * 5 + [1] * 70


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([], r"is \[\].*must begin with 0"),
        ([1, 4], r"is \[1, 4\].*must begin with 0"),
        (7, "is 7; it is a list"),
        ([0, 4, 2, 9], "falls from 4 to 2 at entry 2"),
        ([0, 4.0], "holds 4.0"),
        ([0, True], "holds True"),
        (torch.tensor([0.0, 4.0]), "float32 tensor"),
        (torch.tensor([[0, 4]]), r"shape \[1, 2\]"),
    ],
)
def test_unsound_cu_seqlens(offsets: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"cu_seqlens (is a .*)?{message}"):
        Sequences.of(offsets, 4)  # type: ignore[arg-type]


def test_cu_seqlens_must_end_with_the_packed_tokens() -> None:
    with pytest.raises(ConfigError, match="ends with 7, the packed tensors have 9"):
        Sequences.of([0, 3, 7], 9)
    assert Sequences.of(torch.tensor([0, 3, 7]), 7).lengths == (3, 4)
    assert Sequences.of(None, 7).lengths == (7,)
    with pytest.raises(ConfigError, match="lengths holds -1"):
        Sequences.of_lengths([3, -1])


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ([[1]], "has 1 entries for 2 sequences"),
        ([[0], []], r"sequence 0 are \[0\]"),
        ([[], [8]], r"sequence 1 are \[8\].*at most its length, 7"),
        ([[2, 2], []], r"sequence 0 are \[2, 2\]"),
        ([[1.5], []], "holds 1.5"),
        ([5, 5], "is 5; it is a list"),
        (5, "is 5; give one list per sequence"),
    ],
)
def test_unsound_checkpoints(checkpoints: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpoints.*{message}"):
        Sequences.of_lengths([3, 7]).chunks(4, CPU, checkpoints)


def test_slots_are_inside_the_pool_and_apart() -> None:
    pool = torch.zeros(8, 2, 3)
    assert Slots.of([3, -1, 0, -1], pool, 4).ids.tolist() == [3, -1, 0, -1]
    for ids, message in (
        ([8], "holds 8 at entry 0; the pool has slots 0 to 7"),
        ([0, -2], "holds -2 at entry 1"),
        ([5, 1, 5], "holds 5 twice"),
        ([1], "has 1 entries for 2 requests"),
    ):
        with pytest.raises(ConfigError, match=f"slots {message}"):
            Slots.of(ids, pool, 2 if len(ids) < 2 else len(ids))
    with pytest.raises(ConfigError, match="checked against 9 slots, the pool has 8"):
        Slots.of(Slots([1], num_slots=9, device="cpu"), pool, 1)
    trusted = Slots.trusted(torch.tensor([7, 7]), num_slots=8)
    assert Slots.of(trusted, pool, 2) is trusted
    with pytest.raises(ConfigError, match=r"ids is torch\.int32"):
        Slots.trusted(torch.tensor([7], dtype=torch.int32), num_slots=8)


def test_slots_of_a_view_by_address_must_not_share_memory() -> None:
    """A view that counts in steps smaller than a state: neighbours overlap, far ones do not."""
    view = torch.zeros(64).as_strided((59, 2, 3), (1, 3, 1))
    Slots.of([0, 6, 12], view, 3)
    with pytest.raises(ConfigError, match="5 apart, 1 elements each, and a state has 6"):
        Slots.of([0, 6, 11], view, 3)
    with pytest.raises(ConfigError, match="would overlap"):
        Slots.of([0], torch.zeros(1, 2, 3).expand(4, 2, 3), 1)
    Slots.of([0], view[:1], 1)


@pytest.mark.parametrize(
    ("pages", "kv_lens", "message"),
    [
        ([[0], [9]], [1, 1], "pages of request 1 hold 9; the cache has pages 0 to 8"),
        ([[0], [-1]], [1, 1], "pages of request 1 hold -1"),
        ([[0], [2, 3]], [1, 33], "kv_lens of request 1 is 33; its 2 pages hold 0 to 32"),
        ([[0]], [-1], "kv_lens of request 0 is -1"),
        ([[0]], [1, 2], "pages has 1 rows for 2 kv_lens"),
        ([[0.5]], [1], "pages holds 0.5"),
        ([[3, 4, 3]], [1], "pages of request 0 hold 3 twice"),
        ([0, 1], [1, 1], "pages is 0; it is a list"),
        (5, [1], "pages is 5; give one list"),
    ],
)
def test_unsound_page_tables(pages: list[list[int]], kv_lens: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PageTable(pages, kv_lens, page_size=16, num_pages=9, device="cpu")


def test_page_tables_are_padded_and_keep_the_longest_length() -> None:
    table = PageTable([[4], [], [2, 8]], [3, 0, 17], page_size=16, num_pages=9, device="cpu")
    assert table.pages.tolist() == [[4, 0], [0, 0], [2, 8]]
    assert table.kv_lens.tolist() == [3, 0, 17]
    assert (table.max_kv_len, table.num_requests) == (17, 3)
    empty = PageTable([], [], page_size=16, num_pages=9, device="cpu")
    assert (empty.num_requests, empty.max_kv_len) == (0, 0)
    with pytest.raises(ConfigError, match=r"pages is torch\.int64"):
        PageTable.trusted(
            torch.zeros(1, 1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int32),
            page_size=16,
            num_pages=9,
            max_kv_len=16,
        )
