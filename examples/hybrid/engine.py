"""Batches of requests over one pool: admission, prefill in one pass, decode in place."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import attrs
import torch

from hybrid.batch import DecodeBatch, PrefillBatch
from hybrid.model import HybridModel
from prfaas.cache import PagedHybridCache, PoolGeometry, checkpoint_positions
from prfaas.core import BlockHash, BlockId, GroupId, RequestId
from prfaas.hashing import hash_blocks
from prfaas.kernels import PageTable, Sequences, Slots
from prfaas.kernels.pool import PoolTensors
from prfaas.seams import Reservation


@attrs.define
class Request:
    """One open request: its tokens so far and what it holds of the pool."""

    request_id: RequestId
    tokens: list[int]
    reservation: Reservation
    num_cached: int


class PoolEngine:
    """Serves `HybridModel` with rows and states in one pool; nothing is copied out of it.

    Args:
        model: the weights.
        block_size: tokens per block of the pool.
        pool_bytes: memory of the pool.
    """

    def __init__(self, model: HybridModel, *, block_size: int, pool_bytes: int) -> None:
        self.model = model
        self.geometry = PoolGeometry.for_spec(
            model.spec, block_size=block_size, pool_bytes=pool_bytes
        )
        size = self.geometry.pool_bytes
        self.memory = torch.zeros(size, dtype=torch.uint8, device=model.device)
        self.pool = PoolTensors(self.memory, self.geometry)
        self.cache = PagedHybridCache(self.geometry)
        [self.rows_group] = self.geometry.token_groups
        [self.state_group] = self.geometry.slot_groups
        self.requests: dict[RequestId, Request] = {}
        self._clock = 0

    def open(
        self, request_id: RequestId, tokens: Sequence[int], max_new: int, *, receive: bool = False
    ) -> Request:
        """Reserves room for the prompt and its answer, and finds what is cached of the prompt."""
        self._clock += 1
        match = self.cache.match(self._hashes(tokens), max_tokens=len(tokens) - 1)
        wanted = checkpoint_positions(len(tokens), match, self.geometry.block_size)
        reservation = self.cache.reserve(
            request_id,
            len(tokens) + max_new,
            match,
            now=self._clock,
            checkpoints=() if receive else wanted,
            receive=receive,
        )
        request = Request(request_id, list(tokens), reservation, reservation.num_reused_tokens)
        self.requests[request_id] = request
        return request

    def prefill(self, requests: Sequence[Request]) -> torch.Tensor:
        """One pass over the uncached tokens of all ``requests``; logits [num_requests, vocab].

        Checkpoints for later prompts with the same beginning are taken on the way.
        """
        new = [request.tokens[request.num_cached :] for request in requests]
        positions = [torch.arange(request.num_cached, len(request.tokens)) for request in requests]
        marks = [sorted(request.reservation.checkpoint_slots) for request in requests]
        batch = PrefillBatch(
            tokens=torch.tensor(list(itertools.chain(*new)), device=self.model.device),
            positions=torch.cat(positions).to(self.model.device),
            sequences=Sequences.of_lengths(len(tokens) for tokens in new),
            page_table=self._page_table(requests),
            resume=tuple(self._slot(request.reservation.resume_slots) for request in requests),
            working=tuple(self._working(request) for request in requests),
            checkpoints=tuple(
                tuple(at - request.num_cached for at in positions)
                for request, positions in zip(requests, marks, strict=True)
            ),
            checkpoint_slots=tuple(
                self._address(request.reservation.checkpoint_slots[at])
                for request, positions in zip(requests, marks, strict=True)
                for at in positions
            ),
        )
        logits = self.model.prefill(batch, self.pool)
        for request in requests:
            self._clock += 1
            hashes = self._hashes(request.tokens)
            self.cache.commit(request.request_id, hashes, len(request.tokens), self._clock)
        return logits

    def decode(self, requests: Sequence[Request], tokens: Sequence[int]) -> torch.Tensor:
        """Appends one token to each request; logits [num_requests, vocab] after it."""
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
        last = [len(request.tokens) - 1 for request in requests]
        batch = DecodeBatch(
            tokens=torch.tensor(tokens, device=self.model.device),
            positions=torch.tensor(last, device=self.model.device),
            page_table=self._page_table(requests),
            slots=Slots(
                (self._working(request) for request in requests),
                num_slots=self.pool.num_addresses(self.state_group),
                device=self.model.device,
            ),
        )
        return self.model.decode(batch, self.pool)

    def close(self, request: Request) -> None:
        """Lets go of a request; what it committed stays findable."""
        self.cache.release(request.request_id)
        del self.requests[request.request_id]

    def _page_table(self, requests: Sequence[Request]) -> PageTable:
        return PageTable(
            [
                self.pool.addresses(
                    self.rows_group, request.reservation.block_tables[self.rows_group]
                )
                for request in requests
            ],
            [len(request.tokens) for request in requests],
            page_size=self.geometry.block_size,
            num_pages=self.pool.num_addresses(self.rows_group),
            device=self.model.device,
        )

    def _working(self, request: Request) -> int:
        """The slot that a request's state lives in from prefill to its last token."""
        address = self._slot(request.reservation.tail_slots)
        assert address is not None
        return address

    def _slot(self, slots: Mapping[GroupId, BlockId]) -> int | None:
        return self._address(slots) if slots else None

    def _address(self, slots: Mapping[GroupId, BlockId]) -> int:
        [address] = self.pool.addresses(self.state_group, [slots[self.state_group]])
        return address

    def _hashes(self, tokens: Sequence[int]) -> tuple[BlockHash, ...]:
        spec = self.geometry.spec
        return hash_blocks(
            spec.fingerprint(),
            tokens,
            granule_tokens=spec.granule_tokens,
            block_size=self.geometry.block_size,
        )
