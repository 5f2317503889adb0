"""Prefill and decode times from the kernel measurements that NVIDIA's AIConfigurator ships.

Needs the extra ``prfaas[profiles]``. The package sums measured kernel times per layer; it models no
scheduler, no tokeniser and no Python overhead, so short prompts come out faster than a server is.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs

from prfaas.capacity import DecodeProfile, PrefillSurface, System
from prfaas.core import DType
from prfaas.errors import ConfigError, MissingExtra
from prfaas.spec import ModelSpec

try:
    from aiconfigurator.cli.api import cli_estimate
    from aiconfigurator.sdk.common import DefaultHFModels, SupportedSystems
except ImportError as error:
    raise MissingExtra(package=error.name or "aiconfigurator", extra="profiles") from error

CHECKPOINTS = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "mimo-v2-flash": "XiaomiMiMo/MiMo-V2-Flash",
    "minimax-m2.5": "MiniMaxAI/MiniMax-M2.5",
    "qwen3-235b": "Qwen/Qwen3-235B-A22B",
    "qwen3.5-397b": "Qwen/Qwen3.5-397B-A17B",
}
"""Checkpoints of our presets; another model is found by the last part of its checkpoint's name."""

LENGTHS = (256, 1024, 2048, 4096, 8192, 16_384, 32_000, 65_536, 130_000)
CACHED = (0, 8192, 32_000, 98_304)
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SLO_STEP_S = 0.025
"""40 tokens/s per request, the SLO of arXiv 2604.15039."""
CASE_STUDY_TOKENS = 27_486
"""Mean prompt of the case study there; the context that decode steps are measured at."""

_BACKENDS = ("sglang", "trtllm", "vllm")
_KV_MODES = {DType.BFLOAT16: "bfloat16", DType.FLOAT16: "bfloat16", DType.FLOAT8: "fp8"}
_ROUNDING = 1e-9
_ONE_STEP = 2  # output tokens: the first is of the prefill, so one decode step is timed


@attrs.frozen(kw_only=True)
class DecodeSteps:
    """Decode steps of one instance at one context length.

    Attributes:
        steps: (batch, seconds), ascending; only batches that fit the memory, so the last one is
            the largest that fits or the largest measured. Empty when the model does not fit.
    """

    context_tokens: int
    steps: tuple[tuple[int, float], ...]

    def batch_within(self, step_s: float) -> int:
        """The largest batch whose step stays within ``step_s``; 0 when none does.

        Linear between measured batches.
        """
        best = 0
        for batch, seconds in self.steps:
            if seconds <= step_s:
                best = batch
        for (b0, s0), (b1, s1) in pairwise(self.steps):
            if s0 <= step_s < s1 and b0 >= best:
                best = b0 + math.floor((b1 - b0) * (step_s - s0) / (s1 - s0) + _ROUNDING)
        return best

    def step_s(self, batch: int) -> float:
        """Seconds of a step over ``batch``, linear between measured batches."""
        for (b0, s0), (b1, s1) in pairwise(self.steps):
            if b0 <= batch <= b1:
                return s0 + (s1 - s0) * (batch - b0) / (b1 - b0)
        return self.steps[0][1] if batch <= self.steps[0][0] else self.steps[-1][1]

    def profile(self) -> DecodeProfile:
        """The least-squares line through the steps; a mixture of experts bends away from it.

        Raises:
            ConfigError: fewer than two batches fit.
        """
        if len(self.steps) < 2:
            raise ConfigError(
                f"{len(self.steps)} batches fit at {self.context_tokens} tokens of context; a "
                "decode profile needs 2, so use more GPUs per instance"
            )
        mean_b = sum(b for b, _ in self.steps) / len(self.steps)
        mean_s = sum(s for _, s in self.steps) / len(self.steps)
        spread = sum((b - mean_b) ** 2 for b, _ in self.steps)
        slope = sum((b - mean_b) * (s - mean_s) for b, s in self.steps) / spread
        # Where steps bend upwards the line may start below 0, which no step does.
        base_s = max(mean_s - slope * mean_b, self.steps[0][1] / 2)
        return DecodeProfile(base_s=base_s, per_request_s=slope)


