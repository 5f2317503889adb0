"""One decode token per request, on states that stay in the slots of a pool.

A request's first call is a prefill, which starts from zeros where it is given no initial state, and
whose final state overwrites a whole slot. So a slot is never cleared: what its last owner left
there is not read. A step always continues from what is in the slot.
"""

from prfaas.kernels.step.decay import decay_attention_step
from prfaas.kernels.step.delta_rule import delta_rule_step
from prfaas.kernels.step.ssd import ssd_step

__all__ = ["decay_attention_step", "delta_rule_step", "ssd_step"]
