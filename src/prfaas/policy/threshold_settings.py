"""How the threshold controller behaves, and the lengths that it expects before it sees any."""

from __future__ import annotations

import math
from statistics import NormalDist

import attrs

from prfaas.errors import ConfigError


def lognormal_quantiles(
    *, mu: float = 9.9, sigma: float = 1.0, low: int = 128, high: int = 131_072, num: int = 64
) -> tuple[int, ...]:
    """``num`` evenly spaced quantiles of a log-normal length truncated to [low, high] tokens.

    The defaults are the distribution of the case study in arXiv 2604.15039, section 4.1.
    """
    if num < 1 or not 1 <= low < high or not sigma > 0:
        raise ConfigError(
            f"num is {num}, low {low}, high {high}, sigma {sigma}; they need num >= 1, "
            "1 <= low < high and sigma > 0"
        )
    normal = NormalDist(mu, sigma)
    first, last = normal.cdf(math.log(low)), normal.cdf(math.log(high))
    if not first < last:
        raise ConfigError(f"no length of mu {mu}, sigma {sigma} is between {low} and {high}")
    shares = (first + (last - first) * (i + 0.5) / num for i in range(num))
    return tuple(min(high, max(low, round(math.exp(normal.inv_cdf(share))))) for share in shares)


@attrs.frozen(kw_only=True)
class ThresholdSettings:
    """How fast t may move, and on what evidence.

    Attributes:
        window: recent lengths that are remembered.
        prior_weight: number of recent lengths at which the prior has faded out.
        period_s: at most one search in this time, except for a back-off.
        min_gain: relative fall of the load that is worth a move.
        min_errors: standard errors by which the two sides have to differ before a move; less may
            be the luck of the sample.
        link_change: relative change of the link rate that is no noise. A fall of this size moves
            t at once, a rise once it was seen in three periods; half of it, averaged, moves t too.
        max_fall: share of t by which it falls at most in a period.
        quiet_s: time after a back-off in which t does not fall.
        high_utilisation: offered egress over the link rate that, with a growing backlog, is
            congestion.
        surge_s: backlog, in seconds of the link, below which it is never congestion.
        max_loss: share of lost packets above which it is congestion.
        down_after_s: time without progress, while bytes wait, after which the link counts as down.
            It has to be longer than the longest prefill with its queue and transfer.
        probe_after_s: silence of the link after which it is probed, if a better link would lower t.
        probe_requests, probe_bytes: what a probe may send over the link, at most; the request that
            uses up the bytes still goes whole.
        queue_gap_s: difference of the two sides' queues, in seconds of work, that is no noise.
        correction_step: change per period of the correction by queues, a relative rate.
        max_correction: its greatest size, as the logarithm of a factor.
    """

    window: int = 2048
    prior_weight: int = 256
    period_s: float = 1.0
    min_gain: float = 0.03
    min_errors: float = 3.0
    link_change: float = 0.2
    max_fall: float = 0.2
    quiet_s: float = 3.0
    high_utilisation: float = 0.9
    surge_s: float = 2.0
    max_loss: float = 0.02
    down_after_s: float = 20.0
    probe_after_s: float = 10.0
    probe_requests: int = 4
    probe_bytes: int = 4 * 1024**3
    queue_gap_s: float = 2.0
    correction_step: float = 0.02
    max_correction: float = 0.7

    def __attrs_post_init__(self) -> None:
        for name, limit in _LEAST.items():
            value = getattr(self, name)
            if not limit <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite and at least {limit}")
        for name in ("max_fall", "link_change"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ConfigError(f"{name} is {value}; it must be between 0 and 1")
        for name in ("down_after_s", "probe_after_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")


_LEAST = {
    "window": 1,
    "prior_weight": 0,
    "period_s": 0,
    "min_gain": 0,
    "min_errors": 0,
    "link_change": 0,
    "max_fall": 0,
    "quiet_s": 0,
    "high_utilisation": 0,
    "surge_s": 0,
    "max_loss": 0,
    "down_after_s": 0,
    "probe_after_s": 0,
    "probe_requests": 1,
    "probe_bytes": 1,
    "queue_gap_s": 0,
    "correction_step": 0,
    "max_correction": 0,
}
