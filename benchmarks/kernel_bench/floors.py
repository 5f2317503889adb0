"""How much work an operation has to do: the least bytes that it moves, and its operations.

Bytes count every input once and every output once, as if nothing between them touched memory.
Operations count a multiplication and an addition as two; elementwise work is left out where matrix
products dominate. Sizes are those of one layer.
"""

from __future__ import annotations

import attrs

CHUNK = 64
"""Tokens of a chunk in the counts of operations of chunked recurrences."""


@attrs.frozen(kw_only=True)
class Work:
    """Bytes that have to move, and operations that have to run, at least."""

    num_bytes: int
    flops: float


def delta_rule(
    *,
    num_tokens: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    is_per_channel: bool,
    itemsize: int = 2,
    gate_itemsize: int = 2,
) -> Work:
    """Gated delta rule in chunks of C = 64 tokens.

    Operations per token and value head: 4CK (two score matrices) + 2C^2/3 (the inverse) +
    2C(K + V) (W and U) + 6KV (three products with the state) + 2CV (scores times U). Bytes: q and k
    per key head, v and the output per value head, gates, beta, and the float32 state once.
    """
    k, v = key_dim, value_dim
    per_token_head = (
        4 * CHUNK * k + 2 * CHUNK**2 / 3 + 2 * CHUNK * (k + v) + 6 * k * v + 2 * CHUNK * v
    )
    gates = num_tokens * value_heads * (k if is_per_channel else 1) * gate_itemsize
    rows = num_tokens * (2 * key_heads * k + 2 * value_heads * v + value_heads) * itemsize
    return Work(
        num_bytes=rows + gates + 4 * value_heads * k * v,
        flops=num_tokens * value_heads * per_token_head,
    )


def decay_attention(
    *, num_tokens: int, heads: int, key_dim: int, value_dim: int, itemsize: int = 2
) -> Work:
    """Attention with one decay per head, in chunks of C = 64 tokens, as many key as value heads.

    Operations per token and head: 2CK (scores) + 2CV (scores times values) + 4KV (reading the
    state, and adding to it). Bytes: q, k, v, output, and the float32 state once.
    """
    k, v = key_dim, value_dim
    return Work(
        num_bytes=num_tokens * heads * 2 * (k + v) * itemsize + 4 * heads * k * v,
        flops=num_tokens * heads * (2 * CHUNK * k + 2 * CHUNK * v + 4 * k * v),
    )


def ssd(
    *, num_tokens: int, heads: int, groups: int, head_dim: int, state_dim: int, itemsize: int = 2
) -> Work:
    """Mamba2's layer in chunks of C = 64 tokens.

    Operations per token: 2CN per group (scores), and per head 2CP (scores times x) + 4NP (reading
    the state, and adding to it). Bytes: x and the output per head, B and C per group, float32 dt,
    and the float32 state once.
    """
    per_token = groups * 2 * CHUNK * state_dim
    per_token += heads * (2 * CHUNK * head_dim + 4 * state_dim * head_dim)
    rows = (2 * heads * head_dim + 2 * groups * state_dim) * itemsize + 4 * heads
    return Work(
        num_bytes=num_tokens * rows + 4 * heads * head_dim * state_dim,
        flops=float(num_tokens * per_token),
    )


def conv1d(*, num_tokens: int, channels: int, width: int, itemsize: int = 2) -> Work:
    """A depthwise convolution: its input once, its output once; two operations per tap."""
    return Work(
        num_bytes=2 * num_tokens * channels * itemsize,
        flops=2.0 * num_tokens * channels * width,
    )


def prefill(
    *,
    new_tokens: int,
    cached_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    itemsize: int = 2,
) -> Work:
    """Causal softmax attention of new tokens over a cached prefix and themselves.

    Operations: 2(D + V) per query head and visible pair; a new token sees the prefix and the new
    tokens up to itself. Bytes: queries and outputs, and the keys and values of all tokens once.
    """
    pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2
    num_keys = new_tokens + cached_tokens
    elements = (new_tokens * heads + num_keys * kv_heads) * (head_dim + value_dim)
    return Work(num_bytes=elements * itemsize, flops=2.0 * pairs * heads * (head_dim + value_dim))


def decode(
    *, requests: int, kv_len: int, heads: int, kv_heads: int, head_dim: int, itemsize: int = 2
) -> Work:
    """Softmax attention of one token per request: bytes of its keys, values, query and output;
    4D operations per query head and key."""
    elements = requests * (2 * kv_len * kv_heads + 2 * heads) * head_dim
    return Work(num_bytes=elements * itemsize, flops=4.0 * requests * kv_len * heads * head_dim)


def mla_decode(
    *, requests: int, kv_len: int, heads: int, latent_dim: int, rope_dim: int, itemsize: int = 2
) -> Work:
    """Decode over latents: each row [latent | rope] once for all heads, queries and outputs; per
    head and row 2(latent + rope) operations for the logit and 2 latent for the value."""
    row = latent_dim + rope_dim
    elements = requests * (kv_len * row + heads * (row + latent_dim))
    return Work(
        num_bytes=elements * itemsize,
        flops=2.0 * requests * kv_len * heads * (row + latent_dim),
    )


def recurrent_step(
    *,
    requests: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    gates_per_head: int,
    itemsize: int = 2,
    gate_itemsize: int = 4,
) -> Work:
    """One token per request on float32 states: each state read and written once, q, k, v, output
    and gates; 7 operations per element of the state (decay, prediction, update, read-out)."""
    state = requests * heads * key_dim * value_dim
    rows = requests * heads * 2 * (key_dim + value_dim) * itemsize
    gates = requests * heads * gates_per_head * gate_itemsize
    return Work(num_bytes=8 * state + rows + gates, flops=7.0 * state)


def copied(*, read_bytes: int, written_bytes: int | None = None) -> Work:
    """A copy: every byte read once and written once; fewer are written if they are quantized."""
    written = read_bytes if written_bytes is None else written_bytes
    return Work(num_bytes=read_bytes + written, flops=0.0)
