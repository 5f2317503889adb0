"""Models, systems and lengths by name: from the configuration, the paper, or a database."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import attrs

from prfaas.capacity import (
    EmpiricalLengths,
    LengthDistribution,
    LogNormalLengths,
    PrefillTime,
    System,
)
from prfaas.cli.config import AIConfigurator, Config, SystemSection
from prfaas.cli.files import open_trace, prefill_time, read_model_config, read_prefill_table
from prfaas.errors import ConfigError
from prfaas.spec import ModelSpec, preset
from prfaas.traces import Trace

PAPER_SYSTEMS = ("paper-h200", "paper-h20")
"""The two systems of the case study in arXiv 2604.15039, each an instance of 8 GPUs."""

_DATABASE = "aiconfigurator:"


def model_of(config: Config) -> ModelSpec:
    """Build the model that a configuration names.

    Raises:
        ConfigError: not exactly one of preset, path and config is given, or it is not known.
    """
    section = config.model
    given = [key for key in ("preset", "path", "config") if getattr(section, key) is not None]
    if len(given) != 1:
        raise ConfigError(f"model has {' and '.join(given) or 'nothing'}; give preset or path")
    if section.preset is not None:
        return preset(section.preset)
    if section.config is not None:
        return ModelSpec.from_hf_config(section.config)
    path = Path(config.folder, section.path or "").resolve()
    folder = path.parent if path.name == "config.json" else path
    return ModelSpec.from_hf_config(read_model_config(path), name=folder.name)


def trace_of(config: Config) -> Trace | None:
    """Read the workload's trace; None where the workload is a law of lengths.

    Raises:
        ConfigError: both or neither are given, or the file cannot be read.
    """
    section = config.workload
    if (section.trace is None) == (section.lengths is None):
        raise ConfigError("workload has both or neither of lengths and trace; give one of them")
    if section.trace is None:
        return None
    return open_trace(Path(config.folder, section.trace), section.format, section.trace_sha256)


def lengths_of(config: Config, trace: Trace | None) -> LengthDistribution:
    """Return the law of the uncached lengths.

    Of a trace these are the lengths without what an unlimited prefix cache would hold.
    """
    if trace is not None:
        uncached = zip(trace.arrivals, trace.cached_tokens(), strict=True)
        return EmpiricalLengths(tuple(arrival.num_tokens - cached for arrival, cached in uncached))
    law = config.workload.lengths
    if law is None:
        raise ConfigError("workload.lengths is missing; add it, or a trace")
    try:
        return LogNormalLengths(mu=law.mu, sigma=law.sigma, min_tokens=law.min, max_tokens=law.max)
    except ConfigError as error:
        raise ConfigError(f"workload.lengths: {error}") from error


def output_tokens_of(config: Config, trace: Trace | None) -> float:
    """Return the mean number of generated tokens.

    Raises:
        ConfigError: neither the configuration nor a trace says it, or it is below 1.
    """
    said = config.workload.output_tokens
    if said is None and trace is None:
        raise ConfigError("workload.output_tokens is missing; add it")
    if said is not None and said < 1:
        raise ConfigError(f"workload.output_tokens is {said}; it must be at least 1")
    return trace.mean_output_tokens if said is None and trace is not None else float(said or 0)


def systems_of(config: Config, model: ModelSpec, names: Iterable[str]) -> dict[str, System]:
    """Build the systems of these names; see `system_of`."""
    return {name: system_of(config, model, name) for name in names}


def system_of(config: Config, model: ModelSpec, name: str) -> System:
    """Build the system that a cluster names.

    Raises:
        ConfigError: it is not known, or its values are not usable.
    """
    section = config.systems.get(name)
    if section is None:
        return named_system(name, model, known=config.systems)
    try:
        return _described(name, section, config, model)
    except ConfigError as error:
        raise ConfigError(f"systems.{name}: {error}") from error


def named_system(name: str, model: ModelSpec, *, known: Iterable[str] = ()) -> System:
    """Build one of `PAPER_SYSTEMS`, or ``aiconfigurator:SYSTEM``.

    Raises:
        ConfigError: the name is neither; ``known`` is listed beside what this knows.
    """
    if name in PAPER_SYSTEMS:
        return _of_the_paper(name)
    if name.startswith(_DATABASE):
        wanted = AIConfigurator(system=name.removeprefix(_DATABASE))
        return attrs.evolve(_of_the_database(wanted, model), name=name)
    names = ", ".join([*known, *PAPER_SYSTEMS, f"{_DATABASE}SYSTEM"])
    raise ConfigError(f"system {name!r} is not known; known are {names}")


def _of_the_paper(name: str) -> System:
    # The paper's curves take a moment to build, and only this name needs them.
    paper = import_module("prfaas.paper.profiles")
    prefill, price = {
        "paper-h200": (paper.H200, paper.H200_PRICE),
        "paper-h20": (paper.H20, paper.H20_PRICE),
    }[name]
    num_gpus = 8
    return System(
        name=name,
        prefill=prefill,
        num_gpus=num_gpus,
        price_per_hour=price * num_gpus,
        batch_size=paper.CASE_STUDY.batch_size,
        decode_step_s=paper.CASE_STUDY.decode_step_s,
    )


def _described(name: str, section: SystemSection, config: Config, model: ModelSpec) -> System:
    ways = ("prefill", "prefill_table", "prefill_rows", "aiconfigurator")
    given = [way for way in ways if getattr(section, way) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"prefill times come from {' and '.join(given) or 'nowhere'}; give exactly one of "
            "prefill, prefill_table and aiconfigurator"
        )
    if section.aiconfigurator is not None:
        found = _of_the_database(section.aiconfigurator, model)
    else:
        found = System(name=name, prefill=_prefill(section, config), num_gpus=section.gpus)
    price = found.price_per_hour if section.price is None else section.price * found.num_gpus
    step_s = found.decode_step_s if section.step_ms is None else section.step_ms / 1000
    batch_size = found.batch_size if section.batch_size is None else section.batch_size
    return attrs.evolve(
        found, name=name, price_per_hour=price, decode_step_s=step_s, batch_size=batch_size
    )


def _prefill(section: SystemSection, config: Config) -> PrefillTime:
    if section.prefill_table is not None:
        return prefill_time(read_prefill_table(Path(config.folder, section.prefill_table)))
    if section.prefill_rows is not None:
        return prefill_time(section.prefill_rows)
    return prefill_time([(tokens, 0.0, seconds) for tokens, seconds in section.prefill or ()])


def _of_the_database(wanted: AIConfigurator, model: ModelSpec) -> System:
    try:
        database = import_module("prfaas.integrations.aiconfigurator")
    except ImportError as error:
        raise ConfigError(
            f"prefill times of {wanted.system!r} come from the AIConfigurator database, which "
            'needs pip install "prfaas[profiles]"; or give prefill or prefill_table'
        ) from error
    system: System = database.measure(
        model, system=wanted.system, backend=wanted.backend, num_gpus=wanted.gpus
    )
    return system
