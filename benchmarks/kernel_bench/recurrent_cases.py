"""Prefill of linear-attention layers, at the head counts of large models."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernel_bench import floors
from kernel_bench.cases import Build, Case, Peer, Results, Sizes
from kernel_bench.inputs import Inputs
from prfaas.kernels.conv1d import causal_conv1d
from prfaas.kernels.decay import decay_attention, lightning_log_decay, ssd
from prfaas.kernels.delta import delta_rule
from prfaas.kernels.results import PrefillResult

DIM = 128


def _results(made: PrefillResult) -> Results:
    return made.output, made.final_state


def rule_inputs(
    make: Inputs, leading: int, key_heads: int, value_heads: int, dim: int, *, is_per_channel: bool
) -> list[torch.Tensor]:
    """q, k, v, g, beta."""
    q, k = make.unit(leading, key_heads, dim), make.unit(leading, key_heads, dim)
    gate = (leading, value_heads, dim) if is_per_channel else (leading, value_heads)
    v = make.normal(leading, value_heads, dim)
    return [q, k, v, make.log_decay(*gate), make.share(leading, value_heads)]


def _rule(
    sizes: Sizes,
    device: torch.device,
    *,
    key_heads: int,
    value_heads: int,
    is_per_channel: bool,
    peers: Callable[[list[torch.Tensor]], tuple[Peer, ...]],
) -> Case:
    key_heads, value_heads = sizes.heads(key_heads), sizes.heads(value_heads)
    dim = sizes.dim(DIM)
    inputs = rule_inputs(
        Inputs(device, sizes.dtype),
        *(sizes.num_tokens, key_heads, value_heads, dim),
        is_per_channel=is_per_channel,
    )
    return Case(
        op="delta_rule",
        work=floors.delta_rule(
            num_tokens=sizes.num_tokens,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=dim,
            value_dim=dim,
            is_per_channel=is_per_channel,
            itemsize=sizes.dtype.itemsize,
            gate_itemsize=4,
        ),
        run=lambda path: _results(delta_rule(*inputs, path=path)),
        peers=peers(inputs),
    )


def _fla_rule(module: str, name: str) -> Callable[[list[torch.Tensor]], tuple[Peer, ...]]:
    def peers(inputs: list[torch.Tensor]) -> tuple[Peer, ...]:
        def build() -> Callable[[], torch.Tensor]:
            function = getattr(__import__(f"fla.ops.{module}", fromlist=[name]), name)
            batched = [x[None] for x in inputs]
            return lambda: function(*batched, output_final_state=True)[0]

        return (Peer(name="fla", package="fla", build=build),)

    return peers


def kda(sizes: Sizes, device: torch.device) -> Case:
    """A KDA layer of Kimi Linear: 32 heads of 128."""
    return _rule(
        sizes,
        device,
        key_heads=32,
        value_heads=32,
        is_per_channel=True,
        peers=_fla_rule("kda", "chunk_kda"),
    )


def gdn(sizes: Sizes, device: torch.device) -> Case:
    """A Gated DeltaNet layer of Qwen3-Next: 16 key and 32 value heads of 128."""
    return _rule(
        sizes,
        device,
        key_heads=16,
        value_heads=32,
        is_per_channel=False,
        peers=_fla_rule("gated_delta_rule", "chunk_gated_delta_rule"),
    )


def kda_few_heads(sizes: Sizes, device: torch.device) -> Case:
    """4 heads, one of 8 GPUs' share: our own choice of segments against one after another."""

    def serial(inputs: list[torch.Tensor]) -> tuple[Peer, ...]:
        def build() -> Callable[[], torch.Tensor]:
            return lambda: delta_rule(*inputs, num_segments=1).output

        return (Peer(name="one_segment", package="torch", build=build),)

    return _rule(sizes, device, key_heads=4, value_heads=4, is_per_channel=True, peers=serial)


