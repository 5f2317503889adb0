"""What a search is made of: the length window, the sides, and fractions of nodes."""

from __future__ import annotations

import math

import pytest

from prfaas.core import ClusterId, ClusterKind, NodeId, Role
from prfaas.errors import ConfigError
from prfaas.policy import LoadCurve, PrefillStage
from prfaas.policy.length_window import LengthWindow
from prfaas.policy.sides import SideMeter
from prfaas.seams import NodeView
from prfaas.spec import preset
from prfaas.testing.router import StillView
from signals import SignalView

SPEC = preset("paper-1t")


def test_many_lengths_are_searched_in_groups() -> None:
    window = LengthWindow([7], size=4000, prior_weight=0)
    assert window.weights() == {7: 1.0}
    for length in range(1, 3001):
        window.observe(length)
    weights = window.weights()
    assert len(weights) == 500
    assert sum(weights.values()) == 3000
    assert [*weights][:2] == [6, 12]
    assert (window.longest, window.mean, window.quantile(0.9)) == (3000, 1500, 2701)


def test_the_prior_fades_within_the_window() -> None:
    window = LengthWindow([7, 9], size=4, prior_weight=100)
    window.observe(50)
    assert window.weights() == {50: 1.0, 7: 1.5, 9: 1.5}
    for _ in range(3):
        window.observe(50)
    assert window.weights() == {50: 4.0}


def node(number: int, kind: ClusterKind, rate: float) -> NodeView:
    return NodeView(
        node_id=NodeId(str(number)),
        cluster_id=ClusterId(kind.value),
        kind=kind,
        role=Role.PREFILL,
        epoch=1,
        num_active=0,
        queued_tokens=0,
        prefill_tokens_per_s=rate,
        decode_step_s=None,
    )


def test_a_small_side_among_many_nodes_is_not_overlooked() -> None:
    nodes = [node(i, ClusterKind.PD, 1000.0) for i in range(4001)]
    nodes[1] = node(1, ClusterKind.PRFAAS, 4000.0)
    meter = SideMeter(None, None, size=8)
    view = StillView(views=nodes)
    meter.ask_nodes(view)
    sides = meter.read(view, 1000)
    assert sides is not None
    assert (sides.remote.prefill_s(4000), sides.local.prefill_s(4000)) == (1.0, 4.0)
    assert (sides.remote.num_nodes, sides.local.num_nodes) == (1, 4000)


def test_queues_are_in_seconds_of_work_per_node() -> None:
    meter = SideMeter(lambda n: n / 1000, lambda n: n / 100, size=8)
    view = SignalView(num_remote=4, num_local=2, link_bps=None)
    meter.ask_nodes(view)
    view.queued_tokens = {ClusterKind.PRFAAS: 8000, ClusterKind.PD: 600}
    sides = meter.read(view, 50)
    assert sides is not None
    assert (sides.remote_queue_s, sides.local_queue_s) == (pytest.approx(2.0), pytest.approx(3.0))


def test_half_a_node_takes_twice_as_long() -> None:
    def load_s(num_local: float) -> float:
        remote = PrefillStage(num_nodes=2, prefill_s=float)
        local = PrefillStage(num_nodes=num_local, prefill_s=float)
        return LoadCurve(SPEC, {10: 1.0}, remote=remote, local=local, link_bps=None).load_s(10)

    assert (load_s(1), load_s(0.5)) == (10.0, 20.0)
    for bad in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="num_nodes is"):
            PrefillStage(num_nodes=bad, prefill_s=float)


def test_imbalance_is_the_difference_in_standard_errors() -> None:
    stage = PrefillStage(num_nodes=1, prefill_s=float)
    curve = LoadCurve(SPEC, {3: 4.0, 4: 9.0}, remote=stage, local=stage, link_bps=None)
    error = math.sqrt(4 * 9 + 9 * 16)
    assert curve.imbalance(3) == pytest.approx((36 - 12) / error)
    assert curve.imbalance(4) == pytest.approx(-48 / error)
    slow_link = LoadCurve(SPEC, {3: 4.0}, remote=stage, local=stage, link_bps=1.0)
    assert slow_link.imbalance(0) == pytest.approx(math.sqrt(4.0)), "all of it is one kind"
