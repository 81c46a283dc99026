"""What the prompts of a trace have in common: names for their contents, for engines with a prefix cache.

Promise: read from the columns `hash_ids` (one id per block of tokens; equal leading ids are a shared
beginning) or `session_id` and `turn` (a prompt is the whole conversation so far: the last turn's prompt, its
answer, and what is new). A trace that is cycled shares nothing with its first pass.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetlb.sim.prefix import Piece

#: Tokens that one of the `hash_ids` stands for in Mooncake's traces.
HASH_BLOCK_TOKENS = 512


class ContentsRow(Protocol):
    """What is needed of a row of a trace."""

    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def extra(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class Named:
    """The contents of one request: pieces of its prompt from the beginning, and its answer.

    `beginnings` are what the scheduler is told of it.
    """

    pieces: tuple[Piece, ...] = ()
    answer: Hashable | None = None
    beginnings: tuple[tuple[str, int | None], ...] = ()


class TraceContents:
    """The contents of every row of a trace. Raises `ValueError` where its columns say nothing of them."""

    def __init__(self, rows: Sequence[ContentsRow], hash_block_tokens: int = HASH_BLOCK_TOKENS) -> None:
        columns = rows[0].extra.keys() if rows else set()
        if "hash_ids" in columns:
            self._named = [_of_hash_ids(row, hash_block_tokens) for row in rows]
        elif {"session_id", "turn"} <= columns:
            self._named = _of_sessions(rows)
        else:
            raise ValueError("expected the column hash_ids, or session_id and turn")

    def of(self, row: int, cycle: int = 0) -> Named:
        """The contents of a row in some pass through the trace."""
        named = self._named[row]
        if cycle == 0:
            return named
        pieces = tuple(((cycle, key), tokens) for key, tokens in named.pieces)
        beginnings = tuple((f"{cycle}:{name}", tokens) for name, tokens in named.beginnings)
        return Named(pieces, None if named.answer is None else (cycle, named.answer), beginnings)


def _of_hash_ids(row: ContentsRow, block_tokens: int) -> Named:
    pieces: list[Piece] = []
    left = row.input_tokens
    for name in re.findall(r"[\w-]+", row.extra["hash_ids"]):
        tokens = min(block_tokens, left)
        if tokens == 0:
            break
        # The last block is not whole: its id says nothing of one that is.
        pieces.append((name if tokens == block_tokens else (name, tokens), tokens))
        left -= tokens
    # At 1, 2, 4, 8... blocks, as the proxy does with the bytes of a prompt.
    beginnings, tokens = [], 0
    for count, (name, size) in enumerate(pieces, 1):
        tokens += size
        if count & (count - 1) == 0:
            beginnings.append((f"{count}:{name}", tokens))
    return Named(tuple(pieces), None, tuple(beginnings))


def _of_sessions(rows: Sequence[ContentsRow]) -> list[Named]:
    """In file order; a turn that is no longer than all before it begins a conversation of its own."""
    before: dict[str, tuple[tuple[Piece, ...], int]] = {}
    named = []
    for row in rows:
        session, turn = row.extra["session_id"], row.extra["turn"]
        output = max(1, row.output_tokens)
        pieces, tokens = before.get(session, ((), 0))
        if row.input_tokens <= tokens:
            pieces, tokens = (), 0
        pieces = (*pieces, ((session, turn, "prompt", tokens), row.input_tokens - tokens))
        answer = (session, turn, "answer")
        named.append(Named(pieces, answer, ((f"session:{session}", None),)))
        before[session] = ((*pieces, (answer, output)), row.input_tokens + output)
    return named
