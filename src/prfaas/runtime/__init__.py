"""The shells: workers, the gateway in front of them, and the door for clients."""

from prfaas.runtime.attempt import Generation
from prfaas.runtime.door import Client, Door
from prfaas.runtime.gateway import Gateway, GatewayConfig
from prfaas.runtime.node import LandingHook, Node, WorkerConfig
from prfaas.runtime.worker import Worker

__all__ = [
    "Client",
    "Door",
    "Gateway",
    "GatewayConfig",
    "Generation",
    "LandingHook",
    "Node",
    "Worker",
    "WorkerConfig",
]
