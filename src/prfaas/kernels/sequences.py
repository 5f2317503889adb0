"""How a packed batch is cut: sequences into chunks, requests into slots and pages.

These values are checked once, on the host, when a batch is formed, and are then used by every
layer: no operation has to wait for the device to see whether its indices are sound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import attrs
import torch

from prfaas.errors import ConfigError

Checkpoints = Sequence[Sequence[int]]
"""Per sequence, the positions whose state is wanted: tokens of this call, rising, from 1."""

_FAR = 2**62
"""Distance between slots where there is only one, or where nobody looked."""


@attrs.frozen(kw_only=True, eq=False)
class ChunkTable:
    """Chunks of all sequences, sequence after sequence.

    A chunk ends after ``chunk_size`` tokens, at a checkpoint, or with its sequence, whichever comes
    first; the next begins there, so what follows a checkpoint is cut as a run that resumes from it
    is.

    Attributes:
        chunk_size: most tokens of a chunk.
        starts: int64 [num_chunks], first token of each chunk in the packed batch.
        lengths: int32 [num_chunks], 1 to ``chunk_size``.
        checkpoint_rows: int32 [num_chunks], row of the checkpoint output that holds the state after
            the chunk; -1 for none.
        first_chunks: int32 [num_sequences + 1], first chunk of each sequence.
        host: the same four as tuples of whole numbers.
        num_checkpoints: rows of the checkpoint output.
    """

    chunk_size: int
    starts: torch.Tensor
    lengths: torch.Tensor
    checkpoint_rows: torch.Tensor
    first_chunks: torch.Tensor
    host: HostChunks
    num_checkpoints: int

    @property
    def num_chunks(self) -> int:
        return len(self.host.starts)


@attrs.frozen(kw_only=True)
class HostChunks:
    """The columns of a `ChunkTable` on the host."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    checkpoint_rows: tuple[int, ...]
    first_chunks: tuple[int, ...]


