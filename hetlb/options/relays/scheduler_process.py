"""The scheduler process of several: a `FleetService` whose driver speaks with relays.

What a successor begins with (`ChildState`) is with the supervisor before it is in force here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import pickle
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from hetlb.balancer.clients.access import Access
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.core.types import AdminState, AdminStateSet
from hetlb.balancer.engines.scrape import models_learned
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.balancer.fleet.service import FIRST_ROUND_S, FleetService, tune_gc
from hetlb.balancer.option_record import Options, Predecessor
from hetlb.balancer.telemetry.counters import Totals
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.balancer.telemetry.recent import Recent
from hetlb.errors import InputError
from hetlb.options.message_channel import MessageChannel
from hetlb.options.relays.control import ChildControl, ChildState, Packet
from hetlb.options.relays.protocol import (
    FROM_RELAY,
    FromRelay,
    InstanceAddress,
    Reload,
    ViewMessage,
)
from hetlb.options.relays.relay_host import RelayHost, RelayLink
from hetlb.output_files import opened_log
from hetlb.systemd import NO_LISTENERS, Listeners

logger = logging.getLogger("hetlb.workers")

#: Seconds in which several changes are one message for the relays.
_VIEW_S: Final = 0.01
#: Longest first round of probes of a successor, in seconds: requests are waiting.
_NEXT_ROUND_S: Final = 0.2


class SchedulerProcess(FleetService):
    """`life` counts the scheduler processes; the first one is 1."""

    driver: RelayHost

    def __init__(
        self, state: ChildState, life: int, control: ChildControl, options: Options, event_log: Path | None
    ) -> None:
        if event_log is not None and life > 1:
            event_log = _next_log(event_log, life)
        super().__init__(state.fleet, options, event_log)
        self._life = life
        self._control = control
        self._loop = asyncio.get_running_loop()
        self.driver.on_models = self.watch.reconnected
        self.roster.on_edited = self._save
        self.driver.reload = Reload(state.generation, pickle.dumps(state.fleet))
        self._state = dataclasses.replace(state, admin=dict(state.admin))
        self._view: ViewMessage | None = None
        self._view_timer: asyncio.TimerHandle | None = None
        self._looked = False
        self._waiting: list[tuple[RelayLink, socket.socket]] = []
        self._stop = asyncio.Event()
        self._alone = False
        self._listeners = NO_LISTENERS
        self._catch_up(state)

    def _drive(self) -> SchedulerDriver:
        self.driver = RelayHost(self.scheduler, asyncio.get_running_loop(), self._view_changed)
        return self.driver.scheduling

    def _catch_up(self, state: ChildState) -> None:
        """Take over the state of the scheduler process before this one."""
        scheduling, watch = self.scheduling, self.watch
        for spec, address in state.registered:
            self.roster.adopt(spec, address)
        for name, admin in state.admin.items():
            scheduling.change(AdminStateSet(name, AdminState(admin)))
        if state.policy is not None and state.policy != self.scheduler.placement.policy_name:
            scheduling.set_policy(state.policy)
        watch.versions.update(state.versions)
        for name, entries in state.entries.items():
            watch.models[name] = entries
            scheduling.change(models_learned(name, entries))

    # --- life ---

    async def run(self, listeners: Listeners, takeover: Predecessor | None = None) -> None:
        """Serve relays until told to stop; `listeners.main` are kept for a process that replaces this one."""
        self._listeners, self._takeover = listeners, takeover
        self._loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        self._control.listen(self._hear, self._orphaned)
        try:
            self._read_kv_events(self.fleet)
            await self._first_look(FIRST_ROUND_S if self._life == 1 else _NEXT_ROUND_S)
            if takeover is not None:
                await takeover.begin(self.scheduler, self.scheduling.carry_out)
            self._looked = True
            self._send_view()
            self.driver.expect(link.life for link, _ in self._waiting)
            for link, end in self._waiting:
                await self._connect(link, end)
            self._waiting.clear()
            await self._open_admin(listeners.admin)
            self._control.send("ready")
            if self._life > 1:
                self._serving()
            tune_gc()
            await self._stop.wait()
        finally:
            self._loop.remove_reader(self._control.fileno())
            await self.close()

    def _serving(self) -> None:
        """Let another process replace this one from now on: the relays accept."""
        if self._takeover is not None:
            self._do(self._takeover.accepting())
            tell(logger, Event.HANDOVER, "the listeners came from the process that is replaced")
        if self._listeners.main:
            self._offer.open(self._listeners.main[0].getsockname()[:2])

    @property
    def _descriptors(self) -> Sequence[int]:
        return [each.fileno() for each in self._listeners.main]

    def _leave(self) -> None:
        """Leave to a process that accepts now; relays drain."""
        tell(logger, Event.HANDOVER, "another process accepts: what is open here ends")
        self._control.send("replaced")
        self._close_listeners()

    def _close_listeners(self) -> None:
        """Keep the sockets no longer: clients must not wait where no process accepts."""
        self._listeners = self._listeners.only()
        self._do(self.admin.close())

    async def close(self) -> None:
        if self._view_timer is not None:
            self._view_timer.cancel()
        await super().close()
        self.driver.close()

    def _hear(self, packet: Packet, fds: list[int]) -> None:
        kind, *rest = packet
        if kind == "ping":
            self._control.send("pong", 0)
        elif kind == "relay" and fds:  # without a descriptor to spare none came: its relay sees the end
            link, end = RelayLink(*rest), socket.socket(fileno=fds[0])
            if self._looked:
                self._do(self._connect(link, end))
            else:
                self._waiting.append((link, end))
        elif kind == "workers":
            self.workers = rest[0]
        elif kind == "reload":
            self._do(self._reload_by_signal())
        elif kind == "serving":
            self._serving()
        elif kind == "stopping":
            self.stopping_soon = True
            self._view_changed()
        elif kind == "stop":
            self._stop.set()

    def _orphaned(self) -> None:
        """Leave with the last relay: the supervisor is gone."""
        self._alone = self.stopping_soon = True
        self._close_listeners()
        self._do(self._offer.close())
        if not self.driver.links:
            self._stop.set()

    async def _connect(self, link: RelayLink, end: socket.socket) -> None:
        channel: MessageChannel[FromRelay] = MessageChannel(
            FROM_RELAY, lambda messages: self.driver.receive(link, messages), lambda: self._disconnected(link)
        )
        link.channel = channel
        await channel.open(end)
        self._send_view()
        self.driver.connected(link)
        if self._view is not None:
            link.send(self._view)

    def _disconnected(self, link: RelayLink) -> None:
        self.driver.disconnected(link)
        if self._alone and not self.driver.links:
            self._stop.set()

    # --- relays' own answers ---

    def _view_changed(self, at_once: bool = False) -> None:
        if not self._looked:
            return
        if at_once:
            self._send_view()
        elif self._view_timer is None:
            self._view_timer = self._loop.call_later(_VIEW_S, self._send_view)

    def _send_view(self) -> None:
        """Send relays the changes, and the supervisor the state for a successor."""
        if self._view_timer is not None:
            self._view_timer.cancel()
            self._view_timer = None
        scheduler = self.scheduler
        down = [name for name in scheduler.fleet.ready if not scheduler.fleet.available(name)]
        view = ViewMessage(
            self._addresses(), list(scheduler.fleet.ready), self.scheduling.only_model,
            msgspec.json.encode(self.models()), self.routable(), scheduler.fleet.block_tokens, down,
        )  # fmt: skip
        if view != self._view:
            self._view = view
            self.driver.broadcast(view)
        self._save()

    def _addresses(self) -> list[InstanceAddress]:
        registered, now = self.roster.registered, self.now()
        return [
            InstanceAddress(
                each.name, each.incarnation, each.spec.url, each.spec.model, each.name in registered,
                registered.get(each.name), None if each.leaves_at is None else each.leaves_at - now,
            )
            for each in self.scheduler.instances
        ]  # fmt: skip

    def _save(self, fleet: Fleet | None = None) -> None:
        """Give the supervisor the initial state of a successor; `fleet` is about to be in force."""
        state = dataclasses.replace(
            self._state,
            fleet=self.fleet if fleet is None else fleet,
            generation=self.driver.reload.generation,
            policy=self.scheduler.placement.policy_name,
            registered=tuple(
                (each.spec, self.roster.registered[each.name])
                for each in self.scheduler.instances
                if each.name in self.roster.registered
            ),
            admin={each.name: each.admin.value for each in self.scheduler.instances if each.admin != "ready"},
            entries=dict(self.watch.models),
            versions=dict(self.watch.versions),
        )
        if state != self._state:
            self._state = state
            self._control.send_large("state", content=pickle.dumps(state, pickle.HIGHEST_PROTOCOL))

    async def refresh(self) -> None:
        await self.driver.refresh()

    async def settled(self) -> None:
        """Return when an operator's change is in force in all relays."""
        self._send_view()
        await self.refresh()

    # --- for the admin surface ---

    @property
    def totals(self) -> Totals:
        return self.driver.totals

    @property
    def recent(self) -> Recent:
        return self.driver.recent

    @property
    def lost_lines(self) -> int:
        return super().lost_lines + self.driver.lost_lines

    @property
    def readiness(self) -> str:
        if not self.stopping_soon and not self.driver.links:
            return "no relay serves"
        return super().readiness

    # --- an operator's changes ---

    def set_policy(self, name: str) -> None:
        super().set_policy(name)
        self._save()

    def _configure(self, fleet: Fleet, access: Access) -> None:
        """Configure limits; relays already have the new fleet."""
        self.scheduling.limit(access.limits)

    def _spread(self, fleet: Fleet) -> None:
        driver = self.driver
        driver.reload = Reload(driver.reload.generation + 1, pickle.dumps(fleet))
        self._save(fleet)
        driver.broadcast(driver.reload)

    async def _reload_by_signal(self) -> None:
        with contextlib.suppress(InputError):  # it was logged
            await self.reload()
        self._control.send("reloaded")


def _next_log(path: Path, life: int) -> Path | None:
    """Return the file of a successor's event log, None where it cannot be written: it serves without one."""
    path = path.with_name(f"{path.name}.{life}")
    try:
        os.close(opened_log(path))
    except OSError as error:
        tell(logger, Event.EVENT_LOG, "the event log ends, %s cannot be written: %s", path, error.strerror)
        return None
    tell(logger, Event.EVENT_LOG, "a log is of one scheduler: the event log goes on in %s", path)
    return path
