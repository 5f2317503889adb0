"""Agenda, progress, link and node of the simulator, each alone."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core import Role, cdiv
from prfaas.errors import ConfigError
from prfaas.policy.schedule import DecodeStep, StepSchedule, decode_rounds, segment_ends
from prfaas.simulator import Failure, SimulatedLink
from prfaas.simulator.agenda import Agenda, Progress
from prfaas.simulator.flight import Flight
from prfaas.simulator.link import FluidLink
from prfaas.simulator.node import Node
from prfaas.workload import Arrival
from simulations import SPEC, clusters, node, scenario


def run(agenda: Agenda) -> None:
    while len(agenda):
        agenda.step()


def test_calls_come_in_order_of_time_and_then_of_asking():
    agenda, seen = Agenda(), []
    for name, at_s in (("b", 2.0), ("a", 1.0), ("c", 2.0), ("d", 0.0)):
        agenda.at(at_s, lambda _, name=name: seen.append((agenda.now, name)))
    agenda.at(1.5, lambda _: seen.append("cancelled")).cancel()
    run(agenda)
    assert seen == [(0.0, "d"), (1.0, "a"), (2.0, "b"), (2.0, "c")]


def test_a_call_for_the_past_comes_now():
    agenda, seen = Agenda(), []
    agenda.at(3.0, lambda _: agenda.at(1.0, lambda _: seen.append(agenda.now)))
    run(agenda)
    assert seen == [3.0]


def test_time_goes_on_to_where_a_step_is_cut_off():
    agenda, seen = Agenda(), []
    agenda.at(5.0, lambda _: seen.append(agenda.now))
    assert not agenda.step(3.0)
    assert (agenda.now, agenda.num_calls) == (3.0, 0)
    assert not agenda.step(2.0)
    assert agenda.now == 3.0
    agenda.at(4.0, lambda _: seen.append(agenda.now))
    run(agenda)
    assert seen == [4.0, 5.0]


def test_progress_follows_its_rate():
    agenda, ends = Agenda(), {}
    progress = Progress(agenda, lambda item: ends.setdefault(item, agenda.now))
    progress.set_rate(2.0)
    progress.add(4.0, "a")  # alone it would end at 2
    gone = progress.add(9.0, "gone")
    progress.add(10.0, "b")
    agenda.at(1.0, lambda _: progress.set_rate(0.5))  # a lacks 2, b lacks 8
    agenda.at(3.0, lambda _: progress.set_rate(0.0))  # a lacks 1, b lacks 7
    agenda.at(10.0, lambda _: progress.set_rate(1.0))
    agenda.at(10.5, lambda _: progress.remove(gone))
    agenda.at(10.5, lambda _: progress.remove(gone))
    run(agenda)
    assert ends == {"a": pytest.approx(11.0), "b": pytest.approx(17.0)}
    assert len(progress) == 0


@given(
    jobs=st.lists(
        st.tuples(st.floats(0, 10), st.floats(0.01, 10), st.booleans()), min_size=1, max_size=8
    )
)
def test_progress_agrees_with_small_steps(jobs):
    """Processor sharing: the same ends as when time is cut wherever something happens."""
    agenda, ends = Agenda(), {}
    progress = Progress(agenda, lambda i: (ends.setdefault(i, agenda.now), share()))

    def share():
        progress.set_rate(1.0 / max(1, len(progress)))

    def start(i, amount, is_removed):
        progress.set_rate(1.0 / (len(progress) + 1))
        job = progress.add(amount, i)
        if is_removed:
            agenda.at(agenda.now + amount / 2, lambda _: (progress.remove(job), share()))

    for i, (at_s, amount, is_removed) in enumerate(jobs):
        agenda.at(at_s, lambda _, a=(i, amount, is_removed): start(*a))
    run(agenda)

    left: dict[int, float] = {}
    events = sorted(
        [(at_s, 0, i) for i, (at_s, _, _) in enumerate(jobs)]
        + [(at_s + amount / 2, 1, i) for i, (at_s, amount, gone) in enumerate(jobs) if gone]
    )
    now, expected = 0.0, {}
    while events or left:
        first = min(left.values(), default=0) * len(left)
        due = now + first if left else float("inf")
        if events and events[0][0] < due:
            at_s, is_removal, i = events.pop(0)
        else:
            at_s, is_removal, i = due, None, min(left, key=lambda i: left[i])
        left = {j: amount - (at_s - now) / len(left) for j, amount in left.items()}
        now = at_s
        if is_removal is None:
            expected[i] = now
            del left[i]
        elif is_removal:
            left.pop(i, None)
        else:
            left[i] = jobs[i][1]
    assert ends == {i: pytest.approx(at_s, rel=1e-6, abs=1e-6) for i, at_s in expected.items()}


@pytest.mark.parametrize("start_s", [3e7, 1.7e9, 1e12])
def test_work_ends_however_late_it_is(start_s):
    """At 1.7e9 s, as clocks count them, floats are 2e-7 s apart."""
    for seed in range(50):
        rng, agenda, done = Random(seed), Agenda(), []
        progress = Progress(agenda, done.append)
        progress.set_rate(rng.uniform(0.1, 1e11))
        at_s = start_s + rng.random()
        agenda.at(at_s, lambda _, p=progress, r=rng: p.add(p.rate * r.uniform(0.1, 9), "job"))
        for _ in range(10):
            if len(agenda):
                agenda.step()
        assert done == ["job"]
        assert at_s < agenda.now < at_s + 9.001


def test_flows_share_the_link_and_an_outage_stops_them():
    agenda, ends = Agenda(), {}
    link = FluidLink(agenda, ((0.0, 80.0), (4.0, 0.0), (6.0, 8.0)))  # bits/s
    done = lambda item: ends.setdefault(item, agenda.now)  # noqa: E731
    link.send(10.0, done, "a")  # 80 bits
    agenda.at(0.5, lambda _: link.send(35.0, done, "b"))  # 280 bits
    run(agenda)
    # a has 40 left at 0.5, then 40 bits/s each: until 1.5. b then has 240: 200 until 4, 40 left.
    assert ends == {"a": pytest.approx(1.5), "b": pytest.approx(11.0)}
    deliveries = link.take_deliveries()
    assert [(d.start_s, d.end_s, d.num_bytes) for d in deliveries] == [
        (0.0, 11.0, 45)
    ]  # a stall belongs to the delivery that it delays
    assert link.sent_bytes == pytest.approx(45.0)
    assert link.capacity_bytes() == pytest.approx(45.0)
    assert link.busy_s == pytest.approx(11.0)
    assert link.take_deliveries() == ()


def test_deliveries_cover_busy_time_only_and_are_cut_where_they_are_taken():
    agenda = Agenda()
    link = FluidLink(agenda, ((0.0, 80.0),))
    taken = []
    link.send(20.0, lambda _: None, "a")
    agenda.at(1.0, lambda _: taken.extend(link.take_deliveries()))
    agenda.at(5.0, lambda _: link.send(10.0, lambda _: None, "b"))
    run(agenda)
    taken += link.take_deliveries()
    assert [(d.start_s, d.end_s, d.num_bytes) for d in taken] == [
        (0.0, 1.0, 10),
        (1.0, 2.0, 10),
        (5.0, 6.0, 10),
    ]


def test_a_stopped_flow_leaves_its_share_to_the_others():
    agenda, ends = Agenda(), {}
    link = FluidLink(agenda, ((0.0, 80.0),))
    stopped = link.send(100.0, lambda _: ends.setdefault("stopped", agenda.now), "x")
    link.send(10.0, lambda _: ends.setdefault("kept", agenda.now), "y")
    agenda.at(1.0, lambda _: link.stop(stopped))
    run(agenda)
    assert ends == {"kept": pytest.approx(1.5)}
    assert link.sent_bytes == pytest.approx(15.0)


class Ears:
    """A node's listener that lets everything that is prefilled land where it is."""

    def __init__(self, agenda: Agenda) -> None:
        self.agenda = agenda
        self.prefilled: dict[str, float] = {}
        self.decoded: dict[str, float] = {}

    def prefill_started(self, flight: Flight) -> None:
        pass

    def prefill_done(self, flight: Flight) -> None:
        self.prefilled[flight.arrival.request_id] = self.agenda.now
        flight.prefill.shipped(flight)
        flight.decode.land(flight)

    def decode_done(self, flight: Flight) -> None:
        self.decoded[flight.arrival.request_id] = self.agenda.now


