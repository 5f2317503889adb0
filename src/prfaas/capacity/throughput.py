"""What a deployment can sustain: the throughput model of arXiv 2604.15039, equations 1 to 8.

Requests longer than the threshold t are prefilled remotely and their cache crosses the link, the
others are prefilled locally, all are decoded locally. Steady state, no queueing, no prefix hits:
an upper bound on throughput, not a promise of latency.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import attrs

from prfaas.capacity.lengths import LengthDistribution
from prfaas.capacity.prefill_profile import PrefillTime
from prfaas.errors import ConfigError
from prfaas.spec import ModelSpec


class RateForm(enum.Enum):
    """How a class of requests enters the rates.

    MEAN: one request of the mean length stands for all, as in the paper. T_prefill is convex, so
    this is a few per cent too high.
    EXPECTATION: the mean of T_prefill and S_kv over the lengths; the true limit of stability.
    """

    MEAN = "mean"
    EXPECTATION = "expectation"


class Stage(enum.Enum):
    """What can bind the throughput."""

    PRFAAS_COMPUTE = "prfaas_compute"
    EGRESS = "egress"
    PREFILL = "prefill"
    DECODE = "decode"


def _check_count(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ConfigError(f"{attribute.name} is {value!r}; it must be a finite number, 0 or more")


def _check_positive(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{attribute.name} is {value!r}; it must be greater than 0")


@attrs.frozen(kw_only=True)
class Deployment:
    """Instances by role, their measured speed, and the link between the clusters.

    Attributes:
        remote_profile: T_prefill of one PRFAAS instance; local_profile: of one local instance.
        num_prfaas, num_prefill, num_decode: N_prfaas, N_p, N_d; a fraction stands for an instance
            that serves the role for that share of its time.
        egress_bps: B_out, bits per second out of the PRFAAS cluster.
        batch_size: BS_max, most requests that one decode instance steps together within the SLO.
        decode_step_s: T_decode, seconds of one such step.
        output_tokens: L_out, mean tokens generated per request.
    """

    model: ModelSpec
    remote_profile: PrefillTime
    local_profile: PrefillTime
    num_prfaas: float = attrs.field(validator=_check_count)
    num_prefill: float = attrs.field(validator=_check_count)
    num_decode: float = attrs.field(validator=_check_count)
    egress_bps: float = attrs.field(validator=_check_positive)
    batch_size: float = attrs.field(validator=_check_positive)
    decode_step_s: float = attrs.field(validator=_check_positive)
    output_tokens: float = attrs.field(validator=_check_positive)

    def kv_bits(self, num_tokens: float) -> float:
        """Bits that cross the link after a remote prefill of ``num_tokens``."""
        return 8 * self.model.kv_bytes(round(num_tokens))

    def service_ttft_s(self, num_tokens: float, threshold_tokens: float) -> float:
        """Seconds to the first token on an idle deployment, cache shipped after the prefill."""
        if num_tokens <= threshold_tokens:
            return self.local_profile.prefill_s(num_tokens)
        return (
            self.remote_profile.prefill_s(num_tokens) + self.kv_bits(num_tokens) / self.egress_bps
        )


@attrs.frozen(kw_only=True)
class StageRates:
    """Requests per second that each stage can take of its own share of the traffic.

    Attributes:
        offload_fraction: p, the share of requests that are prefilled remotely.
        prfaas_compute_rps, egress_rps: the two terms of Eq. 3; None when nothing is remote.
        prefill_rps: Eq. 4; None when nothing is local.
        decode_rps: Eq. 5.
        offloaded_kv_bits: mean size of one shipped cache; 0 when nothing is remote.
    """

    offload_fraction: float
    prfaas_compute_rps: float | None
    egress_rps: float | None
    prefill_rps: float | None
    decode_rps: float
    offloaded_kv_bits: float

    @property
    def prfaas_rps(self) -> float | None:
        """Eq. 3: compute and egress overlap, so the slower one counts; None when p is 0."""
        if self.prfaas_compute_rps is None or self.egress_rps is None:
            return None
        return min(self.prfaas_compute_rps, self.egress_rps)

    def limits_rps(self) -> dict[Stage, float]:
        """The total arrival rate at which each stage saturates; unused stages are left out."""
        p = self.offload_fraction
        limits = {Stage.DECODE: self.decode_rps}
        if self.prfaas_compute_rps is not None and self.egress_rps is not None:
            limits[Stage.PRFAAS_COMPUTE] = self.prfaas_compute_rps / p
            limits[Stage.EGRESS] = self.egress_rps / p
        if self.prefill_rps is not None:
            limits[Stage.PREFILL] = self.prefill_rps / (1 - p)
        return limits


@attrs.frozen(kw_only=True)
class MaxRate:
    """Lambda_max with the stage that binds it and the mean egress at that rate."""

    requests_per_s: float
    binding: Stage
    egress_bps: float


@attrs.frozen(kw_only=True)
class OperatingPoint:
    """A threshold and what it gives."""

    threshold_tokens: float
    rates: StageRates
    max_rate: MaxRate


def kv_throughput_bps(model: ModelSpec, profile: PrefillTime, num_tokens: int) -> float:
    """Eq. 1: bits of cache that one instance makes per second of prefill."""
    return 8 * model.kv_bytes(num_tokens) / profile.prefill_s(num_tokens)


def least_egress_bps(
    deployment: Deployment, lengths: LengthDistribution, threshold_tokens: float
) -> float:
    """Eq. 2: egress that keeps every PRFAAS instance busy; 0 when nothing is offloaded."""
    bits = lengths.expect_above(deployment.kv_bits, threshold_tokens)
    seconds = lengths.expect_above(deployment.remote_profile.prefill_s, threshold_tokens)
    if bits is None or seconds is None:
        return 0.0
    return deployment.num_prfaas * bits / seconds


def stage_rates(
    deployment: Deployment,
    lengths: LengthDistribution,
    threshold_tokens: float,
    form: RateForm = RateForm.MEAN,
) -> StageRates:
    """Eq. 3 to 5 at a threshold: longer requests go remote, the others stay local."""

    offload_fraction = lengths.share_above(threshold_tokens)

    def above(function: Callable[[float], float]) -> float | None:
        if offload_fraction == 0:
            return None
        if form is RateForm.EXPECTATION:
            return lengths.expect_above(function, threshold_tokens)
        mean = lengths.mean_above(threshold_tokens)
        return None if mean is None else function(mean)

    def below(function: Callable[[float], float]) -> float | None:
        if offload_fraction == 1:
            return None
        if form is RateForm.EXPECTATION:
            return lengths.expect_below(function, threshold_tokens)
        mean = lengths.mean_below(threshold_tokens)
        return None if mean is None else function(mean)

    remote_s = above(deployment.remote_profile.prefill_s)
    shipped_bits = above(deployment.kv_bits)
    local_s = below(deployment.local_profile.prefill_s)
    generate_s = deployment.decode_step_s * deployment.output_tokens
    return StageRates(
        offload_fraction=offload_fraction,
        prfaas_compute_rps=None if remote_s is None else deployment.num_prfaas / remote_s,
        egress_rps=None if shipped_bits is None else deployment.egress_bps / shipped_bits,
        prefill_rps=None if local_s is None else deployment.num_prefill / local_s,
        decode_rps=deployment.num_decode * deployment.batch_size / generate_s,
        offloaded_kv_bits=shipped_bits or 0.0,
    )


def max_request_rate(rates: StageRates) -> MaxRate:
    """Eq. 6: the arrival rate at which the first stage saturates."""
    limits = rates.limits_rps()
    binding = min(limits, key=lambda stage: limits[stage])
    rate = limits[binding]
    return MaxRate(
        requests_per_s=rate,
        binding=binding,
        egress_bps=rate * rates.offload_fraction * rates.offloaded_kv_bits,
    )
