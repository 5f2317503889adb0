"""Which step runs next."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.policy.schedule import DecodeStep, PrefillStep, StepSchedule, decode_rounds


def steps(schedule: StepSchedule, num: int) -> list[object]:
    return [schedule.next_step() for _ in range(num)]


def test_nothing_to_do() -> None:
    schedule = StepSchedule()
    assert schedule.next_step() is None
    schedule.remove("unknown")
    assert repr(schedule) == "<StepSchedule prefills=0 decodes=0 waiting=0>"


def test_prefills_run_in_order_of_arrival_each_to_its_end() -> None:
    schedule = StepSchedule()
    schedule.add_prefill("a")
    schedule.add_prefill("b")
    assert steps(schedule, 3) == [PrefillStep("a")] * 3
    schedule.remove("a")
    assert schedule.next_step() == PrefillStep("b")


def test_decodes_take_turns() -> None:
    schedule = StepSchedule()
    for key in "abc":
        schedule.add_decode(key)
    assert steps(schedule, 6) == [DecodeStep(key) for key in "abcabc"]


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_long_prompt_delays_tokens_by_one_segment(rounds: int) -> None:
    schedule = StepSchedule(decode_rounds=rounds)
    schedule.add_decode("a")
    schedule.add_decode("b")
    schedule.add_prefill("p")
    turns = [DecodeStep(key) for key in "ab" * rounds]
    assert steps(schedule, 2 + 2 * len(turns)) == 2 * [PrefillStep("p"), *turns]


def test_decodes_that_are_gone_are_not_owed_any_steps() -> None:
    schedule = StepSchedule()
    for key in "abcd":
        schedule.add_decode(key)
    schedule.add_prefill("p")
    assert schedule.next_step() == PrefillStep("p")
    for key in "bcd":
        schedule.remove(key)
    assert steps(schedule, 3) == [DecodeStep("a"), PrefillStep("p"), DecodeStep("a")]
    schedule.remove("a")
    assert steps(schedule, 2) == [PrefillStep("p")] * 2


def test_a_budget_of_prompt_tokens_gives_more_rounds() -> None:
    assert decode_rounds(512, None) == 1
    assert decode_rounds(512, 512) == 1
    assert decode_rounds(512, 200) == 3
    schedule = StepSchedule()
    schedule.add_decode("a")
    schedule.add_prefill("p")
    schedule.pace(3)
    assert steps(schedule, 5) == [PrefillStep("p"), *3 * [DecodeStep("a")], PrefillStep("p")]


def test_requests_beyond_the_slots_wait_for_one_to_end() -> None:
    schedule = StepSchedule(max_decodes=2)
    for key in "abcd":
        schedule.add_decode(key)
    assert len(schedule) == 4
    assert steps(schedule, 3) == [DecodeStep(key) for key in "aba"]
    schedule.remove("c")
    schedule.remove("b")
    assert steps(schedule, 3) == [DecodeStep(key) for key in "ada"]
    assert repr(schedule) == "<StepSchedule prefills=0 decodes=2 waiting=0>"
    with pytest.raises(ConfigError, match="max_decodes is 0"):
        StepSchedule(max_decodes=0)


def test_a_round_has_at_least_one_step() -> None:
    with pytest.raises(ConfigError, match="decode_rounds is 0"):
        StepSchedule(decode_rounds=0)


@given(
    st.lists(
        st.sampled_from(
            ["next", *(f"{do} {key}" for do in ("prefill", "decode", "remove") for key in "abc")]
        )
    )
)
def test_nobody_starves_and_nobody_unknown_runs(actions: list[str]) -> None:
    schedule, known = StepSchedule(), {}
    for action in actions:
        do, _, key = action.partition(" ")
        if do == "next":
            step = schedule.next_step()
            assert (step is None) == (not known)
            assert step is None or known[step.key] is type(step)
        elif do == "remove":
            schedule.remove(key)
            known.pop(key, None)
        elif key not in known:
            (schedule.add_prefill if do == "prefill" else schedule.add_decode)(key)
            known[key] = PrefillStep if do == "prefill" else DecodeStep
    ran = Counter(step.key for step in steps(schedule, 8) if step is not None)
    decoding = [key for key, kind in known.items() if kind is DecodeStep]
    assert all(ran[key] >= 2 for key in decoding)
    prefilling = [key for key, kind in known.items() if kind is PrefillStep]
    assert not prefilling or any(ran[key] for key in prefilling)
