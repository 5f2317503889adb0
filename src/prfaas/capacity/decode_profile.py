"""Decode time of one instance, and what it costs to let decode instances prefill as well."""

from __future__ import annotations

import math

import attrs

from prfaas.errors import ConfigError

_ROUNDING = 1e-9


@attrs.frozen(kw_only=True)
class DecodeProfile:
    """One decode step takes ``base_s + per_request_s * batch`` seconds.

    The base is what a step costs whatever the batch, above all one read of the weights.
    """

    base_s: float = attrs.field()
    per_request_s: float = attrs.field()

    @base_s.validator
    def _check_base(self, _: object, value: float) -> None:
        if not 0 < value < math.inf:
            raise ConfigError(f"base_s is {value!r}; it must be finite and greater than 0")

    @per_request_s.validator
    def _check_per_request(self, _: object, value: float) -> None:
        if not 0 <= value < math.inf:
            raise ConfigError(f"per_request_s is {value!r}; it must be finite and at least 0")

    @classmethod
    def constant(cls, step_s: float) -> DecodeProfile:
        """Build the profile of a step that takes ``step_s`` at every batch."""
        return cls(base_s=step_s, per_request_s=0.0)

    def step_s(self, batch_size: float) -> float:
        """Seconds of one step over ``batch_size`` requests."""
        return self.base_s + self.per_request_s * batch_size

    def batch_within(self, step_s: float) -> int | None:
        """The largest batch whose step stays within ``step_s``; None when no batch exceeds it."""
        room_s = step_s - self.base_s
        if room_s < 0:
            return 0
        if self.per_request_s == 0:
            return None
        return math.floor(room_s / self.per_request_s * (1 + _ROUNDING))


def mixed_capacity(decode: DecodeProfile, step_s: float, prefill_share: float) -> float:
    """The share of its decode slots that a MIXED node keeps.

    The node prefills for ``prefill_share`` of every step of ``step_s`` seconds (the SLO) and
    decodes in the rest. Every step pays the base, however few requests are in it. With
    a = base_s / step_s, the share of slots left is 1 - prefill_share / (1 - a): a MIXED node that
    gives up X of its slots gains only X (1 - a) of prefill time. Whole nodes that take turns
    (time slicing) give up X and gain X, less the drains (`time_slicing_loss`).

    Raises:
        ConfigError: ``prefill_share`` is outside 0 to 1, or one step of a batch of none already
            exceeds ``step_s``.
    """
    if not 0 <= prefill_share <= 1:
        raise ConfigError(f"prefill_share is {prefill_share!r}; it must be from 0 to 1")
    free_share = 1 - decode.base_s / step_s if step_s > 0 else -1.0
    if free_share < 0:
        raise ConfigError(
            f"step_s is {step_s!r} but an empty step takes {decode.base_s} s; allow longer steps"
        )
    if prefill_share > free_share:
        return 0.0
    if decode.per_request_s == 0:
        return 1.0  # the batch costs nothing, so taking its time away costs none of it
    return 1 - prefill_share / free_share if prefill_share else 1.0


def time_slicing_loss(*, period_s: float, drain_s: float, num_nodes: float) -> float:
    """The share of ``num_nodes`` decode-capable nodes lost when one of them takes turns.

    Once per period one node stops taking requests, drains its batch and then prefills. The drain
    lasts until the last request is done, at most output_tokens * step_s. Requests are spread
    evenly over their outputs, so during a drain half of the batch is idle on average.

    Raises:
        ConfigError: the drain does not fit the period, or there is no node.
    """
    if not 0 <= drain_s <= period_s < math.inf or period_s == 0:
        raise ConfigError(
            f"a drain of {drain_s!r} s does not fit a period of {period_s!r} s; switch less often"
        )
    if not 0 < num_nodes < math.inf:
        raise ConfigError(f"num_nodes is {num_nodes!r}; it must be finite and greater than 0")
    return drain_s / 2 / (period_s * num_nodes)
