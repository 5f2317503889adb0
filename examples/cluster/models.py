"""The demo's models, and the single process that everything is compared with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers

from prfaas.integrations.transformers import FAMILIES, TransformersEngine, random_model

POCKET = Path(__file__).parents[1] / "pocket_model"
SEGMENT_TOKENS = 256


def check_model(name: str) -> str | None:
    """What is wrong with a model's name; None if nothing is."""
    family = name.removeprefix("random:")
    if family != name:
        return None if family in FAMILIES else f"random families are {', '.join(FAMILIES)}"
    folder = POCKET if name == "pocket" else Path(name)
    return None if (folder / "config.json").is_file() else f"{folder} holds no config.json"


def load_model(name: str) -> Any:
    """``pocket``, ``random:FAMILY`` or a folder; float32, one thread: runs repeat exactly."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if name.startswith("random:"):
        return random_model(name.removeprefix("random:"))
    folder = POCKET if name == "pocket" else Path(name)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_engine(model: Any, name: str) -> TransformersEngine:
    """Blocks of the demo are one segment long: a resumed prefill repeats the same operations."""
    return TransformersEngine(model, name=name, segment_tokens=SEGMENT_TOKENS)


def pocket() -> TransformersEngine:
    """The demo's model, e.g. for ``prfaas profile --engine cluster.models:pocket``."""
    return make_engine(load_model("pocket"), "pocket")


@torch.inference_mode()
def generate_alone(model: Any, tokens: Sequence[int], num_new: int) -> tuple[list[int], Any]:
    """Greedy tokens and logits [num_new, vocab] of transformers alone, in this one process."""
    cache = transformers.DynamicCache(config=model.config)
    pieces = [tokens[i : i + SEGMENT_TOKENS] for i in range(0, len(tokens), SEGMENT_TOKENS)]
    position, new, logits = 0, [], []
    while len(new) < num_new:
        piece = pieces.pop(0) if pieces else [new[-1]]
        stop = position + len(piece)
        output = model(
            input_ids=torch.tensor([piece]),
            position_ids=torch.arange(position, stop)[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        position = stop
        if not pieces:
            logits.append(output.logits[0, -1].float())
            new.append(int(logits[-1].argmax()))
    return new, torch.stack(logits).numpy()
