"""LoRA adapters: which an engine is believed to have in its slots (vLLM's `max_loras`), the time to load one.

A batch holds requests of at most `max_loras` adapters. An adapter in no slot replaces the idle one that was
used longest ago; where all slots have requests, it waits for one of them to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.types import LeaseId

#: First tokens that teach the time to load an adapter: the newest kept, and the fewest needed.
_SAMPLES: Final = 31
_LEAST_SAMPLES: Final = 5
#: Least learnt time of a load, in seconds: with 0 no load would be expected, so none observed.
_LEAST_S: Final = 1e-3


@mypyc_attr(acyclic=True)
class AdapterSlots:
    """The adapters listed by one engine, and the adapters believed to be in its slots."""

    def __init__(self, names: frozenset[str], slots: int) -> None:
        self.names = names
        self.slots = slots
        #: Running requests of each adapter that has some. Adapters in slots, the least recently used first.
        self._running: dict[str, int] = {}
        self._used: dict[str, None] = {}

    @property
    def held(self) -> tuple[str, ...]:
        """Adapters in slots, the least recently used first."""
        return tuple(self._used)

    def begin(self, name: str) -> None:
        """Count a dispatched request for an adapter. Without an adapter nothing changes."""
        if name in self.names:
            self._running[name] = self._running.get(name, 0) + 1
            self._use(name)

    def end(self, name: str) -> None:
        """Note that a request has ended."""
        count = self._running.get(name)
        if count is not None:
            if count > 1:
                self._running[name] = count - 1
            else:
                del self._running[name]
                self._trim()

    def told(self, running: Iterable[str]) -> None:
        """Take over the adapters that the engine reports as running."""
        for name in running:
            if name in self.names:
                self._use(name)

    def loads(self, name: str) -> bool | None:
        """Return whether the engine has to load an adapter for its next request.

        False: it has a slot. True: it has none, and a slot is free or idle. None: the engine does not list
        it, or all slots have requests.
        """
        if name in self._used:
            return False
        return True if name in self.names and len(self._running) < self.slots else None

    def cost_s(self, name: str, load_s: float, wait_s: float) -> float:
        """Return the extra seconds of a request over one with its adapter in a slot.

        Loading takes `load_s`, and twice that if another adapter has to leave its slot. `wait_s` is added if
        all slots have requests.
        """
        if name not in self.names or name in self._used:
            return 0.0
        if len(self._used) < self.slots:
            return load_s
        return 2.0 * load_s + (wait_s if len(self._running) >= self.slots else 0.0)

    def count(self) -> dict[str, int]:
        """Return requests by adapter."""
        return dict(self._running)

    def _use(self, name: str) -> None:
        self._used.pop(name, None)
        self._used[name] = None
        self._trim()

    def _trim(self) -> None:
        """Drop the least recently used adapters without requests until the others fit the slots."""
        over = len(self._used) - self.slots
        if over > 0:
            idle = [name for name in self._used if name not in self._running]
            newest = next(reversed(self._used))
            for name in idle[:over]:
                if name != newest:
                    del self._used[name]


class AdapterLoadTime:
    """Seconds that an engine needs to load an adapter: stated at first, then learnt from first tokens.

    The time is the median delay of first tokens where an adapter was loaded, less the median where it had a
    slot.
    """

    def __init__(self, stated_s: float) -> None:
        self.seconds = stated_s
        #: By lease of a request for an adapter, until its first token: the expected seconds from dispatch to
        #: first token without a load, and whether the adapter is loaded.
        self.expected: dict[LeaseId, tuple[float, bool]] = {}
        self._loaded: deque[float] = deque(maxlen=_SAMPLES)
        self._others: deque[float] = deque(maxlen=_SAMPLES)

    def first_token(self, lease: LeaseId, took_s: float) -> None:
        """Note that the first token of a lease came `took_s` after its dispatch."""
        if (expected := self.expected.pop(lease, None)) is not None:
            self.observe(took_s - expected[0], expected[1])

    def observe(self, late_s: float, loaded: bool) -> None:
        """Note that the first token of a request for an adapter came `late_s` after it was expected."""
        (self._loaded if loaded else self._others).append(late_s)
        if len(self._loaded) >= _LEAST_SAMPLES:
            usual_s = _median(self._others) if len(self._others) >= _LEAST_SAMPLES else 0.0
            self.seconds = max(_LEAST_S, _median(self._loaded) - usual_s)


def _median(values: deque[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
