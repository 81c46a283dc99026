"""The scheduler's side of a driver: facts go in, commands come out and are carried out in the same turn.

Shared by the driver of a process that serves alone (`proxy/driver.py`) and by that of the scheduler process
of several (`workers/relay_host.py`). They differ in where a command goes, not in which there are, nor in when
the scheduler is called again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Final

from mypy_extensions import trait

from hetlb.core.scheduler import Scheduler
from hetlb.core.types import (
    Abort,
    Command,
    Dispatch,
    EngineSample,
    HealthChanged,
    InstanceAdded,
    InstanceChange,
    InstanceRemoved,
    Lease,
    Outcome,
    PassOn,
    Probed,
    ProbeResult,
    Reject,
    Request,
)
from hetlb.proxy.scheduling import Decisions, StallWatch, log_health
from hetlb.proxy.telemetry.counters import Totals

if TYPE_CHECKING:
    from hetlb.config.api_keys import LimitsTable
    from hetlb.core.block_index import KvEventBatch
    from hetlb.core.shared_view import SharedView
    from hetlb.proxy.limits import Limiter, Limiters

#: An instance from which something came within so many seconds is not failed by a probe.
EMITS_S: Final = 2.0


@trait
class SchedulerDriver:
    """Base of drivers whose scheduler is in this process. `schedule` comes first."""

    scheduler: Scheduler
    decisions: Decisions
    #: Bookings of other processes of the fleet, None while this one is alone.
    view: SharedView | None
    #: Limits of clients' keys, None where no key ever had some.
    limiters: Limiters | None
    loop: asyncio.AbstractEventLoop
    now: Callable[[], float]
    stalls: StallWatch
    #: Seconds that a probe may take. None is 0: mypyc cannot compile a plain float of a trait.
    probe_timeout_s: float | None
    _totals: Totals
    #: Seconds of the scheduler's calls that were not counted yet: arrivals, ends of leases.
    _arrival_s: list[float]
    _end_s: list[float]
    _ticker: asyncio.TimerHandle | None

    def schedule(self, scheduler: Scheduler) -> None:
        """Drive this scheduler."""
        self.scheduler = scheduler
        self.view = None
        self.limiters = None
        self.decisions = Decisions(len(scheduler.instances))
        self.probe_timeout_s = None
        self._arrival_s = []
        self._end_s = []
        self._ticker = None

    def limit(self, limits: Mapping[str, LimitsTable]) -> None:
        """Limits of keys that hold from now on, by the name of the key."""
        if limits and self.limiters is None:
            from hetlb.proxy.limits import Limiters

            self.limiters = Limiters()
        if self.limiters is not None:
            self.limiters.configure(limits)

    def _limiter(self, owner: str | None) -> Limiter | None:
        """Limiter of a key, None where it has no limits."""
        return None if self.limiters is None or owner is None else self.limiters.of(owner)

    # --- where commands go ---

    def _dispatch(self, command: Dispatch) -> None:
        raise NotImplementedError

    def _reject(self, command: Reject) -> None:
        raise NotImplementedError

    def _abort(self, command: Abort) -> None:
        raise NotImplementedError

    def _pass_on(self, command: PassOn) -> None:
        """A busy engine's answer is the client's; it goes on by itself unless something holds it."""

    def _emits(self, name: str) -> bool:
        """True if part of an answer came from an instance lately."""
        raise NotImplementedError

    def _instances_changed(self) -> None:
        """An instance was added or removed."""

    def _view_changed(self) -> None:
        """The answers about the fleet (`/health`, `/v1/models`) may differ from now on."""

    def _ticked(self) -> None:
        """The scheduler was called because it was time."""

    # --- facts ---

    def decide(self, request: Request, now: float) -> list[Command]:
        """Give the scheduler a request."""
        view = self.view
        return self.scheduler.on_arrival(request, now) if view is None else view.on_arrival(request, now)

    def _arrive(self, request: Request, now: float) -> None:
        started = perf_counter()
        commands = self.decide(request, now)
        self._arrival_s.append(perf_counter() - started)
        self.carry_out(commands)

    def _end_lease(
        self,
        lease: Lease,
        outcome: Outcome,
        now: float,
        retry: bool,
        generated: int | None = None,
    ) -> list[Command]:
        started = perf_counter()
        commands = self.scheduler.on_lease_ended(lease, outcome, now, retry=retry, generated=generated)
        self._end_s.append(perf_counter() - started)
        return commands

    def change(self, change: InstanceChange) -> None:
        """Something about an instance changed."""
        now = self.now()
        if isinstance(change, Probed) and change.result is ProbeResult.FAILED:
            if self._emits(change.name):
                return  # busy, not dead: its probes wait behind its work
            if self.stalls.since(now - (self.probe_timeout_s or 0.0)):
                return  # the probe may have been answered while this process stood still
        commands = self.scheduler.on_instance(change, now)
        if isinstance(change, InstanceAdded | InstanceRemoved):
            self.decisions.bound(len(self.scheduler.instances))
            self._instances_changed()
        if commands or not isinstance(change, Probed):
            self._view_changed()
        self.carry_out(commands)

    def sample(self, name: str, sample: EngineSample) -> None:
        """An engine's metrics were read."""
        instance = self.scheduler.fleet.instances.get(name)
        slept = instance is not None and instance.asleep
        self.carry_out(self.scheduler.on_scrape(name, sample, self.now()))
        if instance is not None and instance.asleep is not slept:
            self._view_changed()

    def kv_events(self, name: str, batch: KvEventBatch) -> None:
        """An engine told what came into its prefix cache and what left it."""
        known = self.scheduler.fleet.block_tokens
        self.carry_out(self.scheduler.on_kv_events(name, batch, self.now()))
        if self.scheduler.fleet.block_tokens != known:
            self._view_changed()

    def set_policy(self, name: str) -> None:
        """Switch the policy."""
        self.carry_out(self.scheduler.set_policy(name, self.now()))

    # --- commands ---

    def carry_out(self, commands: list[Command]) -> None:
        """Do what the scheduler said."""
        for command in commands:
            if type(command) is Dispatch:
                self._dispatch(command)
            elif isinstance(command, Reject):
                self._reject(command)
            elif isinstance(command, HealthChanged):
                log_health(command, self._totals)
                self._view_changed()
            elif isinstance(command, PassOn):
                self._pass_on(command)
            else:
                assert isinstance(command, Abort), f"expected a command, got {command!r}"
                self._abort(command)
        self._tick_later()

    def _tick_later(self) -> None:
        """Schedule the scheduler's next call."""
        if self._ticker is None and (deadline := self.scheduler.next_deadline()) is not None:
            self._ticker = self.loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        self.carry_out(self.scheduler.on_tick(self.now()))
        self._ticked()

    def _stop_ticking(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    def _count_calls(self) -> None:
        """Count the seconds of the scheduler's calls since the last time."""
        self._totals.arrival.observe_all(self._arrival_s)
        self._totals.end.observe_all(self._end_s)
        self._arrival_s.clear()
        self._end_s.clear()
