"""Journal of leases: the one way in which schedulers of two processes share their live leases.

A scheduler appends to each of its journals that a lease began (`Booked`), that its answer began (`Begun`) and
that it ended (`Ended`). Peers of a shared view, a process that takes this one's place and a relay that meets
another scheduler process all speak so; they differ in the transport (`options/lease_wire.py` is the
encoding). A lease of another process is booked like an own one (`options/remote_leases.py`), and told to no
other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.types import Lease, LeaseId, Outcome, Request


@dataclass(frozen=True, slots=True)
class Booked(PickleByFields):
    """A lease began, `age_s` ago. `number` is its scheduler's; `begun`: its answer has begun.

    `first_s`: the forecast of its first token, in seconds.
    """

    number: LeaseId
    instance: str
    request: Request
    work_ns: int
    predicted_output: float
    age_s: float = 0.0
    begun: bool = False
    first_s: float = 0.0


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


Change: TypeAlias = Booked | Begun | Ended


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
        lease.forecast_first_s,
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
        """Return the changes since the last time."""
        changes, self._changes = self._changes, []
        return changes
