"""A router without a threshold: each request goes where its work weighs least now."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random

import attrs

from prfaas.core import ClusterId
from prfaas.errors import ConfigError
from prfaas.policy.forecast import Forecast, PrefillTime, is_measured, ttft_s
from prfaas.policy.place import Place, decision, shipped_bytes
from prfaas.policy.prediction import PredictionError
from prfaas.policy.prefix import Prefix, PrefixSources
from prfaas.policy.survey import Survey, longest, not_full, spread
from prfaas.seams import (
    Candidate,
    ClusterView,
    NodeView,
    RequestOutcome,
    RoutedRequest,
    Router,
    RouteReason,
    RoutingDecision,
)
from prfaas.spec import ModelSpec

_MAX_TOKENS = 1 << 20
"""Lengths beyond this are not looked at when the equivalent of t is searched."""


@attrs.frozen(kw_only=True)
class MaxWeightSettings:
    """How a `MaxWeightRouter` weighs.

    Attributes:
        weight_per_s: V: what a second of work on a resource counts for each second that is queued
            there, in seconds of TTFT.
        link_bps: rate of the link as long as none is measured.
        tokens_per_s: prefill rate of every node as long as none is measured anywhere.
        period_s: at most one search for the equivalent of t in this time.
        prefix_transfers: whoever acts on the decisions can move a cached prefix to the node that
            prefills, inside a cluster and over the link.
        setup_s: fixed time of such a move.
    """

    weight_per_s: float = 0.3
    link_bps: float = 10e9
    tokens_per_s: float = 10_000.0
    period_s: float = 1.0
    prefix_transfers: bool = False
    setup_s: float = 0.05

    def __attrs_post_init__(self) -> None:
        for name in ("link_bps", "tokens_per_s"):
            if not is_measured(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be finite, above 0")
        for name in ("weight_per_s", "period_s", "setup_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be finite and at least 0"
                )


class MaxWeightRouter(Router):
    """Max-weight routing: the work that a request adds, times the backlog that it adds it to.

    The idea is the max-weight scheduling of Tassiulas and Ephremides (1992): serve, or here load,
    the queues by the product of backlog and work, and the system is stable whenever any policy can
    make it so, without knowing the arrival rates. Applied to a request, each candidate node costs

        TTFT + V (prefill_s x wait_s + link_s x backlog_s)

    where TTFT is the predicted one (`forecast.ttft_s`), prefill_s and link_s the seconds of work
    that the request puts on the node, with the hit that it has there, and on the link, and wait_s
    and backlog_s what is queued on them, also in seconds. The node with the least cost wins; the
    side follows from it.

    With nothing queued the products vanish, and the least TTFT wins. With growing queues they take
    over: a long prompt is sent where it is fast, however long the queue there, as long as the
    queues' ratio is less than that of its two prefill times; so the queues settle at the ratio at
    which both sides have as much to do as they can, which is what the best t achieves for the
    lengths that it was computed for. Here nobody has to know the lengths, and a slow link, changed
    roles and unequal caches are just other costs.

    With ``prefix_transfers`` a node is also weighed with the longest usable prefix that another
    node can send it, of its own cluster or from beyond the link (`PrefixSources`). Then TTFT begins
    with the transfer, prefill_s is that of the rest, and the bytes that cross the link add to
    link_s. So a prefix moves where that costs less than to compute it, and not otherwise.

    What is used is measured by the ledger or given: profiles, else measured rates, else those of
    the cluster, else of any cluster, else assumed ones, in which case no TTFT is predicted. A dead
    link is not chosen as long as a PD node can prefill. Even without ``is_link_down`` it cannot
    swallow much: what is stuck on it is backlog.

    Where only one side can take the request, the reason is REMOTE_DOWN, LINK_DOWN, REMOTE_FULL or
    LOCAL_DOWN (also if all PD nodes are at their limit); otherwise CHEAPER_LOCAL or CHEAPER_REMOTE.

    Args:
        spec: gives bytes.
        settings: how to weigh.
        profiles: T_prefill of one node of a cluster.
        is_link_down: whether the link carries nothing at a time, such as
            `ThresholdController.is_link_down`; None never says so.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        settings: MaxWeightSettings | None = None,
        profiles: Mapping[ClusterId, PrefillTime] | None = None,
        is_link_down: Callable[[float], bool] | None = None,
    ) -> None:
        self._spec = spec
        self._settings = settings or MaxWeightSettings()
        self._forecast = Forecast(profiles, assumed_tokens_per_s=self._settings.tokens_per_s)
        self._is_link_down = is_link_down
        self._prediction = PredictionError()
        self._threshold_tokens = 0
        self._next_search_s = -math.inf

    def __repr__(self) -> str:
        return (
            f"<MaxWeightRouter {self._spec.name}, as if t={self._threshold_tokens}, "
            f"{self._prediction!r}>"
        )

    @property
    def threshold_tokens(self) -> int:
        """Length up to which a request without hits stayed local, when this was last looked at.

        It is looked at while deciding, at most once a period, and only if both sides have nodes. 0
        before the first time.
        """
        return self._threshold_tokens

    @property
    def prediction(self) -> PredictionError:
        """How far the predicted TTFT was off."""
        return self._prediction

    def route(
        self, request: RoutedRequest, view: ClusterView, now: float, rng: Random
    ) -> RoutingDecision:
        is_link_down = self._is_link_down is not None and self._is_link_down(now)
        survey = Survey(request, view, rng, is_link_down=is_link_down)
        scale = _Scale(self._spec, self._forecast, survey, self._settings)
        if now >= self._next_search_s and survey.local and survey.remote:
            self._next_search_s = now + self._settings.period_s
            self._threshold_tokens = scale.switch_tokens()
        local, remote, lack = _sides(survey)
        candidates = [*local, *remote]
        offers = [scale.weigh(c, is_remote=i >= len(local)) for i, c in enumerate(candidates)]
        # Of equals, those that ship nothing.
        scores = [(offer.cost_s, i >= len(local)) for i, offer in enumerate(offers)]
        chosen = spread(range(len(offers)), scores, rng)
        candidate, offer, offloaded = candidates[chosen], offers[chosen], chosen >= len(local)
        prefix = offer.prefix
        cached = candidate.hit.num_cached_tokens if prefix is None else prefix.num_tokens
        reason = lack or (RouteReason.CHEAPER_REMOTE if offloaded else RouteReason.CHEAPER_LOCAL)
        place = Place(candidate, request.num_tokens - cached, prefix)
        self._forecast.observe(candidate.node.cluster_id, place.uncached_tokens)
        is_grounded = self._forecast.is_grounded(candidate.node) and (
            scale.is_link_measured or not (offloaded or (prefix is not None and prefix.link_s))
        )
        return decision(
            survey,
            place,
            offloaded=offloaded,
            reason=reason,
            routed_tokens=request.num_tokens - longest(survey.local),
            threshold_tokens=self._threshold_tokens,
            predicted_bytes=shipped_bytes(self._spec, survey, candidate.node),
            predicted_ttft_s=offer.ttft_s if is_grounded else None,
        )

    def observe(self, outcome: RequestOutcome, now: float) -> None:
        self._prediction.observe(outcome)


