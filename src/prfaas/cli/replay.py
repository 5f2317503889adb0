"""``prfaas replay``: run a simulation's log again, the same or under other settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import attrs
import msgspec

from prfaas.cli.config import Config
from prfaas.cli.decisions import Log, open_log
from prfaas.cli.simulate import simulated, with_overrides
from prfaas.cli.summary import Summary, summary_cells
from prfaas.cli.table import print_table
from prfaas.errors import ConfigError
from prfaas.seams import RoutingDecision

_DIFFERS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="a file that prfaas simulate --log wrote")
    parser.add_argument("--threshold", metavar="T", help="tokens, 'best' or 'adaptive'")
    parser.add_argument(
        "--roles",
        action="append",
        default=[],
        metavar="CLUSTER=P/D",
        help="prefill and decode nodes of a pd cluster; may be repeated",
    )
    parser.add_argument("--policy", choices=("threshold", "max_weight"))
    parser.add_argument("--balancer", choices=("fixed", "throughput"))
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")


def run(args: argparse.Namespace) -> int:
    with open_log(Path(args.log)) as log:
        changed = changed_config(args, log.config)
        if changed is not None:
            return _compare(changed, log.summary, as_json=args.json)
        return _verify(log, as_json=args.json)


def changed_config(args: argparse.Namespace, config: Config) -> Config | None:
    """Return the configuration under the other settings; None if there are none.

    Raises:
        ConfigError: a setting is malformed.
    """
    if not (args.threshold or args.roles or args.policy or args.balancer):
        return None
    clusters = dict(config.clusters)
    for text in args.roles:
        name, prefill, decode = _roles(text, config)
        clusters[name] = msgspec.structs.replace(clusters[name], prefill=prefill, decode=decode)
    if args.threshold and (args.policy or config.simulate.policy) == "max_weight":
        raise ConfigError(
            f"--threshold {args.threshold}: policy max_weight has no threshold; add "
            "--policy threshold, or leave it out"
        )
    config = msgspec.structs.replace(config, clusters=clusters)
    return with_overrides(
        config,
        policy=args.policy,
        threshold=None if args.threshold is None else _threshold(args.threshold),
        balancer=args.balancer,
    )


def first_difference(
    logged: Iterable[RoutingDecision], repeated: Iterable[RoutingDecision]
) -> str | None:
    """Say where two runs part, or None if every decision is the same in every field."""
    for number, (old, new) in enumerate(zip_longest(logged, repeated), 1):
        if old == new:
            continue
        if old is None or new is None:
            longer = "the replay" if old is None else "the log"
            return f"decision {number} is only in {longer}"
        fields = attrs.fields_dict(RoutingDecision)
        parts = [
            f"{name} was {getattr(old, name)!r}, is {getattr(new, name)!r}"
            for name in fields
            if getattr(old, name) != getattr(new, name)
        ]
        return f"decision {number} (request {old.request_id!r}): {'; '.join(parts)}"
    return None


def _verify(log: Log, *, as_json: bool) -> int:
    _, result, summary = simulated(log.config, "replaying")
    difference = first_difference(log.decisions, result.decisions)
    if difference is None and summary != log.summary:
        difference = "all decisions are the same, but the figures are not"
    if difference is not None and log.prfaas_version != version("prfaas"):
        difference += f"; the log is of prfaas {log.prfaas_version}, this is {version('prfaas')}"
    if as_json:
        report = {"decisions": len(result.decisions), "difference": difference}
        print(msgspec.json.encode(report).decode())
    elif difference is None:
        print(f"all {len(result.decisions):,} decisions are the same")
    else:
        print(f"the replay differs: {difference}")
    return 0 if difference is None else _DIFFERS


def _compare(config: Config, logged: Summary, *, as_json: bool) -> int:
    _, _, summary = simulated(config, "replaying")
    if as_json:
        report: dict[str, Any] = {"logged": logged, "changed": summary}
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return 0
    old, new = summary_cells(logged), summary_cells(summary)
    names = dict.fromkeys([*old, *new])
    print_table(
        "The same arrivals under other settings",
        ("", "logged", "changed"),
        [(name, old.get(name, "-"), new.get(name, "-")) for name in names],
    )
    return 0


def _roles(text: str, config: Config) -> tuple[str, int, int]:
    name, _, split = text.rpartition("=")
    if not name:
        pd = [key for key, cluster in config.clusters.items() if cluster.kind == "pd"]
        if len(pd) != 1:
            raise ConfigError(
                f"--roles {text}: the pd clusters are {', '.join(pd)}; give CLUSTER=P/D"
            )
        name = pd[0]
    if name not in config.clusters or config.clusters[name].kind != "pd":
        raise ConfigError(f"--roles {text}: no pd cluster {name!r}; give CLUSTER=P/D")
    prefill, _, decode = split.partition("/")
    if not (prefill.isdecimal() and decode.isdecimal()):
        raise ConfigError(f"--roles {text}: {split!r} is no split; give two counts such as 3/5")
    return name, int(prefill), int(decode)


def _threshold(text: str) -> str | float:
    if text in ("best", "adaptive"):
        return text
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ConfigError(f"--threshold is {text!r}; give tokens, 'best' or 'adaptive'")
    return value
