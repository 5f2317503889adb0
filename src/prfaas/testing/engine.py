"""A toy engine in plain Python that notices every byte of its cache."""

from __future__ import annotations

import hashlib
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from prfaas.core import BlockId, DType, GroupId, RequestId
from prfaas.errors import ConfigError, EngineError, LocalProtocolError
from prfaas.seams import EntryMemory, OnLayer, StepResult
from prfaas.spec import FullAttentionSpec, LayerSpec, LinearStateSpec, ModelSpec

VOCAB_SIZE = 64
_MULTIPLIER = 6364136223846793005  # of Knuth's MMIX generator: order and number of tokens matter
_MASK = 2**64 - 1


def toy_spec(*, granule_tokens: int = 16, revision: str = "") -> ModelSpec:
    """Two layers of rows and two of states, a few bytes each."""
    rows = FullAttentionSpec(num_kv_heads=1, key_dim=4, value_dim=4, dtype=DType.FLOAT16)
    state = LinearStateSpec.delta_rule(
        num_heads=1, key_dim=4, value_dim=4, conv_channels=4, conv_columns=2
    )
    return ModelSpec(
        name="toy",
        layers=(state, rows, state, rows),
        granule_tokens=granule_tokens,
        revision=revision,
    )


@attrs.define
class _Session:
    """Working cache of one open request: a digest over every row, and the state, of each layer."""

    num_tokens: int
    rows: dict[int, hashlib.blake2b]
    states: dict[int, int]


class FakeEngine:
    """The Engine seam for tests: a deterministic hybrid model whose cache really matters.

    A row is a hash of its layer, position and token. A state is a number that every token of the
    request has changed once, in order. The next token depends on all rows, as they were read back
    at `open`, and on all states: a row that is missing, damaged, doubled or misplaced, and a state
    of another position, change the output.

    Args:
        spec: any model; `toy_spec` makes a small one.
        segment_tokens: see `Engine.segment_tokens`.
        prefill_s_per_token, decode_s: pretended computing time.
        sleep: spends it, in the engine's thread.
        fail_at: method name -> which call of it raises EngineError, from 1. May be changed later.
        before: called with method name and request id before each call, in the engine's thread.
    """

    def __init__(
        self,
        spec: ModelSpec | None = None,
        *,
        segment_tokens: int = 16,
        prefill_s_per_token: float = 0.0,
        decode_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
        fail_at: Mapping[str, int] | None = None,
        before: Callable[[str, RequestId], None] | None = None,
    ) -> None:
        if segment_tokens < 1:
            raise ConfigError(f"segment_tokens is {segment_tokens}; it must be at least 1")
        self._spec = spec or toy_spec()
        small = [
            i for i, layer in self._layers() if not layer.is_token_kind if layer.entry_bytes(1) < 8
        ]
        if small or sum(1 for _ in self._layers()) < 2:
            raise ConfigError(
                f"layers {small} of {self._spec.name} keep states of less than 8 bytes, or the "
                "model has less than 2 layers; use larger ones"
            )
        self._segment_tokens = segment_tokens
        self._prefill_s_per_token = prefill_s_per_token
        self._decode_s = decode_s
        self._sleep = sleep
        self._sessions: dict[RequestId, _Session] = {}
        self.fail_at = dict(fail_at or {})
        self.before = before
        self.num_calls: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<FakeEngine {self._spec.name}, {self.num_open} open, {dict(self.num_calls)} calls>"

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def segment_tokens(self) -> int:
        return self._segment_tokens

    @property
    def num_open(self) -> int:
        """Requests with a working cache."""
        return len(self._sessions)

    def open(
        self,
        request_id: RequestId,
        num_tokens: int = 0,
        memory: EntryMemory | None = None,
        slots: Mapping[GroupId, BlockId] | None = None,
    ) -> None:
        self._call("open", request_id)
        if request_id in self._sessions:
            raise LocalProtocolError(f"request {request_id!r} is already open; close it first")
        if num_tokens and memory is None:
            raise LocalProtocolError(
                f"request {request_id!r} starts after {num_tokens} tokens but names no memory"
            )
        session = _Session(num_tokens, {}, {})
        for index, layer in self._layers():
            if layer.is_token_kind:
                session.rows[index] = digest = hashlib.blake2b(digest_size=16)
                if memory is not None:
                    for span in memory.rows(index, 0, num_tokens):
                        digest.update(span.data)
            elif num_tokens and memory is not None:
                data = memory.slot(index, slots or {})
                session.states[index] = _read_state(data[: layer.entry_bytes(num_tokens)])
            else:
                session.states[index] = index + 1
        self._sessions[request_id] = session

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
        if not tokens:
            raise LocalProtocolError(f"request {request_id!r}: a segment has at least 1 token")
        if start != session.num_tokens:
            raise LocalProtocolError(
                f"request {request_id!r} holds {session.num_tokens} tokens, the segment starts at "
                f"{start}; segments follow each other without gaps"
            )
        self._sleep(self._prefill_s_per_token * len(tokens))
        stop = start + len(tokens)
        for order, (index, layer) in enumerate(self._layers()):
            self._run_layer(session, index, layer, tokens)
            if memory is not None and layer.is_token_kind:
                self._write_rows(memory, index, layer, tokens, start)
            elif memory is not None and slots:
                data = memory.slot(index, slots)[: layer.entry_bytes(stop)]
                data[:] = _write_state(session.states[index], len(data))
            if order == 1:
                self._call("prefill", request_id)  # so that it fails in mid segment
            if on_layer is not None:
                on_layer(index)
        session.num_tokens = stop
        return _logits(session)

    def decode(self, request_id: RequestId, token: int) -> StepResult:
        session = self._session(request_id)
        self._call("decode", request_id)
        self._sleep(self._decode_s)
        for index, layer in self._layers():
            self._run_layer(session, index, layer, (token,))
        session.num_tokens += 1
        return _logits(session)

    def close(self, request_id: RequestId) -> None:
        self._sessions.pop(request_id, None)

    def _layers(self) -> Iterator[tuple[int, LayerSpec]]:
        return ((i, layer) for i, layer in enumerate(self._spec.layers) if layer is not None)

    def _session(self, request_id: RequestId) -> _Session:
        if request_id not in self._sessions:
            raise LocalProtocolError(f"request {request_id!r} is not open")
        return self._sessions[request_id]

    def _call(self, method: str, request_id: RequestId) -> None:
        self.num_calls[method] += 1
        if self.before is not None:
            self.before(method, request_id)
        if self.fail_at.get(method) == self.num_calls[method]:
            self.close(request_id)
            raise EngineError(
                f"call {self.num_calls[method]} of {method} was told to fail, on {request_id!r}"
            )

    def _run_layer(
        self, session: _Session, index: int, layer: LayerSpec, tokens: Sequence[int]
    ) -> None:
        for position, token in enumerate(tokens, session.num_tokens):
            if layer.is_token_kind:
                session.rows[index].update(_row(index, position, token, layer.entry_bytes(1)))
            else:
                state = session.states[index]
                session.states[index] = (state * _MULTIPLIER + token + 1) & _MASK

    def _write_rows(
        self,
        memory: EntryMemory,
        index: int,
        layer: LayerSpec,
        tokens: Sequence[int],
        start: int,
    ) -> None:
        for span in memory.rows(index, start, start + len(tokens)):
            first = span.first_token - start
            rows = (
                _row(index, start + i, tokens[i], layer.entry_bytes(1))
                for i in range(first, first + span.num_rows)
            )
            span.data[:] = b"".join(rows)


