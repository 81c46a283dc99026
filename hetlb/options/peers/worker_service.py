"""One of several workers: a plain `serve` with its siblings as peers, and with pages that sum over all.

Each of them answers at the admin address. Its own scheduler knows the leases of all, and counts come from
their tallies. For decisions it asks each sibling at its socket in the folder of their view.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import socket
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any, Final

import msgspec

from hetlb.app_listener import AppListener
from hetlb.balancer.admin.admin import make_app
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.fleet.service import Service, tune_gc
from hetlb.balancer.option_record import Options, Predecessor
from hetlb.balancer.telemetry.counters import (
    ACCOUNT_COUNTS,
    INSTANCE_COUNTS,
    MODEL_HISTOGRAMS,
    GapHistogram,
    Histogram,
    Totals,
)
from hetlb.balancer.telemetry.recent import KEPT_POINTS, Recent, add_counts
from hetlb.errors import InputError
from hetlb.options.peers import share, share_in
from hetlb.options.peers.control import ChildControl, ChildState, Packet, Tally
from hetlb.options.peers.offer import Offer
from hetlb.systemd import Listeners
from hetlb.tasks import exit_by_force

#: Seconds between two reports of a worker's counts.
REPORT_S: Final = 0.5
#: Seconds until the sum over all workers is computed again: a page asks for it several times.
_FRESH_S: Final = 0.05
#: Seconds that siblings may take to tell their decisions.
_ANSWER_S: Final = 1.0
#: Leases of one life of a worker have numbers of their own.
_LEASES_EACH: Final = 10**9
_MOST_IDLE: Final = 64
_IDLE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Place of a worker among its siblings; `life` counts all that were ever started."""

    number: int
    life: int
    folder: Path
    tallies: Sequence[Tally]


@dataclass(slots=True)
class Report:
    """Counts of one worker since the first one at its place began, and its queue as it is now."""

    totals: Totals
    recent: Recent
    lost_lines: int
    waiting: dict[str, int]
    waiting_bytes: int


def log_of(event_log: Path | None, number: int, restarts: int) -> Path | None:
    """Return the event log of a worker: a log is of one scheduler."""
    if event_log is None:
        return None
    life = f".{restarts + 1}" if restarts else ""
    return event_log.with_name(f"{event_log.name}.{number}{life}")


