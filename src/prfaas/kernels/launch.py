"""One launch of a Triton kernel as a value: tests compile it for processors that are not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from prfaas.errors import ConfigError

MAX_GRID = (2**31 - 1, 65_535, 65_535)
"""Limits of the three grid dimensions of CUDA."""


@attrs.frozen(kw_only=True, eq=False)
class Launch:
    """A kernel with its grid, arguments and options.

    Attributes:
        kernel: the ``triton.jit`` function.
        grid: programs per dimension. What grows with tokens or requests belongs in the first.
        arguments: run-time arguments by name: tensors, whole numbers, numbers, or None. What
            changes from call to call is here; the kernel lists its whole numbers in
            ``do_not_specialize``, so that no value causes another compilation.
        constants: compile-time arguments by name: sizes that belong to a model.
        num_warps, num_stages: options of the compiler.
    """

    kernel: Any
    grid: tuple[int, ...] = attrs.field()
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    @grid.validator
    def _check_grid(self, _: object, value: tuple[int, ...]) -> None:
        for axis, (size, limit) in enumerate(zip(value, MAX_GRID, strict=False)):
            if size > limit:
                raise ConfigError(
                    f"{getattr(self.kernel, '__name__', self.kernel)}: {size} programs along "
                    f"axis {axis}, at most {limit} fit; pass fewer sequences or heads per call"
                )

    def run(self) -> None:
        """Runs it on the current stream of its tensors' device; an empty grid is no launch."""
        if 0 in self.grid:
            return
        tensors = (value for value in self.arguments.values() if isinstance(value, torch.Tensor))
        with torch.cuda.device_of(next(tensors)):  # no effect for tensors of the CPU
            self.kernel[self.grid](
                **self.arguments,
                **self.constants,
                num_warps=self.num_warps,
                num_stages=self.num_stages,
            )
