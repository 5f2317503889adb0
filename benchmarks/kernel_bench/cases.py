"""What is timed on a device: an operation at a size, its work, and others that do the same."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from kernel_bench.floors import Work

Results = tuple[torch.Tensor, ...]


@attrs.frozen(kw_only=True)
class Sizes:
    """How large the cases are.

    Attributes:
        num_tokens: of a prompt, and of what a decoding request has in the cache.
        new_tokens: of a prompt whose other tokens are cached.
        requests: of a large decode batch.
        divide_heads, divide_dims: the models' numbers by these, for toys.
        page_size: tokens per page and block.
        dtype: of activations and caches.
    """

    num_tokens: int
    new_tokens: int = 2048
    requests: int = 64
    divide_heads: int = 1
    divide_dims: int = 1
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16

    def heads(self, count: int) -> int:
        return max(1, count // self.divide_heads)

    def dim(self, size: int) -> int:
        return max(16, size // self.divide_dims)


@attrs.frozen(kw_only=True, eq=False)
class Peer:
    """Somebody else's way to the first result of a case.

    Attributes:
        name: ratios are called ``{case}_vs_{name}``.
        package: what has to be installed; ``"torch"`` runs everywhere, others on GPUs only.
        build: makes what the call needs that is not timed, and returns the call; its result has
            the elements of our first result, in that order.
        compares: whether the results should agree.
    """

    name: str
    package: str
    build: Callable[[], Callable[[], torch.Tensor]]
    compares: bool = True


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """An operation on tensors that are there already.

    Attributes:
        op: the operation's public name.
        work: what it has to do at least.
        run: one call on a path; what it returned, then what it changed in place.
        peers: who else does it.
    """

    op: str
    work: Work
    run: Callable[[str], Results]
    peers: tuple[Peer, ...] = ()


Build = Callable[[Sizes, torch.device], Case]
