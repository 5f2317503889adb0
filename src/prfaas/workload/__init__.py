"""Requests as they arrive: values and arrival processes."""

from __future__ import annotations

from prfaas.workload.arrival import Arrival
from prfaas.workload.processes import Phase, Tokens, bursty, diurnal, phases, poisson
from prfaas.workload.reshape import at_rate, mean_rate_rps, repeated
from prfaas.workload.sessions import SessionShape, sessions

__all__ = [
    "Arrival",
    "Phase",
    "SessionShape",
    "Tokens",
    "at_rate",
    "bursty",
    "diurnal",
    "mean_rate_rps",
    "phases",
    "poisson",
    "repeated",
    "sessions",
]
