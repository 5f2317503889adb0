"""Where prefill segments end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.policy.schedule import segment_ends


@pytest.mark.parametrize(
    ("start", "stop", "checkpoints", "ends"),
    [
        (0, 300, (), [128, 256, 300]),
        (64, 300, (), [128, 256, 300]),
        (128, 300, (), [256, 300]),
        (64, 400, (320, 192), [128, 192, 256, 320, 384, 400]),
        (64, 256, (256, 128), [128, 256]),
        (64, 256, (64, 320), [128, 256]),
        (64, 100, (), [100]),
        (256, 256, (), []),
    ],
    ids=[
        "from nothing",
        "resumed inside a segment",
        "resumed where one ends",
        "checkpoints",
        "checkpoints where segments end",
        "checkpoints outside",
        "less than a segment",
        "nothing left",
    ],
)
def test_segments_end_on_multiples_counted_from_token_0(
    start: int, stop: int, checkpoints: tuple[int, ...], ends: list[int]
) -> None:
    assert segment_ends(start, stop, 128, checkpoints) == ends


@given(st.data(), st.integers(1, 50), st.integers(1, 400))
def test_a_resumed_prefill_runs_the_rest_of_an_uninterrupted_one(
    data: st.DataObject, segment_tokens: int, stop: int
) -> None:
    checkpoints = data.draw(st.sets(st.integers(1, stop)))
    whole = segment_ends(0, stop, segment_tokens, checkpoints)
    assert whole[-1] == stop
    assert checkpoints <= set(whole)
    start = data.draw(st.integers(0, stop))
    resumed = segment_ends(start, stop, segment_tokens, checkpoints)
    assert resumed == [end for end in whole if end > start]
    assert all(b - a <= segment_tokens for a, b in zip([start, *resumed], resumed, strict=False))
