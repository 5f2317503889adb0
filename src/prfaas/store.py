"""The bytes of a pool in host memory: what a cache's block ids and slots stand for."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping

from prfaas.cache import PoolGeometry
from prfaas.core import BlockId, GroupId
from prfaas.errors import ConfigError, LocalProtocolError
from prfaas.seams import Memory, Reservation, RowSpan


class HostArena:
    """Page-aligned anonymous host memory, zeroed and touched, so that no request pays for a page.

    Args:
        num_bytes: at least 1.

    Raises:
        ConfigError: ``num_bytes`` is below 1, or more than the system gives.
    """

    def __init__(self, num_bytes: int) -> None:
        if type(num_bytes) is not int or num_bytes < 1:
            raise ConfigError(
                f"num_bytes is {num_bytes!r}; an arena has a whole number of bytes, at least 1"
            )
        try:
            pages = mmap.mmap(-1, num_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the system gives no {num_bytes} bytes of memory ({error}); ask for less"
            ) from error
        buffer = memoryview(pages)
        first_bytes = buffer[:: mmap.PAGESIZE]
        first_bytes[:] = bytes(len(first_bytes))
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._memory: Memory | None = Memory(address=address, num_bytes=num_bytes, buffer=buffer)

    def __repr__(self) -> str:
        if self._memory is None:
            return "<HostArena closed>"
        return f"<HostArena {self._memory.num_bytes} bytes at {self._memory.address:#x}>"

    @property
    def memory(self) -> Memory:
        """The whole arena, for transports. Raises LocalProtocolError after `close`."""
        if self._memory is None:
            raise LocalProtocolError("the arena is closed; end its users before close()")
        return self._memory

    def close(self) -> None:
        """Gives the memory up. Idempotent. Views that somebody still holds stay usable; the system
        gets the memory back with the last of them."""
        self._memory = None


class EntryView:
    """The `EntryMemory` of one reservation."""

    def __init__(self, pool: PoolMemory, tables: Mapping[GroupId, tuple[BlockId, ...]]) -> None:
        self._pool = pool
        self._tables = tables

    def __repr__(self) -> str:
        blocks = ", ".join(f"{g}: {len(table)}" for g, table in self._tables.items())
        return f"<EntryView blocks by group {{{blocks}}}>"

    def rows(self, layer_index: int, start: int, stop: int) -> list[RowSpan]:
        """See `EntryMemory.rows`. Raises ConfigError for rows outside the reserved blocks."""
        geometry = self._pool.geometry
        group_id, position = self._pool.place_of(layer_index)
        table, size = self._tables.get(group_id, ()), geometry.block_size
        if not 0 <= start <= stop <= len(table) * size:
            raise ConfigError(
                f"tokens [{start}, {stop}) of layer {layer_index} are outside its {len(table)} "
                f"reserved blocks of {size} tokens; reserve more, or ask a token-kind layer"
            )
        spans = []
        while start < stop:
            index, first = divmod(start, size)
            num_rows = min(size - first, stop - start)
            span = geometry.layer_span(group_id, table[index], position, first, num_rows)
            spans.append(RowSpan(first_token=start, num_rows=num_rows, data=self._pool.view(*span)))
            start += num_rows
        return spans

    def slot(self, layer_index: int, slots: Mapping[GroupId, BlockId]) -> memoryview:
        """See `EntryMemory.slot`. Raises ConfigError if ``slots`` lacks the layer's group."""
        group_id, position = self._pool.place_of(layer_index)
        if group_id not in slots:
            raise ConfigError(
                f"layer {layer_index} belongs to group {group_id}; slots name {sorted(slots)}"
            )
        return self._pool.view(*self._pool.geometry.slot_span(group_id, slots[group_id], position))


class PoolMemory:
    """A pool's geometry laid over an arena.

    Args:
        arena: must outlive every transfer and every view.
        geometry: fits into the arena.

    Raises:
        ConfigError: the arena is too small.
    """

    def __init__(self, arena: HostArena, geometry: PoolGeometry) -> None:
        if geometry.pool_bytes > arena.memory.num_bytes:
            raise ConfigError(
                f"the pool takes {geometry.pool_bytes} bytes, the arena has "
                f"{arena.memory.num_bytes}; make the arena of geometry.pool_bytes"
            )
        self._arena = arena
        self._geometry = geometry
        self._places = {
            layer_index: (group.group_id, position)
            for group in geometry.spec.groups
            for position, layer_index in enumerate(group.layer_indices)
        }

    def __repr__(self) -> str:
        return f"<PoolMemory {self._geometry.pool_bytes} bytes in {self._arena!r}>"

    @property
    def geometry(self) -> PoolGeometry:
        return self._geometry

    @property
    def memory(self) -> Memory:
        """What transports register; offsets of the geometry are offsets into it."""
        return self._arena.memory

    def place_of(self, layer_index: int) -> tuple[GroupId, int]:
        """(group, position in it) of a model layer. Raises ConfigError if it has no cache."""
        place = self._places.get(layer_index)
        if place is None:
            raise ConfigError(
                f"layer {layer_index} has no cache; layers with one are {sorted(self._places)}"
            )
        return place

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Writable bytes of the pool."""
        buffer = self.memory.buffer
        assert buffer is not None
        return buffer[offset : offset + num_bytes]

    def entry(self, reservation: Reservation) -> EntryView:
        """The rows and states of one reservation; valid until it is released."""
        return EntryView(self, reservation.block_tables)

    def zero(self, group_id: GroupId, slot_id: BlockId) -> None:
        """Clears a state slot in every layer. Fresh slots hold what their last user left."""
        for position in range(self._geometry.units[group_id].num_layers):
            view = self.view(*self._geometry.slot_span(group_id, slot_id, position))
            view[:] = bytes(len(view))
