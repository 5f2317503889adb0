"""What one layer keeps per request: rows per token, a window of rows, or one fixed-size state.

Two families of kinds, because they are shared differently between requests:

    token kinds   FullAttentionSpec, MLASpec        one row per token, stored in blocks;
                                                    any whole-block prefix can be reused
    slot kinds    SlidingWindowSpec, LinearStateSpec  one slot per request; reusable only
                                                    by a prefix of exactly the same length
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, TypeAlias

import attrs

from prfaas.core import DType
from prfaas.errors import ConfigError


def check_count(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Attrs validator: refuse anything but a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{type(instance).__name__}.{attribute.name} is {value!r}; "
            "it must be a whole number of at least 1"
        )


def _check_dtype(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, DType):
        raise ConfigError(
            f"{type(instance).__name__}.{attribute.name} is {value!r}; use a prfaas.core.DType"
        )


def check_num_tokens(num_tokens: int) -> None:
    """Refuse anything but a whole number of at least 0 with a ``ConfigError``."""
    if type(num_tokens) is not int or num_tokens < 0:
        raise ConfigError(f"num_tokens is {num_tokens!r}; a length is a whole number of at least 0")


@attrs.frozen(kw_only=True)
class CacheDTypes:
    """The dtypes of KV rows and windows, of recurrent states, and of convolution states."""

    kv: DType
    state: DType
    conv: DType


@attrs.frozen(kw_only=True)
class TensorPart:
    """A named dense tensor inside a row or a slot; the parts of one are stored back to back."""

    name: str
    shape: tuple[int, ...] = attrs.field()
    dtype: DType = attrs.field(validator=_check_dtype)

    @shape.validator
    def _check_shape(self, _: object, value: object) -> None:
        if not (
            isinstance(value, tuple) and value and all(type(d) is int and d > 0 for d in value)
        ):
            raise ConfigError(
                f"part {self.name!r} has shape {value!r}; "
                "use a tuple of at least 1 whole number, each at least 1"
            )

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _key_value_parts(
    num_kv_heads: int, key_dim: int, value_dim: int, dtype: DType
) -> tuple[TensorPart, ...]:
    return (
        TensorPart(name="key", shape=(num_kv_heads, key_dim), dtype=dtype),
        TensorPart(name="value", shape=(num_kv_heads, value_dim), dtype=dtype),
    )


@attrs.frozen(kw_only=True)
class FullAttentionSpec:
    """Softmax attention over the whole prefix with grouped KV heads (MHA, GQA, MQA).

    One token row is K ``[num_kv_heads, key_dim]`` followed by V ``[num_kv_heads, value_dim]``.
    """

    kind: ClassVar[str] = "full_attention"
    is_token_kind: ClassVar[bool] = True

    num_kv_heads: int = attrs.field(validator=check_count)
    key_dim: int = attrs.field(validator=check_count)
    value_dim: int = attrs.field(validator=check_count)
    dtype: DType = attrs.field(validator=_check_dtype)

    @property
    def parts(self) -> tuple[TensorPart, ...]:
        """The parts of one token row, in order."""
        return _key_value_parts(self.num_kv_heads, self.key_dim, self.value_dim, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes per token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def entry_bytes(self, num_tokens: int) -> int:
        """Bytes this layer keeps for a request of ``num_tokens``."""
        check_num_tokens(num_tokens)
        return num_tokens * self.row_bytes


@attrs.frozen(kw_only=True)
class MLASpec:
    """Multi-head latent attention, cached compressed.

    One token row is the latent ``[kv_lora_rank]`` followed by the rotary key ``[rope_dim]``.
    """

    kind: ClassVar[str] = "mla"
    is_token_kind: ClassVar[bool] = True

    kv_lora_rank: int = attrs.field(validator=check_count)
    rope_dim: int = attrs.field(validator=check_count)
    dtype: DType = attrs.field(validator=_check_dtype)

    @property
    def parts(self) -> tuple[TensorPart, ...]:
        """The parts of one token row, in order."""
        return (
            TensorPart(name="latent", shape=(self.kv_lora_rank,), dtype=self.dtype),
            TensorPart(name="rope", shape=(self.rope_dim,), dtype=self.dtype),
        )

    @property
    def row_bytes(self) -> int:
        """Bytes per token."""
        return (self.kv_lora_rank + self.rope_dim) * self.dtype.itemsize

    def entry_bytes(self, num_tokens: int) -> int:
        """Bytes this layer keeps for a request of ``num_tokens``."""
        check_num_tokens(num_tokens)
        return num_tokens * self.row_bytes


@attrs.frozen(kw_only=True)
class SlidingWindowSpec:
    """Softmax attention over the newest tokens only.

    Keeps the newest ``min(n, window_tokens)`` rows, oldest first; a row is laid out as in
    ``FullAttentionSpec``. ``window_tokens`` counts the rows *kept*: a layer in which a token sees
    itself and 127 others keeps 127 between steps.
    """

    kind: ClassVar[str] = "sliding_window"
    is_token_kind: ClassVar[bool] = False

    num_kv_heads: int = attrs.field(validator=check_count)
    key_dim: int = attrs.field(validator=check_count)
    value_dim: int = attrs.field(validator=check_count)
    window_tokens: int = attrs.field(validator=check_count)
    dtype: DType = attrs.field(validator=_check_dtype)

    @property
    def parts(self) -> tuple[TensorPart, ...]:
        """The parts of one row of the window, in order."""
        return _key_value_parts(self.num_kv_heads, self.key_dim, self.value_dim, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes per token inside the window."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of a full window."""
        return self.window_tokens * self.row_bytes

    def entry_bytes(self, num_tokens: int) -> int:
        """Bytes this layer keeps for a request of ``num_tokens``."""
        check_num_tokens(num_tokens)
        return min(num_tokens, self.window_tokens) * self.row_bytes


