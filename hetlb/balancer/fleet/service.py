"""`hetlb serve`, whole: start-up, the running fleet, reload, shutdown, in this order and in one file.

The listener opens only after the first round of probes (at most `FIRST_ROUND_S`); an engine that is not there
yet does not keep the others from being served; a bad file at reload changes nothing; after a stop no task,
socket or thread is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hetlb import systemd
from hetlb.balancer.clients.access import Access, EngineAccess
from hetlb.balancer.clients.front import Front, Listener
from hetlb.balancer.clients.server import ProxyServer
from hetlb.balancer.clients.token_estimator import TokenEstimator
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.core.facts import AdminStateSet, ModelsPromised
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.engines.scrape import EngineWatch
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.balancer.fleet.admin_listener import AdminListener, named
from hetlb.balancer.fleet.availability import Availability
from hetlb.balancer.fleet.reloading import needs_restart, read_again, require_urls
from hetlb.balancer.fleet.roster import Roster
from hetlb.balancer.fleet.shared_fleet import (
    OperatorChange,
    Register,
    ReloadFile,
    SetPolicy,
    SetState,
)
from hetlb.balancer.telemetry.counters import Totals
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.balancer.telemetry.recent import Recent
from hetlb.build import version_line
from hetlb.errors import ConfigError, HetlbError, InputError
from hetlb.inputs.mistakes import short
from hetlb.inputs.urls import bracketed
from hetlb.logs import plain_line
from hetlb.systemd import NO_LISTENERS, Listeners
from hetlb.tasks import ended
from hetlb.watched_files import SeenFiles

if TYPE_CHECKING:
    from hetlb.balancer.config.fleet_tables import KvEventsTable
    from hetlb.balancer.core.instance import Instance
    from hetlb.balancer.engines.host_times import HostTimes
    from hetlb.balancer.fleet.shared_fleet import SharedFleet, SleepWatch
    from hetlb.balancer.fleet.source import Source, Sources
    from hetlb.balancer.option_record import (
        CacheReports,
        Options,
        Predecessor,
        SchedulerLog,
        Successor,
    )

logger = logging.getLogger("hetlb.proxy")

FIRST_ROUND_S = 1.0
#: Excess of new containers over gone ones after which the garbage collector looks.
_GARBAGE_CONTAINERS = 20_000
#: Seconds between SIGTERM, when readiness says no, and the end of the listener: balancers notice meanwhile.
READINESS_LAG_S = 5.0
#: Longest wait at the start for what peers have at the engines, in seconds.
CATCH_UP_S = 0.3
#: Longest wait for what a process that is replaced has there, in seconds.
REPLACED_S = 30.0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One of several processes that serve: whether it does now, and how often it had to be started again."""

    number: str
    up: bool
    restarts: int
    #: Times it was killed because it no longer answered.
    hangs: int = 0


