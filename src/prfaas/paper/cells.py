"""Every printed figure beside ours, with what the comparison is worth."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import attrs

from prfaas.paper.tables import Printed


class Kind(enum.Enum):
    """What agreement with a printed figure proves.

    INPUT: nothing; we feed the figure in.
    FITTED: that the model can hold it; a parameter or a convention was chosen for it, or it
    follows by arithmetic from figures for which one was.
    PREDICTED: that the model is right about it; nothing was chosen for it.
    """

    INPUT = "input"
    FITTED = "fitted"
    PREDICTED = "predicted"


@attrs.frozen(kw_only=True)
class Cell:
    """One printed figure and ours, both in ``unit``; ``where`` is the table or section."""

    name: str
    where: str
    unit: str
    ours: float
    printed: Printed
    kind: Kind
    note: str = ""

    @property
    def theirs(self) -> float:
        return self.printed.value

    @property
    def error_pct(self) -> float:
        """Ours above theirs, in per cent of theirs."""
        return 100 * (self.ours / self.theirs - 1)

    @property
    def inside_rounding(self) -> bool:
        """Whether ours rounds to what is printed."""
        return self.printed.holds(self.ours)

    @property
    def counts(self) -> bool:
        """Whether the error says something: not fed in, not hidden by rounding, not loose."""
        return not (self.kind is Kind.INPUT or self.inside_rounding or self.printed.loose)


def max_error_pct(cells: Iterable[Cell]) -> float:
    """The largest error, by size, of the cells that count; 0 when none does."""
    return max((abs(cell.error_pct) for cell in cells if cell.counts), default=0.0)
