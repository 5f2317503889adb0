"""Causal depthwise convolutions over packed sequences, and their one-token steps."""

from prfaas.kernels.conv1d.op import causal_conv1d
from prfaas.kernels.conv1d.step import causal_conv1d_step

__all__ = ["causal_conv1d", "causal_conv1d_step"]
