"""The decoding sequences of a simulated engine: an iteration of decodes touches none of them.

Every decoding sequence gains one token per iteration, so one step counter stands for all of them. A sequence
keeps its `offset`, the difference between the counter and its tokens in the cache. Sequences are bucketed by
the step of their end, and by the step that fills their window. They are counted by `offset % block_size`,
which gives the steps that need a block.
"""

from __future__ import annotations

import heapq

from hetlb.tools.sim.block_pool import BlockPool
from hetlb.tools.sim.engine_sequence import EngineSequence


class DecodeBatch:
    """Decoding sequences, in order of admission, and the count of iterations begun."""

    __slots__ = (
        "_filling", "_filling_steps", "_finish", "_finish_steps", "_pool", "_size", "cycle", "demand",
        "sequences", "step", "tokens",
    )  # fmt: skip

    def __init__(self, pool: BlockPool) -> None:
        self.sequences: dict[EngineSequence, None] = {}
        #: Iterations begun (of a longer stretch in flight: the first).
        self.step = 0
        #: Tokens in the cache of all the sequences, the step begun included.
        self.tokens = 0
        self._pool = pool
        self._size = pool.block_size
        self._finish: dict[int, dict[EngineSequence, None]] = {}  # step -> sequences that finish at its end
        self._finish_steps: list[int] = []  # heap over the keys; entries of emptied buckets go stale
        #: Step -> sequences with a full window from it on, and a heap over the keys, as above.
        self._filling: dict[int, dict[EngineSequence, None]] = {}
        self._filling_steps: list[int] = []
        #: Blocks that the sequences need in a step, by its remainder of the block size, and in all of these.
        self.demand = [0] * pool.block_size
        self.cycle = 0

    def cached(self, sequence: EngineSequence) -> int:
        """Return the tokens of a sequence in the cache."""
        return self.step - sequence.offset

    def longest(self) -> int:
        """Return the tokens of the sequence with the most in the cache; 0 without sequences."""
        return max([self.step - sequence.offset for sequence in self.sequences], default=0)

    def add(self, sequence: EngineSequence, cached: int) -> None:
        """Add a sequence with `cached` tokens in the cache."""
        sequence.offset = offset = self.step - cached
        self.sequences[sequence] = None
        self.tokens += cached
        self._need(offset, self._per_block(cached))
        if self._pool.window and cached < self._pool.window_blocks * self._size:
            full = offset + self._pool.window_blocks * self._size
            if full not in self._filling:
                self._filling[full] = {}
                heapq.heappush(self._filling_steps, full)
            self._filling[full][sequence] = None
        last = offset + sequence.prompt_tokens + sequence.output_tokens - 1
        bucket = self._finish.get(last)
        if bucket is None:
            self._finish[last] = {sequence: None}
            heapq.heappush(self._finish_steps, last)
        else:
            bucket[sequence] = None

    def remove(self, sequence: EngineSequence) -> int:
        """Remove a sequence that does not finish; returns its tokens in the cache."""
        last = sequence.offset + sequence.prompt_tokens + sequence.output_tokens - 1
        bucket = self._finish[last]
        del bucket[sequence]
        if not bucket:
            del self._finish[last]
        return self._forget(sequence)

    def take_finished(self) -> list[EngineSequence]:
        """Remove the sequences that got their last token in the step just ended."""
        finished = self._finish.pop(self.step, None)
        if finished is None:
            return []
        for sequence in finished:
            self._forget(sequence)
        return list(finished)

    def _forget(self, sequence: EngineSequence) -> int:
        del self.sequences[sequence]
        cached = self.step - sequence.offset
        self.tokens -= cached
        self._need(sequence.offset, -self._per_block(cached))
        if self._filling:
            full = sequence.offset + self._pool.window_blocks * self._size
            if full in self._filling:
                self._filling[full].pop(sequence, None)
        return cached

    def _need(self, offset: int, blocks: int) -> None:
        self.demand[offset % self._size] += blocks
        self.cycle += blocks

    def _per_block(self, cached: int) -> int:
        """Return the blocks of the pool that the next block of a sequence takes."""
        pool = self._pool
        inside = pool.window and cached < pool.window_blocks * self._size
        return pool.grows + pool.window if inside else pool.grows

    def alike(self, steps: int) -> int:
        """Return how many of the next `steps` steps pass until a window becomes full."""
        filling = self._filling_steps
        return min(steps, filling[0] - self.step) if filling else steps

    def advance(self, steps: int) -> int:
        """Count `steps` iterations as begun; returns how many sequences decode in them."""
        count = len(self.sequences)
        self.step += steps
        self.tokens += steps * count
        filling = self._filling_steps
        while filling and filling[0] <= self.step:
            for sequence in self._filling.pop(heapq.heappop(filling)):
                self._need(sequence.offset, -self._pool.window)
        return count

    def needs(self, sequence: EngineSequence) -> int:
        """Return the blocks of the pool that a sequence needs in the next step."""
        if sequence.offset % self._size != self.step % self._size:
            return 0
        return self._per_block(self.step - sequence.offset)

    def blocks_needed(self, steps: int) -> int:
        """Return the blocks that the sequences need in the next `steps` steps."""
        size = self._size
        start = self.step % size
        cycles, rest = divmod(steps, size)
        blocks = cycles * self.cycle
        end = start + rest
        if end <= size:
            return blocks + sum(self.demand[start:end])
        return blocks + sum(self.demand[start:]) + sum(self.demand[: end - size])

    def steps_to_finish(self) -> int:
        """Return the number of steps, with the one begun, until a sequence finishes."""
        steps = self._finish_steps
        while steps[0] not in self._finish:
            heapq.heappop(steps)
        return steps[0] - self.step + 1

    def affordable_steps(self, steps: int, free: int) -> int:
        """Return how many of the next `steps` steps have enough blocks among the `free` ones."""
        if self.blocks_needed(steps) <= free:
            return steps
        size = self._size
        cycles, free = divmod(free, self.cycle)
        affordable = cycles * size
        start = self.step % size
        while (free := free - self.demand[(start + affordable) % size]) >= 0:
            affordable += 1
        return affordable

    def check_integrity(self) -> None:
        """Count everything again; assertion if a sum disagrees."""
        demand = [0] * self._size
        for sequence in self.sequences:
            demand[sequence.offset % self._size] += self._per_block(self.cached(sequence))
        assert self.tokens == sum(map(self.cached, self.sequences)), "expected the sum of the cached tokens"
        assert demand == self.demand, "expected the block demand counted anew"
        assert sum(demand) == self.cycle, "expected the sum of the demand"
        bucketed = {sequence for bucket in self._finish.values() for sequence in bucket}
        assert bucketed == set(self.sequences), "expected every decoding sequence in one finish bucket"
