"""Where every block and state slot of a pool lies, in bytes.

    pool   | slab 0 | slab 1 | ...                  equal slabs, each owned by one group or none
    slab   | unit 0 | unit 1 | ... | rest           units of one group, 64-byte aligned
    block  | layer a: block_size rows | layer b: block_size rows | ...
    slot   | layer a: state           | layer b: state           | ...

Block ids count units through the whole pool as if every slab belonged to the group, so an id alone
gives the address, and a large state never inflates a token block.
"""

from __future__ import annotations

from itertools import islice

import attrs

from prfaas.core import BlockId, GroupId, cdiv
from prfaas.errors import ConfigError
from prfaas.spec import KVCacheGroup, ModelSpec

ALIGNMENT_BYTES = 64
_MIB = 1 << 20
_MAX_CANDIDATES = 64


def _align(num_bytes: int) -> int:
    return cdiv(num_bytes, ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@attrs.frozen(kw_only=True)
class UnitLayout:
    """One group's unit: a block of a token group or a slot of a slot group.

    Attributes:
        group_id: the group.
        is_token_kind: blocks of rows, or slots.
        num_layers: layers in a unit.
        row_bytes: bytes of one token in one layer; None for slots.
        layer_bytes: payload of one layer.
        layer_stride_bytes: distance between layers, a multiple of 64.
        units_per_slab: units that one slab holds.
    """

    group_id: GroupId
    is_token_kind: bool
    num_layers: int
    row_bytes: int | None
    layer_bytes: int
    layer_stride_bytes: int
    units_per_slab: int

    @property
    def unit_bytes(self) -> int:
        """Payload of a unit: ``block_size * row_bytes`` or ``slot_bytes`` of the group."""
        return self.num_layers * self.layer_bytes

    @property
    def unit_stride_bytes(self) -> int:
        """Distance between units of one slab."""
        return self.num_layers * self.layer_stride_bytes


def _lay_out(group: KVCacheGroup, block_size: int, slab_bytes: int) -> UnitLayout:
    if group.is_token_kind:
        row_bytes: int | None = group.row_bytes // group.num_layers
        layer_bytes = block_size * group.row_bytes // group.num_layers
    else:
        row_bytes = None
        layer_bytes = group.slot_bytes // group.num_layers
    stride = _align(layer_bytes)
    return UnitLayout(
        group_id=group.group_id,
        is_token_kind=group.is_token_kind,
        num_layers=group.num_layers,
        row_bytes=row_bytes,
        layer_bytes=layer_bytes,
        layer_stride_bytes=stride,
        units_per_slab=slab_bytes // (group.num_layers * stride),
    )


def _check_block_size(spec: ModelSpec, block_size: int) -> None:
    granule = spec.granule_tokens
    if type(block_size) is not int or block_size < 1 or block_size % granule:
        raise ConfigError(
            f"block_size is {block_size!r} tokens; it must be a multiple of the "
            f"{granule}-token granule that {spec.name!r} is hashed by, and at least {granule}"
        )


def _check_whole(name: str, value: object) -> None:
    if type(value) is not int:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of bytes or slabs")


@attrs.frozen(kw_only=True)
class PoolGeometry:
    """Sizes and offsets of a pool; a value. `for_spec` picks the slabs.

    Attributes:
        spec: the model.
        block_size: tokens per block of a token group, a multiple of ``spec.granule_tokens``.
        slab_bytes: size of a slab, a multiple of 64 that holds the largest unit.
        num_slabs: slabs in the pool, at least one per group.
        units: one layout per group, by group id.

    Raises:
        ConfigError: one of the above does not hold.
    """

    spec: ModelSpec = attrs.field(repr=lambda spec: spec.name)
    block_size: int = attrs.field()
    slab_bytes: int = attrs.field()
    num_slabs: int = attrs.field()
    units: tuple[UnitLayout, ...] = attrs.field(init=False, eq=False, repr=False)

    @units.default
    def _lay_out_groups(self) -> tuple[UnitLayout, ...]:
        _check_block_size(self.spec, self.block_size)
        return tuple(_lay_out(g, self.block_size, self.slab_bytes) for g in self.spec.groups)

    @units.validator
    def _check_slabs(self, _: object, units: tuple[UnitLayout, ...]) -> None:
        for name, value in (("slab_bytes", self.slab_bytes), ("num_slabs", self.num_slabs)):
            _check_whole(name, value)
        largest = max(unit.unit_stride_bytes for unit in units)
        if self.slab_bytes < largest or self.slab_bytes % ALIGNMENT_BYTES:
            raise ConfigError(
                f"slab_bytes is {self.slab_bytes}; it must be a multiple of {ALIGNMENT_BYTES} and "
                f"at least {largest}, the largest block or state slot of {self.spec.name!r}"
            )
        if self.num_slabs < len(units):
            need = len(units) * self.slab_bytes
            raise ConfigError(
                f"the pool has {self.num_slabs} slabs of {self.slab_bytes} bytes and "
                f"{self.spec.name!r} has {len(units)} KV cache groups, which need one slab each; "
                f"raise pool_bytes to at least {need}, or lower block_size"
            )

    @classmethod
    def for_spec(
        cls,
        spec: ModelSpec,
        *,
        block_size: int,
        pool_bytes: int,
        slab_bytes: int | None = None,
        max_tokens: int | None = None,
    ) -> PoolGeometry:
        """Lays a pool of at most ``pool_bytes`` out.

        Args:
            spec: the model.
            block_size: tokens per block.
            pool_bytes: memory at hand.
            slab_bytes: by default about 1 MiB or the largest unit, such that little is wasted.
            max_tokens: longest prompt that will be served, if known.

        Raises:
            ConfigError: as for the class; or no block would ever be complete.
        """
        _check_block_size(spec, block_size)
        _check_whole("pool_bytes", pool_bytes)
        if max_tokens is not None and block_size > max_tokens:
            raise ConfigError(
                f"block_size is {block_size} tokens and max_tokens is {max_tokens}: no block would "
                f"ever be complete, so nothing would be cached; lower block_size to at most "
                f"{max_tokens}"
            )
        if slab_bytes is None:
            units = [_lay_out(group, block_size, 0) for group in spec.groups]
            slab_bytes = _pick_slab_bytes([u.unit_stride_bytes for u in units], pool_bytes)
        num_slabs = pool_bytes // slab_bytes if slab_bytes > 0 else 0
        return cls(spec=spec, block_size=block_size, slab_bytes=slab_bytes, num_slabs=num_slabs)

    @property
    def pool_bytes(self) -> int:
        """Bytes that the slabs take."""
        return self.num_slabs * self.slab_bytes

    @property
    def token_groups(self) -> tuple[GroupId, ...]:
        return tuple(unit.group_id for unit in self.units if unit.is_token_kind)

    @property
    def slot_groups(self) -> tuple[GroupId, ...]:
        return tuple(unit.group_id for unit in self.units if not unit.is_token_kind)

    def unit_offset(self, group_id: GroupId, block_id: BlockId) -> int:
        """First byte of a block or slot. Raises ConfigError for an id outside the pool."""
        unit = self.units[group_id]
        slab, position = divmod(block_id, unit.units_per_slab)
        if not 0 <= slab < self.num_slabs:
            raise ConfigError(
                f"block {block_id} of group {group_id} is outside the pool; ids are below "
                f"{self.num_slabs * unit.units_per_slab}"
            )
        return slab * self.slab_bytes + position * unit.unit_stride_bytes

    def layer_span(
        self,
        group_id: GroupId,
        block_id: BlockId,
        layer_position: int,
        first_row: int,
        num_rows: int,
    ) -> tuple[int, int]:
        """(offset, bytes) in the pool of consecutive rows of one layer of a token block.

        Args:
            group_id: a token group.
            block_id: the block.
            layer_position: position of the layer in ``KVCacheGroup.layer_indices``.
            first_row: first row, from the start of the block.
            num_rows: rows; the last one is still inside the block.

        Raises:
            ConfigError: no such rows.
        """
        unit = self.units[group_id]
        inside = first_row >= 0 and num_rows >= 0 and first_row + num_rows <= self.block_size
        if unit.row_bytes is None or not inside or not 0 <= layer_position < unit.num_layers:
            raise ConfigError(
                f"group {group_id} has no rows [{first_row}, {first_row + num_rows}) of layer "
                f"position {layer_position}; a block has {self.block_size} rows in each of "
                f"{unit.num_layers} layers, and only token groups have blocks"
            )
        base = self.unit_offset(group_id, block_id) + layer_position * unit.layer_stride_bytes
        return base + first_row * unit.row_bytes, num_rows * unit.row_bytes

    def slot_span(
        self, group_id: GroupId, slot_id: BlockId, layer_position: int
    ) -> tuple[int, int]:
        """(offset, bytes) in the pool of one layer's state in a slot; else ConfigError."""
        unit = self.units[group_id]
        if unit.is_token_kind or not 0 <= layer_position < unit.num_layers:
            raise ConfigError(
                f"group {group_id} has no state at layer position {layer_position}; it has "
                f"{unit.num_layers} layers, and only slot groups have states"
            )
        base = self.unit_offset(group_id, slot_id) + layer_position * unit.layer_stride_bytes
        return base, unit.layer_bytes


def _pick_slab_bytes(strides: list[int], pool_bytes: int) -> int:
    """The smallest multiple of the largest unit, from about 1 MiB on, that wastes little.

    Small pools get smaller slabs, so that every group can own a few of them.
    """
    largest = max(strides)
    floor = max(largest, min(_MIB, pool_bytes // (8 * len(strides))))
    limit = min(4 * floor, pool_bytes // len(strides))
    candidates = range(cdiv(floor, largest) * largest, limit + 1, largest)

    def waste(slab_bytes: int) -> float:
        in_slab = max(slab_bytes % stride for stride in strides) / slab_bytes
        return in_slab + pool_bytes % slab_bytes / pool_bytes

    best = largest
    for slab_bytes in islice(candidates, _MAX_CANDIDATES):
        if best == largest or waste(slab_bytes) < waste(best):
            best = slab_bytes
        if waste(best) < 1 / 64:
            break
    return best
