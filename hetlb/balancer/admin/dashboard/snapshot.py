"""Events of the page's stream: all that the page shows, at one moment.

Of a large fleet an event has the instances in trouble and the busiest, or the ones that a viewer looks for.
The sums are of all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

import hetlb
from hetlb.balancer.admin.dashboard import balance
from hetlb.balancer.admin.dashboard.page import EventStream, page_file
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.types import AdminState, Health, Outcome
from hetlb.balancer.telemetry.counters import InstanceTotals
from hetlb.balancer.telemetry.recent import BIN_S, BINS, KEPT_POINTS, Recent, Stretch, latencies
from hetlb.percentiles import weighted_percentile

if TYPE_CHECKING:
    from hetlb.balancer.admin.admin import AdminApi
    from hetlb.balancer.fleet.service import FleetService

#: Least expected seconds of a part of a latency model that say anything about it.
LEAST_EVIDENCE_S: Final = 1.0
#: Decisions listed on the page, and instances of an event.
DECISIONS_SHOWN: Final = 25
INSTANCES_SHOWN: Final = 100
#: Streams for viewers that look for different instances; further ones get the events without their words.
_MOST_STREAMS: Final = 8
_MOST_WORDS_CHARACTERS: Final = 200


def model_factors(counted: InstanceTotals) -> dict[str, float | None]:
    """Return seen over expected time by part of the latency model; None if too little was seen."""
    return {
        part: times.seen_s / times.expected_s if times.expected_s >= LEAST_EVIDENCE_S else None
        for part, times in counted.parts.items()
    }


class Snapshots:
    """Files of the dashboard, and its events about a service."""

    def __init__(self, source: FleetService, documents: AdminApi) -> None:
        self._source = source
        self._documents = documents
        #: Streams by the words that the instances must have.
        self._streams: dict[tuple[str, ...], EventStream] = {}
        self._closed = False

    def file(self, path: str) -> web.Response:
        """Return a file of the page."""
        return page_file(path)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer `GET /v1/events`; `words` of its query must be in the names of instances."""
        words = tuple(request.query.get("words", "")[:_MOST_WORDS_CHARACTERS].lower().split())
        if words not in self._streams and len(self._streams) >= _MOST_STREAMS:
            words = ()
        stream = self._streams.get(words)
        if stream is None:
            stream = EventStream(lambda: msgspec.json.encode(self.event(words)), listening=self._listening)
            if self._closed:
                stream.close()
            self._streams[words] = stream
        try:
            return await stream.serve(request)
        finally:
            if not stream.listeners and self._streams.get(words) is stream:
                del self._streams[words]
                stream.close()

    def _listening(self) -> int:
        return sum(each.listeners for each in self._streams.values())

    def close(self) -> None:
        self._closed = True
        for stream in list(self._streams.values()):
            stream.close()

    def event(self, words: tuple[str, ...] = ()) -> dict[str, Any]:
        source, documents = self._source, self._documents
        scheduler, now, totals = source.scheduler, source.now(), source.totals
        recent = totals.recent
        shown, pools = shown_instances(scheduler.instances, words), documents.pools()
        fleet = documents.fleet(shown)
        for model in fleet["models"]:
            model["totals"] = totals_of(pools[model["name"]])
            for instance in model["instances"]:
                counted = totals.instances.get(instance["name"])
                instance["model_factors"] = None if counted is None else model_factors(counted)
        oldest_at = scheduler.queue.oldest_at()
        fleet["queue"]["models"] = scheduler.queue.by_model()
        fleet["queue"]["oldest_s"] = None if oldest_at is None else now - oldest_at
        last = islice(reversed(source.scheduling.decisions), DECISIONS_SHOWN)
        return {
            "version": hetlb.__version__,
            "clock_s": now,
            "policies": list(POLICIES),
            "registration": source.fleet.file.admin.registration,
            "decisions": {
                "total": totals.decisions,
                "last": [documents.decision(each) for each in last],
            },
            "fleet": fleet,
            "status": documents.status(),
            "balance": balance.documents(scheduler, recent, pools, now, shown),
            "series": {**series(recent, now, shown), **levels(recent, now, shown)},
            "accuracy": accuracy(recent),
        }


