"""A relay: a process that serves clients and asks the scheduler process where each request goes.

It listens once the scheduler process has looked at the engines. While there is no scheduler process its
streams go on and its arrivals wait; without a supervisor it accepts no more, ends what it has and leaves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import select
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from hetlb.balancer.clients.access import EngineAccess
from hetlb.balancer.clients.front import Front
from hetlb.balancer.clients.server import ProxyServer
from hetlb.balancer.clients.token_estimator import TokenEstimator
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.fleet.service import require_urls, tune_gc
from hetlb.balancer.option_record import Options
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.balancer.telemetry.recent import Recent
from hetlb.errors import HetlbError
from hetlb.options.message_channel import MessageChannel
from hetlb.options.relays.control import ChildControl, ChildState, Packet
from hetlb.options.relays.protocol import (
    FROM_SCHEDULER,
    VERSION,
    Ask,
    DispatchMessage,
    FromScheduler,
    Hello,
    Learnt,
    PassOnMessage,
    Rejected,
    Reload,
    Report,
    ViewMessage,
    WaitingMessage,
    WorkMessage,
)
from hetlb.options.relays.relay_driver import ID_BITS, RelayDriver

logger = logging.getLogger("hetlb.workers")

#: Seconds between reports of counters.
REPORT_S: Final = 0.5

#: Times that a relay tries to read the keys of a reload.
_RELOAD_TRIES: Final = 5
#: Seconds until a relay tries again what failed.
_RETRY_S: Final = 1.0


class Relay:
    """One relay: `number` is its place among them, `life` is its place among all relays ever started."""

    def __init__(
        self, number: int, life: int, state: ChildState, control: ChildControl, options: Options
    ) -> None:
        self.number = number
        self._life = life
        self._control = control
        self._generation = state.generation
        self._loop = asyncio.get_running_loop()
        fleet = state.fleet
        self._fleet = fleet
        self._access = require_urls(fleet)
        self._engines: dict[str, EngineAccess] = dict(self._access.engines)
        estimator = TokenEstimator(fleet.token_counters)
        first_id = (life << ID_BITS) + 1
        self.driver = Driver(fleet.file.proxy, estimator, self._loop, self._engines, options, first_id)
        self._scheduling = RelayDriver(fleet.queue_limits, self.driver)
        self.driver.scheduling = self._scheduling
        self.driver.identify(state.own)
        self._server = ProxyServer(self.driver, self)
        self._front = Front(self.driver, self._server, fleet, self._access)
        self._channel: MessageChannel[FromScheduler] | None = None
        self._scheduler = 0
        self._models: list[dict[str, Any]] = []
        self._routable = self._stopping = False
        self._looked = asyncio.Event()
        self._stop = asyncio.Event()
        self._hurry = False
        self._asked = 0
        self._reporter: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()

    # --- answers of the listener's own ---

    def models(self) -> list[dict[str, Any]]:
        return self._models

    def routable(self) -> bool:
        return self._routable and not self._stopping

    # --- life ---

    async def run(self, listeners: Sequence[socket.socket]) -> None:
        self._loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        self._control.listen(self._hear, self._stop.set)
        whole = stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode)
        # A file takes a batch of lines in one piece, a pipe does not.
        self._front.open_log(None if whole else select.PIPE_BUF)
        try:
            looked = asyncio.create_task(self._looked.wait())
            stop = asyncio.create_task(self._stop.wait())
            await asyncio.wait([looked, stop], return_when=asyncio.FIRST_COMPLETED)
            looked.cancel()
            if not self._stop.is_set():
                await self._server.start("", 0, listeners)
                self._control.send("ready")
                self._reporter = self._loop.call_later(REPORT_S, self._report_often)
                tune_gc()
            await stop
            await self._front.stop(0.0 if self._hurry else self._fleet.file.proxy.shutdown_grace_s)
        finally:
            await self._close()

    async def _close(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
        await self._front.close()
        self._report()
        if self._channel is not None:
            self._channel.close()
            await asyncio.sleep(0)

    def _hear(self, packet: Packet, fds: list[int]) -> None:
        kind, *rest = packet
        if kind == "ping":
            self._control.send("pong", len(self._server.connections))
        elif kind == "scheduler" and not fds:  # no descriptors to spare: later there may be some
            self._loop.call_later(_RETRY_S, self._control.send, "lost", rest[0])
        elif kind == "scheduler":
            task = asyncio.create_task(self._connect(rest[0], socket.socket(fileno=fds[0])))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        elif kind == "stopping":
            self._stopping = True
        elif kind == "leave":
            self._server.leave()
        elif kind == "stop":
            self._hurry = rest[0]
            self._stop.set()
            if self._hurry:
                self.driver.shut_down()

    # --- the scheduler process ---

    async def _connect(self, scheduler: int, end: socket.socket) -> None:
        """Connect to a scheduler process; send it live leases, then waiting requests."""
        if self._channel is not None:
            self._lost(self._channel)
        channel: MessageChannel[FromScheduler] = MessageChannel(
            FROM_SCHEDULER, self._receive, lambda: self._lost(channel)
        )
        await channel.open(end)
        self._channel, self._scheduler = channel, scheduler
        self._asked = 0  # a new scheduler process counts its questions from 1
        channel.send(Hello(VERSION, self._life, self._generation, self._scheduling.live_leases()))
        self._scheduling.connected(channel)

    def _lost(self, channel: MessageChannel[FromScheduler]) -> None:
        if channel is not self._channel:
            return
        self._channel = None
        channel.close()
        self._scheduling.disconnected()
        self._control.send("lost", self._scheduler)

    def _receive(self, messages: list[FromScheduler]) -> None:
        scheduling = self._scheduling
        for message in messages:
            if isinstance(message, DispatchMessage):
                scheduling.dispatch(message)
            elif isinstance(message, Rejected | PassOnMessage):
                scheduling.answer(message)
            elif isinstance(message, ViewMessage):
                self._set_view(message)
            elif isinstance(message, Learnt):
                self.driver.token_estimator.learn(message.model, message.text_bytes, 0, message.tokens)
            elif isinstance(message, WaitingMessage):
                scheduling.others_wait = message.requests
            elif isinstance(message, Ask):
                self._asked = message.number
                self._report()
            elif isinstance(message, WorkMessage):
                scheduling.set_work(message)
            elif isinstance(message, Reload):
                self._reload(message)

    def _set_view(self, view: ViewMessage) -> None:
        access = self._access
        self._engines.clear()
        for each in view.instances:
            if each.registered:
                self._engines[each.name] = access.unlisted(each.url, each.model, each.address)
            elif each.name in access.engines:
                self._engines[each.name] = access.engines[each.name]
        self._scheduling.set_view(view)
        self._models = msgspec.json.decode(view.models)
        self._routable = view.routable
        self._looked.set()

    def _reload(self, message: Reload, tries: int = _RELOAD_TRIES) -> None:
        """Serve another fleet; leave where its keys cannot be read here, also some seconds later."""
        if message.generation < self._generation:
            return  # a newer one came while this one was tried again
        fleet: Fleet = pickle.loads(message.fleet)
        try:
            self._access = require_urls(fleet)
        except HetlbError as error:
            if tries > 1:  # a secret may be half-written
                self._loop.call_later(_RETRY_S, self._reload, message, tries - 1)
                return
            text = "relay %d cannot follow a reload: %s: it leaves"
            tell(logger, Event.WORKER_FAILED, text, self.number, error, worker=f"relay {self.number}")
            self._stop.set()
            return
        self._generation, self._fleet = message.generation, fleet
        self._engines.update(self._access.engines)
        self._front.configure(self._fleet, self._access)

    # --- reports ---

    def _report_often(self) -> None:
        self._reporter = self._loop.call_later(REPORT_S, self._report_often)
        self._report()

    def _report(self) -> None:
        channel, driver, scheduling = self._channel, self.driver, self._scheduling
        if channel is None:
            return
        totals = driver.totals
        recent, totals.recent = totals.recent, Recent()
        learnt, scheduling.learnt = scheduling.learnt, {}
        channel.send(
            Report(
                self._asked,
                pickle.dumps(totals, pickle.HIGHEST_PROTOCOL),
                self._front.lost_lines,
                [(each.id, driver.tokens_so_far(each)) for each in scheduling.recent if not each.ended],
                sorted([name for name in driver.tokens_at() if driver.emits(name)]),
                [(model, *counts) for model, counts in learnt.items()],
                pickle.dumps(recent, pickle.HIGHEST_PROTOCOL),
            )
        )
