"""Journal of leases: the one way to share live leases between schedulers of two processes.

A scheduler tells each of its journals that a lease began, that its answer began and that it ended
(`options/peers/lease_wire.py` has the journal of peers and its encoding). A lease of another process is
booked like an own one (`options/peers/shared_view.py`), and told to no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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


class Journal(Protocol):
    """Changes of one scheduler's own leases, for one reader."""

    def booked(self, lease: Lease, now: float) -> None: ...
    def begun(self, lease: Lease) -> None: ...
    def ended(self, lease: Lease, outcome: Outcome) -> None: ...
