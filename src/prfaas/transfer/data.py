"""Which bytes of an entry travel when: one sender and one receiver per rank, descriptors only."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from prfaas.errors import CapacityError, ConfigError, LocalProtocolError, RemoteProtocolError
from prfaas.transfer.intervals import IntervalSet

MAX_LANDED_RANGES = 65_536


@attrs.frozen(kw_only=True)
class PutRange:
    """One put to make: ``num_bytes`` at ``offset`` of the entry and of the receiver's window."""

    put_id: int
    offset: int
    num_bytes: int


class DataSender:
    """Cuts an entry into puts as its bytes become ready.

    A byte is sent after it was declared ready, and once, unless the put that carried it failed.

    Args:
        num_bytes: bytes of the whole entry (`EntryLayout.num_bytes`); offsets may exceed 32 bits.
        share: (offset, bytes) ranges that this rank sends; the whole entry by default.
        chunk_bytes: most bytes of one put.
        max_inflight_bytes: most bytes handed out and not yet acknowledged; at least a chunk.
        min_put_bytes: smaller pieces wait for neighbours, or for `finish`.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        share: Iterable[tuple[int, int]] | None = None,
        chunk_bytes: int = 4 << 20,
        max_inflight_bytes: int = 64 << 20,
        min_put_bytes: int = 64 << 10,
    ) -> None:
        if not 1 <= min_put_bytes <= chunk_bytes <= max_inflight_bytes:
            raise ConfigError(
                f"min_put_bytes {min_put_bytes}, chunk_bytes {chunk_bytes}, max_inflight_bytes "
                f"{max_inflight_bytes}: each must be at least 1 and at most the next"
            )
        self._chunk_bytes = chunk_bytes
        self._max_inflight_bytes = max_inflight_bytes
        self._min_put_bytes = min_put_bytes
        self._share = IntervalSet(num_bytes)
        for offset, length in [(0, num_bytes)] if share is None else share:
            if self._share.add(offset, offset + length) != length:
                raise ConfigError(f"share repeats bytes of [{offset}, {offset + length})")
        self._ready = IntervalSet(num_bytes)  # everything declared so far
        self._unsent = IntervalSet(num_bytes)  # ready, and in no put
        self._inflight: dict[int, PutRange] = {}
        self._inflight_bytes = 0
        self._sent_bytes = 0
        self._next_put_id = 0
        self._finished = False
        self.num_failed = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes acknowledged; each counts once."""
        return self._sent_bytes

    @property
    def inflight_bytes(self) -> int:
        return self._inflight_bytes

    @property
    def is_complete(self) -> bool:
        """Whether every byte of the share was acknowledged."""
        return self._sent_bytes == self._share.total

    def ready(self, offset: int, num_bytes: int) -> None:
        """Declares that bytes hold their final content. Repeating it is harmless.

        Raises:
            LocalProtocolError: bytes that this rank does not send.
        """
        stop = offset + num_bytes
        if not 0 <= offset <= stop <= self._share.size or not self._share.covers(offset, stop):
            raise LocalProtocolError(
                f"[{offset}, {stop}) is not in this rank's {self._share!r}; "
                "declare only what it sends"
            )
        for start, end in self._ready.missing(offset, stop):
            self._unsent.add(start, end)
        self._ready.add(offset, stop)

    def finish(self) -> None:
        """Declares that everything is ready: short pieces need not wait any longer. Idempotent."""
        for start, stop in self._share:
            self.ready(start, stop - start)
        self._finished = True

    def next_puts(self) -> tuple[PutRange, ...]:
        """Puts to make now, lowest offset first; none when nothing is ready or there is no room."""
        room = self._max_inflight_bytes - self._inflight_bytes
        least = 1 if self._finished else self._min_put_bytes
        puts: list[PutRange] = []
        taken: list[tuple[int, int]] = []
        for start, stop in self._unsent:
            if room < least:
                break
            at = start
            while (num_bytes := min(self._chunk_bytes, stop - at)) >= least and num_bytes <= room:
                puts.append(PutRange(put_id=self._next_put_id, offset=at, num_bytes=num_bytes))
                self._next_put_id += 1
                room -= num_bytes
                at += num_bytes
            if at > start:
                taken.append((start, at))
        for start, stop in taken:
            self._unsent.remove(start, stop)
            self._inflight_bytes += stop - start
        self._inflight.update((put.put_id, put) for put in puts)
        return tuple(puts)

    def acked(self, put_id: int) -> None:
        """The bytes are at the receiver. Raises LocalProtocolError for a put not in flight."""
        put = self._land(put_id)
        self._sent_bytes += put.num_bytes

    def failed(self, put_id: int) -> None:
        """The put did not land; its bytes will be handed out again.

        Raises:
            LocalProtocolError: the put is not in flight.
        """
        put = self._land(put_id)
        self._unsent.add(put.offset, put.offset + put.num_bytes)
        self.num_failed += 1

    def _land(self, put_id: int) -> PutRange:
        put = self._inflight.pop(put_id, None)
        if put is None:
            raise LocalProtocolError(
                f"put {put_id} is not in flight; report each of {sorted(self._inflight)} once"
            )
        self._inflight_bytes -= put.num_bytes
        return put

    def check(self) -> None:
        """Asserts that each ready byte is either unsent or in flight or acknowledged."""
        for intervals in (self._share, self._ready, self._unsent):
            intervals.check()
        flying = IntervalSet(self._share.size)
        for put in self._inflight.values():
            stop = put.offset + put.num_bytes
            assert 0 < put.num_bytes <= self._chunk_bytes, put
            assert self._ready.covers(put.offset, stop), put
            assert flying.add(put.offset, stop) == put.num_bytes, put
            assert self._unsent.missing(put.offset, stop) == ((put.offset, stop),), put
        assert all(self._ready.covers(*interval) for interval in self._unsent)
        assert flying.total == self._inflight_bytes <= self._max_inflight_bytes, self
        assert self._ready.total == self._unsent.total + flying.total + self._sent_bytes, self

    def __repr__(self) -> str:
        return (
            f"<DataSender {self._sent_bytes}/{self._share.total} B acknowledged, "
            f"{self._inflight_bytes} in flight, {self._unsent.total} ready, "
            f"{self._share.total - self._ready.total} to come>"
        )


