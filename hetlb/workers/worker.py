"""One of several processes that serve: a service of its own whose scheduler shares the ledger.

Promise: it listens on the sockets it was given, decides by the load of all, tells the supervisor what it
sees and does what that says; it outlives the supervisor by no more than the requests it has. Whoever holds
the lock on the ledger's file watches the engines for all: the kernel gives it up with the process, and
another takes it within `LOCK_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import fcntl
import json
import logging
import os
import select
import signal
import socket
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import uvloop

from hetlb.config import Fleet
from hetlb.core.fellows import Evidence, SharedScheduler
from hetlb.core.ledger import Cells
from hetlb.core.scheduler import Scheduler
from hetlb.core.setup import SchedulerSetup
from hetlb.core.types import (
    Candidate,
    Dispatch,
    EngineSample,
    InstanceChange,
    InstanceSpec,
    Lease,
    ModelsLearned,
)
from hetlb.errors import ConfigError, HetlbError
from hetlb.proxy.access import Access
from hetlb.proxy.dashboard.decisions import find
from hetlb.proxy.scrape import Scraper, Target
from hetlb.proxy.service import FIRST_ROUND_S, Service, require_urls, spare_collector
from hetlb.proxy.telemetry.counters import Totals
from hetlb.proxy.telemetry.history import History
from hetlb.proxy.telemetry.log_writer import LogWriter, logging_to_stderr
from hetlb.workers import rows
from hetlb.workers.channel import Channel, Message
from hetlb.workers.driver import SharedDriver
from hetlb.workers.ledger import Memory, Row

logger = logging.getLogger("hetlb.workers")

#: How often the lock is tried by those who do not have it.
LOCK_S = 0.5
#: How often counters and ended requests are told to the supervisor.
REPORT_S = 0.5
#: Ended requests kept until they are told.
_ROWS_KEPT = 20_000
#: Rows in one message: a buffer of a megabyte would be fresh zeroed memory every time, five times over.
_ROWS_TOLD: Final = 500
#: Decisions told with every report: what the dashboard lists.
DECISIONS_TOLD = 25


@dataclass(frozen=True, slots=True)
class Start:
    """What a worker begins with: the fleet as it is now, and what is known of it.

    `registered` are instances that stand in no file, each with the address it is reached at; `life` counts
    the workers started so far.
    """

    number: int
    life: int
    fleet: Fleet
    registered: tuple[tuple[InstanceSpec, str | None], ...]
    cells: Cells
    policy: str
    states: Mapping[str, Mapping[str, Any]]
    entries: Mapping[str, list[dict[str, Any]]]
    versions: Mapping[str, str]
    looked: bool


@dataclass(frozen=True, slots=True)
class Decided:
    """A dispatch on its way to the supervisor."""

    request_id: int
    lease: Lease
    reason: str
    candidates: tuple[Candidate, ...] = ()

    def dispatch(self) -> Dispatch:
        """The dispatch again."""
        return Dispatch(self.request_id, self.lease, self.reason, lambda: self.candidates)


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker has counted. The rows of all requests that ended until `until` (s) were sent before."""

    until: float
    totals: Totals
    decisions: list[Decided]
    lost_lines: int
    invalid_samples: dict[str, int]
    connections: int


