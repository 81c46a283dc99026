"""Counters of several processes, added up."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import Any

from hetlb.balancer.telemetry.counters import (
    ACCOUNT_COUNTS,
    INSTANCE_COUNTS,
    MODEL_HISTOGRAMS,
    Totals,
)
from hetlb.balancer.telemetry.histograms import GapHistogram, Histogram
from hetlb.balancer.telemetry.recent import KEPT_POINTS, Recent, add_counts


def add_totals(whole: Totals, part: Totals) -> None:
    """Add another process's counters, without its recently ended requests and its reloads."""
    _add(whole, part, ("decisions", "retries"))
    for counts in ("requests", "classes", "kv_transfers", "resumptions"):
        add_counts(getattr(whole, counts), getattr(part, counts))
    for name in ("arrival", "end", "lag"):
        _add_histogram(getattr(whole, name), getattr(part, name))
    for name, model in part.models.items():
        found = whole.model(name)
        for histogram in MODEL_HISTOGRAMS:
            _add_histogram(getattr(found, histogram), getattr(model, histogram))
    for key, account in part.accounts.items():
        _add(whole.account(*key), account, ACCOUNT_COUNTS)
    for name, instance in part.instances.items():
        own = whole.instances[name]
        add_counts(own.requests, instance.requests)
        add_counts(own.model_expected_s, instance.model_expected_s)
        add_counts(own.model_seen_s, instance.model_seen_s)
        _add(own, instance, INSTANCE_COUNTS)


def merge_reloads(whole: Totals, part: Totals) -> None:
    """Merge a sibling's reloads: each worker reads the one fleet file, so one reload counts once."""
    whole.reloads = {result: max(count, part.reloads[result]) for result, count in whole.reloads.items()}


def add_recent(whole: Recent, part: Recent) -> None:
    """Add the recently ended requests of another process."""
    for number, stretch in part.stretches.items():
        whole.stretch(number).add(stretch)
    whole.lag_s = max(whole.lag_s, part.lag_s)
    whole.points = sorted(whole.points + part.points)[-KEPT_POINTS:]
    for cause, told in part.own.items():
        whole.own[cause] = max(told, whole.own.get(cause, told))


def take_samples(whole: Recent, other: Recent) -> None:
    """Take over the samples of queue and load, and the paces, of another process. Counts stay."""
    whole.paces = other.paces
    for number, stretch in other.stretches.items():
        whole.stretch(number).levels = stretch.levels


def _add(whole: Any, part: Any, names: Sequence[str]) -> None:
    for name in names:
        setattr(whole, name, getattr(whole, name) + getattr(part, name))


def _add_histogram(whole: Histogram | GapHistogram, part: Histogram | GapHistogram) -> None:
    if isinstance(whole, GapHistogram) and isinstance(part, GapHistogram):
        whole.fine = list(map(add, whole.fine, part.fine))
        _add_histogram(whole.longer, part.longer)
    elif isinstance(whole, Histogram) and isinstance(part, Histogram):
        whole.add(part)
