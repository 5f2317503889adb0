"""Test hooks that damage one kind of cache on its way, to show that the comparison would notice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prfaas.runtime.node import LandingHook
from prfaas.seams import EntryMemory, Reservation
from prfaas.transfer import EntryLayout

KINDS = ("state", "kv")
DAMAGES = ("zero", "axes", "layers")


def sabotage(kind: str, damage: str = "zero") -> LandingHook:
    """A landing hook that damages every entry.

    Args:
        kind: ``state`` for the slot groups, ``kv`` for the token groups.
        damage: ``zero`` clears it, ``axes`` swaps two axes of each tensor, ``layers`` swaps the
            first two layers.
    """
    if kind not in KINDS or damage not in DAMAGES:
        raise ValueError(f"sabotage {kind}/{damage}: kinds are {KINDS}, damages are {DAMAGES}")

    def hook(layout: EntryLayout, memory: EntryMemory, reservation: Reservation) -> None:
        for group in layout.spec.groups:
            if group.is_token_kind == (kind == "kv"):
                layers = [_layer(layout, memory, reservation, i) for i in group.layer_indices]
                _DAMAGE[damage](layers, group.layer_spec)

    return hook


class _Layer:
    """The bytes of one layer of an entry that came over the wire."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views

    def read(self) -> np.ndarray:
        return np.concatenate([np.frombuffer(view, np.uint8) for view in self._views])

    def write(self, data: np.ndarray) -> None:
        for view in self._views:
            view[:] = data[: len(view)].tobytes()
            data = data[len(view) :]


def _layer(
    layout: EntryLayout, memory: EntryMemory, reservation: Reservation, index: int
) -> _Layer:
    spec = layout.spec.layers[index]
    if spec.is_token_kind:
        spans = memory.rows(index, layout.start_token, layout.num_tokens)
        return _Layer([span.data for span in spans])
    slot = memory.slot(index, reservation.tail_slots)
    return _Layer([slot[: spec.entry_bytes(layout.num_tokens)]])


def _zero(layers: list[_Layer], spec: object) -> None:
    for layer in layers:
        layer.write(np.zeros_like(layer.read()))


def _swap_layers(layers: list[_Layer], spec: object) -> None:
    first, second = layers[0].read(), layers[1].read()
    layers[0].write(second)
    layers[1].write(first)


def _swap_axes(layers: list[_Layer], spec: object) -> None:
    for layer in layers:
        data = layer.read().view(np.uint32)
        if spec.is_token_kind:  # tokens against the elements of a row
            rows = data.reshape(-1, spec.row_bytes // 4)
            layer.write(np.ascontiguousarray(rows.T).ravel().view(np.uint8))
            continue
        parts = []
        for part in spec.parts:
            count = part.num_bytes // 4
            tensor, data = data[:count].reshape(part.shape), data[count:]
            parts.append(np.ascontiguousarray(tensor.swapaxes(-1, -2)).ravel())
        layer.write(np.concatenate(parts).view(np.uint8))


_DAMAGE: dict[str, Callable[[list[_Layer], object], None]] = {
    "zero": _zero,
    "axes": _swap_axes,
    "layers": _swap_layers,
}
