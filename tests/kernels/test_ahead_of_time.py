"""Every kernel and configured tile compiles for processors that are not here, and fits them."""

from __future__ import annotations

import re

import pytest

from aot import TARGETS, compile_for
from kernel_launches import all_launches
from prfaas.kernels.arch import ARCHS

LAUNCHES, VARIANTS = all_launches()
NAMES = [
    pytest.param(name, marks=pytest.mark.variant) if name in VARIANTS else name for name in LAUNCHES
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_and_fits(name: str, target: str) -> None:
    arch = ARCHS[target]
    launch = LAUNCHES[name](arch)
    if launch is None:
        return
    compiled = compile_for(launch, arch)
    assert compiled.shared_bytes <= arch.max_shared_bytes
    if not arch.is_amd:
        assert compiled.spilled_bytes == 0, f"{compiled.registers} registers are not enough"
    assert narrow_offsets(compiled.ttir) == []


def narrow_offsets(ttir: str) -> list[str]:
    """Lines that add a 32-bit offset to a pointer that came as an argument: these wrap at 2^31
    elements. Offsets inside a tile whose base is already placed may be short."""
    arguments = set(re.findall(r"(%\w+): !tt\.ptr", ttir))
    splats = re.findall(r"(%\w+) = tt\.splat (%\w+) :", ttir)
    arguments |= {made for made, source in splats if source in arguments}
    found = []
    for line in ttir.splitlines():
        match = re.search(r"tt\.addptr (%\w+), .*(?:, |x)(i32)>?(?: loc.*)?$", line)
        if match and match[1] in arguments:
            found.append(line.strip())
    return found
