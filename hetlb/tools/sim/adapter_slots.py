"""LoRA adapters in the slots of one simulated engine, as vLLM keeps them.

A batch holds sequences of at most `max_loras` adapters. One without a slot is loaded before the batch
runs, in place of the adapter that was in a batch longest ago.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetlb.tools.sim.engine_sequence import EngineSequence


class LoadedAdapters:
    """The adapters of the running sequences, and the adapters in slots. "" is the base model: in no slot."""

    __slots__ = ("_last_step", "_running", "loads", "slots", "used")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        #: True once a sequence has had an adapter.
        self.used = False
        #: Adapters loaded so far.
        self.loads = 0
        self._running: dict[str, int] = {}
        #: The adapters in slots, each with the last batch it was in.
        self._last_step: dict[str, int] = {}

    @property
    def running(self) -> tuple[str, ...] | None:
        """Adapters of the running sequences, None if no sequence ever had one."""
        return tuple(self._running) if self.used else None

    def expect(self, name: str) -> None:
        """Note that a sequence of an adapter has arrived."""
        if name:
            self.used = True

    def first_admitted(self, waiting: Iterable[EngineSequence]) -> EngineSequence | None:
        """Return the first waiting sequence with an adapter that the batch can hold."""
        for sequence in waiting:
            name = sequence.adapter
            if not name or name in self._running or len(self._running) < self.slots:
                return sequence
        return None

    def begin(self, name: str, step: int) -> bool:
        """Add a sequence to the batch of this step; returns whether its adapter has to be loaded."""
        if not name:
            return False
        self._running[name] = self._running.get(name, 0) + 1
        known = name in self._last_step
        self._last_step[name] = step
        if not known:
            self.loads += 1
        return not known

    def evict(self) -> None:
        """Drop adapters that the complete batch does not use, to make room for the adapters it loads."""
        while len(self._last_step) > self.slots:
            idle = ((used, other) for other, used in self._last_step.items() if other not in self._running)
            del self._last_step[min(idle)[1]]

    def end(self, name: str, step: int) -> None:
        """Remove a sequence; it was in the batch of this step."""
        if not name:
            return
        self._last_step[name] = step
        if self._running[name] > 1:
            self._running[name] -= 1
        else:
            del self._running[name]

    def check_integrity(self, names: list[str]) -> None:
        """Assert that `names` are the adapters of the running sequences."""
        used = [name for name in names if name]
        assert self._running == {name: used.count(name) for name in used}, self._running
        assert len(self._running) <= self.slots
        assert self._running.keys() <= self._last_step.keys()
        assert len(self._last_step) <= self.slots
