"""Block arithmetic of a paged KV cache: extend and release.

Integers only, `0 <= used_blocks <= total_blocks` at every moment. The pool keeps sums: a holder of tokens
says how many when it extends or releases.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from hetlb.balancer.core.kv_need import KvNeed

#: More tokens than a sequence has.
ENDLESS_TOKENS: Final = 1 << 62


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the blocks that `tokens` tokens occupy: the last one may be partly filled."""
    return -(-tokens // block_size)


#: Parts of a block if windows or states need other amounts than whole blocks.
_BLOCK_PARTS: Final = 64


class BlockPool:
    """The blocks of one KV cache. Every holder has its own blocks, the last of them partly filled.

    With a `need`, blocks are counted in parts, as vLLM's groups share one pool. Each block of a holder takes
    `grows` parts. Each of its first `window_blocks` blocks takes `window` parts more. A holder takes `fixed`
    parts for its state. While its prompt is computed, `admitted_blocks` count for the window: that room must
    be free to admit it.
    """

    __slots__ = (
        "admitted_blocks", "block_size", "fixed", "grows", "total_blocks", "used_blocks", "window",
        "window_blocks",
    )  # fmt: skip

    def __init__(
        self, total_blocks: int, block_size: int, need: KvNeed | None = None, in_flight_tokens: int = 0
    ) -> None:
        self.block_size = block_size
        self.total_blocks = total_blocks
        self.used_blocks = 0
        self.grows = 1
        self.window = self.window_blocks = self.admitted_blocks = self.fixed = 0
        if need is not None:
            self.total_blocks = total_blocks * _BLOCK_PARTS
            self.grows = round(need.grows * _BLOCK_PARTS)
            self.window = round(need.window * _BLOCK_PARTS)
            self.fixed = -int(-need.state * _BLOCK_PARTS // block_size)
            if self.window:  # a window may begin inside a block
                last = max(0, round(need.window_tokens) - 1)
                self.window_blocks = blocks_for(last, block_size) + 1
                self.admitted_blocks = blocks_for(last + in_flight_tokens, block_size) + 1

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.total_blocks - self.used_blocks

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0..1."""
        return self.used_blocks / self.total_blocks

    def held(self, tokens: int) -> int:
        """Return the blocks of a holder of `tokens` tokens."""
        blocks = -(-tokens // self.block_size)
        return self.grows * blocks + self.beside(blocks, self.window_blocks)

    def beside(self, blocks: int, window_blocks: int) -> int:
        """Return the parts of a holder of `blocks` blocks for its windows and states, which do not grow."""
        if not self.window and not self.fixed:
            return 0
        return self.window * min(blocks, window_blocks) + (self.fixed if blocks else 0)

    def most_tokens(self) -> int:
        """Return the tokens of the largest holder."""
        full = self.total_blocks - self.fixed
        inside = full // (self.grows + self.window) if self.grows + self.window else ENDLESS_TOKENS
        if inside < self.admitted_blocks or not self.window:
            return max(0, inside) * self.block_size
        if not self.grows:
            return ENDLESS_TOKENS
        return (full - self.window * self.admitted_blocks) // self.grows * self.block_size

    def extend(self, held_tokens: int, tokens: int) -> bool:
        """Grow a holder from `held_tokens` to `tokens` tokens; False, nothing taken, if too few are free."""
        assert tokens >= held_tokens, f"expected a holder to grow, got {held_tokens} -> {tokens} tokens"
        used = self.used_blocks + self.held(tokens) - self.held(held_tokens)
        if used > self.total_blocks:
            return False
        self.used_blocks = used
        return True

    def take(self, blocks: int) -> None:
        """Take `blocks` blocks known to be free, for many holders that grow by one each."""
        used = self.used_blocks + blocks
        assert blocks >= 0, f"expected a number of blocks, got {blocks}"
        assert used <= self.total_blocks, f"expected {blocks} free blocks, got {self.free_blocks}"
        self.used_blocks = used

    def give(self, blocks: int) -> None:
        """Give back `blocks` blocks."""
        used = self.used_blocks - blocks
        assert used >= 0 <= blocks, f"expected at most {self.used_blocks} blocks back, got {blocks}"
        self.used_blocks = used

    def release(self, tokens: int) -> None:
        """Give back all blocks of a holder of `tokens` tokens."""
        assert tokens >= 0, f"expected tokens to release, got {tokens}"
        self.give(self.held(tokens))


class CachedSpan:
    """Trie node: cached blocks that end in this span of a content, and their users."""

    __slots__ = ("blocks", "children", "key", "parent", "users")

    def __init__(self, parent: CachedSpan | None, key: Hashable) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[Hashable, CachedSpan] = {}
        self.blocks = 0
        self.users = 0
