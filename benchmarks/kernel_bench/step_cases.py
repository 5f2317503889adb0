"""One token of many requests through linear-attention layers, on states in slots of a pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernel_bench import floors
from kernel_bench.cases import Build, Case, Peer, Sizes
from kernel_bench.inputs import Inputs
from kernel_bench.recurrent_cases import DIM, mamba_inputs, rule_inputs
from prfaas.kernels import Slots
from prfaas.kernels.conv1d import causal_conv1d_step
from prfaas.kernels.decay import lightning_log_decay
from prfaas.kernels.step import decay_attention_step, delta_rule_step, ssd_step


def _slots(requests: int, device: torch.device) -> Slots:
    """Slots in no order."""
    order = torch.randperm(requests, generator=torch.Generator().manual_seed(4)).tolist()
    return Slots(order, num_slots=requests, device=device)


def _requests(sizes: Sizes, *, is_one: bool) -> int:
    return 1 if is_one else sizes.requests


def rule(
    sizes: Sizes,
    device: torch.device,
    *,
    key_heads: int,
    is_per_channel: bool,
    fla: tuple[str, str],
    is_one: bool = False,
) -> Case:
    """32 value heads of 128: a KDA layer, or a Gated DeltaNet layer with 16 key heads."""
    requests, heads, dim = _requests(sizes, is_one=is_one), sizes.heads(32), sizes.dim(DIM)
    make = Inputs(device, sizes.dtype)
    inputs = rule_inputs(
        make, requests, sizes.heads(key_heads), heads, dim, is_per_channel=is_per_channel
    )
    pool = make.normal(requests, heads, dim, dim, dtype=torch.float32)
    slots = _slots(requests, device)
    before = pool.clone()  # calls of ours move the pool on

    def peer() -> Callable[[], torch.Tensor]:
        module, name = fla
        function = getattr(__import__(f"fla.ops.{module}", fromlist=[name]), name)
        names = ("q", "k", "v", "g", "beta")
        batched = {n: x[:, None] for n, x in zip(names, inputs, strict=True)}
        states = before[slots.ids]
        return lambda: function(**batched, initial_state=states, output_final_state=True)[0]

    return Case(
        op="delta_rule_step",
        work=floors.recurrent_step(
            requests=requests,
            heads=heads,
            key_dim=dim,
            value_dim=dim,
            gates_per_head=dim if is_per_channel else 1,
            itemsize=sizes.dtype.itemsize,
        ),
        run=lambda path: (
            delta_rule_step(*inputs, state_pool=pool, slots=slots, path=path),
            pool,
        ),
        peers=(Peer(name="fla", package="fla", build=peer),),
    )


def lightning(sizes: Sizes, device: torch.device) -> Case:
    """64 heads of 128."""
    requests, heads, dim = sizes.requests, sizes.heads(64), sizes.dim(DIM)
    make = Inputs(device, sizes.dtype)
    q, k, v = (make.normal(requests, heads, dim) for _ in range(3))
    g = lightning_log_decay(heads, layer_index=10, num_layers=80).to(device)
    pool = make.normal(requests, heads, dim, dim, dtype=torch.float32)
    slots = _slots(requests, device)
    before = pool.clone()

    def fla() -> Callable[[], torch.Tensor]:
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        batched = [x[:, None] for x in (q, k, v)]
        states = before[slots.ids]
        return lambda: fused_recurrent_simple_gla(
            *batched, g_gamma=g, initial_state=states, output_final_state=True
        )[0]

    return Case(
        op="decay_attention_step",
        work=floors.recurrent_step(
            requests=requests,
            heads=heads,
            key_dim=dim,
            value_dim=dim,
            gates_per_head=0,
            itemsize=sizes.dtype.itemsize,
        ),
        run=lambda path: (
            decay_attention_step(q, k, v, g, state_pool=pool, slots=slots, path=path),
            pool,
        ),
        peers=(Peer(name="fla", package="fla", build=fla),),
    )


def mamba(sizes: Sizes, device: torch.device) -> Case:
    """128 heads of 64 with states of 128."""
    make = Inputs(device, sizes.dtype)
    inputs = mamba_inputs(make, sizes.requests, sizes)
    heads, head_dim = inputs["x"].shape[1:]
    state_dim = inputs["B"].shape[2]
    pool = make.normal(sizes.requests, heads, head_dim, state_dim, dtype=torch.float32)
    slots = _slots(sizes.requests, device)
    return Case(
        op="ssd_step",
        work=floors.recurrent_step(
            requests=sizes.requests,
            heads=heads,
            key_dim=state_dim,
            value_dim=head_dim,
            gates_per_head=1,
            itemsize=sizes.dtype.itemsize,
        ),
        run=lambda path: (ssd_step(**inputs, state_pool=pool, slots=slots, path=path), pool),
    )


def convolution(sizes: Sizes, device: torch.device) -> Case:
    """q, k and v of 32 heads, 4 taps; a state of 3 columns per channel."""
    channels, width = 3 * sizes.heads(32) * sizes.dim(DIM), 4
    make = Inputs(device, sizes.dtype)
    x, weight = make.normal(sizes.requests, channels), make.normal(channels, width)
    pool = make.normal(sizes.requests, channels, width - 1)
    slots = _slots(sizes.requests, device)
    before = pool.clone()  # calls of ours move the pool on

    def causal() -> Callable[[], torch.Tensor]:
        from causal_conv1d import causal_conv1d_update

        states = before[slots.ids]
        return lambda: causal_conv1d_update(x, states, weight, None, activation="silu")

    state_bytes = 2 * pool.numel() * pool.itemsize
    rows = floors.conv1d(
        num_tokens=sizes.requests,
        channels=channels,
        width=width,
        itemsize=sizes.dtype.itemsize,
    )
    return Case(
        op="causal_conv1d_step",
        work=floors.Work(num_bytes=rows.num_bytes + state_bytes, flops=rows.flops),
        run=lambda path: (
            causal_conv1d_step(
                x, weight, state_pool=pool, slots=slots, activation="silu", path=path
            ),
            pool,
        ),
        peers=(Peer(name="causal_conv1d", package="causal_conv1d", build=causal),),
    )


_KDA = partial(rule, key_heads=32, is_per_channel=True, fla=("kda", "fused_recurrent_kda"))
_GDN = partial(
    rule,
    key_heads=16,
    is_per_channel=False,
    fla=("gated_delta_rule", "fused_recurrent_gated_delta_rule"),
)

CASES: dict[str, Build] = {
    "kda_step_1": partial(_KDA, is_one=True),
    "kda_step": _KDA,
    "gdn_step": _GDN,
    "lightning_step": lightning,
    "ssd_step": mamba,
    "conv1d_step": convolution,
}
