"""Driver of the scheduler for an endpoint picker: Envoy owns the connections, each request is a stream.

Envoy does the work of the proxy's driver with connections to engines. A request is sent once. If an engine
fails, Envoy retries with the next instance of its list, and the lease follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from hetlb.balancer.clients.access import EngineAccess
from hetlb.balancer.clients.token_estimator import TokenEstimator
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.ledger import Booked
from hetlb.balancer.core.policies.candidates import PASSED_OVER
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Lease, Outcome, Reject, RejectReason, RequestId
from hetlb.balancer.engines.upstream import Upstream
from hetlb.balancer.exchange.driver import Driver, MakeSplits
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.exchange import Exchange
from hetlb.balancer.exchange.plain_attempt import Plain
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.balancer.telemetry.request_record import RequestRecord

#: Instances of a large fleet considered as fallbacks for the gateway's retries.
_FALLBACK_CANDIDATES: Final = 32
#: Largest fleet with ranked fallbacks, in instances.
MOST_RANKED_INSTANCES: Final = 128
_REASONS: Final = {
    Outcome.CONNECT_FAILED: (RejectReason.CONNECT_FAILED, "No instance accepted the connection."),
    Outcome.NO_RESPONSE: (RejectReason.NO_RESPONSE, "The instance closed the connection without answering."),
}


class PickDriver(Driver):
    """Driver of streams of Envoy."""

    def __init__(
        self,
        scheduler: Scheduler,
        table: ProxyTable,
        token_estimator: TokenEstimator,
        loop: asyncio.AbstractEventLoop,
        access: Mapping[str, EngineAccess],
        make_splits: MakeSplits,
    ) -> None:
        super().__init__(table, token_estimator, loop, access, make_splits)
        self.scheduler = scheduler
        # Envoy may show nothing of an answer, and moves none.
        self.picking = self.scheduling = SchedulerDriver(scheduler, self, by_counters=True)
        self.picking.moves_busy = False
        self.resumes = False  # the answers are Envoy's
        #: Streams of open requests, by request.
        self.streams: dict[RequestId, Upstream] = {}

    def pool(self, lease: Lease) -> Upstream:
        return self.streams[lease.request.id]

    def open_pool(self, incarnation: int, name: str, url: str) -> None:
        """Do nothing: the connections to engines are Envoy's."""

    def instances_changed(self) -> None:
        """Do nothing: no connection is to be closed, and no request has two legs."""

    def may_turn_away(self, lease: Lease) -> bool:
        return False  # it is with Envoy

    def finished(self, exchange: Exchange) -> None:
        super().finished(exchange)
        self.streams.pop(exchange.record.request.id, None)

    def try_again(self, record: RequestRecord, lease: Lease, end: End) -> None:
        """Turn the request down: Envoy has it, and its own retries are over."""
        scheduling = self.picking
        scheduling.lease_ended(lease, end.told, self.now(), retry=False)
        reason, detail = _REASONS[end.told]
        self.reject(Reject(lease.request.id, reason, detail), scheduling.drain_rate.spread(1.0))

    def served_elsewhere(self, exchange: Exchange, instance: str) -> None:
        """Envoy reached the answering instance after another one failed: the lease moves there."""
        record, attempt = exchange.record, exchange.attempt
        assert isinstance(attempt, Plain), "expected a request with a lease"
        lease = attempt.lease
        now = self.now()
        age_s = now - lease.dispatched_at
        live = Booked(lease.id, instance, lease.request, lease.work_ns, lease.predicted_output, age_s)
        if instance not in self.scheduler.fleet.instances:
            return  # outside the fleet: the lease stays as booked
        commands = self.scheduler.on_lease_ended(lease, Outcome.NO_RESPONSE, now, retry=False)
        self.counted.tried_again(lease.instance, Outcome.NO_RESPONSE)
        restored = self.scheduler.restore(live, now)
        assert restored is not None, "expected an instance of the fleet"
        record.lease = attempt.lease = restored
        record.retries += 1
        self.picking.carry_out(commands)

    def shed(self, exchange: Exchange) -> None:
        """Turn down a request that may not wait."""
        now, request_id = self.now(), exchange.record.request.id
        scheduling = self.picking
        scheduling.cancelled(request_id, now)
        detail = "Too many requests are waiting for an instance."
        again_s = scheduling.drain_rate.retry_after_s(scheduling.fleet.waiting, now)
        self.reject(Reject(request_id, RejectReason.QUEUE_FULL, detail), again_s)

    def fallbacks(self, count: int) -> list[str]:
        """Return the names of the instances that come next after the decision made last, the best first."""
        if count < 1:
            return []
        decision = self.picking.decisions[-1]
        chosen = decision.lease.instance
        if len(self.scheduler.instances) > MOST_RANKED_INSTANCES:
            return self._neighbours(decision.lease, count)
        # A passed-over instance has room: only the chosen one, which has failed then, was sooner.
        others = [
            each
            for each in decision.candidates
            if each.instance != chosen and (each.eligible or each.reason.startswith(PASSED_OVER))
        ]
        others.sort(key=lambda each: each.score)
        return [each.instance for each in others[:count]]

    def _neighbours(self, lease: Lease, count: int) -> list[str]:
        """Return the least busy of some instances of a large fleet: ranking all costs more."""
        instances, request = self.scheduler.instances, lease.request
        number = len(instances)
        found: list[tuple[float, str]] = []
        subset = request.places.subset
        for step in range(number):
            each = instances[(request.id * _FALLBACK_CANDIDATES + step) % number]
            if subset is not None and each.name not in subset:
                continue
            if each.name != lease.instance and each.routable and request.model in each.models:
                found.append((each.sequences / each.max_num_seqs, each.name))
                if len(found) >= _FALLBACK_CANDIDATES:
                    break
        found.sort()
        return [name for _, name in found[:count]]
