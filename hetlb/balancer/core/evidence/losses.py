"""Account of the lost answers of a fleet: by client, by kind of request, and what they say of an instance.

It begins with the first loss: in a good hour there is none.
"""

from __future__ import annotations

import math

from hetlb.balancer.core.evidence.clients import ClientAnswers, client_of, kind_of, session_of, traffic_of
from hetlb.balancer.core.evidence.kinds import RefusedKinds
from hetlb.balancer.core.evidence.table import MEMORY_S
from hetlb.balancer.core.fleet_state import FleetState
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import Lease


class Losses:
    """Answers of clients that lost some, and kinds that instances refuse and others answer."""

    def __init__(self, fleet: FleetState) -> None:
        self._fleet = fleet
        self.kinds = RefusedKinds()
        self.clients = ClientAnswers()
        self._aged_at = math.inf

    def answered(self, instance: Instance, lease: Lease, now: float, *, counts_as_odd: bool) -> None:
        """Count an answer that ended well, or is odd."""
        request = lease.request
        if lease.judged and not lease.odd:  # its stream stood still, and went on
            self.not_lost(instance, lease, now)
        if self.clients.known and request.sequences:
            self.clients.well(request, instance.incarnation, odd=lease.odd)
        if self.kinds.by_key and not counts_as_odd:
            self.kinds.served(request, instance.name, lease.dispatched_at)

    def lost(self, instance: Instance, lease: Lease, now: float) -> None:
        """Count a lost answer against its instance, unless it was counted before."""
        request = lease.request
        if lease.judged or not request.sequences:
            return
        lease.judged = True
        client, session = client_of(request), session_of(request)
        for each in {client, session}:
            if each:
                self.clients.lost(each, instance.incarnation)
        instance.evidence.ended_badly(lease.id, now - lease.dispatched_at, client, session, now)
        if instance.evidence.failed(now):
            self._fleet.reindex(now)
        self.kinds.avoid(request, instance.name, now)
        self.judge(instance, now)

    def odd(self, instance: Instance, lease: Lease, now: float) -> bool:
        """Count an odd answer. Return True if it counts: others are not known to answer alike.

        Example: each prompt begins otherwise, and each answer is one token. None of these prompts was
        answered twice, but the client's other prompts were answered alike by other instances.
        """
        if lease.judged:
            return False
        lease.judged = True
        traffic, kind = traffic_of(lease.request), kind_of(lease.request)
        self.clients.lost(traffic, instance.incarnation)
        self.clients.lost(kind, instance.incarnation)
        counts = self._odd_counts(traffic, kind, instance)
        if counts:
            instance.evidence.ended_badly(lease.id, now - lease.dispatched_at, kind, traffic, now)
            instance.evidence.answers.odd_at = now
            self.kinds.avoid(lease.request, instance.name, now)
        else:  # this traffic is answered alike elsewhere: it may go there again
            instance.evidence.ended_well(now)
            for each in self._fleet.peers(instance):
                if not self._odd_counts(traffic, kind, each):
                    self.kinds.not_avoided(lease.request, each.name)
        self.judge(instance, now)
        return counts

    def _odd_counts(self, traffic: str, kind: str, instance: Instance) -> bool:
        """Return True if others answer this traffic, and this kind of the client, otherwise."""
        counted, incarnation = self.clients.counted, instance.incarnation
        return min(counted(traffic, incarnation, 1.0), counted(kind, incarnation, 1.0)) > 0.5

    def not_lost(self, instance: Instance, lease: Lease, now: float) -> None:
        """Take back a lost answer: another instance lost the same request."""
        request = lease.request
        if request.sequences:
            instance.evidence.answers.not_lost(client_of(request), session_of(request))
            self.kinds.not_avoided(request, instance.name)
            self.judge(instance, now)

    def judge(self, instance: Instance, now: float) -> bool:
        """Compare an instance, and all with an excess, with the others of their models.

        True if what one of them may get changed.
        """
        changed, peers = False, self._fleet.peers(instance)
        for each in peers:
            each.evidence.answers.weigh(self.clients, each.incarnation)
        for each in peers:
            if each is instance or each.evidence.answers.excess > 0.0:
                among = peers if each is instance else self._fleet.peers(each)
                changed = each.evidence.judge([peer.evidence for peer in among], now) or changed
                each.touched()
        if changed:
            self._fleet.reindex(now)
        return changed

    def age(self, now: float) -> None:
        """Reduce the weight of old answers, and forget old refusals."""
        self.kinds.age(now)
        self.clients.age(math.exp(min(0.0, self._aged_at - now) / MEMORY_S))
        self._aged_at = now
