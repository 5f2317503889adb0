"""8-bit rows: the same bits on every path, and errors as small as the codes allow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_paths import DEVICE, PATHS, relative_error
from packing_cases import as_bytes
from poison import PoisonedMemory
from prfaas.errors import ConfigError
from prfaas.kernels.arch import ARCHS
from prfaas.kernels.dispatch import report
from prfaas.kernels.packing import Code, QuantizedRows, dequantize_rows, quantize_rows

LIMITS = {Code.INT8: 1e-2, Code.FP8_E4M3: 4e-2}
HALF_STEPS = {Code.INT8: 0.5 + 1e-5, Code.FP8_E4M3: 16 + 1e-3}
"""Largest error in scales."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def same(got: QuantizedRows, want: QuantizedRows) -> bool:
    return as_bytes(got.codes) == as_bytes(want.codes) and torch.equal(
        got.scales.nan_to_num(nan=-1.0), want.scales.nan_to_num(nan=-1.0)
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(130, 64), (3, 7, 100), (65, 576), (5, 1), (2, 5000)])
def test_every_path_makes_the_same_bits(
    shape: tuple[int, ...], dtype: torch.dtype, code: Code, path: str
) -> None:
    memory = PoisonedMemory()
    x = memory.place(gaussian(*shape, dtype=dtype) * 3, row_padding=8)
    rows = quantize_rows(x, code=code, path=path)
    assert rows.codes.shape == shape
    assert rows.codes.dtype == code.dtype
    assert rows.scales.shape == shape[:-1]
    assert same(rows, quantize_rows(x, code=code, path="reference"))
    back = dequantize_rows(rows, dtype=dtype, path=path)
    assert back.dtype == dtype
    assert torch.equal(back, dequantize_rows(rows, dtype=dtype, path="reference"))
    if shape[-1] > 1:
        assert relative_error(back, x) < LIMITS[code]
    memory.check()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("code", Code)
def test_rows_of_every_size(code: Code, path: str) -> None:
    """From below the smallest scale to the largest float."""
    size = torch.logspace(-45, 38, 84, dtype=torch.float64).float().to(DEVICE)[:, None]
    x = (gaussian(84, 64).clamp(-3, 3) / 3) * size
    rows = quantize_rows(x, code=code, path=path)
    assert same(rows, quantize_rows(x, code=code, path="reference"))
    back = dequantize_rows(rows, dtype=torch.float32, path=path)
    assert bool(back.isfinite().all())
    big = size[:, 0] > 1e-27
    for row, want in zip(back[big], x[big], strict=True):
        assert relative_error(row, want) < 2 * LIMITS[code]
    steps = (back.double() - x.double()).abs().amax(-1) / rows.scales.double()
    assert float(steps.max()) <= HALF_STEPS[code]


@pytest.mark.parametrize("path", ["reference", *PATHS])
@pytest.mark.parametrize("code", Code)
def test_zeros_and_what_is_not_finite(code: Code, path: str) -> None:
    x = gaussian(5, 32)
    x[1] = 0
    x[2, 7] = float("nan")
    x[3, 0] = float("inf")
    x[4, 31] = -float("inf")
    rows = quantize_rows(x, code=code, path=path)
    assert rows.scales.isnan().tolist() == [False, False, True, True, True]
    assert not any(as_bytes(rows.codes[1:]))
    back = dequantize_rows(rows, dtype=torch.bfloat16, path=path)
    assert torch.equal(back[1], torch.zeros_like(back[1]))
    assert bool(back[:2].isfinite().all())
    assert bool(back[2:].isnan().all())


@pytest.mark.parametrize("path", ["reference", *PATHS])
def test_ties_go_to_even(path: str) -> None:
    halves = torch.arange(-16, 16, device=DEVICE) + 0.5
    x = torch.cat((halves, halves.new_tensor([127.0])))[None]
    rows = quantize_rows(x, code="int8", path=path)
    assert rows.scales.item() == 1.0
    want = [round(value) for value in halves.tolist()]  # Python rounds ties to even
    assert rows.codes[0, :-1].tolist() == want
    assert rows.codes[0, -1].item() == 127


