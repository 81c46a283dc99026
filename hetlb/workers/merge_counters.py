"""Counters of several processes as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from hetlb.proxy.telemetry.counters import (
    ACCOUNT_COUNTS,
    INSTANCE_COUNTS,
    MODEL_HISTOGRAMS,
    InstanceTotals,
    ModelTotals,
    Totals,
)

_Key = TypeVar("_Key")


def merged(parts: Iterable[Totals]) -> Totals:
    """The sum of all."""
    whole = Totals()
    for part in parts:
        add(whole, part)
    return whole


def add(whole: Totals, part: Totals) -> None:
    """Count in `whole` what `part` has counted."""
    whole.decisions += part.decisions
    whole.retries += part.retries
    _add_counts(whole.requests, part.requests)
    _add_counts(whole.reloads, part.reloads)
    whole.arrival.add(part.arrival)
    whole.end.add(part.end)
    whole.lag.add(part.lag)
    for name, model in part.models.items():
        _add_model(whole.model(name), model)
    for key, account in part.accounts.items():
        total = whole.account(*key)
        for count in ACCOUNT_COUNTS:
            setattr(total, count, getattr(total, count) + getattr(account, count))
    for name, instance in part.instances.items():
        _add_instance(whole.instance(name), instance)


def _add_model(whole: ModelTotals, part: ModelTotals) -> None:
    for name in MODEL_HISTOGRAMS:
        getattr(whole, name).add(getattr(part, name))


def _add_instance(whole: InstanceTotals, part: InstanceTotals) -> None:
    _add_counts(whole.requests, part.requests)
    for name in INSTANCE_COUNTS:
        setattr(whole, name, getattr(whole, name) + getattr(part, name))


def _add_counts(whole: dict[_Key, int], part: dict[_Key, int]) -> None:
    for key, count in part.items():
        whole[key] = whole.get(key, 0) + count
