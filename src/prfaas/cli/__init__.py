"""The command line. Each command is a module with ``add_arguments(parser)`` and ``run(args)``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from types import MappingProxyType
from typing import Protocol, cast

from prfaas.errors import PrfaasError


class Command(Protocol):
    """What the module of a command offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it, print to standard output, return the exit status; raise PrfaasError."""


COMMANDS = MappingProxyType(
    {
        "plan": "what a deployment could sustain: threshold, roles, rate, egress",
        "simulate": "run a workload through a simulated deployment",
        "replay": "run a simulation's log again: the same, or under other settings",
        "profile": "measure the prefill times of your engine",
        "reproduce": "compute the tables of arXiv 2604.15039 and compare",
    }
)
"""The commands and what they do; the module of each is imported only when it is called."""

_FAILED = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 is success, 1 a comparison that failed, 2 an error that the message names, 130 Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser(arguments).parse_args(arguments)
    try:
        status = _module(args.command).run(args)
        sys.stdout.flush()
        return status
    except PrfaasError as error:
        print(f"prfaas {args.command}: {error}", file=sys.stderr)
        return _FAILED
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except KeyboardInterrupt:
        print(f"prfaas {args.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser; only the command that is called gets its arguments."""
    parser = argparse.ArgumentParser(
        prog="prfaas",
        description="Prefill-as-a-Service: plan, simulate and measure hybrid-attention serving.",
    )
    parser.add_argument("--version", action="version", version=f"prfaas {version('prfaas')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    called = next((word for word in arguments if not word.startswith("-")), None)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        if name == called:
            _module(name).add_arguments(command)
    return parser


def _module(name: str) -> Command:
    return cast("Command", import_module(f"prfaas.cli.{name}"))
