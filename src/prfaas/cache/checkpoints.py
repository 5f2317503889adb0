"""Where to keep recurrent states: each can be reused at exactly one length."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.core import round_down
from prfaas.errors import ConfigError
from prfaas.seams.cache import PrefixMatch


def checkpoint_positions(
    num_tokens: int, match: PrefixMatch, block_size: int, requested: Sequence[int] = ()
) -> tuple[int, ...]:
    """Positions at which a prompt's states are worth keeping, the most valuable first.

    In this order, each once:

    1. ``requested`` by the application (end of the system prompt, ends of turns), rounded down to
       blocks, because only whole blocks are shared;
    2. the fork: where rows match deeper than states, another prompt went the same way before;
    3. the last complete block before the last token, for a repeat and for the next turn;
    4. 1, 2, 4, ... blocks, the deepest first: of any prefix that turns out to be shared, more than
       half its blocks can be reused, for log2(blocks) states.

    All are block-aligned, above ``match.num_cached_tokens`` and below ``num_tokens``: the state at
    ``num_tokens`` itself always has a slot, and is kept if it is aligned.

    Args:
        num_tokens: length of the prompt.
        match: what the cache holds of it.
        block_size: tokens per block.
        requested: positions in tokens; those beyond the prompt are ignored.
    """
    if block_size < 1:
        raise ConfigError(f"block_size is {block_size} tokens; it must be at least 1")
    geometric = []
    position = block_size
    while position < num_tokens:
        geometric.append(position)
        position *= 2
    wanted = [
        *(round_down(position, block_size) for position in requested),
        match.num_held_tokens,
        round_down(num_tokens - 1, block_size),
        *reversed(geometric),
    ]
    unique = dict.fromkeys(wanted)
    return tuple(p for p in unique if match.num_cached_tokens < p < num_tokens)
