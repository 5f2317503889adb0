"""What an import costs, and what the package shows."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import prfaas.testing

HEAVY = ["torch", "triton", "transformers", "grpc", "zmq", "ucxx", "numpy", "rich", "matplotlib"]
ROUTED = """
from random import Random
from prfaas import (
    ClusterKind, LoadLedger, Role, ThresholdController, ThresholdRouter, preset
)
from prfaas.core import ClusterId, NodeId, RequestId
from prfaas.hashing import hash_granules, root_hash
from prfaas.seams import NodeUp, RoutedRequest

spec = preset("kimi-linear-48b")
ledger = LoadLedger.for_spec(spec)
for name, kind, role in (
    ("far", ClusterKind.PRFAAS, Role.PREFILL),
    ("near", ClusterKind.PD, Role.PREFILL),
    ("decode", ClusterKind.PD, Role.DECODE),
):
    cluster = ClusterId(kind.value)
    ledger.node_up(
        NodeUp(node_id=NodeId(name), cluster_id=cluster, kind=kind, role=role, epoch=1)
    )
controller = ThresholdController(spec, band=(1000, 1000), prior_tokens=[1000])
router = ThresholdRouter(spec, controller)
tokens = range(5000)
hashes = hash_granules(root_hash(spec.fingerprint()), tokens, spec.granule_tokens)
request = RoutedRequest(request_id=RequestId("r"), num_tokens=5000, granule_hashes=hashes)
assert router.route(request, ledger, 0.0, Random(0)).prefill_node == "far"
"""


def loaded_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after running ``code``."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "code",
    ["import prfaas", "import prfaas.testing", ROUTED],
    ids=["import", "testing kit", "routed request"],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    assert not loaded_after(code) & {*HEAVY, "asyncio"}


def test_a_transport_loads_no_engine() -> None:
    assert not loaded_after("import prfaas.transport.tcp, prfaas.runtime") & set(HEAVY)


@pytest.mark.parametrize("module", [prfaas, prfaas.testing])
def test_every_public_name_exists_and_the_list_is_sorted(module: ModuleType) -> None:
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("module", [prfaas, prfaas.testing])
def test_an_unknown_name_is_an_attribute_error(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"{module.__name__!r} has no attribute 'Wrker'"):
        module.Wrker  # noqa: B018


def test_a_missing_extra_names_the_command_that_brings_it() -> None:
    code = "import sys; sys.modules['transformers'] = None\nimport prfaas.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert 'pip install "prfaas[transformers]"' in done.stderr
