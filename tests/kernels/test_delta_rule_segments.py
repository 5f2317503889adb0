"""Segments of a long sequence that run side by side give what one scan gives."""

from __future__ import annotations

import attrs
import pytest
import torch

from kernel_paths import DEVICE, PATHS, TOLERANCE, relative_error
from poison import PoisonedMemory
from prfaas.kernels.delta import delta_rule
from prfaas.kernels.delta.segments import num_segments, segment_table
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Sequences


@pytest.mark.parametrize(
    ("num_sequences", "heads", "value_tiles", "num_chunks", "wanted"),
    [
        (1, 32, 4, 512, 1),  # 128 programs fill the GPU
        (1, 25, 4, 512, 1),
        (1, 24, 4, 512, 1),  # two segments cost two scans of half the length
        (1, 8, 4, 512, 6),
        (1, 4, 4, 512, 12),
        (1, 1, 4, 512, 32),  # segments of 16 chunks
        (1, 1, 4, 127, 1),
        (1, 1, 4, 128, 8),
        (4, 4, 4, 512, 3),  # the batch is parallel too
        (64, 4, 4, 512, 1),
        (0, 4, 4, 0, 1),
    ],
)
def test_the_rule(
    num_sequences: int, heads: int, value_tiles: int, num_chunks: int, wanted: int
) -> None:
    made = num_segments(
        num_sequences=num_sequences, heads=heads, value_tiles=value_tiles, num_chunks=num_chunks
    )
    assert made == wanted


def test_segments_cover_the_chunks_of_each_sequence() -> None:
    table = Sequences.of_lengths([500, 0, 64, 200]).chunks(64, torch.device("cpu"))
    made = segment_table(table, 3)  # the longest has 8 chunks: 3 each
    assert made is not None
    assert made.first_chunks.tolist() == [0, 3, 6, 8, 8, 9, 12, 13]
    assert made.final_rows.tolist() == [-1, -1, 0, 1, 2, -1, 3]
    assert made.first_segments.tolist() == [0, 3, 4, 5, 7]
    assert made.num_segments == 7
    assert made is segment_table(table, 3)


@pytest.mark.parametrize("count", [1, 0])
def test_one_segment_is_none(count: int) -> None:
    table = Sequences.of_lengths([500]).chunks(64, torch.device("cpu"))
    assert segment_table(table, count) is None


def test_there_are_no_more_segments_than_chunks() -> None:
    table = Sequences.of_lengths([130]).chunks(64, torch.device("cpu"))
    made = segment_table(table, 99)
    assert made is not None
    assert made.num_segments == 3
    assert segment_table(Sequences.of_lengths([64]).chunks(64, torch.device("cpu")), 99) is None
    assert segment_table(Sequences.of_lengths([0]).chunks(64, torch.device("cpu")), 99) is None


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """Arguments of one call in poisoned memory."""

    memory: PoisonedMemory
    tensors: tuple[torch.Tensor, ...]
    initial: torch.Tensor
    sequences: Sequences

    def run(self, path: str, **options: object) -> PrefillResult:
        options = {"initial_state": self.initial, "normalize_qk": True, **options}
        return delta_rule(*self.tensors, cu_seqlens=self.sequences, path=path, **options)


def make(kind: str, dtype: torch.dtype, lengths: list[int], key: int, value: int) -> Case:
    """Two value heads on one key head, or two with gates per channel."""
    generator = torch.Generator().manual_seed(sum(lengths))
    memory = PoisonedMemory()
    sequences = Sequences.of_lengths(lengths)
    tokens, key_heads = sequences.num_tokens, 1 if kind == "gdn" else 2

    def place(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        values = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
        return memory.place(values, row_padding=8)

    gates = torch.rand((tokens, 2, key)[: 2 if kind == "gdn" else 3], generator=generator)
    return Case(
        memory=memory,
        tensors=(
            place(tokens, key_heads, key),
            place(tokens, key_heads, key),
            place(tokens, 2, value),
            memory.place((gates * -0.1).to(DEVICE), row_padding=8),
            memory.place(torch.rand((tokens, 2), generator=generator).to(DEVICE)),
        ),
        initial=place(len(lengths), 2, key, value, dtype=torch.float32),
        sequences=sequences,
    )


def assert_close(got: PrefillResult, truth: PrefillResult, dtype: torch.dtype) -> None:
    for name in ("output", "final_state", "checkpoints"):
        a, b = getattr(got, name), getattr(truth, name)
        assert a.shape == b.shape
        assert relative_error(a, b) < TOLERANCE[dtype], name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("gdn", torch.float32), ("kda", torch.float32), ("gdn", torch.bfloat16)],
)
def test_segments_equal_the_serial_scan(kind: str, dtype: torch.dtype, path: str) -> None:
    """Ragged sequences, one of them empty, with checkpoints inside segments and at their ends."""
    case = make(kind, dtype, [250, 0, 70], 32, 32)
    points = [[17, 128, 250], [], [64]]
    truth = case.run("reference", checkpoints=points)
    cut = case.run(path, checkpoints=points, num_segments=3)
    whole = case.run(path, checkpoints=points, num_segments=1)
    case.memory.check()
    assert_close(cut, truth, dtype)
    assert_close(whole, truth, dtype)
    # Products of the same inputs: only the states between segments differ, by rounding.
    assert relative_error(cut.final_state, whole.final_state) < TOLERANCE[dtype]
    assert torch.equal(cut.final_state[1], case.initial[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_segments_of_odd_sizes_without_initial_state(kind: str, path: str) -> None:
    """Key and value tiles are both partly empty, and the map has other tiles than the values."""
    case = make(kind, torch.float32, [129], 20, 68)
    truth = case.run("reference", initial_state=None)
    made = case.run(path, initial_state=None, num_segments=99)
    case.memory.check()
    assert_close(made, truth, torch.float32)


@pytest.mark.parametrize("path", PATHS)
def test_no_tokens_at_all(path: str) -> None:
    case = make("gdn", torch.float32, [0, 0], 16, 16)
    made = case.run(path, num_segments=4)
    assert torch.equal(made.final_state, case.initial)
    assert made.output.shape == (0, 2, 16)
