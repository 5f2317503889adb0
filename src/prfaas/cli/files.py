"""Files that a configuration names: models, tables of measurements, traces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prfaas.capacity import PrefillProfile, PrefillSurface, PrefillTime
from prfaas.errors import ConfigError
from prfaas.traces import Trace, read_trace
from prfaas.traces.fields import csv_rows, finite

PREFILL_COLUMNS = ("new", "cached", "seconds")
"""Columns of a prefill table, as ``prfaas profile`` writes it."""

Measurement = tuple[float, float, float]


def read_text(path: Path, what: str) -> str:
    """Read a text file.

    Raises:
        ConfigError: it cannot be read; says what it was to be.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{what} {path} cannot be read: {reason}") from error


def read_model_config(path: Path) -> dict[str, Any]:
    """Read a config.json, given itself or the folder it is in.

    Raises:
        ConfigError: there is none, or it is no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_text(file, "the model's config"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"the model's config {file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"the model's config {file} holds no JSON object; give a config.json")
    return config


def read_prefill_table(path: Path) -> list[Measurement]:
    """Read (new, cached, seconds) rows of a CSV file with these columns.

    Raises:
        ConfigError: the file cannot be read or a value is no number; names file and line.
    """
    lines = read_text(path, "the prefill table").splitlines(keepends=True)
    new, cached, seconds = PREFILL_COLUMNS
    try:
        return [
            (
                finite(line, new, row[new]),
                finite(line, cached, row[cached]),
                finite(line, seconds, row[seconds]),
            )
            for line, row in csv_rows(lines, PREFILL_COLUMNS)
        ]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def prefill_time(rows: Sequence[Measurement]) -> PrefillTime:
    """Return the surface through the rows, or the curve where only one prefix was measured.

    Raises:
        ConfigError: too few rows, or times that fall with more tokens.
    """
    if len({cached for _, cached, _ in rows}) > 1:
        return PrefillSurface(tuple(rows))
    if any(cached for _, cached, _ in rows):
        raise ConfigError("every row has cached tokens; measure without a prefix too (cached 0)")
    return PrefillProfile(tuple(sorted((new, seconds) for new, _, seconds in rows)))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def open_trace(path: Path, format_name: str | None, sha256: str | None = None) -> Trace:
    """Read a trace file; see ``prfaas.traces.read_trace``.

    Raises:
        ConfigError: it cannot be read (names the file and the line), or is not the file of that
            SHA-256.
    """
    if sha256 is not None and file_sha256(path) != sha256:
        raise ConfigError(
            f"the trace {path} has changed: its SHA-256 is not {sha256[:12]}...; put the old file "
            "back, or simulate anew"
        )
    try:
        with path.open(encoding="utf-8") as lines:
            return read_trace(lines, format_name=format_name, name=path.stem)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the trace {path} cannot be read: {reason}") from error
    except ConfigError as error:
        raise ConfigError(f"the trace {path}: {error}") from error
