"""A configuration without references: what a log needs so that its run can be repeated."""

from __future__ import annotations

from pathlib import Path

import msgspec

from prfaas.capacity import PrefillProfile, PrefillSurface, PrefillTime, System
from prfaas.cli.config import Config, ModelSection, SystemSection
from prfaas.cli.files import Measurement, file_sha256, read_model_config
from prfaas.cli.systems import model_of, systems_of
from prfaas.errors import ConfigError


def frozen(config: Config) -> Config:
    """Return the configuration with every system's numbers and the model's config in it.

    A trace stays a file; its path becomes absolute and its SHA-256 is noted.
    """
    model = model_of(config)
    names = {cluster.system for cluster in config.clusters.values()}
    systems = {
        name: _numbers(config.systems.get(name), system)
        for name, system in systems_of(config, model, sorted(names)).items()
    }
    workload = config.workload
    if workload.trace is not None:
        path = Path(config.folder, workload.trace).resolve()
        workload = msgspec.structs.replace(
            workload,
            trace=str(path),
            trace_sha256=workload.trace_sha256 or file_sha256(path),
        )
    return msgspec.structs.replace(
        config, model=_model(config), systems=systems, workload=workload, folder="."
    )


def _numbers(section: SystemSection | None, system: System) -> SystemSection:
    """Fill in what the section leaves to the paper or to the database; keep what it says as is."""
    found = {
        "price": None if system.price_per_hour is None else system.price_per_hour / system.num_gpus,
        "batch_size": system.batch_size,
        "step_ms": None if system.decode_step_s is None else system.decode_step_s * 1000,
    }
    said = section or SystemSection()
    unsaid = {key: value for key, value in found.items() if getattr(said, key) is None}
    return msgspec.structs.replace(
        said,
        prefill=None,
        prefill_table=None,
        aiconfigurator=None,
        prefill_rows=_rows(system.prefill),
        gpus=system.num_gpus,
        **unsaid,
    )


def _model(config: Config) -> ModelSection:
    if config.model.path is None:
        return config.model
    return ModelSection(config=read_model_config(Path(config.folder, config.model.path)))


def _rows(prefill: PrefillTime) -> list[Measurement]:
    if isinstance(prefill, PrefillSurface):
        return list(prefill.measurements)
    if isinstance(prefill, PrefillProfile):
        return [(tokens, 0.0, seconds) for tokens, seconds in prefill.knots]
    raise ConfigError(
        f"prefill times are a {type(prefill).__name__}; only a PrefillProfile or a PrefillSurface "
        "can be written to a log"
    )
