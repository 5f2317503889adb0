"""Decays within chunks, exact for any gate.

Between two tokens of a chunk the decay is e^{G_i - G_j}, G being running sums. Where one gate of a
chunk is strong, G is large from there on, and the difference of two such sums in float32 has lost
the digits of the weak gates. So sums are kept as ``coarse + fine``: the coarse part is a multiple
of 1/1024 that float32 holds exactly, so its differences are exact; the fine part is at most 1/2048,
so its exponential can be applied to rows and columns apart without overflow.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from prfaas.kernels.decay.problem import DecayProblem

SMALLEST = -80.0
"""Decays below e^-80 count as 0: nothing beside a weight of about 1, and products with them would
be subnormal numbers, on which processors are up to ten times slower."""
_RESET = SMALLEST - 1.0
"""Gates are raised to this, so that sums stay small and a gate may be minus infinity."""
_GRAIN = 1024.0


@attrs.frozen(kw_only=True, eq=False)
class BlockGates:
    """Factors of one block of chunks, float32.

    The weight of token j for token i is ``of_row_i * between_ij * of_column_j``.

    Attributes:
        between: [chunks or 1, Hv, C, C], 0 above the diagonal.
        of_row, of_column: [chunks or 1, C, Hv]; None for a column of ones.
        to_row: [chunks or 1, C, Hv], e^{G_i}, from before the chunk.
        to_end: [chunks, C, Hv], e^{G_L - G_j} w_j.
        whole: [chunks, Hv], e^{G_L}.
    """

    between: torch.Tensor
    of_row: torch.Tensor
    of_column: torch.Tensor | None
    to_row: torch.Tensor
    to_end: torch.Tensor
    whole: torch.Tensor


def _decay(exponents: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.threshold(exponents, SMALLEST, -torch.inf).exp_()


class ConstantGates:
    """Of gates [Hv]: nearly all is the same for every chunk."""

    chunk_size = 64

    def __init__(self, problem: DecayProblem) -> None:
        device = problem.v.device
        gate = problem.gate.double().clamp_min(_RESET)
        tokens = torch.arange(self.chunk_size, dtype=torch.float64, device=device)
        apart = tokens[:, None] - tokens
        between = _decay(gate[:, None, None] * apart.clamp_min(0))
        self._gate, self._tokens = gate, tokens[:, None]
        self._between = between.masked_fill_(apart < 0, 0.0).float()[None]
        self._to_row = _decay(gate * (self._tokens + 1)).float()[None]
        self._ones = torch.ones_like(self._to_row)

    def of_block(
        self,
        read: Callable[[torch.Tensor], torch.Tensor],
        lengths: tuple[int, ...],
        scratch: torch.Tensor,
    ) -> BlockGates:
        """Of chunks with these valid lengths."""
        sizes = torch.tensor(lengths, dtype=torch.float64, device=self._gate.device)
        left = (sizes[:, None, None] - 1 - self._tokens).clamp_min(0)
        return BlockGates(
            between=self._between,
            of_row=self._ones,
            of_column=None,
            to_row=self._to_row,
            to_end=_decay(self._gate * left).float(),
            whole=_decay(self._gate * sizes[:, None]).float(),
        )


class TokenGates:
    """Of gates [T, Hv]."""

    chunk_size = 32  # the decays between tokens are made per chunk: fewer of them

    def __init__(self, problem: DecayProblem) -> None:
        self._gate, self._rate = problem.gate, problem.rate

    def of_block(
        self,
        read: Callable[[torch.Tensor], torch.Tensor],
        lengths: tuple[int, ...],
        scratch: torch.Tensor,
    ) -> BlockGates:
        """Of the chunks that ``read`` cuts; padding after a chunk has gate 0.

        ``scratch`` [chunks, Hv, C, C] receives `BlockGates.between`.
        """
        gate = read(self._gate).double()
        weight = None if self._rate is None else gate
        if self._rate is not None:
            gate = gate * self._rate.double()
        sums = gate.clamp_min(_RESET).cumsum(1)
        coarse = (sums * _GRAIN).round_().div_(_GRAIN)
        fine, total = sums - coarse, sums[:, -1:]

        exact = coarse.transpose(1, 2).float().contiguous()
        torch.sub(exact[..., :, None], exact[..., None, :], out=scratch)
        above = torch.ones(scratch.shape[-2:], dtype=torch.bool, device=scratch.device).triu_(1)
        scratch.masked_fill_(above, -torch.inf)
        torch.nn.functional.threshold_(scratch, SMALLEST, -torch.inf).exp_()

        of_column, to_end = (-fine).exp_(), _decay(total - sums)
        if weight is not None:
            of_column, to_end = of_column.mul_(weight), to_end.mul_(weight)
        return BlockGates(
            between=scratch,
            of_row=fine.exp_().float(),
            of_column=of_column.float(),
            to_row=_decay(sums).float(),
            to_end=to_end.float(),
            whole=_decay(total[:, 0]).float(),
        )
