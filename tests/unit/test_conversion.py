"""A worker's change of role: who may ask, and when it is over."""

from __future__ import annotations

import pytest

from prfaas.core import Role
from prfaas.policy.conversion import Conversion
from prfaas.seams import ChangePhase


def test_a_change_lasts_until_the_old_work_is_gone() -> None:
    conversion = Conversion(Role.DECODE)
    assert conversion.ask(Role.PREFILL, 3) is ChangePhase.STARTED
    assert conversion.role is Role.PREFILL
    assert conversion.is_draining
    assert repr(conversion) == "<Conversion prefill, leaves decode>"
    assert conversion.drained() == 3
    assert not conversion.is_draining
    assert repr(conversion) == "<Conversion prefill>"


def test_the_present_role_is_no_change() -> None:
    conversion = Conversion(Role.DECODE)
    assert conversion.ask(Role.DECODE, 1) is ChangePhase.DONE
    assert not conversion.is_draining


def test_a_second_change_is_refused_until_the_first_is_over() -> None:
    conversion = Conversion(Role.DECODE)
    conversion.ask(Role.PREFILL, 1)
    assert conversion.ask(Role.MIXED, 2) is ChangePhase.FAILED
    assert conversion.role is Role.PREFILL
    assert conversion.drained() == 1
    assert conversion.ask(Role.MIXED, 4) is ChangePhase.STARTED


@pytest.mark.parametrize("again", [Role.PREFILL, Role.DECODE])
def test_a_change_can_be_asked_for_again_and_be_called_back(again: Role) -> None:
    conversion = Conversion(Role.DECODE)
    conversion.ask(Role.PREFILL, 1)
    assert conversion.ask(again, 2) is ChangePhase.STARTED
    assert conversion.role is again
    assert conversion.drained() == 2
