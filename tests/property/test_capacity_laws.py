"""What must hold of every plan: more is never worse, names and currencies do not matter."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prfaas.capacity import (
    Deployment,
    EmpiricalLengths,
    LogNormalLengths,
    PlanningCluster,
    PlanningProblem,
    PrefillProfile,
    RateForm,
    System,
    best_split,
    best_threshold,
    plan_deployment,
)
from prfaas.capacity.fleet import Fleet, LoadTable
from prfaas.core import ClusterKind
from prfaas.spec import preset

MODEL = preset("paper-1t")
FAST = PrefillProfile(((1024, 0.44), (8192, 0.72), (32_000, 1.84), (64_000, 3.48), (130_000, 7.4)))
SLOW = PrefillProfile(((1024, 0.6), (8192, 1.55), (32_000, 4.93), (64_000, 9.99), (130_000, 22.3)))
SYSTEMS = {
    "fast": System(name="fast", prefill=FAST, num_gpus=8, price_per_hour=2.5),
    "slow": System(
        name="slow",
        prefill=SLOW,
        num_gpus=8,
        price_per_hour=1.0,
        decode_step_s=0.025,
        batch_size=20,
    ),
    "newer": System(
        name="newer",
        prefill=PrefillProfile(((1000, 0.3), (100_000, 9.0))),
        num_gpus=4,
        price_per_hour=1.5,
        decode_step_s=0.02,
        batch_size=32,
    ),
}
NO_LESS = 1 - 1e-7
"""The search stops at a relative width of 1e-9 in t; the rate moves little more than that."""

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""For whole plans: a smaller counterexample is not worth minutes."""

laws = st.builds(
    LogNormalLengths,
    mu=st.floats(7, 11),
    sigma=st.floats(0.3, 1.5),
    min_tokens=st.sampled_from([1, 128, 1000]),
    max_tokens=st.sampled_from([40_000, 131_072]),
) | st.lists(st.integers(1, 130_000), min_size=1, max_size=30).map(
    lambda lengths: EmpiricalLengths(tuple(lengths))
)


@st.composite
def problems(draw):
    clusters = [
        PlanningCluster(
            cluster_id=f"far{i}",
            kind=ClusterKind.PRFAAS,
            system=draw(st.sampled_from(["fast", "newer"])),
            num_nodes=draw(st.integers(0, 6)),
        )
        for i in range(draw(st.integers(0, 2)))
    ] + [
        PlanningCluster(
            cluster_id=f"near{i}",
            kind=ClusterKind.PD,
            system=draw(st.sampled_from(["slow", "newer"])),
            num_nodes=draw(st.integers(1, 9)),
        )
        for i in range(draw(st.integers(1, 3)))
    ]
    return PlanningProblem(
        model=MODEL,
        lengths=draw(laws),
        output_tokens=draw(st.floats(16, 2000)),
        systems=SYSTEMS,
        clusters=clusters,
        egress_bps=draw(st.floats(1e8, 2e11)),
    )


def fleet(problem, form=RateForm.EXPECTATION):
    return Fleet(problem=problem, form=form, table=LoadTable(problem.model, problem.lengths))


@settings(max_examples=30)
@given(problems(), st.floats(0.05, 0.95))
def test_less_bandwidth_never_raises_the_optimum(problem, part):
    thinner = attrs.evolve(problem, egress_bps=problem.egress_bps * part)
    assert fleet(problem).best_rate() >= fleet(thinner).best_rate() * NO_LESS


@settings(max_examples=30)
@given(
    laws,
    st.floats(1e8, 2e11),
    st.floats(0.05, 0.95),
    st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(1, 8)),
)
def test_less_bandwidth_never_offloads_more_at_a_fixed_split(lengths, egress_bps, part, counts):
    deployment = Deployment(
        model=MODEL,
        remote_profile=FAST,
        local_profile=SLOW,
        num_prfaas=counts[0],
        num_prefill=counts[1],
        num_decode=counts[2],
        egress_bps=egress_bps,
        batch_size=20,
        decode_step_s=0.025,
        output_tokens=1024,
    )
    thinner = attrs.evolve(deployment, egress_bps=egress_bps * part)
    wide = best_threshold(deployment, lengths, RateForm.EXPECTATION)
    thin = best_threshold(thinner, lengths, RateForm.EXPECTATION)
    assert thin.rates.offload_fraction <= wide.rates.offload_fraction + 1e-8
    assert thin.max_rate.requests_per_s * NO_LESS <= wide.max_rate.requests_per_s


