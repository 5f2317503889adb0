"""The chunked form in large torch operations: any device, fast on CPUs.

Within a chunk of C tokens, with G_i the sum of g up to token i and L the last token::

    P_ij = scale (q_i k_j) e^{G_i - G_j} w_j                         j <= i
    O    = P V + scale e^{G} (Q S)                                    S: state before the chunk
    S   <- e^{G_L} S + K^T (w e^{G_L - G} V)

The scores q_i k_j and the products with S and K are made once per query and key head, for all of
its value heads together. What is elementwise is done for several chunks at a time, as many as keep
the temporaries in cache; matrix products read packed rows where they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import torch

from prfaas.kernels.decay.block_gates import BlockGates, ConstantGates, TokenGates
from prfaas.kernels.decay.problem import DecayProblem
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import ChunkTable

_BLOCK_ELEMENTS = 1 << 17
"""Most elements of the temporary [chunks, heads, C, C], so that a block stays in a CPU's cache;
measured best of 2^17 to 2^20."""


def run_batched(problem: DecayProblem) -> PrefillResult:
    """Output in the dtype of v, states in float32."""
    result = problem.new_result(problem.v.dtype, torch.float32)
    gates = TokenGates(problem) if problem.gate.ndim == 2 else ConstantGates(problem)
    size = gates.chunk_size
    table = problem.chunks(size)
    _fill_states_of_empty_sequences(problem, result, table)
    if not table.num_chunks:
        return result
    most = max(1, _BLOCK_ELEMENTS // (problem.num_heads * size**2))
    workspace = _Workspace.of(problem, min(most, table.num_chunks), size)
    for block in _blocks(table, most):
        _run_block(problem, result, block, gates, workspace)
    return result


def _fill_states_of_empty_sequences(
    problem: DecayProblem, result: PrefillResult, table: ChunkTable
) -> None:
    firsts = table.host.first_chunks
    for index, length in enumerate(problem.sequences.lengths):
        if firsts[index] == firsts[index + 1]:
            assert length == 0
            if problem.initial is None:
                result.final_state[index].zero_()
            else:
                result.final_state[index].copy_(problem.initial[index])


@attrs.frozen(kw_only=True)
class _Block:
    """Some chunks that follow one another.

    Attributes:
        starts, lengths, checkpoint_rows: of each chunk.
        begins, ends: per chunk, the sequence that it is the first, or the last, chunk of; or None.
        is_plain: all chunks are full and adjacent.
    """

    chunk_size: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    checkpoint_rows: tuple[int, ...]
    begins: tuple[int | None, ...]
    ends: tuple[int | None, ...]
    is_plain: bool

    @property
    def num_chunks(self) -> int:
        return len(self.starts)

    def read(self, packed: torch.Tensor) -> torch.Tensor:
        """Rows [num_tokens, ...] as [num_chunks, C, ...]: a view of plain chunks, else a
        copy with zeros after the end of each chunk."""
        if self.is_plain:
            stop = self.starts[-1] + self.chunk_size
            return packed[self.starts[0] : stop].unflatten(0, (self.num_chunks, self.chunk_size))
        made = packed.new_zeros((self.num_chunks, self.chunk_size, *packed.shape[1:]))
        for index, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            made[index, :length] = packed[start : start + length]
        return made

    def write(self, packed: torch.Tensor, rows: torch.Tensor) -> None:
        """The opposite of `read`."""
        for index, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            packed[start : start + length] = rows[index, :length]


def _blocks(table: ChunkTable, most: int) -> Iterator[_Block]:
    host = table.host
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for index, (first, end) in enumerate(itertools.pairwise(host.first_chunks)):
        if first < end:
            begins[first], ends[end - 1] = index, index
    for at in range(0, table.num_chunks, most):
        chunks = range(at, min(at + most, table.num_chunks))
        starts = host.starts[at : chunks.stop]
        lengths = host.lengths[at : chunks.stop]
        yield _Block(
            starts=starts,
            lengths=lengths,
            checkpoint_rows=host.checkpoint_rows[at : chunks.stop],
            begins=tuple(begins.get(chunk) for chunk in chunks),
            ends=tuple(ends.get(chunk) for chunk in chunks),
            is_plain=lengths == (table.chunk_size,) * len(chunks),
            chunk_size=table.chunk_size,
        )


@attrs.frozen(kw_only=True, eq=False)
class _Workspace:
    """Float32 temporaries for one block, and the running state; R value heads per group.

    Attributes:
        scores: [chunks, Hk, C, C].
        weights: [chunks, Hv, C, C].
        values, updates: [chunks, C, Hv, V], what the weights and what k^T are multiplied with.
        inner: [chunks, Hv, C, V], weights times values.
        outer: [chunks, Hk, C, R, V], q times state.
        rows: [chunks, C, Hv, V], the output.
        state: [Hk, K, R, V].
    """

    scores: torch.Tensor
    weights: torch.Tensor
    values: torch.Tensor
    updates: torch.Tensor
    inner: torch.Tensor
    outer: torch.Tensor
    rows: torch.Tensor
    state: torch.Tensor

    @classmethod
    def of(cls, problem: DecayProblem, chunks: int, size: int) -> _Workspace:
        heads, groups, value_dim = problem.num_heads, problem.num_groups, problem.value_dim

        def new(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=problem.v.device)

        return cls(
            scores=new(chunks, groups, size, size),
            weights=new(chunks, heads, size, size),
            values=new(chunks, size, heads, value_dim),
            updates=new(chunks, size, heads, value_dim),
            inner=new(chunks, heads, size, value_dim),
            outer=new(chunks, groups, size, heads // groups, value_dim),
            rows=new(chunks, size, heads, value_dim),
            state=new(groups, problem.key_dim, heads // groups, value_dim),
        )

    def first(self, chunks: int) -> _Workspace:
        """That of a shorter block."""
        if chunks == self.rows.shape[0]:
            return self
        fields = attrs.asdict(self, recurse=False)
        return _Workspace(**{n: t if n == "state" else t[:chunks] for n, t in fields.items()})


def _run_block(
    problem: DecayProblem,
    result: PrefillResult,
    block: _Block,
    gates: ConstantGates | TokenGates,
    workspace: _Workspace,
) -> None:
    space = workspace.first(block.num_chunks)
    per_group = space.state.shape[2]
    q, k, v = (block.read(part).float() for part in (problem.q, problem.k, problem.v))
    gate = gates.of_block(block.read, block.lengths, space.weights)
    for index in range(block.num_chunks):
        torch.bmm(q[index].transpose(0, 1), k[index].permute(1, 2, 0), out=space.scores[index])
    torch.mul(
        gate.between.unflatten(1, (-1, per_group)),
        space.scores[:, :, None],
        out=space.weights.unflatten(1, (-1, per_group)),
    )
    values = v
    if gate.of_column is not None:
        values = torch.mul(v, gate.of_column[..., None], out=space.values)
    torch.mul(v, gate.to_end[..., None], out=space.updates)
    _scan(problem, result, block, gate, q, k, values, space)

    rows = space.rows
    if block.is_plain and result.output.dtype == torch.float32:
        rows = block.read(result.output)
    torch.mul(
        space.outer.transpose(1, 2),
        (gate.to_row * problem.scale).unflatten(2, (-1, per_group))[..., None],
        out=rows.unflatten(2, (-1, per_group)),
    )
    rows.addcmul_(space.inner.transpose(1, 2), (gate.of_row * problem.scale)[..., None])
    if problem.skip is not None:
        rows.addcmul_(v, problem.skip.float()[:, None])
    if rows is space.rows:
        block.write(result.output, rows)


def _scan(
    problem: DecayProblem,
    result: PrefillResult,
    block: _Block,
    gate: BlockGates,
    q: torch.Tensor,
    k: torch.Tensor,
    values: torch.Tensor,
    space: _Workspace,
) -> None:
    """Takes the state through the chunks of a block, and makes both products of each chunk."""
    state = space.state.flatten(2)
    by_head = space.state.transpose(1, 2)  # [Hk, R, K, V]
    heads = by_head.shape[:2]
    outer = space.outer.flatten(3)
    updates = space.updates.unflatten(2, heads).flatten(3)
    whole = gate.whole.unflatten(1, (heads[0], 1, heads[1], 1))
    for index in range(block.num_chunks):
        begins, ends, row = block.begins[index], block.ends[index], block.checkpoint_rows[index]
        if begins is not None and problem.initial is None:
            space.state.zero_()
        elif begins is not None and problem.initial is not None:
            by_head.copy_(problem.initial[begins].unflatten(0, heads))
        torch.bmm(space.weights[index], values[index].transpose(0, 1), out=space.inner[index])
        torch.bmm(q[index].transpose(0, 1), state, out=outer[index])
        space.state.mul_(whole[index])
        state.baddbmm_(k[index].permute(1, 2, 0), updates[index].transpose(0, 1))
        if row >= 0:
            result.checkpoints[row].unflatten(0, heads).copy_(by_head)
        if ends is not None:
            result.final_state[ends].unflatten(0, heads).copy_(by_head)
