"""Several schedulers over one fleet in virtual time, each told of the others' leases after a delay.

Requests go to the schedulers in turns, as from gateways that spread them evenly. What a scheduler says takes
`delay_s` to each of the others; `blind` schedulers say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command, Request
from hetlb.options.peers.lease_wire import WireChange
from hetlb.options.peers.shared_view import SharedView
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.sim.flights import Flight
from hetlb.tools.workload.arrivals import PlannedRequest

#: Kind of the events that carry news, before scrapes at the same instant.
SHARED = 7


class SharedSimulation(FleetSimulation):
    """A fleet behind `count` schedulers.

    `expects`: whether decisions allow for requests of peers that are not heard of yet.
    """

    def __init__(
        self,
        setup: SchedulerSetup,
        engines: Mapping[str, EngineSpec],
        plan: Sequence[PlannedRequest],
        *,
        model: str,
        count: int,
        delay_s: float,
        blind: bool = False,
        expects: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(setup, engines, plan, model=model, **options)
        more = [Scheduler(replace(setup, seed=setup.seed + n), oracle=self._oracle) for n in range(1, count)]
        for each in more:
            self._list_adapters(each)
        self.schedulers = [self.scheduler, *more]
        self._views = {each: SharedView(each, n) for n, each in enumerate(self.schedulers)}
        self._names = {scheduler: str(n) for n, scheduler in enumerate(self.schedulers)}
        self._delay_s = delay_s
        self._blind = blind
        self._turn = 0
        for scheduler, view in self._views.items():
            if not blind:
                view.delay_s = delay_s if expects else 0.0
                for peer in self.schedulers:
                    if peer is not scheduler:
                        view.receive(self._names[peer], (), 0.0)
        self._telling: set[Scheduler] = set()
        self._handlers[SHARED] = self._on_shared

    def _on_arrival(self, index: int) -> None:
        self._turn += 1
        self.scheduler = self.schedulers[self._turn % len(self.schedulers)]
        super()._on_arrival(index)

    def _arrived(self, scheduler: Scheduler, request: Request) -> list[Command]:
        return self._views[scheduler].on_arrival(request, self._events.now)

    def _scraped(self) -> Sequence[Scheduler]:
        return self.schedulers

    def _carry_out(self, scheduler: Scheduler, commands: list[Command]) -> None:
        super()._carry_out(scheduler, commands)
        self._tell(scheduler)

    def _answered(self, flight: Flight) -> None:
        super()._answered(flight)
        self._tell(flight.leased[0])

    def _tell(self, scheduler: Scheduler) -> None:
        """Send changes to the other schedulers after the delay, batched per instant."""
        if self._blind or scheduler in self._telling:
            return
        self._telling.add(scheduler)
        self._events.push(self._events.now, SHARED, (scheduler, None))

    def _on_shared(self, payload: tuple[Scheduler, list[WireChange] | None]) -> None:
        scheduler, changes = payload
        if changes is not None:
            for peer in self.schedulers:
                if peer is not scheduler:
                    view, name = self._views[peer], self._names[scheduler]
                    self._carry_out(peer, view.receive(name, changes, self._events.now))
            return
        view = self._views[scheduler]
        self._telling.discard(scheduler)
        if said := view.take(self._events.now):
            self._events.push(self._events.now + self._delay_s, SHARED, (scheduler, said))
