"""Solves the joint fit of ``prfaas.paper.fit`` and says how far it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from prfaas.errors import MissingExtra, PrfaasError
from prfaas.paper import fit

_AT = range(len(fit.PARAMETERS))
_MAX_STEPS = 60
_FIRST_DAMPING = 1e-3
_CONVERGED = 1e-8
_LEAST_FACTOR = 0.01
_DIFFERENCE = 1e-6


@attrs.frozen(kw_only=True)
class LeftOut:
    """One figure predicted by a fit to the others; of ``fit.TWINS`` both are left out.

    Attributes:
        leverage: how much of the figure's own value the full fit follows, 0 to 1. Near 1, the
            figure alone pins some combination of the parameters and nothing checks it.
        condition: of the Jacobian without the figure; far above the full fit's, the others
            leave that combination open, and the prediction is what positive parameters allow.
    """

    name: str
    ours: float
    theirs: float
    error_pct: float
    leverage: float
    condition: float


@attrs.frozen(kw_only=True)
class JointFit:
    """The solution, and what holds it in place.

    Attributes:
        parameters: in the order of ``fit.PARAMETERS``.
        largest_error_pct: of the ten figures, by size.
        condition: largest over smallest singular value of d ln figure / d ln parameter: how much
            looser the weakest direction of the fit is than the firmest.
        std_errors_pct: per parameter, from the residuals; five degrees of freedom.
        pinned_by: per parameter, the two figures that would move it most.
    """

    parameters: tuple[float, ...]
    num_steps: int
    largest_error_pct: float
    condition: float
    std_errors_pct: tuple[float, ...]
    pinned_by: tuple[tuple[str, str], ...]
    leave_one_out: tuple[LeftOut, ...]


def _linear_algebra() -> Any:
    try:
        from numpy import linalg
    except ImportError as error:
        raise MissingExtra(package="numpy", extra="cli") from error
    return linalg


def _errors(parameters: Sequence[float], names: Sequence[str]) -> list[float]:
    figures = fit.figures(tuple(parameters))
    return [figures[name] / fit.PUBLISHED[name] - 1 for name in names]


def _jacobian(parameters: Sequence[float], names: Sequence[str]) -> list[list[float]]:
    """d error / d ln parameter by forward differences; one row per figure."""
    here = _errors(parameters, names)
    columns = []
    for at in _AT:
        nearby = list(parameters)
        nearby[at] *= 1 + _DIFFERENCE
        there = _errors(nearby, names)
        columns.append([(b - a) / _DIFFERENCE for a, b in zip(here, there, strict=True)])
    return [list(row) for row in zip(*columns, strict=True)]


def _sum_of_squares(parameters: Sequence[float], names: Sequence[str]) -> float:
    return sum(error * error for error in _errors(parameters, names))


def solve(names: Sequence[str], begin: Sequence[float]) -> tuple[tuple[float, ...], int]:
    """Least squares of the relative errors of ``names`` by Levenberg and Marquardt's method.

    A step is a factor, kept above `_LEAST_FACTOR`, so that every parameter stays positive.

    Returns:
        The parameters and the number of steps taken.

    Raises:
        PrfaasError: no convergence.
        ConfigError: a step led to a profile that falls somewhere; begin nearer.
        MissingExtra: numpy is not installed.
    """
    lstsq = _linear_algebra().lstsq
    parameters, damping = tuple(begin), _FIRST_DAMPING
    now = _sum_of_squares(parameters, names)
    for num_steps in range(_MAX_STEPS):
        rows = _jacobian(parameters, names)
        target = [-error for error in _errors(parameters, names)] + [0.0] * len(parameters)
        while True:
            ridge = [[damping**0.5 * (i == j) for j in _AT] for i in _AT]
            step = [float(part) for part in lstsq(rows + ridge, target, rcond=None)[0]]
            if max(map(abs, step)) < _CONVERGED:
                return parameters, num_steps
            pairs = zip(parameters, step, strict=True)
            tried = tuple(value * max(1 + part, _LEAST_FACTOR) for value, part in pairs)
            then = _sum_of_squares(tried, names)
            if then < now:
                break
            damping *= 10
        gained, parameters, now, damping = now - then, tried, then, damping / 10
        if gained <= _CONVERGED * now:
            return parameters, num_steps + 1
    raise PrfaasError(
        f"the fit to {len(names)} figures did not converge in {_MAX_STEPS} steps; its last step "
        f"was {max(map(abs, step)):.2g} of a parameter; begin nearer to the solution"
    )


def _leave_out(name: str, leverage: float) -> LeftOut:
    hidden = fit.TWINS if name in fit.TWINS else {name}
    others = [other for other in fit.PUBLISHED if other not in hidden]
    parameters, _ = solve(others, fit.start())
    ours, theirs = fit.figures(parameters)[name], fit.PUBLISHED[name]
    return LeftOut(
        name=name,
        ours=ours,
        theirs=theirs,
        error_pct=100 * (ours / theirs - 1),
        leverage=leverage,
        condition=float(_linear_algebra().cond(_jacobian(fit.DERIVED, others))),
    )


def joint_fit() -> JointFit:
    """Fit all ten figures, then each one left out, always from ``fit.start()``.

    Raises:
        MissingExtra: numpy is not installed.
    """
    linalg = _linear_algebra()
    names = tuple(fit.PUBLISHED)
    parameters, num_steps = solve(names, fit.start())
    errors, rows = _errors(parameters, names), _jacobian(parameters, names)
    inverse = [[float(weight) for weight in row] for row in linalg.pinv(rows)]
    variance = sum(error * error for error in errors) / (len(names) - len(parameters))
    ranked = [sorted(zip(map(abs, row), names, strict=True), reverse=True) for row in inverse]
    return JointFit(
        parameters=parameters,
        num_steps=num_steps,
        largest_error_pct=100 * max(map(abs, errors)),
        condition=float(linalg.cond(rows)),
        std_errors_pct=tuple(100 * (variance * sum(w * w for w in row)) ** 0.5 for row in inverse),
        pinned_by=tuple((row[0][1], row[1][1]) for row in ranked),
        leave_one_out=tuple(
            _leave_out(name, sum(rows[n][at] * inverse[at][n] for at in _AT))
            for n, name in enumerate(names)
        ),
    )
