"""Content hashes of prefixes: chained BLAKE2b over the canonical granule.

    root    = BLAKE2b-128(len(fingerprint) | fingerprint | salt)
    hash[i] = BLAKE2b-128(token ids of granule i as little-endian u32, salt=hash[i-1])

A hash stands for the whole prefix that ends with its granule, for one model and one tenant. Hashes
are equal in every process and on every machine. They are cryptographic because tenants share a
pool: with a fast checksum anybody could construct a prompt that hits another prompt's cache.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from hashlib import blake2b

import attrs
import msgspec

from prfaas.core import MAX_TOKEN_ID, BlockHash
from prfaas.errors import ConfigError, RequestError

HASH_BYTES = 16
_TOKEN_BYTES = 4
_U32 = next(code for code in "IL" if array.array(code).itemsize == _TOKEN_BYTES)
_ROOT_DOMAIN = b"prfaas.root.1"
_GRANULE_DOMAIN = b"prfaas.granule.1"


def root_hash(fingerprint: bytes, salt: bytes = b"") -> BlockHash:
    """Return the parent of a model's first granule.

    Args:
        fingerprint: identity of model and layout, from ``ModelSpec.fingerprint``.
        salt: tenant identity; prefixes under different salts never match.
    """
    framed = len(fingerprint).to_bytes(4, "little") + fingerprint + salt
    return BlockHash(blake2b(framed, digest_size=HASH_BYTES, person=_ROOT_DOMAIN).digest())


def hash_granules(
    root: BlockHash, tokens: Sequence[int], granule_tokens: int
) -> tuple[BlockHash, ...]:
    """Return one hash per complete granule of ``tokens``; a partial last granule has none.

    Raises:
        RequestError: a token id is not a plain int from 0 to 2**32 - 1; says which.
        ConfigError: ``root`` is not a hash, or ``granule_tokens`` is below 1.
    """
    chain = HashChain(root=root, granule_tokens=granule_tokens)
    return chain.extend(tokens)


def block_hashes(
    granule_hashes: Sequence[BlockHash], granules_per_block: int
) -> tuple[BlockHash, ...]:
    """Return the hash of every complete block: that of the block's last granule.

    So pools whose block sizes are different multiples of one granule share their keys.
    """
    if granules_per_block < 1:
        raise ConfigError(f"granules_per_block is {granules_per_block}; it must be at least 1")
    return tuple(granule_hashes[granules_per_block - 1 :: granules_per_block])


def hash_blocks(
    fingerprint: bytes,
    tokens: Sequence[int],
    *,
    granule_tokens: int,
    block_size: int,
    salt: bytes = b"",
) -> tuple[BlockHash, ...]:
    """Return one hash per complete block of ``tokens``: what a cache of that block size looks up.

    Raises:
        RequestError: a token id is refused.
        ConfigError: ``block_size`` is not a multiple of ``granule_tokens``.
    """
    if granule_tokens < 1 or block_size < 1 or block_size % granule_tokens:
        raise ConfigError(
            f"block_size is {block_size}; it must be a multiple of the "
            f"{granule_tokens}-token granule"
        )
    granules = hash_granules(root_hash(fingerprint, salt), tokens, granule_tokens)
    return block_hashes(granules, block_size // granule_tokens)


def _root(value: bytes) -> BlockHash:
    if not isinstance(value, bytes) or len(value) != HASH_BYTES:
        raise ConfigError(f"root is {value!r}; use the {HASH_BYTES} bytes of root_hash()")
    return BlockHash(value)


@attrs.define(kw_only=True)
class HashChain:
    """The granule hashes of one growing sequence.

    Attributes:
        root: hash before the first token, from ``root_hash``.
        granule_tokens: tokens per hash.
        num_tokens: tokens appended so far.
    """

    root: BlockHash = attrs.field(converter=_root, on_setattr=attrs.setters.frozen)
    granule_tokens: int = attrs.field(on_setattr=attrs.setters.frozen)
    num_tokens: int = attrs.field(default=0, init=False)
    _hashes: list[BlockHash] = attrs.field(
        factory=list, init=False, repr=lambda hashes: f"<{len(hashes)} hashes>"
    )
    _tail: bytes = attrs.field(default=b"", init=False, repr=False)

    @granule_tokens.validator
    def _check_granule(self, _: object, value: int) -> None:
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"granule_tokens is {value!r}; it must be a whole number of at least 1"
            )

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        """The hashes of all complete granules so far."""
        return tuple(self._hashes)

    def extend(self, tokens: Sequence[int]) -> tuple[BlockHash, ...]:
        """Append tokens and return the hashes of the granules that this completed.

        Raises:
            RequestError: a token id is refused; nothing was appended.
        """
        encoded = _encode(tokens)
        data = self._tail + encoded if self._tail else encoded
        step = self.granule_tokens * _TOKEN_BYTES
        end = len(data) - len(data) % step
        parent: bytes = self._hashes[-1] if self._hashes else self.root
        new: list[BlockHash] = []
        for start in range(0, end, step):
            parent = blake2b(
                data[start : start + step],
                digest_size=HASH_BYTES,
                salt=parent,
                person=_GRANULE_DOMAIN,
            ).digest()
            new.append(BlockHash(parent))
        self._hashes += new
        self._tail = data[end:]
        self.num_tokens += len(encoded) // _TOKEN_BYTES
        return tuple(new)

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._tail) % _TOKEN_BYTES == 0
        num_tail = len(self._tail) // _TOKEN_BYTES
        assert num_tail < self.granule_tokens
        assert self.num_tokens == len(self._hashes) * self.granule_tokens + num_tail


def _encode(tokens: Sequence[int]) -> bytes:
    """Check the ids and return them as little-endian u32, with every pass over them in C."""
    ids = tokens
    if not isinstance(tokens, list | tuple):
        ids = _from_buffer(tokens)
    if isinstance(ids, array.array):
        words = ids
    else:
        try:
            words = array.array(_U32, msgspec.convert(ids, list[int]))
        except (msgspec.ValidationError, OverflowError) as error:
            raise _refusal(ids) from error
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words.tobytes()


def _from_buffer(tokens: Sequence[int]) -> Sequence[int]:
    """Read other sequences and typed buffers: array.array, one-dimensional numpy integers."""
    if isinstance(tokens, str | bytes | bytearray):
        raise RequestError(f"tokens is a {type(tokens).__name__}, not token ids; tokenize first")
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except TypeError:
        return list(tokens)
    if view.ndim == 1 and view.format == _U32:
        words = array.array(_U32)
        words.frombytes(view.tobytes())
        return words
    plain: list[int] = view.tolist()
    return plain


def _refusal(tokens: Sequence[object]) -> RequestError:
    """Name the first bad id; only called once the fast check has failed."""
    for position, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            return RequestError(
                f"token {position} is {token!r} ({type(token).__name__}); "
                f"token ids are plain ints from 0 to {MAX_TOKEN_ID}"
            )
    raise AssertionError("the fast check refused token ids that the slow check accepts")
