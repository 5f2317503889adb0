"""How long sequences are cut into segments that run at the same time."""

from __future__ import annotations

import itertools
import weakref

import attrs
import torch

from prfaas.kernels.sequences import ChunkTable

ENOUGH_PROGRAMS = 100
"""From here on a scan fills a large GPU by itself (an H200 has 132 processors)."""

LEAST_CHUNKS = 128
"""Sequences shorter than this many chunks (8,192 tokens) are not cut."""

LEAST_SEGMENT = 16
"""A segment of fewer chunks costs more in reading and combining states than it saves."""


def num_segments(*, num_sequences: int, heads: int, value_tiles: int, num_chunks: int) -> int:
    """In how many segments the longest sequence of a batch is best cut; 1 for the serial scan.

    A scan has one program per sequence, head and tile of value columns, and each takes as many
    steps as its sequence has chunks. S segments need two scans of 1/S of the steps (the first with
    twice the columns, for the maps), and S small steps between them, so there is little to win
    below three.

    Args:
        num_sequences: sequences of the batch.
        heads: value heads.
        value_tiles: programs per head.
        num_chunks: chunks of the longest sequence.
    """
    programs = num_sequences * heads * value_tiles
    if programs >= ENOUGH_PROGRAMS or num_chunks < LEAST_CHUNKS:
        return 1
    fitting = 2 * ENOUGH_PROGRAMS // max(programs, 1)
    made = min(fitting, num_chunks // LEAST_SEGMENT)
    return made if made >= 3 else 1


@attrs.frozen(kw_only=True, eq=False)
class SegmentTable:
    """Segments of all sequences, sequence after sequence; each sequence has at least one.

    Attributes:
        first_chunks: int32 [num_segments + 1], first chunk of each segment.
        final_rows: int32 [num_segments], for the last segment of a sequence the sequence, else -1.
        first_segments: int32 [num_sequences + 1], first segment of each sequence.
        num_segments: segments of all sequences.
    """

    first_chunks: torch.Tensor
    final_rows: torch.Tensor
    first_segments: torch.Tensor
    num_segments: int


_TABLES: weakref.WeakKeyDictionary[ChunkTable, dict[int, SegmentTable]]
_TABLES = weakref.WeakKeyDictionary()


def segment_table(table: ChunkTable, count: int) -> SegmentTable | None:
    """Cuts sequences after the same number of chunks, so that the longest has ``count`` segments.

    The result is kept with ``table``, so that all layers of a batch share it. None where no
    sequence is cut.
    """
    firsts = table.host.first_chunks
    longest = max((b - a for a, b in itertools.pairwise(firsts)), default=0)
    size = -(-longest // max(count, 1))
    if size >= longest:
        return None
    known = _TABLES.setdefault(table, {})
    if size not in known:
        known[size] = _cut(table, size)
    return known[size]


def _cut(table: ChunkTable, size: int) -> SegmentTable:
    first_chunks: list[int] = []
    final_rows: list[int] = []
    first_segments = [0]
    firsts = table.host.first_chunks
    for sequence, (begin, end) in enumerate(itertools.pairwise(firsts)):
        cuts = range(begin, max(end, begin + 1), size)
        first_chunks += cuts
        final_rows += [-1] * (len(cuts) - 1) + [sequence]
        first_segments.append(len(first_chunks))
    first_chunks.append(firsts[-1])

    def on_device(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=table.starts.device)

    return SegmentTable(
        first_chunks=on_device(first_chunks),
        final_rows=on_device(final_rows),
        first_segments=on_device(first_segments),
        num_segments=len(final_rows),
    )
