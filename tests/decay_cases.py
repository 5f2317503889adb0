"""Inputs for decay attention and SSD, with poison around every tensor."""

from __future__ import annotations

from typing import Any

import torch

from kernel_paths import DEVICE
from poison import PoisonedMemory
from prfaas.kernels.decay import decay_attention, ssd
from prfaas.kernels.results import PrefillResult


class DecayCase:
    """Random arguments of `decay_attention`; attributes may be replaced before `run`."""

    def __init__(
        self,
        num_tokens: int,
        *,
        groups: int = 1,
        per_group: int = 2,
        key: int = 32,
        value: int = 32,
        dtype: torch.dtype = torch.float32,
        num_sequences: int = 1,
        is_constant: bool = False,
        seed: int = 0,
    ) -> None:
        heads = groups * per_group
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        self.memory = PoisonedMemory()
        self.q = normal(num_tokens, groups, key).to(dtype)
        self.k = normal(num_tokens, groups, key).to(dtype)
        self.v = normal(num_tokens, heads, value).to(dtype)
        self.g = -torch.rand(heads if is_constant else (num_tokens, heads), generator=random)
        self.initial: torch.Tensor | None = normal(num_sequences, heads, key, value)

    def run(self, path: str | None = None, **options: Any) -> PrefillResult:
        """On poisoned copies; the reference path in particular sees the same rounded numbers."""
        placed = [_place(self.memory, part) for part in (self.q, self.k, self.v, self.g)]
        initial = None if self.initial is None else _place(self.memory, self.initial)
        made = decay_attention(*placed, initial_state=initial, path=path, **options)
        self.memory.check()
        return made

    def piece(self, begin: int, end: int, initial: torch.Tensor) -> DecayCase:
        """The tokens of one sequence from ``begin`` to ``end``, after ``initial``."""
        made = object.__new__(DecayCase)
        made.memory, made.initial = self.memory, initial
        made.q, made.k, made.v = (part[begin:end] for part in (self.q, self.k, self.v))
        made.g = self.g[begin:end] if self.g.ndim == 2 else self.g
        return made


class SsdCase:
    """Random arguments of `ssd`, in Mamba2's usual ranges."""

    def __init__(
        self,
        num_tokens: int,
        *,
        groups: int = 1,
        per_group: int = 2,
        key: int = 32,
        value: int = 24,
        dtype: torch.dtype = torch.float32,
        num_sequences: int = 1,
        seed: int = 0,
    ) -> None:
        heads = groups * per_group
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        self.memory = PoisonedMemory()
        self.x = normal(num_tokens, heads, value).to(dtype)
        self.dt = torch.rand(num_tokens, heads, generator=random) * 0.5
        self.A = -1 - 8 * torch.rand(heads, generator=random)
        self.B = normal(num_tokens, groups, key).to(dtype)
        self.C = normal(num_tokens, groups, key).to(dtype)
        self.D: torch.Tensor | None = normal(heads)
        self.initial: torch.Tensor | None = normal(num_sequences, heads, value, key)

    def run(self, path: str | None = None, **options: Any) -> PrefillResult:
        names = ("x", "dt", "A", "B", "C", "D", "initial")
        placed = {
            name: None if part is None else _place(self.memory, part)
            for name in names
            if (part := getattr(self, name)) is not None or name in ("D", "initial")
        }
        placed["initial_state"] = placed.pop("initial")
        made = ssd(**placed, path=path, **options)
        self.memory.check()
        return made


def _place(memory: PoisonedMemory, part: torch.Tensor) -> torch.Tensor:
    """On the device, rows apart where there is a choice."""
    return memory.place(part.to(DEVICE), row_padding=0 if part.ndim == 1 else 8)