@attrs.frozen
class _Offer:
    """What a node costs, with the prefix that would go there first, if any."""

    cost_s: float
    ttft_s: float
    prefix: Prefix | None


class _Scale:
    """Weighs one request on the nodes that a survey found."""

    def __init__(
        self, spec: ModelSpec, forecast: Forecast, survey: Survey, settings: MaxWeightSettings
    ) -> None:
        self._spec = spec
        self._forecast = forecast
        self._survey = survey
        self._settings = settings
        measured_bps = survey.view.link_bps()
        self.is_link_measured = is_measured(measured_bps)
        self._link_bps = measured_bps if is_measured(measured_bps) else settings.link_bps
        self._backlog_s = 8 * survey.view.link_backlog_bytes() / self._link_bps
        self._sources: PrefixSources | None = None
        if settings.prefix_transfers:
            self._sources = PrefixSources(
                spec,
                survey,
                link_bps=self._link_bps,
                backlog_s=self._backlog_s,
                setup_s=settings.setup_s,
            )

    def weigh(self, candidate: Candidate, *, is_remote: bool) -> _Offer:
        """The surveyed request on that node, with a prefix if that is cheaper."""
        num_tokens, cached = self._survey.request.num_tokens, candidate.hit.num_cached_tokens
        num_bytes = shipped_bytes(self._spec, self._survey, candidate.node) if is_remote else 0
        wait_s = self._wait_s(candidate.node)
        best = self._offer(candidate.node, wait_s, num_tokens - cached, cached, num_bytes)
        if self._sources is not None:
            for prefix in self._sources.offers(candidate):
                cached = prefix.num_tokens
                rest = num_tokens - cached
                offer = self._offer(candidate.node, wait_s, rest, cached, num_bytes, prefix)
                if offer.cost_s < best.cost_s:
                    best = offer
        return best

    def switch_tokens(self) -> int:
        """The length up to which a request without hits would stay local."""
        local = min(((self._wait_s(c.node), i) for i, c in enumerate(self._survey.local)))
        remote = min(((self._wait_s(c.node), i) for i, c in enumerate(self._survey.remote)))
        here, there = self._survey.local[local[1]].node, self._survey.remote[remote[1]].node

        def stays(num_tokens: int) -> bool:
            num_bytes = self._spec.kv_bytes(num_tokens)
            return (
                self._offer(here, local[0], num_tokens, 0, 0).cost_s
                <= self._offer(there, remote[0], num_tokens, 0, num_bytes).cost_s
            )

        low, high = 0, _MAX_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if stays(middle) else (low, middle - 1)
        return low

    def _offer(
        self,
        node: NodeView,
        wait_s: float,
        num_tokens: int,
        num_cached: int,
        num_bytes: int,
        prefix: Prefix | None = None,
    ) -> _Offer:
        prefill_s = _known(self._forecast.prefill_s(node, num_tokens, num_cached))
        link_s = 8 * num_bytes / self._link_bps
        backlog_s = self._backlog_s if num_bytes else 0.0
        first_s = ttft_s(
            wait_s=wait_s,
            prefill_s=prefill_s,
            transfer_s=link_s,
            backlog_s=backlog_s,
            prefix_s=0.0 if prefix is None else prefix.transfer_s,
        )
        if prefix is not None:
            link_s += prefix.link_s
        weight = prefill_s * wait_s + link_s * self._backlog_s
        return _Offer(first_s + self._settings.weight_per_s * weight, first_s, prefix)

    def _wait_s(self, node: NodeView) -> float:
        return _known(self._forecast.wait_s(node))


def _known(seconds: float | None) -> float:
    assert seconds is not None, "a forecast with an assumed rate answers"
    return seconds


def _sides(
    survey: Survey,
) -> tuple[Sequence[Candidate], Sequence[Candidate], RouteReason | None]:
    """Local and remote candidates to compare, and why one side is not among them."""
    local, remote = not_full(survey.local), not_full(survey.remote)
    if not survey.remote:
        return local or survey.local, (), RouteReason.REMOTE_DOWN
    if survey.is_link_down and survey.local:
        return local or survey.local, (), RouteReason.LINK_DOWN
    if not survey.local:
        return (), remote or survey.remote, RouteReason.LOCAL_DOWN
    if not local and not remote:
        return survey.local, survey.remote, None
    if not remote:
        return local, (), RouteReason.REMOTE_FULL
    return local, remote, None if local else RouteReason.LOCAL_DOWN
