"""The scheduler of somebody who only looks on: what all fellows have booked, and how the instances stand."""

from __future__ import annotations

from hetlb.core.fellows import SharedScheduler
from hetlb.core.shared_queue import SharedQueue


class FleetQueue(SharedQueue):
    """What waits in all workers; nothing waits here."""

    __slots__ = ()

    def __len__(self) -> int:
        return self.elsewhere

    def by_model(self) -> dict[str, int]:
        """How many wait, by model."""
        counts = {
            model: sum(each[2] for _, each in self._ledger.cells(cell))
            for model, cell in self._models.items()
        }
        return {model: count for model, count in counts.items() if count}

    def oldest_at(self) -> float | None:
        """When the one arrived that is the next to go in its worker and has waited longest."""
        oldest = [
            each[3] / 1e9 for cell in self._models.values() for _, each in self._ledger.cells(cell) if each[2]
        ]
        return min(oldest, default=None)


class FleetScheduler(SharedScheduler):
    """A scheduler that decides nothing: it knows what all workers have booked and how the instances stand."""

    queue_kind = FleetQueue

    def look(self, now: float) -> None:
        """Take in everything."""
        self.take_in(now, everything=True)
        self._queue.bytes = self._shared_queue.elsewhere_bytes
