"""When the throughput balancer converts a node, and when it leaves things as they are."""

from __future__ import annotations

import math

import attrs

from prfaas.errors import ConfigError

FRACTIONAL_MODES = ("off", "slices", "mixed", "auto")


@attrs.frozen(kw_only=True)
class BalancerSettings:
    """How fast and how willingly roles change.

    A gain is the share by which the worst predicted utilisation falls. The gain that a change
    needs is ``min_gain``, plus half the relative standard error of the measured mix, and it is at
    least ``reversal_gain`` for a change that undoes the last one; that guard fades over
    ``reversal_s``. It is what keeps noise at the border between two splits from swinging nodes
    back and forth.

    Attributes:
        period_s: the control period; splits are compared once in it.
        window_s: arrivals and endings of this time make the measured demand.
        max_window_s: the window grows up to this while it has fewer than ``window_arrivals``.
        window_arrivals: arrivals that make a window good enough.
        min_arrivals: with fewer in the window nothing is converted.
        high_utilisation: predicted or measured utilisation that is pressure to act.
        safe_utilisation: what a stage that gives up nodes may be predicted to reach; waived while
            a stage is predicted above 1, where the higher sustainable rate decides.
        min_gain: least gain of a change, and of a fractional split over the best whole one.
        large_gain: gain from which several nodes convert at once, at most half of their role.
        reversal_gain, reversal_s: see above.
        num_confirmations: periods in a row that must ask for the same change.
        num_growing: periods in a row in which a growing queue is pressure.
        cooldown_s: rest of a cluster after each change.
        change_deadline_s: a change that is not done by then is rolled back.
        backoff_s: a node whose change failed is not tried again for this time.
        num_ignored_samples: loads of a node that are ignored after it came up or converted.
        silence_s: without arrivals for this time, nodes return to the configured roles.
        fractional: what to do when the best number of prefill nodes is not whole: ``off``,
            ``slices`` (one node alternates), ``mixed`` (one node does both, with a prefill budget)
            or ``auto`` (whichever nets more).
        slice_period_s: a cycle of the alternating node; None makes it as long as it takes for the
            drains to cost ``slice_loss`` of that node.
        slice_loss: see above.
        decode_base_share: share of a full decode step that does not depend on the batch, so that
            giving up a share d of the slots gains (1 - decode_base_share) d of the time.
        band_margin: narrow the band of t to this share around its optimum; None leaves it whole.
    """

    period_s: float = 10.0
    window_s: float = 480.0
    max_window_s: float = 960.0
    window_arrivals: int = 256
    min_arrivals: int = 20
    high_utilisation: float = 0.8
    safe_utilisation: float = 0.9
    min_gain: float = 0.03
    large_gain: float = 0.25
    reversal_gain: float = 0.12
    reversal_s: float = 3600.0
    num_confirmations: int = 2
    num_growing: int = 3
    cooldown_s: float = 60.0
    change_deadline_s: float = 120.0
    backoff_s: float = 600.0
    num_ignored_samples: int = 2
    silence_s: float = 600.0
    fractional: str = "off"
    slice_period_s: float | None = None
    slice_loss: float = 0.05
    decode_base_share: float = 0.5
    band_margin: float | None = None

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(BalancerSettings):
            value = getattr(self, field.name)
            if isinstance(field.default, int | float) and not 0 <= value < math.inf:
                raise ConfigError(f"{field.name} is {value}; it must be finite and at least 0")
        for name in ("period_s", "window_s", "change_deadline_s", "slice_period_s", "slice_loss"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite and above 0")
        if self.max_window_s < self.window_s:
            raise ConfigError(
                f"max_window_s is {self.max_window_s}; it must be at least window_s "
                f"({self.window_s})"
            )
        for name in ("decode_base_share", "band_margin"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 0 and below 1")
        if self.fractional not in FRACTIONAL_MODES:
            raise ConfigError(
                f"fractional is {self.fractional!r}; it must be one of {FRACTIONAL_MODES}"
            )