class DataReceiver:
    """Which bytes of an entry have landed, where the transport reports landings to the receiver.

    Args:
        num_bytes: bytes of the whole entry (`EntryLayout.num_bytes`).
        max_ranges: separate landed ranges to remember at most.
    """

    def __init__(self, num_bytes: int, *, max_ranges: int = MAX_LANDED_RANGES) -> None:
        self._landed = IntervalSet(num_bytes, max_intervals=max_ranges)

    @property
    def landed_bytes(self) -> int:
        """Bytes landed; each counts once."""
        return self._landed.total

    @property
    def is_complete(self) -> bool:
        return self._landed.total == self._landed.size

    def landed(self, offset: int, num_bytes: int) -> int:
        """Notes that bytes landed and returns how many of them are new; a repetition is harmless.

        Raises:
            RemoteProtocolError: outside the entry, or the peer scatters more ranges than we keep.
                Nothing changed.
        """
        try:
            return self._landed.add(offset, offset + num_bytes)
        except (ConfigError, CapacityError) as error:
            raise RemoteProtocolError(
                f"{num_bytes} bytes landed at {offset} of an entry of {self._landed.size}: {error}"
            ) from error

    def missing(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of everything that has not landed, in order."""
        gaps = self._landed.missing(0, self._landed.size)
        return tuple((start, stop - start) for start, stop in gaps)

    def check(self) -> None:
        """Asserts the invariants of the landed ranges."""
        self._landed.check()

    def __repr__(self) -> str:
        return f"<DataReceiver {self._landed.total}/{self._landed.size} B landed>"