class FleetService(ABC):
    """A fleet and its scheduler, for the listener, the admin surface, the dashboard and `/metrics`."""

    driver: Driver
    #: The exchange with other schedulers of the fleet (`shared_fleet.py`), None if it is alone.
    sharing: SharedFleet | None = None
    #: Folder of the hub of that exchange, where this process and others made one for themselves.
    view_folder: Path | None = None
    #: Sleep and wake of instances, None before one has `wake`.
    _sleep: SleepWatch | None = None
    #: The processes that serve, where there are several.
    workers: Sequence[WorkerState] = ()
    #: Number of its first lease.
    first_lease = 1

    def __init__(self, fleet: Fleet, options: Options, event_log: Path | None = None) -> None:
        self.fleet = fleet
        self.options = options
        self.access = require_urls(fleet)
        #: Keys and certificates by instance; the driver and the watcher look here.
        self._engines: dict[str, EngineAccess] = dict(self.access.engines)
        self.admin = AdminListener(self.access.admin_tls)
        self._seen = SeenFiles(fleet.named_files)
        #: The file as it was at the start, to compare the keys that cannot be reloaded.
        self._started = fleet.written
        self._event_log: SchedulerLog | None = None if event_log is None else options.event_log(event_log)
        #: Clock, seconds.
        self.now = asyncio.get_running_loop().time
        setup = SchedulerSetup(
            specs=fleet.instances,
            policy=fleet.file.policy.name,
            params=fleet.policy_params,
            limits=fleet.queue_limits,
            predictor=fleet.file.policy.predictor or "online",
            seed=fleet.file.policy.seed,
            lengths=fleet.lengths,
            health=fleet.health_params,
            now=self.now(),
            first_lease=self.first_lease,
        )
        try:
            if self._event_log is None:
                self.scheduler = Scheduler(setup, splitting=options.splitting)
            else:
                self.scheduler = self._event_log.scheduler(setup, options.splitting)
        except ValueError as error:
            raise ConfigError(f"policy.predictor: {error} (policy.trace names one)") from error
        self.scheduling = scheduling = self._drive()
        if self._event_log is not None:
            self._event_log.on_lost = self.driver.log_lost
        scheduling.probe_timeout_s = fleet.file.scrape.timeout_s
        scheduling.limiters.configure(self.access.limits)
        self.watch = EngineWatch(fleet.file.scrape, scheduling, self._engines)
        #: Readiness of the fleet, and its models.
        self.availability = Availability(self.scheduler, self.watch)
        self.roster = Roster(fleet, self.access, self._engines, scheduling, self.watch)
        scheduling.take_out = self.roster.change
        scheduling.change(ModelsPromised(fleet.promised_models, fleet.aliases))
        self._host_times: HostTimes | None = None
        self.watch.on_idle = self._measure
        #: Reads engines' own KV events, None while none publishes any.
        self._kv_events: CacheReports | None = None
        self.roster.on_gone = lambda name: self._follow(name, None)
        self._sources: Sources | None = None
        self._reloading = asyncio.Lock()
        #: Reason why the last read of the fleet file was refused, "" if it was not.
        self.reload_refused = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Waits for a process that takes this one's place; what this one took over from another.
        self.offer: Successor | None = None
        self._takeover: Predecessor | None = None
        self.addresses: list[tuple[str, int]] = []

    @property
    def address(self) -> tuple[str, int]:
        """The first address of clients."""
        return self.addresses[0] if self.addresses else ("", 0)

    @abstractmethod
    def _drive(self) -> SchedulerDriver:
        """Make the driver of the scheduler, and the executor of its commands."""

    # --- start-up ---

    async def _first_look(self, most_s: float = FIRST_ROUND_S) -> None:
        if self.fleet.file.watch and self.fleet.path is not None:
            self.do(self._watch_files())
        if sources := self._discovery_sources():
            from hetlb.balancer.fleet.source import Sources

            self._sources = found = Sources(sources, self.roster.members.found)
            await found.start(most_s)
            await self.roster.members.settled()
        await self.watch.start(self.fleet.profiles, most_s)

    def _measure(self, instance: Instance) -> None:
        """Measure an idle instance: its host time if its profile assumes one, its speed if it is slow."""
        if instance.spec.host_assumed_in or instance.speed.in_doubt:
            if self._host_times is None:
                from hetlb.balancer.engines.host_times import HostTimes

                self._host_times = HostTimes(self.watch, self.roster.change, self.scheduler.fleet)
            if (work := self._host_times.due(instance)) is not None:
                self.do(work)

    def _discovery_sources(self) -> Sequence[Source]:
        """Return sources of instances that stand in no file of the fleet. Raises `ConfigError`."""
        fleet, table = self.fleet, self.fleet.file.discovery
        return () if table is None else self.options.sources(fleet, table)

    async def _watch_files(self) -> None:
        table = self.fleet.file.discovery
        async for _ in self._seen.changes(1.0 if table is None else table.poll_s):
            await self._reload_by_signal()

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @abstractmethod
    async def _reload_by_signal(self) -> None:
        """Read the fleet file again and log the result."""

    def share_sleep(self, folder: Path | None) -> None:
        """Let the processes that use `folder` share sleep and wake of instances; None: no process does.

        Nothing is shared unless an instance may sleep.
        """
        if self._sleep is not None and folder is not None and self.sharing is not None:
            self.sharing.share_sleep(self._sleep, folder)
        elif self._sleep is not None:
            self._sleep.share(None, lambda: None)

    # --- for the admin surface ---

    @property
    @abstractmethod
    def totals(self) -> Totals:
        """Counters of all processes."""

    @property
    def recent(self) -> Recent:
        return self.totals.recent

    @property
    def tells(self) -> bool:
        """True if this process logs the causes: one of several does for all."""
        return True

    @property
    def lost_lines(self) -> int:
        return 0 if self._event_log is None else self._event_log.lost

    @property
    def waiting_elsewhere(self) -> tuple[dict[str, int], int]:
        """Requests that wait in other processes of this proxy, by model, and their bytes."""
        return {}, 0

    async def elsewhere(self, path: str) -> list[Any]:
        """Return the JSON documents of other processes of this proxy at a path of the admin listener."""
        return []

    async def operate(self, change: OperatorChange) -> Any:
        """Make a change of an operator, here and at all peers; return its result. Raises `InputError`."""
        done = await self.make(change)
        if self.sharing is not None:
            for failure in await self.sharing.spread(change):
                tell(logger, Event.SHARED_CHANGE, "a change is not in force everywhere: %s", failure)
        return done

    async def make(self, change: OperatorChange) -> Any:
        """Make a change of an operator here; return its result. Raises `InputError`."""
        if isinstance(change, SetPolicy):
            if change.name not in POLICIES:
                raise ConfigError(f"name: expected one of {', '.join(POLICIES)}, got {short(change.name)}")
            return self.set_policy(change.name)
        if isinstance(change, SetState):
            return self.roster.change(AdminStateSet(change.instance, change.state, change.deadline_s))
        if isinstance(change, ReloadFile):
            return await self.reload()
        if not self.fleet.file.admin.registration:
            raise ConfigError("admin.registration is false")
        if isinstance(change, Register):
            return await self.roster.members.register(msgspec.json.decode(change.table, type=dict[str, Any]))
        return self.roster.leave([change.instance])

    def set_policy(self, name: str) -> None:
        self.scheduling.set_policy(name)
        tell(logger, Event.POLICY, "the policy is %s", name, policy=name)

    async def reload(self) -> str:
        """Read the fleet file again, whole or not at all; return the changes. Raises `InputError`."""
        async with self._reloading:
            reloads = self.scheduling.driver.counted.reloads
            await asyncio.to_thread(self._seen.before_reading)
            try:
                fleet = await asyncio.to_thread(read_again, self.fleet)
                access = await asyncio.to_thread(require_urls, fleet)
            except InputError as error:
                reloads["refused"] += 1
                self.reload_refused = str(error)
                text = "not reloaded, the last good configuration stays: %s"
                tell(logger, Event.RELOAD_REFUSED, text, error)
                raise
            await asyncio.to_thread(self._seen.after_reading, fleet.named_files)
            self._spread(fleet)
            if self.sharing is not None:
                self.sharing.reloaded(self.fleet, fleet)
            done = await self._swap(fleet, access)
            reloads["done"] += 1
            self.reload_refused = ""
        tell(logger, Event.RELOADED, "reloaded: %s", done)
        return done

    def _spread(self, fleet: Fleet) -> None:
        """Give other processes a fleet that is about to be in force."""

    async def _swap(self, fleet: Fleet, access: Access) -> str:
        """Serve another fleet from now on; unchanged instances keep their load. Return the changes."""
        running, self.fleet, self.access = self.fleet, fleet, access
        done = await self.roster.replace(fleet, access)
        self.roster.change(ModelsPromised(fleet.promised_models, fleet.aliases))
        self._configure(fleet, access)
        if access.admin_tls is not None:
            self.admin.tls = access.admin_tls
        if any(access.tls) or access.admin_tls is not None:
            tell(logger, Event.CERTIFICATE, "certificates were read again")
        # A flag or an operator may have chosen another policy: only an edit of the file overrides that.
        if fleet.written.policy.name != running.written.policy.name:
            self.scheduling.set_policy(fleet.written.policy.name)
        self.roster.refresh()
        self._read_kv_events(fleet)
        done += f", policy {self.scheduler.placement.policy_name}"
        fixed = needs_restart(self._started, fleet.written)
        return f"{done}; only a restart changes {', '.join(fixed)}" if fixed else done

    def _read_kv_events(self, fleet: Fleet) -> None:
        for name, listed in fleet.listed.items():
            self._follow(name, listed.table.publisher)

    def _follow(self, name: str, publisher: KvEventsTable | None) -> None:
        """Read the KV events of an instance from here on, None: no more."""
        if publisher is not None and self._kv_events is None:
            self._kv_events = self.options.cache_reports(self.scheduling.kv_events)
        if self._kv_events is not None:
            self._kv_events.set(name, publisher)

    @abstractmethod
    def _configure(self, fleet: Fleet, access: Access) -> None:
        """Apply new limits, keys and certificates where clients are served."""

    async def _open_admin(self, listeners: Sequence[socket.socket]) -> None:
        """Open the admin listener."""
        from hetlb.balancer.admin.admin import make_app

        await self.admin.listen(make_app(self), self.fleet.file.admin, listeners)

    # --- another process in this one's place ---

    @property
    @abstractmethod
    def _descriptors(self) -> Sequence[int]:
        """Sockets of the listener for clients."""

    def open_sockets(self) -> tuple[Sequence[int], Sequence[int]]:
        return self._descriptors, self.admin.descriptors

    @abstractmethod
    def leave(self) -> None:
        """End the open requests here: another process accepts now."""

    # --- shutdown ---

    async def close(self) -> None:
        if self.offer is not None:
            await self.offer.close()
        if self._takeover is not None:
            self._takeover.close()
        await ended(*self._tasks)
        if self.sharing is not None:
            await self.sharing.close()
        self.roster.close()
        if self._sources is not None:
            await self._sources.close()
        if self._kv_events is not None:
            await self._kv_events.close()
        await self.watch.close()
        await self.admin.close()
        if self._event_log is not None:
            self._event_log.close()


