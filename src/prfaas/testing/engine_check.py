"""Conformance of an `Engine`: what each must hold so that its caches can be shared and shipped.

Nothing here needs pytest: `check_engine` raises AssertionError with the clause that failed.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Mapping, Sequence

import attrs

from prfaas.core import BlockId, GroupId, RequestId
from prfaas.errors import LocalProtocolError
from prfaas.seams import Engine, RowSpan, StepResult
from prfaas.spec import LayerSpec, ModelSpec

_BLOCK_TOKENS = 24
_GARBAGE = 0xA5
NUM_DECODED = 3

MakeEngine = Callable[[], Engine]


class BlockMemory:
    """An `EntryMemory` of separate blocks that start with garbage in them.

    Args:
        spec: the model.
        num_tokens: rows that fit.
    """

    def __init__(self, spec: ModelSpec, num_tokens: int) -> None:
        self._groups = {
            index: (group.group_id, group.layer_spec)
            for group in spec.groups
            for index in group.layer_indices
        }
        num_blocks = -(-num_tokens // _BLOCK_TOKENS)
        self._blocks = {
            index: [_garbage(layer.entry_bytes(_BLOCK_TOKENS)) for _ in range(num_blocks)]
            for index, (_, layer) in self._groups.items()
            if layer.is_token_kind
        }
        self._slots: dict[tuple[int, BlockId], bytearray] = {}

    def rows(self, layer_index: int, start: int, stop: int) -> list[RowSpan]:
        """See `EntryMemory.rows`."""
        row_bytes = self._layer(layer_index).entry_bytes(1)
        spans = []
        while start < stop:
            block, first = divmod(start, _BLOCK_TOKENS)
            num_rows = min(_BLOCK_TOKENS - first, stop - start)
            data = memoryview(self._blocks[layer_index][block])
            spans.append(
                RowSpan(
                    first_token=start,
                    num_rows=num_rows,
                    data=data[first * row_bytes : (first + num_rows) * row_bytes],
                )
            )
            start += num_rows
        return spans

    def slot(self, layer_index: int, slots: Mapping[GroupId, BlockId]) -> memoryview:
        """See `EntryMemory.slot`."""
        group_id, layer = self._groups[layer_index]
        key = (layer_index, slots[group_id])
        full = layer.entry_bytes(2**31)
        return memoryview(self._slots.setdefault(key, _garbage(full)))

    def content(self, num_tokens: int, slots: Mapping[GroupId, BlockId]) -> dict[int, bytes]:
        """By layer, all rows of the first ``num_tokens`` tokens, or the state after them."""
        found = {}
        for index, (_, layer) in self._groups.items():
            if layer.is_token_kind:
                found[index] = b"".join(span.data for span in self.rows(index, 0, num_tokens))
            else:
                found[index] = bytes(self.slot(index, slots)[: layer.entry_bytes(num_tokens)])
        return found

    def fill(self, num_tokens: int, slots: Mapping[GroupId, BlockId], other: BlockMemory) -> None:
        """Takes over what ``other`` holds of the first ``num_tokens`` tokens."""
        for index, data in other.content(num_tokens, slots).items():
            if self._layer(index).is_token_kind:
                for span in self.rows(index, 0, num_tokens):
                    span.data[:], data = data[: len(span.data)], data[len(span.data) :]
            else:
                self.slot(index, slots)[: len(data)] = data

    def scribble(self) -> None:
        """Overwrites everything with garbage."""
        for blocks in self._blocks.values():
            for block in blocks:
                block[:] = _garbage(len(block))
        for slot in self._slots.values():
            slot[:] = _garbage(len(slot))

    def _layer(self, layer_index: int) -> LayerSpec:
        return self._groups[layer_index][1]


@attrs.frozen
class _Run:
    """What one run over the whole prompt left behind."""

    memory: BlockMemory
    prefilled: StepResult
    decoded: tuple[StepResult, ...]


def check_engine(
    make_engine: MakeEngine, *, tolerance: float = 0.0, num_segments: int = 3, num_tail: int = 5
) -> None:
    """Checks that a request may be cut, stored and resumed anywhere without a trace.

    Args:
        make_engine: makes engines of one model.
        tolerance: largest difference of logits where a prompt is cut off the segment grid; on the
            grid they must be equal bit by bit.
        num_segments, num_tail: the prompt has so many segments and ``num_tail`` tokens more.
    """
    user = _User(make_engine(), num_segments, num_tail)
    whole = user.run_whole()
    user.check_memory_is_optional(whole)
    for position in user.grid:
        user.check_resume(whole, position)
    user.check_resume_at_the_end(whole)
    user.check_replay(whole, tolerance)
    user.check_interleaving(whole)
    user.check_misuse()
    _require(make_engine().spec == user.engine.spec, "two engines of a model differ in their spec")


class _User:
    def __init__(self, engine: Engine, num_segments: int, num_tail: int) -> None:
        self.engine = engine
        self.spec = engine.spec
        step = engine.segment_tokens
        num_tokens = num_segments * step + num_tail
        self.tokens = [(7 * i * i + 3 * i + 1) % 61 for i in range(num_tokens)]
        self.grid = range(step, num_tokens, step)
        self.cached_layers = {i for i, layer in enumerate(self.spec.layers) if layer is not None}

    def slots(self, position: int) -> dict[GroupId, BlockId]:
        """A slot in every group, of its own for each position."""
        return {
            group.group_id: BlockId(position)
            for group in self.spec.groups
            if not group.is_token_kind
        }

    def memory(self) -> BlockMemory:
        return BlockMemory(self.spec, len(self.tokens))

    def prefill(
        self, key: RequestId, start: int, memory: BlockMemory | None, stop: int | None = None
    ) -> StepResult:
        """Runs the prompt from ``start`` on, segment by segment."""
        ends = [p for p in self.grid if start < p < (stop or len(self.tokens))]
        result = None
        for end in (*ends, stop or len(self.tokens)):
            result = self.prefill_segment(key, start, end, memory)
            start = end
        assert result is not None
        return result

    def prefill_segment(
        self, key: RequestId, start: int, end: int, memory: BlockMemory | None
    ) -> StepResult:
        seen: dict[int, bytes] = {}

        def on_layer(index: int) -> None:
            _require(index not in seen, f"layer {index} is told to be ready twice")
            seen[index] = memory.content(end, slots)[index] if memory else b""

        slots = self.slots(end)
        result = self.engine.prefill(key, self.tokens[start:end], start, memory, slots, on_layer)
        _require(set(seen) == self.cached_layers, f"layers told to be ready: {sorted(seen)}")
        if memory is not None:
            for index, data in memory.content(end, slots).items():
                _require(seen[index] == data, f"layer {index} changed after it was ready")
        return result

    def decode(self, key: RequestId, first: StepResult) -> tuple[StepResult, ...]:
        results = [first]
        for _ in range(NUM_DECODED):
            results.append(self.engine.decode(key, results[-1].token))
        return tuple(results[1:])

    def run_whole(self) -> _Run:
        key, memory = RequestId("whole"), self.memory()
        self.engine.open(key)
        prefilled = self.prefill(key, 0, memory)
        before = memory.content(len(self.tokens), self.slots(len(self.tokens)))
        decoded = self.decode(key, prefilled)
        after = memory.content(len(self.tokens), self.slots(len(self.tokens)))
        _require(before == after, "decoding wrote to the prompt's memory")
        self.engine.close(key)
        for result in (prefilled, *decoded):
            values = _floats(result)
            _require(values.index(max(values)) == result.token, f"{result} is not the argmax")
        return _Run(memory, prefilled, decoded)

    def check_memory_is_optional(self, whole: _Run) -> None:
        key = RequestId("without memory")
        self.engine.open(key)
        result = self.prefill(key, 0, None)
        self.engine.close(key)
        _require(result == whole.prefilled, "logits differ if nothing is written")

    def check_resume(self, whole: _Run, position: int) -> None:
        key, memory = RequestId(f"from {position}"), self.memory()
        memory.fill(position, self.slots(position), whole.memory)
        self.engine.open(key, position, memory, self.slots(position))
        result = self.prefill(key, position, memory)
        decoded = self.decode(key, result)
        self.engine.close(key)
        _require(result == whole.prefilled, f"resumed at {position}, the logits differ")
        _require(decoded == whole.decoded, f"resumed at {position}, decoding differs")
        end = len(self.tokens)
        ours, theirs = (m.content(end, self.slots(end)) for m in (memory, whole.memory))
        for index in self.cached_layers:
            _require(ours[index] == theirs[index], f"resumed at {position}, layer {index} differs")

    def check_resume_at_the_end(self, whole: _Run) -> None:
        key, end, memory = RequestId("installed"), len(self.tokens), self.memory()
        memory.fill(end, self.slots(end), whole.memory)
        self.engine.open(key, end, memory, self.slots(end))
        memory.scribble()
        decoded = self.decode(key, whole.prefilled)
        self.engine.close(key)
        _require(decoded == whole.decoded, "an installed cache decodes otherwise; was it copied?")

    def check_replay(self, whole: _Run, tolerance: float) -> None:
        """The other handoff: the cache ends before the last token, which runs alone."""
        first, second, last = RequestId("all but one"), RequestId("replay"), len(self.tokens) - 1
        memory = self.memory()
        self.engine.open(first)
        self.prefill(first, 0, memory, stop=last)
        self.engine.close(first)
        self.engine.open(second, last, memory, self.slots(last))
        result = self.engine.prefill(second, self.tokens[last:], last)
        self.engine.close(second)
        differences = map(abs, map(float.__sub__, _floats(result), _floats(whole.prefilled)))
        _require(max(differences) <= tolerance, "replaying the last token gives other logits")

    def check_interleaving(self, whole: _Run) -> None:
        one, two = RequestId("one"), RequestId("two")
        self.engine.open(one)
        self.engine.open(two)
        self.engine.prefill(two, self.tokens[:1], 0)
        result = self.prefill(one, 0, self.memory())
        self.engine.decode(two, result.token)
        decoded = self.decode(one, result)
        self.engine.close(one)
        self.engine.close(two)
        _require(decoded == whole.decoded, "another open request changes the output")

    def check_misuse(self) -> None:
        key, engine = RequestId("misuse"), self.engine
        _refuses("decoding what is not open", lambda: engine.decode(key, 1))
        _refuses("a prefill of what is not open", lambda: engine.prefill(key, [1], 0))
        _refuses("opening in the middle without memory", lambda: engine.open(key, 8))
        engine.open(key)
        _refuses("opening twice", lambda: engine.open(key))
        _refuses("a segment of no tokens", lambda: engine.prefill(key, [], 0))
        _refuses("a gap between segments", lambda: engine.prefill(key, [1], 5))
        engine.prefill(key, [1], 0)
        engine.close(key)
        engine.close(key)
        _refuses("decoding what was closed", lambda: engine.decode(key, 1))
        engine.open(key)
        engine.close(key)


def _garbage(num_bytes: int) -> bytearray:
    return bytearray([_GARBAGE]) * num_bytes


def _floats(result: StepResult) -> Sequence[float]:
    values = array.array("f", result.logits)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _require(holds: bool, clause: str) -> None:
    if not holds:
        raise AssertionError(clause)


def _refuses(clause: str, call: Callable[[], object]) -> None:
    try:
        call()
    except LocalProtocolError:
        return
    raise AssertionError(f"{clause} must raise LocalProtocolError")
