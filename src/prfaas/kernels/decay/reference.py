"""The recurrence in float64, token after token: what the other paths are compared with."""

from __future__ import annotations

import torch

from prfaas.kernels.decay.problem import DecayProblem
from prfaas.kernels.results import PrefillResult


def run_reference(problem: DecayProblem) -> PrefillResult:
    """Output and states in float64, from the inputs as they are given (rounded)."""
    per_group = problem.num_heads // problem.num_groups
    q = problem.q.double().repeat_interleave(per_group, dim=1) * problem.scale
    k = problem.k.double().repeat_interleave(per_group, dim=1)
    v = problem.v.double()
    gate = problem.gate.double().expand(problem.num_tokens, -1)
    weighted = v
    if problem.rate is not None:
        weighted = v * gate[..., None]
        gate = gate * problem.rate.double()
    decay = gate.exp()[..., None, None]

    result = problem.new_result(torch.float64, torch.float64)
    row = 0
    for index, (begin, length) in enumerate(
        zip(problem.sequences.offsets, problem.sequences.lengths, strict=False)
    ):
        state = torch.zeros_like(result.final_state[index])
        if problem.initial is not None:
            state = problem.initial[index].double()
        for token in range(begin, begin + length):
            state = state * decay[token] + k[token, :, :, None] * weighted[token, :, None, :]
            result.output[token] = (q[token, :, None, :] @ state)[:, 0]
            if token + 1 - begin in problem.checkpoints[index]:
                result.checkpoints[row] = state
                row += 1
        result.final_state[index] = state
    if problem.skip is not None:
        result.output.addcmul_(v, problem.skip.double()[:, None])
    return result
