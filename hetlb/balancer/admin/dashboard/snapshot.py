"""Events of the page's stream: all that the page shows, at one moment."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

import hetlb
from hetlb.balancer.admin.dashboard import balance
from hetlb.balancer.admin.dashboard.page import EventStream, page_file
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.types import Outcome
from hetlb.balancer.telemetry.counters import InstanceTotals
from hetlb.balancer.telemetry.recent import BIN_S, BINS, KEPT_POINTS, Recent, Stretch, latencies
from hetlb.percentiles import weighted_percentile

if TYPE_CHECKING:
    from hetlb.balancer.admin.admin import AdminApi
    from hetlb.balancer.fleet.service import FleetService

#: Least expected seconds of a part of a latency model that say anything about it.
LEAST_EVIDENCE_S: Final = 1.0
#: Decisions listed on the page.
DECISIONS_SHOWN: Final = 25


def model_factors(counted: InstanceTotals) -> dict[str, float | None]:
    """Return seen over expected time by part of the latency model; None where too little was seen."""
    return {
        part: counted.model_seen_s[part] / expected_s if expected_s >= LEAST_EVIDENCE_S else None
        for part, expected_s in counted.model_expected_s.items()
    }


class Snapshots:
    """Files of the dashboard, and its events about a service."""

    def __init__(self, source: FleetService, documents: AdminApi) -> None:
        self._source = source
        self._documents = documents
        self._events = EventStream(lambda: msgspec.json.encode(self.event()))

    def file(self, path: str) -> web.Response:
        """Return a file of the page."""
        return page_file(path)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer `GET /v1/events`."""
        return await self._events.serve(request)

    def close(self) -> None:
        self._events.close()

    def event(self) -> dict[str, Any]:
        source, documents = self._source, self._documents
        scheduler, now, totals = source.scheduler, source.now(), source.totals
        recent = totals.recent
        fleet = documents.fleet()
        for model in fleet["models"]:
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
            "balance": balance.documents(scheduler, recent, documents.pools(), now),
            "series": {**series(recent, now), **levels(recent, now)},
            "accuracy": accuracy(recent),
        }


def _shown(recent: Recent, now: float) -> list[Stretch]:
    """Return the complete stretches of the last five minutes."""
    end = math.floor(now / BIN_S)
    return [recent.stretches.get(number) or Stretch() for number in range(end - BINS, end)]


def levels(recent: Recent, now: float) -> dict[str, Any]:
    """Return the columns `queue`, `in_flight` and `kv_reserved` (by instance), aligned with `series`."""
    shown = [each.levels for each in _shown(recent, now)]
    names = dict.fromkeys(name for each in shown if each is not None for name in each[1])

    def column(name: str, place: int) -> list[float | None]:
        return [None if each is None or name not in each[1] else each[1][name][place] for each in shown]

    return {
        "queue": [None if each is None else sum(each[0].values()) for each in shown],
        "in_flight": {name: column(name, 0) for name in names},
        "kv_reserved": {name: column(name, 1) for name in names},
    }


def series(recent: Recent, now: float) -> dict[str, Any]:
    """Return the rates and latencies of the last five minutes."""
    stretches = _shown(recent, now)
    outcomes: Counter[str] = Counter()
    for each in stretches:
        outcomes.update(each.outcomes)
    ok = [each.outcomes.get(Outcome.OK.value, 0) for each in stretches]
    ended = [sum(each.outcomes.values()) for each in stretches]
    tokens = [{name: share.output_tokens for name, share in each.shares.items()} for each in stretches]
    names = dict.fromkeys(name for each in tokens for name in each)
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
