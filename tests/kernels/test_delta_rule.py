"""Prefill of the delta rule on every path of this process: values, pieces, doors."""

from __future__ import annotations

import attrs
import pytest
import torch

import delta_cases
from delta_cases import KINDS
from kernel_paths import DEVICE, PATHS, TOLERANCE, relative_error
from poison import PoisonedMemory
from prfaas.errors import ConfigError
from prfaas.kernels import dispatch
from prfaas.kernels.delta import delta_rule

pytestmark = pytest.mark.parametrize("path", PATHS)
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@kinds
@pytest.mark.parametrize(
    ("num_tokens", "heads", "dims", "dtype"),
    [
        (1, (2, 4), (60, 16), torch.float32),
        (63, (1, 1), (16, 100), torch.bfloat16),
        (65, (1, 2), (100, 60), torch.float32),
        (130, (1, 1), (60, 100), torch.bfloat16),
        (130, (1, 1), (64, 32), torch.float32),
        (250, (1, 1), (16, 16), torch.float32),
        (40, (1, 1), (128, 128), torch.bfloat16),
        (7, (1, 3), (1, 1), torch.float32),
    ],
)
def test_h45_any_head_dimension_and_length_inside_poisoned_memory(
    path: str,
    kind: str,
    num_tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    case = delta_cases.make(
        num_tokens, kind=kind, heads=heads, dims=dims, dtype=dtype, has_state=True
    )
    memory = PoisonedMemory()
    case.poisoned(memory).assert_true(path)
    memory.check()


@kinds
def test_a_ragged_pack_with_checkpoints(path: str, kind: str) -> None:
    lengths = (0, 5, 64, 0, 70, 33, 1)
    case = delta_cases.make(lengths, kind=kind, dims=(16, 16), has_state=True)
    wanted = [[], [5], [1, 63], [], [64], [], [1]]
    got = case.assert_true(path, checkpoints=wanted)
    assert torch.equal(got.final_state[3], case.initial_state[3])
    assert torch.equal(got.checkpoints[0], got.final_state[1])


@kinds
@pytest.mark.parametrize("lengths", [(0,), (0, 0), ()], ids=str)
def test_nothing_to_compute(path: str, kind: str, lengths: tuple[int, ...]) -> None:
    case = delta_cases.make(max(lengths, default=0), kind=kind)
    state = torch.randn(len(lengths), 2, 16, 32, device=DEVICE)
    case = attrs.evolve(case, initial_state=state)
    got = case.run(path, cu_seqlens=[0, *lengths])
    assert got.output.shape == (0, 2, 32)
    assert torch.equal(got.final_state, state)
    assert not case.run(path, cu_seqlens=[0, *lengths], initial_state=None).final_state.any()


@kinds
@dtypes
@pytest.mark.parametrize("gate", [-0.01, -1.0, -2.5, -3.0, -5.0, -20.0, -100.0])
def test_h43_strong_decay(path: str, kind: str, dtype: torch.dtype, gate: float) -> None:
    num_tokens = 256 if path == "torch" else 128  # the interpreter is slow, and its chunks are 64
    delta_cases.make(
        num_tokens, kind=kind, gate=gate, dtype=dtype, heads=(1, 1), dims=(16, 16), has_state=True
    ).assert_true(path)


@kinds
def test_a_gate_that_erases_does_not_blur_the_gates_around_it(path: str, kind: str) -> None:
    case = delta_cases.make(100, kind=kind, gate=-0.01, heads=(1, 1), dims=(16, 16))
    case.g[3::17] = -1000.0
    if kind == "per_channel":
        case.g[:, :, ::3] = -30.0
    case.assert_true(path)


@kinds
@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("cosine", [0.95, 1.0], ids=("alike", "repeated"))
def test_keys_that_are_alike(path: str, kind: str, beta: float, cosine: float) -> None:
    case = delta_cases.make(130, kind=kind, gate=-0.001, beta=beta, heads=(1, 1), dims=(32, 16))
    common = torch.randn(32, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    share = (1 / cosine - 1) ** 0.5
    attrs.evolve(case, k=common + share * case.k).assert_true(path)


@kinds
def test_h46_whole_equals_in_pieces(path: str, kind: str) -> None:
    case = delta_cases.make(70, kind=kind, heads=(1, 1), dims=(16, 16), has_state=True)
    whole = case.run(path)
    for k in (1, 15, 16, 17, 63, 64, 65):
        first = case.part(0, k, case.initial_state).run(path)
        second = case.part(k, 70, first.final_state).run(path)
        pieces = torch.cat((first.output, second.output))
        assert relative_error(pieces, whole.output) <= 2e-6
        assert relative_error(second.final_state, whole.final_state) <= 2e-6


@kinds
def test_a_checkpoint_is_the_state_of_a_run_that_stops_there(path: str, kind: str) -> None:
    case = delta_cases.make(70, kind=kind, heads=(1, 1), dims=(16, 16), has_state=True)
    saved = case.run(path, checkpoints=[[1, 17, 64]])
    for row, stop in enumerate((1, 17, 64)):
        stopped = case.part(0, stop, case.initial_state).run(path)
        assert relative_error(saved.checkpoints[row], stopped.final_state[0]) <= 1e-6
    resumed = case.part(17, 70, saved.checkpoints[1:2]).run(path, checkpoints=[[47]])
    assert relative_error(resumed.output, saved.output[17:]) <= 2e-6
    assert relative_error(resumed.final_state, saved.final_state) <= 2e-6


@kinds
def test_h46_gate_zero_is_the_plain_delta_rule(path: str, kind: str) -> None:
    case = delta_cases.make(70, kind=kind, gate=0.0, heads=(1, 1), dims=(16, 16))
    state = torch.zeros(16, 16, dtype=torch.float64, device=DEVICE)
    q, k = (x[:, 0].double() / (x[:, 0].double().square().sum(1, True) + 1e-6).sqrt()
            for x in (case.q, case.k))  # fmt: skip
    for t in range(70):
        write = case.beta[t, 0].double() * (case.v[t, 0].double() - k[t] @ state)
        state += torch.outer(k[t], write)
    got = case.run(path)
    assert relative_error(got.final_state[0, 0], state) <= 5e-6
    assert relative_error(got.output[-1, 0], q[-1] @ state / 4) <= 5e-6


@kinds
def test_one_sequence_of_nan_leaves_the_others_alone(path: str, kind: str) -> None:
    case = delta_cases.make((20, 40, 33), kind=kind, heads=(1, 1), dims=(16, 16), has_state=True)
    healthy = case.run(path)
    spoiled = case.map(lambda x: x.clone())
    for x in (spoiled.q, spoiled.k, spoiled.v, spoiled.g, spoiled.beta):
        x[20:60] = float("nan")
    got = spoiled.run(path)
    for part in (slice(0, 20), slice(60, 93)):
        assert torch.equal(got.output[part], healthy.output[part])
    assert torch.equal(got.final_state[::2], healthy.final_state[::2])
    assert got.output[20:60].isnan().all()


@kinds
def test_views_of_one_projection(path: str, kind: str) -> None:
    case = delta_cases.make(40, kind=kind, heads=(2, 2), dims=(16, 32), dtype=torch.bfloat16)
    fused = torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], dim=1)
    q, k, v = fused.split((32, 32, 64), dim=1)
    views = attrs.evolve(case, q=q.view(40, 2, 16), k=k.view(40, 2, 16), v=v.view(40, 2, 32))
    assert torch.equal(views.run(path).output, case.run(path).output)


