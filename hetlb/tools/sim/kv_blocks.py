"""KV blocks of one simulated engine: taken, given back and found again by sequences.

As vLLM V1 does it (`v1/core/kv_cache_manager.py`, `block_pool.py`). Whole blocks are kept; a prompt finds as
many from its beginning on as are kept without a gap, but never all of it, since its last token must be
computed. Blocks in use are shared and never evicted; the others count as free and are evicted, least recently
used first, the end of a prompt before its beginning, when blocks are needed and no block without content is
left. A prompt can be found as soon as its last part is scheduled, an answer once it ended.

Contents are not text but names: a prompt is a sequence of pieces `(key, tokens)`; prompts are alike until
their keys differ; a key has always the same number of tokens. A piece is a node of a tree; the blocks that
end in it are evicted from its end. Two sequences that compute the same blocks at the same time (a turn sent
before the answer to the last one has ended) each keep their own. One thing differs from vLLM: if a prompt
ends with a kept block, which is computed again for its last token, only the newer copy is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from hetlb.tools.sim.block_pool import ENDLESS_TOKENS, CachedSpan, blocks_for
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_sequence import EngineSequence, SequenceState


class KvBlocks:
    """Blocks of one engine. The pool counts an unused cached block as free.

    A preempted sequence finds its own blocks again unless they were evicted; if they are `shared`, a
    sequence finds blocks of all sequences that begin alike, too.
    """

    __slots__ = (
        "_caching", "_root", "_unused", "_unused_blocks", "hit_tokens", "peak_blocks", "pool", "shared",
        "size",
    )  # fmt: skip

    def __init__(self, limits: EngineLimits, *, shared: bool) -> None:
        self.pool = limits.pool()
        self.size = limits.block_size
        # A model that keeps no token for good has nothing to be found again.
        self.shared = shared and self.pool.grows > 0
        #: Tokens found in the cache since the start, and the most blocks in use at once.
        self.hit_tokens = 0
        self.peak_blocks = 0
        self._caching = (shared or limits.enable_prefix_caching) and self.pool.grows > 0
        self._root = CachedSpan(None, None)
        #: Nodes without a user and second copies, in the order of eviction.
        self._unused: OrderedDict[CachedSpan, None] = OrderedDict()
        self._unused_blocks = 0

    def begin(self, sequence: EngineSequence) -> None:
        """Name the content of a new sequence.

        Tokens outside its pieces and its answer are shared with no other sequence.
        """
        own = object()
        if not self.shared:
            sequence.spans = ((own, ENDLESS_TOKENS),)
            return
        rest = sequence.prompt_tokens - sum([tokens for _, tokens in sequence.pieces])
        if rest < 0:
            named = sequence.prompt_tokens - rest
            raise ValueError(f"pieces: expected at most {sequence.prompt_tokens} tokens, got {named}")
        if sequence.answer is None:
            sequence.spans = (*sequence.pieces, (own, ENDLESS_TOKENS))
        elif rest:
            sequence.spans = (*sequence.pieces, (own, rest), (sequence.answer, ENDLESS_TOKENS))
        else:
            sequence.spans = (*sequence.pieces, (sequence.answer, ENDLESS_TOKENS))

    def find(self, sequence: EngineSequence, tokens: int) -> int | None:
        """Take cached blocks of the first `tokens` tokens. Return the tokens found, None without room.

        There must be room for the blocks of all `tokens` tokens.
        """
        nodes, found = self._cached(sequence, tokens)
        # A sequence that uses a node uses all before it.
        unused = [node for node in nodes if not node.users]
        last = unused[-1] if unused else None
        surplus = sum([node.blocks for node in nodes]) - found if last is not None else 0
        revived = sum([node.blocks for node in unused]) - surplus
        pool, blocks = self.pool, blocks_for(tokens, self.size)
        needed = pool.grows * (blocks - found + revived) + pool.beside(blocks, pool.admitted_blocks)
        if needed > pool.free_blocks:
            return None
        if last is not None and surplus:
            # The block with the prompt's last token: it is computed again, and this copy forgotten.
            last.blocks -= surplus
            self._unused_blocks -= surplus
            if not last.blocks:
                del self._unused[last]
        for node in nodes:
            if not node.users and node.blocks:
                del self._unused[node]
                self._unused_blocks -= node.blocks
                pool.take(pool.grows * node.blocks)
            node.users += 1
        pool.take(pool.beside(found, pool.window_blocks))
        sequence.nodes, sequence.shared_blocks = nodes, found
        found *= self.size
        if self.shared and sequence.cached_tokens is None:
            sequence.cached_tokens = found
        self.hit_tokens += found
        return found

    def take(self, blocks: int) -> None:
        """Take blocks known to be free, for sequences that grow by one each."""
        self.pool.take(blocks)
        self._evict()

    def extend(self, held_tokens: int, tokens: int) -> bool:
        """Grow a sequence from `held_tokens` to `tokens` tokens; False, nothing taken, if blocks lack."""
        extended = self.pool.extend(held_tokens, tokens)
        self._evict()
        return extended

    def trim(self, held_tokens: int, tokens: int) -> None:
        """Give back the last blocks of a sequence, which hold nothing computed."""
        self.pool.release(held_tokens)
        self.pool.extend(0, tokens)

    def publish(self, sequence: EngineSequence) -> None:
        """Let others find a prompt after its last part is scheduled."""
        if self.shared:
            self._file(sequence, sequence.prompt_tokens)

    def release(self, sequence: EngineSequence, tokens: int, *, computed: bool = True) -> None:
        """Give back the blocks of a sequence with `tokens` tokens; whole ones stay cached if `computed`."""
        size = self.size
        if not tokens:
            return
        if not self._caching:
            self.pool.release(tokens)
            return
        if computed:
            self._file(sequence, tokens)
        whole = tokens // size
        # A partly filled block is taken first: it needs no place in the order of eviction.
        pool, blocks = self.pool, blocks_for(tokens, size)
        pool.give(pool.grows * (blocks - whole) + pool.beside(blocks, pool.window_blocks))
        if second := whole - sequence.shared_blocks:
            copies = CachedSpan(None, None)
            copies.blocks = second
            self._let_go(copies)
        for node in reversed(sequence.nodes):
            node.users -= 1
            if not node.users:
                if node.blocks:
                    self._let_go(node)
                else:
                    self._prune(node)
        sequence.nodes, sequence.shared_blocks = [], 0

    # --- the tree ---

    def _spans(self, sequence: EngineSequence, tokens: int) -> Iterator[tuple[Hashable, int]]:
        """Yield the spans of the first `tokens` tokens, each with the whole blocks that end in it."""
        size, start = self.size, 0
        for key, length in sequence.spans:
            end = min(start + length, tokens)
            yield key, end // size - start // size
            if end == tokens:
                return
            start = end

    def _cached(self, sequence: EngineSequence, tokens: int) -> tuple[list[CachedSpan], int]:
        """Return the nodes that hold the beginning of the first `tokens` tokens, and the blocks found."""
        most = (tokens - 1) // self.size
        nodes: list[CachedSpan] = []
        node, found = self._root, 0
        for key, count in self._spans(sequence, tokens):
            child = node.children.get(key)
            if child is None:
                break
            got = min(child.blocks, count, most - found)
            if got == 0 and count > 0:
                break
            nodes.append(child)
            found += got
            if got < count:
                break
            node = child
        return nodes, found

    def _file(self, sequence: EngineSequence, tokens: int) -> None:
        """Put the whole blocks of the first `tokens` tokens, which the sequence holds itself, into nodes."""
        nodes = sequence.nodes
        node = self._root
        for index, (key, count) in enumerate(self._spans(sequence, tokens)):
            if index < len(nodes):
                node = nodes[index]
                if node.blocks < count:
                    sequence.shared_blocks += count - node.blocks
                    node.blocks = count
                continue
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = CachedSpan(node, key)
            elif child.blocks:
                return  # another computed the same meanwhile: these are a second copy
            child.blocks = count
            child.users += 1
            sequence.shared_blocks += count
            nodes.append(child)
            node = child

    def _let_go(self, node: CachedSpan) -> None:
        self._unused[node] = None
        self._unused_blocks += node.blocks
        self.pool.give(self.pool.grows * node.blocks)

    def _evict(self) -> None:
        """Evict cached blocks that the pool has given to others."""
        if not self._unused_blocks:
            return
        excess = self._unused_blocks - self.pool.free_blocks // self.pool.grows
        while excess > 0:
            node = next(iter(self._unused))
            evicted = min(node.blocks, excess)
            node.blocks -= evicted
            self._unused_blocks -= evicted
            excess -= evicted
            if not node.blocks:
                del self._unused[node]
                self._prune(node)

    def _prune(self, node: CachedSpan) -> None:
        """Take a node that holds nothing out of the tree, and nodes above that only led to it."""
        while not (node.blocks or node.users or node.children) and (parent := node.parent) is not None:
            if parent.children.get(node.key) is node:
                del parent.children[node.key]
            node = parent

    def check_integrity(self, tokens: dict[EngineSequence, int]) -> None:
        """Count everything again by sequences and their tokens; assertion if a sum disagrees."""
        used: dict[CachedSpan, int] = {}
        for sequence in tokens:
            for node in sequence.nodes:
                used[node] = used.get(node, 0) + 1
            assert sequence.shared_blocks <= sum([node.blocks for node in sequence.nodes])
        reachable: set[CachedSpan] = set()
        stack = [self._root]
        while stack:
            children = stack.pop().children.values()
            reachable.update(children)
            stack.extend(children)
        for node in reachable:
            assert node.users == used.get(node, 0), "expected the users counted anew"
            assert (node in self._unused) == (node.blocks > 0 and not node.users), (
                "expected unused nodes kept"
            )
        assert used.keys() <= reachable, "expected nodes in use to be found"
        assert self._unused_blocks == sum([node.blocks for node in self._unused])
        pool = self.pool
        assert self._unused_blocks * pool.grows <= pool.free_blocks, "expected unused blocks to count as free"
        shared = sum([node.blocks for node in used]) - sum([each.shared_blocks for each in tokens])
        blocks = sum([pool.held(count) for count in tokens.values()]) + pool.grows * shared
        assert self.pool.used_blocks == blocks, f"expected {blocks} used blocks, got {self.pool.used_blocks}"


class KvFetches:
    """KV caches that come from, or are kept for, other engines.

    A sequence with `remote_tokens` takes blocks for its prompt, leaves the queue and waits for the transfer;
    the driver takes it from `take_begun`. Then it is admitted before all that wait, and computes what was not
    transferred, at least its last token. One with `held` keeps its blocks when it has finished.
    """

    __slots__ = ("_begun", "held", "ready", "running")

    def __init__(self) -> None:
        self._begun: list[EngineSequence] = []  # not taken by the driver
        self.running: dict[EngineSequence, None] = {}
        #: Complete and not admitted.
        self.ready: dict[EngineSequence, None] = {}
        #: Finished sequences, each with its tokens in the cache.
        self.held: dict[EngineSequence, int] = {}

    def begin(self, sequence: EngineSequence, found: int) -> None:
        """Begin to fetch the tokens beyond `found`; complete at once if there are none."""
        remote, sequence.remote_tokens = max(found, sequence.remote_tokens), 0
        sequence.computed, sequence.fetch_tokens = remote, remote - found
        if remote == found:
            self.ready[sequence] = None
            return
        sequence.state = SequenceState.FETCHING
        self.running[sequence] = None
        self._begun.append(sequence)

    def take_begun(self) -> list[EngineSequence]:
        """Return the sequences with a transfer (of `fetch_tokens` tokens) begun since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def drop(self, sequence: EngineSequence) -> None:
        """Forget a sequence during or after its transfer."""
        self.running.pop(sequence, None)
        self.ready.pop(sequence, None)
        if sequence in self._begun:
            self._begun.remove(sequence)
