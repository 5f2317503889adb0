"""How far the predicted TTFT is from the measured one."""

from __future__ import annotations

from collections import deque

from prfaas.errors import ConfigError
from prfaas.seams import RequestOutcome


class PredictionError:
    """Relative error of the predicted TTFT, |predicted - measured| / measured.

    Failed requests, and those for which nothing was predicted or measured, do not count.

    Args:
        window: latest errors that the P90 is taken of.
    """

    def __init__(self, *, window: int = 512) -> None:
        if window < 1:
            raise ConfigError(f"window is {window}; it must be at least 1")
        self._latest: deque[float] = deque(maxlen=window)
        self._sum = 0.0
        self._sum_signed = 0.0
        self._count = 0

    def __repr__(self) -> str:
        if not self._count:
            return "<PredictionError, nothing compared>"
        return (
            f"<PredictionError of {self._count}: mean {self.mean:.0%}, P90 {self.p90:.0%}, "
            f"bias {self.bias:+.0%}>"
        )

    @property
    def count(self) -> int:
        """Requests that were compared."""
        return self._count

    @property
    def mean(self) -> float | None:
        """Mean relative error of all of them; None before the first."""
        return self._sum / self._count if self._count else None

    @property
    def bias(self) -> float | None:
        """Mean of (predicted - measured) / measured; below 0 it was predicted too early."""
        return self._sum_signed / self._count if self._count else None

    @property
    def p90(self) -> float | None:
        """90th percentile of the latest ones (nearest rank); None before the first."""
        if not self._latest:
            return None
        return sorted(self._latest)[-(-9 * len(self._latest) // 10) - 1]

    def observe(self, outcome: RequestOutcome) -> None:
        """Compares what was predicted with what came."""
        predicted_s = outcome.decision.predicted_ttft_s
        if not outcome.ok or predicted_s is None or not outcome.ttft_s > 0:
            return
        signed = (predicted_s - outcome.ttft_s) / outcome.ttft_s
        self._count += 1
        self._sum += abs(signed)
        self._sum_signed += signed
        self._latest.append(abs(signed))
