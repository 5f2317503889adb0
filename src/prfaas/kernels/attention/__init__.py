"""Softmax attention over paged caches: prefill with a cached prefix, decode, latent decode."""

from prfaas.kernels.attention.decode import paged_decode
from prfaas.kernels.attention.mla import mla_decode
from prfaas.kernels.attention.prefill import paged_prefill
from prfaas.kernels.attention.write import paged_write

__all__ = ["mla_decode", "paged_decode", "paged_prefill", "paged_write"]