def lightning(sizes: Sizes, device: torch.device) -> Case:
    """A lightning-attention layer of MiniMax-01: 64 heads of 128, constant decays."""
    heads, dim = sizes.heads(64), sizes.dim(DIM)
    make = Inputs(device, sizes.dtype)
    q, k, v = (make.normal(sizes.num_tokens, heads, dim) for _ in range(3))
    g = lightning_log_decay(heads, layer_index=10, num_layers=80).to(device)

    def fla() -> Callable[[], torch.Tensor]:
        from fla.ops.simple_gla import chunk_simple_gla

        batched = [x[None] for x in (q, k, v)]
        return lambda: chunk_simple_gla(*batched, g_gamma=g, output_final_state=True)[0]

    return Case(
        op="decay_attention",
        work=floors.decay_attention(
            num_tokens=sizes.num_tokens,
            heads=heads,
            key_dim=dim,
            value_dim=dim,
            itemsize=sizes.dtype.itemsize,
        ),
        run=lambda path: _results(decay_attention(q, k, v, g, path=path)),
        peers=(Peer(name="fla", package="fla", build=fla),),
    )


def mamba_inputs(make: Inputs, leading: int, sizes: Sizes) -> dict[str, torch.Tensor]:
    """A Mamba2 layer of Nemotron-H: 128 heads of 64, 8 groups, states of 128."""
    heads, groups = sizes.heads(128), sizes.heads(8)
    return {
        "x": make.normal(leading, heads, sizes.dim(64)),
        "dt": make.share(leading, heads).float() * 0.2,
        "A": -make.share(heads).float() * 4,
        "B": make.normal(leading, groups, sizes.dim(DIM)),
        "C": make.normal(leading, groups, sizes.dim(DIM)),
        "D": make.normal(heads, dtype=torch.float32),
    }


def mamba(sizes: Sizes, device: torch.device) -> Case:
    """That layer without its convolution."""
    inputs = mamba_inputs(Inputs(device, sizes.dtype), sizes.num_tokens, sizes)
    x, dt, a, b, c, d = inputs.values()

    def mamba_ssm() -> Callable[[], torch.Tensor]:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        batched = (x[None], dt[None], a, b[None], c[None])
        return lambda: mamba_chunk_scan_combined(
            *batched, chunk_size=256, D=d, return_final_states=True
        )[0]

    return Case(
        op="ssd",
        work=floors.ssd(
            num_tokens=sizes.num_tokens,
            heads=x.shape[1],
            groups=b.shape[1],
            head_dim=x.shape[2],
            state_dim=b.shape[2],
            itemsize=sizes.dtype.itemsize,
        ),
        run=lambda path: _results(ssd(**inputs, path=path)),
        peers=(Peer(name="mamba_ssm", package="mamba_ssm", build=mamba_ssm),),
    )


def convolution(sizes: Sizes, device: torch.device) -> Case:
    """The short filter of that KDA layer: q, k and v of 32 heads, 4 taps."""
    channels = 3 * sizes.heads(32) * sizes.dim(DIM)
    make = Inputs(device, sizes.dtype)
    x, weight = make.normal(sizes.num_tokens, channels), make.normal(channels, 4)

    def causal() -> Callable[[], torch.Tensor]:
        from causal_conv1d import causal_conv1d_fn

        channels_last = x.t()[None]
        return lambda: causal_conv1d_fn(channels_last, weight, None, activation="silu")[0].t()

    return Case(
        op="causal_conv1d",
        work=floors.conv1d(
            num_tokens=sizes.num_tokens,
            channels=channels,
            width=4,
            itemsize=sizes.dtype.itemsize,
        ),
        run=lambda path: _results(causal_conv1d(x, weight, activation="silu", path=path)),
        peers=(Peer(name="causal_conv1d", package="causal_conv1d", build=causal),),
    )


CASES: dict[str, Build] = {
    "kda_prefill": kda,
    "gdn_prefill": gdn,
    "kda_few_heads": kda_few_heads,
    "lightning_prefill": lightning,
    "ssd_prefill": mamba,
    "conv1d_prefill": convolution,
}
