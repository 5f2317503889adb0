"""What goes over the wire: packing, 8-bit codes, other block sizes, other state layouts.

No checksum is made here: whether one hides behind the copy's memory traffic has to be seen on a
GPU, and the transports check what they carry.
"""

from prfaas.kernels.packing.layers import layer_pieces
from prfaas.kernels.packing.layouts import StateLayout, convert_states
from prfaas.kernels.packing.pack import Regions, pack, unpack
from prfaas.kernels.packing.pack_quantized import CodedForm, pack_quantized, unpack_quantized
from prfaas.kernels.packing.pieces import Pieces, entry_pieces
from prfaas.kernels.packing.quantize import Code, QuantizedRows, dequantize_rows, quantize_rows
from prfaas.kernels.packing.reblock import reblock

__all__ = [
    "Code",
    "CodedForm",
    "Pieces",
    "QuantizedRows",
    "Regions",
    "StateLayout",
    "convert_states",
    "dequantize_rows",
    "entry_pieces",
    "layer_pieces",
    "pack",
    "pack_quantized",
    "quantize_rows",
    "reblock",
    "unpack",
    "unpack_quantized",
]
