"""The configuration file of the command line: TOML, every key checked, errors that name the key.

Units are in the names, as people type them: ``egress_gbps``, ``rtt_ms``. ``price`` is that of one
GPU for an hour, in any currency or relative to another system.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from prfaas.errors import ConfigError

_T = TypeVar("_T", bound="Section")

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Nodes = Annotated[int, msgspec.Meta(ge=0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file."""


class ModelSection(Section, frozen=True, kw_only=True):
    """``[model]``: a preset, or a model folder or config.json, or its contents."""

    preset: str | None = None
    path: str | None = None
    config: dict[str, Any] | None = None


class LengthLaw(Section, frozen=True, kw_only=True):
    """A log-normal law of prompt lengths in tokens; ``mu`` and ``sigma`` of the logarithm."""

    mu: float
    sigma: Positive
    min: Positive
    max: Positive


class WorkloadSection(Section, frozen=True, kw_only=True):
    """``[workload]``: a law of lengths or a trace; how much is generated; how often requests come.

    ``output_tokens`` and ``rate_rps`` are those of the trace where they are left out.
    ``trace_sha256`` refuses a trace that has changed.
    """

    lengths: LengthLaw | None = None
    trace: str | None = None
    format: Literal["mooncake", "azure", "burstgpt"] | None = None
    trace_sha256: str | None = None
    output_tokens: Count | None = None
    rate_rps: Positive | None = None


class AIConfigurator(Section, frozen=True, kw_only=True):
    """Prefill times from the AIConfigurator database instead of a measurement."""

    system: str
    backend: str = "sglang"
    gpus: Count = 8


class SystemSection(Section, frozen=True, kw_only=True):
    """``[systems.NAME]``: one instance of the model on one kind of machine.

    Prefill times come from exactly one of ``prefill`` ([tokens, seconds] pairs),
    ``prefill_table`` (a CSV file of new, cached, seconds), ``prefill_rows`` (the rows of such a
    file) and ``aiconfigurator``. A system of a pd cluster also needs ``batch_size``, most requests
    that it decodes at a time, and ``step_ms``, the time of such a step. ``pool_gb`` gives its nodes
    a prefix cache of that size in a simulation.
    """

    prefill: list[tuple[float, float]] | None = None
    prefill_table: str | None = None
    prefill_rows: list[tuple[float, float, float]] | None = None
    aiconfigurator: AIConfigurator | None = None
    gpus: Count = 8
    price: Positive | None = None
    batch_size: Positive | None = None
    step_ms: Positive | None = None
    pool_gb: Positive | None = None


class ClusterSection(Section, frozen=True, kw_only=True):
    """``[clusters.NAME]``: instances of one system.

    ``prefill`` and ``decode`` fix the roles of a pd cluster in a simulation; a plan chooses them.
    """

    kind: Literal["prfaas", "pd"]
    system: str
    nodes: Nodes
    prefill: Nodes | None = None
    decode: Nodes | None = None


class LinkSection(Section, frozen=True, kw_only=True):
    """``[link]`` out of the PRFAAS clusters, which share it.

    ``share_of_others`` is the part of it that other traffic takes, 0 to 1. ``schedule`` changes its
    rate while a simulation runs: [second, Gbit/s].
    """

    egress_gbps: Positive
    rtt_ms: NotNegative = 0.0
    share_of_others: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    schedule: list[tuple[NotNegative, NotNegative]] = []


