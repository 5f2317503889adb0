"""In which order the batched path computes the chunks of a packed batch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import attrs
import torch

from prfaas.kernels.sequences import ChunkTable


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """One chunk of each sequence that still has one; these are computed side by side.

    Attributes:
        width: how many: rows 0 to ``width - 1`` of the batch of states.
        saves: state rows that are checkpoints after this step, with their rows of the output.
    """

    width: int
    saves: tuple[tuple[int, int], ...]


@attrs.frozen(kw_only=True, eq=False)
class Group:
    """Consecutive steps whose inner work is done in one batch.

    Attributes:
        steps: in order.
        starts, lengths: first token and tokens of each chunk, step after step.
        chunk_size: rows of a chunk, those after its length are padding.
    """

    steps: tuple[Step, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    chunk_size: int

    @property
    def num_chunks(self) -> int:
        return len(self.starts)

    def cut(self, device: torch.device) -> Cut:
        """How its tokens are read."""
        size, first = self.chunk_size, self.starts[0]
        wanted = range(first, first + size * self.num_chunks, size)
        if min(self.lengths) == size and self.starts == tuple(wanted):
            return Cut(size=size, first=first, count=self.num_chunks)
        tokens: list[int] = []
        used: list[int] = []
        padding: list[int] = []
        for chunk, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            row, filler = chunk * size, size - length
            tokens += [*range(start, start + length), *[start] * filler]
            used += range(row, row + length)
            padding += range(row + length, row + size)
        tensors = (
            torch.tensor(x, dtype=torch.int64, device=device) for x in (tokens, used, padding)
        )
        return Cut(size=size, first=first, count=self.num_chunks, rows=Rows(*tensors))


@attrs.frozen(eq=False)
class Rows:
    """Rows of chunks that are scattered in memory, or have padding; all int64.

    Attributes:
        tokens: token of each row in the packed batch; for padding, the first of its chunk.
        used: the rows that are no padding.
        padding: the others.
    """

    tokens: torch.Tensor
    used: torch.Tensor
    padding: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class Cut:
    """Reads and writes the tokens of a group as [num_chunks, heads, chunk_size, ...].

    Attributes:
        size, count: of the chunks.
        first: first token.
        rows: None where full chunks follow each other in memory, and no copy is needed.
    """

    size: int
    first: int
    count: int
    rows: Rows | None = None

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """From [num_tokens, heads, ...]; padding repeats a token of its chunk."""
        if self.rows is None:
            x = x[self.first : self.first + self.size * self.count]
        else:
            x = x.index_select(0, self.rows.tokens)
        return x.view(self.count, self.size, *x.shape[1:]).transpose(1, 2)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """The same as a contiguous float32 copy, and padding is zero."""
        if self.rows is not None:
            x = x.index_select(0, self.rows.tokens).index_fill_(0, self.rows.padding, 0.0)
            x = x.view(self.count, self.size, *x.shape[1:]).transpose(1, 2)
        else:
            x = self.read(x)
        return x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def write(self, output: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """The sum of two [num_chunks, heads, chunk_size, dim]."""
        if self.rows is None:
            part = output[self.first : self.first + self.size * self.count]
            torch.add(x, y, out=part.view(self.count, self.size, *part.shape[1:]).transpose(1, 2))
            return
        made = torch.add(x, y).transpose(1, 2).flatten(0, 1)
        used = made.index_select(0, self.rows.used).to(output.dtype)
        output.index_copy_(0, self.rows.tokens.index_select(0, self.rows.used), used)


@attrs.frozen(kw_only=True, eq=False)
class Lanes:
    """Sequences that are computed side by side, the longest first.

    Attributes:
        sequences: index of each in the packed batch.
        groups: their chunks, in order.
    """

    sequences: tuple[int, ...]
    groups: tuple[Group, ...]

    @contextlib.contextmanager
    def of(self, states: torch.Tensor) -> Iterator[torch.Tensor]:
        """Their rows of the states of all sequences, side by side; changes are kept."""
        first = self.sequences[0]
        last = first + len(self.sequences)
        if self.sequences == tuple(range(first, last)):
            yield states[first:last]
            return
        rows = torch.tensor(self.sequences, device=states.device)
        chosen = states.index_select(0, rows)
        yield chosen
        states.index_copy_(0, rows, chosen)


def plan(table: ChunkTable, most_chunks: int) -> Iterator[Lanes]:
    """Orders all chunks so that no group, and no step, has more than ``most_chunks`` of them."""
    firsts = table.host.first_chunks
    counts = [b - a for a, b in itertools.pairwise(firsts)]
    busy = sorted((i for i, count in enumerate(counts) if count), key=lambda i: -counts[i])
    for sequences in _batched(busy, most_chunks):
        yield Lanes(
            sequences=sequences, groups=tuple(_groups(table, sequences, counts, most_chunks))
        )


def _groups(
    table: ChunkTable, sequences: tuple[int, ...], counts: list[int], most_chunks: int
) -> Iterator[Group]:
    host = table.host
    steps: list[Step] = []
    chunks: list[int] = []

    def made() -> Group:
        return Group(
            steps=tuple(steps),
            starts=tuple(host.starts[chunk] for chunk in chunks),
            lengths=tuple(host.lengths[chunk] for chunk in chunks),
            chunk_size=table.chunk_size,
        )

    for at in range(counts[sequences[0]]):
        ids = [host.first_chunks[i] + at for i in sequences if counts[i] > at]
        if chunks and len(chunks) + len(ids) > most_chunks:
            yield made()
            steps, chunks = [], []
        saved = [(row, host.checkpoint_rows[chunk]) for row, chunk in enumerate(ids)]
        steps.append(Step(width=len(ids), saves=tuple(s for s in saved if s[1] >= 0)))
        chunks += ids
    if chunks:
        yield made()


def _batched(items: list[int], size: int) -> Iterator[tuple[int, ...]]:
    for at in range(0, len(items), size):
        yield tuple(items[at : at + size])
