"""Values of a trace file, checked so that an error says where to look."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping

from prfaas.errors import ConfigError

_SHOWN = 60


def refusal(line: int, field: str, value: object, expected: str) -> ConfigError:
    """Make the error for one bad value; ``expected`` says what it must be."""
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = shown[:_SHOWN] + "..."
    return ConfigError(
        f"line {line}: {field} is {shown}; it must be {expected}; repair or remove the line"
    )


def whole(line: int, field: str, value: object) -> int:
    """Read a count: an int, or text of one, of at least 0."""
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or number < 0:
        raise refusal(line, field, value, "a whole number of at least 0")
    return number


def finite(line: int, field: str, value: object) -> float:
    """Read a time: a finite number, or text of one."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise refusal(line, field, value, "a number")
    if not math.isfinite(number):
        raise refusal(line, field, value, "a finite number")
    return float(number)


def csv_rows(
    lines: Iterable[str], wanted: tuple[str, ...]
) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield (line number, row) of a CSV file whose header has at least the ``wanted`` columns.

    Raises:
        ConfigError: a column is missing, a row has another number of fields, or quoting is broken.
    """
    # A byte order mark is no part of the first column's name.
    reader = csv.reader((line.removeprefix("\ufeff") for line in lines), strict=True)
    try:
        header = next(reader, [])
        missing = [name for name in wanted if name not in header]
        if missing:
            found = ",".join(header)
            raise ConfigError(
                f"line 1: the header is {found[:80]!r} and lacks {', '.join(missing)}; "
                "give the file with its header line"
            )
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise ConfigError(
                    f"line {reader.line_num}: {len(cells)} fields where the header has "
                    f"{len(header)}; repair or remove the line"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ConfigError(f"line {reader.line_num}: {error}; repair or remove the line") from error
