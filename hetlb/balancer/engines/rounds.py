"""Rounds of the watch: which engine is looked at next, and how much of the event loop all looks take.

An engine that is busy, in doubt or not up is looked at each `scrape.interval_s`. One that is idle and well
changes only by its first request: after each look that finds it so the next comes twice as late, at most
`_MOST_S`. Looks begin one after the other, each with a pause in proportion to the CPU time of a look.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Mapping
from typing import Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Health
from hetlb.balancer.engines.last_page import LastPage

#: Longest time between two looks at an idle engine, in seconds and in intervals of `scrape.interval_s`: of a
#: small fleet, for each instance more, and of a large one.
_MOST_S: Final = 4.0
_MOST_MORE_S: Final = 0.06
_MOST_LARGE_S: Final = 15.0
_MOST_INTERVALS: Final = 15.0
#: Intervals between two probes of an engine that answers clients.
_PROBED_INTERVALS: Final = 3.0
#: Intervals between two reads of the list of models, of a busy and of an idle engine.
_MODELS_BUSY: Final = 10.0
_MODELS_IDLE: Final = 60.0
#: Intervals after a refusal in which an engine is doubted.
_DOUBTED_INTERVALS: Final = 2.0
#: Searches for engines that are due, in one interval.
_SCANS: Final = 4
_LEAST_SCAN_S: Final = 0.01
#: Looks that may be in flight: silent engines keep theirs until `scrape.timeout_s`.
MOST_LOOKS: Final = 256
#: Share of the loop for all looks, except the first one at each engine.
_SHARE: Final = 0.1
#: CPU seconds of a look besides reading its page; the longest pause after one; weight of a look in the mean.
_LOOK_S: Final = 2e-4
_MOST_PAUSE_S: Final = 0.25
_GAIN: Final = 0.05
#: Relative variation of the time between two looks at an idle engine.
_SPREAD: Final = 0.1


class Looked:
    """State of the watch over one engine, from look to look."""

    __slots__ = (
        "anonymous", "began", "door", "interval_s", "late", "least_trip_s", "looked_at", "looks",
        "metrics_after", "models_at", "page", "probed_at", "told_missing",
    )  # fmt: skip

    def __init__(self) -> None:
        #: Begin of the last look, and time until the next while it is idle.
        self.looked_at = -math.inf
        self.interval_s = 0.0
        self.looks = 0
        #: Path that shows whether it is up.
        self.door = "/health"
        #: Time of its last probe, and True if that had no answer in time.
        self.probed_at = -math.inf
        self.late = False
        #: Time of the last read of its models, and from which on its metrics are read.
        self.models_at = self.metrics_after = -math.inf
        #: Start of its process by its own clock, None while unknown. `anonymous`: its page does not say, only
        #: its list of models shows whether it is the same process.
        self.began: float | None = None
        self.anonymous = False
        self.told_missing = False
        #: Shortest round trip of a packet so far, in seconds.
        self.least_trip_s = math.inf
        #: Its last page of metrics, None before one was read.
        self.page: LastPage | None = None


class Rounds:
    """Times of the looks."""

    def __init__(self, interval_s: float, scheduler: Scheduler) -> None:
        self._least_s = interval_s
        self._scheduler = scheduler
        self._spread = random.Random()
        self._look_s = _LOOK_S
        self.scan_s = max(_LEAST_SCAN_S, interval_s / _SCANS)

    @property
    def _most_s(self) -> float:
        """Longest time between two looks at an idle engine."""
        of_size_s = min(_MOST_LARGE_S, _MOST_S + _MOST_MORE_S * len(self._scheduler.fleet.instances))
        return max(self._least_s, min(of_size_s, _MOST_INTERVALS * self._least_s))

    @property
    def pause_s(self) -> float:
        """Pause after the begin of a look."""
        return min(_MOST_PAUSE_S, self._look_s / _SHARE)

    def spent(self, page_s: float) -> None:
        """Take in the CPU time that reading a page took."""
        self._look_s += _GAIN * (_LOOK_S + page_s - self._look_s)

    def due(self, engines: Mapping[str, Looked], looks: Container[str], now: float) -> list[str]:
        """Return the engines to look at now, the one that is most overdue first."""
        found: list[tuple[float, str]] = []
        instances = self._scheduler.fleet.instances
        early_s = self.scan_s / 2.0
        for name, seen in engines.items():
            instance, interval_s = instances.get(name), seen.interval_s
            if interval_s > self._least_s and (instance is None or self._matters(instance, now)):
                interval_s = self._least_s
            since = now - seen.looked_at
            if since + early_s >= interval_s and name not in looks:
                found.append((-since / max(interval_s, self._least_s), name))
        # Later ones of this interval are not yet known: no more than fit into it.
        found.sort()
        most = 1 + int(_SCANS * self.scan_s / self.pause_s)
        return [name for _, name in found[:most]]

    def light(self, seen: Looked, instance: Instance | None, now: float) -> bool:
        """Return True if this look reads the metrics page alone: every second look at an idle engine."""
        seen.looks += 1
        idle = seen.interval_s > self._least_s and seen.looks % 2 == 0
        return idle and instance is not None and not self._matters(instance, now)

    def models_due(self, seen: Looked, instance: Instance | None, now: float) -> bool:
        """Return True if the list of models is to be read again."""
        if instance is not None and self._doubted(instance, now):
            return True
        intervals = _MODELS_IDLE if seen.interval_s > self._least_s else _MODELS_BUSY
        return seen.anonymous or now - seen.models_at >= self._least_s * intervals

    def probe_due(self, seen: Looked, now: float) -> bool:
        """Return True if an engine that answers clients is to be probed, too."""
        return now - seen.probed_at >= self._least_s * _PROBED_INTERVALS - self.scan_s

    def looked(self, seen: Looked, instance: Instance | None, now: float) -> bool:
        """Set the time of the next look after one. Return True if the engine is busy or in doubt."""
        if instance is None or self._matters(instance, now):
            seen.interval_s = self._least_s
            return True
        if instance.sample is not None and (instance.sample.running or instance.sample.waiting):
            seen.interval_s = self._least_s
            return True
        longer_s = min(self._most_s, 2.0 * max(seen.interval_s, self._least_s))
        seen.interval_s = longer_s * (1.0 - _SPREAD * self._spread.random())
        return False

    def _matters(self, instance: Instance, now: float) -> bool:
        """Return True if news of an instance may matter at once."""
        if (
            instance.in_flight
            or instance.evidence.health.state is not Health.UP
            or instance.unhealthy
            or instance.speed.in_doubt
            or self._doubted(instance, now)
        ):
            return True
        return instance.asleep and len(self._scheduler.queue) > 0

    def _doubted(self, instance: Instance, now: float) -> bool:
        """Return True if another server may be at an address, or an engine may load its model."""
        refused = now - instance.refused_at < _DOUBTED_INTERVALS * self._least_s
        model = instance.spec.model
        return refused or instance.evidence.wary(now) or (model != "" and model not in instance.models)
