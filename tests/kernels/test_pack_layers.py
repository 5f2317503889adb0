"""Requests in one tensor per layer, or per part of a layer, in the canonical wire form."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch

from kernel_paths import PATHS
from packing_cases import as_bytes, of_bytes, random_region
from pools import HYBRID, STATE, Pool, tiny_spec
from prfaas.core import BlockId, GroupId
from prfaas.errors import ConfigError
from prfaas.kernels.packing import entry_pieces, layer_pieces, pack, unpack
from prfaas.spec import ModelSpec, SlidingWindowSpec
from prfaas.transfer import EntryLayout

NUM_UNITS = 40


class Server:
    """Tensors of every layer, and places in them for one request.

    Args:
        spec: the model.
        block_size: tokens per block.
        is_split: one tensor per part of a row or state, else one per layer.
        seed: of contents and places.
    """

    def __init__(self, spec: ModelSpec, block_size: int, *, is_split: bool, seed: int) -> None:
        rng = random.Random(seed)
        self.block_size = block_size
        self.tensors: list[torch.Tensor] = []
        self.regions: dict[int, list[int]] = {}
        for index, layer in enumerate(spec.layers):
            if layer is None:
                continue
            rows = block_size if layer.is_token_kind else 1
            if isinstance(layer, SlidingWindowSpec):
                rows = layer.window_tokens
            sizes = [part.num_bytes for part in layer.parts]
            for size in sizes if is_split else [sum(sizes)]:
                self.regions.setdefault(index, []).append(len(self.tensors))
                region = random_region(NUM_UNITS * rows * size, rng.randint(0, 10**6))
                self.tensors.append(region.view(NUM_UNITS, rows, size))
        groups = spec.groups
        self.tables: Mapping[GroupId, Sequence[BlockId]] = {
            g.group_id: [BlockId(i) for i in rng.sample(range(NUM_UNITS), NUM_UNITS)]
            for g in groups
            if g.is_token_kind
        }
        self.slots = {
            g.group_id: BlockId(rng.randrange(NUM_UNITS)) for g in groups if not g.is_token_kind
        }

    def pack(self, layout: EntryLayout, path: str) -> torch.Tensor:
        return pack(self.tensors, self._pieces(layout), path=path)

    def unpack(self, packed: torch.Tensor, layout: EntryLayout, path: str) -> None:
        unpack(packed, self.tensors, self._pieces(layout), path=path)

    def _pieces(self, layout: EntryLayout) -> object:
        return layer_pieces(
            layout, self.regions, self.tables, self.slots, block_size=self.block_size
        )


def by_hand(server: Server, layout: EntryLayout) -> bytes:
    """The canonical form, row by row."""
    run = bytearray()
    for part in layout.parts:
        tensors = [server.tensors[region] for region in server.regions[part.layer_index]]
        if part.row_bytes is not None:
            table = server.tables[part.group_id]
            for token in range(layout.start_token, layout.num_tokens):
                block, row = divmod(token, server.block_size)
                for tensor in tensors:
                    run += as_bytes(tensor[table[block], row])
            continue
        slot, before = server.slots[part.group_id], len(run)
        for row in range(tensors[0].shape[1]):
            if len(run) - before < part.num_bytes:
                for tensor in tensors:
                    run += as_bytes(tensor[slot, row])
    return bytes(run)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("num_tokens", "start"), [(21, 0), (37, 13), (5, 5), (3, 1)])
def test_every_server_speaks_the_canonical_form(
    num_tokens: int, start: int, is_split: bool, path: str
) -> None:
    layout = EntryLayout(HYBRID, num_tokens, start)
    here = Server(HYBRID, 4, is_split=is_split, seed=1)
    packed = here.pack(layout, path)
    assert as_bytes(packed) == by_hand(here, layout)

    there = Server(HYBRID, 6, is_split=not is_split, seed=2)
    there.unpack(packed, layout, path)
    assert by_hand(there, layout) == as_bytes(packed)

    pool = Pool(HYBRID, num_tokens, 8, 0, random.Random(3))
    memory = of_bytes(bytes(pool.memory))
    unpack(packed, memory, entry_pieces(pool.place(layout)), path=path)
    assert as_bytes(pack(memory, entry_pieces(pool.place(layout)), path=path)) == as_bytes(packed)


def test_a_block_of_whole_rows_is_one_piece() -> None:
    layout = EntryLayout(HYBRID, 20, 2)
    tables = {group_id: [5, 6, 1, 3, 0] for group_id in (0, 1)}
    regions = {index: [index] for index, layer in enumerate(HYBRID.layers) if layer}
    whole = layer_pieces(layout, regions, tables, {2: 0, 3: 0}, block_size=4)  # type: ignore[arg-type]
    # Blocks 5 and 6 are neighbours: 4 pieces for each of 3 layers with rows, and 3 states.
    assert whole.num_pieces == 4 * 3 + 3


def test_refused_arguments() -> None:
    layout, server = EntryLayout(HYBRID, 9), Server(HYBRID, 4, is_split=False, seed=0)

    def refused(message: str, **change: object) -> None:
        arguments = {
            "regions": server.regions,
            "block_tables": server.tables,
            "slots": server.slots,
            "block_size": 4,
        } | change
        with pytest.raises(ConfigError, match=message):
            layer_pieces(layout, **arguments)  # type: ignore[arg-type]

    refused("regions names 0 tensors for layer 5; .* key, value", regions={2: [0]})
    refused("regions names 3 tensors for layer 0", regions=server.regions | {0: [0, 1, 2]})
    refused(r"block_tables: group 0 .* has 2 blocks .* give 3 of", block_tables={0: [1, 2]})
    refused(r"block_tables: group 1 .* has 0 blocks", block_tables={0: [1, 2, 3]})
    refused("slots: group 2 .* has no slot", slots={})
    refused("block_size is 0", block_size=0)


def test_a_model_without_rows() -> None:
    spec = tiny_spec(STATE)
    server = Server(spec, 4, is_split=True, seed=4)
    layout = EntryLayout(spec, 1000)
    assert as_bytes(server.pack(layout, PATHS[0])) == by_hand(server, layout)
