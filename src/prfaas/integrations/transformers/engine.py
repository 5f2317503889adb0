"""The Engine seam for transformers models on one device, batch 1, greedy.

Position ids are always explicit (some families ignore the cache's length without them), prefill
runs in segments that end on absolute multiples of ``segment_tokens``, and everything that leaves
the working cache is copied, because decoding overwrites states in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from prfaas.core import BlockId, DType, GroupId, RequestId
from prfaas.errors import ConfigError, EngineError, LocalProtocolError
from prfaas.integrations.transformers.layers import TORCH_DTYPES, adapter_for
from prfaas.integrations.transformers.linear_attention import use_kernels
from prfaas.kernels import report
from prfaas.seams import EntryMemory, OnLayer, StepResult
from prfaas.spec import ModelSpec

SEGMENT_TOKENS = 256
LINEAR_ATTENTION = ("transformers", "prfaas")


@attrs.define
class _Session:
    """Working cache of one open request."""

    cache: Any
    num_tokens: int


@attrs.define
class _Export:
    """What the layer hooks have to copy during the forward pass that runs now."""

    cache: Any
    start: int
    stop: int
    memory: EntryMemory | None
    slots: Mapping[GroupId, BlockId] | None
    on_layer: OnLayer | None


class TransformersEngine:
    """Runs a causal language model of transformers behind the Engine seam.

    Args:
        model: a loaded model in eval mode; its cache must be a ``DynamicCache`` whose layer classes
            are in the tables of `layers` (GatedDeltaNet or KDA with GQA or MLA, and plain
            attention).
        name: the model's name in its fingerprint; default: its ``model_type``.
        revision: identity of the weights; default: a digest over a sample of every parameter.
        segment_tokens: see `Engine.segment_tokens`; a multiple of the linear kernel's chunk, 64.
        linear_attention: what the linear-attention layers compute with: ``"transformers"``, the
            library's own functions; ``"prfaas"``, `prfaas.kernels`, which changes the layers of
            ``model`` (see `use_kernels`): faster, equal within rounding, not bit for bit.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str | None = None,
        revision: str | None = None,
        segment_tokens: int = SEGMENT_TOKENS,
        linear_attention: str = "transformers",
    ) -> None:
        if segment_tokens < 64 or segment_tokens % 64:
            raise ConfigError(
                f"segment_tokens is {segment_tokens}; states may only be taken where the linear "
                f"kernel's chunk of 64 tokens ends, so use a multiple of 64"
            )
        if linear_attention not in LINEAR_ATTENTION:
            raise ConfigError(
                f"linear_attention is {linear_attention!r}; use {' or '.join(LINEAR_ATTENTION)}"
            )
        self._linear_attention = linear_attention
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._segment_tokens = segment_tokens
        self._spec = ModelSpec.from_hf_config(
            model.config,
            kv_dtype=_dtype(model.dtype),
            name=name,
            revision=weights_digest(model) if revision is None else revision,
        )
        layers = model.get_decoder().layers
        probe = DynamicCache(config=model.config).layers
        self._adapters: dict[int, tuple[bool, Any]] = {}
        for index, layer_spec in enumerate(self._spec.layers):
            if layer_spec is not None:
                token_kind = layer_spec.is_token_kind
                adapter = adapter_for(
                    probe[index], layer_spec.parts, self._device, token_kind=token_kind
                )
                self._adapters[index] = (token_kind, adapter)
                layers[index].register_forward_hook(self._hook(index))
        self._sessions: dict[RequestId, _Session] = {}
        self._export: _Export | None = None
        if linear_attention == "prfaas":
            use_kernels(model)

    @classmethod
    def from_pretrained(cls, path: str, **kwargs: Any) -> TransformersEngine:
        """Loads a model folder in float32 on the CPU."""
        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), **kwargs)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def segment_tokens(self) -> int:
        return self._segment_tokens

    def effective_config(self) -> Mapping[str, str]:
        """What the layers compute with, and which kernels ran in this process so far."""
        ran = report()
        calls = [f"{op} {path} {count}" for (op, path), count in sorted(ran.calls.items())]
        fallbacks = [f"{op} {count}: {why}" for (op, why), count in sorted(ran.fallbacks.items())]
        return {
            "linear_attention": self._linear_attention,
            "kernel_calls": ", ".join(calls) or "none",
            "kernel_fallbacks": "; ".join(fallbacks) or "none",
        }

    @property
    def num_open(self) -> int:
        """Requests with a working cache."""
        return len(self._sessions)

    def open(
        self,
        request_id: RequestId,
        num_tokens: int = 0,
        memory: EntryMemory | None = None,
        slots: Mapping[GroupId, BlockId] | None = None,
    ) -> None:
        if request_id in self._sessions:
            raise LocalProtocolError(f"request {request_id!r} is already open; close it first")
        cache = DynamicCache(config=self._model.config)
        if num_tokens:
            if memory is None:
                raise LocalProtocolError(
                    f"request {request_id!r} starts after {num_tokens} tokens but names no memory"
                )
            for index, (token_kind, adapter) in self._adapters.items():
                if token_kind:
                    adapter.read(cache.layers[index], num_tokens, memory.rows(index, 0, num_tokens))
                else:
                    adapter.read(cache.layers[index], memory.slot(index, slots or {}))
        self._sessions[request_id] = _Session(cache, num_tokens)

    def prefill(
        self,
        request_id: RequestId,
        tokens: Sequence[int],
        start: int,
        memory: EntryMemory | None = None,
        slots: Mapping[GroupId, BlockId] | None = None,
        on_layer: OnLayer | None = None,
    ) -> StepResult:
        session = self._session(request_id)
        if not tokens:
            raise LocalProtocolError(f"request {request_id!r}: a segment has at least 1 token")
        if start != session.num_tokens:
            raise LocalProtocolError(
                f"request {request_id!r} holds {session.num_tokens} tokens, the segment starts at "
                f"{start}; segments follow each other without gaps"
            )
        self._export = _Export(session.cache, start, start + len(tokens), memory, slots, on_layer)
        try:
            return self._forward(request_id, session, tokens)
        finally:
            self._export = None

    def decode(self, request_id: RequestId, token: int) -> StepResult:
        return self._forward(request_id, self._session(request_id), (token,))

    def close(self, request_id: RequestId) -> None:
        self._sessions.pop(request_id, None)

    def _session(self, request_id: RequestId) -> _Session:
        if request_id not in self._sessions:
            raise LocalProtocolError(f"request {request_id!r} is not open")
        return self._sessions[request_id]

    def _forward(
        self, request_id: RequestId, session: _Session, tokens: Sequence[int]
    ) -> StepResult:
        stop = session.num_tokens + len(tokens)
        try:
            with torch.inference_mode():
                output = self._model(
                    input_ids=torch.tensor([tokens], device=self._device),
                    position_ids=torch.arange(session.num_tokens, stop, device=self._device)[None],
                    cache=session.cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                logits = output.logits[0, -1].float().cpu()
        except Exception as error:
            self.close(request_id)
            raise EngineError(
                f"the model failed on request {request_id!r}, tokens {session.num_tokens} to "
                f"{stop}: {error}; the request was closed"
            ) from error
        session.num_tokens = stop
        return StepResult(token=int(logits.argmax()), logits=logits.numpy().tobytes())

    def _hook(self, index: int) -> Callable[..., None]:
        token_kind, adapter = self._adapters[index]

        def after_layer(*_: Any) -> None:
            export = self._export
            if export is None:
                return
            layer = export.cache.layers[index]
            if token_kind:
                if export.memory is not None:
                    adapter.write(layer, export.memory.rows(index, export.start, export.stop))
            elif export.memory is not None and export.slots:
                adapter.write(layer, export.memory.slot(index, export.slots))
            if export.on_layer is not None:
                export.on_layer(index)

        return after_layer


def _dtype(dtype: torch.dtype) -> DType:
    for ours, theirs in TORCH_DTYPES.items():
        if theirs is dtype:
            return ours
    known = ", ".join(ours.label for ours in TORCH_DTYPES)
    raise ConfigError(f"the model's dtype is {dtype}; caches can be {known}; convert the model")


def weights_digest(model: Any) -> str:
    """Identity of a model's weights: BLAKE2b over every parameter's name, shape and first 4 KiB.

    Enough to tell revisions and seeds apart without reading a large model twice; not a proof of
    equality.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        sample = parameter.detach().flatten()[:1024].float().cpu().contiguous()
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
