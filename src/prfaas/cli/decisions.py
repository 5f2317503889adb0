"""Logs of decisions: JSON lines, a header that can repeat the run and one line per decision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import attrs
import msgspec

from prfaas.cli.config import Config, parse_config
from prfaas.cli.summary import Summary
from prfaas.errors import ConfigError
from prfaas.seams import RoutingDecision

LOG_VERSION = 1


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: everything that the run was made of, and what it came to."""

    prfaas_log: int
    prfaas_version: str
    config: dict[str, object]
    summary: Summary


@attrs.frozen(kw_only=True)
class Log:
    """What a log file holds; ``decisions`` can be read once."""

    config: Config
    summary: Summary
    prfaas_version: str
    decisions: Iterator[RoutingDecision]


def write_log(
    path: Path, config: Config, summary: Summary, decisions: Sequence[RoutingDecision]
) -> None:
    """Write a log; ``config`` is a frozen one, and its seed is the run's.

    Raises:
        ConfigError: the file cannot be written.
    """
    raw = msgspec.to_builtins(config)
    header = Header(
        prfaas_log=LOG_VERSION,
        prfaas_version=version("prfaas"),
        config=_without_none(raw),
        summary=summary,
    )
    encode = msgspec.json.Encoder().encode
    try:
        with path.open("wb") as file:
            file.write(encode(header) + b"\n")
            for decision in decisions:
                file.write(encode(decision) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def open_log(path: Path) -> Iterator[Log]:
    """Open a log; its decisions are read from the file as they are asked for.

    Raises:
        ConfigError: the file cannot be read or is no such log; names the line.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    with file:
        try:
            header = msgspec.json.decode(file.readline(), type=Header)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{path} is no log of prfaas simulate: line 1: {error}; give the file that --log "
                "wrote"
            ) from error
        if header.prfaas_log != LOG_VERSION:
            raise ConfigError(
                f"{path} is a log of version {header.prfaas_log}, this is version {LOG_VERSION}; "
                "simulate anew"
            )
        raw = dict(header.config)
        folder = str(raw.pop("folder", "."))
        yield Log(
            config=parse_config(raw, folder=folder),
            summary=header.summary,
            prfaas_version=header.prfaas_version,
            decisions=_decisions(path, file),
        )


def _decisions(path: Path, lines: Iterator[bytes]) -> Iterator[RoutingDecision]:
    decode = msgspec.json.Decoder(RoutingDecision).decode
    for number, line in enumerate(lines, 2):
        try:
            yield decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: line {number}: {error}; the log is damaged") from error


def _without_none(raw: object) -> dict[str, object]:
    """TOML has no null, so the parser of configurations knows none either."""
    cleaned = _clean(raw)
    assert isinstance(cleaned, dict)
    return cleaned


def _clean(value: object) -> object:
    if isinstance(value, dict):
        return {key: _clean(inner) for key, inner in value.items() if inner is not None}
    return value
