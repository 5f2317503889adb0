"""A model as its KV cache sees it: layers, the groups they form, and the bytes of a request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property

import attrs

from prfaas.core import DType, GroupId
from prfaas.errors import ConfigError
from prfaas.spec.hf import read_hf_config
from prfaas.spec.layers import (
    FullAttentionSpec,
    LayerSpec,
    LinearStateSpec,
    MLASpec,
    SlidingWindowSpec,
    TokenSpec,
    check_count,
    check_num_tokens,
)

_SPEC_TYPES = (FullAttentionSpec, MLASpec, SlidingWindowSpec, LinearStateSpec)
_TOKEN_TYPES = (FullAttentionSpec, MLASpec)
DEFAULT_GRANULE_TOKENS = 64


@attrs.frozen(kw_only=True)
class KVCacheGroup:
    """The layers that share one spec; they are allocated, indexed and shipped together.

    A token-kind group stores, per token, ``num_layers`` rows; a slot-kind group stores, per
    request, ``num_layers`` slots.
    """

    group_id: GroupId
    name: str
    layer_spec: LayerSpec
    layer_indices: tuple[int, ...]

    @property
    def is_token_kind(self) -> bool:
        return self.layer_spec.is_token_kind

    @property
    def num_layers(self) -> int:
        return len(self.layer_indices)

    @property
    def row_bytes(self) -> int:
        """Bytes per token over all layers. Raises ``ConfigError`` for a state without rows."""
        if isinstance(self.layer_spec, LinearStateSpec):
            raise ConfigError(f"group {self.name!r} has no rows per token; use slot_bytes")
        return self.num_layers * self.layer_spec.row_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes per request over all layers. Raises ``ConfigError`` for a token-kind group."""
        if isinstance(self.layer_spec, _TOKEN_TYPES):
            raise ConfigError(f"group {self.name!r} grows with the tokens; use row_bytes")
        return self.num_layers * self.layer_spec.slot_bytes

    def entry_bytes(self, num_tokens: int) -> int:
        """Bytes the group keeps for a request of ``num_tokens``."""
        return self.num_layers * self.layer_spec.entry_bytes(num_tokens)

    def layer_entry_bytes(self, num_tokens: int) -> int:
        """Bytes one layer of the group keeps for a request of ``num_tokens``."""
        return self.layer_spec.entry_bytes(num_tokens)


