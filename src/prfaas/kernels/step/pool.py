"""State pools: per-request states of one layer, in slots that may lie apart in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arguments import FLOATS, check_tensor
from prfaas.kernels.slots import Slots

LARGE_STATE = 131_072
"""Elements of a state from which, on a CPU, a step per request in place beats one step over a
gathered copy: the copies cost more than the calls."""


def check_pool(
    pool: object,
    inner: Sequence[int],
    device: torch.device,
    *,
    dtypes: Sequence[torch.dtype] = FLOATS,
) -> None:
    """Refuses a pool whose slots are not dense blocks of shape ``inner`` beside each other.

    The stride between slots is free: a slot may hold other layers' states too, and a view may count
    in steps smaller than a state (`prfaas.kernels.pool`); `Slots.of` sees to it that the slots of a
    batch do not overlap.

    Raises:
        ConfigError: wrong shape, dtype, device or strides.
    """
    check_tensor(
        "state_pool",
        pool,
        shape=("num_slots", *inner),
        dtypes=dtypes,
        device=device,
        contiguous="no",
    )
    assert isinstance(pool, torch.Tensor)
    dense = [math.prod(inner[axis + 1 :]) for axis in range(len(inner))]
    if any(
        size > 1 and got != wanted
        for size, got, wanted in zip(inner, pool.stride()[1:], dense, strict=True)
    ):
        raise ConfigError(
            f"state_pool has strides {pool.stride()} for shape {list(pool.shape)}; inside a slot "
            "it must be contiguous: only the first stride is free"
        )


def update_slots(
    pool: torch.Tensor,
    slots: Slots,
    inputs: Sequence[torch.Tensor],
    like: torch.Tensor,
    advance: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Runs ``advance`` on the slots of a batch and puts the new states back.

    Args:
        pool: [num_slots, ...], updated in place.
        slots: of the requests; padding rows touch no slot and give zeros.
        inputs: tensors with one row per request.
        like: has the shape and dtype of the output, one row per request.
        advance: gets states (float32 [num_rows, ...], for it to change in place) and the same rows
            of ``inputs``, and returns the rows of the output.

    Returns:
        The output.
    """
    ids = slots.ids
    if pool.device.type == "cpu" and (
        ids.shape[0] == 1 or math.prod(pool.shape[1:]) >= LARGE_STATE
    ):
        return _update_one_by_one(pool, ids.tolist(), inputs, like, advance)
    rows = None
    if slots.num_padding != 0:
        # On a GPU this waits for the device, which a captured graph cannot; the kernels do not.
        rows = (ids >= 0).nonzero()[:, 0]
        ids, inputs = ids[rows], [value[rows] for value in inputs]
    if ids.shape[0] == 0:
        return like.new_zeros(like.shape)
    states = pool.index_select(0, ids).float()
    made = advance(states, *inputs)
    pool.index_copy_(0, ids, states.to(pool.dtype))
    return made if rows is None else like.new_zeros(like.shape).index_copy_(0, rows, made)


def _update_one_by_one(
    pool: torch.Tensor,
    ids: list[int],
    inputs: Sequence[torch.Tensor],
    like: torch.Tensor,
    advance: Callable[..., torch.Tensor],
) -> torch.Tensor:
    output = None if len(ids) == 1 and ids[0] >= 0 else like.new_zeros(like.shape)
    for row, slot in enumerate(ids):
        if slot < 0:
            continue
        state = pool[slot : slot + 1]
        states = state.float()  # the slot itself where the pool is float32
        if output is None:
            output = advance(states, *inputs)
        else:
            output[row] = advance(states, *(value[row : row + 1] for value in inputs))[0]
        if states is not state:
            state.copy_(states)
    assert output is not None
    return output