class SimulateSection(Section, frozen=True, kw_only=True):
    """``[simulate]``: policies, and how much to simulate.

    ``threshold`` is a number, ``best`` for the planner's t (limit of stability), or ``adaptive`` to
    let the controller move it. The run ends after ``requests`` or ``duration_s``, by default after
    the trace or 5,000 requests. With ``clients`` each of so many clients sends its next request as
    soon as its last one has ended, which gives the throughput at saturation. ``timeout_s`` counts
    from the arrival of a request to its last token.
    """

    policy: Literal["threshold", "max_weight"] = "threshold"
    threshold: Literal["best", "adaptive"] | NotNegative = "best"
    balancer: Literal["fixed", "throughput"] = "fixed"
    seed: int = 0
    requests: Count | None = None
    duration_s: Positive | None = None
    clients: Count | None = None
    ttft_slo_s: Positive | None = None
    timeout_s: Positive | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. Relative paths in it start at ``folder``."""

    model: ModelSection
    workload: WorkloadSection
    systems: dict[str, SystemSection]
    clusters: dict[str, ClusterSection]
    link: LinkSection
    simulate: SimulateSection = SimulateSection()
    folder: str = "."


def read_config(path: str | Path) -> Config:
    """Read and check a configuration file.

    Raises:
        ConfigError: the file cannot be read or is no TOML, a key is unknown or missing, or a value
            has the wrong type; names the file and the key.
    """
    file = Path(path)
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML: {error}") from error
    try:
        return parse_config(raw, folder=str(file.parent))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def parse_config(raw: Mapping[str, Any], *, folder: str = ".") -> Config:
    """Check the contents of a configuration file; see `read_config`."""
    known = [field for field in Config.__struct_fields__ if field != "folder"]
    for key in raw:
        if key not in known:
            raise _unknown(key, key, known)
    return Config(
        model=_section(raw, "model", ModelSection),
        workload=_section(raw, "workload", WorkloadSection),
        systems=_sections(raw, "systems", SystemSection),
        clusters=_sections(raw, "clusters", ClusterSection),
        link=_section(raw, "link", LinkSection),
        simulate=_section(raw, "simulate", SimulateSection, optional=True),
        folder=folder,
    )


def _section(raw: Mapping[str, Any], path: str, kind: type[_T], *, optional: bool = False) -> _T:
    key = path.rpartition(".")[2]
    if key not in raw and not optional:
        raise ConfigError(f"[{path}] is missing; add the table")
    value = raw.get(key, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is {value!r}; it must be a table")
    _check_keys(value, kind, path)
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _readable(error, value, kind, path) from error


def _sections(raw: Mapping[str, Any], path: str, kind: type[_T]) -> dict[str, _T]:
    value = raw.get(path, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is {value!r}; it must be tables [{path}.NAME]")
    return {name: _section(value, f"{path}.{name}", kind) for name in value}


def _check_keys(value: Mapping[str, Any], kind: type[Section], path: str) -> None:
    """Refuse unknown keys, at any depth, before their values are looked at."""
    types_of = typing.get_type_hints(kind)
    for key, inner in value.items():
        if key not in types_of:
            raise _unknown(f"{path}.{key}", key, list(kind.__struct_fields__))
        for option in _options(types_of[key]):
            is_section = isinstance(option, type) and issubclass(option, Section)
            if is_section and isinstance(inner, Mapping):
                _check_keys(inner, option, f"{path}.{key}")


def _options(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _unknown(path: str, key: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"{path} is not a known key; {hint}known are {', '.join(known)}")


def _readable(
    error: msgspec.ValidationError, value: Mapping[str, Any], kind: type[Section], path: str
) -> ConfigError:
    """Say which key is wrong, what it holds and what it may hold."""
    text, _, where = str(error).partition(" - at `$")
    where = where.rstrip("`")
    held: Any = value
    for name, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", where):
        held = held[name] if name else held[int(index)]
    missing = re.fullmatch(r"Object missing required field `(.+)`", text)
    if missing:
        return ConfigError(f"{path}{where}.{missing[1]} is missing; add the key")
    choices = _choices(typing.get_type_hints(kind).get(where.removeprefix(".")))
    remedy = f"; give {' or '.join(choices)}" if choices else ""
    reason = text[:1].lower() + text[1:].replace("`", "")
    return ConfigError(f"{path}{where} is {held!r}: {reason}{remedy}")


def _choices(hint: Any) -> list[str]:
    return [
        repr(choice)
        for option in _options(hint)
        if typing.get_origin(option) is Literal
        for choice in typing.get_args(option)
    ]