@attrs.frozen(kw_only=True)
class LinearStateSpec:
    """The recurrent state of a linear-attention, state-space or short-convolution layer.

    Its size does not depend on the length; the slot holds ``parts`` back to back.
    """

    kind: ClassVar[str] = "linear_state"
    is_token_kind: ClassVar[bool] = False

    parts: tuple[TensorPart, ...] = attrs.field()

    @parts.validator
    def _check_parts(self, _: object, value: tuple[TensorPart, ...]) -> None:
        if not (isinstance(value, tuple) and value):
            raise ConfigError(
                f"parts is {value!r}; use a tuple of at least 1 TensorPart, or None as the layer"
            )
        names = [part.name for part in value]
        if len(set(names)) < len(names):
            raise ConfigError(f"part names {names} repeat; name every part of a state once")

    @classmethod
    def delta_rule(
        cls,
        *,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        conv_channels: int = 0,
        conv_columns: int = 0,
        state_dtype: DType = DType.FLOAT32,
        conv_dtype: DType = DType.BFLOAT16,
    ) -> LinearStateSpec:
        """Build the state of a delta-rule layer or of its relatives.

        Parts are ``recurrent [num_heads, key_dim, value_dim]`` (absent when ``num_heads`` is 0,
        as in a pure short convolution) and ``conv [conv_channels, conv_columns]`` (absent when
        ``conv_columns`` is 0, as in lightning attention). ``conv_columns`` is the kernel width
        minus 1: the oldest column is never read again. Mamba2 passes its head and state sizes as
        ``key_dim`` and ``value_dim``.
        """
        parts = []
        if num_heads:
            shape = (num_heads, key_dim, value_dim)
            parts.append(TensorPart(name="recurrent", shape=shape, dtype=state_dtype))
        if conv_columns:
            shape_2d = (conv_channels, conv_columns)
            parts.append(TensorPart(name="conv", shape=shape_2d, dtype=conv_dtype))
        return cls(parts=tuple(parts))

    @property
    def slot_bytes(self) -> int:
        """Bytes of the state."""
        return sum(part.num_bytes for part in self.parts)

    def entry_bytes(self, num_tokens: int) -> int:
        """Bytes this layer keeps for a request of ``num_tokens``: the same for every length."""
        check_num_tokens(num_tokens)
        return self.slot_bytes


TokenSpec: TypeAlias = FullAttentionSpec | MLASpec
SlotSpec: TypeAlias = SlidingWindowSpec | LinearStateSpec
LayerSpec: TypeAlias = TokenSpec | SlotSpec
