"""Several schedulers over one ledger, in one process: what a simulation drives, and a property test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hetlb.core.fellows import Evidence, SharedScheduler
from hetlb.core.instance import Instance
from hetlb.core.ledger import Cells
from hetlb.core.setup import SchedulerSetup
from hetlb.core.types import Command, EngineSample, Lease, Outcome, Request, RequestId
from hetlb.workers.ledger import Memory, Row

INSTANCE_CELLS = 64


class Many:
    """N shared schedulers that look like one: request k goes to scheduler `of(k)`.

    Wake-ups are carried out before a call returns, evidence reaches the others at once.
    """

    def __init__(
        self,
        setup: SchedulerSetup,
        number: int,
        *,
        oracle: Mapping[RequestId, int] | None = None,
        of: Callable[[int], int] | None = None,
        model: str = "m",
    ) -> None:
        self.memory = Memory(number, INSTANCE_CELLS + 8)
        self.of = of or (lambda request_id: request_id % number)
        self.woken: list[int] = []
        self.members: list[SharedScheduler] = []
        self._setup, self._oracle, self._model = setup, oracle, model
        for index in range(number):
            self.members.append(self.make(index))

    def make(self, index: int) -> SharedScheduler:
        """A scheduler that writes row `index`."""
        names = {spec.name: cell for cell, spec in enumerate(self._setup.specs)}

        def tell(evidence: Evidence) -> None:
            for other, member in enumerate(self.members):
                if other != index:
                    member.on_evidence(evidence, self.now)

        self.now = self._setup.now
        return SharedScheduler(
            self._setup,
            oracle=self._oracle,
            ledger=Row(self.memory, index, self.woken.append),
            cells=Cells(names, {self._model: INSTANCE_CELLS}),
            tell=tell,
        )

    def _done(self, commands: list[Command]) -> list[Command]:
        wakes = 0
        while self.woken:
            wakes += 1
            assert wakes < 1000, "they wake each other for ever"
            commands = commands + self.members[self.woken.pop(0)].on_wake(self.now)
        return commands

    def _holder(self, lease: Lease) -> SharedScheduler:
        return self.members[self.of(lease.request.id)]

    def replace(self, index: int) -> None:
        """Kill one and start another in its place."""
        self.memory.wipe(index)
        self.members[index] = self.make(index)

    def close(self) -> None:
        """Give the memory back."""
        self.members.clear()
        self.memory.close()

    # --- what a driver calls ---

    def on_arrival(self, request: Request, now: float) -> list[Command]:
        self.now = now
        return self._done(self.members[self.of(request.id)].on_arrival(request, now))

    def on_first_token(self, lease: Lease, now: float) -> list[Command]:
        self.now = now
        return self._told(lease, self._holder(lease).on_first_token(lease, now))

    def on_lease_ended(self, lease: Lease, outcome: Outcome, now: float, **flags: Any) -> list[Command]:
        self.now = now
        return self._told(lease, self._holder(lease).on_lease_ended(lease, outcome, now, **flags))

    def _told(self, lease: Lease, commands: list[Command]) -> list[Command]:
        """As if the driver's timer had run out at once."""
        return self._done(commands + self._holder(lease).tell_rest(self.now))

    def on_cancelled(self, request_id: RequestId, now: float) -> list[Command]:
        self.now = now
        return self._done(self.members[self.of(request_id)].on_cancelled(request_id, now))

    def on_scrape(self, name: str, sample: EngineSample, now: float) -> list[Command]:
        self.now = now
        return self._done([each for member in self.members for each in member.on_scrape(name, sample, now)])

    def on_tick(self, now: float) -> list[Command]:
        self.now = now
        return self._done([each for member in self.members for each in member.on_tick(now)])

    def next_deadline(self) -> float | None:
        return min(
            (at for member in self.members if (at := member.next_deadline()) is not None), default=None
        )

    def check_integrity(self) -> None:
        for member in self.members:
            member.take_in(self.now)
            member.check_integrity()

    def instance(self, index: int, name: str) -> Instance:
        """An instance as one of the schedulers sees it, with all that was written so far."""
        self.members[index].take_in(self.now)
        return next(each for each in self.members[index].instances if each.name == name)
