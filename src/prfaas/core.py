"""The words every other module uses: ids, roles, dtypes, requests, pool geometry units."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from typing import NewType

import attrs

from prfaas.errors import RequestError

BlockHash = NewType("BlockHash", bytes)
"""Chained content hash of a whole prefix; 16 bytes, the same in every process."""
BlockId = NewType("BlockId", int)
"""Index of a block (token groups) or of a state slot (slot groups) within its KV cache group."""
GroupId = NewType("GroupId", int)
"""Position of a KV cache group in ``ModelSpec.groups``."""
RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", str)
NodeId = NewType("NodeId", str)
ClusterId = NewType("ClusterId", str)

PROTOCOL_VERSION = 1
MAX_TOKEN_ID = 2**32 - 1


class DType(enum.Enum):
    """Element types that caches are made of."""

    FLOAT32 = ("float32", 4)
    BFLOAT16 = ("bfloat16", 2)
    FLOAT16 = ("float16", 2)
    FLOAT8 = ("float8_e4m3", 1)

    def __init__(self, label: str, itemsize: int) -> None:
        self.label = label
        self.itemsize = itemsize


class Role(enum.Enum):
    """What a worker admits; the same process can change from one to another."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class ClusterKind(enum.Enum):
    """PRFAAS clusters only prefill; PD clusters can serve a request from end to end."""

    PRFAAS = "prfaas"
    PD = "pd"


class Handoff(enum.Enum):
    """Where the recurrent state stands when a request changes from prefill to decode.

    AFTER_PROMPT: state and KV cover all N prompt tokens, the first token was sampled remotely.
    BEFORE_LAST: both cover N-1 tokens, the decode side replays the last prompt token. A state
    cannot be rewound, so the two sides must agree; the handshake declares which one it is.
    """

    AFTER_PROMPT = "after_prompt"
    BEFORE_LAST = "before_last"

    def num_tokens(self, num_prompt_tokens: int) -> int:
        """Tokens that the shipped cache covers for a prompt of ``num_prompt_tokens``."""
        return num_prompt_tokens - (1 if self is Handoff.BEFORE_LAST else 0)


def _prompt(tokens: Iterable[int]) -> tuple[int, ...]:
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Iterable):
        raise RequestError(
            f"tokens must be a sequence of token ids, got {type(tokens).__name__}; tokenize first"
        )
    prompt = tuple(tokens)
    if not prompt:
        raise RequestError("the prompt is empty; a request needs at least 1 token")
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) <= MAX_TOKEN_ID:
        return prompt
    for position, token in enumerate(prompt):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise RequestError(
                f"token {position} is {token!r} ({type(token).__name__}); "
                f"token ids are plain ints from 0 to {MAX_TOKEN_ID} (of an array: .tolist())"
            )
    return prompt


def _positive(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if type(value) is not int or value < 1:
        raise RequestError(
            f"{attribute.name} is {value!r}; it must be a whole number of at least 1"
        )


@attrs.frozen(kw_only=True)
class Request:
    """One generation request, checked at the door.

    Attributes:
        request_id: any text; travels verbatim.
        tokens: prompt token ids, at least one.
        max_new_tokens: greedy tokens to generate, the first one included.
        tenant: cache entries are shared only between requests of one tenant.
        deadline_s: seconds from arrival after which the request fails.
        return_logits: also return the logits of every step (fp32 bytes), for verification.
    """

    request_id: RequestId = attrs.field()
    tokens: tuple[int, ...] = attrs.field(converter=_prompt, repr=lambda t: f"<{len(t)} tokens>")
    max_new_tokens: int = attrs.field(default=16, validator=_positive)
    tenant: str = attrs.field(default="")
    deadline_s: float = attrs.field(default=60.0)
    return_logits: bool = attrs.field(default=False)

    @request_id.validator
    def _check_id(self, _: object, value: str) -> None:
        if not isinstance(value, str) or not value:
            raise RequestError(f"request_id is {value!r}; it must be a non-empty string")

    @tenant.validator
    def _check_tenant(self, _: object, value: object) -> None:
        if not isinstance(value, str):
            raise RequestError(f"tenant is {value!r}; it must be a string")

    @deadline_s.validator
    def _check_deadline(self, _: object, value: float) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise RequestError(
                f"deadline_s is {value!r}; it must be a finite number of seconds greater than 0"
            )

    @return_logits.validator
    def _check_return_logits(self, _: object, value: object) -> None:
        if not isinstance(value, bool):
            raise RequestError(f"return_logits is {value!r}; it must be True or False")

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def cdiv(n: int, d: int) -> int:
    """Smallest whole number of ``d`` that covers ``n``."""
    return -(-n // d)


def round_down(n: int, d: int) -> int:
    """Largest multiple of ``d`` that is at most ``n``."""
    return n - n % d
