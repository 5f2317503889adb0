"""The one form that decay attention and Mamba2's SSD share: what every path of both computes."""

from __future__ import annotations

import attrs
import torch

from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import ChunkTable, Sequences


@attrs.frozen(kw_only=True, eq=False)
class DecayProblem:
    """A linear recurrence with one decay per value head, over a packed batch.

    Per value head, with row vectors q, k, v and state S [K, V]::

        S_t = e^{g_t} S_{t-1} + w_t k_t v_t^T        o_t = scale * q_t S_t + skip v_t

    where g and w come from ``gate`` in one of three ways:

    - a constant per head: ``gate`` is [Hv], g_t = gate, w = 1;
    - per token: ``gate`` is [T, Hv], g_t = gate_t, w = 1;
    - per token with ``rate`` [Hv] (Mamba2, ``gate`` is dt): g_t = rate * gate_t, w_t = gate_t.

    Attributes:
        q, k: [T, Hk, K]; value head h reads head ``h // (Hv // Hk)``.
        v: [T, Hv, V].
        gate, rate: as above.
        skip: [Hv] or None.
        scale: factor of q.
        initial: [num_sequences, Hv, K, V], any strides, or None for zeros.
        is_value_first: states are kept in memory as [.., V, K].
        sequences, checkpoints: how the batch is cut.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    rate: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    scale: float
    initial: torch.Tensor | None
    is_value_first: bool = False
    sequences: Sequences
    checkpoints: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return int(self.v.shape[0])

    @property
    def num_heads(self) -> int:
        """Value heads."""
        return int(self.v.shape[1])

    @property
    def num_groups(self) -> int:
        """Query and key heads."""
        return int(self.k.shape[1])

    @property
    def key_dim(self) -> int:
        return int(self.k.shape[2])

    @property
    def value_dim(self) -> int:
        return int(self.v.shape[2])

    @property
    def num_checkpoints(self) -> int:
        return sum(len(positions) for positions in self.checkpoints)

    def chunks(self, chunk_size: int) -> ChunkTable:
        return self.sequences.chunks(chunk_size, self.v.device, self.checkpoints)

    def new_result(self, dtype: torch.dtype, state_dtype: torch.dtype) -> PrefillResult:
        """Uninitialised outputs, with states as [.., Hv, K, V] whatever their order in memory."""
        device = self.v.device
        dims = (self.key_dim, self.value_dim)

        def states(count: int) -> torch.Tensor:
            shape = (count, self.num_heads, *(dims[::-1] if self.is_value_first else dims))
            made = torch.empty(shape, dtype=state_dtype, device=device)
            return made.mT if self.is_value_first else made

        return PrefillResult(
            output=torch.empty(self.v.shape, dtype=dtype, device=device),
            final_state=states(self.sequences.num_sequences),
            checkpoints=states(self.num_checkpoints),
        )
