"""Link-rate samples from the busy periods of one channel."""

from __future__ import annotations

from collections import deque

from prfaas.seams.transport import Delivery

SLICE_S = 0.25
MIN_ROUND_TRIPS = 5.0
MAX_SAMPLES = 256


class BusyMeter:
    """Turns bytes queued and bytes acknowledged into `Delivery` samples.

    A busy period starts when bytes are queued on an idle channel and ends when all of them are
    acknowledged, so that the channel had something to send at any time of it. Nothing can be
    acknowledged within the first round trip, hence a period counts from its start plus the base
    round trip: the smallest time to a first acknowledgement, or the handshake's. Long periods are
    cut at acknowledgements, about every 250 ms. Acknowledgements of parallel connections come in
    clumps, so that one slice may hold bytes that belong to its neighbour; over a period nothing is
    counted twice or lost, and a short last slice is merged with the one before it. A period of
    less than 5 round trips tells nothing and gives no sample.

    Args:
        base_rtt_s: round trip of the handshake.
    """

    def __init__(self, *, base_rtt_s: float) -> None:
        self._base_rtt_s = base_rtt_s
        self._outstanding_bytes = 0
        self._busy_since_s: float | None = None
        self._start_s: float | None = None  # of the open slice; None before the first ack
        self._end_s = 0.0
        self._num_bytes = 0
        self._held: Delivery | None = None
        self._samples: deque[Delivery] = deque(maxlen=MAX_SAMPLES)

    def __repr__(self) -> str:
        return (
            f"<BusyMeter {self._outstanding_bytes} bytes outstanding, base round trip "
            f"{self._base_rtt_s * 1e3:.3f} ms, {len(self._samples)} samples>"
        )

    @property
    def base_rtt_s(self) -> float:
        """Smallest round trip seen."""
        return self._base_rtt_s

    @property
    def outstanding_bytes(self) -> int:
        """Bytes queued and not yet acknowledged."""
        return self._outstanding_bytes

    def queued(self, num_bytes: int, now: float) -> None:
        """``num_bytes`` more wait to be sent."""
        if num_bytes and not self._outstanding_bytes:
            self._busy_since_s = now
        self._outstanding_bytes += num_bytes

    def acknowledged(self, num_bytes: int, now: float) -> None:
        """``num_bytes`` of the queued ones have arrived."""
        if not num_bytes:
            return
        self._outstanding_bytes -= num_bytes
        self._num_bytes += num_bytes
        self._end_s = now
        if self._start_s is None:
            self._open(now)
        assert self._start_s is not None
        if not self._outstanding_bytes:
            self._finish()
        elif now - self._start_s >= max(SLICE_S, MIN_ROUND_TRIPS * self._base_rtt_s):
            if self._held is not None:
                self._samples.append(self._held)
            self._held = self._slice()
            self._start_s = now

    def dropped(self, num_bytes: int) -> None:
        """``num_bytes`` of the queued ones will never be sent."""
        self._outstanding_bytes -= num_bytes
        if num_bytes and not self._outstanding_bytes:
            self._finish()

    def take(self) -> tuple[Delivery, ...]:
        """Samples since the last call; the oldest are lost if nobody calls for long."""
        samples = tuple(self._samples)
        self._samples.clear()
        return samples

    def check(self) -> None:
        """Asserts the invariants."""
        assert self._outstanding_bytes >= 0
        assert (self._busy_since_s is None) == (self._outstanding_bytes == 0)
        assert self._outstanding_bytes or not self._num_bytes
        assert self._start_s is None or self._busy_since_s is not None
        assert self._held is None or self._busy_since_s is not None

    def _open(self, now: float) -> None:
        assert self._busy_since_s is not None
        latency_s = now - self._busy_since_s
        if latency_s < self._base_rtt_s:
            self._base_rtt_s = latency_s
            self._num_bytes = 0  # they took no time beyond the round trip that they have just set
        self._start_s = self._busy_since_s + self._base_rtt_s

    def _finish(self) -> None:
        start_s, held = self._start_s, self._held
        if start_s is not None:
            duration_s = self._end_s - start_s
            if held is not None and duration_s < SLICE_S / 2:
                self._num_bytes += held.num_bytes
                self._start_s = held.start_s
                self._samples.append(self._slice())
            elif held is not None:
                self._samples += held, self._slice()
            elif duration_s > 0 and duration_s >= MIN_ROUND_TRIPS * self._base_rtt_s:
                self._samples.append(self._slice())
        self._busy_since_s = self._start_s = self._held = None
        self._num_bytes = 0

    def _slice(self) -> Delivery:
        assert self._start_s is not None
        num_bytes, self._num_bytes = self._num_bytes, 0
        return Delivery(num_bytes=num_bytes, start_s=self._start_s, end_s=self._end_s)
