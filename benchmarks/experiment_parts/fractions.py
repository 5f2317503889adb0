"""Whole nodes against shared ones: what half a node is worth at saturation."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from experiment_parts import workloads
from experiment_parts.deployments import HETERO, NUM_SLOTS, STEP_S, Hardware, optimum
from experiment_parts.measures import Window
from experiment_parts.policies import POLICIES, Policy, Scripted
from experiment_parts.runs import Outcome, execute
from experiment_parts.scenarios import NUM_CLIENTS, Setup, world_of
from prfaas.core import NodeId, Role
from prfaas.policy import BalancerSettings
from prfaas.simulator import Ending

SEGMENT_TOKENS = 2048
BASE_SHARES = (0.0, 0.5, 1.0)


def step_time(base_share: float) -> Callable[[int], float]:
    """A decode step: ``base_share`` of a full one whatever the batch, the rest in proportion."""
    return lambda batch: STEP_S * (base_share + (1 - base_share) * batch / NUM_SLOTS)


def _policy(hardware: Hardware, balancer: str) -> Policy:
    """Max-weight, so that no threshold has to settle first."""
    row = POLICIES["max_weight"] if hardware is HETERO else POLICIES["homogeneous"]
    return attrs.evolve(row, hardware=hardware, balancer=balancer)


def _setup(
    hardware: Hardware,
    num_prefill: int,
    window: Window,
    **of_nodes: object,
) -> Setup:
    num_clients = round(NUM_CLIENTS * optimum(hardware).limit_rps / optimum(HETERO).limit_rps)
    return Setup(
        world=world_of(hardware, num_prefill, **of_nodes),  # type: ignore[arg-type]
        arrivals=workloads.even_prompts(4),
        window=window,
        planned=optimum(hardware),
        num_clients=num_clients,
    )


def whole(hardware: Hardware, num_prefill: int, window: Window, base_share: float = 1.0) -> Outcome:
    """A whole split that stays."""
    setup = _setup(hardware, num_prefill, window, decode_step_s=step_time(base_share))
    return execute(_policy(hardware, "fixed"), setup)


def balanced(
    hardware: Hardware,
    mode: str,
    window: Window,
    *,
    base_share: float = 1.0,
    num_prefill: int | None = None,
) -> Outcome:
    """A balancer that may share a node, ``slices`` or ``mixed``, starting from the best split.

    A step always takes its full time at a full batch; what a smaller one saves is told by
    ``base_share``, to the balancer too.
    """
    if num_prefill is None:
        num_prefill = round(optimum(hardware).num_prefill)
    setup = _setup(hardware, num_prefill, window, decode_step_s=step_time(base_share))
    settings = BalancerSettings(decode_base_share=min(base_share, 0.99))
    return execute(_policy(hardware, mode), setup, settings=settings)


@attrs.frozen(kw_only=True)
class SharedSplit:
    """One MIXED node that keeps its promise of 25 ms per token.

    Attributes:
        num_prefill: the others that prefill.
        num_slots: decode slots of the MIXED node.
        rounds: decode steps after each prefill segment.
    """

    num_prefill: int
    num_slots: int
    rounds: int


def shared_splits(hardware: Hardware, base_share: float) -> list[SharedSplit]:
    """Splits around the optimum in which a MIXED node meets the SLO of a token.

    After a segment of c seconds come r steps of s(b) seconds for b requests. All r tokens have to
    come within r times 25 ms: c + r s(b) <= r T, so r >= c / (T - s(b)).
    """
    segment_s = 0.30  # 2048 tokens of a mean prompt on 8 H20
    best = round(optimum(hardware).num_prefill)
    found = []
    for num_prefill in (best - 1, best):
        for num_slots in (4, 8, 12, 16):
            room_s = STEP_S - step_time(base_share)(num_slots)
            if room_s <= 0:
                continue
            rounds = max(1, -int(-segment_s // room_s))
            found.append(SharedSplit(num_prefill=num_prefill, num_slots=num_slots, rounds=rounds))
    return found


def shared(hardware: Hardware, split: SharedSplit, window: Window, base_share: float) -> Outcome:
    """A fixed split with one MIXED node."""
    node_id = NodeId(f"local{split.num_prefill}")
    setup = _setup(
        hardware,
        split.num_prefill,
        window,
        decode_step_s=step_time(base_share),
        shared=(node_id, split.num_slots),
    )
    roles = {node.node_id: node.role for node in setup.world.nodes}
    assert roles[node_id] is Role.MIXED
    balancer = Scripted(roles, {node_id: max(1, SEGMENT_TOKENS // split.rounds)})
    return execute(_policy(hardware, "fixed"), setup, balancer=balancer)


def token_s_of(outcome: Outcome, node_id: NodeId) -> float:
    """Mean seconds per token of what a node decoded."""
    window = outcome.setup.window
    seen = [
        r.decode_s / r.output_tokens
        for r in outcome.result.records()
        if r.decode_node == node_id and r.ending is Ending.OK and r.ended_s >= window.from_s
    ]
    return sum(seen) / len(seen) if seen else 0.0
