"""Linear attention whose state decays by one number per head: Lightning, Mamba2, and relatives."""

from prfaas.kernels.decay.op import decay_attention
from prfaas.kernels.decay.slopes import lightning_log_decay
from prfaas.kernels.decay.ssd import ssd

__all__ = ["decay_attention", "lightning_log_decay", "ssd"]
