"""Answers that an engine has lost: they stand still, and it reports fewer requests than it was given.

A stream that is silent while its engine computes it (a tool call that is parsed as a whole) is among the
requests that the engine reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from hetlb.balancer.core.evidence.silence import COUNTERS_STALE_S
from hetlb.balancer.core.evidence.table import LEAST_SILENCE_S
from hetlb.balancer.core.fleet_state import FleetState
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import Lease, LeaseId

#: Seconds that a request without a token may be on its way to its engine's counts.
_ON_THE_WAY_S: Final = 1.0


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
    """Return the begun answers that stand still and are lost: their engines do not report them.

    `token_at` is the time of the newest byte, infinite while the client does not read. An engine no longer
    reports what it has ended: whole answers that have begun, and the answer of a client that does not read.
    If these explain what is missing, no other answer is lost.
    """
    found: list[LeaseId] = []
    for instance in instances:
        if not (unreported := missing(instance, now)):
            continue
        lost: list[LeaseId] = []
        for lease in instance.leases.values():
            if not lease.own or lease.first_token_at is None or lease.request.sequences != 1:
                continue
            newest_at = token_at(lease)
            if now - newest_at >= LEAST_SILENCE_S and not lease.judged:
                lost.append(lease.id)
            elif newest_at == math.inf or not lease.request.streamed or lease.judged:
                unreported -= 1
        if len(lost) <= unreported:
            found += lost
    return found


def count(fleet: FleetState, leases: Sequence[LeaseId], now: float) -> None:
    """Count the answers found by `still` as lost ones."""
    for instance in list(fleet.instances.values()):
        for lease in [instance.leases[each] for each in leases if each in instance.leases]:
            fleet.account().lost(instance, lease, now)
