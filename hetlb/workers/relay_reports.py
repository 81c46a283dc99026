"""Counters of several processes as one."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from hetlb.proxy.telemetry.counters import (
    ACCOUNT_COUNTS,
    INSTANCE_COUNTS,
    MODEL_HISTOGRAMS,
    InstanceTotals,
    ModelTotals,
    Totals,
)
from hetlb.proxy.telemetry.recent import Recent
from hetlb.workers.protocol import Report
from hetlb.workers.relay_host import RelayLink

_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)


class RelayReports:
    """Last reports of relays, and what those counted that are gone; `links` lists those that live."""

    def __init__(self, links: Sequence[RelayLink]) -> None:
        self._links = links
        self._gone = Totals()
        self._gone_lost = 0
        #: Requests that ended lately at any relay.
        self._recent = Recent()

    def take(self, link: RelayLink, report: Report) -> None:
        """Keep a report."""
        if report.totals:
            link.report = report
            self._recent.add(pickle.loads(report.recent))

    def retire(self, link: RelayLink, instances: Collection[str]) -> None:
        """Keep the counters of a relay that is gone, of these instances."""
        totals = link.totals
        if totals is not None:
            add(self._gone, totals)
            self._gone.keep(set(instances))
            self._gone_lost += link.report.lost_lines

    def totals(self, own: Totals) -> Totals:
        """Counters of all relays, and those of this process."""
        parts = (link.totals for link in self._links)
        whole = merged([own, self._gone, *(each for each in parts if each is not None)])
        whole.recent = self._recent
        return whole

    @property
    def lost_lines(self) -> int:
        """Lines of the relays' logs that were dropped."""
        return self._gone_lost + sum(link.report.lost_lines for link in self._links)


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
    _add_counts(whole.classes, part.classes)
    _add_counts(whole.reloads, part.reloads)
    _add_counts(whole.kv_transfers, part.kv_transfers)
    _add_counts(whole.resumptions, part.resumptions)
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
    _add_counts(whole.model_expected_s, part.model_expected_s)
    _add_counts(whole.model_seen_s, part.model_seen_s)
    for name in INSTANCE_COUNTS:
        setattr(whole, name, getattr(whole, name) + getattr(part, name))


def _add_counts(whole: dict[_Key, _Number], part: dict[_Key, _Number]) -> None:
    for key, count in part.items():
        whole[key] = whole.get(key, 0) + count