class Sequences:
    """Lengths of the sequences of a packed batch, checked.

    Args:
        offsets: ``cu_seqlens``: 0, then the end of each sequence in the packed batch.

    Raises:
        ConfigError: not rising from 0, or not whole numbers.
    """

    def __init__(self, offsets: Iterable[int]) -> None:
        self.offsets: tuple[int, ...] = _ints("cu_seqlens", offsets)
        if not self.offsets or self.offsets[0] != 0:
            first = self.offsets[:1] or "empty"
            raise ConfigError(f"cu_seqlens starts with {first}; it starts with 0")
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
        sizes = _ints("lengths", lengths)
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
        wanted = tuple(_ints("checkpoints", positions) for positions in checkpoints)
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

        def on_device(values: list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return ChunkTable(
            chunk_size=chunk_size,
            starts=on_device(starts, torch.int64),
            lengths=on_device(lengths, torch.int32),
            checkpoint_rows=on_device(rows, torch.int32),
            first_chunks=on_device(firsts, torch.int32),
            host=HostChunks(
                starts=tuple(starts),
                lengths=tuple(lengths),
                checkpoint_rows=tuple(rows),
                first_chunks=tuple(firsts),
            ),
            num_checkpoints=num_checkpoints,
        )


class Slots:
    """Slot ids of the requests of a decode batch, checked: inside the pool, none twice.

    Args:
        ids: per request its slot; -1 for a padding row, which is skipped.
        num_slots: slots of the pool.
        device: where the pool is.

    Raises:
        ConfigError: an id outside the pool, or one that occurs twice (two requests would overwrite
            one state).
    """

    def __init__(self, ids: Iterable[int], *, num_slots: int, device: torch.device | str) -> None:
        values = _ints("slots", ids)
        seen: set[int] = set()
        for index, slot in enumerate(values):
            if not -1 <= slot < num_slots:
                raise ConfigError(
                    f"slots holds {slot} at entry {index}; the pool has slots 0 to "
                    f"{num_slots - 1}, and -1 is a padding row"
                )
            if slot in seen:
                raise ConfigError(f"slots holds {slot} twice; a state has one request at a time")
            if slot >= 0:
                seen.add(slot)
        self.num_slots = num_slots
        self.ids = torch.tensor(values, dtype=torch.int64, device=device)
        self.num_padding: int | None = values.count(-1)
        used = sorted(seen)
        self._min_distance = min((b - a for a, b in itertools.pairwise(used)), default=_FAR)

    @classmethod
    def trusted(cls, ids: torch.Tensor, *, num_slots: int) -> Slots:
        """Over an int64 tensor that is not looked at, for captured graphs whose ids change later.
        An id outside of the pool is then undefined behaviour."""
        if ids.dtype != torch.int64 or ids.ndim != 1:
            raise ConfigError(f"ids is {ids.dtype} {list(ids.shape)}; use int64 [num_requests]")
        made = cls.__new__(cls)
        made.num_slots, made.ids, made.num_padding = num_slots, ids, None
        made._min_distance = _FAR
        return made

    @classmethod
    def of(cls, slots: Slots | Iterable[int], pool: torch.Tensor, num_requests: int) -> Slots:
        """What an operation was given, checked against its pool and its number of requests."""
        if not isinstance(slots, Slots):
            slots = cls(slots, num_slots=pool.shape[0], device=pool.device)
        if slots.num_slots > pool.shape[0]:
            raise ConfigError(
                f"slots were checked against {slots.num_slots} slots, the pool has {pool.shape[0]}"
            )
        if slots.ids.shape[0] != num_requests:
            raise ConfigError(
                f"slots has {slots.ids.shape[0]} entries for {num_requests} requests; give one each"
            )
        if slots.ids.device != pool.device:
            raise ConfigError(f"slots are on {slots.ids.device}, the pool is on {pool.device}")
        state_elements = math.prod(pool.shape[1:])
        if pool.shape[0] > 1 and slots._min_distance * pool.stride(0) < state_elements:
            raise ConfigError(
                f"two slots are {slots._min_distance} apart, {pool.stride(0)} elements each, and a "
                f"state has {state_elements}: their states would overlap"
            )
        return slots

    def __repr__(self) -> str:
        return f"<Slots of {self.ids.shape[0]} requests among {self.num_slots}>"


class PageTable:
    """Pages of the KV cache that each request holds, checked against the cache.

    Args:
        pages: per request its page ids in token order.
        kv_lens: per request the tokens that are in the cache, those of this call included.
        page_size: tokens per page.
        num_pages: pages of the cache.
        device: where the cache is.

    Raises:
        ConfigError: a page outside of the cache, or too few pages for a length.
    """

    def __init__(
        self,
        pages: Iterable[Iterable[int]],
        kv_lens: Iterable[int],
        *,
        page_size: int,
        num_pages: int,
        device: torch.device | str,
    ) -> None:
        rows = [_ints("pages", row) for row in pages]
        lens = _ints("kv_lens", kv_lens)
        if page_size < 1 or len(rows) != len(lens):
            raise ConfigError(
                f"pages has {len(rows)} rows for {len(lens)} kv_lens, pages of {page_size} tokens; "
                "give one row per request, and pages of at least 1 token"
            )
        for index, (row, length) in enumerate(zip(rows, lens, strict=True)):
            wrong = [page for page in row if not 0 <= page < num_pages]
            if wrong:
                raise ConfigError(
                    f"pages of request {index} hold {wrong[0]}; the cache has pages 0 to "
                    f"{num_pages - 1}"
                )
            if not 0 <= length <= len(row) * page_size:
                raise ConfigError(
                    f"kv_lens of request {index} is {length}; its {len(row)} pages hold 0 to "
                    f"{len(row) * page_size} tokens"
                )
        width = max((len(row) for row in rows), default=1) or 1
        table = [row + (0,) * (width - len(row)) for row in rows]
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_kv_len = max(lens, default=0)
        self.host_kv_lens: tuple[int, ...] | None = lens
        self.pages = torch.tensor(table, dtype=torch.int32, device=device).reshape(-1, width)
        self.kv_lens = torch.tensor(lens, dtype=torch.int32, device=device)

    @classmethod
    def trusted(
        cls,
        pages: torch.Tensor,
        kv_lens: torch.Tensor,
        *,
        page_size: int,
        num_pages: int,
        max_kv_len: int,
    ) -> PageTable:
        """Over int32 tensors [num_requests, most_pages] and [num_requests] that are not looked at,
        for captured graphs whose content changes later. A page outside of the cache is then
        undefined behaviour."""
        if pages.dtype != torch.int32 or pages.ndim != 2 or not pages.is_contiguous():
            raise ConfigError(f"pages is {pages.dtype} {list(pages.shape)}; use int32, contiguous")
        if kv_lens.dtype != torch.int32 or kv_lens.shape != pages.shape[:1]:
            raise ConfigError(f"kv_lens is {kv_lens.dtype} {list(kv_lens.shape)}; use int32 [rows]")
        made = cls.__new__(cls)
        made.pages, made.kv_lens, made.host_kv_lens = pages, kv_lens, None
        made.page_size, made.num_pages, made.max_kv_len = page_size, num_pages, max_kv_len
        return made

    @property
    def num_requests(self) -> int:
        return int(self.pages.shape[0])

    def __repr__(self) -> str:
        return f"<PageTable of {self.num_requests} requests, pages of {self.page_size} tokens>"


def _ints(name: str, values: Iterable[int]) -> tuple[int, ...]:
    if isinstance(values, torch.Tensor):
        if values.ndim != 1 or values.is_floating_point() or values.dtype is torch.bool:
            raise ConfigError(
                f"{name} is a {values.dtype} tensor of shape {list(values.shape)}; use whole "
                "numbers in one dimension"
            )
        return tuple(values.tolist())
    made = tuple(values)
    wrong = [value for value in made if type(value) is not int]
    if wrong:
        raise ConfigError(f"{name} holds {wrong[0]!r}; it holds whole numbers")
    return made
