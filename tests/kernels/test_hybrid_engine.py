"""The example engine: a whole hybrid model made of the kernels, and two pools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hybrid_engine
from cluster.models import POCKET, generate_alone, load_model
from hybrid.engine import PoolEngine
from hybrid.model import HybridModel
from kernel_paths import DEVICE, IS_INTERPRETING, PATHS
from prfaas.core import RequestId
from prfaas.kernels import report

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first four layers of the pocket model: three of linear attention and one of full."""
    folder = tmp_path_factory.mktemp("short")
    config = json.loads((POCKET / "config.json").read_text())
    config["num_hidden_layers"] = NUM_LAYERS
    config["layer_types"] = config["layer_types"][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(POCKET / "model.safetensors")
    return folder


@pytest.mark.timeout(300)  # interpreted, on a busy machine
@pytest.mark.parametrize("path", PATHS)
def test_two_requests_through_two_pools(path: str, short_model: Path) -> None:
    """Prefill in one pass, a hit on a checkpoint, pack, unpack into other blocks, decode in place:
    every logit as transformers alone computes it."""
    model = HybridModel(short_model, device=DEVICE, path=path)
    prefiller = PoolEngine(model, block_size=64, pool_bytes=8 << 20)
    decoder = PoolEngine(model, block_size=128, pool_bytes=8 << 20)
    text = list(hybrid_engine.SYSTEM_PROMPT.encode())
    prompts = {"a": text[:135], "b": text[500:517], "c": [*text[:130], 7, 8, 9]}
    with torch.inference_mode():
        sent = [prefiller.open(RequestId(name), prompts[name], 0) for name in "ab"]
        logits = prefiller.prefill(sent)
        sent.append(prefiller.open(RequestId("c"), prompts["c"], 0))
        assert [request.num_cached for request in sent] == [0, 0, 128]
        steps = [torch.cat((logits, prefiller.prefill(sent[2:])))]
        there = [hybrid_engine.move(request, prefiller, decoder, 3)[0] for request in sent]
        for request in sent:
            prefiller.close(request)
        prefiller.memory.fill_(255)  # what was shipped needs nothing of the first pool
        for _ in range(2):
            steps.append(decoder.decode(there, steps[-1].argmax(-1).tolist()))
        for request in there:
            decoder.close(request)
        alone = load_model(str(short_model))
        for index, name in enumerate("abc"):
            tokens, truth = generate_alone(alone, prompts[name], 3)
            got = torch.stack([step[index] for step in steps]).cpu()
            assert got.argmax(-1).tolist() == tokens
            assert (got - torch.from_numpy(truth)).abs().max() <= hybrid_engine.TOLERANCE
    for engine in (prefiller, decoder):
        assert sum(engine.cache.usage().reserved.values()) == 0
        engine.cache.check()
    assert report().calls["delta_rule_step", path] > 0


if not IS_INTERPRETING:  # 2,000 tokens take minutes there

    def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
        assert hybrid_engine.main(["--new-tokens", "4", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert [row["cached"] for row in result["rows"]][-1] > 1024
        assert result["leaked_blocks"] == 0
        assert hybrid_engine.main(["--new-tokens", "2"]) == 0
        assert "yes" in capsys.readouterr().out
