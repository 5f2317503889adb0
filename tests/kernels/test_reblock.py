"""Token rows between blocks of different sizes."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_paths import DEVICE, PATHS, RUNS_TRITON
from packing_cases import ALL_PATHS
from poison import PoisonedMemory
from prfaas.errors import ConfigError
from prfaas.kernels.launch import Launch
from prfaas.kernels.packing import reblock


def cache(num_blocks: int, size: int, *row: int, first: int = 0) -> torch.Tensor:
    """Each row holds numbers of its own."""
    shape = (num_blocks, size, *row)
    count = torch.Size(shape).numel()
    return (torch.arange(count, device=DEVICE) + first).to(torch.int32).view(shape)


def check(
    source: torch.Tensor,
    source_blocks: list[int],
    target: torch.Tensor,
    target_blocks: list[int],
    num_tokens: int,
    path: str,
) -> None:
    want = target.clone()
    for token in range(num_tokens):
        block, row = divmod(token, target.shape[1])
        from_block, from_row = divmod(token, source.shape[1])
        want[target_blocks[block], row] = source[source_blocks[from_block], from_row]
    reblock(source, source_blocks, target, target_blocks, num_tokens, path=path)
    assert torch.equal(target, want)


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize(("a", "b"), [(16, 24), (24, 16), (16, 64), (64, 16), (7, 5), (8, 8)])
@pytest.mark.parametrize("num_tokens", [1, 63, 96])
def test_sizes_that_need_not_divide(a: int, b: int, num_tokens: int, path: str) -> None:
    rng = random.Random(a * b)
    memory = PoisonedMemory()
    source = memory.place(cache(20, a, 2, 6))
    target = memory.place(cache(25, b, 2, 6, first=10**6))
    blocks = [rng.sample(range(n), -(-num_tokens // size)) for n, size in ((20, a), (25, b))]
    check(source, blocks[0], target, blocks[1], num_tokens, path)
    memory.check()


@settings(
    max_examples=10 if RUNS_TRITON else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    a=st.integers(1, 9),
    b=st.integers(1, 9),
    num_tokens=st.integers(0, 40),
    row=st.sampled_from([(), (1,), (3,), (4, 2)]),
    seed=st.integers(0, 99),
)
def test_any_sizes(a: int, b: int, num_tokens: int, row: tuple[int, ...], seed: int) -> None:
    rng = random.Random(seed)
    blocks = [rng.sample(range(45), -(-num_tokens // size)) for size in (a, b)]
    for path in PATHS:
        check(
            cache(45, a, *row),
            blocks[0],
            cache(45, b, *row, first=9999),
            blocks[1],
            num_tokens,
            path,
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_odd_rows_and_small_dtypes(dtype: torch.dtype, path: str) -> None:
    source = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    target = torch.zeros(3, 12, 3, device=DEVICE).to(dtype)
    reblock(source, [5, 1, 2], target, [2], 11, path=path)
    want = source[[5, 1, 2]].float().reshape(12, 3)
    want[11] = 0
    assert torch.equal(target[2].float(), want)
    assert not target[:2].float().any()


@pytest.mark.parametrize("path", PATHS)
def test_one_launch_and_a_shared_table(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (launches.append(self), run(self))[1])
    source, target = cache(4, 16, 4), cache(4, 24, 4, first=5)
    for _ in range(2):
        reblock(source, [3, 1, 0], target, [2, 0], 48, path=path)
    if path == "triton":
        first, second = launches
        assert first.arguments["tiles"] is second.arguments["tiles"]
    else:
        assert not launches


def test_a_pool_that_holds_both() -> None:
    pool = torch.arange(96 * 4, device=DEVICE, dtype=torch.int32)
    source, target = pool[:192].view(3, 16, 4), pool[192:].view(2, 24, 4)
    for path in PATHS:
        check(source, [2, 0, 1], target, [1, 0], 48, path)
    with pytest.raises(ConfigError, match="source shares memory with piece 0"):
        reblock(pool[:192].view(3, 16, 4), [0], pool[:96].view(1, 24, 4), [0], 8)


def test_refused_arguments() -> None:
    source, target = cache(4, 16, 4), cache(4, 24, 4)

    def refused(message: str, **change: object) -> None:
        arguments = {
            "source": source,
            "source_blocks": [0, 1],
            "target": target,
            "target_blocks": [0, 1],
            "num_tokens": 30,
        } | change
        with pytest.raises(ConfigError, match=message):
            reblock(**arguments)  # type: ignore[arg-type]

    refused("source_blocks has 1 blocks of 16 tokens; 30 tokens take 2", source_blocks=[0])
    refused("target_blocks has 0 blocks", target_blocks=[])
    refused("source_blocks holds 4 at entry 1; source has blocks 0 to 3", source_blocks=[0, 4])
    refused("target_blocks holds -1 at entry 0", target_blocks=[-1, 0])
    refused("target_blocks holds 1.0", target_blocks=[0, 1.0])
    refused("target_blocks holds 1 twice", target_blocks=[1, 1])
    refused("num_tokens is -1", num_tokens=-1)
    refused("num_tokens is 2.0", num_tokens=2.0)
    refused("target has shape", target=cache(4, 24, 5))
    refused("target has shape", target=cache(4, 24))
    refused("target has dtype", target=target.float())
    refused("target has strides", target=cache(4, 4, 24).mT)
    refused("source has strides", source=cache(4, 4, 16).mT)
    refused("source has shape", source=torch.zeros(4, device=DEVICE))
    refused("source is a list", source=[1])
    refused("target is a NoneType", target=None)
    if DEVICE.type == "cpu":
        refused("target is on meta", target=target.to("meta"))