def _group_layers(layers: Iterable[LayerSpec | None]) -> tuple[KVCacheGroup, ...]:
    indices: dict[LayerSpec, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer is not None:
            indices.setdefault(layer, []).append(index)
    ordered = sorted(indices, key=lambda spec: (not spec.is_token_kind, indices[spec][0]))
    groups: list[KVCacheGroup] = []
    for spec in ordered:
        num_same_kind = sum(group.layer_spec.kind == spec.kind for group in groups)
        groups.append(
            KVCacheGroup(
                group_id=GroupId(len(groups)),
                name=f"{spec.kind}_{num_same_kind}" if num_same_kind else spec.kind,
                layer_spec=spec,
                layer_indices=tuple(indices[spec]),
            )
        )
    return tuple(groups)


def _canonical_layer(layer: LayerSpec | None) -> list[object] | None:
    if layer is None:
        return None
    window = layer.window_tokens if isinstance(layer, SlidingWindowSpec) else None
    parts = [[part.name, part.dtype.label, list(part.shape)] for part in layer.parts]
    return [layer.kind, window, parts]


@attrs.frozen(kw_only=True)
class ModelSpec:
    """Everything about a model that decides the size, layout and identity of its cache.

    Attributes:
        name: part of the fingerprint, so both sides of a transfer must use the same one.
        layers: one spec per model layer, in order; None is a layer that caches nothing.
        granule_tokens: tokens covered by one content hash; block sizes are multiples of it.
        revision: weights revision; two revisions never share cache entries.
    """

    name: str = attrs.field()
    layers: tuple[LayerSpec | None, ...] = attrs.field(repr=False)
    granule_tokens: int = attrs.field(default=DEFAULT_GRANULE_TOKENS, validator=check_count)
    revision: str = ""

    @name.validator
    def _check_name(self, _: object, value: str) -> None:
        if not isinstance(value, str) or not value:
            raise ConfigError(f"model name is {value!r}; it must be a non-empty string")

    @layers.validator
    def _check_layers(self, _: object, value: tuple[object, ...]) -> None:
        if not isinstance(value, tuple):
            raise ConfigError(f"layers is a {type(value).__name__}; use a tuple")
        for index, layer in enumerate(value):
            if layer is not None and not isinstance(layer, _SPEC_TYPES):
                raise ConfigError(
                    f"layer {index} of {self.name!r} is {layer!r}; "
                    "use one of the layer specs of prfaas.spec, or None"
                )
        if not any(layer is not None for layer in value):
            raise ConfigError(
                f"model {self.name!r} has {len(value)} layers and none has a cache; "
                "at least 1 is needed"
            )

    @classmethod
    def from_hf_config(
        cls,
        config: object,
        *,
        kv_dtype: DType | None = None,
        state_dtype: DType = DType.FLOAT32,
        conv_dtype: DType | None = None,
        name: str | None = None,
        revision: str = "",
        granule_tokens: int = DEFAULT_GRANULE_TOKENS,
    ) -> ModelSpec:
        """Read the cache layout from a Hugging Face model config, without importing transformers.

        Args:
            config: the contents of a ``config.json``, or a config object.
            kv_dtype: dtype of KV rows; by default the dtype that the config names.
            state_dtype: dtype of recurrent states; engines keep them in float32 by default.
            conv_dtype: dtype of convolution states; by default ``kv_dtype``.
            name: the name both clusters agree on; by default the config's ``model_type``, which
                two different models may share: name anything that goes into a shared cache.

        Raises:
            ConfigError: unknown model type, a field missing, or no dtype known.
        """
        family, layers = read_hf_config(
            config, kv_dtype=kv_dtype, state_dtype=state_dtype, conv_dtype=conv_dtype
        )
        return cls(
            name=family if name is None else name,
            layers=layers,
            granule_tokens=granule_tokens,
            revision=revision,
        )

    @cached_property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """Layers by equal spec: token kinds first, then by first layer; ``group_id`` = position."""
        return _group_layers(self.layers)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes that each further token adds beyond every window."""
        return sum(group.row_bytes for group in self.groups if group.is_token_kind)

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes of all slots of one request, windows full."""
        return sum(group.slot_bytes for group in self.groups if not group.is_token_kind)

    @cached_property
    def _state_bytes(self) -> int:
        """Bytes of the slots of one request that are the same for every length."""
        states = [g for g in self.groups if isinstance(g.layer_spec, LinearStateSpec)]
        return sum(group.slot_bytes for group in states)

    @cached_property
    def _window_groups(self) -> tuple[KVCacheGroup, ...]:
        """Groups whose slots fill up with the tokens."""
        return tuple(g for g in self.groups if isinstance(g.layer_spec, SlidingWindowSpec))

    def kv_bytes(self, num_tokens: int) -> int:
        """S_kv: bytes of the whole cache of a request of ``num_tokens``."""
        return self.kv_bytes_delta(num_tokens, 0)

    def kv_bytes_delta(self, num_tokens: int, num_held_tokens: int) -> int:
        """Bytes that must travel to a receiver that already holds the rows of a prefix.

        Slots always travel whole: a state at ``num_tokens`` cannot be built from an earlier one.

        Raises:
            ConfigError: unless ``0 <= num_held_tokens <= num_tokens``.
        """
        check_num_tokens(num_tokens)
        if not 0 <= num_held_tokens <= num_tokens:
            raise ConfigError(
                f"num_held_tokens is {num_held_tokens}; it must be from 0 to the "
                f"{num_tokens} tokens of the request"
            )
        num_bytes = self._state_bytes + (num_tokens - num_held_tokens) * self.bytes_per_token
        for group in self._window_groups:
            num_bytes += group.entry_bytes(num_tokens)
        return num_bytes

    def as_full_attention(self) -> ModelSpec:
        """Return the dense equivalent: every slot layer becomes the first token-kind layer's twin.

        Raises:
            ConfigError: the model has no token-kind layer to copy.
        """
        token_spec = self._token_spec
        if token_spec is None:
            raise ConfigError(
                f"model {self.name!r} has no full-attention layer, so no dense equivalent"
            )
        return attrs.evolve(
            self,
            name=f"{self.name} (full attention)",
            layers=tuple(None if layer is None else token_spec for layer in self.layers),
        )

    @property
    def _token_spec(self) -> TokenSpec | None:
        spec = self.groups[0].layer_spec
        return spec if isinstance(spec, _TOKEN_TYPES) else None

    def fingerprint(self) -> bytes:
        """16 bytes over name, revision, granule and every layer; the same in every process."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> bytes:
        text = json.dumps(
            [
                "prfaas-model-1",
                self.name,
                self.revision,
                self.granule_tokens,
                [_canonical_layer(layer) for layer in self.layers],
            ],
            separators=(",", ":"),
        )
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def describe(self) -> str:
        """Return a few lines for people: every group, bytes per token and fixed bytes."""
        lines = [f"{self.name}: {len(self.layers)} layers, {len(self.groups)} KV cache groups"]
        for group in self.groups:
            if group.is_token_kind:
                size = f"{group.row_bytes:,} B per token"
            else:
                size = f"{group.slot_bytes / 2**20:,.1f} MiB per request"
            lines.append(f"  {group.group_id}: {group.num_layers} x {group.name}, {size}")
        lines.append(
            f"  total: {self.bytes_per_token:,} B per token + {self.fixed_bytes / 2**20:,.1f} MiB"
        )
        return "\n".join(lines)
