"""A Qwen3.5-style hybrid model whose layers are made of `prfaas.kernels` and read and write a pool.

Three of four layers are Gated DeltaNet (a causal convolution, the gated delta rule, a gated norm),
every fourth is attention with grouped heads, partial rotary positions and an output gate. Nothing
is kept between calls but what is in the pool.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hybrid.batch import DecodeBatch, PrefillBatch
from prfaas.core import DType
from prfaas.kernels import (
    causal_conv1d,
    causal_conv1d_step,
    delta_rule,
    delta_rule_step,
    paged_decode,
    paged_prefill,
    paged_write,
)
from prfaas.kernels.pool import PoolTensors
from prfaas.spec import ModelSpec


class HybridModel:
    """Weights and the forward pass.

    Args:
        folder: a checkpoint with ``config.json`` and ``model.safetensors``, model type
            ``qwen3_5_text``.
        device: where weights and computation are.
        path: which code the kernels run, see `prfaas.kernels.dispatch`.
    """

    def __init__(
        self, folder: Path, *, device: torch.device | str = "cpu", path: str | None = None
    ) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.device, self.path = torch.device(device), path
        self.weights = {
            name.removeprefix("model."): tensor.to(self.device)
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.spec = ModelSpec.from_hf_config(
            self.config, kv_dtype=DType.FLOAT32, name="pocket", revision="kernels"
        )

    def prefill(self, batch: PrefillBatch, pool: PoolTensors) -> torch.Tensor:
        """Logits [num_requests, vocab] after the last token of each request."""
        hidden = self._layers(batch.tokens, batch.positions, batch, pool)
        last = torch.tensor(batch.sequences.offsets[1:], device=self.device) - 1
        return self._logits(hidden[last])

    def decode(self, batch: DecodeBatch, pool: PoolTensors) -> torch.Tensor:
        """Logits [num_requests, vocab] after the one token of each request."""
        return self._logits(self._layers(batch.tokens, batch.positions, batch, pool))

    def _layers(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: PrefillBatch | DecodeBatch,
        pool: PoolTensors,
    ) -> torch.Tensor:
        hidden = self.weights["embed_tokens.weight"][tokens]
        rotation = self._rotation(positions)
        for index, kind in enumerate(self.config["layer_types"]):
            normed = self._norm(hidden, f"layers.{index}.input_layernorm")
            if kind == "linear_attention":
                hidden = hidden + self._delta_net(index, normed, batch, pool)
            else:
                hidden = hidden + self._attention(index, normed, rotation, batch, pool)
            normed = self._norm(hidden, f"layers.{index}.post_attention_layernorm")
            gate, up = (
                self._linear(normed, f"layers.{index}.mlp.{name}")
                for name in ("gate_proj", "up_proj")
            )
            hidden = hidden + self._linear(F.silu(gate) * up, f"layers.{index}.mlp.down_proj")
        return self._norm(hidden, "norm")

    def _delta_net(
        self, index: int, x: torch.Tensor, batch: PrefillBatch | DecodeBatch, pool: PoolTensors
    ) -> torch.Tensor:
        name, config, views = f"layers.{index}.linear_attn", self.config, pool.states(index)
        qkv = self._linear(x, f"{name}.in_proj_qkv")
        weight = self.weights[f"{name}.conv1d.weight"][:, 0]
        rate = -self.weights[f"{name}.A_log"].exp()
        step = self._linear(x, f"{name}.in_proj_a") + self.weights[f"{name}.dt_bias"]
        gate = rate * F.softplus(step)
        beta = self._linear(x, f"{name}.in_proj_b").sigmoid()
        if isinstance(batch, PrefillBatch):
            mixed = causal_conv1d(
                qkv,
                weight,
                activation="silu",
                initial_state=batch.initial(views["conv"]),
                cu_seqlens=batch.sequences,
                checkpoints=batch.checkpoints,
                path=self.path,
            )
            batch.store(views["conv"], mixed.final_state, mixed.checkpoints)
            query, key, value = self._heads(mixed.output)
            result = delta_rule(
                query,
                key,
                value,
                gate,
                beta,
                initial_state=batch.initial(views["recurrent"]),
                cu_seqlens=batch.sequences,
                checkpoints=batch.checkpoints,
                normalize_qk=True,
                path=self.path,
            )
            batch.store(views["recurrent"], result.final_state, result.checkpoints)
            output = result.output
        else:
            mixed_step = causal_conv1d_step(
                qkv,
                weight,
                activation="silu",
                state_pool=views["conv"],
                slots=batch.slots,
                path=self.path,
            )
            query, key, value = self._heads(mixed_step)
            output = delta_rule_step(
                query,
                key,
                value,
                gate,
                beta,
                state_pool=views["recurrent"],
                slots=batch.slots,
                normalize_qk=True,
                path=self.path,
            )
        z = self._linear(x, f"{name}.in_proj_z").view_as(output)
        normed = F.rms_norm(
            output, output.shape[-1:], self.weights[f"{name}.norm.weight"], config["rms_norm_eps"]
        )
        return self._linear((normed * F.silu(z)).flatten(1), f"{name}.out_proj")

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of a Gated DeltaNet layer, views of the convolution's output."""
        config = self.config
        key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        query, key, value = mixed.split(
            (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim), dim=-1
        )
        return (
            query.unflatten(1, (key_heads, key_dim)),
            key.unflatten(1, (key_heads, key_dim)),
            value.unflatten(1, (value_heads, value_dim)),
        )

    def _attention(
        self,
        index: int,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: PrefillBatch | DecodeBatch,
        pool: PoolTensors,
    ) -> torch.Tensor:
        name, config, views = f"layers.{index}.self_attn", self.config, pool.rows(index)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        both = self._linear(x, f"{name}.q_proj").view(len(x), heads, 2, config["head_dim"])
        query, gate = both[:, :, 0], both[:, :, 1]
        key, value = (
            self._linear(x, f"{name}.{part}").view(len(x), kv_heads, -1)
            for part in ("k_proj", "v_proj")
        )
        query = _rotate(self._norm(query, f"{name}.q_norm"), rotation)
        key = _rotate(self._norm(key, f"{name}.k_norm"), rotation)
        for part, rows in (("key", key), ("value", value)):
            paged_write(
                rows, views[part], batch.page_table, cu_seqlens=batch.sequences, path=self.path
            )
        if isinstance(batch, PrefillBatch):
            output = paged_prefill(
                query,
                views["key"],
                views["value"],
                batch.page_table,
                cu_seqlens=batch.sequences,
                path=self.path,
            )
        else:
            output = paged_decode(
                query, views["key"], views["value"], batch.page_table, path=self.path
            )
        return self._linear((output * gate.sigmoid()).flatten(1), f"{name}.o_proj")

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [num_tokens, 1, rotary dims / 2] of each position."""
        rope = self.config["rope_parameters"]
        dims = int(self.config["head_dim"] * rope["partial_rotary_factor"])
        exponents = torch.arange(0, dims, 2, device=self.device, dtype=torch.float32) / dims
        angles = positions[:, None, None].float() * rope["rope_theta"] ** -exponents
        return angles.cos(), angles.sin()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMS norm; this family stores its weights minus one."""
        weight = self.weights[f"{name}.weight"] + 1
        return F.rms_norm(x, x.shape[-1:], weight, self.config["rms_norm_eps"])

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weights["embed_tokens.weight"])


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turns pairs (i, i + half) of the first dimensions of each head; the rest stays."""
    cos, sin = rotation
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
