"""Pools in poisoned memory, and plain float64 loops, for tests of the decode steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernel_paths import DEVICE
from poison import PoisonedMemory


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator).to(dtype).to(DEVICE)


class Pool:
    """Slots that hold a state and, beside it, another part; all NaN but the states given.

    Attributes:
        states: [num_slots, ...], a view with the other parts in between.
    """

    def __init__(self, num_slots: int, states: torch.Tensor, slots: Sequence[int]) -> None:
        whole = torch.full(
            (num_slots, 2, *states.shape[1:]), torch.nan, dtype=states.dtype, device=DEVICE
        )
        self.memory = PoisonedMemory()
        self.whole = self.memory.place(whole)
        self.states = self.whole[:, 0]
        self.slots = list(slots)
        self.states[self.slots] = states

    @property
    def used(self) -> torch.Tensor:
        """States of the given slots."""
        return self.states[self.slots]

    def check(self) -> None:
        """Asserts that nothing but the given slots' states was written."""
        self.memory.check()
        others = [slot for slot in range(self.whole.shape[0]) if slot not in self.slots]
        assert self.whole[others].isnan().all(), "a slot was written that no request has"
        assert self.whole[:, 1].isnan().all(), "a step wrote between the states"


def delta_rule_truth(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One float64 step of a batch, all heads at once; without beta, attention with decay."""
    group = v.shape[1] // q.shape[1]
    q, k = (x.double().repeat_interleave(group, 1) for x in (q, k))
    gate = g.double().exp()
    state = state.double() * (gate if gate.ndim == 3 else gate[..., None])[..., None]
    update = v.double()
    if beta is not None:
        update = beta.double()[..., None] * (update - torch.einsum("bhkv,bhk->bhv", state, k))
    state = state + torch.einsum("bhk,bhv->bhkv", k, update)
    return torch.einsum("bhkv,bhk->bhv", state, q) * scale, state


def unit(x: torch.Tensor) -> torch.Tensor:
    """Float64 vectors of length 1, as ``normalize_qk`` makes them."""
    wide = x.double()
    return wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
