"""Discrete-event simulation of the clusters, under the policies that the servers run."""

from __future__ import annotations

from prfaas.simulator.request_log import Ending, RequestLog, RequestRecord
from prfaas.simulator.result import RoleConversion, SimulationResult
from prfaas.simulator.scenario import (
    Failure,
    PrefillCost,
    Scenario,
    SimulatedLink,
    SimulatedNode,
)
from prfaas.simulator.simulator import Simulation, Simulator

__all__ = [
    "Ending",
    "Failure",
    "PrefillCost",
    "RequestLog",
    "RequestRecord",
    "RoleConversion",
    "Scenario",
    "SimulatedLink",
    "SimulatedNode",
    "Simulation",
    "SimulationResult",
    "Simulator",
]
