"""Which step an engine runs next, and how far: pure, so that a simulator can use it too."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs

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
    segment, so that a long prompt on a MIXED node delays tokens by one segment at most.
    """

    def __init__(self, *, decode_rounds: int = 1) -> None:
        if decode_rounds < 1:
            raise ConfigError(f"decode_rounds is {decode_rounds}; it must be at least 1")
        self._decode_rounds = decode_rounds
        self._prefills: deque[str] = deque()
        self._decodes: deque[str] = deque()
        self._owed = 0

    def add_prefill(self, key: str) -> None:
        self._prefills.append(key)

    def add_decode(self, key: str) -> None:
        self._decodes.append(key)

    def remove(self, key: str) -> None:
        """Forgets a request, wherever it stands. Idempotent."""
        for queue in (self._prefills, self._decodes):
            if key in queue:
                queue.remove(key)
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
        return len(self._prefills) + len(self._decodes)

    def __repr__(self) -> str:
        return f"<StepSchedule prefills={len(self._prefills)} decodes={len(self._decodes)}>"
