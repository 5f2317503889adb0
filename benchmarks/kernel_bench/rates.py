"""What the device itself can do, measured in the same run: the copy and the matmul rate."""

from __future__ import annotations

import attrs
import torch

from kernel_bench.timers import Timer
from prfaas.kernels import report

COPY_BYTES = 4 << 30
MATRIX = 8192


@attrs.frozen(kw_only=True)
class Rates:
    """Bytes read and written per second by a large copy; operations per second of a bfloat16
    product of square matrices. Floors are work over these."""

    bytes_per_s: float
    flops_per_s: float

    def row(self, device: torch.device) -> dict[str, object]:
        properties = torch.cuda.get_device_properties(device)
        return {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "copy_gbytes_per_s": self.bytes_per_s / 1e9,
            "matmul_tflops_per_s": self.flops_per_s / 1e12,
            "torch": torch.__version__,
            "triton": report().triton_version,
        }


def measure_rates(
    timer: Timer, device: torch.device, *, copy_bytes: int = COPY_BYTES, matrix: int = MATRIX
) -> Rates:
    """Times a copy and a product of matrices."""
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(matrix, matrix, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)

    def copy() -> object:
        return target.copy_(source)

    def multiply() -> object:
        return torch.mm(a, b, out=product)

    for call in (copy, multiply, copy, multiply):
        call()
    timer.finish()
    copied, multiplied = timer.rounds([copy, multiply])
    return Rates(
        bytes_per_s=2 * copy_bytes / copied.median_s,
        flops_per_s=2 * matrix**3 / multiplied.median_s,
    )
