"""The parent of the workers: it starts and replaces them, holds the admin listener and speaks for all.

Promise: it serves no request itself, so nothing that a client sends can end it; whatever an operator changes
is in force in every worker before the answer says so, and in every worker that is started later; whoever is
killed at any instant leaves no load behind. Evidence about an instance comes from all workers to one place
here, and how its health stands goes back to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hetlb.config import Fleet
from hetlb.core.fellows import Evidence
from hetlb.core.ledger import Cells
from hetlb.core.overview import FleetScheduler
from hetlb.core.scheduler import Scheduler
from hetlb.core.setup import SchedulerSetup
from hetlb.core.types import (
    AdminStateSet,
    Dispatch,
    EngineSample,
    InstanceChange,
    InstanceSpec,
    Lease,
    ModelsLearned,
)
from hetlb.errors import ConfigError, HetlbError, InputError
from hetlb.proxy.access import Access, EngineAccess
from hetlb.proxy.service import Service, named, require_urls
from hetlb.proxy.telemetry.counters import MODELS_MAX, Totals
from hetlb.proxy.telemetry.prometheus import WorkerState
from hetlb.workers.channel import Channel, Message
from hetlb.workers.driver import LIFE
from hetlb.workers.ledger import Memory, Onlooker
from hetlb.workers.rows import FleetRows
from hetlb.workers.totals import add, merged
from hetlb.workers.worker import Decided, LockedScraper, Report, Start

logger = logging.getLogger("hetlb.workers")

#: Places for instances in the ledger: some for those that come and go.
_LEAST_CELLS = 64
#: How long a worker may take to begin, and to do what an operator changed.
_START_S, _ANSWER_S = 60.0, 10.0
#: Who served for so long before it died is replaced at once; others later and later.
STEADY_S = 10.0
BACKOFF_S, BACKOFF_CAP_S = 0.5, 30.0
#: Health goes back to the workers after so long at most: many failures at once are one message.
_HEALTH_S = 0.005
#: After a stop workers get so long, beyond the grace of their requests, before they are killed.
_KILL_AFTER_S = 5.0


class _Worker:
    """One of the workers, whichever process it is now."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.listeners: list[socket.socket] = []
        self.process: asyncio.subprocess.Process | None = None
        self.channel: Channel | None = None
        self.up = False
        self.failure = ""
        self.restarts = 0
        self.deaths = 0
        self.life = 0
        self.started_at = 0.0
        self.ready = asyncio.Event()
        #: How much of its evidence was seen, by instance.
        self.seen: Counter[str] = Counter()
        self.report: Report | None = None
        #: What it was asked and has not answered.
        self.asked: dict[int, asyncio.Future[Any]] = {}


