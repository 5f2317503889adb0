"""Which step an engine runs next, and how far: pure, so that a simulator can use it too."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs

from prfaas.core import cdiv
from prfaas.errors import ConfigError


@attrs.frozen
class PrefillStep:
    """Run one prefill segment of this request."""

    key: str


@attrs.frozen
class DecodeStep:
    """Run one decode step of this request."""

    key: str


def segment_ends(
    start: int, stop: int, segment_tokens: int, checkpoints: Iterable[int] = ()
) -> list[int]:
    """Where the prefill segments of tokens [start, stop) end, in order.

    They end on multiples of ``segment_tokens`` counted from token 0, not from ``start``: a resumed
    prefill then runs the very segments of an uninterrupted one. Checkpoints inside and ``stop``
    end a segment too.
    """
    first = start - start % segment_tokens + segment_tokens
    ends = {*range(first, stop, segment_tokens), stop, *checkpoints}
    return sorted(end for end in ends if start < end <= stop)


class StepSchedule:
    """Prefill first come first served, decode round robin, and a fair alternation between them.

    After each prefill segment every decoding request gets ``decode_rounds`` steps before the next
    segment, so that a long prompt on a MIXED node delays tokens by one segment at most. More
    rounds give prompts less of the time.

    Args:
        decode_rounds: see above; `pace` changes it.
        max_decodes: requests that decode at a time; others wait for one to end. None: no limit.
    """

    def __init__(self, *, decode_rounds: int = 1, max_decodes: int | None = None) -> None:
        if max_decodes is not None and max_decodes < 1:
            raise ConfigError(f"max_decodes is {max_decodes}; it must be at least 1, or None")
        self._max_decodes = max_decodes
        self._prefills: deque[str] = deque()
        self._decodes: deque[str] = deque()
        self._waiting: deque[str] = deque()
        self._owed = 0
        self.pace(decode_rounds)

    def pace(self, decode_rounds: int) -> None:
        """Changes the share of prompts, from the next prefill segment on."""
        if decode_rounds < 1:
            raise ConfigError(f"decode_rounds is {decode_rounds}; it must be at least 1")
        self._decode_rounds = decode_rounds

    def add_prefill(self, key: str) -> None:
        self._prefills.append(key)

    def add_decode(self, key: str) -> None:
        self._waiting.append(key)
        self._fill()

    def remove(self, key: str) -> None:
        """Forgets a request, wherever it stands. Idempotent."""
        for queue in (self._prefills, self._decodes, self._waiting):
            if key in queue:
                queue.remove(key)
        self._fill()
        self._owed = min(self._owed, self._decode_rounds * len(self._decodes))

    def next_step(self) -> PrefillStep | DecodeStep | None:
        """The step to run now, or None when there is no work. Decoding requests take turns."""
        if self._decodes and (self._owed or not self._prefills):
            self._owed = max(0, self._owed - 1)
            self._decodes.rotate(-1)
            return DecodeStep(self._decodes[-1])
        if self._prefills:
            self._owed = self._decode_rounds * len(self._decodes)
            return PrefillStep(self._prefills[0])
        return None

    def __len__(self) -> int:
        """Requests that have work."""
        return len(self._prefills) + len(self._decodes) + len(self._waiting)

    def __repr__(self) -> str:
        return (
            f"<StepSchedule prefills={len(self._prefills)} decodes={len(self._decodes)} "
            f"waiting={len(self._waiting)}>"
        )

    def _fill(self) -> None:
        """Lets waiting requests decode, first come first served."""
        while self._waiting and (
            self._max_decodes is None or len(self._decodes) < self._max_decodes
        ):
            self._decodes.append(self._waiting.popleft())


def decode_rounds(segment_tokens: int, budget_tokens: int | None) -> int:
    """Rounds between two prefill segments so that no more than ``budget_tokens`` prompt tokens are
    computed per decode step of a request; 1 if there is no budget."""
    return 1 if budget_tokens is None else cdiv(segment_tokens, budget_tokens)
