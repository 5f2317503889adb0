"""Laws of the batched torch path over random packs, and of how it orders its chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import delta_cases
from delta_cases import KINDS
from kernel_paths import relative_error
from prfaas.kernels.delta import batched
from prfaas.kernels.delta.schedule import plan
from prfaas.kernels.sequences import Sequences

packs = st.lists(st.integers(0, 100), min_size=1, max_size=5)


@st.composite
def cut_packs(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Lengths, and checkpoints in them."""
    lengths = draw(packs)
    wanted = [
        sorted(draw(st.sets(st.integers(1, length), max_size=3))) if length else []
        for length in lengths
    ]
    return lengths, wanted


@given(
    pack=cut_packs(),
    kind=st.sampled_from(KINDS),
    groups=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    gate=st.sampled_from([None, 0.0, -0.3, -30.0]),
    beta=st.sampled_from([1.0, 2.0]),
    group_bytes=st.sampled_from([1, 100_000, batched.GROUP_BYTES]),
    seed=st.integers(0, 3),
)
def test_it_equals_the_loop(
    pack: tuple[list[int], list[list[int]]],
    kind: str,
    groups: int,
    dims: tuple[int, int],
    gate: float | None,
    beta: float,
    group_bytes: int,
    seed: int,
) -> None:
    lengths, wanted = pack
    case = delta_cases.make(
        lengths,
        kind=kind,
        heads=(2, 2 * groups),
        dims=dims,
        gate=gate,
        beta=beta,
        has_state=True,
        seed=seed,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "GROUP_BYTES", group_bytes)
        case.assert_true("torch", checkpoints=wanted)


@given(lengths=packs, kind=st.sampled_from(KINDS), order=st.randoms(use_true_random=False))
def test_company_and_order_do_not_matter(lengths: list[int], kind: str, order: object) -> None:
    case = delta_cases.make(lengths, kind=kind, dims=(8, 8), has_state=True)
    together = case.run("torch")
    ends = Sequences.of_lengths(lengths).offsets[1:]
    for index, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        alone = case.part(end - length, end, case.initial_state[index : index + 1]).run("torch")
        assert relative_error(together.output[end - length : end], alone.output) <= 1e-6
        assert relative_error(together.final_state[index], alone.final_state[0]) <= 1e-6


@given(
    length=st.integers(2, 150),
    share=st.floats(0, 1),
    kind=st.sampled_from(KINDS),
    gate=st.sampled_from([None, 0.0, -5.0]),
)
def test_resuming_equals_running_through(
    length: int, share: float, kind: str, gate: float | None
) -> None:
    cut = 1 + int(share * (length - 2))
    case = delta_cases.make(length, kind=kind, dims=(12, 8), gate=gate, has_state=True)
    whole = case.run("torch", checkpoints=[[cut]])
    first = case.part(0, cut, case.initial_state).run("torch")
    second = case.part(cut, length, whole.checkpoints).run("torch")
    assert relative_error(first.final_state, whole.checkpoints) <= 1e-6
    assert relative_error(torch.cat((first.output, second.output)), whole.output) <= 1e-6
    assert relative_error(second.final_state, whole.final_state) <= 1e-6


@given(pack=cut_packs(), size=st.sampled_from([1, 4, 32]), most=st.integers(1, 7))
def test_the_plan_has_every_chunk_once_in_order_and_keeps_to_its_limit(
    pack: tuple[list[int], list[list[int]]], size: int, most: int
) -> None:
    lengths, wanted = pack
    table = Sequences.of_lengths(lengths).chunks(size, torch.device("cpu"), wanted)
    host = table.host
    reached = list(host.first_chunks[:-1])
    saves = {}
    for lanes in plan(table, most):
        for group in lanes.groups:
            assert 1 <= group.num_chunks <= most
            at = 0
            for step in group.steps:
                for row, sequence in enumerate(lanes.sequences[: step.width]):
                    chunk = reached[sequence]
                    reached[sequence] += 1
                    assert group.starts[at] == host.starts[chunk]
                    assert group.lengths[at] == host.lengths[chunk]
                    if (row, host.checkpoint_rows[chunk]) in step.saves:
                        saves[host.checkpoint_rows[chunk]] = sequence
                    at += 1
            assert at == group.num_chunks
    assert reached == list(host.first_chunks[1:])
    rows = [i for i, positions in enumerate(wanted) for _ in positions]
    assert saves == dict(enumerate(rows))


def test_a_long_sequence_among_short_ones_is_not_padded_to() -> None:
    table = Sequences.of_lengths([1000, *[3] * 50]).chunks(32, torch.device("cpu"))
    groups = [group for lanes in plan(table, 64) for group in lanes.groups]
    assert sum(group.num_chunks for group in groups) == 32 + 50


@pytest.mark.parametrize("kind", KINDS)
def test_temporaries_do_not_grow_with_the_sequence(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    prepare = batched.prepare

    def counted(keys_queries: torch.Tensor, *rest: torch.Tensor) -> object:
        counts.append(keys_queries.shape[0])
        return prepare(keys_queries, *rest)

    monkeypatch.setattr(batched, "prepare", counted)
    monkeypatch.setattr(batched, "GROUP_BYTES", 1 << 20)
    delta_cases.make(700, kind=kind, dims=(32, 32)).run("torch")
    assert sum(counts) == 2 * 22
    assert max(counts) * 32 * 4 * (4 * 32 + 5 * 32 + 8 * 32) <= 1 << 20


class TestTransformers:
    """Its fallbacks, which are written for clarity, on the same inputs."""

    def arguments(self, kind: str) -> tuple[delta_cases.Case, dict[str, object]]:
        case = delta_cases.make(130, kind=kind, heads=(2, 2), dims=(32, 16), has_state=True)
        rest = {
            "initial_state": case.initial_state,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }
        return case, rest

    def compare(self, case: delta_cases.Case, output: torch.Tensor, state: torch.Tensor) -> None:
        got = case.run("torch")
        assert relative_error(got.output, output[0]) <= 5e-6
        assert relative_error(got.final_state, state) <= 5e-6

    def test_gated_delta_net(self) -> None:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

        case, rest = self.arguments("per_head")
        packed = (x[None] for x in (case.q, case.k, case.v, case.g, case.beta))
        self.compare(case, *theirs.torch_chunk_gated_delta_rule(*packed, **rest))

    def test_kimi_delta_attention(self) -> None:
        from transformers.models.kimi_linear import modeling_kimi_linear as theirs

        case, rest = self.arguments("per_channel")
        packed = (x[None] for x in (case.q, case.k, case.v, case.g, case.beta))
        self.compare(case, *theirs.chunk_kimi_delta_attention(*packed, **rest))
