"""A trace: the requests of a real service, in order, with what one can say about them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import attrs

from prfaas.core import BlockHash, RequestId
from prfaas.errors import ConfigError
from prfaas.workload import Arrival


@attrs.frozen(kw_only=True)
class Row:
    """One served request as a reader found it; ``at_s`` is on any clock."""

    line: int
    at_s: float
    num_tokens: int
    output_tokens: int
    granule_hashes: Sequence[BlockHash] = ()


@attrs.frozen(kw_only=True)
class Trace:
    """Requests in order of arrival; the first arrives at 0 s.

    Attributes:
        name: what it was read from, for reports.
        arrivals: at least one. The id of a request is the number of its line in the file.
        granule_tokens: tokens per granule hash; None where the trace names no prefixes.
        num_skipped: rows of the file that are no served request and were left out.
    """

    name: str
    arrivals: tuple[Arrival, ...] = attrs.field(repr=lambda arrivals: f"<{len(arrivals)} arrivals>")
    granule_tokens: int | None = None
    num_skipped: int = 0

    @arrivals.validator
    def _check_arrivals(self, _: object, value: tuple[Arrival, ...]) -> None:
        if not value:
            raise ConfigError(
                f"the {self.name} trace has no requests ({self.num_skipped} rows were skipped); "
                "check that the file is whole"
            )

    @classmethod
    def of_rows(
        cls,
        name: str,
        rows: Iterable[Row],
        *,
        num_skipped: int = 0,
        granule_tokens: int | None = None,
    ) -> Trace:
        """Put rows in order and set the clock to 0 at the first; equal times keep their order."""
        ordered = sorted(rows, key=lambda row: row.at_s)
        arrivals = tuple(
            Arrival(
                request_id=RequestId(str(row.line)),
                arrived_s=row.at_s - ordered[0].at_s,
                num_tokens=row.num_tokens,
                output_tokens=row.output_tokens,
                granule_hashes=row.granule_hashes,
            )
            for row in ordered
        )
        return cls(
            name=name, arrivals=arrivals, granule_tokens=granule_tokens, num_skipped=num_skipped
        )

    @property
    def duration_s(self) -> float:
        """Seconds from the first to the last arrival."""
        return self.arrivals[-1].arrived_s

    @property
    def mean_tokens(self) -> float:
        """Mean prompt length."""
        return statistics.fmean(arrival.num_tokens for arrival in self.arrivals)

    @property
    def median_tokens(self) -> float:
        """Median prompt length."""
        return statistics.median(arrival.num_tokens for arrival in self.arrivals)

    @property
    def p90_tokens(self) -> int:
        """The shortest prompt length that at least nine tenths of the requests do not exceed."""
        lengths = sorted(arrival.num_tokens for arrival in self.arrivals)
        return lengths[-(-9 * len(lengths) // 10) - 1]

    @property
    def mean_output_tokens(self) -> float:
        """Mean generated length."""
        return statistics.fmean(arrival.output_tokens for arrival in self.arrivals)

    def cached_tokens(self) -> tuple[int, ...]:
        """Tokens of each prompt that an unlimited prefix cache would hold when it arrives.

        The cache has room for everything, is filled at the moment of arrival and shared by all:
        the most that any cache could do with these keys. At least one token of a prompt is always
        computed.
        """
        seen: set[BlockHash] = set()
        cached = []
        for arrival in self.arrivals:
            keys = arrival.granule_hashes
            num_hits = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
            seen.update(keys[num_hits:])
            cached.append(min(num_hits * (self.granule_tokens or 0), arrival.num_tokens - 1))
        return tuple(cached)

    @property
    def prefix_hit_share(self) -> float:
        """Share of all prompt tokens that an unlimited prefix cache would hold, 0 to 1."""
        return sum(self.cached_tokens()) / sum(arrival.num_tokens for arrival in self.arrivals)
