"""What one forward pass works on: tokens, and where each request's rows and states are."""

from __future__ import annotations

import attrs
import torch

from prfaas.kernels import PageTable, Sequences, Slots


@attrs.frozen(kw_only=True, eq=False)
class PrefillBatch:
    """New tokens of several requests, packed.

    Attributes:
        tokens, positions: int64 [num_tokens].
        sequences: how many of them each request has.
        page_table: pages of all tokens, cached ones included.
        resume: per request, the slot address whose state it starts from; None for zeros.
        working: per request, the slot address that gets its state after the last token.
        checkpoints: per request, the positions among its new tokens whose state is kept.
        checkpoint_slots: the slot address of each of them, request after request.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    sequences: Sequences
    page_table: PageTable
    resume: tuple[int | None, ...]
    working: tuple[int, ...]
    checkpoints: tuple[tuple[int, ...], ...]
    checkpoint_slots: tuple[int, ...]

    def initial(self, view: torch.Tensor) -> torch.Tensor | None:
        """States [num_requests, ...] that the requests start from, of one part of one layer."""
        if all(address is None for address in self.resume):
            return None
        made = view.new_zeros((len(self.resume), *view.shape[1:]))
        for row, address in enumerate(self.resume):
            if address is not None:
                made[row] = view[address]
        return made

    def store(self, view: torch.Tensor, final: torch.Tensor, checkpoints: torch.Tensor) -> None:
        """Keeps the states that a layer's prefill returned."""
        for row, address in enumerate(self.working):
            view[address] = final[row]
        for row, address in enumerate(self.checkpoint_slots):
            view[address] = checkpoints[row]


@attrs.frozen(kw_only=True, eq=False)
class DecodeBatch:
    """One new token of each of several requests.

    Attributes:
        tokens, positions: int64 [num_requests].
        page_table: pages of all tokens, this one included.
        slots: each request's working state, updated in place.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    page_table: PageTable
    slots: Slots

    @property
    def sequences(self) -> Sequences:
        """One token per request."""
        return Sequences.of_lengths([1] * len(self.tokens))
