"""Mooncake traces: JSON lines with the prefix blocks of every prompt (arXiv 2407.00079)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

from prfaas.core import BlockHash, cdiv
from prfaas.errors import ConfigError
from prfaas.hashing import HASH_BYTES
from prfaas.traces.fields import finite, refusal, whole
from prfaas.traces.trace import Row, Trace

BLOCK_TOKENS = 512
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_DOMAIN = b"prfaas.mooncake1"


def read_mooncake(lines: Iterable[str], *, name: str = "mooncake") -> Trace:
    """Read one request per line: ``timestamp`` in ms, two lengths in tokens, ``hash_ids``.

    One id stands for one block of 512 tokens together with the whole prefix before it. A last block
    that is only partly filled has an id too; it is no complete granule and gets no hash. An
    ``output_length`` of 0 is read as 1: the request was prefilled, and that gives one token. A
    request without prompt tokens is skipped and counted.

    Args:
        lines: the lines of the file.
        name: name of the trace. It goes into the hashes, so ids of different traces never meet.

    Raises:
        ConfigError: a line is malformed; names the line, the field and the value.
    """
    keys: dict[int, BlockHash] = {}
    salt = name.encode()
    rows: list[Row] = []
    num_skipped = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        at_ms, num_tokens, output_tokens, ids = _fields(line, number)
        if num_tokens == 0:
            num_skipped += 1
            continue
        complete = ids[: num_tokens // BLOCK_TOKENS]
        for block in complete:
            if block not in keys:
                keys[block] = _key(salt, block)
        rows.append(
            Row(
                line=number,
                at_s=at_ms / 1000,
                num_tokens=num_tokens,
                output_tokens=max(1, output_tokens),
                granule_hashes=tuple(keys[block] for block in complete),
            )
        )
    return Trace.of_rows(name, rows, num_skipped=num_skipped, granule_tokens=BLOCK_TOKENS)


def _fields(line: str, number: int) -> tuple[float, int, int, Sequence[int]]:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise refusal(number, "the line", line, f"one JSON object ({error})") from error
    if not isinstance(row, dict):
        raise refusal(number, "the line", line, "one JSON object")
    missing = [field for field in MOONCAKE_FIELDS if field not in row]
    if missing:
        raise ConfigError(
            f"line {number}: lacks {', '.join(missing)}; a Mooncake trace has "
            f"{', '.join(MOONCAKE_FIELDS)} in every line"
        )
    num_tokens = whole(number, "input_length", row["input_length"])
    ids = row["hash_ids"]
    if not isinstance(ids, list) or any(type(block) is not int or block < 0 for block in ids):
        raise refusal(number, "hash_ids", ids, "a list of whole numbers of at least 0")
    if len(ids) > cdiv(num_tokens, BLOCK_TOKENS):
        raise refusal(
            number, "hash_ids", ids, f"one id per {BLOCK_TOKENS} of the {num_tokens} tokens"
        )
    return (
        finite(number, "timestamp", row["timestamp"]),
        num_tokens,
        whole(number, "output_length", row["output_length"]),
        ids,
    )


def _key(salt: bytes, block: int) -> BlockHash:
    named = len(salt).to_bytes(4, "little") + salt + str(block).encode()
    return BlockHash(blake2b(named, digest_size=HASH_BYTES, person=_DOMAIN).digest())
