"""Memory with pieces in it, and what packing them has to give, in plain bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import torch

from kernel_paths import DEVICE, PATHS
from prfaas.kernels.packing import Pieces

ALL_PATHS = ("reference", *PATHS)

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.float8_e4m3fn)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())


def of_bytes(data: bytes, device: torch.device = DEVICE) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=device)


def random_region(num_bytes: int, seed: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Random bits, NaNs of every kind among them."""
    bits = torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return bits.to(DEVICE).view(dtype)


@attrs.frozen
class Rows:
    """A plan as plain rows (region, offset, bytes, wire offset)."""

    rows: Sequence[tuple[int, int, int, int]]

    @property
    def pieces(self) -> Pieces:
        regions, offsets, sizes, wire = zip(*self.rows, strict=True) if self.rows else ((),) * 4
        return Pieces(offsets, sizes, regions=regions, wire_offsets=wire)

    def packed(self, regions: Sequence[torch.Tensor], filler: bytes = b"\0") -> bytes:
        memory = [as_bytes(region) for region in regions]
        run = bytearray(filler * max((wire + size for *_, size, wire in self.rows), default=0))
        for region, offset, size, wire in self.rows:
            run[wire : wire + size] = memory[region][offset : offset + size]
        return bytes(run)

    def unpacked(self, packed: bytes, regions: Sequence[torch.Tensor]) -> list[bytes]:
        memory = [bytearray(as_bytes(region)) for region in regions]
        for region, offset, size, wire in self.rows:
            memory[region][offset : offset + size] = packed[wire : wire + size]
        return [bytes(region) for region in memory]


def scattered(
    region_bytes: Sequence[int], sizes: Sequence[int], *, unit: int, seed: int, gap: int = 0
) -> Rows:
    """Pieces of given sizes at random places that do not overlap, ``gap`` apart on the wire.

    Args:
        region_bytes: of each region.
        sizes: of each piece; regions take turns.
        unit: divides every offset.
        gap: unused bytes after each piece on the wire.
        seed: of the places.
    """
    rng = random.Random(seed)
    rows: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * len(sizes)
    wire = 0
    starts = []
    for size in sizes:
        starts.append(wire)
        wire += size + gap
    for region, room in enumerate(region_bytes):
        mine = list(range(region, len(sizes), len(region_bytes)))
        rng.shuffle(mine)
        free = (room - sum(-(-sizes[i] // unit) * unit for i in mine)) // unit
        assert free >= 0, "the region is too small"
        at = 0
        for index, i in enumerate(mine):
            skip = rng.randint(0, free // (len(mine) - index))
            free -= skip
            at += skip * unit
            rows[i] = (region, at, sizes[i], starts[i])
            at += -(-sizes[i] // unit) * unit
    return Rows(rows)
