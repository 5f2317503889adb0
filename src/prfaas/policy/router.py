"""The paper's router: decode node first, then local or remote prefill by the uncached length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random

import attrs

from prfaas.core import ClusterId
from prfaas.errors import CapacityError
from prfaas.policy.forecast import Forecast, PrefillTime, is_measured, ttft_s
from prfaas.policy.objective import Objective, Offer
from prfaas.policy.place import Place, decision, shipped_bytes
from prfaas.policy.prediction import PredictionError
from prfaas.policy.prefix import worthwhile_prefix
from prfaas.policy.regime import Regime, RegimeBorder
from prfaas.policy.router_settings import RouterSettings
from prfaas.policy.survey import Survey, has_room, longest, preferred, spread
from prfaas.policy.threshold import ThresholdController
from prfaas.seams import (
    Candidate,
    ClusterView,
    RequestOutcome,
    RoutedRequest,
    Router,
    RouteReason,
    RoutingDecision,
)
from prfaas.spec import ModelSpec


@attrs.frozen
class _Plan:
    """Where a rule sends a request."""

    place: Place
    offloaded: bool
    reason: RouteReason
    routed_tokens: int


class ThresholdRouter(Router):
    """Length-based threshold routing, arXiv 2604.15039, sections 3.4.2 and 3.4.3.

    After the decode node (see `Survey`) the length decides over the side: N less the longest usable
    hit among the prefill nodes of the decode node's cluster, and more than t goes to PRFAAS. Inside
    a side the node with the fewest tokens to compute until this prompt is done wins, its queue and
    the prompt's uncached part together, so a cache attracts only as far as it saves more than its
    node's queue costs. Where all candidates have a profile, seconds are compared instead of tokens.
    All nodes of all PRFAAS clusters compete. Ties are spread.

    That is the paper's rule for a scarce link. With ``prefix_transfers`` and an abundant link the
    longest hit of *both* sides is subtracted; if it is on the other side than the one chosen, it is
    moved to the prefill node first, provided that this takes less time than computing it; if not,
    the node computes it. Without ``prefix_transfers`` a hit on the other side cannot be used, so
    what a cluster really has to compute is N less its own hit, the two rules are the same one, and
    the regime stays scarce. The same goes for a link or nodes of which nothing is known.

    A side that cannot take a request leaves it to the other, and the reason says why: no node
    (REMOTE_DOWN, LOCAL_DOWN), every node at its limit (REMOTE_FULL; if the other side is full as
    well, it stays), a dead link (LINK_DOWN). No prefix moves then.

    Args:
        spec: gives the bytes of a prediction.
        controller: owns t; the router gives it lengths, offered bytes and the time.
        settings: what else it may do.
        profiles: T_prefill of one node of a cluster, for predictions. Clusters without one are
            predicted by measured rates.
    """

    def __init__(
        self,
        spec: ModelSpec,
        controller: ThresholdController,
        *,
        settings: RouterSettings | None = None,
        profiles: Mapping[ClusterId, PrefillTime] | None = None,
    ) -> None:
        self._spec = spec
        self._controller = controller
        self._settings = settings or RouterSettings()
        self._forecast = Forecast(profiles)
        self._border = RegimeBorder(self._settings.regime)
        self._objective = _objective(self._settings)
        self._prediction = PredictionError()

    def __repr__(self) -> str:
        return (
            f"<ThresholdRouter {self._spec.name}, {self.regime.value}, {self._controller!r}, "
            f"{self._prediction!r}>"
        )

    @property
    def threshold_tokens(self) -> int:
        return self._controller.threshold_tokens

    @property
    def regime(self) -> Regime:
        """Which rule the last decision went by."""
        return self._border.regime

    @property
    def prediction(self) -> PredictionError:
        """How far the predicted TTFT was off."""
        return self._prediction

    def route(
        self, request: RoutedRequest, view: ClusterView, now: float, rng: Random
    ) -> RoutingDecision:
        controller = self._controller
        survey = Survey(request, view, rng, is_link_down=controller.is_link_down(now))
        threshold_tokens = controller.update(view, now)
        link_bps = view.link_bps()
        plan = None
        if self._settings.prefix_transfers:
            plan = self._abundant(survey, threshold_tokens, link_bps, now, rng)
        if plan is None:
            routed_tokens = request.num_tokens - longest(survey.local)
            plan = self._plan(survey, routed_tokens, threshold_tokens, rng)
        offer = self._offer(survey, plan.place, plan.offloaded, link_bps)
        if self._objective is not None and offer is not None:
            plan, offer = self._improve(self._objective, survey, plan, offer, link_bps, rng)
        place = plan.place
        self._forecast.observe(place.node.cluster_id, place.uncached_tokens)
        predicted_bytes = shipped_bytes(self._spec, survey, place.node)
        if plan.offloaded:
            controller.observe_offered(predicted_bytes, now)
        return decision(
            survey,
            place,
            offloaded=plan.offloaded,
            reason=plan.reason,
            routed_tokens=plan.routed_tokens,
            threshold_tokens=threshold_tokens,
            predicted_bytes=predicted_bytes,
            predicted_ttft_s=None if offer is None else offer.ttft_s,
        )

    def observe(self, outcome: RequestOutcome, now: float) -> None:
        self._controller.observe(outcome.decision.routed_tokens)
        self._prediction.observe(outcome)

    def _plan(
        self,
        survey: Survey,
        routed_tokens: int,
        threshold_tokens: int,
        rng: Random,
        link_bps: float | None = None,
    ) -> _Plan:
        """Side, then node; prefixes may move if there is a ``link_bps``."""
        offloaded, reason = self._side(survey, is_long=routed_tokens > threshold_tokens)
        source = None
        if link_bps is not None and reason in (RouteReason.SHORT, RouteReason.LONG):
            own, other = survey.local, survey.remote
            if offloaded:
                own, other = other, own
            if longest(other) > longest(own):
                source = spread(other, [-c.hit.num_cached_tokens for c in other], rng)
        place = self._place(survey, offloaded, rng, source, link_bps or 0.0)
        return _Plan(place, offloaded, reason, routed_tokens)

    def _abundant(
        self,
        survey: Survey,
        threshold_tokens: int,
        link_bps: float | None,
        now: float,
        rng: Random,
    ) -> _Plan | None:
        """The plan by the rule for an abundant link; None where the other rule holds."""
        plan = None
        if is_measured(link_bps) and not survey.is_link_down and self._knows(survey):
            hit = max(longest(survey.local), longest(survey.remote))
            routed_tokens = survey.request.num_tokens - hit
            plan = self._plan(survey, routed_tokens, threshold_tokens, rng, link_bps)
            prefix = plan.place.prefix
            if prefix is not None:
                self._border.expect(prefix.num_bytes, now, is_pull=not plan.offloaded)
        regime = self._border.update(self._controller.utilisation(now), link_bps, now)
        return plan if regime is Regime.ABUNDANT else None

    def _knows(self, survey: Survey) -> bool:
        """Whether both sides are there, and how fast they are is known."""
        return all(
            bool(side) and all(self._forecast.is_grounded(c.node) for c in side)
            for side in (survey.local, survey.remote)
        )

    def _side(self, survey: Survey, *, is_long: bool) -> tuple[bool, RouteReason]:
        """Whether PRFAAS prefills, and why."""
        if not is_long:
            if survey.local:
                return False, RouteReason.SHORT
            self._refuse_if_strict(survey, RouteReason.LOCAL_DOWN)
            return True, RouteReason.LOCAL_DOWN
        reason = RouteReason.LONG
        if not survey.has_remote():
            reason = RouteReason.REMOTE_DOWN
        elif survey.is_link_down and survey.local:
            reason = RouteReason.LINK_DOWN
        elif not has_room(survey.remote) and has_room(survey.local):
            reason = RouteReason.REMOTE_FULL
        if reason is RouteReason.LONG:
            return True, reason
        self._refuse_if_strict(survey, reason)
        return False, reason

    def _refuse_if_strict(self, survey: Survey, reason: RouteReason) -> None:
        if self._settings.strict:
            raise CapacityError(
                f"request {survey.request.request_id!r} of {survey.request.num_tokens} tokens "
                f"would fall back to the other side ({reason.value}), and the router is strict "
                f"(t is {self.threshold_tokens}); restore that side, or set strict=False"
            )

    def _place(
        self,
        survey: Survey,
        offloaded: bool,
        rng: Random,
        source: Candidate | None = None,
        link_bps: float = 0.0,
    ) -> Place:
        """The node of a side that is done with the prompt first."""
        candidates = preferred(survey.remote if offloaded else survey.local)
        num_tokens = survey.request.num_tokens
        places = []
        for candidate in candidates:
            prefix, cached = None, candidate.hit.num_cached_tokens
            if source is not None:
                prefix = worthwhile_prefix(
                    self._spec,
                    self._forecast,
                    candidate,
                    source,
                    num_tokens=num_tokens,
                    link_bps=link_bps,
                    setup_s=self._settings.setup_s,
                )
            if prefix is not None:
                cached = prefix.num_tokens
            places.append(Place(candidate, num_tokens - cached, prefix))
        if len(places) == 1:
            return places[0]
        return spread(places, self._scores(survey, places), rng)

    def _scores(self, survey: Survey, places: Sequence[Place]) -> Sequence[float]:
        """Seconds until the prompt is computed; tokens, if a cluster has no profile."""
        if not all(self._forecast.has_profile(place.node.cluster_id) for place in places):
            return [place.backlog_tokens for place in places]
        scores = []
        for place in places:
            offer = self._offer(survey, place, False, None)
            scores.append(math.inf if offer is None else offer.ttft_s)
        return scores

    def _offer(
        self, survey: Survey, place: Place, offloaded: bool, link_bps: float | None
    ) -> Offer | None:
        """Prediction for a place; None while a rate that it needs is unmeasured.

        Inside a PD cluster the fabric never binds (Eq. 4), so only bytes between clusters take
        time.
        """
        node, num_tokens = place.node, place.uncached_tokens
        wait_s = self._forecast.wait_s(node)
        cached_tokens = survey.request.num_tokens - num_tokens
        prefill_s = self._forecast.prefill_s(node, num_tokens, cached_tokens)
        if wait_s is None or prefill_s is None:
            return None
        transfer_s = backlog_s = 0.0
        if offloaded:
            if not is_measured(link_bps):
                return None
            transfer_s = 8 * shipped_bytes(self._spec, survey, node) / link_bps
            backlog_s = 8 * survey.view.link_backlog_bytes() / link_bps
        total_s = ttft_s(
            wait_s=wait_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            backlog_s=backlog_s,
            prefix_s=0.0 if place.prefix is None else place.prefix.transfer_s,
        )
        return Offer(node.cluster_id, total_s, prefill_s, wait_s)

    def _improve(
        self,
        objective: Objective,
        survey: Survey,
        plan: _Plan,
        offer: Offer,
        link_bps: float | None,
        rng: Random,
    ) -> tuple[_Plan, Offer]:
        """The plan, or the other side of it if that is better by the objective."""
        to_remote = not plan.offloaded
        others = survey.remote if to_remote else survey.local
        if not has_room(others) or (to_remote and survey.is_link_down):
            return plan, offer
        place = self._place(survey, to_remote, rng)
        other = self._offer(survey, place, to_remote, link_bps)
        if other is None or not objective.moves(offer, other):
            return plan, offer
        reason = RouteReason.CHEAPER_REMOTE if to_remote else RouteReason.CHEAPER_LOCAL
        return _Plan(place, to_remote, reason, plan.routed_tokens), other


def _objective(settings: RouterSettings) -> Objective | None:
    if settings.ttft_slo_s is None:
        return None
    return Objective(
        ttft_slo_s=settings.ttft_slo_s,
        prices=settings.prices,
        moved_share=settings.moved_share,
        moved_burst_s=settings.moved_burst_s,
    )
