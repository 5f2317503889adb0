"""Time to first token as Table 6 counts it: service time, without queues and without overlap."""

from __future__ import annotations

from prfaas.capacity import Deployment, LengthDistribution
from prfaas.errors import ConfigError
from prfaas.paper.profiles import ALL_LOCAL_TOKENS, ALL_REMOTE_TOKENS


def mean_ttft_s(
    deployment: Deployment, lengths: LengthDistribution, threshold_tokens: float
) -> float:
    """Mean seconds to the first token over all requests; p weighs remote against local ones.

    The two sides are separate curves: the time jumps at t, and an integration node that rounding
    puts on the wrong side of the jump would shift the mean by half a per cent.
    """

    def remote_s(num_tokens: float) -> float:
        return deployment.service_ttft_s(num_tokens, ALL_REMOTE_TOKENS)

    def local_s(num_tokens: float) -> float:
        return deployment.service_ttft_s(num_tokens, ALL_LOCAL_TOKENS)

    offload_fraction = lengths.share_above(threshold_tokens)
    mean_remote_s = lengths.expect_above(remote_s, threshold_tokens) or 0.0
    mean_local_s = lengths.expect_below(local_s, threshold_tokens) or 0.0
    return offload_fraction * mean_remote_s + (1 - offload_fraction) * mean_local_s


def p90_ttft_s(
    deployment: Deployment, lengths: LengthDistribution, threshold_tokens: float
) -> float:
    """90 % of the requests see their first token within this many seconds.

    It is the time of the request at the 90th percentile of length, as long as no local request is
    slower than that one.

    Raises:
        ConfigError: a local request is slower; the order of lengths is not the order of times.
    """
    p90_tokens = lengths.quantile(0.9)
    p90_s = deployment.service_ttft_s(p90_tokens, threshold_tokens)
    if threshold_tokens < p90_tokens:
        slowest_local_s = deployment.service_ttft_s(threshold_tokens, threshold_tokens)
        if slowest_local_s > p90_s:
            raise ConfigError(
                f"a local request of {threshold_tokens} tokens takes {slowest_local_s:.3g} s, a "
                f"remote one of {p90_tokens:.0f} tokens {p90_s:.3g} s; lower the threshold"
            )
    return p90_s
