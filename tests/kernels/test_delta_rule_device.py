"""What the delta rule's kernels promise beyond the formula: far addresses, exact decays."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from kernel_paths import DEVICE, PATHS, RUNS_TRITON, relative_error
from prfaas.kernels.arch import ARCHS, Arch
from prfaas.kernels.delta import delta_rule
from prfaas.kernels.delta.tiles import combine_tiles, padded, prepare_tiles, scan_tiles

FAR = 2**25
"""Elements between tokens: the second chunk of 64 tokens starts beyond 2^31."""


def _far_tokens(tokens: int, directory: Path) -> torch.Tensor:
    """bfloat16 [tokens, 1, 16] whose rows lie 2^25 elements apart. On the host it is a sparse file,
    which takes no more room than what is written."""
    size = FAR * (tokens - 1) + 16
    if DEVICE.type == "cuda":
        flat = torch.empty(size, dtype=torch.bfloat16, device=DEVICE)
    else:
        flat = torch.from_file(str(directory / "far"), shared=True, size=size, dtype=torch.bfloat16)
    return flat.as_strided((tokens, 1, 16), (FAR, 16, 1))


@pytest.mark.parametrize("path", PATHS)
def test_addresses_beyond_32_bits(path: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn((3, 66, 1, 16), device=DEVICE).bfloat16()
    g, beta = -torch.rand((66, 1), device=DEVICE), torch.rand((66, 1), device=DEVICE)
    with tempfile.TemporaryDirectory() as directory:
        far = _far_tokens(66, Path(directory))
        far.copy_(v)
        near_made = delta_rule(q, k, v, g, beta, normalize_qk=True, path=path)
        far_made = delta_rule(q, k, far, g, beta, normalize_qk=True, path=path)
        del far
    assert torch.equal(near_made.output, far_made.output)
    assert torch.equal(near_made.final_state, far_made.final_state)


if RUNS_TRITON:  # without it there is nothing to run
    import triton
    import triton.language as tl

    from prfaas.kernels.device import offset64

    @triton.jit
    def _place(starts, offsets, STRIDE: tl.constexpr):
        index = tl.program_id(0)
        start = tl.load(starts + index)
        tl.store(offsets + index, offset64(start, STRIDE) + offset64(index, 64))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_offsets_have_64_bits(dtype: torch.dtype) -> None:
        """Starts of chunks of a batch of 65,537 x 64 tokens, of 32 heads x 128 channels."""
        values = [0, 524_287, 524_288, 65_537 * 64, 2**31 - 1]
        starts = torch.tensor(values, dtype=dtype, device=DEVICE)
        offsets = torch.zeros(len(values), dtype=torch.int64, device=DEVICE)
        _place[(len(values),)](starts, offsets, STRIDE=4096)
        assert offsets.tolist() == [4096 * start + 64 * i for i, start in enumerate(values)]

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_a_strong_gate_costs_later_tokens_no_precision(kind: str) -> None:
        """Differences of running sums would be off by 1e-4 after a gate of -1000: 32 bits cannot
        hold -1000.01 better."""
        torch.manual_seed(1)
        q, k, v = torch.randn((3, 60, 1, 32), device=DEVICE)
        g = torch.full((60, 1, 32), -0.01, device=DEVICE)
        g[3] = g[21] = -1000.0
        g = g if kind == "kda" else g[..., 0]
        beta = torch.full((60, 1), 0.1, device=DEVICE)
        options = {"normalize_qk": True}
        made = delta_rule(q, k, v, g, beta, path="triton", **options)
        truth = delta_rule(q, k, v, g, beta, path="reference", **options)
        assert relative_error(made.output, truth.output) < 1e-6
        assert relative_error(made.final_state, truth.final_state) < 1e-6

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_a_gate_of_minus_infinity_erases(kind: str) -> None:
        torch.manual_seed(2)
        q, k, v = torch.randn((3, 70, 1, 16), device=DEVICE)
        g = torch.full((70, 1, 16), -0.1, device=DEVICE)
        g[30] = -torch.inf
        g = g if kind == "kda" else g[..., 0].contiguous()
        beta = torch.rand((70, 1), device=DEVICE)
        options = {"normalize_qk": True, "path": "triton"}
        whole = delta_rule(q, k, v, g, beta, **options)
        after = delta_rule(q[30:], k[30:], v[30:], g[30:], beta[30:], **options)
        assert relative_error(whole.output[30:], after.output) < 1e-6
        assert relative_error(whole.final_state, after.final_state) < 1e-6

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_keys_that_are_alike_in_16_bits(kind: str) -> None:
        """Cosine 0.95, beta 2, no decay: float32 itself is 20 times worse than usual there, and an
        inverse that is rounded to 16 bits is off by 2e-2 to 3.5e-2."""
        torch.manual_seed(0)
        k = torch.randn((200, 1, 64)) * 0.05**0.5 + 0.95**0.5 * torch.randn(64)
        q, v = torch.randn((2, 200, 1, 64))
        q, k, v = (x.bfloat16().to(DEVICE) for x in (q, k, v))
        g = torch.full((200, 1, 64)[: 2 if kind == "gdn" else 3], -1e-4, device=DEVICE)
        beta = torch.full((200, 1), 2.0, device=DEVICE)
        made = delta_rule(q, k, v, g, beta, path="triton", normalize_qk=True)
        truth = delta_rule(q, k, v, g, beta, path="reference", normalize_qk=True)
        assert relative_error(made.output, truth.output) < 1.6e-2

    @pytest.mark.parametrize(("strength", "largest"), [(1.0, 2e-2), (2.0, 5e-2)])
    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_one_key_for_all_tokens_in_16_bits(kind: str, strength: float, largest: float) -> None:
        """The worst case, beyond the usual 1e-2: no decay either, so nothing is ever forgotten."""
        torch.manual_seed(0)
        k = torch.randn(1, 1, 128).expand(200, 1, 128)
        q, v = torch.randn(2, 200, 1, 128)
        q, k, v = (x.bfloat16().contiguous().to(DEVICE) for x in (q, k, v))
        g = torch.zeros((200, 1, 128)[: 2 if kind == "gdn" else 3], device=DEVICE)
        beta = torch.full((200, 1), strength, device=DEVICE)
        made = delta_rule(q, k, v, g, beta, path="triton", normalize_qk=True)
        truth = delta_rule(q, k, v, g, beta, path="reference", normalize_qk=True)
        assert relative_error(made.output, truth.output) < largest
        assert relative_error(made.final_state, truth.final_state) < largest


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 16, 60, 100, 128, 129, 256])
def test_tiles_divide_the_padded_state(arch: Arch, dtype: torch.dtype, size: int) -> None:
    scan, combine = scan_tiles(arch, dtype, size, size), combine_tiles(size, size)
    prepare = prepare_tiles(arch, dtype, size, size, is_per_channel=True)
    assert padded(size) >= size
    for key in (scan.key, combine.key, prepare.key):
        assert key >= 16
        assert padded(size) % key == 0
    assert min(scan.value, combine.value, prepare.value) >= 16
