"""Packing equals joining bytes; unpacking writes the pieces and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_paths import DEVICE, PATHS, RUNS_TRITON
from packing_cases import ALL_PATHS, DTYPES, Rows, as_bytes, of_bytes, random_region, scattered
from poison import PoisonedMemory
from prfaas.errors import ConfigError
from prfaas.kernels.dispatch import report
from prfaas.kernels.launch import Launch
from prfaas.kernels.packing import Pieces, pack, unpack

SIZES = {
    "short": (0, 48, 16, 2048, 2064, 0, 32),
    "blocks": (4096,) * 6,
    "long": (16384, 16400, 40_000, 16),
    "words": (4, 2052, 12, 20, 4100),
    "odd": (1, 2, 3, 2049, 515, 17, 5),
    "one odd": (4096, 4096, 7, 4096),
}


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("kind", SIZES)
def test_pack_joins_the_bytes_and_unpack_puts_them_back(kind: str, path: str) -> None:
    sizes = SIZES[kind]
    unit = 16 if kind in ("short", "blocks", "long") else 4 if kind == "words" else 1
    rows = scattered([200_000, 120_000], sizes, unit=unit, seed=1)
    memory = PoisonedMemory()
    regions = [memory.place(random_region(n, n)) for n in (200_000, 120_000)]
    packed = pack(regions, rows.pieces, path=path)
    assert packed.dtype == torch.uint8
    assert as_bytes(packed) == rows.packed(regions)

    packed = memory.place(random_region(rows.pieces.num_bytes, 7))
    want = rows.unpacked(as_bytes(packed), regions)
    unpack(packed, regions, rows.pieces, path=path)
    assert [as_bytes(region) for region in regions] == want
    memory.check()


@pytest.mark.parametrize("path", PATHS)
def test_regions_of_any_dtype_are_bytes(path: str) -> None:
    regions = [random_region(4096, i, dtype).view(8, -1) for i, dtype in enumerate(DTYPES)]
    rows = scattered([4096] * len(DTYPES), [64, 128, 16, 256, 512] * 2, unit=16, seed=3)
    packed = pack(regions, rows.pieces, path=path)
    assert as_bytes(packed) == rows.packed(regions)
    others = [torch.zeros_like(region) for region in regions]
    unpack(packed, others, rows.pieces, path=path)
    assert rows.packed(others) == as_bytes(packed)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("first", [0, 1, 4, 8])
def test_tensors_that_start_anywhere(first: int, path: str) -> None:
    """Offsets are multiples of 16, addresses are not."""
    rows = scattered([9000], [4096, 48, 16], unit=16, seed=2)
    region = random_region(9000 + first, 5)[first:]
    out = random_region(rows.pieces.num_bytes + 4, 6)[4:]
    pack([region], rows.pieces, out=out, path=path)
    assert as_bytes(out) == rows.packed([region])
    other = torch.zeros_like(region)
    unpack(out, other, rows.pieces, path=path)
    assert rows.packed([other]) == as_bytes(out)


@settings(
    max_examples=20 if RUNS_TRITON else 100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_pieces(data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from([1, 2, 4, 8, 16, 64]))
    length = st.integers(0, 40).map(lambda n: n * unit)
    sizes = data.draw(st.lists(length, min_size=1, max_size=12))
    gap = data.draw(st.sampled_from([0, 0, unit]))
    room = [sum(sizes) + unit * data.draw(st.integers(0, 50)) + 64 for _ in range(2)]
    rows = scattered(room, sizes, unit=unit, seed=data.draw(st.integers(0, 99)), gap=gap)
    regions = [random_region(num_bytes, index) for index, num_bytes in enumerate(room)]
    for path in PATHS:
        packed = pack(regions, rows.pieces, path=path)
        assert as_bytes(packed) == rows.packed(regions)
        others = [torch.full_like(region, 99) for region in regions]
        want = rows.unpacked(as_bytes(packed), others)
        unpack(packed, others, rows.pieces, path=path)
        assert [as_bytes(other) for other in others] == want


@pytest.mark.parametrize("path", ALL_PATHS)
def test_bytes_of_no_piece(path: str) -> None:
    rows = scattered([5000], [64, 96, 32], unit=16, seed=4, gap=16)
    region = random_region(5000, 1)
    assert rows.pieces.has_gaps
    assert as_bytes(pack([region], rows.pieces, path=path)) == rows.packed([region])
    out = torch.full((rows.pieces.num_bytes,), 0xEE, dtype=torch.uint8, device=DEVICE)
    assert pack([region], rows.pieces, out=out, path=path) is out
    assert as_bytes(out) == rows.packed([region], filler=b"\xee")


@pytest.mark.parametrize("path", ALL_PATHS)
def test_nothing_to_copy(path: str) -> None:
    region = random_region(64, 1)
    for pieces in (Pieces([], []), Pieces([64, 0], [0, 0])):
        packed = pack(region, pieces, path=path)
        assert packed.shape == (0,)
        unpack(packed, region, pieces, path=path)
    assert torch.equal(region, random_region(64, 1))


@pytest.mark.parametrize("path", PATHS)
def test_a_plan_outlives_the_tensors(path: str) -> None:
    """Addresses are read at every call."""
    rows = scattered([4096], [256, 256], unit=16, seed=1)
    pieces, kept = rows.pieces, []
    for seed in range(3):
        region = random_region(4096, seed)
        kept.append(region)
        assert as_bytes(pack(region, pieces, path=path)) == rows.packed([region])


@pytest.mark.parametrize("path", PATHS)
def test_one_launch_moves_all_regions(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (launches.append(self), run(self))[1])
    rows = scattered([8192] * 3, [64, 7, 4096, 512, 16, 3], unit=1, seed=1)
    regions = [random_region(8192, seed) for seed in range(3)]
    before = report().calls.get(("pack", path), 0)
    packed = pack(regions, rows.pieces, path=path)
    unpack(packed, regions, rows.pieces, path=path)
    assert len(launches) == (2 if path == "triton" else 0)
    assert report().calls["pack", path] == before + 1


@pytest.mark.parametrize("path", PATHS)
def test_shared_bytes_are_read_but_not_written(path: str) -> None:
    region = random_region(256, 1)
    reads_twice = Rows([(0, 0, 64, 0), (0, 32, 64, 64)])
    packed = pack(region, reads_twice.pieces, path=path)
    assert as_bytes(packed) == reads_twice.packed([region])
    with pytest.raises(ConfigError, match=r"pieces 0 and 1 both hold byte 32 of region 0"):
        unpack(packed, region, reads_twice.pieces, path=path)

    writes_twice = Rows([(0, 0, 64, 0), (0, 64, 64, 32)])
    with pytest.raises(ConfigError, match=r"pieces 0 and 1 both hold byte 32 of the packed run"):
        pack(region, writes_twice.pieces, path=path)
    unpack(packed[:96], region, writes_twice.pieces, path=path)
    assert as_bytes(region[:64]) == as_bytes(packed[:64])
    assert as_bytes(region[64:128]) == as_bytes(packed[32:96])


def test_refused_regions() -> None:
    region = random_region(256, 1)
    pieces = Pieces([0, 192], [64, 80], regions=[1, 0])
    with pytest.raises(ConfigError, match=r"piece 0 is in region 1; 1 regions"):
        pack([region], pieces)
    with pytest.raises(
        ConfigError, match=r"piece 1 is bytes \[192, 272\) of region 0, which has 2"
    ):
        pack([region, region], pieces)
    with pytest.raises(ConfigError, match=r"piece 1 is bytes"):
        unpack(of_bytes(bytes(144)), [region, region], pieces)
    with pytest.raises(ConfigError, match=r"regions is empty"):
        pack([], Pieces([], []))
    with pytest.raises(ConfigError, match=r"regions\[0\] is a bytes"):
        pack([b"abc"], Pieces([0], [1]))  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"regions\[1\] has strides"):
        pack([region, region.view(16, 16).T], pieces)
    with pytest.raises(ConfigError, match=r"regions\[1\] is on meta"):
        pack([region, torch.empty(256, device="meta")], pieces)


def test_refused_runs() -> None:
    region = random_region(256, 1)
    pieces = Pieces([0, 128], [64, 64])
    for out in (of_bytes(bytes(127)), of_bytes(bytes(512)).view(torch.float32)):
        with pytest.raises(ConfigError, match="out has"):
            pack(region, pieces, out=out)
        with pytest.raises(ConfigError, match="packed has"):
            unpack(out, region, pieces)
    with pytest.raises(ConfigError, match="out has strides"):
        pack(region, pieces, out=of_bytes(bytes(256))[::2])
    with pytest.raises(ConfigError, match=r"out shares memory with piece 1 in region 0"):
        pack(region, pieces, out=region[100:228])
    with pytest.raises(ConfigError, match=r"packed shares memory with piece 0"):
        unpack(region[32:160], region, pieces)
    near = random_region(512, 1)
    assert as_bytes(pack(near, pieces, out=near[192:320])) == as_bytes(near[192:320])


@pytest.mark.parametrize("path", PATHS)
def test_regions_that_are_one_tensor_are_seen(path: str) -> None:
    run = torch.zeros(32, dtype=torch.uint8, device=DEVICE)
    region = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    apart = Pieces([0, 16], [16, 16], regions=[0, 1])
    unpack(run, [region, region], apart, path=path)
    with pytest.raises(ConfigError, match="pieces 0 and 1 both hold byte 8"):
        unpack(run, [region, region[8:]], Pieces([8, 0], [16, 16], regions=[0, 1]), path=path)
    with pytest.raises(ConfigError, match="pieces is a list; make a"):
        unpack(run, [region], [(0, 32)], path=path)  # type: ignore[arg-type]
