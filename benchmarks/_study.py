"""The study's arithmetic: what a budget carries on two kinds of hardware and the link between.

Eq. 1 to 8 of arXiv 2604.15039 in the expectation form with instances in any fraction, so that no
result hangs on rounding. Per arriving request and threshold t, let a be the seconds of remote
prefill above t, b the bits that cross, l the seconds of local prefill up to t and d the seconds of
decode. With prices R and 1 of an instance, a budget B and a link W carry

    rate(t) = min(B / (R a + l + d), W / b)

and the best t is found on a grid. ``prfaas plan`` solves the same with whole instances.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import attrs

from _study_cases import LAWS, spec_of
from prfaas.capacity import PrefillProfile

PROFILES = Path(__file__).with_name("study_profiles.json")
SLO_STEP_S = 0.025
BUDGET = 16.0
"""Every fleet costs as much as this many instances of the cheaper system."""
NUM_POINTS = 256
_ROUNDING = 1e-9


@attrs.frozen(kw_only=True)
class Demand:
    """What is asked for: a law of prompt lengths, an output length, and the longest step.

    ``overhead_s`` is added to every prefill, on any hardware.
    """

    law: str = "paper"
    output_tokens: float = 1024
    slo_s: float = SLO_STEP_S
    overhead_s: float = 0.0


USUAL = Demand()


@attrs.frozen(kw_only=True, eq=False)
class Profile:
    """One measured instance.

    Attributes:
        decode: by law, (batch, seconds of a step) for every batch that fits.
    """

    model: str
    weights: str
    system: str
    num_gpus: int
    prefill: PrefillProfile
    decode: dict[str, tuple[tuple[int, float], ...]]

    def batch(self, law: str, slo_s: float = SLO_STEP_S) -> int:
        """The largest batch with a step within ``slo_s``, linear between measured ones; or 0."""
        steps = self.decode[law]
        within = [batch for batch, seconds in steps if seconds <= slo_s]
        if not within or within[-1] == steps[-1][0]:
            return within[-1] if within else 0
        for (b0, s0), (b1, s1) in pairwise(steps):
            if s0 <= slo_s < s1:
                return b0 + math.floor((b1 - b0) * (slo_s - s0) / (s1 - s0) + _ROUNDING)
        return within[-1]

    def step_s(self, law: str, slo_s: float = SLO_STEP_S) -> float:
        """Seconds of a step over that batch."""
        batch, steps = self.batch(law, slo_s), self.decode[law]
        for (b0, s0), (b1, s1) in pairwise(steps):
            if b0 <= batch <= b1:
                return s0 + (s1 - s0) * (batch - b0) / (b1 - b0)
        return steps[0][1]

    def decode_s(self, demand: Demand) -> float:
        """Seconds of a decode instance per request; infinite where the SLO cannot be met."""
        batch = self.batch(demand.law, demand.slo_s)
        if not batch:
            return math.inf
        return self.step_s(demand.law, demand.slo_s) * demand.output_tokens / batch


def load(path: Path = PROFILES) -> list[Profile]:
    """Read the measured instances."""
    rows = json.loads(path.read_text(encoding="utf-8"))["instances"]
    return [
        Profile(
            model=row["model"],
            weights=row["weights"],
            system=row["system"],
            num_gpus=row["num_gpus"],
            prefill=PrefillProfile(
                tuple((new, seconds) for new, cached, seconds in row["prefill"] if cached == 0)
            ),
            decode={law: tuple(map(tuple, steps)) for law, steps in row["decode"].items()},
        )
        for row in rows
    ]


@cache
def thresholds(law: str) -> tuple[float, ...]:
    """Thresholds to try: all remote first, all local last."""
    lengths = LAWS[law]
    ratio = (lengths.max_tokens / lengths.min_tokens) ** (1 / NUM_POINTS)
    return (0.0, *(lengths.min_tokens * ratio**i for i in range(NUM_POINTS)), lengths.max_tokens)


def prefill_up_to(profile: Profile, demand: Demand) -> tuple[float, ...]:
    """Seconds of prefill that requests up to each threshold bring, per arriving request."""
    kernels = _kernels_up_to(profile, demand.law)
    if not demand.overhead_s:
        return kernels
    shares = (1 - LAWS[demand.law].share_above(t) for t in thresholds(demand.law))
    return tuple(k + demand.overhead_s * p for k, p in zip(kernels, shares, strict=True))


@cache
def _kernels_up_to(profile: Profile, law: str) -> tuple[float, ...]:
    up_to = LAWS[law].cumulative(profile.prefill.prefill_s)
    return tuple(0.0 if t == 0 else up_to(t) for t in thresholds(law))


@cache
def bits_above(model: str, law: str) -> tuple[float, ...]:
    """Bits of the caches of requests above each threshold, per arriving request."""
    spec = spec_of(model)
    up_to = LAWS[law].cumulative(lambda tokens: 8.0 * spec.kv_bytes(round(tokens)))
    sums = [0.0 if t == 0 else up_to(t) for t in thresholds(law)]
    return tuple(max(0.0, sums[-1] - one) for one in sums)


@attrs.frozen(kw_only=True)
class Best:
    """The best way to split one budget.

    Attributes:
        rate_rps: requests per second.
        threshold_tokens: t; None when nothing is prefilled remotely.
        offload: share of the requests that is.
        num_remote, num_prefill, num_decode: instances, in fractions.
        egress_bps: mean over the link.
    """

    rate_rps: float
    threshold_tokens: float | None
    offload: float
    num_remote: float
    num_prefill: float
    num_decode: float
    egress_bps: float


@attrs.frozen(kw_only=True)
class Question:
    """Prefill on ``remote`` for ``local``, whose instance is the unit of price.

    Attributes:
        price: of one remote GPU over one local GPU.
        budget: in local instances.
    """

    remote: Profile
    local: Profile
    demand: Demand
    price: float
    link_bps: float
    budget: float

    @property
    def instance_price(self) -> float:
        return self.price * self.remote.num_gpus / self.local.num_gpus

    def mixed(self) -> Best:
        """The best threshold, from everything remote to everything local."""
        law = self.demand.law
        far = prefill_up_to(self.remote, self.demand)
        near = prefill_up_to(self.local, self.demand)
        bits = bits_above(self.local.model, law)
        decode_s = self.local.decode_s(self.demand)
        rates = [
            min(
                self.budget / (self.instance_price * (far[-1] - a) + c + decode_s),
                self.link_bps / b if b > 0 else math.inf,
            )
            for a, b, c in zip(far, bits, near, strict=True)
        ]
        at = max(range(len(rates)), key=lambda i: (rates[i], i))
        rate, threshold = rates[at], thresholds(law)[at]
        share = LAWS[law].share_above(threshold)
        return Best(
            rate_rps=rate,
            threshold_tokens=threshold if share > 0 else None,
            offload=share,
            num_remote=rate * (far[-1] - far[at]),
            num_prefill=rate * near[at],
            num_decode=rate * decode_s if rate > 0 else 0.0,
            egress_bps=rate * bits[at],
        )

    def all_local_rps(self) -> float:
        """The whole budget in local hardware."""
        return self.budget / _per_request_s(self.local, self.demand)

    def all_remote_rps(self) -> float:
        """The whole budget in remote hardware, which then decodes as well."""
        seconds = _per_request_s(self.remote, self.demand)
        return self.budget / (self.instance_price * seconds)

    def gain(self) -> float:
        """Over the better of the two homogeneous fleets; 0 where the local side cannot decode."""
        return self.mixed().rate_rps / max(self.all_local_rps(), self.all_remote_rps())


def _per_request_s(profile: Profile, demand: Demand) -> float:
    return prefill_up_to(profile, demand)[-1] + profile.decode_s(demand)


@attrs.frozen(kw_only=True)
class Pair:
    """A dearer and a cheaper system for one model; either may prefill for the other."""

    dear: Profile
    cheap: Profile

    @property
    def name(self) -> str:
        return f"{self.dear.model} {self.dear.weights}: {self.dear.system}, {self.cheap.system}"

    def ask(
        self,
        price: float,
        link_bps: float,
        demand: Demand = USUAL,
        *,
        dear_prefills: bool = True,
    ) -> Question:
        """``price`` is that of a GPU of the dearer system over one of the cheaper.

        The budget is always `BUDGET` instances of the cheaper system.
        """
        if dear_prefills:
            return Question(
                remote=self.dear,
                local=self.cheap,
                demand=demand,
                price=price,
                link_bps=link_bps,
                budget=BUDGET,
            )
        gpus = self.cheap.num_gpus / self.dear.num_gpus
        return Question(
            remote=self.cheap,
            local=self.dear,
            demand=demand,
            price=1 / price,
            link_bps=link_bps,
            budget=BUDGET / price * gpus,
        )

    def gain(self, price: float, link_bps: float, demand: Demand = USUAL) -> tuple[float, bool]:
        """(gain over the better homogeneous fleet, whether the dearer system prefills)."""
        return max(
            (self.ask(price, link_bps, demand, dear_prefills=dear).gain(), dear)
            for dear in (False, True)
        )

    def speeds(self, demand: Demand = USUAL) -> tuple[float, float]:
        """How much faster a dearer GPU prefills this law, and decodes at the SLO."""
        gpus = self.cheap.num_gpus / self.dear.num_gpus
        cheap, dear = (prefill_up_to(p, demand)[-1] for p in (self.cheap, self.dear))
        return (
            gpus * cheap / dear,
            gpus * self.cheap.decode_s(demand) / self.dear.decode_s(demand),
        )


def pairs(profiles: Sequence[Profile]) -> list[Pair]:
    """Every two systems of a case, the dearer first, and one equal pair as a control."""
    found = []
    for i, cheap in enumerate(profiles):
        found += [
            Pair(dear=dear, cheap=cheap)
            for dear in profiles[i + 1 :]
            if (dear.model, dear.weights) == (cheap.model, cheap.weights)
        ]
    control = next(p for p in profiles if (p.model, p.system) == ("qwen3.5-397b", "H200"))
    return [*found, Pair(dear=control, cheap=control)]