@kinds
@dtypes
def test_scale_and_keys_as_they_are(path: str, kind: str, dtype: torch.dtype) -> None:
    case = delta_cases.make(40, kind=kind, heads=(1, 1), dtype=dtype)
    case = attrs.evolve(case, k=torch.nn.functional.normalize(case.k.float(), dim=-1).to(dtype))
    got = case.assert_true(path, normalize_qk=False)
    half = case.run(path, normalize_qk=False, scale=0.5 * 16**-0.5)
    assert relative_error(2 * half.output.float(), got.output) <= TOLERANCE[dtype]


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrow_initial_state_is_widened_and_kept(
    path: str, kind: str, dtype: torch.dtype
) -> None:
    case = delta_cases.make(33, kind=kind, heads=(1, 1), has_state=True)
    narrow = attrs.evolve(case, initial_state=case.initial_state.to(dtype))
    before = narrow.initial_state.clone()
    narrow.assert_true(path)
    assert torch.equal(narrow.initial_state, before)


@kinds
@pytest.mark.parametrize("num_tokens", [1, 32, 64])
def test_arguments_stay_as_they_are(path: str, kind: str, num_tokens: int) -> None:
    case = delta_cases.make(num_tokens, kind=kind, heads=(1, 1), has_state=True)
    before = case.map(lambda x: x.clone())
    case.run(path)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert torch.equal(getattr(case, name), getattr(before, name)), name


