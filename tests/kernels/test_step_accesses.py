"""The compiled decode steps read a state once and write it once, 128 bits at a time."""

from __future__ import annotations

import re

import pytest

from aot import compile_for
from kernel_launches.step import LAUNCHES
from kernel_paths import IS_INTERPRETING
from prfaas.kernels.arch import ARCHS

if not IS_INTERPRETING:  # a process interprets kernels or compiles them

    @pytest.mark.parametrize(
        ("name", "element_bytes"),
        [
            ("gdn_128x128", 4),
            ("kda_128x128", 4),
            ("decay_128x128", 4),
            ("ssd_64x128", 4),
            ("gdn_bfloat16_pool", 2),
        ],
    )
    def test_the_state_moves_in_vectors_once(name: str, element_bytes: int) -> None:
        launch = LAUNCHES[name](ARCHS["sm_90"])
        sizes = launch.constants
        tile = sizes["BP"] * sizes["BN"] if "BP" in sizes else sizes["BK"] * sizes["BV"]
        vectors = tile * element_bytes // (16 * 32 * launch.num_warps)
        ptx = compile_for(launch, ARCHS["sm_90"]).assembly
        loads, stores = (
            len(re.findall(rf"\b{kind}\.global[.\w:]*\.v4\.b32", ptx)) for kind in ("ld", "st")
        )
        assert stores == vectors
        assert loads >= vectors
