"""Public faults of existing kernels, each as a kind: stale memory, long and many sequences."""

from __future__ import annotations

import pytest
import torch

from kernel_paths import DEVICE, IS_INTERPRETING, PATHS, relative_error
from prfaas.kernels import (
    PageTable,
    Sequences,
    decay_attention,
    delta_rule,
    paged_decode,
    paged_prefill,
    paged_write,
)

pytestmark = pytest.mark.parametrize("path", PATHS)


def test_h04_recycled_memory_brings_no_nan(path: str) -> None:
    """A page held a float32 state before; five of its 16 slots are written."""
    torch.manual_seed(0)
    keys, values, query = (torch.randn(5, 2, 32, device=DEVICE) for _ in range(3))
    table = PageTable([[3]], [5], page_size=16, num_pages=6, device=DEVICE)
    results = []
    for stale in (0, 255):  # all bits set is a NaN in every dtype
        pool = torch.full((6, 16, 2 * 2 * 32 * 4), stale, dtype=torch.uint8, device=DEVICE)
        rows = pool.view(torch.float32).view(6, 16, 2, 2, 32)
        key_cache, value_cache = rows[:, :, 0], rows[:, :, 1]
        paged_write(keys, key_cache, table, path=path)
        paged_write(values, value_cache, table, path=path)
        prefilled = paged_prefill(query, key_cache, value_cache, table, path=path)
        for splits in (1, 3):
            decoded = paged_decode(
                query[4:], key_cache, value_cache, table, num_splits=splits, path=path
            )
            assert torch.isfinite(decoded).all()
            assert relative_error(decoded[0], prefilled[4]) < 1e-6
        assert torch.isfinite(prefilled).all()
        results.append(prefilled)
    assert torch.equal(*results)


if not IS_INTERPRETING:  # minutes there; addresses beyond 32 bits are tested by themselves

    def test_h44_a_sequence_of_65537_tokens(path: str) -> None:
        torch.manual_seed(1)
        shape = (65_537, 1, 2)
        q, k, v = torch.randn(3, *shape, device=DEVICE)
        g, beta = -torch.rand(shape[:2], device=DEVICE), torch.rand(shape[:2], device=DEVICE)
        whole = delta_rule(q, k, v, g, beta, normalize_qk=True, path=path)
        cut = slice(60_000, None)  # the loop over the rest, from the state that was reached there
        head = delta_rule(
            *(x[:60_000] for x in (q, k, v, g, beta)), normalize_qk=True, path=path
        ).final_state
        truth = delta_rule(
            *(x[cut] for x in (q, k, v, g, beta)),
            initial_state=head,
            normalize_qk=True,
            path="reference",
        )
        assert relative_error(whole.output[cut], truth.output) < 5e-6
        assert relative_error(whole.final_state, truth.final_state) < 5e-6

    @pytest.mark.parametrize("operation", [delta_rule, decay_attention])
    def test_h44_more_sequences_than_a_grid_axis_holds(path: str, operation: object) -> None:
        torch.manual_seed(2)
        count = 66_000
        q, k, v = torch.randn(3, count, 1, 2, device=DEVICE)
        gates = [-torch.rand(count, 1, device=DEVICE), torch.rand(count, 1, device=DEVICE)]
        gates = gates if operation is delta_rule else gates[:1]
        one_each = Sequences.of_lengths([1] * count)
        many = operation(q, k, v, *gates, cu_seqlens=one_each, path=path)  # type: ignore[operator]
        pick = [0, 65_534, 65_535, 65_536, count - 1]
        few = operation(  # type: ignore[operator]
            *(x[pick] for x in (q, k, v, *gates)), cu_seqlens=range(6), path="reference"
        )
        assert relative_error(many.output[pick], few.output) < 5e-6
        assert relative_error(many.final_state[pick], few.final_state) < 5e-6
