"""A request's scattered blocks and states as one run of bytes, and back, in one launch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import torch

from prfaas.errors import ConfigError
from prfaas.kernels.arguments import check_tensor
from prfaas.kernels.dispatch import Path, choose
from prfaas.kernels.packing.copies import copy_pieces, copy_slices
from prfaas.kernels.packing.pieces import Pieces

Regions: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""Tensors of any dtype that are contiguous, all on one device; one tensor is one region."""


def pack(
    regions: Regions,
    pieces: Pieces,
    *,
    out: torch.Tensor | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Gathers pieces of tensors into one run of bytes.

    On a GPU one launch reads the blocks and states of all layers; it runs on the current stream,
    and ``out`` may be read after it there.

    Args:
        regions: what the plan's pieces lie in: a contiguous tensor of any dtype, or a list of them.
        pieces: the plan.
        out: uint8 [pieces.num_bytes] to write into, which shares no memory with a piece; bytes of
            it that belong to no piece stay as they are. By default a new tensor, with zeros there.
        path: see `prfaas.kernels.dispatch`.

    Returns:
        uint8 [pieces.num_bytes].

    Raises:
        ConfigError: a piece outside of its region, pieces that overlap in the packed run, regions
            that are not contiguous or not on one device.
    """
    flat = open_regions(regions, pieces)
    pieces.check_packable()
    device = flat[0].device
    if out is None:
        make = torch.zeros if pieces.has_gaps else torch.empty
        out = make(pieces.num_bytes, dtype=torch.uint8, device=device)
    check_run("out", out, pieces.num_bytes, device)
    check_apart("out", out, flat, pieces)
    _copy("pack", flat, pieces, out, to_packed=True, path=path)
    return out


def unpack(
    packed: torch.Tensor, regions: Regions, pieces: Pieces, *, path: str | None = None
) -> None:
    """Scatters one run of bytes into pieces of tensors; every other byte stays as it is.

    Args:
        packed: uint8 [pieces.num_bytes], which shares no memory with a piece.
        regions, pieces, path: as for `pack`.

    Raises:
        ConfigError: as for `pack`; pieces that overlap in a region.
    """
    flat = open_regions(regions, pieces)
    check_targets(flat, pieces)
    check_run("packed", packed, pieces.num_bytes, flat[0].device)
    check_apart("packed", packed, flat, pieces)
    _copy("unpack", flat, pieces, packed, to_packed=False, path=path)


def _copy(
    op: str,
    regions: Sequence[torch.Tensor],
    pieces: Pieces,
    packed: torch.Tensor,
    *,
    to_packed: bool,
    path: str | None,
) -> None:
    chosen = choose(op, packed.device, path)
    if chosen is Path.REFERENCE:
        copy_slices(regions, pieces, packed, to_packed=to_packed)
    elif chosen is Path.TORCH:
        copy_pieces(regions, pieces, packed, to_packed=to_packed)
    else:
        from prfaas.kernels.packing import launches

        launches.copy(regions, pieces, packed, to_packed=to_packed).run()


def open_regions(regions: Regions, pieces: Pieces) -> list[torch.Tensor]:
    """Regions as bytes, checked against the plan."""
    if not isinstance(pieces, Pieces):
        raise ConfigError(f"pieces is a {type(pieces).__name__}; make a prfaas.kernels.Pieces")
    listed = [regions] if isinstance(regions, torch.Tensor) else list(regions)
    if not listed:
        raise ConfigError("regions is empty; pass at least one tensor, so that a device is known")
    flat = []
    for index, region in enumerate(listed):
        if not isinstance(region, torch.Tensor):
            raise ConfigError(f"regions[{index}] is a {type(region).__name__}; pass a torch.Tensor")
        if not region.is_contiguous():
            raise ConfigError(
                f"regions[{index}] has strides {region.stride()} for shape {list(region.shape)}; "
                "it must be contiguous: name the whole tensor, and cut it by pieces"
            )
        if region.device != listed[0].device:
            raise ConfigError(
                f"regions[{index}] is on {region.device}, regions[0] on {listed[0].device}; all "
                "must be on one device"
            )
        flat.append(region.detach().reshape(-1).view(torch.uint8))
    pieces.check_regions([len(region) for region in flat])
    return flat


def check_targets(regions: Sequence[torch.Tensor], pieces: Pieces) -> None:
    """Refuses pieces that would be unpacked into the same bytes, also where regions share them."""
    pieces.check_unpackable()
    ranges = sorted((region.data_ptr(), region.data_ptr() + len(region)) for region in regions)
    if all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)):
        return
    starts = torch.tensor([region.data_ptr() - ranges[0][0] for region in regions])
    Pieces(starts[pieces.regions] + pieces.offsets, pieces.sizes).check_unpackable()


def check_run(name: str, run: torch.Tensor, num_bytes: int, device: torch.device) -> None:
    """Refuses a packed run of another length, dtype or place."""
    check_tensor(
        name, run, shape=(num_bytes,), dtypes=(torch.uint8,), device=device, contiguous="all"
    )


def check_apart(
    name: str, run: torch.Tensor, regions: Sequence[torch.Tensor], pieces: Pieces
) -> None:
    """Refuses a packed run that lies over one of the pieces: which is read first is undefined."""
    start, stop = run.data_ptr(), run.data_ptr() + run.numel()
    near = [r for r in regions if r.data_ptr() < stop and start < r.data_ptr() + r.numel()]
    if not near:
        return
    bases = torch.tensor([region.data_ptr() for region in regions], dtype=torch.int64)
    begins = bases[pieces.regions] + pieces.offsets
    shared = (begins < stop) & (start < begins + pieces.sizes) & (pieces.sizes > 0)
    if bool(shared.any()):
        piece = int(shared.nonzero()[0])
        raise ConfigError(
            f"{name} shares memory with piece {piece} in region {int(pieces.regions[piece])}; use "
            "memory of its own"
        )
