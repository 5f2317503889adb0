"""Our torch path against others' torch code, operation by operation, in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import torch
import torch.nn.functional as F

from kernel_bench.contests import Contest
from kernel_bench.fallbacks import fla_function, transformers_function
from kernel_bench.inputs import Inputs, contiguous
from prfaas.kernels import Slots
from prfaas.kernels.attention import paged_prefill
from prfaas.kernels.conv1d import causal_conv1d
from prfaas.kernels.decay import ssd
from prfaas.kernels.delta import delta_rule
from prfaas.kernels.packing import Pieces, pack
from prfaas.kernels.step import delta_rule_step, ssd_step

DIM = 128
HEADS = 4
CPU = torch.device("cpu")
FIRST = ("gdn", "kda")
"""What matters most is timed before time runs out."""


@attrs.frozen(kw_only=True)
class Rule:
    """A delta rule and where others' code for it is."""

    name: str
    model: str
    chunked: str
    recurrent: str
    fla_module: str
    fla_name: str

    @property
    def is_per_channel(self) -> bool:
        return self.name == "kda"


GDN = Rule(
    name="gdn",
    model="qwen3_5",
    chunked="torch_chunk_gated_delta_rule",
    recurrent="torch_recurrent_gated_delta_rule",
    fla_module="gated_delta_rule.naive",
    fla_name="naive_chunk_gated_delta_rule",
)
KDA = Rule(
    name="kda",
    model="kimi_linear",
    chunked="chunk_kimi_delta_attention",
    recurrent="recurrent_kimi_delta_attention",
    fla_module="kda.naive",
    fla_name="naive_chunk_kda",
)


def delta_rule_inputs(rule: Rule, *leading: int) -> list[torch.Tensor]:
    """q, k, v, g, beta with these leading dimensions."""
    make = Inputs(CPU)
    q, k = make.unit(*leading, HEADS, DIM), make.unit(*leading, HEADS, DIM)
    v = make.normal(*leading, HEADS, DIM)
    gate = (*leading, HEADS, DIM) if rule.is_per_channel else (*leading, HEADS)
    return [q, k, v, make.log_decay(*gate), make.share(*leading, HEADS)]


def rule_prefill(rule: Rule, num_tokens: int) -> Contest:
    """A whole prompt, the final state included."""
    inputs = delta_rule_inputs(rule, num_tokens)
    batched = [x[None] for x in inputs]
    theirs = transformers_function(rule.model, rule.chunked)
    naive = fla_function(rule.fla_module, rule.fla_name)

    def ours() -> torch.Tensor:
        return delta_rule(*inputs, path="torch").output

    def of_transformers() -> torch.Tensor:
        return theirs(*batched, output_final_state=True)[0]

    def of_fla() -> torch.Tensor:
        assert naive is not None
        return naive(*batched, output_final_state=True)[0]

    return Contest(
        name=rule.name,
        what=f"T={num_tokens} H={HEADS} K=V={DIM}",
        unit="tokens",
        count=num_tokens,
        ours=ours,
        others={"transformers": of_transformers, "fla_naive": None if naive is None else of_fla},
    )


def rule_step(rule: Rule, num_requests: int) -> Contest:
    """A token of each request. Theirs returns a new state, ours advances its slots in place; both
    advance from token to token."""
    inputs = delta_rule_inputs(rule, num_requests)
    batched = [x[:, None] for x in inputs]
    states = [Inputs(CPU).normal(num_requests, HEADS, DIM, DIM) for _ in range(2)]
    slots = Slots(range(num_requests), num_slots=num_requests, device=CPU)
    theirs = transformers_function(rule.model, rule.recurrent)

    def ours() -> torch.Tensor:
        return delta_rule_step(*inputs, state_pool=states[0], slots=slots, path="torch")

    def of_transformers() -> torch.Tensor:
        output, states[1] = theirs(*batched, initial_state=states[1], output_final_state=True)
        return output

    return Contest(
        name=f"{rule.name}_step_{num_requests}",
        what=f"B={num_requests} H={HEADS} K=V={DIM}",
        unit="steps",
        count=1,
        ours=ours,
        others={"transformers": of_transformers},
        inner=20,
    )


def mamba_inputs(heads: int, *leading: int) -> dict[str, torch.Tensor]:
    make = Inputs(CPU)
    return {
        "x": make.normal(*leading, heads, 64),
        "dt": make.share(*leading, heads) * 0.2,
        "A": -make.share(heads) * 4,
        "B": make.normal(*leading, 1, DIM),
        "C": make.normal(*leading, 1, DIM),
        "D": make.normal(heads),
    }


def mamba_prefill(num_tokens: int) -> Contest:
    """Mamba2 without its convolution; theirs in its published chunks of 256."""
    heads = 8
    inputs = mamba_inputs(heads, num_tokens)
    batched = {n: x if n in "AD" else x[None] for n, x in inputs.items()}
    batched["hidden_states"] = batched.pop("x")
    theirs = transformers_function("bamba", "mamba2_chunk_scan")

    def of_transformers() -> torch.Tensor:
        return theirs(**batched, chunk_size=256, return_final_states=True)[0]

    return Contest(
        name="ssd",
        what=f"T={num_tokens} H={heads} P=64 N={DIM}",
        unit="tokens",
        count=num_tokens,
        ours=lambda: ssd(**inputs, path="torch").output,
        others={"transformers": of_transformers},
    )


