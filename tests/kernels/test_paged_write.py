"""New rows land where later reads look for them, and nowhere else."""

from __future__ import annotations

import mmap

import pytest
import torch

from kernel_paths import DEVICE, PATHS
from poison import PoisonedMemory
from prfaas.errors import ConfigError
from prfaas.kernels import PageTable, Sequences
from prfaas.kernels.attention.write import paged_write

LENGTHS, HELD = (5, 0, 1, 19), (5, 3, 17, 40)
PAGES = ((7,), (2,), (9, 0), (4, 11, 3))


def table(page_size: int = 16, num_pages: int = 12) -> PageTable:
    return PageTable(PAGES, HELD, page_size=page_size, num_pages=num_pages, device=DEVICE)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 20), (1500,)])
def test_it_equals_writing_one_by_one(
    path: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    memory = PoisonedMemory()
    values = torch.randint(-99, 99, (sum(LENGTHS), *shape)).to(dtype).to(DEVICE)
    before = torch.randint(-99, 99, (12, 16, *shape)).to(dtype).to(DEVICE)
    rows = memory.place(values, row_padding=3)
    got, want = memory.place(before, row_padding=5), before.clone()
    sequences = Sequences.of_lengths(LENGTHS)
    paged_write(rows, got, table(), cu_seqlens=sequences, path=path)
    paged_write(values, want, table(), cu_seqlens=sequences, path="reference")
    assert torch.equal(got, want)
    assert not torch.equal(want, before)
    memory.check()


@pytest.mark.parametrize("path", PATHS)
def test_a_decode_step_writes_one_token_per_request(path: str) -> None:
    cache = torch.zeros(12, 16, 2, 4, device=DEVICE)
    one_each = Sequences.of_lengths([1] * 4)
    paged_write(torch.ones(4, 2, 4, device=DEVICE), cache, table(), cu_seqlens=one_each, path=path)
    written = cache.sum(dim=(2, 3)).nonzero().tolist()
    assert written == [[0, 0], [2, 2], [3, 7], [7, 4]]


@pytest.mark.parametrize("path", PATHS)
def test_heads_far_apart(path: str) -> None:
    """H44: the third head lies beyond 2^31 elements. Never touched memory costs nothing."""
    far = 2**30
    if DEVICE.type == "cpu":
        pages = mmap.mmap(-1, 2 * far + 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=torch.int8)
    else:
        memory = torch.zeros(2 * far + 4096, dtype=torch.int8, device=DEVICE)
    cache = memory.as_strided((12, 16, 3, 4), (64, 4, far, 1))
    rows = torch.arange(12, dtype=torch.int8, device=DEVICE).view(1, 3, 4)
    one = PageTable([[5]], [3], page_size=16, num_pages=12, device=DEVICE)
    paged_write(rows, cache, one, path=path)
    assert torch.equal(cache[5, 2], rows[0])


def test_the_door_names_what_is_wrong() -> None:
    rows, cache = torch.ones(4, 2, 4, device=DEVICE), torch.ones(12, 16, 2, 4, device=DEVICE)
    with pytest.raises(ConfigError, match="cache has dtype"):
        paged_write(rows, cache.half(), table())
    with pytest.raises(ConfigError, match="cache has shape"):
        paged_write(rows, cache[:, :8], table())
    with pytest.raises(ConfigError, match="page_table was checked against 12"):
        paged_write(rows, cache[:7], table())
    with pytest.raises(ConfigError, match="cu_seqlens has 1 sequences"):
        paged_write(rows, cache, table(), cu_seqlens=[0, 4])
    with pytest.raises(ConfigError, match="request 1 is 3, less than its 4 new"):
        paged_write(torch.ones(4, 2, 4, device=DEVICE), cache, table(), cu_seqlens=[0, 0, 4, 4, 4])
    with pytest.raises(ConfigError, match="cu_seqlens has 1 sequences, page_table 4"):
        paged_write(rows, cache, table())
    with pytest.raises(ConfigError, match="rows requires a gradient"):
        paged_write(rows.clone().requires_grad_(), cache, table(), cu_seqlens=[0, 1, 2, 3, 4])
    with pytest.raises(ConfigError, match="cu_seqlens ends with 3"):
        paged_write(rows, cache, table(), cu_seqlens=[0, 1, 1, 2, 3])
