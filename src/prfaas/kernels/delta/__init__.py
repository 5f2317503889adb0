"""Prefill of the gated delta rule: one decay per head (GDN) or per channel (KDA)."""

from prfaas.kernels.delta.op import delta_rule

__all__ = ["delta_rule"]
