"""What leaves a Kimi Linear node for a prompt: latent rows of 7 layers, states of 20 layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernel_bench import floors
from kernel_bench.cases import Build, Case, Peer, Sizes
from kernel_bench.inputs import Inputs
from prfaas.kernels.packing import (
    CodedForm,
    Pieces,
    QuantizedRows,
    convert_states,
    dequantize_rows,
    pack,
    pack_quantized,
    quantize_rows,
    reblock,
    unpack,
    unpack_quantized,
)

NUM_LAYERS, ROW_ELEMENTS = 7, 576
STATE_LAYERS, STATE_HEADS, DIM = 20, 32, 128


def _layers(sizes: Sizes) -> int:
    return max(2, NUM_LAYERS // sizes.divide_heads)


class _Rows:
    """Caches of all layers, twice as large as the prompt, whose blocks lie in no order."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.row_elements = sizes.dim(ROW_ELEMENTS)
        num_blocks = -(-sizes.num_tokens // sizes.page_size)
        make = Inputs(device, sizes.dtype)
        shape = (2 * num_blocks, sizes.page_size, self.row_elements)
        layers = _layers(sizes)
        self.caches = [make.normal(*shape) for _ in range(layers)]
        order = torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(6))
        blocks = order[:num_blocks]
        size = self.caches[0][0].numel() * sizes.dtype.itemsize
        self.pieces = Pieces(
            (blocks * size).repeat(layers),
            torch.full((layers * num_blocks,), size),
            regions=torch.arange(layers).repeat_interleave(num_blocks),
        )
        self.num_bytes = self.pieces.num_bytes

    def run_bytes(self) -> torch.Tensor:
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.caches[0].device)

    def memcpy(self) -> Peer:
        """One copy of as many bytes, of which none are scattered: a floor."""

        def build() -> Callable[[], torch.Tensor]:
            source, target = self.run_bytes(), self.run_bytes()
            return lambda: target.copy_(source)

        return Peer(name="memcpy", package="torch", build=build, compares=False)


def packing(sizes: Sizes, device: torch.device) -> Case:
    rows = _Rows(sizes, device)
    out = rows.run_bytes()
    return Case(
        op="pack",
        work=floors.copied(read_bytes=rows.num_bytes),
        run=lambda path: (pack(rows.caches, rows.pieces, out=out, path=path),),
        peers=(rows.memcpy(),),
    )


def unpacking(sizes: Sizes, device: torch.device) -> Case:
    rows = _Rows(sizes, device)
    packed = Inputs(device).normal(rows.num_bytes // 4).view(torch.uint8)

    def run(path: str) -> tuple[torch.Tensor, ...]:
        unpack(packed, rows.caches, rows.pieces, path=path)
        return tuple(cache.view(torch.uint8) for cache in rows.caches)

    return Case(
        op="unpack",
        work=floors.copied(read_bytes=rows.num_bytes),
        run=run,
        peers=(rows.memcpy(),),
    )


def packing_coded(sizes: Sizes, device: torch.device, *, code: str) -> Case:
    rows = _Rows(sizes, device)
    options = {"source_dtype": sizes.dtype, "row_elements": rows.row_elements}
    form = CodedForm.of(rows.pieces, **options)
    out = torch.zeros(form.num_bytes, dtype=torch.uint8, device=device)
    return Case(
        op="pack_quantized",
        work=floors.copied(read_bytes=rows.num_bytes, written_bytes=form.num_bytes),
        run=lambda path: (
            pack_quantized(rows.caches, rows.pieces, **options, code=code, out=out, path=path),
        ),
    )


def unpacking_coded(sizes: Sizes, device: torch.device, *, code: str) -> Case:
    rows = _Rows(sizes, device)
    options = {"source_dtype": sizes.dtype, "row_elements": rows.row_elements, "code": code}
    packed = pack_quantized(rows.caches, rows.pieces, **options, path="torch")

    def run(path: str) -> tuple[torch.Tensor, ...]:
        unpack_quantized(packed, rows.caches, rows.pieces, **options, path=path)
        return tuple(rows.caches)

    return Case(
        op="unpack_quantized",
        work=floors.copied(read_bytes=len(packed), written_bytes=rows.num_bytes),
        run=run,
    )


def coding(sizes: Sizes, device: torch.device) -> Case:
    """Rows that already lie together."""
    rows = Inputs(device, sizes.dtype).normal(_layers(sizes) * sizes.num_tokens, sizes.dim(DIM))

    def run(path: str) -> tuple[torch.Tensor, ...]:
        made = quantize_rows(rows, code="int8", path=path)
        return made.codes, made.scales

    size = rows.numel() * rows.itemsize
    written = rows.numel() + 4 * len(rows)
    return Case(
        op="quantize_rows",
        work=floors.copied(read_bytes=size, written_bytes=written),
        run=run,
    )


def decoding(sizes: Sizes, device: torch.device) -> Case:
    """The way back."""
    rows = Inputs(device, sizes.dtype).normal(_layers(sizes) * sizes.num_tokens, sizes.dim(DIM))
    coded: QuantizedRows = quantize_rows(rows, code="int8", path="torch")
    size = rows.numel() * rows.itemsize
    read = rows.numel() + 4 * len(rows)
    return Case(
        op="dequantize_rows",
        work=floors.copied(read_bytes=read, written_bytes=size),
        run=lambda path: (dequantize_rows(coded, dtype=sizes.dtype, path=path),),
    )


def other_blocks(sizes: Sizes, device: torch.device) -> Case:
    """One layer's rows into blocks of three quarters of the size."""
    size = sizes.page_size
    sources = -(-sizes.num_tokens // size)
    targets = -(-sizes.num_tokens // (size * 3 // 4))
    make = Inputs(device, sizes.dtype)
    row = sizes.dim(ROW_ELEMENTS)
    source = make.normal(sources, size, row)
    target = torch.zeros(targets, size * 3 // 4, row, dtype=sizes.dtype, device=device)

    def run(path: str) -> tuple[torch.Tensor, ...]:
        blocks = range(sources - 1, -1, -1), range(targets)
        reblock(source, blocks[0], target, blocks[1], sizes.num_tokens, path=path)
        return (target,)

    num_bytes = sizes.num_tokens * row * sizes.dtype.itemsize
    return Case(op="reblock", work=floors.copied(read_bytes=num_bytes), run=run)


def transposing(sizes: Sizes, device: torch.device) -> Case:
    """The float32 states of 20 layers of 32 heads into the other layout."""
    layers, heads, dim = sizes.heads(STATE_LAYERS), sizes.heads(STATE_HEADS), sizes.dim(DIM)
    states = Inputs(device).normal(layers, heads, dim, dim)

    def torch_copy() -> Callable[[], torch.Tensor]:
        return lambda: states.mT.contiguous()

    return Case(
        op="convert_states",
        work=floors.copied(read_bytes=states.numel() * 4),
        run=lambda path: (convert_states(states, source="k_first", target="v_first", path=path),),
        peers=(Peer(name="torch", package="torch", build=torch_copy),),
    )


CASES: dict[str, Build] = {
    "pack": packing,
    "unpack": unpacking,
    "pack_int8": partial(packing_coded, code="int8"),
    "unpack_int8": partial(unpacking_coded, code="int8"),
    "pack_fp8": partial(packing_coded, code="fp8_e4m3"),
    "quantize_rows": coding,
    "dequantize_rows": decoding,
    "reblock": other_blocks,
    "convert_states": transposing,
}
