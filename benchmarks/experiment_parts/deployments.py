"""The hardware that the experiments compare, what the capacity model says of it, and its nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import attrs

from prfaas.capacity import LengthDistribution, OperatingPoint, RateForm, best_split, best_threshold
from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.paper import profiles
from prfaas.simulator import SimulatedNode
from prfaas.spec import ModelSpec, preset

SPEC = preset("paper-1t")
LENGTHS = profiles.LENGTHS
OUTPUT_TOKENS = 1024
NUM_SLOTS = 20
STEP_S = 0.025
FAST_BPS, SLOW_BPS = 100e9, 5e9
REMOTE, PD = ClusterId("prfaas"), ClusterId("pd")
PROFILES = {REMOTE: profiles.H200.prefill_s, PD: profiles.H20.prefill_s}
MAX_ACTIVE = 64
"""Requests that a node takes at a time; the others wait at the gateway."""


@attrs.frozen(kw_only=True)
class Hardware:
    """Instances of 8 GPUs: ``num_remote`` of H200 and ``num_local`` of H20."""

    name: str
    num_remote: int
    num_local: int

    @property
    def price(self) -> float:
        """Per hour, in units of one H20 instance; an H200 instance costs two."""
        per_remote = profiles.H200_PRICE / profiles.H20_PRICE
        return self.num_remote * per_remote + self.num_local


HETERO = Hardware(name="4 H200 + 8 H20", num_remote=4, num_local=8)
EQUAL_GPUS = Hardware(name="12 H20", num_remote=0, num_local=12)
EQUAL_COST = Hardware(name="16 H20", num_remote=0, num_local=16)


@attrs.frozen(kw_only=True)
class Optimum:
    """What the capacity model finds: N_p, t, and the limit of stability (req/s)."""

    num_prefill: float
    threshold_tokens: int
    limit_rps: float


def deployment(
    hardware: Hardware, num_prefill: float, egress_bps: float, output_tokens: float
) -> profiles.Deployment:
    """The capacity model's view of it."""
    return attrs.evolve(
        profiles.CASE_STUDY,
        num_prfaas=hardware.num_remote,
        num_prefill=num_prefill,
        num_decode=hardware.num_local - num_prefill,
        egress_bps=egress_bps,
        output_tokens=output_tokens,
    )


def _found(num_prefill: float, point: OperatingPoint, lengths: LengthDistribution) -> Optimum:
    return Optimum(
        num_prefill=num_prefill,
        threshold_tokens=round(min(point.threshold_tokens, lengths.max_tokens)),
        limit_rps=point.max_rate.requests_per_s,
    )


@cache
def optimum(
    hardware: Hardware,
    lengths: LengthDistribution = LENGTHS,
    *,
    egress_bps: float = FAST_BPS,
    output_tokens: float = OUTPUT_TOKENS,
    form: RateForm = RateForm.EXPECTATION,
    granularity: float = 1.0,
) -> Optimum:
    """The best N_p and t."""
    start = deployment(hardware, 1, egress_bps, output_tokens)
    found, point = best_split(start, lengths, form, granularity=granularity)
    return _found(found.num_prefill, point, lengths)


@cache
def at_split(
    hardware: Hardware,
    num_prefill: float,
    lengths: LengthDistribution = LENGTHS,
    *,
    egress_bps: float = FAST_BPS,
    output_tokens: float = OUTPUT_TOKENS,
    form: RateForm = RateForm.EXPECTATION,
) -> Optimum:
    """The best t at a given N_p."""
    given = deployment(hardware, num_prefill, egress_bps, output_tokens)
    return _found(num_prefill, best_threshold(given, lengths, form), lengths)


def nodes(
    hardware: Hardware,
    num_prefill: int,
    *,
    pool_bytes: int | None = None,
    decode_step_s: float | Callable[[int], float] = STEP_S,
    max_active: int | None = MAX_ACTIVE,
    shared: tuple[NodeId, int] | None = None,
) -> tuple[SimulatedNode, ...]:
    """The nodes of the hardware; the first ``num_prefill`` local ones prefill.

    ``shared`` names a node that is MIXED, with so many decode slots.
    """

    def node(name: str, role: Role, *, is_remote: bool) -> SimulatedNode:
        node_id, num_slots, limit = NodeId(name), NUM_SLOTS, max_active
        if shared is not None and shared[0] == node_id:
            role, num_slots = Role.MIXED, shared[1]
            limit = 8 + 3 * num_slots
        return SimulatedNode(
            node_id=node_id,
            cluster_id=REMOTE if is_remote else PD,
            kind=ClusterKind.PRFAAS if is_remote else ClusterKind.PD,
            role=role,
            prefill=PROFILES[REMOTE if is_remote else PD],
            decode_step_s=decode_step_s,
            num_slots=num_slots,
            max_active=limit,
            pool_bytes=pool_bytes,
            block_size=None if pool_bytes is None else 512,
        )

    # A cluster that cannot prefill at all would be lost with the link, so it may.
    rest = Role.DECODE if num_prefill else Role.MIXED
    return (
        *(node(f"remote{i}", Role.PREFILL, is_remote=True) for i in range(hardware.num_remote)),
        *(
            node(f"local{i}", Role.PREFILL if i < num_prefill else rest, is_remote=False)
            for i in range(hardware.num_local)
        ),
    )


def granular(spec: ModelSpec, granule_tokens: int) -> ModelSpec:
    """The model with other granules, those of a trace."""
    return attrs.evolve(spec, granule_tokens=granule_tokens)


ALL_LOCAL = 1 << 20
"""A threshold that no prompt exceeds."""
BAND = (128, 131_072)