def _row(index: int, position: int, token: int, num_bytes: int) -> bytes:
    return _expand(struct.pack("<3q", index, position, token), num_bytes)


def _write_state(state: int, num_bytes: int) -> bytes:
    head = state.to_bytes(8, "little")
    return (head + _expand(head, num_bytes))[:num_bytes]


def _read_state(data: memoryview) -> int:
    """The number that was written; another one if any byte is not as `_write_state` left it."""
    state = int.from_bytes(data[:8], "little")
    if data == _write_state(state, len(data)):
        return state
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _expand(seed: bytes, num_bytes: int) -> bytes:
    data = hashlib.blake2b(seed, digest_size=min(64, num_bytes)).digest()
    while len(data) < num_bytes:
        data += hashlib.blake2b(data[-64:]).digest()
    return data[:num_bytes]


def _logits(session: _Session) -> StepResult:
    """One logit per vocabulary entry; all of them change with any row or state."""
    digest = hashlib.blake2b(digest_size=VOCAB_SIZE)
    for index in sorted(session.rows):
        digest.update(session.rows[index].digest())
    for index in sorted(session.states):
        digest.update(session.states[index].to_bytes(8, "little"))
    values = [byte + (VOCAB_SIZE - i) / 128 for i, byte in enumerate(digest.digest())]
    return StepResult(
        token=max(range(VOCAB_SIZE), key=values.__getitem__),
        logits=struct.pack(f"<{VOCAB_SIZE}f", *values),
    )
