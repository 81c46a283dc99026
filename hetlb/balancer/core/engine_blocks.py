"""Blocks of an engine's prefix cache as it reports them (`options/kv_events/block_index.py` has them)."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

#: Block size in tokens, and the digest of every full block of a prompt but for its last token.
PromptBlocks: TypeAlias = tuple[int, tuple[int, ...]]
#: Events of one message, in their order: `KvEventBatch` of the option.
BlockEvents: TypeAlias = Any


class EngineBlocks(Protocol):
    """Blocks in one engine's cache, and blocks that the prompts of live leases will add."""

    live: bool
    #: Reason why it is not live.
    reason: str
    block_tokens: int

    @property
    def stored_tokens(self) -> int: ...
    def apply(self, batch: BlockEvents) -> tuple[int, bool]: ...
    def doubt(self, reason: str) -> None: ...
    def held(self, model: str, blocks: PromptBlocks) -> int: ...
    def begin(self, lease_id: int, model: str, blocks: PromptBlocks) -> None: ...
    def end(self, lease_id: int) -> None: ...