@settings(max_examples=30)
@given(problems(), st.data())
def test_another_node_never_lowers_the_optimum(problem, data):
    place = data.draw(st.integers(0, len(problem.clusters) - 1))
    clusters = list(problem.clusters)
    clusters[place] = attrs.evolve(clusters[place], num_nodes=clusters[place].num_nodes + 1)
    larger = attrs.evolve(problem, clusters=clusters)
    assert fleet(larger).best_rate() >= fleet(problem).best_rate() * NO_LESS


@settings(max_examples=30)
@given(problems())
def test_sharing_an_instance_in_time_never_lowers_the_optimum(problem):
    one = fleet(problem)
    threshold, split = one.best(1.0)
    finer, fine_split = one.best(0.25)
    assert one.rate(finer, fine_split) >= one.rate(threshold, split) * NO_LESS
    assert one.rate(threshold, split) == pytest.approx(one.best_rate(), rel=1e-7)


@settings(max_examples=30)
@given(problems(), st.floats(0, 1.2))
def test_no_threshold_and_no_random_split_beats_the_optimum(problem, part):
    one = fleet(problem)
    best = one.best_rate()
    threshold = part * problem.lengths.max_tokens
    split = tuple(round(part * cluster.num_nodes / 1.2) for cluster in problem.pd)
    assert one.rate(threshold, split) * NO_LESS <= best


@settings(max_examples=4, deadline=None, phases=NO_SHRINKING)
@given(problems())
def test_renaming_clusters_changes_nothing_but_names(problem):
    renamed = attrs.evolve(
        problem,
        clusters=[attrs.evolve(c, cluster_id="x" + c.cluster_id) for c in problem.clusters],
    )
    expected = repr(plan_deployment(problem)).replace("id='far", "id='xfar")
    assert repr(plan_deployment(renamed)) == expected.replace("id='near", "id='xnear")


@settings(max_examples=4, deadline=None, phases=NO_SHRINKING)
@given(problems(), st.floats(1e-3, 1e3))
def test_the_currency_does_not_matter(problem, factor):
    dearer = {
        name: attrs.evolve(system, price_per_hour=system.price_per_hour * factor)
        for name, system in SYSTEMS.items()
    }
    here, there = (
        plan_deployment(one).mean for one in (problem, attrs.evolve(problem, systems=dearer))
    )
    for one, other in zip(here.baselines, there.baselines, strict=True):
        assert one.name == other.name
        assert one.ratio == (None if other.ratio is None else pytest.approx(other.ratio, rel=1e-7))
    assert here.best.requests_per_s == there.best.requests_per_s


@settings(max_examples=20)
@given(st.integers(0, 6), st.integers(1, 9), st.floats(1e9, 1e11), st.sampled_from(RateForm))
def test_the_planner_and_the_single_cluster_model_agree(num_prfaas, num_local, egress_bps, form):
    lengths = LogNormalLengths(mu=9.9, sigma=1.0, min_tokens=128, max_tokens=131_072)
    problem = PlanningProblem(
        model=MODEL,
        lengths=lengths,
        output_tokens=1024,
        systems=SYSTEMS,
        clusters=[
            PlanningCluster(
                cluster_id="far", kind=ClusterKind.PRFAAS, system="fast", num_nodes=num_prfaas
            ),
            PlanningCluster(
                cluster_id="near", kind=ClusterKind.PD, system="slow", num_nodes=num_local
            ),
        ],
        egress_bps=egress_bps,
    )
    deployment = Deployment(
        model=MODEL,
        remote_profile=FAST,
        local_profile=SLOW,
        num_prfaas=num_prfaas,
        num_prefill=0,
        num_decode=num_local,
        egress_bps=egress_bps,
        batch_size=20,
        decode_step_s=0.025,
        output_tokens=1024,
    )
    _, point = best_split(deployment, lengths, form)
    rate = fleet(problem, form).best_rate()
    assert rate == pytest.approx(point.max_rate.requests_per_s, rel=1e-4)
