"""Counters, and records of ended requests, of several processes as one.

The records that relays report stay packed until a page reads them, which is seldom: to unpack the record of
every request, and to free it again, would cost the scheduler process more than all else that it does for one.
Records stand in the order in which the requests ended: one is shown once no relay can have an older one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final, TypeVar

import msgspec

from hetlb.proxy.telemetry.counters import (
    ACCOUNT_COUNTS,
    INSTANCE_COUNTS,
    MODEL_HISTOGRAMS,
    Totals,
)
from hetlb.proxy.telemetry.history import ENDED_KEPT, History
from hetlb.workers.protocol import Ask, Report
from hetlb.workers.relay_host import RelayLink

#: Seconds that relays may take to report.
_ANSWER_S: Final = 1.0
_Key = TypeVar("_Key")
_decoder = msgspec.msgpack.Decoder(list[tuple[Any, ...]])


class FleetRecords:
    """The records of all relays; `history` is what pages read."""

    def __init__(self, size: int = ENDED_KEPT) -> None:
        self.history = History(size, self._unpack)
        self._size = size
        #: Batches: how many rows each holds, and the rows.
        self._packed: deque[tuple[int, bytes]] = deque()
        self._count = 0
        #: Rows of some relays that are newer than what others have reported.
        self._early: list[tuple[Any, ...]] = []
        #: All requests that ended until then were reported by all relays; seconds.
        self.complete_until = 0.0

    def add(self, count: int, packed: bytes) -> None:
        """Add a batch of one relay: rows of a `History` as a MessagePack array."""
        self._packed.append((count, packed))
        self._count += count
        while self._count - self._packed[0][0] >= self._size:  # as many newer ones would take their places
            missed, _ = self._packed.popleft()
            self._count -= missed
            self.history.added += missed

    def _unpack(self) -> None:
        rows, until = self._early, self.complete_until
        for _, packed in self._packed:
            rows += _decoder.decode(packed)
        self._packed.clear()
        self._count = 0
        if rows:
            ready = sorted((row for row in rows if row[0] <= until), key=lambda row: row[0])
            self._early = [row for row in rows if row[0] > until][-self._size :]
            self.history.extend(ready)


class RelayReports:
    """Last reports of relays, and what those counted that are gone; `links` lists those that live."""

    def __init__(self, links: Sequence[RelayLink]) -> None:
        self._links = links
        self._gone = Totals()
        self._gone_lost = 0
        self._asked = 0
        self._came = asyncio.Event()
        #: Requests that ended lately.
        self.records = FleetRecords()

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
        if report.record_count:
            self.records.add(report.record_count, report.records)
        link.report = report
        self._changed()

    def retire(self, link: RelayLink, instances: Collection[str]) -> None:
        """Keep the counters of a relay that is gone, of these instances."""
        totals = link.totals
        if totals is not None:
            add(self._gone, totals)
            self._gone.keep(set(instances))
            self._gone_lost += link.report.lost_lines
        self._changed()

    def _changed(self) -> None:
        self.records.complete_until = min((link.report.until for link in self._links), default=0.0)
        self._came.set()
        self._came.clear()

    def totals(self, own: Totals) -> Totals:
        """Counters of all relays, and those of this process."""
        whole = Totals()
        for part in (own, self._gone, *(link.totals for link in self._links)):
            if part is not None:
                add(whole, part)
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
        _add_counts(whole.instance(name).requests, instance.requests)
        _add_attributes(whole.instance(name), instance, INSTANCE_COUNTS)


def _add_attributes(whole: Any, part: Any, names: Sequence[str]) -> None:
    for name in names:
        setattr(whole, name, getattr(whole, name) + getattr(part, name))


def _add_counts(whole: dict[_Key, int], part: dict[_Key, int]) -> None:
    for key, count in part.items():
        whole[key] = whole.get(key, 0) + count