class Service(FleetService):
    """A process that serves a fleet alone."""

    _front: Front

    def __init__(self, fleet: Fleet, options: Options, event_log: Path | None = None) -> None:
        super().__init__(fleet, options, event_log)
        self._stop = asyncio.Event()
        self._hurry = False
        #: Called when it is to stop at once: the owner of the process sees to it that the process ends.
        self.on_hurry: Callable[[], object] = lambda: None
        self.driver.pools.on_reconnect = self.watch.reconnected
        self.scheduling.look_up = self.watch.look_up_models
        self.server: Listener = self._make_server()
        self._front = Front(self.driver, self.server, fleet, self.access, self.options)
        #: True if another process accepts in place of this one.
        self.replaced = False

    def _drive(self) -> SchedulerDriver:
        fleet = self.fleet
        estimator = TokenEstimator(fleet.token_counters)
        loop = asyncio.get_running_loop()
        driver = self.driver = Driver(fleet.file.proxy, estimator, loop, self._engines, self.options.splits)
        return driver.drive(self.scheduler)

    def _make_server(self) -> Listener:
        return ProxyServer(self.driver, self.availability, self.options)

    async def start(self, listeners: Listeners = NO_LISTENERS, takeover: Predecessor | None = None) -> None:
        """Probe, then listen, on given `listeners` or the ones of `takeover`. Raises `HetlbError`."""
        if takeover is not None:
            self._takeover, listeners = takeover, takeover.listeners
        self._open_log()
        self._read_kv_events(self.fleet)
        if self.sharing is not None:
            self.sharing.start()
        await self._first_look()
        if self.sharing is not None:  # an instance of a source was not there to book a peer's lease on
            replaces = takeover is not None and takeover.folder is not None
            most_s, least = (REPLACED_S, 1) if replaces else (CATCH_UP_S, 0)
            if not await self.sharing.caught_up(most_s, least):
                text = "--replace: the running process ended, or fell silent, before it handed over"
                raise HetlbError(text)
        file = self.fleet.file
        addresses, keys = file.addresses, file.address_keys
        self._watch_sleep(self.fleet)
        given = listeners.at([(each.host, each.port) for each in addresses])
        for number, (listen, sockets) in enumerate(zip(addresses, given, strict=True)):
            with named(keys[number], listen.host, listen.port):
                self.addresses.append(
                    await self.server.start(listen.host, listen.port, sockets, number=number)
                )
        await self._open_admin(listeners.admin)
        if takeover is not None:
            await takeover.accepting()
            tell(logger, Event.HANDOVER, "the listeners came from the process that is replaced")
        if self.offer is not None:
            self.offer.open(self.address)

    def _open_log(self) -> None:
        self._front.open_log()

    def _watch_sleep(self, fleet: Fleet) -> None:
        """Let instances sleep that have the key `wake` in the file."""
        tables = {name: each.table.wake for name, each in fleet.listed.items() if each.table.wake is not None}
        if tables and self._sleep is None:
            self._sleep = self.options.sleep_watch(self.scheduler, self.scheduling.change, self.driver.pools)
            self.share_sleep(self.view_folder)
            self._sleep.start()
        if self._sleep is not None:
            self._sleep.configure(tables)

    @property
    def ready_line(self) -> str:
        return ready_line(self.addresses, self.server.certificates, self.admin.address, self.admin.tls)

    # --- running ---

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until told to stop by a signal; `ready` is called once signals are handled."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_stop_signal, False)
        loop.add_signal_handler(signal.SIGINT, self._on_stop_signal, True)
        loop.add_signal_handler(signal.SIGHUP, lambda: self.do(self._reload_by_signal()))
        try:
            if ready is not None:
                ready()
            await self._stop.wait()
            systemd.notify("STOPPING=1")
            if self.replaced:
                await self.admin.close()
            if not self._hurry and self.server.connections:
                # Balancers notice; a client of a process that is replaced gets one more answer.
                self.availability.stopping = not self.replaced
                with contextlib.suppress(TimeoutError):
                    self._stop.clear()
                    async with asyncio.timeout(READINESS_LAG_S):
                        await self._stop.wait()
            await self.stop(0.0 if self._hurry else self.fleet.file.proxy.shutdown_grace_s)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)  # from here on a signal ends the process at once

    @property
    def _descriptors(self) -> Sequence[int]:
        return self.server.descriptors

    def leave(self) -> None:
        if self.replaced:
            return
        self.replaced = True
        if self._sleep is not None:
            self.do(self._sleep.close())
        self.server.leave()
        tell(logger, Event.HANDOVER, "another process accepts: what is open here ends")
        self._stop.set()

    def _on_stop_signal(self, hurry: bool) -> None:
        # A second signal, or SIGINT, ends at once.
        hurried = self._hurry
        self._hurry = hurried or hurry or self._stop.is_set() or self.availability.stopping
        tell(
            logger,
            Event.STOPPING,
            "stopping%s",
            " at once" if self._hurry else " once open requests have ended",
        )
        self._stop.set()
        if self._hurry:
            if not hurried:
                self.on_hurry()
            self.driver.shut_down()

    async def _reload_by_signal(self) -> None:
        systemd.reloading_begins()
        with contextlib.suppress(InputError):  # it was logged
            await self.reload()
        systemd.notify("READY=1")

    # --- for the admin surface ---

    @property
    def lost_lines(self) -> int:
        return super().lost_lines + self._front.lost_lines

    @property
    def totals(self) -> Totals:
        return self.driver.totals

    def _configure(self, fleet: Fleet, access: Access) -> None:
        self._front.configure(fleet, access)
        self.scheduling.limiters.configure(access.limits)
        self._watch_sleep(fleet)

    # --- shutdown ---

    async def stop(self, grace_s: float) -> None:
        self.availability.stopping = True
        await self._front.stop(grace_s)
        tell(logger, Event.STOPPED, "every request has ended")
        await self.close()

    async def close(self) -> None:
        if self._sleep is not None:
            await self._sleep.close()
        await super().close()
        await self._front.close()


def tune_gc() -> None:
    """Run the garbage collector rarely: requests leave hardly any reference cycles behind."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_CONTAINERS, 10, 10)


def ready_line(
    addresses: Sequence[tuple[str, int]],
    tls: Sequence[object | None],
    admin_address: tuple[str, int],
    admin_tls: object | None,
) -> str:
    """Return the line of a proxy that accepts requests; the certificates are None without TLS."""
    urls = ", ".join([_url(*each) for each in zip(addresses, tls, strict=True)])
    return f"hetlb ready on {urls} (admin {_url(admin_address, admin_tls)})"


def announce(line: str, style: str) -> None:
    """Say that requests are accepted: on stdout, to systemd and in the log."""
    print(plain_line(line, style, Event.STARTED.event), flush=True)
    systemd.notify("READY=1", f"MAINPID={os.getpid()}", f"STATUS={line}")
    tell(logger, Event.STARTED, "%s", version_line())


def _url(address: tuple[str, int], tls: object | None) -> str:
    host, port = address
    return f"{'http' if tls is None else 'https'}://{bracketed(host)}:{port}"
