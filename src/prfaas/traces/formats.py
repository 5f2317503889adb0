"""The known trace formats, and how to tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from types import MappingProxyType

from prfaas.errors import ConfigError
from prfaas.traces.azure import AZURE_COLUMNS, read_azure
from prfaas.traces.burstgpt import BURSTGPT_COLUMNS, read_burstgpt
from prfaas.traces.mooncake import MOONCAKE_FIELDS, read_mooncake
from prfaas.traces.trace import Trace

TRACE_FORMATS: MappingProxyType[str, Callable[..., Trace]] = MappingProxyType(
    {"mooncake": read_mooncake, "azure": read_azure, "burstgpt": read_burstgpt}
)
"""The readers by the name of their format."""

_SEEN_LINES = 8


def detect(first_lines: Sequence[str]) -> str:
    """Return the name of the format that the first lines of a file have.

    Raises:
        ConfigError: it is none of ``TRACE_FORMATS``; shows the line and what each format needs.
    """
    first = next((line for line in first_lines if line.strip()), "")
    columns = [name.strip() for name in first.removeprefix("\ufeff").split(",")]
    if first.lstrip().startswith("{") and '"input_length"' in first:
        return "mooncake"
    if all(name in columns for name in AZURE_COLUMNS):
        return "azure"
    if all(name in columns for name in BURSTGPT_COLUMNS):
        return "burstgpt"
    raise ConfigError(
        f"the trace starts with {first.strip()[:80]!r}, which is no known format; known are "
        f"mooncake (JSON lines with {', '.join(MOONCAKE_FIELDS)}), azure (CSV with "
        f"{', '.join(AZURE_COLUMNS)}) and burstgpt (CSV with {', '.join(BURSTGPT_COLUMNS)})"
    )


def read_trace(
    lines: Iterable[str], *, format_name: str | None = None, name: str | None = None
) -> Trace:
    """Read a trace of any known format.

    Args:
        lines: the lines of the file, e.g. the open file itself.
        format_name: a key of ``TRACE_FORMATS``; by default told from the first lines.
        name: name of the trace; by default that of the format.

    Raises:
        ConfigError: the format is not known, or a line is malformed.
    """
    remaining = iter(lines)
    if format_name is None:
        head = list(islice(remaining, _SEEN_LINES))
        format_name = detect(head)
        remaining = chain(head, remaining)
    reader = TRACE_FORMATS.get(format_name)
    if reader is None:
        raise ConfigError(
            f"trace format {format_name!r} is not known; known are {', '.join(TRACE_FORMATS)}"
        )
    return reader(remaining, name=name or format_name)
