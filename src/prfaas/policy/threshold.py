"""The short-term controller: moves the threshold t with the link, the nodes and the lengths."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from statistics import NormalDist
from typing import TypeGuard

import attrs

from prfaas.core import ClusterKind
from prfaas.errors import ConfigError
from prfaas.policy.load_curve import LoadCurve, PrefillSeconds, PrefillStage
from prfaas.seams import ClusterView, NodeView
from prfaas.spec import ModelSpec


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
    """How fast t may move.

    Attributes:
        window: recent lengths that are remembered.
        prior_weight: number of recent lengths at which the prior has faded out.
        period_s: at most one search in this time.
        min_gain: relative fall of the load that is worth a move.
        link_change: relative change of the link rate that always moves t to its optimum.
    """

    window: int = 512
    prior_weight: int = 64
    period_s: float = 1.0
    min_gain: float = 0.03
    link_change: float = 0.2

    def __attrs_post_init__(self) -> None:
        least = {"window": 1, "prior_weight": 0, "period_s": 0, "min_gain": 0, "link_change": 0}
        for name, limit in least.items():
            value = getattr(self, name)
            if not limit <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite and at least {limit}")


class ThresholdController:
    """Searches t on measured lengths, rates, node counts and link rate (short-term scheduling).

    The lengths are the uncached lengths of the last requests; until there are enough of them they
    are mixed with prior quantiles, so that a cold start is defined and t moves smoothly. t is a
    whole number inside the plan's band, whatever comes in. What counts as unmeasured (None, 0,
    negative, not finite):

    - a link rate: the last measured one stands; before the first, ``link_bps``; without that,
      egress is left out of account;
    - a node's prefill rate: it takes the mean of its stage, or of the other stage if nobody in its
      own was measured. While nothing at all is measured, nodes count as equally fast and egress,
      which cannot be compared with that, is left out of account.

    While a stage has no node, t stays where it is.

    Args:
        spec: gives S_kv.
        band: the plan's least and greatest t.
        prior_tokens: uncached lengths to expect before any are seen, equally likely.
        settings: how fast t may move.
        link_bps: B_out to assume until it is measured.
        remote_prefill_s, local_prefill_s: profiles of one node; None takes the measured rates.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        band: tuple[int, int],
        prior_tokens: Sequence[int] | None = None,
        settings: ThresholdSettings | None = None,
        link_bps: float | None = None,
        remote_prefill_s: PrefillSeconds | None = None,
        local_prefill_s: PrefillSeconds | None = None,
    ) -> None:
        prior = lognormal_quantiles() if prior_tokens is None else tuple(prior_tokens)
        if not prior or any(type(n) is not int or n < 1 for n in prior):
            raise ConfigError(
                f"prior_tokens is {prior}; it needs at least one length, each of them a whole "
                "number of at least 1"
            )
        if link_bps is not None and not _is_measured(link_bps):
            raise ConfigError(
                f"link_bps is {link_bps}; it must be a finite rate above 0, or None if unknown"
            )
        self._spec = spec
        self._prior = sorted(prior)
        self._settings = settings or ThresholdSettings()
        self._link_bps = link_bps
        self._remote_prefill_s = remote_prefill_s
        self._local_prefill_s = local_prefill_s
        self._recent: deque[int] = deque(maxlen=self._settings.window)
        self._next_search_s = -math.inf
        self._is_settled = False
        self._settled_bps: float | None = None
        self._threshold_tokens = self._prior[len(self._prior) // 2]
        self.set_band(band)

    def __repr__(self) -> str:
        low, high = self._band
        return (
            f"<ThresholdController t={self._threshold_tokens} in {low}..{high}, "
            f"{len(self._recent)} lengths, link {self._link_bps}>"
        )

    @property
    def threshold_tokens(self) -> int:
        """t now. Before the first search, the median of the prior."""
        return self._threshold_tokens

    def set_band(self, band: tuple[int, int]) -> None:
        """Takes over the band of a new plan; t moves into it at once."""
        low, high = band
        if not (type(low) is int and type(high) is int and 0 <= low <= high):
            raise ConfigError(f"band is {band}; it needs whole numbers, 0 <= low <= high")
        self._band = band
        self._threshold_tokens = min(high, max(low, self._threshold_tokens))

    def observe(self, uncached_tokens: int) -> None:
        """Records the uncached length of one request.

        Raises:
            ConfigError: not a whole number of at least 1.
        """
        if type(uncached_tokens) is not int or uncached_tokens < 1:
            raise ConfigError(
                f"uncached_tokens is {uncached_tokens!r}; it must be a whole number of at least 1"
            )
        self._recent.append(uncached_tokens)

    def update(self, view: ClusterView, now: float) -> int:
        """Returns t, after a new search if the last one is a period old. O(n log n) per search."""
        if now >= self._next_search_s:
            self._next_search_s = now + self._settings.period_s
            link_bps = view.link_bps()
            if _is_measured(link_bps):
                self._link_bps = link_bps
            curve = self._curve(view.nodes())
            if curve is not None:
                self._move(curve)
        return self._threshold_tokens

    def check(self) -> None:
        """Asserts the invariants."""
        low, high = self._band
        assert low <= self._threshold_tokens <= high, f"t is {self._threshold_tokens}"

    def _move(self, curve: LoadCurve) -> None:
        best = curve.best(self._band)
        gain = curve.load_s(self._threshold_tokens) - curve.load_s(best) * (
            1 + self._settings.min_gain
        )
        if gain > 0 or self._has_link_changed():
            self._threshold_tokens = best
            self._is_settled = True
            self._settled_bps = self._link_bps

    def _has_link_changed(self) -> bool:
        """Whether the link moved since t was last set to its optimum, however slowly."""
        if not self._is_settled:
            return True
        if self._link_bps is None or self._settled_bps is None:
            return self._link_bps is not self._settled_bps
        return abs(self._link_bps / self._settled_bps - 1) > self._settings.link_change

    def _curve(self, nodes: Sequence[NodeView]) -> LoadCurve | None:
        prefilling = [node for node in nodes if node.role.prefills]
        remote = [node for node in prefilling if node.kind is ClusterKind.PRFAAS]
        local = [node for node in prefilling if node.kind is ClusterKind.PD]
        if not remote or not local:
            return None
        remote_s = self._remote_prefill_s or _measured_prefill_s(remote)
        local_s = self._local_prefill_s or _measured_prefill_s(local)
        known = remote_s or local_s
        return LoadCurve(
            self._spec,
            self._weights(),
            remote=PrefillStage(num_nodes=len(remote), prefill_s=remote_s or known or float),
            local=PrefillStage(num_nodes=len(local), prefill_s=local_s or known or float),
            link_bps=self._link_bps if known else None,
        )

    def _weights(self) -> dict[int, float]:
        fading = max(0, self._settings.prior_weight - len(self._recent)) / len(self._prior)
        shares = {length: float(num) for length, num in Counter(self._recent).items()}
        if fading or not shares:
            for length in self._prior:
                shares[length] = shares.get(length, 0.0) + (fading or 1.0)
        return shares


def _measured_prefill_s(nodes: Sequence[NodeView]) -> PrefillSeconds | None:
    rates = [node.prefill_tokens_per_s for node in nodes if _is_measured(node.prefill_tokens_per_s)]
    if not rates:
        return None
    mean = sum(rates) / len(rates)
    return lambda num_tokens: num_tokens / mean


def _is_measured(value: float | None) -> TypeGuard[float]:
    return value is not None and 0 < value < math.inf
