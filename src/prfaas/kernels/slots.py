"""Which slots of a state pool the requests of a decode batch have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arguments import whole_numbers

_FAR = 2**62
"""Distance between slots where there is only one, or where nobody looked."""


class Slots:
    """Slot ids of the requests of a decode batch, checked: inside the pool, none twice.

    Args:
        ids: per request its slot; -1 for a padding row, which is skipped.
        num_slots: slots of the pool.
        device: where the pool is.

    Raises:
        ConfigError: an id outside the pool, or one that occurs twice (two requests would overwrite
            one state).
    """

    def __init__(self, ids: Iterable[int], *, num_slots: int, device: torch.device | str) -> None:
        values = whole_numbers("slots", ids)
        seen: set[int] = set()
        for index, slot in enumerate(values):
            if not -1 <= slot < num_slots:
                raise ConfigError(
                    f"slots holds {slot} at entry {index}; the pool has slots 0 to "
                    f"{num_slots - 1}, and -1 is a padding row"
                )
            if slot in seen:
                raise ConfigError(f"slots holds {slot} twice; a state has one request at a time")
            if slot >= 0:
                seen.add(slot)
        self.num_slots = num_slots
        self.ids = torch.tensor(values, dtype=torch.int64, device=device)
        self.num_padding: int | None = values.count(-1)
        used = sorted(seen)
        self._min_distance = min((b - a for a, b in itertools.pairwise(used)), default=_FAR)

    @classmethod
    def trusted(cls, ids: torch.Tensor, *, num_slots: int) -> Slots:
        """Over an int64 tensor that is not looked at, for captured graphs whose ids change later.
        An id outside of the pool is then undefined behaviour."""
        if ids.dtype != torch.int64 or ids.ndim != 1:
            raise ConfigError(f"ids is {ids.dtype} {list(ids.shape)}; use int64 [num_requests]")
        made = cls.__new__(cls)
        made.num_slots, made.ids, made.num_padding = num_slots, ids, None
        made._min_distance = _FAR
        return made

    @classmethod
    def of(cls, slots: Slots | Iterable[int], pool: torch.Tensor, num_requests: int) -> Slots:
        """What an operation was given, checked against its pool and its number of requests."""
        if not isinstance(slots, Slots):
            slots = cls(slots, num_slots=pool.shape[0], device=pool.device)
        if slots.num_slots > pool.shape[0]:
            raise ConfigError(
                f"slots were checked against {slots.num_slots} slots, the pool has {pool.shape[0]}"
            )
        if slots.ids.shape[0] != num_requests:
            raise ConfigError(
                f"slots has {slots.ids.shape[0]} entries for {num_requests} requests; give one each"
            )
        if slots.ids.device != pool.device:
            raise ConfigError(f"slots are on {slots.ids.device}, the pool is on {pool.device}")
        state_elements = math.prod(pool.shape[1:])
        if pool.shape[0] > 1 and slots._min_distance * pool.stride(0) < state_elements:
            raise ConfigError(
                f"two slots are {slots._min_distance} apart, {pool.stride(0)} elements each, and a "
                f"state has {state_elements}: their states would overlap"
            )
        return slots

    def __repr__(self) -> str:
        return f"<Slots of {self.ids.shape[0]} requests among {self.num_slots}>"
