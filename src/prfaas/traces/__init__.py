"""Readers of published request traces. They take lines, so the caller opens the file."""

from __future__ import annotations

from prfaas.traces.azure import read_azure
from prfaas.traces.burstgpt import read_burstgpt
from prfaas.traces.formats import TRACE_FORMATS, detect, read_trace
from prfaas.traces.mooncake import read_mooncake
from prfaas.traces.trace import Row, Trace

__all__ = [
    "TRACE_FORMATS",
    "Row",
    "Trace",
    "detect",
    "read_azure",
    "read_burstgpt",
    "read_mooncake",
    "read_trace",
]