@pytest.mark.parametrize("path", PATHS)
def test_codes_are_the_nearest(path: str) -> None:
    """Against numpy in float64: no code is more than half a step away."""
    x = gaussian(64, 128, seed=4)
    rows = quantize_rows(x, path=path)
    scale = rows.scales.double().cpu().numpy()[:, None]
    exact = x.double().cpu().numpy() / scale
    assert np.abs(rows.codes.double().cpu().numpy() - exact).max() <= 0.5 + 1e-5
    amax = x.abs().amax(-1).double().cpu().numpy()[:, None]
    assert np.allclose(scale, amax / 127, rtol=1e-7)


@pytest.mark.parametrize("path", PATHS)
def test_views_of_a_projection(path: str) -> None:
    """Token and head strides are free; nothing beside the view is read."""
    fused = gaussian(9, 6, 64)
    fused[:, 4:] = float("nan")
    for view in (fused[:, 1:4], fused[1:7:2, :4], fused[:, :4].transpose(0, 1), fused[:, 2]):
        rows = quantize_rows(view, path=path)
        assert same(rows, quantize_rows(view.contiguous(), path="reference"))


@pytest.mark.parametrize("path", PATHS)
def test_one_row_and_no_rows(path: str) -> None:
    x = gaussian(16)
    rows = quantize_rows(x, path=path)
    assert rows.scales.shape == ()
    assert relative_error(dequantize_rows(rows, dtype=torch.float32, path=path), x) < 1e-2
    for shape in ((0, 16), (3, 0, 16)):
        empty = quantize_rows(gaussian(*shape), path=path)
        assert empty.scales.shape == shape[:-1]
        assert dequantize_rows(empty, dtype=torch.float16, path=path).shape == shape


def test_long_rows_run_in_torch() -> None:
    x = gaussian(2, 8193)
    rows = quantize_rows(x)
    assert same(rows, quantize_rows(x, path="reference"))
    if "triton" in PATHS:
        counted = report().fallbacks
        assert any(op == "quantize_rows" and "8193" in why for op, why in counted)
        with pytest.raises(ConfigError, match="up to 8192"):
            quantize_rows(x, path="triton")


def test_refused_arguments() -> None:
    x = gaussian(4, 16)
    with pytest.raises(ConfigError, match="code is 'int4'; use one of int8, fp8_e4m3"):
        quantize_rows(x, code="int4")
    with pytest.raises(ConfigError, match="x has dtype int32"):
        quantize_rows(x.int())
    with pytest.raises(ConfigError, match="x has stride"):
        quantize_rows(x.T)
    with pytest.raises(ConfigError, match="x has shape"):
        quantize_rows(torch.zeros(3, 0, device=DEVICE))
    with pytest.raises(ConfigError, match="x is a list"):
        quantize_rows([1.0])  # type: ignore[arg-type]
    rows = quantize_rows(x)
    with pytest.raises(ConfigError, match=r"dtype is torch\.int8"):
        dequantize_rows(rows, dtype=torch.int8)
    with pytest.raises(ConfigError, match="scales has shape"):
        dequantize_rows(
            QuantizedRows(codes=rows.codes, scales=rows.scales[:3]), dtype=torch.float32
        )
    with pytest.raises(ConfigError, match="codes has dtype float32"):
        dequantize_rows(QuantizedRows(codes=x, scales=rows.scales), dtype=torch.float32)


def test_float8_needs_a_processor_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from prfaas.kernels.packing import quantize

    monkeypatch.setattr(quantize, "is_interpreting", lambda: True)
    monkeypatch.setattr(quantize, "arch_of", lambda device: ARCHS["sm_80"])
    why = quantize.refusal(DEVICE, Code.FP8_E4M3, 64)
    assert why == 'sm_80 has no float8_e4m3fn; use code="int8"'
    assert quantize.refusal(DEVICE, Code.INT8, 64) is None
    if "triton" in PATHS:
        x = gaussian(3, 64)
        rows = quantize_rows(x, code="fp8_e4m3")
        assert same(rows, quantize_rows(x, code="fp8_e4m3", path="reference"))
        assert report().fallbacks["quantize_rows", why] == 1
        with pytest.raises(ConfigError, match="sm_80 has no float8_e4m3fn"):
            quantize_rows(x, code="fp8_e4m3", path="triton")
