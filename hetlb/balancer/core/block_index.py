"""The blocks in an engine's prefix cache as its own KV events tell them: exact, evictions included.

A block is named by a chain: a hash of its content and of the chain of the block before it, so equal chains
mean equal prefixes of prompts. Contents are digests (`block_digests`): no token id is kept. The index is
`live` while every event since the cache was empty is known; else belief is the LRU tree's (`Tree`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.prefix_index import Tree
from hetlb.balancer.core.types import PromptBlocks, Request

#: Maximum number of followed blocks, and of known names of adapters.
MAX_BLOCKS: Final = 1 << 20
MAX_ADAPTERS: Final = 4096
_MASK: Final = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class BlocksStored(PickleByFields):
    """Blocks came into the cache, one after the other, behind the block `parent` (None: at the beginning).

    `hashes` are the engine's names of the blocks, `contents` their digests, `adapter` computed them.
    """

    hashes: tuple[int, ...]
    parent: int | None
    contents: tuple[int, ...]
    block_tokens: int
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class BlocksRemoved(PickleByFields):
    """Blocks were evicted."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksCleared(PickleByFields):
    """The whole cache was emptied."""


KvEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared
#: Events by name, as the event log has them.
KINDS: Final = {each.__name__: each for each in (BlocksStored, BlocksRemoved, BlocksCleared)}


@dataclass(frozen=True, slots=True)
class KvEventBatch(PickleByFields):
    """Events in their order. `begins`: the cache was empty before them. `lost`: why some are missing."""

    events: tuple[KvEvent, ...] = ()
    begins: bool = False
    lost: str = ""


