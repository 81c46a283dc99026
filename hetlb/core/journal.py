"""Journal of leases: the one way in which a scheduler tells another process of its live leases, and is told.

A scheduler appends to each of its journals that a lease began (`Booked`), that its answer began (`Begun`) and
that it ended (`Ended`); what waits for an instance is said as a whole (`Waiting`). Peers of a shared view, a
process that takes this one's place and a relay that meets another scheduler process all speak so; they
differ in the transport (`proxy/lease_wire.py` is the encoding). A lease of another process is booked like an
own one (`RemoteLeases`), and told to no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from hetlb.core.pickle_by_fields import PickleByFields
from hetlb.core.types import Command, Lease, LeaseId, Outcome, Request

if TYPE_CHECKING:
    from hetlb.core.scheduler import Scheduler

#: Ids of requests of other processes: below all of this one's.
_FIRST: Final = -(1 << 40)


@dataclass(frozen=True, slots=True)
class Booked(PickleByFields):
    """A lease began, `age_s` ago. `number` is its scheduler's; `begun`: its answer has begun."""

    number: LeaseId
    instance: str
    request: Request
    work_ns: int
    predicted_output: float
    age_s: float = 0.0
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Begun(PickleByFields):
    """The answer of a lease began."""

    number: LeaseId


@dataclass(frozen=True, slots=True)
class Ended(PickleByFields):
    """A lease ended."""

    number: LeaseId
    outcome: Outcome
    output_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Waiting(PickleByFields):
    """Sizes of the requests that wait at a scheduler, added up, by model."""

    sizes: dict[str, int]


Change: TypeAlias = Booked | Begun | Ended | Waiting


def booked(lease: Lease, now: float) -> Booked:
    """Make the record of a live lease for another process."""
    return Booked(
        lease.id,
        lease.instance,
        lease.request,
        lease.work_ns,
        lease.predicted_output,
        now - lease.dispatched_at,
        lease.first_token_at is not None,
    )


class Journal:
    """Changes of one scheduler's own leases for one reader, told (`on_change`) when there are some."""

    def __init__(self, on_change: Callable[[], object] = lambda: None) -> None:
        self.on_change = on_change
        self._changes: list[Change] = []

    def add(self, change: Change) -> None:
        """Append a change."""
        self._changes.append(change)
        if len(self._changes) == 1:
            self.on_change()

    def take(self) -> list[Change]:
        """Changes since the last time."""
        changes, self._changes = self._changes, []
        return changes


class RemoteLeases:
    """Leases of other processes by process and number; `arrived`: they are demand here too."""

    def __init__(self, scheduler: Scheduler, *, arrived: bool, first_id: int = _FIRST) -> None:
        self._scheduler = scheduler
        self._arrived = arrived
        self._next_request = first_id
        self.of: dict[str, dict[LeaseId, Lease]] = {}

    def __len__(self) -> int:
        return sum([len(leases) for leases in self.of.values()])

    def receive(self, process: str, changes: Iterable[Change], now: float) -> list[Command]:
        """Book what a process says, what began before what ended: its room has been given away there.

        The commands are for this scheduler's own requests.
        """
        leases = self.of.setdefault(process, {})
        scheduler = self._scheduler
        commands: list[Command] = []
        later: list[Begun | Ended] = []
        for change in changes:
            if isinstance(change, Booked):
                if change.number not in leases:
                    self._book(leases, change, now)
            elif isinstance(change, Begun | Ended):
                later.append(change)
        for each in later:
            lease = leases.get(each.number)
            if lease is None:
                continue
            if isinstance(each, Begun):
                commands += scheduler.on_first_token(lease, now)
            else:
                del leases[each.number]
                lease.output_tokens = each.output_tokens
                lease.reported_cached_tokens = each.cached_tokens
                commands += scheduler.on_lease_ended(lease, each.outcome, now, retry=False)
        return commands

    def gone(self, process: str, now: float) -> list[Command]:
        """A process is no more: its leases end, and count against no instance."""
        commands: list[Command] = []
        for lease in self.of.pop(process, {}).values():
            commands += self._scheduler.on_lease_ended(lease, Outcome.CLIENT_GONE, now, retry=False)
        return commands

    def copy(self, request: Request) -> Request:
        """A request under an id of its own: those of two processes are not told apart."""
        number, self._next_request = self._next_request, self._next_request - 1
        return Request(
            number,
            request.model,
            request.prompt_tokens,
            request.max_tokens,
            request.sequences,
            request.longest_prompt_tokens,
            request.generates,
            prefix_keys=request.prefix_keys,
            tenant=request.tenant,
            samples=request.samples,
        )

    def _book(self, leases: dict[LeaseId, Lease], change: Booked, now: float) -> None:
        live = replace(change, request=self.copy(change.request))
        lease = self._scheduler.restore(live, now, own=False, arrived=self._arrived)
        if lease is not None:
            leases[change.number] = lease
