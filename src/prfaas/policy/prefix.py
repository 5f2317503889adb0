"""Whether a cached prefix should travel to the node that prefills."""

from __future__ import annotations

import attrs

from prfaas.core import NodeId
from prfaas.policy.forecast import Forecast
from prfaas.seams import Candidate
from prfaas.spec import ModelSpec


@attrs.frozen(kw_only=True)
class Prefix:
    """A cached prefix that is worth its way.

    Attributes:
        source: node that has it.
        num_tokens: its length.
        num_bytes: what has to cross: rows that the taker lacks, and the states.
        transfer_s: time that this takes.
    """

    source: NodeId
    num_tokens: int
    num_bytes: int
    transfer_s: float


def prefix_bytes(spec: ModelSpec, taker: Candidate, source: Candidate) -> int:
    """What has to cross so that the taker can start where the source's cache ends."""
    num_tokens = source.hit.num_cached_tokens
    return spec.kv_bytes_delta(num_tokens, min(taker.hit.num_held_tokens, num_tokens))


def worthwhile_prefix(
    spec: ModelSpec,
    forecast: Forecast,
    taker: Candidate,
    source: Candidate,
    *,
    num_tokens: int,
    link_bps: float,
    setup_s: float,
) -> Prefix | None:
    """The source's prefix of a prompt, if the taker gets it sooner than it computes it.

    That is, if setup_s + 8 bytes / link_bps is less than the prefill that it saves. The paper
    leaves this test out. None also where the taker has as much itself, or nothing tells how fast
    it is.
    """
    own, longer = taker.hit.num_cached_tokens, source.hit.num_cached_tokens
    if longer <= own:
        return None
    without_s = forecast.prefill_s(taker.node, num_tokens - own, own)
    with_s = forecast.prefill_s(taker.node, num_tokens - longer, longer)
    if without_s is None or with_s is None:
        return None
    num_bytes = prefix_bytes(spec, taker, source)
    transfer_s = setup_s + 8 * num_bytes / link_bps
    if not transfer_s < without_s - with_s:
        return None
    return Prefix(
        source=source.node.node_id,
        num_tokens=longer,
        num_bytes=num_bytes,
        transfer_s=transfer_s,
    )
