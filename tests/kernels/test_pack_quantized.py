"""Coding while packing gives what packing and coding give one after the other."""

from __future__ import annotations

import pytest
import torch

from kernel_paths import DEVICE, PATHS, relative_error
from packing_cases import ALL_PATHS, Rows, as_bytes, scattered
from poison import PoisonedMemory
from prfaas.errors import ConfigError
from prfaas.kernels.launch import Launch
from prfaas.kernels.packing import (
    Code,
    CodedForm,
    Pieces,
    QuantizedRows,
    dequantize_rows,
    pack,
    pack_quantized,
    quantize_rows,
    unpack,
    unpack_quantized,
)


def case(
    dtype: torch.dtype, dim: int, counts: tuple[int, ...], *, unit: int = 16
) -> tuple[Rows, list[torch.Tensor]]:
    """Pieces of whole rows in two regions of Gaussian values."""
    row_bytes = dim * dtype.itemsize
    room = sum(counts) * row_bytes + 4096
    rows = scattered([room, room], [n * row_bytes for n in counts], unit=unit, seed=dim)
    generator = torch.Generator().manual_seed(dim)
    regions = [
        torch.randn(room // dtype.itemsize, generator=generator).to(DEVICE, dtype) for _ in range(2)
    ]
    return rows, regions


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        (torch.bfloat16, 64),
        (torch.float32, 128),
        (torch.float16, 100),
        (torch.bfloat16, 576),
        (torch.bfloat16, 5),
    ],
)
def test_fused_is_the_same_as_one_after_the_other(
    dtype: torch.dtype, dim: int, code: Code, path: str
) -> None:
    rows, regions = case(dtype, dim, (3, 1, 70, 0, 16, 17), unit=16 if dim != 5 else 2)
    pieces = rows.pieces
    form = CodedForm.of(pieces, source_dtype=dtype, row_elements=dim)
    memory = PoisonedMemory()
    out = memory.place(torch.full((form.num_bytes,), 0xEE, dtype=torch.uint8, device=DEVICE))
    options = {"source_dtype": dtype, "row_elements": dim, "code": code, "path": path}
    assert pack_quantized(regions, pieces, out=out, **options) is out

    values = pack(regions, pieces, path="reference").view(dtype).view(-1, dim)
    want = quantize_rows(values, code=code, path="reference")
    assert as_bytes(out[: form.num_codes]) == as_bytes(want.codes)
    assert not any(as_bytes(out[form.num_codes : form.scales_at]))
    assert as_bytes(out[form.scales_at :]) == as_bytes(want.scales)

    targets = [memory.place(torch.full_like(region, 7)) for region in regions]
    expected = [target.clone() for target in targets]
    unpack_quantized(out, targets, pieces, **options)
    unpack(
        dequantize_rows(want, dtype=dtype, path="reference").view(-1).view(torch.uint8),
        expected,
        pieces,
        path="reference",
    )
    for target, wanted in zip(targets, expected, strict=True):
        assert torch.equal(target, wanted)
    memory.check()
    back = pack(targets, pieces, path="reference").view(dtype)
    assert relative_error(back, values.view(-1)) < (1e-2 if code is Code.INT8 else 4e-2)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_sides_with_other_blocks_understand_each_other(path: str) -> None:
    """The form depends on the plain run only: blocks of 4 rows here, of 6 there."""
    row = 32 * 2
    here = Pieces([n * 4 * row for n in (5, 0, 3)], [4 * row] * 3)
    there = Pieces([n * 6 * row for n in (2, 1)], [6 * row] * 2)
    source = torch.randn(1024, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    source = source.to(torch.bfloat16)
    options = {"source_dtype": torch.bfloat16, "row_elements": 32, "path": path}
    packed = pack_quantized(source, here, **options)
    target = torch.zeros_like(source)
    unpack_quantized(packed, target, there, **options)
    sent, got = (pack(x, p).view(torch.bfloat16) for x, p in ((source, here), (target, there)))
    assert relative_error(got, sent) < 1e-2


@pytest.mark.parametrize("path", PATHS)
def test_pieces_out_of_wire_order(path: str) -> None:
    values = torch.randn(4, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    pieces = Pieces([0, 64, 192], [64, 64, 64], wire_offsets=[128, 0, 64])
    options = {"source_dtype": torch.float32, "row_elements": 16}
    packed = pack_quantized(values, pieces, path=path, **options)
    assert as_bytes(packed) == as_bytes(pack_quantized(values, pieces, path="reference", **options))
    codes = quantize_rows(values[[1, 3, 0]], path="reference").codes
    assert as_bytes(packed[:48]) == as_bytes(codes)


@pytest.mark.parametrize("path", PATHS)
def test_one_launch(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (launches.append(self), run(self))[1])
    rows, regions = case(torch.bfloat16, 64, (3, 70))
    options = {"source_dtype": torch.bfloat16, "row_elements": 64, "path": path}
    packed = pack_quantized(regions, rows.pieces, **options)
    unpack_quantized(packed, regions, rows.pieces, **options)
    assert len(launches) == (2 if path == "triton" else 0)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_nothing_to_code(path: str) -> None:
    region, pieces = torch.zeros(16, device=DEVICE), Pieces([], [])
    options = {"source_dtype": torch.float32, "row_elements": 8, "path": path}
    packed = pack_quantized(region, pieces, **options)
    assert packed.shape == (0,)
    unpack_quantized(packed, region, pieces, **options)


def test_the_form_beyond_32_bits() -> None:
    pieces = Pieces([0, 2**40], [2**33, 2**33])
    form = CodedForm.of(pieces, source_dtype=torch.bfloat16, row_elements=128)
    assert form == CodedForm(num_rows=2**26, num_codes=2**33)
    assert form.num_bytes == 2**33 + 2**28


def test_refused_arguments() -> None:
    values = torch.zeros(64, device=DEVICE)

    def refused(pieces: Pieces, message: str, **change: object) -> None:
        options = {"source_dtype": torch.float32, "row_elements": 8} | change
        with pytest.raises(ConfigError, match=message):
            pack_quantized(values, pieces, **options)  # type: ignore[arg-type]
        options.pop("out", None)
        with pytest.raises(ConfigError, match=message if "out" not in change else "packed"):
            unpack_quantized(
                change.get("out", torch.zeros(36, dtype=torch.uint8, device=DEVICE)),  # type: ignore[arg-type]
                values,
                pieces,
                **options,  # type: ignore[arg-type]
            )

    good = Pieces([0], [96])
    refused(Pieces([0], [48]), "sizes is 48 for piece 0; .* multiple of 32")
    refused(Pieces([0], [32], wire_offsets=[16]), "wire_offsets is 16 for piece 0")
    refused(Pieces([2], [32]), "offsets is 2 for piece 0; .* multiple of 4")
    refused(Pieces([0, 32], [32, 32], wire_offsets=[0, 64]), "leave gaps")
    refused(Pieces([0], [512]), r"piece 0 is bytes \[0, 512\)")
    refused(good, "row_elements is 0", row_elements=0)
    refused(good, "source_dtype is torch.int8", source_dtype=torch.int8)
    refused(good, "code is 'fp4'", code="fp4")
    run = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    refused(good, "out has shape", out=run)
    refused(good, "out starts at an address", out=run[1 : 1 + 44])


def test_a_region_has_to_be_aligned_to_its_elements() -> None:
    region = torch.zeros(64, dtype=torch.uint8, device=DEVICE)[1:]
    with pytest.raises(ConfigError, match=r"regions\[0\] starts at an address"):
        pack_quantized(region, Pieces([0], [32]), source_dtype=torch.float32, row_elements=8)


def test_scales_belong_to_rows() -> None:
    """What the docstring of the form says, read by hand."""
    values = torch.tensor([[1.0, -127.0], [2.54, 0.0]], device=DEVICE)
    packed = pack_quantized(values, Pieces([0], [16]), source_dtype=torch.float32, row_elements=2)
    assert packed.shape == (16 + 8,)
    assert packed[:4].view(torch.int8).tolist() == [1, -127, 127, 0]
    assert packed[16:].view(torch.float32).tolist() == pytest.approx([1.0, 0.02])
    rows = QuantizedRows(
        codes=packed[:4].view(torch.int8).view(2, 2), scales=packed[16:].view(torch.float32)
    )
    assert torch.allclose(dequantize_rows(rows, dtype=torch.float32), values)
