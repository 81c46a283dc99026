"""Retry budget: the number of requests that may run twice at a time, and the earlier instances of each."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import Lease, LeaseId, RequestId

#: Largest share of retries, after a drop by an engine, among the requests in flight.
RETRY_SHARE: Final = 0.2
#: Number of retries always allowed at a time.
RETRY_REQUESTS: Final = 3
#: Most times that a request which was refused or is stranded is sent elsewhere.
MOST_MOVES: Final = 2


@mypyc_attr(acyclic=True)
class Attempts:
    """Earlier instances of a retried request, and how often it may have run."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        #: The instances of `tried` that a request never reached.
        self.unreached: list[str] = []
        self.runs = 0
        #: Number of runs after which the engine closed the connection without a byte: it may kill engines.
        self.drops = 0
        #: True if it is not to be split: a hand-over has failed.
        self.whole = False
        #: Number of runs that an engine refused.
        self.turned_away = 0
        #: Each instance that refused or failed it, with the lease, status (0: none) and time. It is at fault
        #: if another instance answers.
        self.failures: list[tuple[Instance, Lease, int, float]] = []

    @property
    def may_have_run(self) -> bool:
        """True if some engine may have run it: not every one that it reached refused it."""
        return self.runs != self.turned_away


@mypyc_attr(acyclic=True)
class Retries:
    """Attempts of the retried requests, and the leases that count in the budget."""

    def __init__(self) -> None:
        #: By request, noted from the first question on.
        self.attempts: dict[RequestId, Attempts] = defaultdict(Attempts)
        #: Leases of requests that may run for the second time.
        self.leases: set[LeaseId] = set()

    def forget(self, request_id: RequestId) -> None:
        """Note that a request is over, or begins anew."""
        self.attempts.pop(request_id, None)

    def wait(self, request_id: RequestId) -> None:
        """Note that a request waits: it may go to the instances again that it did not reach."""
        known = self.attempts[request_id]
        known.tried = [name for name in known.tried if name not in known.unreached]
        if not known.tried:
            self.forget(request_id)

    def allowed(self, in_flight: int) -> bool:
        """Return True if the budget allows one more retry of a request that may run twice."""
        return len(self.leases) < max(RETRY_REQUESTS, int(RETRY_SHARE * in_flight))
