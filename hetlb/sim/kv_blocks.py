"""KV blocks of one simulated engine: what sequences take, give back and find again.

`KvBlocks` shares nothing, but a preempted sequence finds its own blocks again unless they were evicted. Free
blocks are a queue, taken from the front: full blocks go to its end, partly filled ones to its front.
`_queued` counts the full blocks ever put at its end, so it less the free blocks is the position of the first
one, where no partly filled ones are before it; `_head` is the largest such position seen. The position at
which a sequence's blocks were put decides how many of them are left. `SharedKvBlocks` has a prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetlb.sim.block_pool import BlockPool, blocks_for
from hetlb.sim.engine_limits import EngineLimits
from hetlb.sim.engine_sequence import EngineSequence
from hetlb.sim.prefix import PrefixCache, PrefixContent


class KvBlocks:
    """Blocks of an engine whose sequences share none."""

    __slots__ = ("_caching", "_head", "_queued", "hit_tokens", "peak_blocks", "pool", "size")

    def __init__(self, limits: EngineLimits) -> None:
        self.pool = BlockPool(limits.kv_blocks, limits.block_size)
        self.size = limits.block_size
        #: Tokens found in the cache since the start, and the most blocks in use at once.
        self.hit_tokens = 0
        self.peak_blocks = 0
        self._caching = limits.enable_prefix_caching
        self._queued = self.pool.total_blocks
        self._head = 0

    def begin(self, sequence: EngineSequence) -> None:
        """Take note of a sequence that has arrived."""

    def find(self, sequence: EngineSequence, tokens: int, waiting: Iterable[EngineSequence]) -> int | None:
        """Take what is kept of the first `tokens` tokens: how many, or None if the rest finds no room.

        `waiting` are the waiting sequences in their order, the preempted first.
        """
        pool = self.pool
        if -(-tokens // self.size) > pool.total_blocks - pool.used_blocks:
            return None
        if not (sequence.kept and self._caching):
            return 0
        # The end of a sequence is put into the queue before its beginning, and evicted before it.
        self._note_head()
        left = sequence.kept_at + sequence.kept - self._head
        found = min(left, sequence.kept, (tokens - 1) // self.size)
        sequence.kept = 0
        if found <= 0:
            return 0
        self._queued -= found
        for other in waiting:
            if not other.preemptions:
                break
            if other.kept_at > sequence.kept_at:
                other.kept_at -= found
        self.hit_tokens += found * self.size
        pool.extend(0, found * self.size)
        return found * self.size

    def take(self, blocks: int) -> None:
        """Take blocks known to be free, for sequences that grow by one each."""
        self.pool.take(blocks)

    def extend(self, held_tokens: int, tokens: int) -> bool:
        """Grow a sequence from `held_tokens` to `tokens` tokens; False, nothing taken, if blocks lack."""
        return self.pool.extend(held_tokens, tokens)

    def trim(self, held_tokens: int, tokens: int) -> None:
        """Give back the last blocks of a sequence, nothing of which was computed."""
        self._note_head()
        self.pool.release(held_tokens)
        self.pool.reserve(tokens)

    def publish(self, sequence: EngineSequence) -> None:
        """Let others find a prompt whose last part is scheduled."""

    def keep(self, victim: EngineSequence, tokens: int) -> None:
        """Note where in the queue of free blocks those of a sequence that is preempted go."""
        victim.kept, victim.kept_at = tokens // self.size, self._queued

    def release(self, sequence: EngineSequence, tokens: int) -> None:
        """Give back the blocks of a sequence that has `tokens` tokens in the cache."""
        if tokens:
            self._note_head()
            self.pool.release(tokens)
            self._queued += tokens // self.size

    def _note_head(self) -> None:
        """Note how far the queue of free blocks was used: before blocks are put into it, or looked for."""
        pool = self.pool
        head = self._queued - pool.total_blocks + pool.used_blocks
        if head > self._head:
            self._head = head

    def check_integrity(self, tokens: dict[EngineSequence, int]) -> None:
        """Assert that the blocks in use are those of `tokens`, the tokens in the cache by sequence."""
        blocks = sum(blocks_for(count, self.size) for count in tokens.values())
        assert self.pool.used_blocks == blocks, f"expected {blocks} used blocks, got {self.pool.used_blocks}"


class SharedKvBlocks(KvBlocks):
    """Blocks that sequences share through a prefix cache."""

    __slots__ = ("_prefixes",)

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(limits)
        self._prefixes = PrefixCache(self.pool)

    def begin(self, sequence: EngineSequence) -> None:
        sequence.prefix = PrefixContent(sequence.prompt_tokens, sequence.pieces, sequence.answer)

    def find(self, sequence: EngineSequence, tokens: int, waiting: Iterable[EngineSequence]) -> int | None:
        prefixes, content = self._prefixes, sequence.prefix
        assert content is not None, "expected a sequence submitted to an engine with a prefix cache"
        nodes, found = prefixes.find(content, tokens)
        if prefixes.cost(nodes, found, tokens) > self.pool.free_blocks:
            return None
        prefixes.use(content, nodes, found)
        found *= self.size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = found
        self.hit_tokens += found
        return found

    def take(self, blocks: int) -> None:
        self.pool.take(blocks)
        self._prefixes.shrink()

    def extend(self, held_tokens: int, tokens: int) -> bool:
        extended = self.pool.extend(held_tokens, tokens)
        self._prefixes.shrink()
        return extended

    def publish(self, sequence: EngineSequence) -> None:
        if sequence.prefix is not None:
            self._prefixes.publish(sequence.prefix)

    def release(self, sequence: EngineSequence, tokens: int) -> None:
        if tokens:
            assert sequence.prefix is not None, "expected a sequence with a content"
            self._prefixes.release(sequence.prefix, tokens)

    def check_integrity(self, tokens: dict[EngineSequence, int]) -> None:
        contents = [sequence.prefix for sequence in tokens if sequence.prefix is not None]
        blocks = self._prefixes.check_integrity(contents)
        blocks += sum(blocks_for(count, self.size) for count in tokens.values())
        blocks -= sum(content.shared_blocks for content in contents)
        assert self.pool.used_blocks == blocks, f"expected {blocks} used blocks, got {self.pool.used_blocks}"