@attrs.frozen(kw_only=True)
class Instance:
    """One instance in the database: a checkpoint on GPUs of one kind, and how it is laid out.

    All GPUs share each layer (tensor parallel); experts are spread over ``expert_parallel`` of
    them and cut across the rest. By default every GPU holds whole experts.

    Attributes:
        weights: quantisation of dense and expert weights in the words of the database, e.g.
            "fp8_block" or "bfloat16"; None takes the checkpoint's own.
        kv: "bfloat16" or "fp8"; None takes the checkpoint's own.
        version: of the backend's data; None takes the newest.
    """

    checkpoint: str
    system: str
    backend: str = "sglang"
    num_gpus: int = 8
    expert_parallel: int | None = None
    weights: str | None = None
    kv: str | None = None
    version: str | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse what the database cannot know, before it looks for it on the network."""
        for what, value, known in (
            ("model", self.checkpoint, sorted(DefaultHFModels)),
            ("system", self.system, sorted(SupportedSystems)),
            ("backend", self.backend, _BACKENDS),
        ):
            if value not in known:
                raise ConfigError(
                    f"AIConfigurator has no {what} {value!r}; it has {', '.join(known)}"
                )
        experts = self.expert_parallel
        if experts is not None and (experts < 1 or self.num_gpus % experts):
            raise ConfigError(
                f"expert_parallel is {experts} on {self.num_gpus} GPUs; it must divide them"
            )

    def pinned(self) -> Instance:
        """The same with the version of its data; looking for the newest takes seconds a time."""
        if self.version is not None:
            return self
        return attrs.evolve(self, version=str(self._estimate("static_ctx", 1024).backend_version))

    def prefill_rows(
        self, lengths: Sequence[int] = LENGTHS, cached: Sequence[int] = (0,)
    ) -> tuple[tuple[float, float, float], ...]:
        """(new, cached, seconds) of one request alone, for `PrefillSurface`.

        Kernel tables of different sizes meet with small steps down, which no prefill has. Each
        time is therefore raised to the longest one of no more new and no more cached tokens.
        """
        pinned = self.pinned()
        times: dict[tuple[int, int], float] = {}
        for prefix in sorted(cached):
            for new in sorted(lengths):
                seconds = pinned._estimate("static_ctx", prefix + new, prefix=prefix).ttft / 1000
                floors = [s for (n, c), s in times.items() if n <= new and c <= prefix]
                times[new, prefix] = max([seconds, *floors])
        return tuple((float(n), float(c), seconds) for (n, c), seconds in times.items())

    def decode_steps(
        self, context_tokens: int = CASE_STUDY_TOKENS, batches: Sequence[int] = BATCHES
    ) -> DecodeSteps:
        """Steps of every batch that fits, and of the largest one that does."""
        pinned = self.pinned()
        steps: dict[int, float] = {}

        def fits(batch: int) -> bool:
            result = pinned._estimate("static_gen", context_tokens, batch=batch)
            if not result.summary.check_oom():
                steps[batch] = result.tpot / 1000
            return batch in steps

        too_large = next((batch for batch in sorted(batches) if not fits(batch)), None)
        largest = max(steps, default=0)
        while too_large is not None and too_large - largest > 1:
            middle = (largest + too_large) // 2
            largest, too_large = (middle, too_large) if fits(middle) else (largest, middle)
        return DecodeSteps(context_tokens=context_tokens, steps=_rising(steps))

    def _estimate(self, mode: str, tokens: int, *, batch: int = 1, prefix: int = 0) -> Any:
        experts = self.expert_parallel or self.num_gpus
        try:
            with _quiet():
                return cli_estimate(
                    self.checkpoint,
                    self.system,
                    mode=mode,
                    backend_name=self.backend,
                    backend_version=self.version,
                    isl=tokens,
                    osl=_ONE_STEP,
                    prefix=prefix,
                    batch_size=batch,
                    tp_size=self.num_gpus,
                    moe_tp_size=self.num_gpus // experts,
                    moe_ep_size=experts,
                    gemm_quant_mode=self.weights,
                    moe_quant_mode=self.weights,
                    kvcache_quant_mode=self.kv,
                )
        except (ValueError, RuntimeError, KeyError, LookupError) as error:
            reason = str(error).partition("\n")[0][:300]
            raise ConfigError(
                f"AIConfigurator has no data for {self.checkpoint} on {self.num_gpus} "
                f"{self.system} with {self.backend}: {reason}; use another system, backend or "
                "number of GPUs, or a measured prefill table"
            ) from error


def _rising(steps: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """In order of the batch, and never falling with it."""
    rising: list[tuple[int, float]] = []
    for batch in sorted(steps):
        rising.append((batch, max(steps[batch], rising[-1][1] if rising else 0.0)))
    return tuple(rising)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallow the package's remarks; what fails still raises."""
    level = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(max(level, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(level)


def checkpoint_of(model: ModelSpec) -> str:
    """The checkpoint of a preset, or the one whose last part is the model's name.

    Raises:
        ConfigError: the database has none; lists what it has.
    """
    names = {one.rpartition("/")[2].lower(): one for one in DefaultHFModels}
    found = CHECKPOINTS.get(model.name) or names.get(model.name.lower())
    if found is None:
        raise ConfigError(
            f"AIConfigurator has no model named {model.name!r}; take a preset of "
            f"{', '.join(CHECKPOINTS)}, or a folder with the name of a checkpoint: "
            f"{', '.join(sorted(names))}"
        )
    return found


def measure(
    model: ModelSpec,
    *,
    system: str,
    backend: str = "sglang",
    num_gpus: int = 8,
    lengths: Sequence[int] = LENGTHS,
    cached: Sequence[int] = CACHED,
    context_tokens: int = CASE_STUDY_TOKENS,
    step_s: float = SLO_STEP_S,
) -> System:
    """One instance for the planner, in the precision of its checkpoint and the spec's KV dtype.

    The batch is the largest whose step is within ``step_s`` and that fits the memory, each request
    at ``context_tokens``. Batch and step are None where not even one request does.

    Raises:
        ConfigError: the database has no such model, system or backend, no data for the three
            together, or the weights do not fit.
    """
    instance = Instance(
        checkpoint=checkpoint_of(model),
        system=system,
        backend=backend,
        num_gpus=num_gpus,
        kv=_kv_mode(model),
    ).pinned()
    decode = instance.decode_steps(context_tokens)
    if not decode.steps:
        raise ConfigError(
            f"{instance.checkpoint} does not fit {num_gpus} {system} at {context_tokens} tokens of "
            "context; use more GPUs per instance, or GPUs with more memory"
        )
    batch = decode.batch_within(step_s)
    return System(
        name=system,
        prefill=PrefillSurface(instance.prefill_rows(lengths, cached)),
        num_gpus=num_gpus,
        decode_step_s=decode.step_s(batch) if batch else None,
        batch_size=batch or None,
    )


def _kv_mode(model: ModelSpec) -> str | None:
    """What the spec says its rows are kept in, so that times and bytes are of the same cache."""
    token_specs = [group.layer_spec for group in model.groups if group.is_token_kind]
    return _KV_MODES.get(token_specs[0].parts[0].dtype) if token_specs else None
