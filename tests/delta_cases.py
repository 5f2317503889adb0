"""Inputs of the delta rule for tests, and how close its results have to be to the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from kernel_paths import DEVICE, TOLERANCE, relative_error
from poison import PoisonedMemory
from prfaas.kernels import PrefillResult
from prfaas.kernels.delta import delta_rule, reference
from prfaas.kernels.sequences import Sequences

KINDS = ("per_head", "per_channel")
"""Gated DeltaNet, and Kimi Delta Attention."""


@attrs.frozen(kw_only=True)
class Case:
    """Arguments of one call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()

    def run(self, path: str, **options: Any) -> PrefillResult:
        if self.lengths:
            options = {"cu_seqlens": Sequences.of_lengths(self.lengths), **options}
        return delta_rule(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            **{"initial_state": self.initial_state, "normalize_qk": True, "path": path, **options},
        )

    def part(self, start: int, stop: int, state: torch.Tensor | None) -> Case:
        """Tokens of one sequence, from a state."""
        tensors = {name: getattr(self, name)[start:stop] for name in ("q", "k", "v", "g", "beta")}
        return Case(**tensors, initial_state=state)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Case:
        """With every tensor replaced."""
        tensors = {
            name: change(value)
            for name, value in attrs.asdict(self).items()
            if isinstance(value, torch.Tensor)
        }
        return attrs.evolve(self, **tensors)

    def poisoned(self, memory: PoisonedMemory, row_padding: int = 3) -> Case:
        """In memory that is poisoned around each tensor, and after each row of a head."""
        return self.map(lambda x: memory.place(x, row_padding=row_padding if x.ndim == 3 else 0))

    def plain_loop_error(self, truth: PrefillResult, **options: Any) -> float:
        """What a loop over tokens in float32 loses."""
        sequences = Sequences.of_lengths(self.lengths or (self.q.shape[0],))
        got = reference.run(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            scale=self.q.shape[-1] ** -0.5,
            initial_state=self.initial_state,
            sequences=sequences,
            checkpoints=sequences.check_checkpoints(options.get("checkpoints")),
            normalize_qk=options.get("normalize_qk", True),
            dtype=torch.float32,
        )
        return worst_error(got, truth)

    def assert_true(self, path: str, **options: Any) -> PrefillResult:
        """Runs it, and compares all results with the truth."""
        truth = self.run("reference", **options)
        got = self.run(path, **options)
        limit = TOLERANCE[self.q.dtype]
        if self.q.dtype is torch.float32:
            limit = max(limit, 4 * self.plain_loop_error(truth, **options))
        assert got.output.dtype == self.v.dtype
        assert got.final_state.dtype == got.checkpoints.dtype == torch.float32
        assert_close(got, truth, limit)
        return got


def make(
    num_tokens: int | Sequence[int],
    *,
    kind: str = "per_head",
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (16, 32),
    dtype: torch.dtype = torch.float32,
    gate: float | None = None,
    beta: float = 1.0,
    has_state: bool = False,
    seed: int = 0,
) -> Case:
    """Random inputs: ``heads`` of keys and values, ``dims`` K and V, tokens of one sequence or the
    lengths of several. Gates are from softly random to -2, or all ``gate``; ``beta`` is at most
    that."""
    random = torch.Generator().manual_seed(seed)
    lengths = () if isinstance(num_tokens, int) else tuple(num_tokens)
    total = num_tokens if isinstance(num_tokens, int) else sum(num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=random)

    gate_shape = (total, heads[1], dims[0]) if kind == "per_channel" else (total, heads[1])
    made = Case(
        q=normal(total, heads[0], dims[0]).to(dtype),
        k=normal(total, heads[0], dims[0]).to(dtype),
        v=normal(total, heads[1], dims[1]).to(dtype),
        g=-2 * uniform(*gate_shape).square() if gate is None else torch.full(gate_shape, gate),
        beta=(beta * uniform(total, heads[1])).to(dtype),
        initial_state=normal(len(lengths) or 1, heads[1], *dims) if has_state else None,
        lengths=lengths,
    )
    return made.map(lambda x: x.to(DEVICE))


def worst_error(got: PrefillResult, truth: PrefillResult) -> float:
    return max(relative_error(getattr(got, name), getattr(truth, name)) for name in RESULTS)


RESULTS = ("output", "final_state", "checkpoints")


def assert_close(got: PrefillResult, truth: PrefillResult, limit: float) -> None:
    for name in RESULTS:
        a, b = getattr(got, name), getattr(truth, name)
        assert a.shape == b.shape
        assert a.isfinite().all(), name
        assert relative_error(a, b) <= limit, name
