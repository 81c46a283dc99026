"""Leases of other processes, booked here from their journals (`balancer/core/journal.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command, Lease, LeaseId, Outcome, Request
from hetlb.options.peers.lease_wire import RequestFacts, WireBegun, WireBooked, WireChange, WireEnded

#: Ids of requests of other processes: below all of this one's.
_FIRST: Final = -(1 << 40)
#: Leases of one process, at most; a later one is not booked.
MOST_LEASES: Final = 1 << 16
#: Leases of processes that are gone, to end in one go: the others follow in later turns of the event loop.
SOME: Final = 64


class RemoteLeases:
    """Leases of other processes by process and number. `arrived`: they count as demand of this scheduler."""

    def __init__(self, scheduler: Scheduler, *, arrived: bool) -> None:
        self._scheduler = scheduler
        self._arrived = arrived
        self._next_request = _FIRST
        self.of: dict[str, dict[LeaseId, Lease]] = {}
        #: Leases that no process holds any more.
        self.leaving: deque[Lease] = deque()

    def __len__(self) -> int:
        return len(self.leaving) + sum([len(leases) for leases in self.of.values()])

    def receive(self, process: str, changes: Iterable[WireChange], now: float) -> list[Command]:
        """Book the changes of a process: first the begun leases, then the ended ones.

        In the other order the room of an ended lease would seem free here, though it was given away there.
        The commands are for this scheduler's own requests.
        """
        leases = self.of.setdefault(process, {})
        scheduler = self._scheduler
        commands: list[Command] = []
        later: list[WireBegun | WireEnded] = []
        for change in changes:
            if isinstance(change, WireBooked):
                if change.number not in leases:
                    if len(leases) >= MOST_LEASES:
                        continue
                    live = change.change(self.copy(change.request))
                    lease = scheduler.restore(live, now, own=False, arrived=self._arrived)
                    if lease is not None:
                        leases[change.number] = lease
                elif change.begun and leases[change.number].first_token_at is None:
                    later.append(WireBegun(change.number))
            elif isinstance(change, WireBegun | WireEnded):
                later.append(change)
        for each in later:
            lease = leases.get(each.number)
            if lease is None:
                continue
            if isinstance(each, WireBegun):
                commands += scheduler.on_first_token(lease, now)
            else:
                del leases[each.number]
                lease.output_tokens = each.output_tokens
                lease.reported_cached_tokens = each.cached_tokens
                lease.odd = each.odd
                commands += scheduler.on_lease_ended(lease, each.outcome, now, retry=False)
        return commands

    def gone(self, process: str) -> None:
        """Let the leases of a process that ended leave."""
        self.leaving.extend(self.of.pop(process, {}).values())

    def leave(self, process: str, numbers: Iterable[LeaseId]) -> None:
        """Let some leases of a process leave."""
        leases = self.of.get(process, {})
        self.leaving.extend([leases.pop(number) for number in numbers if number in leases])

    def end_some(self, now: float) -> list[Command]:
        """End some of the leaving leases; they count against no instance."""
        commands: list[Command] = []
        for _ in range(min(SOME, len(self.leaving))):
            lease = self.leaving.popleft()
            commands += self._scheduler.on_lease_ended(lease, Outcome.CLIENT_GONE, now, retry=False)
        return commands

    def copy(self, request: Request | RequestFacts) -> Request:
        """Return a request under an id of its own: ids of two processes can be equal."""
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
            streamed=request.streamed,
        )
