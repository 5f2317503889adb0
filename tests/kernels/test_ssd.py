"""Mamba2's SSD: the float64 recurrence, other people's code, and the layouts of its states."""

from __future__ import annotations

import pytest
import torch
from transformers.models.nemotron_h import modeling_nemotron_h

from decay_cases import SsdCase
from kernel_paths import DEVICE, PATHS, TOLERANCE, relative_error
from prfaas.errors import ConfigError
from prfaas.kernels.decay import decay_attention, ssd
from prfaas.kernels.results import PrefillResult

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def assert_same(got: PrefillResult, truth: PrefillResult, tolerance: float) -> None:
    for name in ("output", "final_state", "checkpoints"):
        mine, true = getattr(got, name), getattr(truth, name)
        assert mine.shape == true.shape
        if true.numel():
            assert relative_error(mine, true) < tolerance, name
    assert got.final_state.is_contiguous()
    assert got.final_state.dtype == FP32


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "key", "value"), [(1, 60, 100), (63, 100, 60), (65, 16, 24), (130, 128, 64)]
)
def test_it_equals_the_recurrence(
    path: str, dtype: torch.dtype, num_tokens: int, key: int, value: int
) -> None:
    case = SsdCase(num_tokens, key=key, value=value, dtype=dtype)
    assert_same(case.run(path), case.run("reference"), TOLERANCE[dtype])


@pytest.mark.parametrize("path", PATHS)
def test_groups_packs_and_checkpoints(path: str) -> None:
    offsets, wanted = [0, 0, 33, 100, 170], [[], [33], [1, 60], []]
    case = SsdCase(170, groups=2, per_group=2, key=16, value=24, num_sequences=4)
    got, truth = (case.run(p, cu_seqlens=offsets, checkpoints=wanted) for p in (path, "reference"))
    assert got.checkpoints.shape == (3, 4, 24, 16)
    assert_same(got, truth, TOLERANCE[FP32])
    assert case.initial is not None
    assert torch.equal(got.final_state[0].cpu(), case.initial[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("without", ["D", "initial"])
def test_what_is_optional_may_be_left_out(path: str, without: str) -> None:
    case = SsdCase(70, key=16)
    setattr(case, without, None)
    assert_same(case.run(path), case.run("reference"), TOLERANCE[FP32])


@pytest.mark.parametrize("path", ["reference", *PATHS])
def test_it_is_decay_attention_with_a_transposed_state(path: str) -> None:
    case = SsdCase(70, groups=1, per_group=2, key=16, value=24)
    got = case.run(path)
    assert case.initial is not None
    assert case.D is not None
    same = decay_attention(
        case.C.to(DEVICE),
        case.B.to(DEVICE),
        (case.x * case.dt[..., None]).to(DEVICE),
        (case.dt * case.A).to(DEVICE),
        scale=1.0,
        initial_state=case.initial.mT.to(DEVICE),
        path=path,
    )
    skipped = (case.x * case.D[:, None]).to(DEVICE)
    assert relative_error(got.output, same.output + skipped) < 5e-6
    assert relative_error(got.final_state, same.final_state.mT) < 5e-6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rate", [-0.1, -30.0, -500.0])
def test_any_strength_of_decay(path: str, dtype: torch.dtype, rate: float) -> None:
    case = SsdCase(130, key=16, value=16, dtype=dtype)
    case.A = torch.full_like(case.A, rate)
    case.dt[::7] = 0.0  # neither decays nor adds
    assert_same(case.run(path), case.run("reference"), TOLERANCE[dtype])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("at", [1, 16, 65])
def test_a_run_in_pieces_equals_the_whole(path: str, at: int) -> None:
    case = SsdCase(100, key=16, value=16)
    whole = case.run(path)
    state, outputs = case.initial, []
    tokens = {name: getattr(case, name) for name in ("x", "dt", "B", "C")}
    for piece in (slice(0, at), slice(at, 100)):
        for name, part in tokens.items():
            setattr(case, name, part[piece])
        case.initial = state
        got = case.run(path)
        outputs.append(got.output)
        state = got.final_state.cpu()
    assert relative_error(torch.cat(outputs), whole.output) < TOLERANCE[FP32]
    assert state is not None
    assert relative_error(state.to(DEVICE), whole.final_state) < TOLERANCE[FP32]


@pytest.mark.parametrize("path", PATHS)
def test_it_equals_the_torch_code_of_transformers(path: str) -> None:
    case = SsdCase(150, groups=2, per_group=2, key=32, value=16)
    got = case.run(path)
    theirs = modeling_nemotron_h.mamba2_chunk_scan
    output, state = theirs(
        case.x[None],
        case.dt[None],
        case.A,
        case.B[None],
        case.C[None],
        chunk_size=64,
        D=case.D,
        initial_states=case.initial,
        return_final_states=True,
    )
    assert relative_error(got.output.cpu(), output[0]) < TOLERANCE[FP32]
    assert relative_error(got.final_state.cpu(), state) < TOLERANCE[FP32]


GOOD = {
    "x": torch.zeros(5, 4, 8),
    "dt": torch.zeros(5, 4),
    "A": torch.zeros(4),
    "B": torch.zeros(5, 2, 16),
    "C": torch.zeros(5, 2, 16),
    "D": torch.zeros(4),
    "initial_state": torch.zeros(1, 4, 8, 16),
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(5, 4), "x has shape"),
        ("x", torch.zeros(5, 3, 8), "x has 3 heads and B 2"),
        ("x", torch.zeros(5, 4, 8).double(), "x has dtype float64"),
        ("dt", torch.zeros(5, 3), "dt has shape"),
        ("dt", torch.zeros(4, 5).T[:, :, None].expand(5, 4, 2), "dt has shape"),
        ("A", torch.zeros(5, 4), "A has shape"),
        ("B", torch.zeros(5, 2, 16).half(), "B has dtype float16"),
        ("B", torch.zeros(4, 2, 16), "B has shape"),
        ("C", torch.zeros(5, 2, 8), "C has shape"),
        ("D", torch.zeros(4, 8), "D has shape"),
        ("initial_state", torch.zeros(1, 4, 16, 8), "initial_state has shape"),
        ("cu_seqlens", [0, 4], "cu_seqlens ends with 4"),
        ("checkpoints", [[6]], "checkpoints of sequence 0"),
        ("path", "fast", "path is 'fast'"),
    ],
)
def test_the_door_names_what_is_wrong(name: str, value: object, message: str) -> None:
    ssd(**GOOD, path="torch")
    with pytest.raises(ConfigError, match=message):
        ssd(**{"path": "torch", **GOOD, name: value})