class Supervisor(Service):
    """The service as an operator sees it, over `number` workers."""

    scraper_kind = LockedScraper
    scraper: LockedScraper

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._workers = [_Worker(each) for each in range(number)]
        instances = max(_LEAST_CELLS, 4 * len(fleet.instances))
        self._instance_cells = instances
        self._memory = Memory(number, instances + MODELS_MAX)
        self._wakers = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(number)]
        self._last_cell = -1
        self._cells = Cells()
        self._cells.instances = self._free_cells([spec.name for spec in fleet.instances])
        self._next_cells: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._next_ask = 1
        self._lives = 0
        self._unsettled: set[asyncio.Task[None]] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._reloading = asyncio.Lock()
        self._ending = False
        self._first_look = False
        #: What workers had counted that are no more.
        self._retired = Totals()
        self._retired_lost = 0
        self._retired_invalid: Counter[str] = Counter()
        self._registered: dict[str, str | None] = {}
        super().__init__(fleet)
        self._rows = FleetRows()
        self._history = self._rows.history
        for spec in fleet.instances:
            self._know_models((spec.model,))

    def _build_scheduler(self, setup: SchedulerSetup) -> Scheduler:
        try:
            return FleetScheduler(
                setup, ledger=Onlooker(self._memory), cells=self._cells, tell=lambda evidence: None
            )
        except ValueError as error:
            raise ConfigError(f"policy.predictor: {error} (policy.trace names one)") from error

    @property
    def _fleet_scheduler(self) -> FleetScheduler:
        scheduler = self.driver.scheduler
        assert isinstance(scheduler, FleetScheduler)
        return scheduler

    # --- start-up ---

    async def start(self) -> None:
        """Start the workers, wait until all serve, then open the admin listener."""
        listen = self.fleet.listen
        with named("listen", listen.host, listen.port):
            await self._bind(listen.host, listen.port)
        await self.scraper.start(())
        self._keepers = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
        for worker in self._workers:
            try:
                async with asyncio.timeout(_START_S):
                    await worker.ready.wait()
            except TimeoutError as error:
                raise HetlbError(f"worker {worker.number} did not begin within {_START_S:.0f} s") from error
            if worker.failure:
                raise HetlbError(worker.failure)
        await self._open_admin()

    async def _bind(self, host: str, port: int) -> None:
        """A socket for every worker on every address of the host; the first one of all finds the port."""
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            with socket.socket(family, kind, protocol) as alone:
                # Whoever shares its port would let us in without a word.
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((address[0], port, *address[2:]))
            for worker in self._workers:
                one = socket.socket(family, kind, protocol)
                worker.listeners.append(one)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                one.setblocking(False)
                one.bind((address[0], port, *address[2:]))
                port = one.getsockname()[1]
        name = self._workers[0].listeners[0].getsockname()
        self.address = name[0], name[1]

    # --- one worker after the other ---

    async def _keep(self, worker: _Worker) -> None:
        """Have a process for a worker, as long as the service lasts."""
        while not self._ending:
            status = await self._live(worker)
            if self._is_ending():
                return
            if not worker.ready.is_set():
                worker.failure = worker.failure or f"worker {worker.number} ended with status {status}"
                worker.ready.set()
                return
            steady = asyncio.get_running_loop().time() - worker.started_at >= STEADY_S
            worker.deaths = 1 if steady else worker.deaths + 1
            worker.restarts += 1
            pause_s = 0.0
            if worker.deaths > 1:
                pause_s = min(BACKOFF_CAP_S, BACKOFF_S * 2.0 ** min(16, worker.deaths - 2))
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            why = f" ({worker.failure})" if worker.failure else ""
            when = f"in {pause_s:g} s, after {worker.deaths} deaths in a row" if pause_s else "at once"
            logger.error("worker %d %s%s; another takes its place %s", worker.number, how, why, when)
            await asyncio.sleep(pause_s)

    def _is_ending(self) -> bool:
        return self._ending

    async def _live(self, worker: _Worker) -> int:
        """One life of a worker: its exit status."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            settings = {
                "channel": theirs.fileno(),
                "memory": self._memory.fd,
                "wakers": self._wakers,
                "listeners": (listeners := [each.fileno() for each in worker.listeners]),
                "rows": self._memory.rows,
                "cells": self._memory.cells,
            }
            fds = (theirs.fileno(), self._memory.fd, *self._wakers, *listeners)
            worker.started_at = asyncio.get_running_loop().time()
            worker.failure = ""
            process = worker.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "hetlb.workers", json.dumps(settings),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, pass_fds=fds,
            )  # fmt: skip
        try:
            gone = asyncio.Event()
            channel = await Channel.over(ours, lambda message: self._receive(worker, message), gone.set)
            self._lives += 1
            worker.life = self._lives
            worker.seen.clear()
            channel.send("start", self._state_for(worker))
            worker.channel = channel
            status = await process.wait()
            async with asyncio.timeout(1):  # what it said last
                await gone.wait()
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                process.kill()
                status = await process.wait()
            self._buried(worker)
        return status

    def _state_for(self, worker: _Worker) -> Start:
        scheduler = self._fleet_scheduler
        specs = [each.spec for each in scheduler.instances]
        inside = tuple(spec for spec in specs if spec.name not in self._registered)
        return Start(
            worker.number,
            worker.life,
            msgspec.structs.replace(self.fleet, instances=inside),
            tuple((spec, self._registered[spec.name]) for spec in specs if spec.name in self._registered),
            self._cells,
            scheduler.policy_name,
            scheduler.saved(),
            dict(self.scraper.models),
            dict(self.scraper.versions),
            self._first_look,
        )

    def _buried(self, worker: _Worker) -> None:
        """A process of a worker is no more: take back what it had booked."""
        self._memory.wipe(worker.number)
        worker.up = False
        if worker.channel is not None:
            worker.channel.close()
            worker.channel = None
        worker.process = None
        for answer in worker.asked.values():
            if not answer.done():
                answer.set_result(None)
        worker.asked.clear()
        report, worker.report = worker.report, None
        if report is not None:
            add(self._retired, report.totals)
            self._retired_lost += report.lost_lines
            self._retired_invalid.update(report.invalid_samples)
        self._rows_told()
        for waker in self._wakers:  # what it held is free
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(waker, 1)

    # --- what workers say ---

    def _receive(self, worker: _Worker, message: Message) -> None:
        kind, *rest = message
        getattr(self, f"_from_{kind}")(worker, *rest)

    def _others(self, worker: _Worker) -> Iterable[Channel]:
        return [each.channel for each in self._workers if each is not worker and each.channel is not None]

    def _from_ready(self, worker: _Worker) -> None:
        worker.up = True
        worker.ready.set()

    def _from_failed(self, worker: _Worker, reason: str) -> None:
        worker.failure = reason

    def _from_looked(self, worker: _Worker) -> None:
        if not self._first_look:
            self._first_look = True
            self._say_what_is_missing()
        for channel in self._others(worker):
            channel.send("looked")

    def _from_evidence(self, worker: _Worker, evidence: Evidence) -> None:
        name = evidence[1]
        worker.seen[name] += 1
        driver = self.driver
        self._fleet_scheduler.take_in(driver.now())
        driver.carry_out(self._fleet_scheduler.on_evidence(evidence, driver.now()))
        if evidence[0] == "busy":
            for channel in self._others(worker):
                channel.send("evidence", evidence)
            return
        if not self._dirty:
            driver.loop.call_later(_HEALTH_S, self._spread_health)
        self._dirty.add(name)

    def _spread_health(self) -> None:
        dirty, self._dirty = self._dirty, set()
        for instance in self.driver.scheduler.instances:
            if instance.name in dirty:
                state = instance.health.saved()
                for worker in self._workers:
                    if worker.channel is not None:
                        worker.channel.send("health", instance.name, state, worker.seen[instance.name])

    def _from_fact(self, worker: _Worker, change: InstanceChange) -> None:
        self.driver.change(change)
        for channel in self._others(worker):
            channel.send("fact", change)

    def _from_models(
        self, worker: _Worker, change: ModelsLearned, entries: list[dict[str, Any]], version: str | None
    ) -> None:
        self.scraper.models[change.name] = entries
        if version is not None:
            self.scraper.versions[change.name] = version
        self._know_models(change.models)
        self.driver.change(change)
        for channel in self._others(worker):
            channel.send("models", change, entries, version)

    def _know_models(self, names: Sequence[str]) -> None:
        """Give models places in the ledger, as long as there are any."""
        models = self._cells.models
        new = [name for name in names if name and name not in models][: MODELS_MAX - len(models)]
        if new:
            cells = {name: self._instance_cells + len(models) + index for index, name in enumerate(new)}
            self._fleet_scheduler.know_models(cells)
            for worker in self._workers:
                if worker.channel is not None:
                    worker.channel.send("known", cells)

    def _from_sample(self, worker: _Worker, name: str, sample: EngineSample) -> None:
        self.driver.sample(name, sample)
        for channel in self._others(worker):
            channel.send("sample", name, sample)

    def _from_rows(self, worker: _Worker, count: int, packed: bytes) -> None:
        self._rows.told(count, packed)

    def _from_report(self, worker: _Worker, report: Report) -> None:
        worker.report = report
        self._rows_told()

    def _rows_told(self) -> None:
        reports = [each.report.until for each in self._workers if each.report is not None]
        self._rows.whole_until(min(reports, default=0.0))

    def _from_ack(self, worker: _Worker, number: int, result: Any, error: str | None) -> None:
        answer = worker.asked.pop(number, None)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(ConfigError(error))

    # --- what workers are asked ---

    async def _ask(self, worker: _Worker, what: str, *arguments: Any) -> Any:
        """What a worker answers, None if it died meanwhile. Raises `ConfigError`, `TimeoutError`."""
        if worker.channel is None:
            return None
        number = self._next_ask
        self._next_ask += 1
        answer = worker.asked[number] = asyncio.get_running_loop().create_future()
        worker.channel.send("ask", number, what, *arguments)
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        finally:
            worker.asked.pop(number, None)

    async def _ask_all(self, what: str, *arguments: Any) -> list[Any]:
        """What all answer, those that serve."""
        up = [worker for worker in self._workers if worker.up]
        answers = await asyncio.gather(
            *(self._ask(worker, what, *arguments) for worker in up), return_exceptions=True
        )
        return [each for each in answers if each is not None and not isinstance(each, BaseException)]

    def _tell_all(self, what: str, *arguments: Any) -> None:
        """Have everybody do something; `settled` waits for it. Who does not gets replaced."""

        async def tell(worker: _Worker, process: asyncio.subprocess.Process) -> None:
            try:
                await self._ask(worker, what, *arguments)
            except (HetlbError, TimeoutError) as error:
                logger.error(
                    "worker %d could not follow (%s: %s): it is replaced", worker.number, what, error
                )
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

        for worker in self._workers:
            if worker.channel is not None and worker.process is not None:
                task = asyncio.create_task(tell(worker, worker.process))
                self._unsettled.add(task)
                task.add_done_callback(self._unsettled.discard)

    async def settled(self) -> None:
        """What an operator changed is in force in all workers."""
        while self._unsettled:
            await asyncio.wait(list(self._unsettled))

    # --- what the admin surface sees ---

    @property
    def scheduler(self) -> Scheduler:
        """The fleet with the load of all workers, now."""
        scheduler = self._fleet_scheduler
        scheduler.look(self.driver.now())
        return scheduler

    @property
    def workers(self) -> Sequence[WorkerState]:
        """The processes that serve."""
        return [WorkerState(each.number, each.up, each.restarts) for each in self._workers]

    @property
    def _reports(self) -> list[Report]:
        return [worker.report for worker in self._workers if worker.report is not None]

    @property
    def totals(self) -> Totals:
        """Counters of all, those that died too."""
        return merged([self.driver.totals, self._retired, *(report.totals for report in self._reports)])

    @property
    def lost_lines(self) -> int:
        """Lines of all request logs that were dropped."""
        return self._retired_lost + sum(report.lost_lines for report in self._reports)

    @property
    def invalid_samples(self) -> Mapping[str, int]:
        """Scrapes with absurd values, by instance, whoever made them."""
        counts = Counter(self._retired_invalid)
        for report in self._reports:
            counts.update(report.invalid_samples)
        return counts

    @property
    def decisions(self) -> Sequence[Dispatch]:
        """The last dispatches, as of the last reports; without their candidates."""
        return _by_time([each for report in self._reports for each in report.decisions])

    def tokens_so_far(self, lease: Lease) -> int:
        """Output tokens of a lease, as of the last report."""
        return lease.output_tokens

    async def refresh(self) -> None:
        """Have what all workers have counted until now."""
        up = [worker for worker in self._workers if worker.up]

        async def ask(worker: _Worker) -> None:
            with contextlib.suppress(HetlbError, TimeoutError):
                report = await self._ask(worker, "report")
                if report is not None:
                    self._from_report(worker, report)

        await asyncio.gather(*(ask(worker) for worker in up))

    async def last_decisions(self, count: int) -> Sequence[Dispatch]:
        """The last dispatches of all workers, the oldest first."""
        answers = await self._ask_all("decisions", count)
        return _by_time([each for answer in answers for each in answer])[-count:]

    async def decision(self, lease: int) -> Dispatch | None:
        """The dispatch with this number, None where it is not kept any more."""
        for worker in self._workers:
            if worker.up and worker.life == lease // LIFE:
                with contextlib.suppress(TimeoutError):
                    decided: Decided | None = await self._ask(worker, "decision", lease)
                    return None if decided is None else decided.dispatch()
        return None

    @property
    def readiness(self) -> str:
        """`ready`, or why requests should go elsewhere."""
        if self.stopping_soon or self._ending:
            return "stopping"
        if not any(worker.up for worker in self._workers):
            return "no worker serves"
        return super().readiness

    # --- what an operator changes ---

    def change(self, change: InstanceChange) -> None:
        """An operator changed an instance."""
        super().change(change)
        assert isinstance(change, AdminStateSet), "expected an operator's change"
        self._tell_all("change", change)

    def set_policy(self, name: str) -> None:
        """An operator switched the policy."""
        super().set_policy(name)
        self._tell_all("policy", name)

    def _add_registered(self, spec: InstanceSpec, address: str | None) -> None:
        self._registered[spec.name] = address
        super()._add_registered(spec, address)
        self._tell_all("register", spec, address, self._cells.instances[spec.name])

    def unregister(self, name: str) -> None:
        """Remove an instance; what it is answering goes on."""
        super().unregister(name)
        self._tell_all("unregister", name)

    def _add(self, spec: InstanceSpec, access: EngineAccess) -> None:
        cells = self._next_cells if spec.name in self._next_cells else self._free_cells([spec.name])
        self._fleet_scheduler.place(spec.name, cells[spec.name])
        self._know_models((spec.model,))
        super()._add(spec, access)

    def _remove(self, name: str) -> None:
        super()._remove(name)
        self._registered.pop(name, None)
        self._cells.instances.pop(name, None)

    def _free_cells(self, names: Sequence[str]) -> dict[str, int]:
        """Places for instances that join, the ones longest unused first. Raises `ConfigError`."""
        taken = set(self._cells.instances.values())
        count = self._instance_cells
        places = ((self._last_cell + 1 + step) % count for step in range(count))
        free = (cell for cell in places if cell not in taken and not self._memory.busy(cell))
        found = dict(zip(names, free, strict=False))
        if len(found) < len(names):
            raise ConfigError(
                f"instances: expected at most {count} at a time in this run, got more; a restart takes more"
            )
        self._last_cell = max(found.values(), default=self._last_cell)
        return found

    def _on_reload_signal(self) -> None:
        async def reload() -> None:
            with contextlib.suppress(InputError):  # it was logged
                await self.reload_everywhere()

        task = asyncio.create_task(reload())
        self._unsettled.add(task)
        task.add_done_callback(self._unsettled.discard)

    async def reload_everywhere(self) -> str:
        """Read the fleet file again: whole in all workers or not at all. Raises `InputError`."""
        async with self._reloading:
            reloads = self.driver.totals.reloads
            try:
                fleet = self._read_again()
                access = require_urls(fleet)
                up = [worker for worker in self._workers if worker.up]
                for worker in up:
                    await self._ask(worker, "prepare", fleet)
                done = self._swap_everywhere(fleet, access)
            except (InputError, TimeoutError) as error:
                reloads["refused"] += 1
                logger.error("not reloaded, the last good configuration stays: %s", error)
                if isinstance(error, InputError):
                    raise
                raise ConfigError("a worker did not answer in time") from error
            reloads["done"] += 1
        unsettled = [task for task in self._unsettled if task is not asyncio.current_task()]
        if unsettled:
            await asyncio.wait(unsettled)
        logger.info("reloaded: %s", done)
        return done

    def _swap_everywhere(self, fleet: Fleet, access: Access) -> str:
        old = {each.name: each.spec for each in self.driver.scheduler.instances}
        come = [spec.name for spec in fleet.instances if old.get(spec.name) != spec]
        self._next_cells = cells = self._free_cells(come)
        try:
            done = self._swap(fleet, access)
        finally:
            self._next_cells = {}
        self._tell_all("commit", cells)
        return done

    # --- the end ---

    def _on_stop_signal(self, hurry: bool) -> None:
        super()._on_stop_signal(hurry)
        if self._hurry:
            for channel in self._channels():
                channel.send("stop", True)

    def _channels(self) -> list[Channel]:
        return [each.channel for each in self._workers if each.channel is not None]

    async def _connected(self) -> bool:
        await self.refresh()
        return any(report.connections for report in self._reports)

    def _tell_stopping(self) -> None:
        for channel in self._channels():
            channel.send("stopping")

    async def stop(self, grace_s: float) -> None:
        """Have all workers stop, let what is open end within `grace_s`, then close everything."""
        self._ending = True
        self.server.clients.stop()
        for channel in self._channels():
            channel.send("stop", grace_s <= 0.0)
        for worker in self._workers:
            for one in worker.listeners:
                one.close()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=grace_s + _KILL_AFTER_S)
        await self.close()

    async def close(self) -> None:
        """Close everything now, and leave no process."""
        self._ending = True
        for worker in self._workers:
            if worker.process is not None and worker.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()
            for one in worker.listeners:
                one.close()
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []
        await super().close()


def _by_time(decided: Iterable[Decided]) -> list[Dispatch]:
    return [
        each.dispatch()
        for each in sorted(decided, key=lambda each: (each.lease.dispatched_at, each.lease.id))
    ]
