"""Looks at the lists of models of all engines at once, for a request of an unknown model."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Health
from hetlb.balancer.engines.rounds import Looked, Rounds
from hetlb.tasks import ended

#: Seconds that a look may take, seconds between two, and lists read at once.
_MOST_S: Final = 1.0
_PAUSE_S: Final = 2.0
_AT_ONCE: Final = 8


class LookUps:
    """Reads all lists of models in one look, for all that wait for it."""

    def __init__(
        self,
        scheduler: Scheduler,
        seen: Mapping[str, Looked],
        read: Callable[[str, Looked, Instance], Coroutine[Any, Any, object]],
        rounds: Rounds,
    ) -> None:
        self._scheduler = scheduler
        self._seen = seen
        self._read = read
        self._rounds = rounds
        self._now = asyncio.get_running_loop().time
        self._waiting: list[Callable[[], None]] = []
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = -math.inf

    def look(self, done: Callable[[], None]) -> bool:
        """Read the lists of all engines that are up, then call `done`. False: they were read just now."""
        if not self._waiting:
            if self._now() < self._looked_at + _PAUSE_S:
                return False
            self._looking = asyncio.create_task(self._look(), name="watch models")
        self._waiting.append(done)
        return True

    async def _look(self) -> None:
        reads = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MOST_S):
                for instance in self._scheduler.instances:
                    seen = self._seen.get(instance.name)
                    if seen is not None and instance.evidence.health.state is Health.UP:
                        reads.append(asyncio.create_task(self._read(instance.name, seen, instance)))
                        await asyncio.sleep(self._rounds.pause_s if len(reads) % _AT_ONCE == 0 else 0)
                await asyncio.gather(*reads, return_exceptions=True)
        await ended(*reads)
        self._looked_at = self._now()
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done()

    async def close(self) -> None:
        if self._looking is not None:
            await ended(self._looking)
