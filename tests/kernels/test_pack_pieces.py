"""Plans: columns, tiles, and requests of the pool in the canonical wire form."""

from __future__ import annotations

import random

import pytest
import torch

from kernel_paths import DEVICE, PATHS
from packing_cases import as_bytes, of_bytes, scattered
from pools import HYBRID, Pool
from prfaas.errors import ConfigError
from prfaas.kernels.packing import Pieces, entry_pieces, pack, unpack
from prfaas.transfer import EntryLayout


def test_pieces_follow_each_other_by_default() -> None:
    pieces = Pieces([100, 0, 50], [10, 0, 30])
    assert pieces.wire_offsets.tolist() == [0, 10, 10]
    assert (pieces.num_pieces, pieces.num_bytes, pieces.num_regions) == (3, 40, 1)
    assert not pieces.has_gaps
    assert repr(pieces) == "<Pieces 3 of 1 regions, 40 bytes packed>"


@pytest.mark.parametrize(
    ("wire", "has_gaps"),
    [([0, 10, 40], False), ([30, 0, 10], False), ([0, 11, 41], True), ([1, 11, 41], True)],
)
def test_gaps(wire: list[int], has_gaps: bool) -> None:
    sizes = [10, 30, 5] if wire[0] < 30 else [5, 10, 20]
    assert Pieces([0, 0, 0], sizes, wire_offsets=wire).has_gaps is has_gaps


def test_a_run_that_ends_with_an_empty_piece_has_a_gap() -> None:
    assert not Pieces([0, 0], [8, 0], wire_offsets=[0, 8]).has_gaps
    assert Pieces([0, 0], [8, 0], wire_offsets=[0, 9]).has_gaps
    assert Pieces([0], [0], wire_offsets=[1]).has_gaps
    assert not Pieces([], []).has_gaps


def test_columns_may_be_tensors() -> None:
    blocks, size, num_layers = torch.tensor([5, 2]), 64, 3
    offsets = (blocks * size).repeat(num_layers)
    pieces = Pieces(
        offsets,
        torch.full((num_layers * len(blocks),), size),
        regions=torch.arange(num_layers, dtype=torch.int32).repeat_interleave(len(blocks)),
    )
    layers = [of_bytes(bytes([layer + 1]) * 512) for layer in range(num_layers)]
    assert as_bytes(pack(layers, pieces)) == b"\1" * 128 + b"\2" * 128 + b"\3" * 128
    offsets.zero_()  # the plan has a copy
    assert pieces.offsets.tolist() == [320, 128] * 3


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"offsets": [0, -1]}, "offsets is -1 for piece 1"),
        ({"sizes": [-3, 1]}, "sizes is -3 for piece 0"),
        ({"regions": [0, -1]}, "regions is -1 for piece 1"),
        ({"wire_offsets": [0, -16]}, "wire_offsets is -16 for piece 1"),
        ({"offsets": [0, 2**62]}, "below 2"),
        ({"offsets": [0, 2**70]}, "beyond 2"),
        ({"sizes": [2**61, 2**61]}, "add up"),
        ({"offsets": [0, 1.0]}, "offsets holds 1.0"),
        ({"offsets": [0, True]}, "offsets holds True"),
        ({"offsets": torch.zeros(2)}, "offsets is a torch.float32 tensor"),
        ({"offsets": torch.zeros(2, 1, dtype=torch.int64)}, r"shape \[2, 1\]"),
        ({"sizes": [1]}, "sizes has 1 entries and offsets 2"),
        ({"regions": [0]}, "regions has 1 entries"),
        ({"wire_offsets": [0, 1, 2]}, "wire_offsets has 3 entries"),
    ],
)
def test_refused_columns(columns: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pieces(**({"offsets": [0, 16], "sizes": [16, 16]} | columns))  # type: ignore[arg-type]


def test_tiles_cover_each_piece_once() -> None:
    rows = scattered([90_000, 90_000], [1, 2048, 2049, 0, 10_000], unit=1, seed=5)
    tiles = rows.pieces.tiles(2048, torch.device("cpu"))
    covered = []
    for region, offset, size, wire in rows.rows:
        starts = range(0, size, 2048)
        covered += [[region, offset + s, wire + s, min(2048, size - s)] for s in starts]
    assert tiles.tolist() == covered
    assert rows.pieces.tiles(2048, torch.device("cpu")) is not tiles  # another plan
    pieces = rows.pieces
    assert pieces.tiles(2048, torch.device("cpu")) is pieces.tiles(2048, torch.device("cpu"))


def test_tiles_beyond_32_bits() -> None:
    """A pool of 6 TiB, packed runs of more than 4 GiB (H44)."""
    far = 6 * 2**40
    pieces = Pieces([far, far + 2**33], [2**32 + 48, 4096], regions=[0, 3])
    tiles = pieces.tiles(1 << 20, torch.device("cpu"))
    assert tiles.dtype == torch.int64
    assert tiles[0].tolist() == [0, far, 0, 1 << 20]
    assert tiles[4096].tolist() == [0, far + 2**32, 2**32, 48]
    assert tiles[4097].tolist() == [3, far + 2**33, 2**32 + 48, 4096]
    assert pieces.num_bytes == 2**32 + 48 + 4096
    with pytest.raises(ConfigError, match=f"which has {far} bytes"):
        pieces.check_regions([far] * 4)
    pieces.check_regions([2 * far] * 4)


@pytest.mark.parametrize(
    ("offsets", "sizes", "unit"),
    [([0, 64], [64, 64], 64), ([0, 8], [48, 48], 8), ([0, 16], [4, 16], 4), ([0], [0], 0)],
)
def test_the_unit_divides_everything(offsets: list[int], sizes: list[int], unit: int) -> None:
    assert Pieces(offsets, sizes).unit == unit


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("num_tokens", "start"), [(21, 0), (37, 12), (5, 5)])
def test_a_request_has_the_canonical_form(num_tokens: int, start: int, path: str) -> None:
    """What the host path sends, byte for byte; a side with other blocks takes it."""
    rng = random.Random(num_tokens)
    layout = EntryLayout(HYBRID, num_tokens, start)
    here, there = (Pool(HYBRID, num_tokens, size, 0, rng) for size in (4, 12))
    here.memory[:] = rng.randbytes(len(here.memory))
    memory = of_bytes(bytes(here.memory))
    packed = pack(memory, entry_pieces(here.place(layout)), path=path)
    assert as_bytes(packed) == here.read(layout, 0, layout.num_bytes)

    target = of_bytes(bytes(there.memory))
    unpack(packed, target, entry_pieces(there.place(layout)), path=path)
    there.write(layout, 0, as_bytes(packed))
    assert as_bytes(target) == bytes(there.memory)


def test_one_layer_of_a_request() -> None:
    rng = random.Random(0)
    layout = EntryLayout(HYBRID, 30)
    pool = Pool(HYBRID, 30, 8, 0, rng)
    pool.memory[:] = rng.randbytes(len(pool.memory))
    for part in layout.parts:
        pieces = entry_pieces(pool.place(layout), offset=part.offset, num_bytes=part.num_bytes)
        packed = pack(of_bytes(bytes(pool.memory)), pieces)
        assert as_bytes(packed) == pool.read(layout, part.offset, part.num_bytes)
    with pytest.raises(ConfigError, match="not inside the entry"):
        entry_pieces(pool.place(layout), offset=1, num_bytes=layout.num_bytes)


def test_a_plan_is_on_the_device_of_its_tensors() -> None:
    assert Pieces([0], [16]).tiles(16, DEVICE).device == DEVICE