def mamba_step(num_requests: int) -> Contest:
    """A token of each request."""
    heads = 8
    inputs = mamba_inputs(heads, num_requests)
    states = [Inputs(CPU).normal(num_requests, heads, 64, DIM) for _ in range(2)]
    slots = Slots(range(num_requests), num_slots=num_requests, device=CPU)
    theirs = transformers_function("bamba", "mamba2_selective_state_update")
    x, dt, a, b, c, d = inputs.values()
    wide = {
        "dt": dt[..., None].expand(-1, -1, 64),
        "A": a[:, None, None].expand(-1, 64, DIM),
        "B": b,
        "C": c,
        "D": d[:, None].expand(-1, 64),
    }
    return Contest(
        name=f"ssd_step_{num_requests}",
        what=f"B={num_requests} H={heads} P=64 N={DIM}",
        unit="steps",
        count=1,
        ours=lambda: ssd_step(**inputs, state_pool=states[0], slots=slots, path="torch"),
        others={"transformers": lambda: theirs(states[1], x, **wide)},
        inner=20,
    )


def convolution(num_tokens: int) -> Contest:
    """The short filter before a linear layer. Ours reads tokens by channels, as a projection
    writes them; theirs takes channels by tokens, and so its time includes that transpose."""
    channels, width = 3 * HEADS * DIM, 4
    make = Inputs(CPU)
    x, weight = make.normal(num_tokens, channels), make.normal(channels, width)
    theirs = transformers_function("qwen3_5", "causal_conv1d_fn")

    def of_transformers() -> torch.Tensor:
        return theirs(x.t()[None], weight, None, "silu")[0].t().contiguous()

    return Contest(
        name="conv1d",
        what=f"T={num_tokens} channels={channels} width={width}",
        unit="tokens",
        count=num_tokens,
        ours=lambda: causal_conv1d(x, weight, activation="silu", path="torch").output,
        others={"transformers": of_transformers},
    )


def attention(num_tokens: int) -> Contest:
    """A prompt over pages against torch's attention over memory without pages: a floor."""
    make = Inputs(CPU)
    q = make.normal(num_tokens, 2 * HEADS, DIM)
    table = make.pages([num_tokens], 64)
    key, value = (make.normal(table.num_pages, 64, HEADS, DIM) for _ in range(2))
    plain = [q.transpose(0, 1)[None], *(contiguous(x, table, num_tokens) for x in (key, value))]

    def floor() -> torch.Tensor:
        out = F.scaled_dot_product_attention(*plain, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    return Contest(
        name="paged_prefill",
        what=f"T={num_tokens} heads={2 * HEADS}/{HEADS} D={DIM}",
        unit="tokens",
        count=num_tokens,
        ours=lambda: paged_prefill(q, key, value, table, path="torch"),
        others={"sdpa": floor},
    )


def packing() -> Contest:
    """Blocks of 64 KiB of 8 layers as one run, against one copy of as many bytes: a floor."""
    num_layers, num_blocks, size = 8, 128, 64 * 1024
    regions = [torch.zeros(2 * num_blocks * size, dtype=torch.uint8) for _ in range(num_layers)]
    blocks = torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(3))[:num_blocks]
    pieces = Pieces(
        (blocks * size).repeat(num_layers),
        torch.full((num_layers * num_blocks,), size),
        regions=torch.arange(num_layers).repeat_interleave(num_blocks),
    )
    out, source = (torch.zeros(pieces.num_bytes, dtype=torch.uint8) for _ in range(2))
    return Contest(
        name="pack",
        what=f"{num_layers} layers, {num_blocks} blocks of {size // 1024} KiB each",
        unit="bytes",
        count=pieces.num_bytes,
        ours=lambda: pack(regions, pieces, out=out, path="torch"),
        others={"memcpy": lambda: out.copy_(source)},
        compares=False,
    )


def contests(num_tokens: int) -> dict[str, Callable[[], Contest]]:
    """What is built, timed and dropped, one after the other, by the name of its ratio."""
    found: dict[str, Callable[[], Contest]] = {
        "gdn": partial(rule_prefill, GDN, num_tokens),
        "kda": partial(rule_prefill, KDA, num_tokens),
    }
    for rule in (GDN, KDA):
        for num_requests in (1, 8):
            found[f"{rule.name}_step_{num_requests}"] = partial(rule_step, rule, num_requests)
    return found | {
        "ssd": partial(mamba_prefill, num_tokens),
        "ssd_step_1": partial(mamba_step, 1),
        "ssd_step_8": partial(mamba_step, 8),
        "conv1d": partial(convolution, num_tokens),
        "paged_prefill": partial(attention, num_tokens // 2),
        "pack": packing,
    }
