"""Block arithmetic of a paged KV cache: reserve, extend, release; what goes in comes out.

Integers only, `0 <= used_blocks <= total_blocks` at every moment. The pool keeps sums, not
holders: a holder of tokens says how many when it extends or releases, since it knows that anyway and
a second copy could only disagree. A failed reserve or extend changes nothing; a release of more than
is held is a bug of ours and an assertion.
"""

from __future__ import annotations


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
        """Free blocks."""
        return self.total_blocks - self.used_blocks

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0..1."""
        return self.used_blocks / self.total_blocks

    def reserve(self, tokens: int) -> bool:
        """Take the blocks of a new holder of `tokens` tokens; False, nothing taken, if too few are free."""
        return self._take(-(-tokens // self.block_size))

    def extend(self, held_tokens: int, tokens: int) -> bool:
        """Grow a holder from `held_tokens` to `tokens` tokens; False, nothing taken, if too few are free."""
        assert tokens >= held_tokens, f"expected a holder to grow, got {held_tokens} -> {tokens} tokens"
        size = self.block_size
        return self._take(-(-tokens // size) + (-held_tokens // size))

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

    def _take(self, blocks: int) -> bool:
        assert blocks >= 0, f"expected a number of blocks, got {blocks}"
        used = self.used_blocks + blocks
        if used > self.total_blocks:
            return False
        self.used_blocks = used
        return True
