"""A worker's change of role: what may be asked for, and when it is over."""

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
    assert repr(conversion) == "<Conversion prefill, draining>"
    assert conversion.drained() == 3
    assert not conversion.is_draining
    assert repr(conversion) == "<Conversion prefill>"


def test_the_present_role_is_no_change() -> None:
    conversion = Conversion(Role.DECODE)
    assert conversion.ask(Role.DECODE, 1) is ChangePhase.DONE
    assert not conversion.is_draining


def test_a_change_that_is_asked_for_again_keeps_the_name_that_it_has() -> None:
    conversion = Conversion(Role.DECODE)
    conversion.ask(Role.PREFILL, 1)
    assert conversion.ask(Role.PREFILL, 2) is ChangePhase.STARTED
    assert conversion.drained() == 1


@pytest.mark.parametrize("other", [Role.DECODE, Role.MIXED])
def test_a_change_can_be_called_back_or_followed_by_another(other: Role) -> None:
    conversion = Conversion(Role.DECODE)
    conversion.ask(Role.PREFILL, 1)
    assert conversion.ask(other, 2) is ChangePhase.STARTED
    assert conversion.role is other
    assert conversion.drained() == 2
    assert not conversion.is_draining