class LockedScraper(Scraper):
    """A watcher that knows its targets and watches them only while it is `active`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._targets: dict[str, Target] = {}
        self.active = False

    async def start(self, targets: Iterable[Target], first_round_s: float = 1.0) -> None:
        """Get ready to watch."""
        await super().start(())
        for target in targets:
            self.add(target)

    async def activate(self, first_round_s: float) -> None:
        """Watch from now on; returns after the first round."""
        self.active = True
        for target in self._targets.values():
            super().add(target)
        rounds = [asyncio.create_task(event.wait()) for event in self._first_rounds.values()]
        if rounds:
            _, pending = await asyncio.wait(rounds, timeout=first_round_s)
            for task in pending:
                task.cancel()

    def add(self, target: Target) -> None:
        """One more server."""
        self._targets[target.name] = target
        if self.active:
            super().add(target)

    def watches(self, name: str) -> bool:
        """Whether a server is being watched, or would be."""
        return name in self._targets

    def pause(self, name: str) -> None:
        """Stop watching a server for now."""
        self._targets.pop(name, None)
        super().pause(name)


class WorkerService(Service):
    """The service of one worker."""

    driver_kind = SharedDriver
    scraper_kind = LockedScraper
    driver: SharedDriver
    scraper: LockedScraper

    def __init__(
        self, start: Start, channel: Channel, memory: Memory, wakers: Sequence[int], listeners: Sequence[int]
    ) -> None:
        self._start = start
        self._channel = channel
        self._memory = memory
        self._wakers = wakers
        self._listeners = [socket.socket(fileno=fd) for fd in listeners]
        self._row = Row(memory, start.number, lambda fellow: os.eventfd_write(wakers[fellow], 1))
        self._sent: Counter[str] = Counter()
        self._looked = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._prepared: tuple[Fleet, Access] | None = None
        self._told_rows = 0
        super().__init__(start.fleet)
        self._history = History(_ROWS_KEPT)
        self.driver.row = self._row
        self.driver.begin_life(start.life)
        self._catch_up()

    def _build_scheduler(self, setup: SchedulerSetup) -> Scheduler:
        # Draws of several workers with one seed would be the same.
        setup = dataclasses.replace(setup, seed=setup.seed + self._start.number)
        try:
            return SharedScheduler(setup, ledger=self._row, cells=self._start.cells, tell=self._tell_evidence)
        except ValueError as error:
            raise ConfigError(f"policy.predictor: {error} (policy.trace names one)") from error

    def _catch_up(self) -> None:
        """Know what the others know."""
        start, driver = self._start, self.driver
        for spec, address in start.registered:
            self._add_registered(spec, address)
        if start.policy != driver.scheduler.policy_name:
            driver.set_policy(start.policy)
        now = driver.now()
        for name, state in start.states.items():
            driver.shared.restore(name, state, now)
        self.scraper.models.update(start.entries)
        self.scraper.versions.update(start.versions)
        if start.looked:
            self._looked.set()

    # --- start-up ---

    async def start(self) -> None:
        """Listen once the engines were looked at, by this worker or another."""
        self._open_log()
        instances = self.driver.scheduler.instances
        await self.scraper.start(
            Target(each.name, each.spec.url) for each in instances if each.admin.value != "maint"
        )
        loop = asyncio.get_running_loop()
        loop.add_reader(self._wakers[self._start.number], self._on_waker)
        self._tasks = [asyncio.create_task(self._hold_lock()), asyncio.create_task(self._report_often())]
        await self._looked.wait()
        if self._stop.is_set():
            return
        self.address = await self.server.start("", 0, self._listeners)
        self._channel.send("ready")

    def _open_log(self) -> None:
        if self.fleet.proxy.request_log:
            fd = sys.stderr.fileno()
            whole = stat.S_ISREG(os.fstat(fd).st_mode)  # a file takes a batch in one piece, a pipe does not
            self._lines = LogWriter(fd, "request log", at_once=None if whole else select.PIPE_BUF)

    def _on_waker(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakers[self._start.number])
            self.driver.woken()

    async def _hold_lock(self) -> None:
        """Watch the engines for all as soon as nobody else does."""
        while True:
            try:
                fcntl.lockf(self._memory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            except OSError:
                await asyncio.sleep(LOCK_S)
                continue
            await self.scraper.activate(FIRST_ROUND_S)
            self._looked.set()
            self._channel.send("looked")
            return

    async def _report_often(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._channel.send("report", self._report())

    def _report(self) -> Report:
        """What is told now; the rows go ahead of it."""
        until = self.driver.now()
        history = self.history
        ended = history.rows_since(self._told_rows)
        self._told_rows = history.added
        for start in range(0, len(ended), _ROWS_TOLD):
            some = ended[start : start + _ROWS_TOLD]
            self._channel.send("rows", len(some), rows.pack(some))
        return Report(
            until,
            self.totals,
            [self._decided(each) for each in list(self.driver.decisions)[-DECISIONS_TOLD:]],
            self.lost_lines,
            dict(self.invalid_samples),
            len(self.server.connections),
        )

    def _decided(self, dispatch: Dispatch, *, whole: bool = False) -> Decided:
        lease = dispatch.lease
        if not lease.ended:
            tokens = self.tokens_so_far(lease)
            lease = copy.copy(lease)
            lease.output_tokens = tokens
        return Decided(
            dispatch.request_id, lease, dispatch.reason, tuple(dispatch.candidates) if whole else ()
        )

    # --- what the others are told ---

    def _tell_evidence(self, evidence: Evidence) -> None:
        self._sent[evidence[1]] += 1
        self._channel.send("evidence", evidence)

    def _watched(self, change: InstanceChange) -> None:
        super()._watched(change)
        if isinstance(change, ModelsLearned):
            name = change.name
            self._channel.send(
                "models", change, self.scraper.models.get(name, []), self.scraper.versions.get(name)
            )
        elif type(change).__name__ != "Probed":  # a probe is evidence
            self._channel.send("fact", change)

    def _sampled(self, name: str, sample: EngineSample) -> None:
        super()._sampled(name, sample)
        self._channel.send("sample", name, sample)

    # --- what the supervisor says ---

    def receive(self, message: Message) -> None:
        """Do what a message says."""
        kind, *rest = message
        if kind == "ask":
            number, what, *arguments = rest
            try:
                result, error = getattr(self, f"_do_{what}")(*arguments), None
            except HetlbError as caught:
                result, error = None, str(caught)
            self._channel.send("ack", number, result, error)
        else:
            getattr(self, f"_on_{kind}")(*rest)

    def _on_health(self, name: str, state: Mapping[str, Any], seen: int) -> None:
        if seen == self._sent[name]:  # else there is more to come, which has seen what we saw
            driver = self.driver
            driver.carry_out(driver.shared.adopt_health(name, state, driver.now()))

    def _on_evidence(self, evidence: Evidence) -> None:
        driver = self.driver
        driver.carry_out(driver.shared.on_evidence(evidence, driver.now()))

    def _on_known(self, cells: Mapping[str, int]) -> None:
        self.driver.shared.know_models(cells)

    def _on_fact(self, change: InstanceChange) -> None:
        self.driver.change(change)

    def _on_models(self, change: ModelsLearned, entries: list[dict[str, Any]], version: str | None) -> None:
        self.scraper.models[change.name] = entries
        if version is not None:
            self.scraper.versions[change.name] = version
        self.driver.change(change)

    def _on_sample(self, name: str, sample: EngineSample) -> None:
        self.driver.sample(name, sample)

    def _on_looked(self) -> None:
        self._looked.set()

    def _on_stopping(self) -> None:
        self.stopping_soon = True

    def _on_stop(self, hurry: bool) -> None:
        if hurry:
            self._on_stop_signal(True)
        self._stop.set()

    def _do_change(self, change: InstanceChange) -> None:
        self.change(change)

    def _do_policy(self, name: str) -> None:
        self.set_policy(name)

    def _do_register(self, spec: InstanceSpec, address: str | None, cell: int) -> None:
        self.driver.shared.place(spec.name, cell)
        self._add_registered(spec, address)

    def _do_unregister(self, name: str) -> None:
        self.unregister(name)

    def _do_prepare(self, fleet: Fleet) -> None:
        self._prepared = fleet, require_urls(fleet)

    def _do_commit(self, cells: Mapping[str, int]) -> None:
        if self._prepared is None:
            raise ConfigError("reload: expected a fleet that was looked at before")
        prepared, self._prepared = self._prepared, None
        for name, cell in cells.items():
            self.driver.shared.place(name, cell)
        self._swap(*prepared)

    def _do_report(self) -> Report:
        return self._report()

    def _do_decisions(self, count: int) -> list[Decided]:
        return [self._decided(each, whole=True) for each in list(self.driver.decisions)[-count:]]

    def _do_decision(self, lease: int) -> Decided | None:
        dispatch = find(self.driver.decisions, lease)
        return None if dispatch is None else self._decided(dispatch, whole=True)

    # --- the end ---

    async def run(self) -> None:
        """Serve until told to stop, by the supervisor, by its end, or by SIGTERM."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop.set)
        await self._stop.wait()
        self._looked.set()  # who is told to stop while it begins does not wait for a look at the engines
        await self.stop(0.0 if self._hurry else self.fleet.proxy.shutdown_grace_s)

    def left_alone(self) -> None:
        """The supervisor is gone: nobody would watch over us."""
        self._stop.set()

    async def close(self) -> None:
        """Close everything, the last report included."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await super().close()
        self._channel.send("report", self._report())


async def _work(settings: dict[str, Any]) -> int:
    loop = asyncio.get_running_loop()
    began: asyncio.Future[Start] = loop.create_future()
    service: WorkerService | None = None
    early: list[Message] = []
    alone = False

    def on_message(message: Message) -> None:
        if message[0] == "start":
            began.set_result(message[1])
        elif service is None:
            early.append(message)
        else:
            service.receive(message)

    def on_closed() -> None:
        nonlocal alone
        alone = True
        if service is not None:
            service.left_alone()
        elif not began.done():
            began.cancel()

    channel = await Channel.over(socket.socket(fileno=settings["channel"]), on_message, on_closed)
    memory = Memory(settings["rows"], settings["cells"], settings["memory"])
    start = await began
    try:
        service = WorkerService(start, channel, memory, settings["wakers"], settings["listeners"])
        for message in early:
            service.receive(message)
        if alone:  # the supervisor was gone before we had read what it sent
            service.left_alone()
        try:
            serving = asyncio.create_task(service.run())
            await service.start()
            spare_collector()
            await serving
        finally:
            await service.close()
    except (HetlbError, OSError) as error:
        channel.send("failed", str(error))
        await channel.flush()
        return 1
    await channel.flush()
    return 0


def main() -> int:
    """Work as the supervisor's settings (one JSON argument) say."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the supervisor's business
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with contextlib.suppress(asyncio.CancelledError), logging_to_stderr():
        return uvloop.run(_work(json.loads(sys.argv[1])))
    return 1
