"""Where the bytes of a packed run lie: a plan that is checked once and then used for any content.

region 0   ....[piece 0]......[piece 2]...      tensors of any dtype, as bytes
region 1   ..[piece 1].........
packed     [piece 0][piece 1][piece 2]          one run, ready for the wire
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch

from prfaas.errors import ConfigError
from prfaas.transfer import EntryPlace

VECTOR_BYTES = 16
"""One load or store of a GPU thread at its widest."""

_LARGEST = 2**62
"""Offsets stay below, so that no sum of two leaves 64 bits."""


class Pieces:
    """Consecutive bytes of some tensors, the regions, and where each lands in one packed run.

    The plan names regions by their position in the list that `pack` and `unpack` are given, so it
    stays good when a tensor moves, and serves any list of regions that are large enough. Pieces may
    share bytes of a region (then they can be packed, not unpacked) or of the packed run (the other
    way round). Columns may be lists, or whole-number tensors: a plan of a cache with one tensor per
    layer, where a block has ``size`` bytes, is::

        blocks = torch.tensor(block_ids)
        Pieces(
            (blocks * size).repeat(num_layers),
            torch.full((num_layers * len(blocks),), size),
            regions=torch.arange(num_layers).repeat_interleave(len(blocks)),
        )

    Args:
        offsets: per piece its first byte in its region.
        sizes: per piece its bytes; 0 is allowed.
        regions: per piece the position of its region; all 0 by default.
        wire_offsets: per piece its first byte in the packed run; by default one after the other.

    Attributes:
        num_pieces: how many there are.
        num_bytes: length of the packed run: the end of the piece that ends last.
        num_regions: the highest region named, plus 1.

    Raises:
        ConfigError: columns of different lengths, no whole numbers, negative or beyond 2^62.
    """

    def __init__(
        self,
        offsets: Iterable[int] | torch.Tensor,
        sizes: Iterable[int] | torch.Tensor,
        *,
        regions: Iterable[int] | torch.Tensor | None = None,
        wire_offsets: Iterable[int] | torch.Tensor | None = None,
    ) -> None:
        self.offsets = _column("offsets", offsets)
        self.sizes = _column("sizes", sizes)
        self.num_pieces = len(self.offsets)
        self.regions = (
            torch.zeros_like(self.offsets) if regions is None else _column("regions", regions)
        )
        if wire_offsets is None:
            if self.sizes.sum(dtype=torch.float64).item() >= _LARGEST:
                raise ConfigError("sizes add up to 2^62 bytes or more; split the pieces")
            self.wire_offsets = self.sizes.cumsum(0) - self.sizes
        else:
            self.wire_offsets = _column("wire_offsets", wire_offsets)
        for name in ("sizes", "regions", "wire_offsets"):
            if len(getattr(self, name)) != self.num_pieces:
                raise ConfigError(
                    f"{name} has {len(getattr(self, name))} entries and offsets "
                    f"{self.num_pieces}; give one per piece"
                )
        ends = self.wire_offsets + self.sizes
        self.num_bytes: int = int(ends.max()) if self.num_pieces else 0
        self.num_regions: int = int(self.regions.max()) + 1 if self.num_pieces else 0
        self._region_ends = torch.zeros(self.num_regions, dtype=torch.int64)
        self._region_ends.scatter_reduce_(0, self.regions, self.offsets + self.sizes, "amax")
        self._tiles: dict[object, torch.Tensor] = {}

    def __repr__(self) -> str:
        return (
            f"<Pieces {self.num_pieces} of {self.num_regions} regions, {self.num_bytes} bytes "
            "packed>"
        )

    @functools.cached_property
    def has_gaps(self) -> bool:
        """Whether some byte of the packed run belongs to no piece."""
        order, used = self._wire_order
        ends = (self.wire_offsets + self.sizes)[order][used].cummax(0).values
        starts = self.wire_offsets[order][used]
        covered = torch.cat((ends.new_zeros(1), ends))
        # The run ends with the last piece, even with one that has no bytes.
        return bool((torch.cat((starts, starts.new_tensor([self.num_bytes]))) > covered).any())

    @functools.cached_property
    def num_piece_bytes(self) -> int:
        """Sum of the sizes."""
        return int(self.sizes.sum())

    @functools.cached_property
    def unit(self) -> int:
        """The greatest common divisor of all offsets and sizes; 0 if all are 0."""
        numbers = torch.cat((self.offsets, self.sizes, self.wire_offsets))
        while len(numbers) > 8:
            half = len(numbers) // 2
            numbers = torch.cat((numbers[:half].gcd(numbers[half : 2 * half]), numbers[2 * half :]))
        return math.gcd(*numbers.tolist())

    def check_packable(self) -> None:
        """Raises ConfigError if two pieces would be packed into the same bytes."""
        if self._wire_conflict is not None:
            raise ConfigError(self._wire_conflict)

    def check_unpackable(self) -> None:
        """Raises ConfigError if two pieces would be unpacked into the same bytes."""
        if self._region_conflict is not None:
            raise ConfigError(self._region_conflict)

    def check_regions(self, region_bytes: Sequence[int]) -> None:
        """Raises ConfigError, naming the piece, if one is not inside its region."""
        if self.num_regions > len(region_bytes):
            piece = int((self.regions >= len(region_bytes)).nonzero()[0])
            raise ConfigError(
                f"piece {piece} is in region {int(self.regions[piece])}; {len(region_bytes)} "
                "regions were given"
            )
        room = torch.tensor(region_bytes[: self.num_regions], dtype=torch.int64)
        if bool((self._region_ends > room).any()):
            piece = int((self.offsets + self.sizes > room[self.regions]).nonzero()[0])
            region, start = int(self.regions[piece]), int(self.offsets[piece])
            raise ConfigError(
                f"piece {piece} is bytes [{start}, {start + int(self.sizes[piece])}) of region "
                f"{region}, which has {region_bytes[region]} bytes"
            )

    def tiles(self, tile_bytes: int, device: torch.device) -> torch.Tensor:
        """Cuts every piece into tiles of at most ``tile_bytes``, a program's share; kept.

        Returns:
            int64 [num_tiles, 4]: region, first byte in the region, first byte in the packed run,
            bytes.
        """
        key = (tile_bytes, device)
        if key not in self._tiles:
            counts = (self.sizes + tile_bytes - 1) // tile_bytes
            piece = torch.arange(self.num_pieces).repeat_interleave(counts)
            firsts = counts.cumsum(0) - counts
            inside = (torch.arange(len(piece)) - firsts[piece]) * tile_bytes
            table = torch.stack(
                (
                    self.regions[piece],
                    self.offsets[piece] + inside,
                    self.wire_offsets[piece] + inside,
                    (self.sizes[piece] - inside).clamp(max=tile_bytes),
                ),
                dim=1,
            )
            self._tiles[key] = table.to(device)
        return self._tiles[key]

    def _sorted(self, *keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Order of the pieces by keys, the last one first in rank, and which of them hold bytes."""
        order = torch.arange(self.num_pieces)
        for key in keys:
            order = order[key[order].argsort(stable=True)]
        return order, self.sizes[order] > 0

    @functools.cached_property
    def _wire_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sorted(self.wire_offsets)

    @functools.cached_property
    def _wire_conflict(self) -> str | None:
        order, used = self._wire_order
        order = order[used]
        starts, sizes = self.wire_offsets[order], self.sizes[order]
        pair = _first(starts[1:] < (starts + sizes)[:-1])
        if pair is None:
            return None
        a, b = int(order[pair]), int(order[pair + 1])
        return (
            f"wire_offsets: pieces {a} and {b} both hold byte {int(self.wire_offsets[b])} of the "
            "packed run; packed pieces may not overlap"
        )

    @functools.cached_property
    def _region_conflict(self) -> str | None:
        order, used = self._sorted(self.offsets, self.regions)
        order = order[used]
        starts, sizes, regions = self.offsets[order], self.sizes[order], self.regions[order]
        pair = _first((starts[1:] < (starts + sizes)[:-1]).logical_and(regions[1:] == regions[:-1]))
        if pair is None:
            return None
        a, b = int(order[pair]), int(order[pair + 1])
        return (
            f"offsets: pieces {a} and {b} both hold byte {int(self.offsets[b])} of region "
            f"{int(self.regions[b])}; unpacked pieces may not overlap"
        )


