"""Belief about prefix caches: which prefixes of prompts each engine holds, and how many use them now.

A request names what its prompt begins with by a chain of keys, shortest first; equal keys mean equal
prefixes. For each engine the index keeps a tree of such keys. A node counts the live leases that use it: its
tokens are in use once, however many share them. Unused nodes stay, as cached blocks do in vLLM, and are
evicted least recently used first and the end of a prompt before its beginning, when the KV cache is full or
the index holds too many nodes. `Tree.correct` shrinks the belief where an engine reports fewer cached tokens.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Final, TypeAlias

from mypy_extensions import mypyc_attr

#: Unused nodes over all trees of an index; the least recently used go first.
MOST_UNUSED_NODES: Final = 262_144
#: Believed share of the KV cache with unused blocks: its bounds, and how it follows evidence.
LEAST_SHARE: Final = 1.0 / 64.0
_SHRINK_FACTOR: Final = 0.8
_GROWTH_FACTOR: Final = 1.02
#: Least tokens of a conversation, beyond its prompt's prefixes, for it to be kept. Least expected cached
#: tokens, unused by any request, for a comparison with a report. Fewer tokens are soon read again.
LEAST_TOKENS: Final = 64
#: Share that meets an expectation: engines round down to whole blocks.
_MET_SHARE: Final = 0.75

#: A key and its end in tokens. None: the whole conversation, prompt and answer.
PrefixKey: TypeAlias = tuple[str, int | None]


@mypyc_attr(acyclic=True)
class Held:
    """Tokens of one prompt in the caches of engines, by `Tree.cache_id`.

    Example: one engine holds a prefix of 900 tokens, 3 leases use it there, and `usual` is 1: u = 2 more
    leases would use it on a second engine, beside this request. So that engine's cost of reading it is shared
    by 1 + u = 3 requests, and u / (1 + u) of it are `paid_tokens`: 600. A conversation that one engine can
    serve stays there; a system prompt of every request comes to each engine.
    """

    __slots__ = ("_paid", "_paid_upto", "_usual", "tokens")

    def __init__(self, usual: float = 0.0) -> None:
        self.tokens: dict[int, int] = {}
        self._usual = usual
        #: Tokens of the prompt that others pay for, in all and up to what an engine holds.
        self._paid = 0.0
        self._paid_upto: dict[int, float] = {}

    def add(self, nodes: Sequence[Node], tokens: int, most: int) -> None:
        """Note that the trees of `nodes` hold a prefix, with a last span of `tokens` tokens.

        At most `most` tokens of the prefix count as held.
        """
        users = 0.0
        for node in nodes:
            users += node.users - self._usual
        if users > 0.0:
            self._paid += tokens * users / (1.0 + users)
        for node in nodes:
            held = node.tokens if node.tokens < most else most
            tree = node.tree.cache_id
            if held > self.tokens.get(tree, 0):
                self.tokens[tree] = held
                self._paid_upto[tree] = self._paid

    def paid_tokens(self, cache_id: int) -> float:
        """Return the tokens that an engine lacks and that others pay for."""
        return self._paid - self._paid_upto.get(cache_id, 0.0)


class Node:
    """The end of one prefix in one tree: `tokens` up to here, `own` of them beyond the parent."""

    __slots__ = ("key", "own", "parent", "tokens", "tree", "users")

    def __init__(self, tree: Tree, key: str, tokens: int, own: int, parent: Node | None) -> None:
        self.tree = tree
        self.key = key
        self.tokens = tokens
        self.own = own
        self.parent = parent
        self.users = 0


@mypyc_attr(acyclic=True)
class Shared:
    """The part of one lease in a tree: its deepest node and its changes.

    `tokens` of its prompt are in the tree, `new_tokens` of them came into use with it; `held_tokens` of the
    prompt were in the cache before, of which no other lease used the last `idle_tokens`.
    """

    __slots__ = ("held_tokens", "idle_tokens", "new_tokens", "node", "tokens")

    def __init__(
        self, node: Node | None, tokens: int, new_tokens: int, held_tokens: int, idle_tokens: int = 0
    ) -> None:
        self.node = node
        self.tokens = tokens
        self.new_tokens = new_tokens
        self.held_tokens = held_tokens
        self.idle_tokens = idle_tokens


class Tree:
    """Prefixes that one engine holds. `cache_id` names this content of its cache."""

    def __init__(self, index: PrefixIndex, cache_id: int) -> None:
        self._index = index
        self.cache_id = cache_id
        #: Share of the KV cache that holds unused blocks; 1 until evidence says otherwise.
        self.share = 1.0
        #: True if the engine reports its evictions: then they are not guessed from the room.
        self.told = False
        self.nodes: dict[str, Node] = {}
        #: In the order of eviction.
        self.unused: OrderedDict[str, Node] = OrderedDict()
        self.unused_tokens = 0
        self.used_tokens = 0

    def attach(self, keys: Sequence[PrefixKey], prompt_tokens: int) -> Shared:
        """Use every prefix of a prompt, and add the prefixes that the tree lacks."""
        nodes = self.nodes
        parent: Node | None = None
        held = end = new = used = 0
        known = True
        for key, tokens in keys:
            node = nodes.get(key)
            if tokens is None:
                if node is not None:  # its blocks are booked by the lease from now on
                    held = max(held, node.tokens)
                    self.drop(node)
                continue
            if tokens > prompt_tokens or tokens <= end:
                continue
            if node is not None and node.parent is not parent:
                break  # estimates of lengths differ, and one has skipped a key
            if node is None:
                known = False
                node = nodes[key] = Node(self, key, tokens, tokens - end, parent)
                self._index.added(node)
            elif known and node.tokens > held:
                held = node.tokens
            if not node.users:
                if key in self.unused:
                    self._revive(node)
                self.used_tokens += node.own
                new += node.own
            else:
                used = tokens
            node.users += 1
            parent, end = node, tokens
        held = min(held, prompt_tokens - 1)
        return Shared(parent, end, new, held, max(0, held - used))

    def detach(self, node: Node | None) -> int:
        """End the use of a prefix. Returns the tokens that no lease uses any more; they stay until
        evicted."""
        freed = 0
        while node is not None:
            node.users -= 1
            if not node.users:
                freed += node.own
                self._keep(node)
            node = node.parent
        self.used_tokens -= freed
        return freed

    def remember(self, key: str, tokens: int, parent: Node | None) -> None:
        """Keep the prefix of a finished conversation, if it is long. Other requests still use `parent`."""
        node = self.nodes.get(key)
        if node is not None:
            self.drop(node)
        own = tokens if parent is None else tokens - parent.tokens
        if own >= LEAST_TOKENS:
            node = self.nodes[key] = Node(self, key, tokens, own, None)
            self._index.added(node)
            self._keep(node)

    def _revive(self, node: Node) -> None:
        del self.unused[node.key]
        self.unused_tokens -= node.own
        self._index.unused -= 1

    def _keep(self, node: Node) -> None:
        self.unused[node.key] = node
        self.unused_tokens += node.own
        self._index.unused += 1

    def evict(self, room: int) -> None:
        """Forget unused prefixes beyond `room`, the tokens of the KV cache that no lease uses."""
        most = math.inf if self.told else self.share * room
        while self.unused and (self.unused_tokens > most or self._index.unused > self._index.most_unused):
            self.drop(next(iter(self.unused.values())))

    def drop(self, node: Node) -> None:
        """Forget an unused prefix."""
        self._revive(node)
        del self.nodes[node.key]
        self._index.removed(node)

    def answered(
        self,
        shared: Shared,
        keys: Sequence[PrefixKey],
        prompt_tokens: int,
        output_tokens: int,
        reported: int | None,
    ) -> None:
        """Take in an answer, and keep its conversation as cached.

        `reported` tokens of its prompt were in the cache before; None if the engine did not say.
        """
        if reported is not None:
            self.correct(shared, reported)
        for key, tokens in keys:
            if tokens is None:
                self.remember(key, prompt_tokens + output_tokens, shared.node)

    def correct(self, shared: Shared, reported: int) -> None:
        """Adjust the believed share of unused blocks to the prompt tokens that an engine found in its cache.

        Only tokens that no other request used are compared. The others may not have been computed yet.
        """
        idle = shared.idle_tokens
        if self.told or idle < LEAST_TOKENS:
            return
        if reported < shared.held_tokens - (1.0 - _MET_SHARE) * idle:
            self.share = max(LEAST_SHARE, self.share * _SHRINK_FACTOR)
        elif self.share < 1.0:
            self.share = min(1.0, self.share * _GROWTH_FACTOR)

    def retire(self) -> None:
        """Note that the engine's cache is gone: its blocks of live leases go with it."""
        self.share, self.told = 0.0, False
        self.evict(0)


