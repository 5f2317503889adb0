"""Random inputs that look like what layers compute: unit keys, decays below 1, gates in 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from prfaas.kernels import PageTable


class Inputs:
    """The same numbers for the same calls: two of these are two equal copies.

    Args:
        device: where tensors are made.
        dtype: of activations.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(20)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Of variance 1."""
        made = torch.randn(
            shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype
        )
        return made

    def unit(self, *shape: int) -> torch.Tensor:
        """Vectors of length 1."""
        return F.normalize(self.normal(*shape, dtype=torch.float32), dim=-1).to(self.dtype)

    def log_decay(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Around -0.08: states live for a dozen tokens."""
        return F.logsigmoid(self.normal(*shape, dtype=torch.float32) + 3).to(dtype)

    def share(self, *shape: int) -> torch.Tensor:
        """In 0 to 1."""
        return self.normal(*shape, dtype=torch.float32).sigmoid().to(self.dtype)

    def pages(self, kv_lens: Sequence[int], page_size: int) -> PageTable:
        """Pages of the requests, shuffled over a cache that they fill."""
        counts = [-(-length // page_size) for length in kv_lens]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(21)).tolist()
        rows = [[order.pop() for _ in range(count)] for count in counts]
        return PageTable(
            rows,
            kv_lens,
            page_size=page_size,
            num_pages=sum(counts),
            device=self.device,
        )


def contiguous(cache: torch.Tensor, table: PageTable, kv_len: int) -> torch.Tensor:
    """What the pages hold as [requests, heads, kv_len, dim], for attention without pages."""
    rows = cache[table.pages.long()].flatten(1, 2)[:, :kv_len]
    return rows.transpose(1, 2).contiguous()
