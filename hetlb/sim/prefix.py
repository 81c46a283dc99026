"""The prefix cache of one simulated engine: which blocks of earlier prompts and answers are still there.

As vLLM V1 does it (`v1/core/kv_cache_manager.py`, `block_pool.py`). Whole blocks are kept; a prompt finds as
many from its beginning on as are kept without a gap, but never all of it, since its last token must be
computed. Blocks in use are shared and never evicted; the others count as free and are evicted, least recently
used first, the end of a prompt before its beginning, when blocks are needed and no block without content is
left. A prompt can be found as soon as its last part is scheduled, an answer once it ended.

Contents are not text but names: a prompt is a sequence of pieces `(key, tokens)`, alike as far as the keys
are; a key has always the same number of tokens. A piece is a node of a tree; the blocks that end in it are
evicted from its end. Two that compute the same blocks at the same time (a turn sent before the answer to the
last one has ended) each keep their own. One thing differs from vLLM: where a prompt ends with a kept block,
which is computed again for its last token, only the newer copy is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import TypeAlias

from hetlb.sim.block_pool import BlockPool, blocks_for

#: A stretch of a prompt: what it is, and how many tokens.
TokenSpan: TypeAlias = tuple[Hashable, int]


class CachedSpan:
    """Trie node: cached blocks that end here, and their users."""

    __slots__ = ("blocks", "children", "key", "parent", "users")

    def __init__(self, parent: CachedSpan | None, key: Hashable) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[Hashable, CachedSpan] = {}
        self.blocks = 0
        self.users = 0


class PrefixContent:
    """Content of one sequence, and its part that is in nodes.

    `pieces` name the beginning of the prompt, `answer` the answer (None: no later prompt has it). What is
    not named is its own.
    """

    __slots__ = ("answer", "nodes", "pieces", "prompt_tokens", "shared_blocks")

    def __init__(self, prompt_tokens: int, pieces: tuple[TokenSpan, ...], answer: Hashable | None) -> None:
        named = sum(tokens for _, tokens in pieces)
        if named > prompt_tokens:
            raise ValueError(f"pieces: expected at most {prompt_tokens} tokens, got {named}")
        if named < prompt_tokens:
            pieces = (*pieces, (self, prompt_tokens - named))
        self.pieces = pieces
        self.answer = self if answer is None else answer
        self.prompt_tokens = prompt_tokens
        #: The nodes that it uses, one for each of its first pieces, and how many blocks it has in them.
        self.nodes: list[CachedSpan] = []
        self.shared_blocks = 0

    def blocks(self, tokens: int, size: int) -> Iterator[tuple[Hashable, int]]:
        """The pieces of the first `tokens` tokens, each with the number of whole blocks that end in it."""
        start = 0
        for key, length in self.pieces:
            end = min(start + length, tokens)
            yield key, end // size - start // size
            if end == tokens:
                return
            start = end
        yield self.answer, tokens // size - start // size


class PrefixCache:
    """Prefix cache over a block pool. The pool counts an unused cached block as free."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._root = CachedSpan(None, None)
        #: Nodes without a user and second copies, in the order of eviction.
        self._unused: OrderedDict[CachedSpan, None] = OrderedDict()
        self._unused_blocks = 0

    def find(self, content: PrefixContent, tokens: int) -> tuple[list[CachedSpan], int]:
        """The nodes that hold the beginning of the first `tokens` tokens, and how many blocks are found."""
        size = self._pool.block_size
        most = (tokens - 1) // size
        nodes: list[CachedSpan] = []
        node, found = self._root, 0
        for key, count in content.blocks(tokens, size):
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

    def cost(self, nodes: list[CachedSpan], found: int, tokens: int) -> int:
        """Return the free blocks that a sequence of `tokens` tokens takes, given what was found."""
        revived = sum(node.blocks for node in nodes if not node.users)
        if nodes and not nodes[-1].users:
            revived -= _surplus(nodes, found)
        return blocks_for(tokens, self._pool.block_size) - found + revived

    def use(self, content: PrefixContent, nodes: list[CachedSpan], found: int) -> None:
        """Use the found blocks. The caller has checked that enough are free."""
        if nodes and not nodes[-1].users and (surplus := _surplus(nodes, found)):
            # The block with the prompt's last token: it is computed again, and this copy forgotten.
            nodes[-1].blocks -= surplus
            self._unused_blocks -= surplus
            if not nodes[-1].blocks:
                del self._unused[nodes[-1]]
        for node in nodes:
            if not node.users and node.blocks:
                del self._unused[node]
                self._unused_blocks -= node.blocks
                self._pool.take(node.blocks)
            node.users += 1
        content.nodes, content.shared_blocks = nodes, found

    def publish(self, content: PrefixContent) -> None:
        """Make a prompt, whose last part is scheduled, available to others."""
        self._file(content, content.prompt_tokens)

    def release(self, content: PrefixContent, tokens: int) -> None:
        """Release a sequence's `tokens` tokens; whole blocks stay cached."""
        size = self._pool.block_size
        self._file(content, tokens)
        whole = tokens // size
        # A partly filled block is taken first: it needs no place in the order of eviction.
        self._pool.release((blocks_for(tokens, size) - whole) * size)
        if second := whole - content.shared_blocks:
            copies = CachedSpan(None, None)
            copies.blocks = second
            self._let_go(copies)
        for node in reversed(content.nodes):
            node.users -= 1
            if not node.users:
                if node.blocks:
                    self._let_go(node)
                else:
                    self._prune(node)
        content.nodes, content.shared_blocks = [], 0

    def shrink(self) -> None:
        """Evict cached blocks that the pool has given to others."""
        excess = self._unused_blocks - self._pool.free_blocks
        while excess > 0:
            node = next(iter(self._unused))
            evicted = min(node.blocks, excess)
            node.blocks -= evicted
            self._unused_blocks -= evicted
            excess -= evicted
            if not node.blocks:
                del self._unused[node]
                self._prune(node)

    def _file(self, content: PrefixContent, tokens: int) -> None:
        """Put the whole blocks of the first `tokens` tokens, which the sequence holds itself, into nodes."""
        nodes = content.nodes
        node = self._root
        for index, (key, count) in enumerate(content.blocks(tokens, self._pool.block_size)):
            if index < len(nodes):
                node = nodes[index]
                if node.blocks < count:
                    content.shared_blocks += count - node.blocks
                    node.blocks = count
                continue
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = CachedSpan(node, key)
            elif child.blocks:
                return  # another computed the same meanwhile: these are a second copy
            child.blocks = count
            child.users += 1
            content.shared_blocks += count
            nodes.append(child)
            node = child

    def _let_go(self, node: CachedSpan) -> None:
        self._unused[node] = None
        self._unused_blocks += node.blocks
        self._pool.release(node.blocks * self._pool.block_size)

    def _prune(self, node: CachedSpan) -> None:
        """Take a node that holds nothing out of the tree, and those above that only led to it."""
        while not (node.blocks or node.users or node.children) and (parent := node.parent) is not None:
            if parent.children.get(node.key) is node:
                del parent.children[node.key]
            node = parent

    # --- for tests ---

    def check_integrity(self, contents: list[PrefixContent]) -> int:
        """Count everything again; assertion where a sum disagrees. Returns the blocks in nodes in use."""
        used: dict[CachedSpan, int] = {}
        reachable: set[CachedSpan] = set()
        for content in contents:
            for node in content.nodes:
                used[node] = used.get(node, 0) + 1
            assert content.shared_blocks <= sum(node.blocks for node in content.nodes)
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
        assert self._unused_blocks == sum(node.blocks for node in self._unused)
        assert self._unused_blocks <= self._pool.free_blocks, "expected unused blocks to count as free"
        return sum(node.blocks for node in used)


def _surplus(nodes: list[CachedSpan], found: int) -> int:
    """Blocks of the last of these nodes left out because a prompt's last token must be computed."""
    return sum(node.blocks for node in nodes) - found
