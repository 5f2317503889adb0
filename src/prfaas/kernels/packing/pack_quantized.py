"""Pieces of floating-point rows that are coded in 8 bits while they are packed."""

from __future__ import annotations

import attrs
import torch

from prfaas.errors import ConfigError
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.packing.copies import copy_pieces, copy_slices
from prfaas.kernels.packing.pack import (
    Regions,
    check_apart,
    check_run,
    check_targets,
    open_regions,
)
from prfaas.kernels.packing.pieces import VECTOR_BYTES, Pieces
from prfaas.kernels.packing.quantize import (
    Code,
    QuantizedRows,
    check_code,
    check_dtype,
    decode,
    encode,
    refusal,
)


@attrs.frozen(kw_only=True)
class CodedForm:
    """Where codes and scales lie in the packed run.

    ::

        | codes: 1 byte per element, in the order of the plain run | 0 to 15 zeros | scales |

    The element at byte ``b`` of what `pack` makes has its code at byte ``b / itemsize``; the scales
    are float32, little endian as GPUs are, one per row in the same order. So the form depends on
    the plain run only, and two sides with other pieces of it understand each other.

    Attributes:
        num_rows: rows, and scales.
        num_codes: bytes of codes.
        scales_at: first byte of the scales, a multiple of 16.
        num_bytes: length of the run.
    """

    num_rows: int
    num_codes: int

    @property
    def scales_at(self) -> int:
        return -(-self.num_codes // VECTOR_BYTES) * VECTOR_BYTES

    @property
    def num_bytes(self) -> int:
        return self.scales_at + 4 * self.num_rows

    @classmethod
    def of(cls, pieces: Pieces, *, source_dtype: torch.dtype, row_elements: int) -> CodedForm:
        """The form of pieces that are rows of ``row_elements`` values of ``source_dtype``.

        Raises:
            ConfigError: a piece that does not begin and end with a row, or is not aligned to its
                elements; gaps between pieces.
        """
        check_dtype("source_dtype", source_dtype)
        if type(row_elements) is not int or row_elements < 1:
            raise ConfigError(f"row_elements is {row_elements!r}; use a whole number from 1")
        row_bytes = row_elements * source_dtype.itemsize
        for name, column, unit in (
            ("sizes", pieces.sizes, row_bytes),
            ("wire_offsets", pieces.wire_offsets, row_bytes),
            ("offsets", pieces.offsets, source_dtype.itemsize),
        ):
            wrong = (column % unit).nonzero()
            if len(wrong):
                piece = int(wrong[0])
                raise ConfigError(
                    f"{name} is {int(column[piece])} for piece {piece}; with rows of "
                    f"{row_elements} {source_dtype} it is a multiple of {unit}"
                )
        if pieces.has_gaps:
            raise ConfigError("wire_offsets leave gaps; coded pieces lie one after the other")
        num_rows = pieces.num_bytes // row_bytes
        return cls(num_rows=num_rows, num_codes=num_rows * row_elements)


def pack_quantized(
    regions: Regions,
    pieces: Pieces,
    *,
    source_dtype: torch.dtype,
    row_elements: int,
    code: Code | str = Code.INT8,
    out: torch.Tensor | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """`pack` and `quantize_rows` in one pass over the memory, in one launch.

    Args:
        regions, pieces: as for `pack`; every piece is a whole number of rows.
        source_dtype: float32, bfloat16 or float16: what the pieces hold, whatever the dtype of the
            tensors that they lie in.
        row_elements: values that share a scale, such as the head dim.
        code: ``"int8"`` or ``"fp8_e4m3"``.
        out: uint8 [`CodedForm`'s num_bytes], at an address that is a multiple of 4.
        path: see `prfaas.kernels.dispatch`.

    Returns:
        uint8 [num_bytes of `CodedForm`], the same bytes on every path.

    Raises:
        ConfigError: as for `pack`, `CodedForm.of` and `quantize_rows`.
    """
    form = CodedForm.of(pieces, source_dtype=source_dtype, row_elements=row_elements)
    code = check_code(code)
    flat = open_regions(regions, pieces)
    pieces.check_packable()
    device = flat[0].device
    if out is None:
        out = torch.empty(form.num_bytes, dtype=torch.uint8, device=device)
    check_run("out", out, form.num_bytes, device)
    check_apart("out", out, flat, pieces)
    _check_aligned("out", out, 4)
    for index, region in enumerate(flat):
        _check_aligned(f"regions[{index}]", region, source_dtype.itemsize)
    out[form.num_codes : form.scales_at] = 0
    why = refusal(device, code, row_elements)
    chosen = choose("pack_quantized", device, path, refusal=why)
    if chosen is Path.TRITON:
        _launch(flat, pieces, out, source_dtype, row_elements, code, form, to_packed=True)
        return out
    plain = torch.empty(pieces.num_bytes, dtype=torch.uint8, device=device)
    copy = copy_pieces if chosen is Path.TORCH else copy_slices
    copy(flat, pieces, plain, to_packed=True)
    values = plain.view(source_dtype).view(-1, row_elements)
    rows = encode(values, code, chosen)
    out[: form.num_codes] = rows.codes.view(-1).view(torch.uint8)
    out[form.scales_at :] = rows.scales.view(torch.uint8)
    return out


def unpack_quantized(
    packed: torch.Tensor,
    regions: Regions,
    pieces: Pieces,
    *,
    source_dtype: torch.dtype,
    row_elements: int,
    code: Code | str = Code.INT8,
    path: str | None = None,
) -> None:
    """`dequantize_rows` and `unpack` in one pass: pieces get what is close to the packed values.

    Args:
        packed: of `pack_quantized` with the same dtype, row length and code.
        regions, pieces, source_dtype, row_elements, code, path: as there.

    Raises:
        ConfigError: as there; pieces that overlap in a region.
    """
    form = CodedForm.of(pieces, source_dtype=source_dtype, row_elements=row_elements)
    code = check_code(code)
    flat = open_regions(regions, pieces)
    check_targets(flat, pieces)
    device = flat[0].device
    check_run("packed", packed, form.num_bytes, device)
    check_apart("packed", packed, flat, pieces)
    _check_aligned("packed", packed, 4)
    for index, region in enumerate(flat):
        _check_aligned(f"regions[{index}]", region, source_dtype.itemsize)
    why = refusal(device, code, row_elements)
    chosen = choose("unpack_quantized", device, path, refusal=why)
    if chosen is Path.TRITON:
        _launch(flat, pieces, packed, source_dtype, row_elements, code, form, to_packed=False)
        return
    codes = packed[: form.num_codes].view(code.dtype).view(-1, row_elements)
    rows = QuantizedRows(codes=codes, scales=packed[form.scales_at :].view(torch.float32))
    plain = decode(rows, source_dtype).view(-1).view(torch.uint8)
    copy = copy_pieces if chosen is Path.TORCH else copy_slices
    copy(flat, pieces, plain, to_packed=False)


def _launch(
    regions: list[torch.Tensor],
    pieces: Pieces,
    packed: torch.Tensor,
    dtype: torch.dtype,
    row_elements: int,
    code: Code,
    form: CodedForm,
    *,
    to_packed: bool,
) -> None:
    from prfaas.kernels.packing import launches

    launches.quantize_pieces(
        regions,
        pieces,
        packed,
        to_packed=to_packed,
        dtype=dtype,
        row_elements=row_elements,
        scales_at=form.scales_at,
        code=code,
    ).run()


def _check_aligned(name: str, data: torch.Tensor, unit: int) -> None:
    # The offset counts too: torch reinterprets elements by it, wherever the storage begins.
    if data.data_ptr() % unit or data.storage_offset() % unit:
        raise ConfigError(
            f"{name} starts at an address that is no multiple of {unit} bytes; align it to 16"
        )
