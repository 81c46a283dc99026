"""Delayed view of a simulated engine that schedules asynchronously (`EngineLimits.async_scheduling`).

vLLM fixes the next batch when the running one starts. Seen from the boundary at which that batch begins,
sequences that arrived while the previous batch ran are not seen, and slots and blocks of sequences that
finished with it are still taken: both are held back for one iteration.
"""

from __future__ import annotations

from collections import OrderedDict

from hetlb.sim.engine_sequence import EngineSequence
from hetlb.sim.kv_blocks import KvBlocks


class DelayedView:
    """Sequences that the engine does not see yet, and finished ones whose slots it has not back yet."""

    __slots__ = ("arriving", "leaving")

    def __init__(self) -> None:
        #: Sequences that came while iterations were in flight, with the step in which they came.
        self.arriving: dict[EngineSequence, int] = {}
        #: Finished sequences, with their tokens in the cache.
        self.leaving: list[tuple[EngineSequence, int]] = []

    def see_arrivals(self, steps: int, waiting: OrderedDict[EngineSequence, None]) -> None:
        """Queue the arrivals from before the last of `steps` steps began."""
        for sequence, step in list(self.arriving.items()):
            if step < steps:
                del self.arriving[sequence]
                waiting[sequence] = None
            else:
                self.arriving[sequence] = 0

    def settle(self, kv: KvBlocks, waiting: OrderedDict[EngineSequence, None]) -> None:
        """Apply everything held back."""
        for sequence, tokens in self.leaving:
            kv.release(sequence, tokens)
        self.leaving.clear()
        waiting.update(dict.fromkeys(self.arriving))
        self.arriving.clear()

    def take_latest(self, decoding: dict[EngineSequence, None]) -> tuple[EngineSequence, int] | None:
        """Take the finished sequence that was admitted last; None if a decoding one was admitted later."""
        if not self.leaving:
            return None
        self.leaving.sort(key=lambda each: each[0].admission)
        last = self.leaving[-1][0]
        if decoding and last.admission <= next(reversed(decoding)).admission:
            return None
        return self.leaving.pop()
