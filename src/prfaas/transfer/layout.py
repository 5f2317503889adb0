"""The canonical byte space of one shipped entry.

The wire form depends on the model and on the tokens only, never on block sizes or block ids, so two
sides with different pools ship to each other without a conversion:

    group 0                               group 1 (slot kind)
    | layer a: rows s..n | layer b: ... | | layer c: slot | layer d: slot |  ...
    0                                                            num_bytes
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import attrs

from prfaas.core import GroupId
from prfaas.errors import ConfigError
from prfaas.spec import KVCacheGroup, ModelSpec


def entry_group_bytes(spec: ModelSpec, num_tokens: int) -> dict[GroupId, int]:
    """Bytes of each group of a whole entry; the two sides compare them before anything moves."""
    return {group.group_id: group.entry_bytes(num_tokens) for group in spec.groups}


@attrs.frozen(kw_only=True)
class LayerPart:
    """One layer's contiguous share of an entry.

    Attributes:
        group_id: the layer's KV cache group.
        layer_index: position of the layer in the model.
        layer_position: position of the layer within its group.
        offset: first byte in the entry.
        num_bytes: length; 0 where the receiver already holds every row.
        row_bytes: bytes per token of a token kind; None for a slot kind.
    """

    group_id: GroupId
    layer_index: int
    layer_position: int
    offset: int
    num_bytes: int
    row_bytes: int | None


@attrs.frozen
class EntryLayout:
    """The linear byte space of an entry of ``num_tokens``, for a receiver that holds some rows.

    Token kinds ship the rows of tokens ``[start_token, num_tokens)``. Slot kinds ship what they
    keep at ``num_tokens`` in full (a sliding window its valid rows only), for any ``start_token``.

    Args:
        spec: the model's cache.
        num_tokens: tokens that the entry covers.
        start_token: leading tokens whose rows the receiver already holds.

    Raises:
        ConfigError: unless ``0 <= start_token <= num_tokens``.
    """

    spec: ModelSpec = attrs.field(repr=False)
    num_tokens: int
    start_token: int = 0
    num_bytes: int = attrs.field(init=False)
    parts: tuple[LayerPart, ...] = attrs.field(init=False, repr=False, eq=False)
    _part_of_layer: Mapping[int, LayerPart] = attrs.field(init=False, repr=False, eq=False)
    _offsets: tuple[int, ...] = attrs.field(init=False, repr=False, eq=False)

    @num_bytes.default
    def _sum_bytes(self) -> int:
        return self.spec.kv_bytes_delta(self.num_tokens, self.start_token)

    @parts.default
    def _lay_out(self) -> tuple[LayerPart, ...]:
        parts: list[LayerPart] = []
        offset = 0
        for group in self.spec.groups:
            row_bytes, num_bytes = self._layer_bytes(group)
            for position, layer_index in enumerate(group.layer_indices):
                parts.append(
                    LayerPart(
                        group_id=group.group_id,
                        layer_index=layer_index,
                        layer_position=position,
                        offset=offset,
                        num_bytes=num_bytes,
                        row_bytes=row_bytes,
                    )
                )
                offset += num_bytes
        assert offset == self.num_bytes, (offset, self.num_bytes)
        return tuple(parts)

    @_part_of_layer.default
    def _index_layers(self) -> dict[int, LayerPart]:
        return {part.layer_index: part for part in self.parts}

    @_offsets.default
    def _index_offsets(self) -> tuple[int, ...]:
        return tuple(part.offset for part in self.parts)

    def _layer_bytes(self, group: KVCacheGroup) -> tuple[int | None, int]:
        if not group.is_token_kind:
            return None, group.layer_entry_bytes(self.num_tokens)
        row_bytes = group.row_bytes // group.num_layers
        return row_bytes, row_bytes * (self.num_tokens - self.start_token)

    def part(self, layer_index: int) -> LayerPart:
        """The share of one layer. Raises ConfigError for a layer that caches nothing."""
        part = self._part_of_layer.get(layer_index)
        if part is None:
            raise ConfigError(
                f"layer {layer_index} has no cache; "
                f"layers with one are {sorted(self._part_of_layer)}"
            )
        return part

    def rows_range(self, layer_index: int, first_token: int, stop_token: int) -> tuple[int, int]:
        """(offset, bytes) of a token-kind layer's rows of tokens ``[first_token, stop_token)``.

        Rows below ``start_token`` do not travel and are left out, so that the result of a prefill
        step can be passed as it is.

        Raises:
            ConfigError: a slot-kind layer, or tokens beyond the entry.
        """
        part = self.part(layer_index)
        if part.row_bytes is None:
            raise ConfigError(f"layer {layer_index} keeps a state, not rows; use state_range")
        if not 0 <= first_token <= stop_token <= self.num_tokens:
            raise ConfigError(
                f"tokens [{first_token}, {stop_token}) are not inside the entry's "
                f"{self.num_tokens} tokens"
            )
        first = max(first_token, self.start_token) - self.start_token
        stop = max(stop_token, self.start_token) - self.start_token
        return part.offset + first * part.row_bytes, (stop - first) * part.row_bytes

    def state_range(self, layer_index: int) -> tuple[int, int]:
        """(offset, bytes) of a slot-kind layer. Raises ConfigError for a token-kind layer."""
        part = self.part(layer_index)
        if part.row_bytes is not None:
            raise ConfigError(f"layer {layer_index} keeps rows, not a state; use rows_range")
        return part.offset, part.num_bytes

    def parts_in(self, offset: int, num_bytes: int) -> tuple[LayerPart, ...]:
        """The parts that share at least one byte with a range of the entry, in order."""
        first, last = self.part_indices(offset, num_bytes)
        return tuple(part for part in self.parts[first:last] if part.num_bytes)

    def part_indices(self, offset: int, num_bytes: int) -> tuple[int, int]:
        """Half-open positions in ``parts`` of the parts in a range; empty ones may be among them.

        Raises:
            ConfigError: the range is not inside the entry.
        """
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise ConfigError(
                f"{num_bytes} bytes at {offset} are not inside the entry's {self.num_bytes} bytes"
            )
        if not num_bytes:
            return 0, 0
        first = bisect_right(self._offsets, offset) - 1
        return first, bisect_right(self._offsets, offset + num_bytes - 1)
