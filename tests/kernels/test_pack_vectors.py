"""Copies move 128 bits at a time, and compute no address in 32 bits, on GPUs that are not here."""

from __future__ import annotations

import pytest
import torch

from kernel_paths import IS_INTERPRETING

if not IS_INTERPRETING:  # one mode per process
    from aot import compile_for
    from kernel_launches.packing import LAUNCHES
    from prfaas.kernels.arch import ARCHS
    from prfaas.kernels.packing import Code, Pieces, launches

    TABLE = 64
    """Bits of an entry of the tables."""

    @pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
    @pytest.mark.parametrize("size", ["2KiB", "16KiB"])
    @pytest.mark.parametrize("word", ["pack", "unpack"])
    def test_aligned_copies_are_vectors(word: str, size: str, target: str) -> None:
        launch = LAUNCHES[f"{word}_{size}"](ARCHS[target])
        assert launch is not None
        compiled = compile_for(launch, ARCHS[target])
        assert compiled.vector_bits("ld") == {128, TABLE}
        assert compiled.vector_bits("st") == {128}
        assert compiled.spilled_bytes == 0

    def test_one_odd_piece_leaves_the_others_their_vectors() -> None:
        launch = LAUNCHES["pack_16KiB_by1"](ARCHS["sm_90"])
        assert launch is not None
        assert {8, 128} <= compile_for(launch, ARCHS["sm_90"]).vector_bits("st")

    @pytest.mark.parametrize("first", [0, 1, 4, 8])
    @pytest.mark.parametrize("shifted", ["region", "packed"])
    def test_vectors_need_aligned_addresses(shifted: str, first: int) -> None:
        """A tensor may start anywhere: what is promised to the compiler follows its address."""
        region, packed = (torch.zeros(4096 + 16, dtype=torch.uint8) for _ in range(2))
        assert region.data_ptr() % 16 == packed.data_ptr() % 16 == 0
        if shifted == "region":
            region = region[first:]
        else:
            packed = packed[first:]
        launch = launches.copy([region], Pieces([0], [4096]), packed, to_packed=True)
        assert launch.constants["ALIGNED"] is (first == 0)
        assert launch.constants["WORD"] == (1 if first == 1 else 4)
        coded = launches.quantize_pieces(
            [region],
            Pieces([0], [2048]),
            packed,
            to_packed=True,
            dtype=torch.float32,
            row_elements=64,
            scales_at=512,
            code=Code.INT8,
        )
        assert coded.constants["ALIGN"] == (first or 16)

    @pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
    @pytest.mark.parametrize("dim", [64, 128, 256, 576])
    def test_coded_pieces_are_read_and_written_in_vectors(dim: int, code: str) -> None:
        arch = ARCHS["sm_90"]
        packs, unpacks = (LAUNCHES[f"{word}_{code}_{dim}"](arch) for word in ("pack", "unpack"))
        assert packs is not None
        assert unpacks is not None
        assert 128 in compile_for(packs, arch).vector_bits("ld")
        assert 128 in compile_for(unpacks, arch).vector_bits("st")

    def test_the_compiler_keeps_the_rounding() -> None:
        """Ties to even by adding and subtracting 1.5 * 2^23; divisions that round correctly."""
        arch = ARCHS["sm_90"]
        codes, floats = (LAUNCHES[f"pack_{code}_64"](arch) for code in ("int8", "fp8_e4m3"))
        assert codes is not None
        assert floats is not None
        text = compile_for(codes, arch).assembly
        assert text.count("0f4B400000") == text.count("0fCB400000") > 0
        assert "div.rn.f32" in text
        assert "div.full" not in text
        assert "cvt.rn.satfinite.e4m3x2.f32" in compile_for(floats, arch).assembly
