"""Paged KV cache of one stage: the blocks of each request and layer, and their tokens.

A block holds `block_size` tokens of one layer of one lease. Blocks are numbered from 0 and any may serve any
layer: a request that uses a part of the stage's layers takes blocks for these alone. The memory itself is the
runner's.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Blocks: TypeAlias = npt.NDArray[np.int32]


class BlockTable:
    """Blocks of one lease: row l, column c holds tokens [c * block_size, (c + 1) * block_size) of layer
    `first + l`.
    """

    __slots__ = ("blocks", "end", "first")

    def __init__(self, first: int, end: int) -> None:
        self.first = first
        self.end = end
        self.blocks: Blocks = np.zeros((end - first, 0), dtype=np.int32)

    def rows(self, first: int, end: int) -> Blocks:
        """Return the part of the table for the layers [first, end)."""
        return self.blocks[first - self.first : end - self.first]

    def slots(
        self, first: int, end: int, position: int, count: int, block_size: int
    ) -> npt.NDArray[np.int64]:
        """Places in the pool (block * block_size + offset) of `count` tokens from `position` in the layers
        [first, end), shape (layers, count).
        """
        at = np.arange(position, position + count)
        return self.rows(first, end)[:, at // block_size].astype(np.int64) * block_size + at % block_size


class StageBlocks:
    """All blocks of a stage."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._free: list[int] = list(range(blocks - 1, -1, -1))

    @property
    def token_layers(self) -> int:
        """Token-layers that the pool holds."""
        return self.blocks * self.block_size

    @property
    def used(self) -> int:
        """Blocks that some lease holds."""
        return self.blocks - len(self._free)

    def reserve(self, table: BlockTable, tokens: int) -> bool:
        """Extend a table to hold `tokens` tokens; False, and nothing taken, if blocks are missing."""
        layers, columns = table.blocks.shape
        more = -(-tokens // self.block_size) - columns
        if more <= 0:
            return True
        needed = more * layers
        if needed > len(self._free):
            return False
        taken = np.array(self._free[-needed:], dtype=np.int32)
        del self._free[-needed:]
        table.blocks = np.hstack((table.blocks, taken.reshape(layers, more)))
        return True

    def release(self, table: BlockTable) -> None:
        """Give all blocks of a table back. The table is empty afterwards."""
        self._free.extend(table.blocks.ravel().tolist())
        table.blocks = table.blocks[:, :0]