def block_digests(ids: array[int], block_tokens: int, extras: Sequence[str] = ()) -> tuple[int, ...]:
    """Return a digest (8 bytes) of every full block of token ids; `extras` belong to the first."""
    data, size = memoryview(ids).cast("B"), block_tokens * ids.itemsize
    found: list[int] = []
    for number in range(len(ids) // block_tokens):
        digest = blake2b(data[number * size : (number + 1) * size], digest_size=8)
        if number < len(extras) and extras[number]:
            digest.update(extras[number].encode())
        found.append(int.from_bytes(digest.digest(), "big"))
    return tuple(found)


def _root(adapter: str) -> int:
    if not adapter:
        return 0
    return int.from_bytes(blake2b(adapter.encode(), digest_size=8).digest(), "big") & _MASK


def _next(chain: int, content: int) -> int:
    return hash((chain, content)) & _MASK  # of numbers: the same in every process


class BlockIndex:
    """Blocks in one engine's cache, and blocks that the prompts of live leases will add."""

    def __init__(self) -> None:
        self.live = False
        #: Reason why the index is not `live`.
        self.reason = "no event has come yet"
        self.block_tokens = 0
        self._chains: dict[int, int] = {}  # by the engine's name of a block
        self._copies: dict[int, int] = {}  # of blocks that are there more than once
        self._stored: set[int] = set()
        self._adapters: set[str] = set()
        self._pending: dict[int, int] = {}  # chains of live prompts, and how many have each
        self._leases: dict[int, list[int]] = {}
        #: Tokens of evicted prompts with unknown ids that are not yet removed from the tree. They are fewer
        #: than the next prefix has.
        self._owed_tokens = 0.0

    @property
    def stored_tokens(self) -> int:
        """Tokens of the blocks in the cache."""
        return len(self._chains) * self.block_tokens

    def take(self, batch: KvEventBatch, tree: Tree) -> None:
        """Apply a report to the blocks, and to what is known of the engine's prefix cache."""
        before = self.stored_tokens
        removed, cleared = self.apply(batch)
        tree.told = self.live
        if cleared:
            self.evicted(tree, math.inf)
        elif removed and tree.unused_tokens:  # prompts of unknown token ids lose their part
            unused = max(tree.unused_tokens, before - tree.used_tokens)
            self.evicted(tree, removed * self.block_tokens * tree.unused_tokens / unused)

    def apply(self, batch: KvEventBatch) -> tuple[int, bool]:
        """Take over a batch. Return the number of removed blocks, and True if all were removed."""
        removed, cleared = 0, False
        if batch.begins:
            self._clear()
            self.live, self.reason, cleared = True, "", True
        if batch.lost:
            self.doubt(batch.lost)
        for event in batch.events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                removed += len(event.hashes)
                for name in event.hashes:
                    self._remove(name)
            else:
                self._clear()
                self.live, self.reason, cleared = True, "", True
        return removed, cleared

    def evicted(self, tree: Tree, tokens: float) -> None:
        """Forget unused prefixes of a tree after the engine reported the eviction of `tokens` tokens."""
        self._owed_tokens += tokens
        while tree.unused:
            node = next(iter(tree.unused.values()))
            if node.own > self._owed_tokens:
                return
            self._owed_tokens -= node.own
            tree.drop(node)
        self._owed_tokens = 0.0

    def doubt(self, reason: str) -> None:
        """Believe nothing of the index until the cache is known to be empty: events were missed."""
        self._clear()
        self.live, self.reason = False, reason

    def held(self, model: str, blocks: PromptBlocks) -> int:
        """Return the tokens of a prompt that are in the cache, or will be when it is read."""
        if blocks[0] != self.block_tokens:
            return 0
        stored, pending = self._stored, self._pending
        chain = _root(model if model in self._adapters else "")
        count = 0
        for content in blocks[1]:
            chain = _next(chain, content)
            if chain not in stored and chain not in pending:
                break
            count += 1
        return count * self.block_tokens

    def exact(self, request: Request, engines: int) -> int | None:
        """Return the tokens of a prompt in the cache of one of `engines`; None if events do not tell."""
        if not self.live or request.blocks is None or engines > 1:
            return None
        return min(self.held(request.model, request.blocks), request.prompt_tokens - 1)

    def begin(self, lease_id: int, model: str, blocks: PromptBlocks) -> None:
        """Note that a prompt was sent to the engine: its blocks are computed before later ones."""
        if blocks[0] != self.block_tokens:
            return
        chain = _root(model if model in self._adapters else "")
        chains: list[int] = []
        pending = self._pending
        for content in blocks[1]:
            chain = _next(chain, content)
            chains.append(chain)
            pending[chain] = pending.get(chain, 0) + 1
        self._leases[lease_id] = chains

    def end(self, lease_id: int) -> None:
        """Note that a lease ended: events have reported its prompt's blocks."""
        pending = self._pending
        for chain in self._leases.pop(lease_id, ()):
            left = pending[chain] - 1
            if left:
                pending[chain] = left
            else:
                del pending[chain]

    def _store(self, event: BlocksStored) -> None:
        self.block_tokens = event.block_tokens
        if not self.live:
            return
        if event.adapter and event.adapter not in self._adapters:
            if len(self._adapters) >= MAX_ADAPTERS:
                self._adapters.clear()  # adapters in use are named again
            self._adapters.add(event.adapter)
        if event.parent is None:
            chain = _root(event.adapter)
        else:
            known = self._chains.get(event.parent)
            if known is None:
                self.doubt("a block was stored behind one that is not known")
                return
            chain = known
        for name, content in zip(event.hashes, event.contents, strict=False):
            chain = _next(chain, content)
            if name in self._chains:
                self._copies[name] = self._copies.get(name, 1) + 1
            else:
                self._chains[name] = chain
                self._stored.add(chain)
        if len(self._chains) > MAX_BLOCKS:
            self.doubt(f"more than {MAX_BLOCKS} blocks")

    def _remove(self, name: int) -> None:
        copies = self._copies.get(name)
        if copies is not None:
            if copies > 2:
                self._copies[name] = copies - 1
            else:
                del self._copies[name]
            return
        chain = self._chains.pop(name, None)
        if chain is not None:
            self._stored.discard(chain)

    def _clear(self) -> None:
        self._chains.clear()
        self._copies.clear()
        self._stored.clear()
