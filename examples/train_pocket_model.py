"""Train the pocket model: a byte-level GatedDeltaNet + gated-GQA hybrid of 1.8 M parameters.

The corpus is English that any CPython installation carries: the language reference behind
`help()`, the docstrings of the pure-Python standard library, the licence and the Zen. So the
recipe needs no download, and the weights it writes make the demo's text read like text.

    python examples/train_pocket_model.py --out pocket_model

The README beside the weights names the two commands that made them. A run of the same arguments
on the same Python, torch and processor repeats its losses; --seconds is only a guard,
which ends the schedule early on a slow machine.
"""

from __future__ import annotations

import argparse
import ast
import codecs
import collections
import hashlib
import itertools
import math
import pydoc_data.topics
import random
import re
import sysconfig
import time
from pathlib import Path

import torch
import transformers
from torch.nn.functional import cross_entropy

SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
VALIDATION_SHARE = 0.02
LONG_FACTOR = 4  # the last steps run on fewer, longer windows
WARMUP_STEPS = 40


def docstrings(source: str) -> list[str]:
    """Every docstring of one module, in file order, without its common indentation."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def documents() -> list[str]:
    """The corpus as documents: one per help topic, one per module, the licence and the Zen."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts[:-1]):
            fresh = [t for t in docstrings(path.read_text("utf-8", "replace")) if t not in seen]
            seen.update(fresh)
            found.append("\n\n".join(fresh))
    licence = library / "LICENSE.txt"
    if licence.exists():
        found.append(licence.read_text("utf-8"))
    zen = ast.parse((library / "this.py").read_text("utf-8")).body[0]
    found.append(codecs.decode(ast.literal_eval(zen.value), "rot13"))
    return list(dict.fromkeys(text for text in map(normalise, found) if text))


def normalise(text: str) -> str:
    """Collapse runs of four or more spaces to two, and of blank lines to one."""
    text = re.sub(r"[ \t]+\n", "\n", text.expandtabs())
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" {4,}", "  ", text)).strip()


def split(texts: list[str], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation bytes; a document belongs to one of the two by its digest."""
    parts: tuple[list[str], list[str]] = ([], [])
    for text in texts:
        draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) / 2**32
        parts[draw < VALIDATION_SHARE].append(text)
    random.Random(seed).shuffle(parts[0])
    train, held_out = (encode("\n\n\n".join(part)) for part in parts)
    return train, held_out


def encode(text: str) -> torch.Tensor:
    """The UTF-8 bytes of a text: the model's vocabulary is the 256 byte values."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def entropies(data: torch.Tensor) -> tuple[float, float]:
    """Unigram and bigram entropy of a text under its own counts, in nats per byte."""
    text = bytes(data.tolist())
    single, pairs = collections.Counter(text), collections.Counter(itertools.pairwise(text))
    unigram = -sum(n * math.log(n / len(text)) for n in single.values()) / len(text)
    bigram = -sum(n * math.log(n / single[a]) for (a, _), n in pairs.items()) / (len(text) - 1)
    return unigram, bigram


def build_model(seed: int) -> transformers.PreTrainedModel:
    """A freshly drawn model: layers in the ratio 3:1, states of 32 x 64 per value head."""
    torch.manual_seed(seed)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        dtype="float32",
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    # The library's initial decays forget within a byte. As in Mamba and Gated DeltaNet, draw time
    # steps from 0.001 to 0.1, so that the states start with memories of up to 1,000s of bytes.
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            bias = layer.linear_attn.dt_bias
            time_step = torch.exp(torch.empty_like(bias).uniform_(math.log(1e-3), math.log(0.1)))
            bias.data = time_step.expm1().log()  # the inverse of softplus
    return model


def loss_of(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean next-byte loss in nats of windows [batch, length + 1]."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validate(model: torch.nn.Module, data: torch.Tensor, length: int = 512) -> float:
    """Loss over the whole held-out text in windows of `length` bytes."""
    windows = data.unfold(0, length + 1, length).long()
    model.eval()
    losses = [loss_of(model, part) * len(part) for part in windows.split(8)]
    model.train()
    return float(sum(losses)) / len(windows)


def build_optimizers(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the projections, AdamW for embedding, convolutions, norms and decays."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def train(
    args: argparse.Namespace,
    model: transformers.PreTrainedModel,
    data: torch.Tensor,
    held_out: torch.Tensor,
) -> None:
    """Run the schedule; print a line and save the weights every `args.report_every` steps."""
    optimizers, decay = build_optimizers(model, args.lr), max(args.decay_share, 1e-9)
    start, cpu_start, step, done = time.monotonic(), time.process_time(), 0, 0.0
    while done < 1:
        factor = LONG_FACTOR if done >= 1 - args.long_share else 1
        length, batch = args.length * factor, max(1, args.batch // factor)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1, (step + 1) / WARMUP_STEPS, (1 - done) / decay)
        starts = torch.randint(len(data) - length, (batch,)).tolist()
        loss = loss_of(model, torch.stack([data[i : i + length + 1] for i in starts]).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        done = max(step / args.steps, (time.monotonic() - start) / args.seconds)
        if step % args.report_every == 0 or done >= 1:
            wall, cpu = time.monotonic() - start, time.process_time() - cpu_start
            sample = validate(model, held_out[:32768])
            print(
                f"step {step} wall {wall:.0f} s cpu {cpu:.0f} s validation {sample:.4f}", flush=True
            )
            model.save_pretrained(args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for config and weights")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--seconds", type=float, default=math.inf, help="wall time limit")
    parser.add_argument("--length", type=int, default=512, help="bytes per training window")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--decay-share", type=float, default=0.4, help="end of the schedule")
    parser.add_argument("--long-share", type=float, default=0.1, help="end on longer windows")
    parser.add_argument("--init", type=Path, help="start from the weights in this folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report-every", type=int, default=250)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    data, held_out = split(documents(), args.seed)
    unigram, bigram = entropies(held_out)
    model = build_model(args.seed)
    if args.init:
        model.load_state_dict(type(model).from_pretrained(args.init).state_dict())
    print(
        f"{model.num_parameters()} parameters; {len(data)} bytes to train on; {len(held_out)} held "
        f"out, entropy {unigram:.3f} (unigram) and {bigram:.3f} (bigram) nats per byte",
        flush=True,
    )
    train(args, model, data, held_out)
    print(f"validation, all of the held-out text: {validate(model, held_out):.4f} nats per byte")


if __name__ == "__main__":
    main()