def exact(prompts, *, seconds, step_s, segment_tokens, rounds):
    """The same node, one engine step after the other, as a worker's engine loop runs them."""
    schedule = StepSchedule(decode_rounds=rounds)
    now, prefilled, decoded = 0.0, {}, {}
    ends = {key: segment_ends(0, n, segment_tokens) for key, (_, n, _) in prompts.items()}
    position = dict.fromkeys(prompts, 0)
    left = {key: output for key, (_, _, output) in prompts.items()}
    to_come = sorted((at_s, key) for key, (at_s, _, _) in prompts.items())
    decoding: set[str] = set()
    while to_come or len(schedule):
        if not len(schedule):
            now = max(now, to_come[0][0])
        while to_come and to_come[0][0] <= now:
            schedule.add_prefill(to_come.pop(0)[1])
        step = schedule.next_step()
        if isinstance(step, DecodeStep):
            now += step_s(len(decoding)) / len(decoding)
            left[step.key] -= 1
            if not left[step.key]:
                schedule.remove(step.key)
                decoding.discard(step.key)
                decoded[step.key] = now
            continue
        key, num_tokens = step.key, prompts[step.key][1]
        end = ends[key].pop(0)
        now += seconds(num_tokens) * (end - position[key]) / num_tokens
        position[key] = end
        if end == num_tokens:
            schedule.remove(key)
            schedule.add_decode(key)
            decoding.add(key)
            prefilled[key] = now
    return prefilled, decoded


