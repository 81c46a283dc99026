"""Counters of several processes as one."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Collection, Sequence
from typing import Any, Final, TypeVar

from hetlb.proxy.telemetry.counters import (
    ACCOUNT_COUNTS,
    INSTANCE_COUNTS,
    MODEL_HISTOGRAMS,
    Totals,
)
from hetlb.proxy.telemetry.recent import Recent
from hetlb.workers.protocol import Ask, Report
from hetlb.workers.relay_host import RelayLink

#: Seconds that relays may take to report.
_ANSWER_S: Final = 1.0
_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)


class RelayReports:
    """Last reports of relays, and what those counted that are gone; `links` lists those that live."""

    def __init__(self, links: Sequence[RelayLink]) -> None:
        self._links = links
        self._gone = Totals()
        self._gone_lost = 0
        self._asked = 0
        self._came = asyncio.Event()
        #: Requests that ended lately at any relay.
        self.recent = Recent()

    async def refresh(self) -> None:
        """Ask all relays for a report, and wait for those that answer within `_ANSWER_S`."""
        self._asked = number = self._asked + 1
        asked = list(self._links)
        for link in asked:
            link.send(Ask(number))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                while any(link.report.number < number for link in asked if link in self._links):
                    await self._came.wait()

    def take(self, link: RelayLink, report: Report) -> None:
        """Keep a report."""
        link.report = report
        if report.recent:
            self.recent.add(pickle.loads(report.recent))
        self._wake()

    def retire(self, link: RelayLink, instances: Collection[str]) -> None:
        """Keep the counters of a relay that is gone, of these instances."""
        totals = link.totals
        if totals is not None:
            add(self._gone, totals)
            self._gone.keep(set(instances))
            self._gone_lost += link.report.lost_lines
        self._wake()

    def _wake(self) -> None:
        """Let those look that wait for reports."""
        self._came.set()
        self._came.clear()

    def totals(self, own: Totals) -> Totals:
        """Counters of all relays, and those of this process."""
        whole = Totals()
        for part in (own, self._gone, *(link.totals for link in self._links)):
            if part is not None:
                add(whole, part)
        whole.recent = self.recent
        return whole

    @property
    def lost_lines(self) -> int:
        """Lines of the relays' logs that were dropped."""
        return self._gone_lost + sum(link.report.lost_lines for link in self._links)


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
        for histogram in MODEL_HISTOGRAMS:
            getattr(whole.model(name), histogram).add(getattr(model, histogram))
    for key, account in part.accounts.items():
        _add_attributes(whole.account(*key), account, ACCOUNT_COUNTS)
    for name, instance in part.instances.items():
        found = whole.instance(name)
        _add_counts(found.requests, instance.requests)
        _add_counts(found.model_expected_s, instance.model_expected_s)
        _add_counts(found.model_seen_s, instance.model_seen_s)
        _add_attributes(found, instance, INSTANCE_COUNTS)


def _add_attributes(whole: Any, part: Any, names: Sequence[str]) -> None:
    for name in names:
        setattr(whole, name, getattr(whole, name) + getattr(part, name))


def _add_counts(whole: dict[_Key, _Number], part: dict[_Key, _Number]) -> None:
    for key, count in part.items():
        whole[key] = whole.get(key, 0) + count
