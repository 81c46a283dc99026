"""Block arithmetic of a paged KV cache: extend, release; what goes in comes out.

Integers only, `0 <= used_blocks <= total_blocks` at every moment. The pool keeps sums: a holder of tokens
says how many when it extends or releases.
"""

from __future__ import annotations

from collections.abc import Hashable


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that `tokens` tokens occupy: the last one may be partly filled."""
    return -(-tokens // block_size)


class BlockPool:
    """The blocks of one KV cache. Every holder has its own blocks, the last of them partly filled."""

    __slots__ = ("block_size", "total_blocks", "used_blocks")

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.total_blocks = total_blocks
        self.used_blocks = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.total_blocks - self.used_blocks

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0..1."""
        return self.used_blocks / self.total_blocks

    def extend(self, held_tokens: int, tokens: int) -> bool:
        """Grow a holder from `held_tokens` to `tokens` tokens; False, nothing taken, if too few are free."""
        assert tokens >= held_tokens, f"expected a holder to grow, got {held_tokens} -> {tokens} tokens"
        size = self.block_size
        used = self.used_blocks - (-tokens // size) + (-held_tokens // size)
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

    def release(self, tokens: int) -> None:
        """Give back all blocks of a holder of `tokens` tokens."""
        used = self.used_blocks + (-tokens // self.block_size)
        assert tokens >= 0, f"expected tokens to release, got {tokens}"
        assert used >= 0, f"expected at most {self.used_blocks} blocks back, got {tokens} tokens"
        self.used_blocks = used


class CachedSpan:
    """Trie node: cached blocks that end in this span of a content, and their users."""

    __slots__ = ("blocks", "children", "key", "parent", "users")

    def __init__(self, parent: CachedSpan | None, key: Hashable) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[Hashable, CachedSpan] = {}
        self.blocks = 0
        self.users = 0