@pytest.mark.parametrize("budget", [None, 128])
@pytest.mark.parametrize("is_constant", [True, False])
def test_the_fluid_node_agrees_with_single_engine_steps(is_constant, budget):
    def seconds(num_tokens, cached=0):
        return 0.1 + num_tokens / 8000

    def step_s(batch):
        return 0.02 if is_constant else 0.01 + 0.002 * batch

    rng = Random(5)
    prompts = {
        f"r{i}": (0.8 * i, 512 * rng.randint(2, 24), rng.randint(150, 400)) for i in range(12)
    }
    rounds = decode_rounds(512, budget)
    expected = exact(prompts, seconds=seconds, step_s=step_s, segment_tokens=512, rounds=rounds)

    agenda = Agenda()
    ears = Ears(agenda)
    config = node(
        "mixed",
        Role.MIXED,
        prefill=seconds,
        decode_step_s=step_s,
        segment_tokens=512,
        num_slots=None,
    )
    mixed = Node(config, SPEC, agenda, ears)
    mixed.pace(budget)
    for key, (at_s, num_tokens, output_tokens) in prompts.items():
        arrival = Arrival(
            request_id=key, arrived_s=at_s, num_tokens=num_tokens, output_tokens=output_tokens
        )
        flight = Flight(arrival, at_s, 0.05)
        flight.prefill = flight.decode = mixed
        agenda.at(at_s, lambda _, flight=flight: (mixed.admit(flight), mixed.enqueue(flight)))
    run(agenda)
    for measured, truth in zip((ears.prefilled, ears.decoded), expected, strict=True):
        assert measured.keys() == truth.keys() == prompts.keys()
        # A fluid cannot know where inside a cycle a prompt arrives, so one is off by a cycle.
        cycle_s = seconds(512) + rounds * step_s(len(prompts))
        assert measured == {k: pytest.approx(at_s, abs=1.5 * cycle_s) for k, at_s in truth.items()}
        took_s = [at_s - prompts[key][0] for key, at_s in measured.items()]
        true_s = [at_s - prompts[key][0] for key, at_s in truth.items()]
        assert fmean(took_s) == pytest.approx(fmean(true_s), rel=0.03)
    assert not mixed.jobs


def test_waiting_for_a_slot_is_first_come_first_served():
    agenda = Agenda()
    ears = Ears(agenda)
    config = node("mixed", Role.MIXED, prefill=lambda new, cached: 1.0, num_slots=1)
    mixed = Node(config, SPEC, agenda, ears)
    for i in range(3):
        arrival = Arrival(request_id=f"r{i}", arrived_s=0.0, num_tokens=9, output_tokens=200)
        flight = Flight(arrival, 0.0, 0.05)
        flight.prefill = flight.decode = mixed
        mixed.admit(flight)
        mixed.enqueue(flight)
    run(agenda)
    assert list(ears.decoded) == ["r0", "r1", "r2"]
    # 200 steps of 25 ms; segments of whole prompts delay the first ones a little.
    assert ears.decoded["r2"] - ears.decoded["r1"] == pytest.approx(5.0)
    assert mixed.decode_share() == pytest.approx(1 - ears.prefilled["r0"] / agenda.now)
    assert mixed.prefill_share() == pytest.approx(3.0 / agenda.now)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: node("remote0", Role.DECODE), "only prefill"),
        (lambda: node("a", Role.DECODE, num_slots=0), "at least 1"),
        (lambda: node("a", Role.DECODE, decode_step_s=0.0), "a step takes some time"),
        (lambda: SimulatedLink(schedule=()), "ascending seconds from 0"),
        (lambda: SimulatedLink(schedule=((1.0, 5.0),)), "ascending seconds from 0"),
        (lambda: SimulatedLink(schedule=((0.0, -5.0),)), "at least 0"),
        (lambda: SimulatedLink(schedule=((0.0, 5.0),), rtt_s=-1.0), "at least 0"),
        (lambda: scenario([]), "one each"),
        (lambda: scenario([node("a", Role.MIXED)] * 2), "one each"),
        (lambda: scenario(clusters(1, 1, 1), link=None), "no link"),
        (
            lambda: scenario(clusters(1, 1, 1), failures=[Failure(at_s=1.0, node_id="x")]),
            "names no node",
        ),
        (lambda: scenario(clusters(1, 1, 1), max_attempts=0), "max_attempts"),
        (lambda: scenario(clusters(1, 1, 1), control_period_s=0.0), "control_period_s"),
        (lambda: scenario(clusters(1, 1, 1), timeout_s=0.0), "timeout_s"),
    ],
)
def test_what_cannot_be_simulated_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_budgets_are_rounds_of_the_servers_schedule():
    assert decode_rounds(2048, 512) == cdiv(2048, 512) == 4