class PrefixIndex:
    """Prefixes that engines hold, over all of them."""

    def __init__(self, most_unused: int = MOST_UNUSED_NODES) -> None:
        self.most_unused = most_unused
        self._holders: dict[str, list[Node]] = defaultdict(list)
        self.unused = 0

    def __len__(self) -> int:
        return len(self._holders)

    def held(self, keys: Sequence[PrefixKey], prompt_tokens: int, usual: float = 0.0) -> Held | None:
        """Return the tokens of a prompt that each engine holds, None if none holds any.

        The last token of the prompt never counts. `usual`: mean number of leases of an engine.
        """
        found: Held | None = None
        holders, most, begin = self._holders, prompt_tokens - 1, 0
        for key, end in keys:
            nodes = holders.get(key)
            if nodes is None:
                if end is None:
                    continue
                break  # a longer prefix begins with this one
            if found is None:
                found = Held(usual)
            found.add(nodes, 0 if end is None else end - begin, most)
            begin = begin if end is None else end
        return found

    def added(self, node: Node) -> None:
        """Note that a tree has a new node."""
        self._holders[node.key].append(node)

    def removed(self, node: Node) -> None:
        """Note that a tree has lost a node."""
        holders = self._holders[node.key]
        holders.remove(node)
        if not holders:
            del self._holders[node.key]
