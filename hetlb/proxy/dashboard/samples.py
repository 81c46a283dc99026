"""Samples of what the dashboard shows over time, kept whether a page is open or not."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any, Final

from hetlb.core.scheduler import Scheduler
from hetlb.proxy.telemetry.recent import BIN_S, BINS

#: Instances whose levels are kept: the page has colours for fewer.
LEVELS_KEPT: Final = 16
#: Stretches that a sample may stand for at most.
LATE: Final = 5
#: Requests that ended within so many seconds count; a queue grows in the half of it.
WINDOW_S: Final = 30.0
#: So many times the size of `WINDOW_S` before, and more than a few: a queue grows.
GROWN: Final = 1.3
LEAST_QUEUE: Final = 8


class Levels:
    """Samples every `BIN_S`: requests in flight and KV cache reserved by instance, and the queue."""

    def __init__(self) -> None:
        #: By number of the stretch: waiting requests by model; those in flight and KV share by instance.
        self._samples: dict[int, tuple[dict[str, int], dict[str, tuple[int, float]]]] = {}

    def sample(self, scheduler: Scheduler, now: float) -> None:
        """Keep how things stand now, of the first instances alone; forget what is no longer shown."""
        index = math.floor(now / BIN_S)
        self._samples[index] = (
            scheduler.queue.by_model(),
            {
                each.name: (each.in_flight, round(each.kv_tokens / each.kv_cache_tokens, 4))
                for each in islice(scheduler.instances, LEVELS_KEPT)
            },
        )
        # The timer is late by a little each time: a stretch that it left out is as the next one.
        last = max((each for each in self._samples if each < index), default=index)
        if index - last <= LATE:
            for missed in range(last + 1, index):
                self._samples[missed] = self._samples[index]
        for old in [each for each in self._samples if each < index - BINS]:
            del self._samples[old]

    def document(self, now: float) -> dict[str, Any]:
        """Columns `queue`, `in_flight` and `kv_reserved` (by instance), aligned with those of `series`."""
        end = math.floor(now / BIN_S)
        shown = [self._samples.get(index) for index in range(end - BINS, end)]
        names = dict.fromkeys(name for each in shown if each is not None for name in each[1])

        def column(name: str, place: int) -> list[float | None]:
            return [None if each is None or name not in each[1] else each[1][name][place] for each in shown]

        return {
            "queue": [None if each is None else sum(each[0].values()) for each in shown],
            "in_flight": {name: column(name, 0) for name in names},
            "kv_reserved": {name: column(name, 1) for name in names},
        }

    def grows(self, model: str, waiting: int, now: float) -> bool:
        """True if the queue of a model has grown throughout: half a window ago, and since."""
        if waiting < LEAST_QUEUE:
            return False
        first, last = math.ceil((now - WINDOW_S / 2) / BIN_S), math.floor((now - WINDOW_S / 6) / BIN_S)
        half = [
            self._samples[index][0].get(model, 0)
            for index in range(first, last + 1)
            if index in self._samples
        ]
        return bool(half) and waiting >= GROWN * max(half) and half[-1] >= half[0]
