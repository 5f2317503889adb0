"""Decay attention: every path gives what the float64 recurrence gives."""

from __future__ import annotations

import pytest
import torch

from decay_cases import DecayCase
from kernel_paths import DEVICE, PATHS, TOLERANCE, relative_error
from prfaas.kernels.decay import decay_attention
from prfaas.kernels.results import PrefillResult

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GATES = (-0.01, -1.0, -2.5, -5.0, -30.0, -100.0)


def assert_same(got: PrefillResult, truth: PrefillResult, tolerance: float) -> None:
    for name in ("output", "final_state", "checkpoints"):
        mine, true = getattr(got, name), getattr(truth, name)
        assert mine.shape == true.shape
        if true.numel():
            assert relative_error(mine, true) < tolerance, name
    assert got.final_state.dtype == got.checkpoints.dtype == FP32


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_constant", [True, False], ids=["constant", "token"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "key", "value"), [(1, 60, 100), (63, 16, 32), (65, 100, 60), (130, 128, 64)]
)
def test_it_equals_the_recurrence(
    path: str, is_constant: bool, dtype: torch.dtype, num_tokens: int, key: int, value: int
) -> None:
    case = DecayCase(num_tokens, key=key, value=value, dtype=dtype, is_constant=is_constant)
    got = case.run(path)
    assert got.output.dtype == dtype
    assert_same(got, case.run("reference"), TOLERANCE[dtype])


@pytest.mark.parametrize("path", PATHS)
def test_float16_takes_states_and_weights_outside_of_its_range(path: str) -> None:
    case = DecayCase(130, key=32, value=32, dtype=FP16, is_constant=True)
    case.g = torch.full_like(case.g, -1e-3)
    case.q, case.k = (case.q * 10).half(), (case.k * 1000).abs().half()
    case.v = case.v.abs()  # states pass 65504, and so does q k
    got = case.run(path, scale=1e-4)
    truth = case.run("reference", scale=1e-4)
    assert truth.final_state.max() > 65_504
    assert_same(got, truth, TOLERANCE[FP16])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_constant", [True, False], ids=["constant", "token"])
def test_a_ragged_pack_with_empty_sequences(path: str, is_constant: bool) -> None:
    offsets = [0, 0, 64, 65, 65, 128, 250]
    case = DecayCase(250, groups=2, per_group=1, num_sequences=6, is_constant=is_constant)
    got, truth = (case.run(p, cu_seqlens=offsets) for p in (path, "reference"))
    assert_same(got, truth, TOLERANCE[FP32])
    assert case.initial is not None
    assert torch.equal(got.final_state[0].cpu(), case.initial[0])
    assert torch.equal(got.final_state[3].cpu(), case.initial[3])


@pytest.mark.parametrize("path", PATHS)
def test_without_tokens_states_are_zeros_or_the_initial_ones(path: str) -> None:
    case = DecayCase(0, num_sequences=2)
    got = case.run(path, cu_seqlens=[0, 0, 0])
    assert got.output.shape == (0, 2, 32)
    assert case.initial is not None
    assert torch.equal(got.final_state.cpu(), case.initial)
    case.initial = None
    got = case.run(path, cu_seqlens=[0, 0, 0])
    assert torch.equal(got.final_state.cpu(), torch.zeros(2, 2, 32, 32))


@pytest.mark.parametrize("path", PATHS)
def test_no_initial_state_means_zeros(path: str) -> None:
    case = DecayCase(100, num_sequences=2)
    assert case.initial is not None
    case.initial = None
    got = case.run(path, cu_seqlens=[0, 70, 100])
    assert_same(got, case.run("reference", cu_seqlens=[0, 70, 100]), TOLERANCE[FP32])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("is_constant", [True, False], ids=["constant", "token"])
@pytest.mark.parametrize("gate", GATES)
def test_any_strength_of_decay(
    path: str, dtype: torch.dtype, is_constant: bool, gate: float
) -> None:
    case = DecayCase(130, key=16, value=16, dtype=dtype, is_constant=is_constant)
    case.g = torch.full_like(case.g, gate)
    assert_same(case.run(path), case.run("reference"), TOLERANCE[dtype])