@kinds
def test_narrow_gates_and_half_precision(path: str, kind: str) -> None:
    case = delta_cases.make(40, kind=kind, heads=(1, 1), dtype=torch.float16)
    attrs.evolve(case, g=case.g.to(torch.bfloat16)).assert_true(path)


@kinds
def test_any_number_of_segments_gives_the_same(path: str, kind: str) -> None:
    case = delta_cases.make(130, kind=kind, heads=(1, 1), dims=(16, 16), has_state=True)
    for count in (1, 3):
        case.assert_true(path, num_segments=count)


def test_large_heads_take_the_torch_path(path: str) -> None:
    case = delta_cases.make(3, dims=(16, 257))
    case.assert_true(None)
    with pytest.raises(ConfigError, match="path"):
        case.run("triton")
    if path == "triton":
        reason = "heads of 16 and 257, at most 256 fit"
        assert dispatch.report().fallbacks["delta_rule", reason] >= 1


WRONG = {
    "q": lambda case: {"q": case.q[0]},
    "k has shape": lambda case: {"k": case.k[:, :, :8]},
    "k has dtype": lambda case: {"k": case.k.double()},
    "v has shape": lambda case: {"v": case.v[:5]},
    "v has dtype": lambda case: {"v": case.v.half()},
    "v has 3 heads": lambda case: {"v": case.v[:, :3]},
    "v has stride": lambda case: {"v": case.v.mT.contiguous().mT},
    "g has shape": lambda case: {"g": case.g[:, :2]},
    "g is a list": lambda case: {"g": [0.0]},
    "beta has shape": lambda case: {"beta": case.beta[:, :2]},
    "scale": lambda case: {"scale": float("nan")},
    "initial_state has shape": lambda case: {"initial_state": case.v[None]},
    "cu_seqlens": lambda case: {"cu_seqlens": [0, 7]},
    "checkpoints": lambda case: {"checkpoints": [[7]]},
    "num_segments": lambda case: {"num_segments": 0},
    "path": lambda case: {"path": "fast"},
}


@pytest.mark.parametrize("named", WRONG)
def test_doors(path: str, named: str) -> None:
    case = delta_cases.make(6, heads=(2, 4))
    arguments = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")}
    with pytest.raises(ConfigError, match=named):
        delta_rule(**{**arguments, "path": path, **WRONG[named](case)})


@pytest.mark.parametrize("size", [1e-9, 1e-12])
def test_small_inputs_beside_strong_gates(path: str, size: float) -> None:
    """What strong gates have made negligible is dropped; what was small from the start is not."""
    torch.manual_seed(3)
    q, k, v = torch.randn(64, 1, 16), torch.randn(64, 1, 16), torch.randn(64, 2, 16)
    g = torch.where(torch.rand(64, 2, 16) < 0.1, -100.0, -0.05)
    inputs = [x.to(DEVICE) for x in (q * size, k * size, v, g, torch.rand(64, 2))]
    truth = delta_rule(*inputs, scale=1.0, path="reference").output
    assert relative_error(delta_rule(*inputs, scale=1.0, path=path).output, truth) < 5e-6
    inputs[:2] = [x.to(DEVICE) for x in (q, k)]
    truth = delta_rule(*inputs, scale=1e-20, normalize_qk=True, path="reference").output
    got = delta_rule(*inputs, scale=1e-20, normalize_qk=True, path=path).output
    assert relative_error(got, truth) < 5e-6
