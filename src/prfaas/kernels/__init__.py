"""Hybrid-attention kernels: torch for any device, Triton for GPUs, one rule between them.

Needs torch; triton, which only the GPU paths need, is imported when a kernel is first launched. See
`prfaas.kernels.dispatch` for which code runs a call, and `report` for what ran.
"""

from prfaas.errors import MissingExtra

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtra(package="torch", extra="kernels") from error

from prfaas.kernels.dispatch import KernelReport, report
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import PageTable, Sequences, Slots

__all__ = ["KernelReport", "PageTable", "PrefillResult", "Sequences", "Slots", "report"]
