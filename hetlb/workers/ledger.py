"""The ledger in shared memory: a row for every worker, written by that worker alone, read by all.

Promise: no lock, no system call but to wake somebody; a figure is one aligned store of eight bytes, so that
whoever is killed leaves whole figures, which the supervisor wipes out (`wipe`). A reader pays for what has
changed, not for the size of the fleet: a row says in a ring which of its cells were written last.

Layout, in words of eight bytes. A row: how many writes there were, the standing (3), answers remembered, when
its worker last said that it lives (ns, monotonic), then the ring of `RING` cell numbers, `cells` cells of 8
words, `_BUCKETS` buckets of 4 entries (a key and two figures; a key's bucket is the same in every row), and
`ANSWERS` triples (the hash of an answer's id, the cell of the instance that keeps it, the hash of its owner).
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

from hetlb.core.ledger import NOTHING, Cell, Change, Entry, Ledger, Standing, key_of

#: So many writes are told one by one; who looks later than that compares everything.
RING: Final = 512
#: Answers that can be asked for again, by worker, the last ones.
ANSWERS: Final = 10_000
_HEAD_WORDS: Final = 8
_STANDING: Final = 1
_REMEMBERED: Final = 4
_BEAT: Final = 5
_CELL_WORDS: Final = 8
_BUCKETS: Final = 256
_BUCKET_WORDS: Final = 12
_CELL = Struct("8q")
_BUCKET = Struct("12q")
_HEAD = Struct("4q")
_NOBODY = (0, 0, 0, 0)


class Memory:
    """The memory itself, of `rows` rows of `cells` cells; `fd` is shared with the workers."""

    def __init__(self, rows: int, cells: int, fd: int | None = None) -> None:
        self.rows = rows
        self.cells = cells
        self.row_words = _HEAD_WORDS + RING + _CELL_WORDS * cells + _BUCKET_WORDS * _BUCKETS + 3 * ANSWERS
        size = 8 * rows * self.row_words
        if fd is None:
            fd = os.memfd_create("hetlb-ledger", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
        self.fd = fd
        self.map = mmap.mmap(fd, size)
        self.words = memoryview(self.map).cast("q")

    def close(self) -> None:
        """Give the memory back; rows over it are of no use any more."""
        self.words.release()
        self.map.close()
        os.close(self.fd)

    def cell_at(self, row: int, cell: int) -> int:
        """Where a cell of a row begins, in words."""
        return row * self.row_words + _HEAD_WORDS + RING + _CELL_WORDS * cell

    def read(self, row: int, cell: int) -> Cell:
        """What a row holds in a cell."""
        return _CELL.unpack_from(self.map, 8 * self.cell_at(row, cell))

    def wipe(self, row: int) -> None:
        """Take back all that a dead worker has booked. Only when it cannot write any more.

        What it remembered of answers stays: the engines keep them.
        """
        words, start = self.words, row * self.row_words
        for index in range(_STANDING, _REMEMBERED):
            words[start + index] = 0
        first = self.cell_at(row, 0)
        for index in range(first, first + _CELL_WORDS * self.cells + _BUCKET_WORDS * _BUCKETS):
            if words[index]:
                words[index] = 0
        words[start + _BEAT] = 0
        words[start] += RING + 1  # everybody compares everything

    def beat_at(self, row: int) -> float:
        """When the worker of a row last said that it lives, seconds of the monotonic clock; 0 for never."""
        return self.words[row * self.row_words + _BEAT] * 1e-9

    def busy(self, cell: int) -> bool:
        """Whether somebody has something booked in a cell of an instance."""
        return any(any(self.read(row, cell)[:6]) for row in range(self.rows))


class Row(Ledger):
    """A worker's view: its own row to write, the others' to read. `wake_up` wakes the worker of a number."""

    def __init__(
        self, memory: Memory, number: int, wake_up: Callable[[int], object] = lambda fellow: None
    ) -> None:
        super().__init__(number)
        self._memory = memory
        self._map = memory.map
        self._words = memory.words
        self._wake_up = wake_up
        self._start = number * memory.row_words
        self._cells_at = 8 * (self._start + _HEAD_WORDS + RING)
        self._entries_at = memory.cell_at(number, memory.cells)
        self._all_entries_at = [8 * memory.cell_at(row, memory.cells) for row in range(memory.rows)]
        others = [row for row in range(memory.rows) if row != number]
        #: Of each of the others: how many of its writes were looked at and how it stood, and its cells.
        self._heads: dict[int, tuple[int, ...]] = dict.fromkeys(others, _NOBODY)
        self._known: dict[int, dict[int, Cell]] = {row: {} for row in others}
        self._meant: set[int] = set()
        self._waiting_at = [row * memory.row_words + _STANDING for row in others]
        self.standings = [(0, 0, 0)] * len(others)
        self._count = 0 if number < 0 else self._words[self._start]
        #: By the hash of an owner: the places of its answers in our own row, the oldest first.
        self._places: dict[int, deque[int]] = {}
        self._answers_at = self._start + memory.row_words - 3 * ANSWERS
        if number >= 0:
            for place in range(min(ANSWERS, self._words[self._start + _REMEMBERED])):
                owner = self._words[self._answers_at + 3 * place + 2]
                self._places.setdefault(owner, deque()).append(place)

    # --- writing ---

    def write(self, cell: int, figures: Cell) -> None:
        """Write one cell, then say so."""
        start, count, words = self._start, self._count, self._words
        a, b, c, d, e, f, g, h = figures  # a starred argument would cost a list and a tuple
        _CELL.pack_into(self._map, self._cells_at + 8 * _CELL_WORDS * cell, a, b, c, d, e, f, g, h)
        words[start + _HEAD_WORDS + count % RING] = cell
        self._count = words[start] = count + 1

    def put(self, key: int, first: int, second: int) -> None:
        """Write an entry. In a full bucket it takes the place of the one that means least."""
        words, start = self._words, self._entries_at + _BUCKET_WORDS * (key % _BUCKETS)
        least, need = start, (True, 0)
        for at in range(start, start + _BUCKET_WORDS, 3):
            if words[at] == key:
                words[at + 1], words[at + 2] = first, second
                return
            its_need = words[at + 2] != 0, words[at + 1] if words[at] else -1
            if at == start or its_need < need:
                least, need = at, its_need
        words[least] = 0
        words[least + 1], words[least + 2] = first, second
        words[least] = key

    def write_standing(self, standing: Standing) -> None:
        """Write how our queue stands."""
        at = self._start + _STANDING
        self._words[at], self._words[at + 1], self._words[at + 2] = standing

    def beat(self, now: float) -> None:
        """Say that this worker lives, at `now` (seconds of the monotonic clock)."""
        self._words[self._start + _BEAT] = int(now * 1e9)

    def wake(self, fellow: int) -> None:
        """Have another look at what waits there."""
        self._wake_up(fellow)

    # --- reading ---

    def anybody_waits(self) -> bool:
        """Whether requests wait elsewhere at this moment."""
        words = self._words
        for at in self._waiting_at:  # noqa: SIM110 - this is asked at the end of every request
            if words[at]:
                return True
        return False

    def changed(self, *, everything: bool = False) -> list[Change]:
        """Cells that have changed since the last look: which, what they held, what they hold."""
        found: list[Change] = []
        memory, words, heads = self._memory, self._words, self._heads
        row_words, moved = memory.row_words, False
        for row, last in heads.items():
            start = row * row_words
            head = _HEAD.unpack_from(self._map, 8 * start)
            if head == last and not everything:
                continue
            heads[row] = head
            moved = moved or head[1:] != last[1:]
            seen, count = last[0], head[0]
            known, cells = self._known[row], self._meant
            if not everything and count - seen < RING:
                ring = start + _HEAD_WORDS
                if count - seen == 1:
                    cells = {words[ring + seen % RING]}
                else:
                    cells = {words[ring + each % RING] for each in range(seen, count)}
            at = 8 * (start + _HEAD_WORDS + RING)
            for cell in cells:
                old = known.get(cell)
                if old is None:  # nobody has said yet what it means
                    continue
                new: Cell = _CELL.unpack_from(self._map, at + 8 * _CELL_WORDS * cell)
                if new != old:
                    known[cell] = new
                    found.append((cell, old, new))
        if moved:
            self.standings = [(head[1], head[2], head[3]) for head in heads.values()]
        return found

    def follow(self, cell: int) -> Cell:
        """A cell has a (new) meaning: what the others hold in it now, added up; only later changes are told.

        What has been counted since the beginning counts from now on.
        """
        self._meant.add(cell)
        total = list(NOTHING)
        for row, known in self._known.items():
            known[cell] = figures = self._memory.read(row, cell)
            for index in range(6):
                total[index] += figures[index]
        return (total[0], total[1], total[2], total[3], total[4], total[5], 0, 0)

    def cells(self, cell: int) -> Sequence[tuple[int, Cell]]:
        """What each of the others holds in a cell at this moment."""
        read = self._memory.read
        return [(row, read(row, cell)) for row in self._heads]

    def entries(self, key: int) -> Sequence[Entry]:
        """What stands under a key in all rows, our own too."""
        found: list[Entry] = []
        bucket, memory_map = 8 * _BUCKET_WORDS * (key % _BUCKETS), self._map
        for start in self._all_entries_at:
            words = _BUCKET.unpack_from(memory_map, start + bucket)
            if words[0] == key:
                found.append((words[1], words[2]))
            elif key in words:
                found.extend([(words[at + 1], words[at + 2]) for at in (3, 6, 9) if words[at] == key])
        return found

    # --- answers that can be asked for again ---

    def remember(self, response_id: str, cell: int, owner: str | None) -> None:
        """An answer was made, and where. In a full row it takes the place of one of the owner with most."""
        words, start, owned_by = self._words, self._start, owner_hash(owner)
        place = words[start + _REMEMBERED]
        if place < ANSWERS:
            words[start + _REMEMBERED] = place + 1
        else:
            place = max(self._places.values(), key=len).popleft()
        self._places.setdefault(owned_by, deque()).append(place)
        at = self._answers_at + 3 * place
        words[at], words[at + 1], words[at + 2] = key_of(response_id), cell, owned_by

    def kept_at(self, response_id: str) -> tuple[int, int] | None:
        """The cell of the instance that keeps an answer, and the hash of whose it is (`owner_hash`)."""
        wanted, memory = key_of(response_id), self._memory
        for row in range(memory.rows):
            at = (row + 1) * memory.row_words - 3 * ANSWERS
            hashes = self._words[at : at + 3 * ANSWERS : 3].tolist()
            if wanted in hashes:
                found = at + 3 * hashes.index(wanted)
                return self._words[found + 1], self._words[found + 2]
        return None


class Onlooker(Row):
    """The view of one that has no row: it reads all, and what it would write is nobody's business."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory, -1)

    def write(self, cell: int, figures: Cell) -> None:
        """Nothing is booked by one that serves nobody."""

    def put(self, key: int, first: int, second: int) -> None:
        """Nor has anybody anything there."""

    def write_standing(self, standing: Standing) -> None:
        """Nor does anybody wait there."""

    def wake(self, fellow: int) -> None:
        """And nobody is to make way."""


def owner_hash(owner: str | None) -> int:
    """What stands in the ledger for the owner of an answer."""
    return key_of(owner or "")
