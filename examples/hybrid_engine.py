"""A small engine made of the kernels and the pool: prefill here, pack, unpack there, decode.

Three prompts are prefilled in one packed pass, a fourth that begins like the first resumes from a
checkpoint that the first left behind. Each request's rows and states are packed into one buffer by
one call, unpacked into a second pool with smaller blocks, and decoded there in one batch, in place.
Every step's logits are compared with transformers alone.

Exit status: 0 if all tokens are equal, logits agree and nothing leaked, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import attrs
import torch

from cluster.models import POCKET, generate_alone, load_model
from cluster.workload import SYSTEM_PROMPT
from hybrid.engine import PoolEngine, Request
from hybrid.model import HybridModel
from prfaas.core import RequestId
from prfaas.kernels import Pieces, entry_pieces, pack, report, unpack
from prfaas.transfer import EntryLayout, place

TOLERANCE = 1e-3
"""Largest difference of a float32 logit."""

POOL_BYTES = 64 << 20

QUESTIONS = (
    "What does the walrus operator do?",
    "How is a context manager written?",
    "When is a list better than a tuple?",
)


def prompts() -> dict[str, list[int]]:
    """One token is one byte."""
    long = SYSTEM_PROMPT * 2
    texts = {
        "long": long + QUESTIONS[0],
        "short": QUESTIONS[1],
        "middle": SYSTEM_PROMPT[:700] + QUESTIONS[2],
        "again": long + QUESTIONS[2],
    }
    return {name: list(text.encode()) for name, text in texts.items()}


def pieces_of(engine: PoolEngine, request: Request) -> Pieces:
    """Where the rows and states of a request's tokens lie in its engine's pool."""
    reservation = request.reservation
    layout = EntryLayout(engine.geometry.spec, len(request.tokens))
    where = place(layout, engine.geometry, reservation.block_tables, reservation.tail_slots)
    return entry_pieces(where)


def move(
    request: Request, source: PoolEngine, target: PoolEngine, max_new: int
) -> tuple[Request, int]:
    """Ships one request; returns it as the other side knows it, and the bytes."""
    path = source.model.path
    packed = pack([source.memory], pieces_of(source, request), path=path)
    there = target.open(request.request_id, request.tokens, max_new, receive=True)
    unpack(packed, [target.memory], pieces_of(target, there), path=path)
    return there, packed.numel()


@attrs.define
class Run:
    """Two engines, the requests between them, and every step's logits."""

    prefiller: PoolEngine
    decoder: PoolEngine
    sent: list[Request]
    received: list[Request]
    sent_bytes: list[int]
    logits: torch.Tensor
    prefill_s: float
    decode_s: float


def serve(model: HybridModel, texts: dict[str, list[int]], max_new: int) -> Run:
    """Prefills in one pool, ships, decodes in the other; both are empty afterwards."""
    prefiller = PoolEngine(model, block_size=256, pool_bytes=POOL_BYTES)
    decoder = PoolEngine(model, block_size=128, pool_bytes=POOL_BYTES)
    *together, last = texts
    start = time.perf_counter()
    sent = [prefiller.open(RequestId(name), texts[name], 0) for name in together]
    logits = prefiller.prefill(sent)
    sent.append(prefiller.open(RequestId(last), texts[last], 0))
    steps = [torch.cat((logits, prefiller.prefill(sent[-1:])))]
    prefill_s = time.perf_counter() - start
    moved = [move(request, prefiller, decoder, max_new) for request in sent]
    received = [request for request, _ in moved]
    start = time.perf_counter()
    while len(steps) < max_new:
        steps.append(decoder.decode(received, steps[-1].argmax(-1).tolist()))
    decode_s = time.perf_counter() - start
    for request in sent:
        prefiller.close(request)
    for request in received:
        decoder.close(request)
    return Run(
        prefiller=prefiller,
        decoder=decoder,
        sent=sent,
        received=received,
        sent_bytes=[num_bytes for _, num_bytes in moved],
        logits=torch.stack(steps, dim=1).cpu(),
        prefill_s=prefill_s,
        decode_s=decode_s,
    )


def compare(run: Run, texts: dict[str, list[int]]) -> list[dict[str, object]]:
    """One row per request: what transformers alone, in one piece, makes of the same prompt."""
    alone = load_model("pocket")
    rows = []
    for request, num_bytes, logits in zip(run.sent, run.sent_bytes, run.logits, strict=True):
        prompt = texts[request.request_id]
        tokens, truth = generate_alone(alone, prompt, len(logits))
        difference = (logits - torch.from_numpy(truth)).abs().max().item()
        new = logits.argmax(-1).tolist()
        rows.append(
            {
                "request": request.request_id,
                "tokens": len(prompt),
                "cached": request.num_cached,
                "bytes": num_bytes,
                "largest_difference": difference,
                "same": new == tokens and difference <= TOLERANCE,
                "answer": bytes(new).decode("utf-8", "replace"),
            }
        )
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for the Triton kernels")
    parser.add_argument("--path", choices=("torch", "triton"), help="default: the kernels' rule")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    args = parser.parse_args(argv)
    if args.new_tokens < 1:
        parser.error("--new-tokens is at least 1")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU here")
    texts = prompts()
    model = HybridModel(POCKET, device=args.device, path=args.path)
    with torch.inference_mode():
        run = serve(model, texts, args.new_tokens)
        rows = compare(run, texts)
    engines = (run.prefiller, run.decoder)
    result = {
        "rows": rows,
        "prefill_s": run.prefill_s,
        "decode_s": run.decode_s,
        "leaked_blocks": sum(sum(e.cache.usage().reserved.values()) for e in engines),
        "kernel_calls": {f"{op} {path}": n for (op, path), n in sorted(report().calls.items())},
    }
    show(result, as_json=args.json)
    return 0 if all(row["same"] for row in rows) and not result["leaked_blocks"] else 1


def show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    print(" request  tokens  cached  shipped  difference  same  answer")
    for row in result["rows"]:
        print(
            f" {row['request']:<8}{row['tokens']:>6,}{row['cached']:>8,}"
            f"{row['bytes'] / 1e6:>6.1f} MB{row['largest_difference']:>12.1e}"
            f"{'yes' if row['same'] else 'NO':>6}  {row['answer']!r}"
        )
    print(f"prefill {result['prefill_s']:.2f} s, decode {result['decode_s']:.2f} s")
    print(f"leaked blocks {result['leaked_blocks']}")
    print(", ".join(f"{call} {count}" for call, count in result["kernel_calls"].items()))
    same = sum(row["same"] for row in result["rows"])
    print(f"same tokens and logits as transformers alone: {same}/{len(result['rows'])}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