class Worker(Service):
    """A worker, as its parent started it."""

    def __init__(
        self,
        state: ChildState,
        place: WorkerPlace,
        control: ChildControl,
        options: Options,
        event_log: Path | None,
    ) -> None:
        self.first_lease = place.life * _LEASES_EACH + 1
        super().__init__(state.fleet, options, event_log)
        self._place = place
        self._control = control
        self._own_name = state.own
        self.driver.identify(state.own)
        self.view_folder = place.folder
        if state.fleet.file.shared is not None:
            share(self)
        else:
            share_in(self, place.folder)
        self._predecessor: Predecessor | None = None
        self._kept: tuple[Sequence[socket.socket], Listeners] = (), Listeners()
        self._inner = AppListener(most_idle=_MOST_IDLE, idle_s=_IDLE_S)
        self._reporter: asyncio.TimerHandle | None = None
        #: Counts of the workers before at this place, and the others' as they were read last.
        self._before = self._report_of(place.number)
        self._read: dict[int, tuple[int, Report | None]] = {}
        self._merged: Totals | None = None
        self._merged_at = 0.0

    # --- life ---

    async def serve(
        self, own: Sequence[socket.socket], listeners: Listeners, takeover: Predecessor | None
    ) -> None:
        """Serve clients that come to `own` of the listeners, until told to stop."""
        os.environ.pop("NOTIFY_SOCKET", None)  # the parent tells systemd
        self._predecessor, self._kept = takeover, (own, listeners)
        self.on_hurry = exit_by_force
        self._control.listen(self._hear, self._orphaned)
        try:
            await self.start(Listeners(tuple(own), listeners.admin))
            with contextlib.suppress(OSError):
                await self._open_inner()
            self._report_often()
            tune_gc()
            await self.run(self._ready)
        finally:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            await self.close()

    def _ready(self) -> None:
        self._control.send("ready")

    def _open_log(self) -> None:
        whole = stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode)
        # A file takes a batch of lines in one piece, a pipe does not.
        self._front.open_log(None if whole else select.PIPE_BUF)

    async def _open_inner(self) -> None:
        """Tell siblings about this worker's decisions, at a socket of its own."""
        path = self._socket_of(self._place.number)
        path.unlink(missing_ok=True)
        inner = socket.socket(socket.AF_UNIX)
        inner.setblocking(False)
        inner.bind(str(path))
        await self._inner.open(make_app(self, alone=True), "", 0, [inner])

    def _socket_of(self, number: int) -> Path:
        return self._place.folder / f"worker-{number}.sock"

    def _hear(self, packet: Packet, fds: list[int]) -> None:
        kind, *rest = packet
        if kind == "ping":
            self._control.send("pong")
        elif kind == "workers":
            self.workers = rest[0]
        elif kind == "reload":
            self.do(self._reload_by_signal())
        elif kind == "serving":
            self._serving()
        elif kind == "leave":
            self.leave()
        elif kind == "stop":
            self._keep_own()
            self._on_stop_signal(rest[0])

    def _serving(self) -> None:
        """Let another process replace this one and its siblings from now on: all accept."""
        if self._predecessor is not None:
            self.do(self._predecessor.accepting())
        self.offer = Offer(self)
        self.offer.open(self.address)

    def _orphaned(self) -> None:
        """Accept no more and end: the parent is gone."""
        self._keep_own()
        self.server.stop_accepting()
        self.do(self.admin.close())
        self._on_stop_signal(False)

    def _keep_own(self) -> None:
        """Close the sockets kept for siblings: clients must not wait if no process accepts."""
        own, listeners = self._kept
        listeners.only(own, listeners.admin)

    def open_sockets(self) -> tuple[Sequence[int], Sequence[int]]:
        listeners = self._kept[1]
        return [each.fileno() for each in listeners.main], [each.fileno() for each in listeners.admin]

    def leave(self) -> None:
        if not self.replaced:
            self._control.send("replaced")
            self._keep_own()
        super().leave()

    async def _reload_by_signal(self) -> None:
        with contextlib.suppress(InputError):  # it was logged
            await self.reload()
        self._control.send("reloaded")

    def _spread(self, fleet: Fleet) -> None:
        """Give the parent the fleet for future workers."""
        content = pickle.dumps(ChildState(fleet, self._own_name), pickle.HIGHEST_PROTOCOL)
        self._control.send_large("state", content=content)

    async def close(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
        await self._inner.close()
        if self._predecessor is not None:
            self._predecessor.close()
        await super().close()
        self._report()

    # --- counts ---

    def _report_often(self) -> None:
        self._reporter = asyncio.get_running_loop().call_later(REPORT_S, self._report_often)
        self._report()

    def _report(self) -> Report:
        """Write the counts of this worker to memory that outlives it, and return them."""
        report = self._own_report()
        encoded = pickle.dumps(report, pickle.HIGHEST_PROTOCOL)
        self._place.tallies[self._place.number].write(encoded)
        return report

    def _own_report(self) -> Report:
        """Return what this worker and the ones before at its place have counted."""
        totals, queue = Totals(), self.scheduler.queue
        recent, own = Recent(), self.driver.totals
        own_recent = own.recent
        if self._before is not None:
            add_totals(totals, self._before.totals)
            add_counts(totals.reloads, self._before.totals.reloads)
            add_recent(recent, self._before.recent)
        add_totals(totals, own)
        add_counts(totals.reloads, own.reloads)
        add_recent(recent, own_recent)
        recent.lag_s = own_recent.lag_s  # of the process of now
        before = 0 if self._before is None else self._before.lost_lines
        lost, totals.recent = before + super().lost_lines, Recent()
        return Report(totals, recent, lost, queue.by_model(), queue.bytes)

    def _report_of(self, number: int) -> Report | None:
        _, report = self._place.tallies[number].read()
        found: Report | None = pickle.loads(report) if report else None
        return found

    @property
    def _others(self) -> list[Report]:
        """Reports of the siblings, as they told them last."""
        found = []
        for number, tally in enumerate(self._place.tallies):
            if number == self._place.number:
                continue
            newest, report = tally.read()
            if newest and self._read.get(number, (0, None))[0] != newest:
                self._read[number] = newest, pickle.loads(report)
            if (known := self._read.get(number, (0, None))[1]) is not None:
                found.append(known)
        return found

    @property
    def totals(self) -> Totals:
        now = self.now()
        if self._merged is None or now - self._merged_at > _FRESH_S:
            self._merged, self._merged_at = self._sum(), now
        return self._merged

    def _sum(self) -> Totals:
        own = self._report()  # first: a sum that was shown must not fall when this process ends
        whole, whole.recent = own.totals, own.recent
        for other in self._others:
            add_totals(whole, other.totals)
            merge_reloads(whole, other.totals)
            add_recent(own.recent, other.recent)
        take_samples(own.recent, self.driver.counted.recent)
        return whole

    @property
    def tells(self) -> bool:
        """True if this worker logs causes. One of the workers does, as all have the same evidence."""
        return not any(each.up for each in self.workers if int(each.number) < self._place.number)

    @property
    def lost_lines(self) -> int:
        return self._own_report().lost_lines + sum([each.lost_lines for each in self._others])

    @property
    def waiting_elsewhere(self) -> tuple[dict[str, int], int]:
        sizes: dict[str, int] = {}
        for other in self._others:
            for model, count in other.waiting.items():
                sizes[model] = sizes.get(model, 0) + count
        return sizes, sum([each.waiting_bytes for each in self._others])

    async def elsewhere(self, path: str) -> list[Any]:
        """Return the JSON documents of the siblings at a path of the admin listener."""
        numbers = [each for each in range(len(self._place.tallies)) if each != self._place.number]
        found = await asyncio.gather(*[self._ask(self._socket_of(each), path) for each in numbers])
        return [each for each in found if each is not None]

    async def _ask(self, place: Path, path: str) -> Any:
        """Return the JSON document of a sibling, None if it gives none."""
        from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector

        token, headers = self.access.admin_token, {}
        if token is not None:
            headers["Authorization"] = f"Bearer {token.decode('utf-8', 'surrogateescape')}"
        connector, timeout = UnixConnector(path=str(place)), ClientTimeout(total=_ANSWER_S)
        try:
            async with ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
                async with session.get(f"http://127.0.0.1{path}") as reply:
                    return msgspec.json.decode(await reply.read()) if reply.status == 200 else None
        except (ClientError, OSError, TimeoutError, msgspec.DecodeError):
            return None


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
        for part_name, times in instance.parts.items():
            _add(own.parts[part_name], times, ("expected_s", "seen_s"))
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
