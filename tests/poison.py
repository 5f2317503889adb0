"""Memory around and under what kernels touch is poisoned, so that a stray access shows."""

from __future__ import annotations

import torch

MARGIN = 256
"""Elements before and after each tensor."""


class PoisonedMemory:
    """Places tensors inside larger buffers; `check` sees whether a margin was written.

    The margins of floating-point tensors alternate NaN and infinity; of others, the largest value.
    """

    def __init__(self) -> None:
        self._placed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def place(self, tensor: torch.Tensor, *, row_padding: int = 0) -> torch.Tensor:
        """A copy inside poison. ``row_padding`` adds that many poisoned elements after each row of
        the last dimension, so that rows are not adjacent."""
        shape = (*tensor.shape[:-1], tensor.shape[-1] + row_padding)
        size = torch.Size(shape).numel()
        buffer = torch.empty(size + 2 * MARGIN, dtype=tensor.dtype, device=tensor.device)
        self._poison(buffer)
        inside = buffer[MARGIN : MARGIN + size].view(shape)[..., : tensor.shape[-1]]
        inside.copy_(tensor)
        self._placed.append((buffer, self._margins(buffer).clone()))
        return inside

    def check(self) -> None:
        """Asserts that every margin is as it was."""
        for buffer, before in self._placed:
            now = self._margins(buffer)
            assert torch.equal(now.view(torch.uint8), before.view(torch.uint8)), (
                f"a kernel wrote outside of a {buffer.dtype} tensor"
            )

    @staticmethod
    def _poison(buffer: torch.Tensor) -> None:
        if buffer.dtype.is_floating_point:
            buffer.fill_(float("nan"))
            if buffer.dtype != torch.float8_e4m3fn:
                buffer[::2] = float("inf")
        else:
            buffer.fill_(torch.iinfo(buffer.dtype).max)

    @staticmethod
    def _margins(buffer: torch.Tensor) -> torch.Tensor:
        return torch.cat((buffer[:MARGIN], buffer[-MARGIN:]))
