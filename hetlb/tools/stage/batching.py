"""Continuous batching of one stage: passes that wait, the batch that runs next, and its paged KV cache.

Passes of a lease run in order, at most one of them per batch; a batch holds at most
`max_num_batched_tokens` tokens and `max_num_seqs` passes (longer passes are cut: chunked prefill). First
come, first served. If KV blocks are missing, the youngest lease gives its blocks up if it is younger than
the one that needs them, so the oldest always proceeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hetlb.tools.stage.stage_messages import Cause, Lost, Opening, Pass, RouteHop, Sampling


@dataclass(slots=True, eq=False)
class StageLease:
    """A lease as one stage sees it. `computed` tokens of it are in the KV cache."""

    id: int
    route: tuple[RouteHop, ...]
    hop: int
    sampling: Sampling
    table: BlockTable
    computed: int = 0
    closed: bool = False
    #: Tokens that were sampled here.
    output: list[int] = field(default_factory=list)

    @property
    def next_url(self) -> str | None:
        """Address of the next stage, None on the last."""
        return self.route[self.hop + 1].url if self.hop + 1 < len(self.route) else None


@dataclass(slots=True, eq=False)
class Work:
    """A part of a batch: `count` tokens of a lease from `position`, with their rows."""

    lease: StageLease
    position: int
    count: int
    last: bool
    rows: memoryview

    @property
    def samples(self) -> bool:
        """True if a token is sampled after its last row."""
        return self.last and self.lease.next_url is None


def segments(works: Sequence[Work]) -> Iterator[tuple[int, int, list[Work]]]:
    """Ranges of layers, each with the works that pass all of it together."""
    bounds = {bound for work in works for bound in (work.lease.table.first, work.lease.table.end)}
    for first, end in pairwise(sorted(bounds)):
        inside = [work for work in works if work.lease.table.first <= first < work.lease.table.end]
        if inside:
            yield first, end, inside


class Batcher:
    """Leases of a stage and the passes that wait for it."""

    def __init__(self, pool: StageBlocks, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: deque[Work] = deque()
        self.leases: dict[int, StageLease] = {}
        #: Leases that were closed here, until someone has told their coordinators.
        self.lost: list[Lost] = []
        #: Leases of the batch that runs: their blocks stay until it is done.
        self._running: list[StageLease] = []
        #: Bytes of rows that wait.
        self.waiting_bytes = 0

    @property
    def waiting(self) -> int:
        """Passes that wait."""
        return len(self._waiting)

    def add(self, each: Pass, opening: Opening | None, rows: memoryview) -> None:
        """Take in a pass. `opening` is needed for the first one of a lease, else it is lost."""
        lease = self.leases.get(each.lease)
        if lease is None:
            if opening is None or each.position != 0:
                self._give_up(
                    each.lease, Cause.PATH, f"pass at {each.position} of a lease that was not opened"
                )
                return
            own = opening.route[each.hop]
            table = BlockTable(own.first, own.end)
            lease = StageLease(each.lease, opening.route, each.hop, opening.sampling, table)
            self.leases[each.lease] = lease
        self._waiting.append(Work(lease, each.position, each.count, each.last, rows))
        self.waiting_bytes += len(rows)

    def close(self, lease_id: int) -> None:
        """Free what a lease holds, after the batch that runs if it is in it; its passes are dropped."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            lease.closed = True
            if lease not in self._running:
                self._pool.release(lease.table)

    def done(self) -> None:
        """Note that the batch formed last has run."""
        running, self._running = self._running, []
        for lease in running:
            if lease.closed:
                self._pool.release(lease.table)

    def form(self, accepts: Callable[[StageLease], bool]) -> list[Work]:
        """Return the next batch; leases may be lost for it.

        `accepts` is true for a lease if its output can be sent on now. Call `done` when the batch has run.
        """
        assert not self._running
        batch: dict[int, Work] = {}
        left: deque[Work] = deque()
        held_back: set[int] = set()
        budget = self._max_num_batched_tokens
        while self._waiting:
            work = self._waiting.popleft()
            lease = work.lease
            if lease.closed:
                self.waiting_bytes -= len(work.rows)
                continue
            takes = budget > 0 and len(batch) < self._max_num_seqs
            if not takes or lease.id in batch or lease.id in held_back or not accepts(lease):
                held_back.add(lease.id)
                left.append(work)
                continue
            if work.position != lease.computed:
                self.waiting_bytes -= len(work.rows)
                reason = f"a pass at {work.position} of {lease.computed} tokens"
                self._give_up(lease.id, Cause.PATH, reason)
                continue
            count = min(work.count, budget)
            if not self._make_room(lease, lease.computed + count, batch):
                held_back.add(lease.id)
                left.append(work)
                continue
            budget -= count
            batch[lease.id], rest = _cut(work, count)
            if rest is not None:
                left.append(rest)
        self._waiting = left
        for work in batch.values():
            work.lease.computed += work.count
            self.waiting_bytes -= len(work.rows)
        self._running = [work.lease for work in batch.values()]
        return list(batch.values())

    def _make_room(self, lease: StageLease, tokens: int, batch: Mapping[int, Work]) -> bool:
        """Reserve blocks; when too few are free, preempt younger leases outside the batch."""
        while not self._pool.reserve(lease.table, tokens):
            holding = [
                other
                for other in self.leases.values()
                if other.id not in batch and other is not lease and other.table.blocks.size
            ]
            victim = max(holding, key=lambda other: other.id, default=None)
            if victim is None and not batch:
                reason = f"{tokens} tokens do not fit into its KV cache"
                self._give_up(lease.id, Cause.PATH, reason)
            if victim is None or victim.id < lease.id:
                return False
            self._give_up(victim.id, Cause.KV, "")
        return True

    def _give_up(self, lease_id: int, cause: Cause, reason: str) -> None:
        self.close(lease_id)
        self.lost.append(Lost([lease_id], cause, reason))


def _cut(work: Work, count: int) -> tuple[Work, Work | None]:
    """Return the first `count` tokens of a pass, and the rest of it."""
    if count == work.count:
        return work, None
    size = len(work.rows) // work.count * count
    head = Work(work.lease, work.position, count, False, work.rows[:size])
    rest = Work(work.lease, work.position + count, work.count - count, work.last, work.rows[size:])
    return head, rest


# --- paged KV cache of one stage: the blocks of each request and layer, and their tokens ---
#
# A block holds `block_size` tokens of one layer of one lease. Blocks are numbered from 0 and any may serve
# any layer: a request that uses a part of the stage's layers takes blocks for these alone. The memory itself
# is the runner's.

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
