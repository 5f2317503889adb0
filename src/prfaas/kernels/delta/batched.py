"""The delta rule in chunks, with batched torch operations: the path for CPUs.

All that can be computed inside of chunks is computed for a group of them at once; the loop over
chunks that remains has five operations, over all heads and over all sequences that still have a
chunk. Nothing is padded to the longest sequence.
"""

from __future__ import annotations

import attrs
import torch

from prfaas.kernels.delta.chunks import Chunks, inverse_norms, prepare
from prfaas.kernels.delta.schedule import Cut, Group, Step, plan
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Sequences

CHUNK_SIZE = 32
"""Tokens of a chunk. Of 16 to 128, the fastest for heads of 16 to 128 (CPU, float32)."""

GROUP_BYTES = 8 << 20
"""About how much memory the temporaries of a group take, unless one chunk of all heads takes more:
they should stay in a processor's cache, and small calls should be one group."""


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    sequences: Sequences,
    checkpoints: tuple[tuple[int, ...], ...],
    normalize_qk: bool,
) -> PrefillResult:
    """`prfaas.kernels.delta_rule` on checked arguments."""
    heads, value_dim = v.shape[1:]
    state_shape = (heads, q.shape[2], value_dim)
    device = q.device
    table = sequences.chunks(CHUNK_SIZE, device, checkpoints)
    result = PrefillResult(
        output=torch.empty(v.shape, dtype=v.dtype, device=device),
        final_state=torch.zeros((sequences.num_sequences, *state_shape), device=device),
        checkpoints=torch.empty((table.num_checkpoints, *state_shape), device=device),
    )
    if initial_state is not None:
        result.final_state.copy_(initial_state)
    row_bytes = 4 * heads * (4 * q.shape[2] + 5 * value_dim + 8 * CHUNK_SIZE)
    most_chunks = max(1, GROUP_BYTES // (row_bytes * CHUNK_SIZE))
    batch = _Batch(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        query_factor=_factor(q, scale, normalize_qk),
        key_factor=_factor(k, 1.0, normalize_qk),
        result=result,
        space=_Space.of(min(most_chunks, table.num_chunks), q, v),
    )
    for lanes in plan(table, most_chunks):
        with lanes.of(result.final_state) as states:
            for group in lanes.groups:
                batch.run(group, states)
    return result


def _factor(x: torch.Tensor, scale: float, is_normalized: bool) -> torch.Tensor:
    """float32 [num_tokens, heads, 1]: what queries or keys are multiplied with."""
    if is_normalized:
        return inverse_norms(x).mul_(scale)
    return torch.full((1, 1, 1), scale, device=x.device).expand(*x.shape[:2], 1)


@attrs.frozen(kw_only=True, eq=False)
class _Space:
    """Memory that all groups use in turn, for N chunks and heads of C rows."""

    keys_queries: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    u: torch.Tensor

    @classmethod
    def of(cls, num_chunks: int, q: torch.Tensor, v: torch.Tensor) -> _Space:
        rows, device = (num_chunks * v.shape[1], CHUNK_SIZE), q.device
        return cls(
            keys_queries=torch.empty((*rows, 2, q.shape[2]), device=device),
            x=torch.empty((*rows, v.shape[2]), device=device),
            y=torch.empty((*rows, 2, v.shape[2]), device=device),
            u=torch.empty((*rows, v.shape[2]), device=device),
        )


@attrs.frozen(kw_only=True, eq=False)
class _Batch:
    """The arguments of one call, and where its results go."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    query_factor: torch.Tensor
    key_factor: torch.Tensor
    result: PrefillResult
    space: _Space

    def run(self, group: Group, states: torch.Tensor) -> None:
        """Adds a group of chunks to the states [width, heads, K, V], and writes its output."""
        cut = group.cut(states.device)
        heads, value_dim = self.v.shape[1:]
        count = cut.count * heads
        rows = (cut.count, heads, cut.size)
        keys_queries, x = self.space.keys_queries[:count], self.space.x[:count]
        y, u = self.space.y[:count], self.space.u[:count]
        self._load(cut, keys_queries)
        x.view(*rows, value_dim).copy_(cut.read(self.v))
        gates, beta = (z.flatten(0, 1) for z in (cut.copy(self.g), cut.copy(self.beta)))
        chunks = prepare(keys_queries, gates, beta)
        self._scan(group.steps, chunks, states, x, y, u)
        torch.bmm(chunks.scores, u, out=x)
        cut.write(
            self.result.output, y.view(*rows, 2, value_dim)[:, :, :, 1], x.view(*rows, value_dim)
        )

    def _load(self, cut: Cut, keys_queries: torch.Tensor) -> None:
        key_heads, key_dim = self.q.shape[1:]
        groups = self.v.shape[1] // key_heads
        into = keys_queries.view(cut.count, key_heads, groups, cut.size, 2, key_dim)
        for index, (x, factor) in enumerate(
            ((self.k, self.key_factor), (self.q, self.query_factor))
        ):
            part = into[:, :, :, :, index]
            read = cut.read(x)[:, :, None].expand_as(part)
            torch.mul(read, cut.read(factor)[:, :, None], out=part)

    def _scan(
        self,
        steps: tuple[Step, ...],
        chunks: Chunks,
        states: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        u: torch.Tensor,
    ) -> None:
        """Chunk after chunk. ``x`` holds values, and ``u`` what is written to the state; ``y`` is
        what the incoming state gives for keys and queries."""
        heads = states.shape[1]
        flat = states.view(-1, *states.shape[2:])
        sizes = [step.width * heads for step in steps]
        columns = (
            x,
            chunks.keys_queries.flatten(1, 2),
            y.flatten(1, 2),
            y[:, :, 0],
            chunks.inverse,
            u,
            chunks.decay,
            chunks.trailing_keys.mT,
        )
        rows = zip(*(column.split(sizes) for column in columns), strict=True)
        for step, (values, kq, out, of_keys, inverse, writes, decay, keys) in zip(
            steps, rows, strict=True
        ):
            state = flat[: values.shape[0]]
            torch.bmm(kq, state, out=out)
            torch.bmm(inverse, values.sub_(of_keys), out=writes)
            state.mul_(decay).baddbmm_(keys, writes)
            for row, to in step.saves:
                self.result.checkpoints[to] = states[row]