def shown_instances(instances: Sequence[Instance], words: Sequence[str] = ()) -> set[str] | None:
    """Return the names of the instances of an event that have the words, None for all instances."""
    if len(instances) <= INSTANCES_SHOWN:
        return None
    found = [each for each in instances if not words or _has(each, words)]
    found.sort(key=lambda each: (_able(each), -each.in_flight))
    return {each.name for each in found[:INSTANCES_SHOWN]}


def _has(instance: Instance, words: Sequence[str]) -> bool:
    state, health = instance.admin.value, instance.evidence.health.state.value
    text = f"{instance.name} {health} {state} {instance.spec.url}".lower()
    return all(word in text for word in words)


def _able(instance: Instance) -> bool:
    return instance.evidence.health.state is Health.UP and instance.admin is AdminState.READY


def totals_of(instances: Sequence[Instance]) -> dict[str, int]:
    """Return the sums over all instances of a model."""
    return {
        "instances": len(instances),
        "up": sum(each.evidence.health.state is Health.UP for each in instances),
        "ready": sum(each.admin is AdminState.READY for each in instances),
        "able": sum(_able(each) for each in instances),
        "in_flight": sum(each.in_flight for each in instances),
        "kv_reserved_tokens": sum(each.kv_tokens for each in instances),
        "kv_cache_tokens": sum(each.kv_cache_tokens for each in instances),
    }


def _shown(recent: Recent, now: float) -> list[Stretch]:
    """Return the complete stretches of the last five minutes."""
    end = math.floor(now / BIN_S)
    return [recent.stretches.get(number) or Stretch() for number in range(end - BINS, end)]


def levels(recent: Recent, now: float, instances: Container[str] | None = None) -> dict[str, Any]:
    """Return the columns `queue`, `in_flight` and `kv_reserved` (by instance), aligned with `series`."""
    shown = [each.levels for each in _shown(recent, now)]
    names = dict.fromkeys(
        name
        for each in shown
        if each is not None
        for name in each[1]
        if instances is None or name in instances
    )

    def column(name: str, place: int) -> list[float | None]:
        return [None if each is None or name not in each[1] else each[1][name][place] for each in shown]

    return {
        "queue": [None if each is None else sum(each[0].values()) for each in shown],
        "in_flight": {name: column(name, 0) for name in names},
        "kv_reserved": {name: column(name, 1) for name in names},
    }


def series(recent: Recent, now: float, instances: Container[str] | None = None) -> dict[str, Any]:
    """Return the rates and latencies of the last five minutes."""
    stretches = _shown(recent, now)
    outcomes: Counter[str] = Counter()
    for each in stretches:
        outcomes.update(each.outcomes)
    ok = [each.outcomes.get(Outcome.OK.value, 0) for each in stretches]
    ended = [sum(each.outcomes.values()) for each in stretches]
    tokens = [{name: share.output_tokens for name, share in each.shares.items()} for each in stretches]
    names = dict.fromkeys(name for each in tokens for name in each if instances is None or name in instances)
    latency_columns = {
        f"{name}_p{percent}_s": [_percentile(getattr(each, name), percent) for each in stretches]
        for name in ("ttft", "e2e")
        for percent in (50, 99)
    }
    return {
        "bin_s": BIN_S,
        "end_s": math.floor(now / BIN_S) * BIN_S,
        "outcomes": dict(outcomes),
        "instances": {name: [each.get(name, 0) / BIN_S for each in tokens] for name in names},
        "ok_per_s": [count / BIN_S for count in ok],
        "not_ok_per_s": [(whole - count) / BIN_S for whole, count in zip(ended, ok, strict=True)],
        "output_tokens_per_s": [sum(each.values()) / BIN_S for each in tokens],
        **latency_columns,
    }


def _percentile(counts: dict[int, int], percent: int) -> float | None:
    return round(weighted_percentile(latencies(counts), percent), 4) if counts else None


def accuracy(recent: Recent) -> dict[str, Any]:
    """Return the predicted and actual tokens and seconds of the newest answers, by index of the instance."""
    names: dict[str, int] = {}
    points = [
        (
            names.setdefault(name, len(names)),
            round(predicted, 1),
            round(tokens, 1),
            round(expected_s, 4),
            round(took_s, 4),
        )
        for _, name, predicted, tokens, expected_s, took_s in recent.points[-KEPT_POINTS:]
    ]
    return {"instances": list(names), "points": points}
