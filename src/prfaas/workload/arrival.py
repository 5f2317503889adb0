"""One request of a workload: when it comes, how long it is, which prefix it repeats."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import attrs

from prfaas.core import BlockHash, RequestId
from prfaas.errors import ConfigError


@attrs.frozen(kw_only=True)
class Arrival:
    """A request as a workload knows it: lengths and prefix keys instead of tokens.

    Attributes:
        request_id: unique within its workload.
        arrived_s: seconds since the start of the workload.
        num_tokens: prompt tokens, at least 1.
        output_tokens: tokens it will generate, at least 1.
        granule_hashes: one key per complete granule of the prompt, as far as they are known. Equal
            keys mean equal prefixes. Empty where the workload says nothing about prefixes.

    Raises:
        ConfigError: a value is out of range; says which.
    """

    request_id: RequestId
    arrived_s: float
    num_tokens: int
    output_tokens: int
    granule_hashes: Sequence[BlockHash] = attrs.field(
        default=(), repr=lambda hashes: f"<{len(hashes)} hashes>"
    )

    def __attrs_post_init__(self) -> None:
        # One test for the usual case: simulations make millions of these.
        if (
            0.0 <= self.arrived_s <= sys.float_info.max
            and type(self.num_tokens) is int
            and type(self.output_tokens) is int
            and self.output_tokens >= 1
            and self.num_tokens >= max(1, len(self.granule_hashes))
        ):
            return
        raise ConfigError(self._complaint())

    def _complaint(self) -> str:
        subject = f"arrival {self.request_id!r}"
        if not 0.0 <= self.arrived_s <= sys.float_info.max:
            return (
                f"{subject} comes at {self.arrived_s!r} s; it must be a finite number of at least 0"
            )
        for name, value in (
            ("num_tokens", self.num_tokens),
            ("output_tokens", self.output_tokens),
        ):
            if type(value) is not int or value < 1:
                return f"{subject} has {name}={value!r}; it must be a whole number of at least 1"
        return (
            f"{subject} has {len(self.granule_hashes)} granule_hashes for {self.num_tokens} "
            "tokens; give one hash per complete granule"
        )
