"""Belief about the LoRA adapters that an engine has in its slots (vLLM's `max_loras`).

A batch holds requests of at most so many adapters. One that is in no slot is loaded in place of the adapter
that was used longest ago and runs nothing; where all slots have requests, it waits for one of them to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mypy_extensions import mypyc_attr

#: vLLM's own default of `max_loras`.
DEFAULT_SLOTS: Final = 1


@mypyc_attr(acyclic=True)
class AdapterSlots:
    """The adapters that one engine lists, and those that it is believed to have in its slots."""

    __slots__ = ("_running", "_used", "names", "slots")

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.slots = DEFAULT_SLOTS
        #: Requests by adapter, of those that have some; adapters in slots, the one used last at the end.
        self._running: dict[str, int] = {}
        self._used: dict[str, None] = {}

    @property
    def held(self) -> tuple[str, ...]:
        """Adapters in slots, the one used longest ago first."""
        return tuple(self._used)

    def begin(self, name: str) -> None:
        """A request goes to the engine; nothing where it is for no adapter."""
        if name in self.names:
            self._running[name] = self._running.get(name, 0) + 1
            self._use(name)

    def end(self, name: str) -> None:
        """A request has ended."""
        count = self._running.get(name)
        if count is not None:
            if count > 1:
                self._running[name] = count - 1
            else:
                del self._running[name]
                self._trim()

    def told(self, running: Iterable[str]) -> None:
        """The engine says which adapters run."""
        for name in running:
            if name in self.names:
                self._use(name)

    def cost_s(self, name: str, load_s: float, wait_s: float) -> float:
        """Seconds that a request for an adapter costs beyond one whose adapter is in a slot.

        `load_s` to load it, and as much for the adapter that leaves and is to come back; `wait_s` until a
        request ends, where every slot has some.
        """
        if name not in self.names or name in self._used:
            return 0.0
        if len(self._used) < self.slots:
            return load_s
        return 2.0 * load_s + (wait_s if len(self._running) >= self.slots else 0.0)

    def count(self) -> dict[str, int]:
        """Requests by adapter."""
        return dict(self._running)

    def _use(self, name: str) -> None:
        self._used.pop(name, None)
        self._used[name] = None
        self._trim()

    def _trim(self) -> None:
        """Let those go that were used longest ago and run nothing."""
        over = len(self._used) - self.slots
        if over > 0:
            idle = [name for name in self._used if name not in self._running]
            newest = next(reversed(self._used))
            for name in idle[:over]:
                if name != newest:
                    del self._used[name]
