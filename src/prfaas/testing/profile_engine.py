"""An engine that computes nothing and takes as long as a profile says."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence

import attrs

from prfaas.core import BlockId, GroupId, RequestId
from prfaas.errors import ConfigError, LocalProtocolError
from prfaas.seams import EntryMemory, OnLayer, StepResult
from prfaas.spec import ModelSpec

PrefillSeconds = Callable[[float, float], float]
"""Seconds for (new tokens, cached tokens)."""

_RESULT = StepResult(token=0, logits=struct.pack("<f", 0.0))
_NEVER_S = float("-inf")


@attrs.define
class _Session:
    """One open request: how far it is, and where its prefill began."""

    num_tokens: int
    first_token: int
    spent_s: float = 0.0


class ProfileEngine:
    """The Engine seam as a stopwatch: real blocks, real bytes on the wire, pretended computing.

    A testbed of a deployment whose hardware is not there. The rows and states that it ships are
    whatever the pool holds. A prefill of n tokens after c cached ones takes ``prefill_s(n, c)`` in
    all, spread evenly over its tokens' share of that curve and over the layers; the layers become
    ready one after the other. A decode step takes ``decode_s``.

    With ``absorb_s``, calls that follow each other closely are timed as one run: what the caller
    needed in between comes out of the next call's time, as in an engine that prepares the next
    step while the device works. A testbed whose engines are never idle then has the profile's
    rate, whatever Python adds; a measurement of single calls wants 0.

    Args:
        spec: the cache layout; scale its sizes down together with the link.
        prefill_s: seconds for (new tokens, cached tokens).
        decode_s: seconds of one decode step of one request. Steps of the requests of a batch
            follow each other here: a batch that takes T together is T / batch size for each.
        segment_tokens: see `Engine.segment_tokens`.
        absorb_s: longest pause that still counts as one run.
        clock, sleep: of the engine's thread.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        prefill_s: PrefillSeconds,
        decode_s: float,
        segment_tokens: int,
        absorb_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if segment_tokens < 1 or decode_s < 0 or absorb_s < 0:
            raise ConfigError(
                f"segment_tokens is {segment_tokens}, decode_s {decode_s}, absorb_s {absorb_s}; "
                "they need segment_tokens >= 1 and times of at least 0"
            )
        self._spec = spec
        self._prefill_s = prefill_s
        self._decode_s = decode_s
        self._segment_tokens = segment_tokens
        self._absorb_s = absorb_s
        self._clock = clock
        self._sleep = sleep
        self._layers = [i for i, layer in enumerate(spec.layers) if layer is not None]
        self._sessions: dict[RequestId, _Session] = {}
        self._free_s = _NEVER_S

    def __repr__(self) -> str:
        return f"<ProfileEngine {self._spec.name}, {self.num_open} open>"

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def segment_tokens(self) -> int:
        return self._segment_tokens

    @property
    def num_open(self) -> int:
        """Requests that are open."""
        return len(self._sessions)

    def open(
        self,
        request_id: RequestId,
        num_tokens: int = 0,
        memory: EntryMemory | None = None,
        slots: Mapping[GroupId, BlockId] | None = None,
    ) -> None:
        if request_id in self._sessions:
            raise LocalProtocolError(f"request {request_id!r} is already open; close it first")
        self._sessions[request_id] = _Session(num_tokens, num_tokens)

    def prefill(
        self,
        request_id: RequestId,
        tokens: Sequence[int],
        start: int,
        memory: EntryMemory | None = None,
        slots: Mapping[GroupId, BlockId] | None = None,
        on_layer: OnLayer | None = None,
    ) -> StepResult:
        session = self._session(request_id)
        if not tokens or start != session.num_tokens:
            raise LocalProtocolError(
                f"request {request_id!r} holds {session.num_tokens} tokens, the segment has "
                f"{len(tokens)} from {start} on; segments follow each other and are not empty"
            )
        session.num_tokens += len(tokens)
        first = session.first_token
        total_s = self._prefill_s(session.num_tokens - first, first)
        from_s = self._start()
        seconds, session.spent_s = max(0.0, total_s - session.spent_s), total_s
        for order, index in enumerate(self._layers, 1):
            self._until(from_s + seconds * order / len(self._layers))
            if on_layer is not None:
                on_layer(index)
        self._free_s = from_s + seconds
        return _RESULT

    def decode(self, request_id: RequestId, token: int) -> StepResult:
        self._session(request_id).num_tokens += 1
        self._free_s = self._start() + self._decode_s
        self._until(self._free_s)
        return _RESULT

    def close(self, request_id: RequestId) -> None:
        self._sessions.pop(request_id, None)

    def _session(self, request_id: RequestId) -> _Session:
        if request_id not in self._sessions:
            raise LocalProtocolError(f"request {request_id!r} is not open")
        return self._sessions[request_id]

    def _start(self) -> float:
        """When the call counts as begun."""
        now = self._clock()
        return self._free_s if 0 <= now - self._free_s < self._absorb_s else now

    def _until(self, time_s: float) -> None:
        wait_s = time_s - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)
