"""Answers that an engine has lost: they stand still, and it reports fewer requests than it was given.

A stream that is silent while its engine computes it (a tool call that is parsed as a whole) is among the
requests that the engine reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from hetlb.balancer.core.evidence.silence import COUNTERS_STALE_S
from hetlb.balancer.core.fleet_state import FleetState
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import Lease, LeaseId

#: Seconds that a request without a token may be on its way to its engine's counts.
_ON_THE_WAY_S: Final = 1.0
#: Seconds without a byte after which an answer that has begun stands still.
_STILL_S: Final = 1.0


def missing(instance: Instance, now: float) -> int:
    """Return how many of the requests sent before its last report an engine does not report; 0 if unknown."""
    sample, at = instance.sample, instance.sample_at
    if sample is None or at is None or sample.running is None or now - at > COUNTERS_STALE_S:
        return 0
    seen_at = at - sample.age_s
    before = 0
    for lease in instance.leases.values():  # of several sequences some may have ended
        if lease.request.sequences == 1 and not lease.incoming:
            since = lease.first_token_at
            before += (lease.dispatched_at + _ON_THE_WAY_S if since is None else since) < seen_at
    return max(0, before - sample.running - (sample.waiting or 0))


def still(instances: Sequence[Instance], token_at: Callable[[Lease], float], now: float) -> list[LeaseId]:
    """Return the begun answers, on engines with missing requests, of which nothing came for some seconds."""
    return [
        lease.id
        for instance in instances
        if missing(instance, now)
        for lease in instance.leases.values()
        if lease.own and not lease.judged and lease.request.sequences == 1
        if lease.first_token_at is not None
        if now - token_at(lease) >= _STILL_S
    ]


def count(fleet: FleetState, leases: Sequence[LeaseId], now: float) -> None:
    """Count answers that stand still as lost ones: at each engine as many as it has lost.

    `leases` are the answers found by `still`.
    """
    for instance in list(fleet.instances.values()):
        lost = [instance.leases[each] for each in leases if each in instance.leases]
        if lost and len(lost) <= missing(instance, now):
            for lease in lost:
                fleet.account().lost(instance, lease, now)
