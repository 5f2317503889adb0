"""Hybrid-attention kernels: torch for any device, Triton for GPUs, one rule between them.

Needs torch; triton, which only the GPU paths need, is imported when a kernel is first launched. See
`prfaas.kernels.dispatch` for which code runs a call, and `report` for what ran.
"""

from prfaas.errors import MissingExtra

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtra(package="torch", extra="kernels") from error

from prfaas.kernels.attention import mla_decode, paged_decode, paged_prefill, paged_write
from prfaas.kernels.conv1d import causal_conv1d, causal_conv1d_step
from prfaas.kernels.decay import decay_attention, lightning_log_decay, ssd
from prfaas.kernels.delta import delta_rule
from prfaas.kernels.dispatch import KernelReport, report
from prfaas.kernels.packing import (
    CodedForm,
    Pieces,
    QuantizedRows,
    StateLayout,
    convert_states,
    dequantize_rows,
    entry_pieces,
    layer_pieces,
    pack,
    pack_quantized,
    quantize_rows,
    reblock,
    unpack,
    unpack_quantized,
)
from prfaas.kernels.page_table import PageTable
from prfaas.kernels.pool import PoolTensors
from prfaas.kernels.results import PrefillResult
from prfaas.kernels.sequences import Sequences
from prfaas.kernels.slots import Slots
from prfaas.kernels.step import decay_attention_step, delta_rule_step, ssd_step

__all__ = [
    "CodedForm",
    "KernelReport",
    "PageTable",
    "Pieces",
    "PoolTensors",
    "PrefillResult",
    "QuantizedRows",
    "Sequences",
    "Slots",
    "StateLayout",
    "causal_conv1d",
    "causal_conv1d_step",
    "convert_states",
    "decay_attention",
    "decay_attention_step",
    "delta_rule",
    "delta_rule_step",
    "dequantize_rows",
    "entry_pieces",
    "layer_pieces",
    "lightning_log_decay",
    "mla_decode",
    "pack",
    "pack_quantized",
    "paged_decode",
    "paged_prefill",
    "paged_write",
    "quantize_rows",
    "reblock",
    "report",
    "ssd",
    "ssd_step",
    "unpack",
    "unpack_quantized",
]