def entry_pieces(place: EntryPlace, *, offset: int = 0, num_bytes: int | None = None) -> Pieces:
    """The blocks and states of one request, or of a range of its wire form, in one pool.

    What `pack` makes of them is the canonical form of `prfaas.transfer.EntryLayout`, byte for byte,
    whatever the block size of the pool; so what one side packs, a side with other blocks unpacks.
    A range such as `EntryLayout.rows_range` gives, packed alone, starts at byte 0.

    Args:
        place: of `prfaas.transfer.place`; the pool is region 0.
        offset: first byte of the wire form.
        num_bytes: how many; to its end by default.

    Raises:
        ConfigError: the range is not inside the entry.
    """
    if num_bytes is None:
        num_bytes = place.layout.num_bytes - offset
    spans = place.spans(offset, num_bytes)
    return Pieces([span.offset for span in spans], [span.num_bytes for span in spans])


def power_of_two_from(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, math.ceil(number) - 1).bit_length()


def _first(condition: torch.Tensor) -> int | None:
    return int(condition.nonzero()[0]) if bool(condition.any()) else None


def _column(name: str, values: Iterable[int] | torch.Tensor) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        if values.ndim != 1 or values.is_floating_point() or values.dtype is torch.bool:
            raise ConfigError(
                f"{name} is a {values.dtype} tensor of shape {list(values.shape)}; use whole "
                "numbers in one dimension"
            )
        made = values.to("cpu", torch.int64, copy=True)
    else:
        listed = list(values)
        wrong = [value for value in listed if type(value) is not int]
        if wrong:
            raise ConfigError(f"{name} holds {wrong[0]!r}; it holds whole numbers")
        try:
            made = torch.tensor(listed, dtype=torch.int64)
        except (OverflowError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{name} holds a number beyond 2^62") from error
    piece = _first((made < 0).logical_or(made >= _LARGEST))
    if piece is not None:
        raise ConfigError(
            f"{name} is {int(made[piece])} for piece {piece}; it is at least 0 and below 2^62"
        )
    return made
