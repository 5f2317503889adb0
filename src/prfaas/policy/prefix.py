"""Cached prefixes that may travel to the node that prefills: whose, how long they take, and when
that pays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

import attrs

from prfaas.core import ClusterId, ClusterKind, NodeId
from prfaas.policy.forecast import Forecast
from prfaas.policy.survey import Survey
from prfaas.seams import Candidate
from prfaas.spec import ModelSpec

_Key = TypeVar("_Key")


@attrs.frozen(kw_only=True)
class Prefix:
    """A cached prefix that another node can send to the one that prefills.

    Attributes:
        source: node that has it.
        num_tokens: its length.
        num_bytes: what has to cross: rows that the taker lacks, and the states.
        transfer_s: time until it is there.
        link_s: work that it is for the link between the clusters; 0 inside a cluster.
    """

    source: NodeId
    num_tokens: int
    num_bytes: int
    transfer_s: float
    link_s: float


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
    link_s = 8 * num_bytes / link_bps
    transfer_s = setup_s + link_s
    if not transfer_s < without_s - with_s:
        return None
    return Prefix(
        source=source.node.node_id,
        num_tokens=longer,
        num_bytes=num_bytes,
        transfer_s=transfer_s,
        link_s=link_s,
    )


class PrefixSources:
    """Who can send the longest usable prefix of a surveyed prompt to a node.

    Known are the nodes that the survey found, which has one for every hit that occurs: those that
    may prefill, and those that may decode, which keep what landed there.

    Args:
        spec: gives bytes.
        survey: the request and the nodes.
        link_bps: rate of the link.
        backlog_s: time until it has carried what was admitted before.
        setup_s: fixed time of a transfer.
    """

    __slots__ = (
        "_backlog_s",
        "_by_cluster",
        "_by_kind",
        "_is_link_down",
        "_link_bps",
        "_setup_s",
        "_spec",
    )

    def __init__(
        self, spec: ModelSpec, survey: Survey, *, link_bps: float, backlog_s: float, setup_s: float
    ) -> None:
        self._spec = spec
        self._is_link_down = survey.is_link_down
        self._link_bps = link_bps
        self._backlog_s = backlog_s
        self._setup_s = setup_s
        self._by_cluster: dict[ClusterId, Candidate] = {}
        self._by_kind: dict[ClusterKind, Candidate] = {}
        for candidates in (survey.local, survey.decoders, survey.remote):
            for candidate in candidates:
                _keep_longer(self._by_cluster, candidate.node.cluster_id, candidate)
                _keep_longer(self._by_kind, candidate.node.kind, candidate)

    def offers(self, taker: Candidate) -> Iterator[Prefix]:
        """The longest prefix of its own cluster, and the longest from beyond the link.

        Each only if it is longer than what the taker has itself. The fabric inside a cluster never
        binds (Eq. 4 of arXiv 2604.15039), so there only the setup takes time.
        """
        node, own = taker.node, taker.hit.num_cached_tokens
        near = self._by_cluster.get(node.cluster_id)
        if near is not None and near.hit.num_cached_tokens > own:
            yield self._prefix(taker, near, wait_s=0.0, link_bps=math.inf)
        if self._is_link_down:
            return
        is_remote = node.kind is ClusterKind.PRFAAS
        far = self._by_kind.get(ClusterKind.PD if is_remote else ClusterKind.PRFAAS)
        if far is not None and far.hit.num_cached_tokens > own:
            yield self._prefix(taker, far, wait_s=self._backlog_s, link_bps=self._link_bps)

    def _prefix(
        self, taker: Candidate, source: Candidate, *, wait_s: float, link_bps: float
    ) -> Prefix:
        num_bytes = prefix_bytes(self._spec, taker, source)
        link_s = 8 * num_bytes / link_bps
        return Prefix(
            source=source.node.node_id,
            num_tokens=source.hit.num_cached_tokens,
            num_bytes=num_bytes,
            transfer_s=self._setup_s + wait_s + link_s,
            link_s=link_s,
        )


def _keep_longer(longest: dict[_Key, Candidate], key: _Key, candidate: Candidate) -> None:
    known = longest.get(key)
    if known is None or candidate.hit.num_cached_tokens > known.hit.num_cached_tokens:
        longest[key] = candidate
