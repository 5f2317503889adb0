"""How a packed batch is cut into sequences, and these into chunks.

Checked once, on the host, when a batch is formed, and then used by every layer: no operation has to
wait for the device to see whether its indices are sound.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

import attrs
import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arguments import whole_numbers

Checkpoints = Sequence[Sequence[int]]
"""Per sequence, the positions whose state is wanted: tokens of this call, rising, from 1."""


@attrs.frozen(kw_only=True)
class HostChunks:
    """The columns of a `ChunkTable` as whole numbers."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    checkpoint_rows: tuple[int, ...]
    first_chunks: tuple[int, ...]


class ChunkTable:
    """Chunks of all sequences, sequence after sequence.

    A chunk ends after ``chunk_size`` tokens, at a checkpoint, or with its sequence, whichever comes
    first; the next begins there, so what follows a checkpoint is cut as a run that resumes from it
    is. Tensors are made when they are first asked for; the torch paths need none.

    Args:
        host: the columns.
        chunk_size: most tokens of a chunk.
        num_checkpoints: rows of the checkpoint output.
        device: where tensors are wanted.
    """

    def __init__(
        self, host: HostChunks, *, chunk_size: int, num_checkpoints: int, device: torch.device
    ) -> None:
        self.host = host
        self.chunk_size = chunk_size
        self.num_checkpoints = num_checkpoints
        self._device = device

    def __repr__(self) -> str:
        return f"<ChunkTable {self.num_chunks} chunks of at most {self.chunk_size} tokens>"

    @property
    def num_chunks(self) -> int:
        return len(self.host.starts)

    @functools.cached_property
    def starts(self) -> torch.Tensor:
        """First token of each chunk in the packed batch, int64 [num_chunks]."""
        return self._tensor(self.host.starts, torch.int64)

    @functools.cached_property
    def lengths(self) -> torch.Tensor:
        """Tokens of each chunk, 1 to ``chunk_size``, int32 [num_chunks]."""
        return self._tensor(self.host.lengths, torch.int32)

    @functools.cached_property
    def checkpoint_rows(self) -> torch.Tensor:
        """Row of the checkpoint output that holds the state after the chunk, -1 for none, int32
        [num_chunks]."""
        return self._tensor(self.host.checkpoint_rows, torch.int32)

    @functools.cached_property
    def first_chunks(self) -> torch.Tensor:
        """First chunk of each sequence, and the end, int32 [num_sequences + 1]."""
        return self._tensor(self.host.first_chunks, torch.int32)

    def _tensor(self, values: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


class Sequences:
    """Lengths of the sequences of a packed batch, checked.

    Args:
        offsets: ``cu_seqlens``: 0, then the end of each sequence in the packed batch.

    Raises:
        ConfigError: not rising from 0, or not whole numbers.
    """

    def __init__(self, offsets: Iterable[int]) -> None:
        self.offsets: tuple[int, ...] = whole_numbers("cu_seqlens", offsets)
        if not self.offsets or self.offsets[0] != 0:
            raise ConfigError(f"cu_seqlens is {list(self.offsets[:3])}...; it must begin with 0")
        for index, (a, b) in enumerate(itertools.pairwise(self.offsets)):
            if b < a:
                raise ConfigError(
                    f"cu_seqlens falls from {a} to {b} at entry {index + 1}; it never falls"
                )
        self._tables: dict[object, ChunkTable] = {}
        self._offset_tensors: dict[torch.device, torch.Tensor] = {}
        self._sequence_ids: dict[torch.device, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"<Sequences {self.num_sequences} of {self.num_tokens} tokens>"

    @classmethod
    def of_lengths(cls, lengths: Iterable[int]) -> Sequences:
        """From the length of each sequence; 0 is allowed."""
        sizes = whole_numbers("lengths", lengths)
        if any(size < 0 for size in sizes):
            raise ConfigError(f"lengths holds {min(sizes)}; a length is at least 0")
        return cls(itertools.accumulate(sizes, initial=0))

    @classmethod
    def of(cls, cu_seqlens: Sequences | Iterable[int] | None, num_tokens: int) -> Sequences:
        """What an operation was given, checked against its packed tensors; None is one sequence.

        A tensor on a device is copied to the host, which waits for the device: make a `Sequences`
        once per batch instead.
        """
        if cu_seqlens is None:
            return cls((0, num_tokens))
        made = cu_seqlens if isinstance(cu_seqlens, Sequences) else cls(cu_seqlens)
        if made.num_tokens != num_tokens:
            raise ConfigError(
                f"cu_seqlens ends with {made.num_tokens}, the packed tensors have {num_tokens} "
                "tokens; these must be equal"
            )
        return made

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in itertools.pairwise(self.offsets))

    def offset_tensor(self, device: torch.device) -> torch.Tensor:
        """``cu_seqlens`` as int64 [num_sequences + 1] on a device."""
        if device not in self._offset_tensors:
            made = torch.tensor(self.offsets, dtype=torch.int64, device=device)
            self._offset_tensors[device] = made
        return self._offset_tensors[device]

    def sequence_ids(self, device: torch.device) -> torch.Tensor:
        """The sequence of every token, int32 [num_tokens] on a device."""
        if device not in self._sequence_ids:
            ids = torch.arange(self.num_sequences, dtype=torch.int32)
            made = ids.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))
            self._sequence_ids[device] = made.to(device)
        return self._sequence_ids[device]

    def chunks(
        self, chunk_size: int, device: torch.device, checkpoints: Checkpoints | None = None
    ) -> ChunkTable:
        """Cuts the sequences; the table is kept, so that all layers of a batch share it.

        Raises:
            ConfigError: a checkpoint lies outside its sequence, or they do not rise.
        """
        wanted = self.check_checkpoints(checkpoints)
        key = (chunk_size, device, wanted)
        if key not in self._tables:
            self._tables[key] = self._cut(chunk_size, device, wanted)
        return self._tables[key]

    def check_checkpoints(self, checkpoints: Checkpoints | None) -> tuple[tuple[int, ...], ...]:
        """Checkpoint positions as tuples, one per sequence."""
        if checkpoints is None:
            return ((),) * self.num_sequences
        if not isinstance(checkpoints, Iterable):
            raise ConfigError(f"checkpoints is {checkpoints!r}; give one list per sequence")
        wanted = tuple(whole_numbers("checkpoints", positions) for positions in checkpoints)
        if len(wanted) != self.num_sequences:
            raise ConfigError(
                f"checkpoints has {len(wanted)} entries for {self.num_sequences} sequences; give "
                "one list of positions per sequence"
            )
        for index, (positions, length) in enumerate(zip(wanted, self.lengths, strict=True)):
            if any(b <= a for a, b in itertools.pairwise((0, *positions))) or (
                positions and positions[-1] > length
            ):
                raise ConfigError(
                    f"checkpoints of sequence {index} are {list(positions)}; they rise from at "
                    f"least 1 to at most its length, {length}"
                )
        return wanted

    def _cut(
        self, chunk_size: int, device: torch.device, wanted: tuple[tuple[int, ...], ...]
    ) -> ChunkTable:
        starts: list[int] = []
        lengths: list[int] = []
        rows: list[int] = []
        firsts = [0]
        num_checkpoints = 0
        for begin, length, positions in zip(self.offsets, self.lengths, wanted, strict=False):
            at = 0
            for stop in (*positions, length):
                is_checkpoint = stop in positions
                while at < stop:
                    size = min(chunk_size, stop - at)
                    starts.append(begin + at)
                    lengths.append(size)
                    at += size
                    rows.append(num_checkpoints if is_checkpoint and at == stop else -1)
                    num_checkpoints += rows[-1] >= 0
            firsts.append(len(starts))

        host = HostChunks(
            starts=tuple(starts),
            lengths=tuple(lengths),
            checkpoint_rows=tuple(rows),
            first_chunks=tuple(firsts),
        )
        return ChunkTable(
            host, chunk_size=chunk_size, num_checkpoints=num_checkpoints, device=device
        )