@pytest.mark.parametrize("path", PATHS)
def test_strong_gates_do_not_blur_weak_ones(path: str) -> None:
    """Sums over a chunk reach thousands; the digits of the weak gates have to survive there."""
    case = DecayCase(130, key=16, value=16)
    case.g[:] = -0.01
    case.g[::5] = -60.0
    case.q, case.k = case.q.abs(), case.k.abs()
    assert_same(case.run(path), case.run("reference"), 1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_minus_infinity_is_a_reset(path: str, dtype: torch.dtype) -> None:
    case = DecayCase(80, key=16, value=16, dtype=dtype)
    case.g[40] = -torch.inf
    whole = case.run(path)
    case.initial = torch.zeros(1, 2, 16, 16)
    rest = case.piece(40, 80, case.initial).run(path)
    assert relative_error(whole.output[40:], rest.output) < TOLERANCE[dtype]
    assert relative_error(whole.final_state, rest.final_state) < TOLERANCE[dtype]


@pytest.mark.parametrize("path", PATHS)
def test_gates_of_zero_give_plain_linear_attention(path: str) -> None:
    case = DecayCase(130, groups=2, per_group=1)
    case.initial, case.g = None, torch.zeros_like(case.g)
    got = case.run(path, scale=1.0).output.double().cpu()
    scores = torch.einsum("thk,shk->hts", case.q.double(), case.k.double()).tril()
    assert relative_error(got, torch.einsum("hts,shv->thv", scores, case.v.double())) < 5e-6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_constant", [True, False], ids=["constant", "token"])
@pytest.mark.parametrize("at", [1, 17, 63, 64])
def test_a_run_in_pieces_equals_the_whole(path: str, is_constant: bool, at: int) -> None:
    case = DecayCase(100, per_group=1, key=16, value=16, is_constant=is_constant)
    assert case.initial is not None
    whole = case.run(path)
    first = case.piece(0, at, case.initial).run(path)
    second = case.piece(at, 100, first.final_state.cpu()).run(path)
    joined = torch.cat((first.output, second.output))
    assert relative_error(joined, whole.output) < TOLERANCE[FP32]
    assert relative_error(second.final_state, whole.final_state) < TOLERANCE[FP32]


@pytest.mark.parametrize("path", PATHS)
def test_checkpoints_are_the_states_there_and_resuming_repeats_the_run(path: str) -> None:
    offsets, wanted = [0, 100, 100, 170], [[1, 64, 100], [], [33]]
    case = DecayCase(170, key=16, value=32, num_sequences=3)
    got, truth = (case.run(p, cu_seqlens=offsets, checkpoints=wanted) for p in (path, "reference"))
    assert got.checkpoints.shape == (4, 2, 16, 32)
    assert_same(got, truth, TOLERANCE[FP32])
    rest = case.piece(133, 170, got.checkpoints[3:].cpu()).run(path)
    assert torch.equal(rest.output, got.output[133:])
    assert torch.equal(rest.final_state, got.final_state[2:])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_constant", [True, False], ids=["constant", "token"])
def test_nan_stays_in_its_sequence(path: str, is_constant: bool) -> None:
    case = DecayCase(100, num_sequences=3, is_constant=is_constant)
    offsets = [0, 30, 60, 100]
    clean = case.run(path, cu_seqlens=offsets)
    for part in (case.q, case.k, case.v):
        part[30:60] = torch.nan
    dirty = case.run(path, cu_seqlens=offsets)
    others = [*range(30), *range(60, 100)]
    assert torch.equal(dirty.output[others], clean.output[others])
    assert torch.equal(dirty.final_state[[0, 2]], clean.final_state[[0, 2]])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_views_of_a_fused_projection_need_no_copy(path: str, dtype: torch.dtype) -> None:
    fused = torch.randn(70, 3 * 2 * 16, generator=torch.Generator().manual_seed(0))
    fused = fused.to(DEVICE, dtype)
    q, k, v = (part.unflatten(1, (2, 16)) for part in fused.split(32, dim=1))
    g = torch.full((2, 70), -0.1, device=DEVICE).T
    state = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got, truth = (
        decay_attention(q, k, v, g, initial_state=state.mT, path=p) for p in (path, "reference")
    )
    assert_same(got, truth, TOLERANCE[dtype])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_initial_states_may_be_narrow_and_stay_as_they_are(path: str, dtype: torch.dtype) -> None:
    case = DecayCase(40, key=16, value=16)
    assert case.initial is not None
    case.initial = case.initial.to(dtype)
    before = case.initial.clone()
    assert_same(case.run(path), case.run("reference"), TOLERANCE[FP32])
    assert torch.equal(case.initial, before)


@pytest.mark.parametrize("path", PATHS)
def test_more_chunks_than_one_block(path: str) -> None:
    """The torch path works on several chunks at a time; this takes several times."""
    num_tokens, heads = (1100, 16) if path == "torch" else (200, 2)
    case = DecayCase(num_tokens, per_group=heads, key=16, value=16)
    assert_same(case.run(path), case.run("reference"), TOLERANCE[FP32])
