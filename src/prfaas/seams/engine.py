"""The Engine seam: what a model runner must do so that its caches can be pooled and shipped.

An engine keeps the working cache of each open request in its own form. It exchanges finished
content with the pool through an `EntryMemory`: a view of the blocks and state slots of one
reservation, in the canonical layout. An engine is synchronous and used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import attrs

from prfaas.core import BlockId, GroupId, RequestId
from prfaas.spec import ModelSpec

OnLayer = Callable[[int], None]
"""Called with a model layer's index once everything of it that was asked for is in the pool.

Once per `Engine.prefill` call and layer that has a cache, in the engine's thread. On a device, the
copy into the pool is done then, not merely launched: what is told to be ready is sent.
"""


@attrs.frozen(kw_only=True)
class RowSpan:
    """Consecutive token rows of one layer, ``num_rows`` of them in ``data``."""

    first_token: int
    num_rows: int
    data: memoryview


class EntryMemory(Protocol):
    """Bytes of one reservation, by layer. Views are writable and alias the pool."""

    def rows(self, layer_index: int, start: int, stop: int) -> Sequence[RowSpan]:
        """Rows of tokens [start, stop) of a token-kind layer, block by block, in order.

        A row is the layer's parts one after the other (GQA: key [kv_heads, key_dim], value
        [kv_heads, value_dim]; MLA: latent, rope), tightly packed.
        """
        ...

    def slot(self, layer_index: int, slots: Mapping[GroupId, BlockId]) -> memoryview:
        """State of a slot-kind layer in the given slots: its parts one after the other. Sliding
        windows hold the newest rows, oldest first, from the slot's start."""
        ...


@attrs.frozen(kw_only=True)
class StepResult:
    """Logits after one token: fp32, little endian, one per vocabulary entry, and their argmax."""

    token: int
    logits: bytes = attrs.field(repr=False)


class Engine(Protocol):
    """Runs a model.

    Where the model fails, a method raises EngineError and forgets the request. A call out of order
    (a request that is not open or open twice, a gap between segments) raises LocalProtocolError and
    changes nothing.
    """

    @property
    def spec(self) -> ModelSpec:
        """The model's cache layout."""
        ...

    @property
    def segment_tokens(self) -> int:
        """Prefill runs in segments that end on multiples of this (and at the end). A multiple of
        the linear kernel's chunk; a resumed prefill whose start is such a multiple repeats the very
        operations of an uninterrupted one."""
        ...

    def open(
        self,
        request_id: RequestId,
        num_tokens: int = 0,
        memory: EntryMemory | None = None,
        slots: Mapping[GroupId, BlockId] | None = None,
    ) -> None:
        """Starts a request whose first ``num_tokens`` tokens are in ``memory`` (rows) and ``slots``
        (state there). ``num_tokens`` 0 starts from nothing. Both may be overwritten afterwards."""
        ...

    def prefill(
        self,
        request_id: RequestId,
        tokens: Sequence[int],
        start: int,
        memory: EntryMemory | None = None,
        slots: Mapping[GroupId, BlockId] | None = None,
        on_layer: OnLayer | None = None,
    ) -> StepResult:
        """Runs ``tokens``, which follow the first ``start`` tokens of the request.

        As each layer finishes, its new rows are written to ``memory`` (if given) and, if ``slots``
        are given, its state after the last of ``tokens`` into them; then ``on_layer`` is called.
        Returns the logits after the last token.
        """
        ...

    def decode(self, request_id: RequestId, token: int) -> StepResult:
        """Appends one token and returns the logits after it."""
        ...

    def close(self, request_id: RequestId) -> None:
        """Forgets the request. Idempotent."""
        ...


@runtime_checkable
class ReportsConfig(Protocol):
    """An engine that has something to say in a worker's status report."""

    def effective_config(self) -> Mapping[str, str]:
        """What is really in force, by name."""
        ...
