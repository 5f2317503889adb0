"""The single process that every distributed run is compared with: transformers alone, no prfaas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache


@torch.inference_mode()
def greedy(
    model: object, tokens: Sequence[int], num_new: int, *, segment_tokens: int | None = None
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits [num_new, vocab] they come from.

    ``segment_tokens`` cuts the prefill at its absolute multiples; None runs it in one piece.
    """
    cache = DynamicCache(config=model.config)
    step = segment_tokens or len(tokens)
    position, steps = 0, []
    pending = [tokens[i : i + step] for i in range(0, len(tokens), step)]
    new: list[int] = []
    while len(new) < num_new:
        piece = pending.pop(0) if pending else [new[-1]]
        stop = position + len(piece)
        logits = model(
            input_ids=torch.tensor([piece]),
            position_ids=torch.arange(position, stop)[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[0, -1]
        position = stop
        if not pending:
            new.append(int(logits.argmax()))
            steps.append(logits.float().clone())
    return new, torch.stack(steps)
