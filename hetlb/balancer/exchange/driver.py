"""Driver of the exchanges of one process: it carries out the scheduler's commands and reports facts to it.

Every accepted request has one exchange until its one terminal outcome, every lease ends once. Requests are
counted and logged many at once while others are open (`settle`), and before the counters are read.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from hetlb.balancer.clients.access import EngineAccess
from hetlb.balancer.clients.client_response import STARTED
from hetlb.balancer.clients.token_estimator import TokenEstimator
from hetlb.balancer.config.fleet_tables import ProxyTable
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.ready import gives_ids
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command, Dispatch, Lease, Outcome, Reject, RejectReason, RequestId
from hetlb.balancer.engines.engine_pools import EnginePools
from hetlb.balancer.engines.upstream import Upstream
from hetlb.balancer.exchange.driver_timers import Sweeper
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.exchange import Exchange, Maker
from hetlb.balancer.exchange.exchange_states import TURNED_AWAY, Phase
from hetlb.balancer.exchange.guard import Guard
from hetlb.balancer.exchange.kept_places import KeptPlaces
from hetlb.balancer.exchange.relocations import move_all_away
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.error_responses import Refusal
from hetlb.balancer.http.forward_headers import ForwardRules
from hetlb.balancer.http.http1 import RequestHead
from hetlb.balancer.telemetry.counters import Totals
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.turns import turns

#: Most ended requests that are counted and logged at once; fewer while no request is open. The client behind
#: them waits for it: 64 took 0.3 ms, which a lone client's p99 showed.
SETTLED_REQUESTS: Final = 16
#: Seconds of a pause of the process after which arrived bytes are read before anything times out.
GAP_S: Final = 1.0


class Splits(Maker):
    """Maker of attempts of requests that are split between instances (`options/split`)."""

    @abstractmethod
    def may_split(self, kind: Kind, path: str, body: bytes) -> bool:
        """Return True if a request with one prompt and one sequence can be split."""

    @abstractmethod
    def judged(self) -> None:
        """Count the scheduler's findings about earlier leases."""

    @abstractmethod
    def stop(self) -> None:
        """Break off the requests of the proxy's own."""


class Handshake(Maker):
    """Maker of the attempt of a request for a WebSocket. `model` is the requested one, None without any."""

    __slots__ = ("model",)

    model: str | None

    @abstractmethod
    def with_model(self, model: str) -> RequestHead:
        """Return the head with the engine's name of the model, in place of an alias."""


#: Makes `Splits` for a driver and its scheduler. The last argument carries out commands.
MakeSplits: TypeAlias = "Callable[[Driver, Scheduler, Callable[[list[Command]], None]], Splits]"


class Driver:
    """Exchanges, connections to engines and counters of one process. `drive` gives it a scheduler."""

    scheduling: SchedulerDriver

    def __init__(
        self,
        table: ProxyTable,
        token_estimator: TokenEstimator,
        loop: asyncio.AbstractEventLoop,
        access: Mapping[str, EngineAccess],
        make_splits: MakeSplits,
    ) -> None:
        self.loop = loop
        self.now = loop.time
        self.counted = Totals()
        self._make_splits = make_splits
        self.table = table
        self.token_estimator = token_estimator
        #: Requests that ended and were not counted yet.
        self._ended: list[RequestRecord] = []
        self.exchanges: dict[RequestId, Exchange] = {}
        self.sweeper = Sweeper(loop, self.swept, self.exchanges)
        #: Instances that keep answers for later requests.
        self.kept = KeptPlaces()
        self.forward_rules = ForwardRules(table.forward_headers)
        self.access = access
        #: True if answers may go on at another instance.
        self.resumes = True
        #: Called with ended requests, several at a time, and with each request that was refused.
        self.on_ended: Callable[[list[RequestRecord]], None] | None = None
        #: Called with the time at each sweep, for the time limits of clients.
        self.on_swept: Callable[[float], None] | None = None
        self._next_id: RequestId = 1
        #: Turns of the event loop for answers that go on at another instance.
        self.turns = turns(loop)
        self.pools = EnginePools(loop, table, access, self.sweeper.stalled_since)
        self.guard = Guard(self)
        #: None while no instance has ever taken part in a split.
        self.splits: Splits | None = None
        self._idle_waiters: list[asyncio.Future[None]] = []

    def drive(self, scheduler: Scheduler) -> SchedulerDriver:
        """Carry out the commands of a scheduler from now on; return its driver."""
        self.scheduling = SchedulerDriver(scheduler, self)
        self.instances_changed()
        return self.scheduling

    # --- requests ---

    def next_id(self) -> RequestId:
        """Return a fresh request id: the client's own label may come twice."""
        request_id = self._next_id
        self._next_id += 1
        return request_id

    def submit(self, exchange: Exchange) -> None:
        self.exchanges[exchange.record.request.id] = exchange
        if len(self.exchanges) == 1:
            self.sweeper.fire()
        try:
            self.scheduling.submit(exchange.record)
        except Refusal as refusal:
            exchange.refuse(refusal.answer, refusal.message, refusal.retry_after_s, refusal.lines)
        except Exception as error:
            self.guard.ended(exchange, error)

    def try_again(self, record: RequestRecord, lease: Lease, end: End) -> None:
        """End a lease and give its request back to the scheduler, which places or queues it again.

        Of an answer that the client has in part, only the missing rest is requested.
        """
        generated: int | None = None
        if record.resumed:
            generated = record.request.generated
            self.counted.resumed(record.request.model, end.name, end.told, lease)
        else:
            self.counted.tried_again(lease.instance, end.told)
        self.scheduling.lease_ended(lease, end.told, self.now(), retry=True, generated=generated)

    def give_up(self, request_id: RequestId) -> float:
        """Take a request out of the queue. Return the seconds after which its client should try again."""
        now, scheduling = self.now(), self.scheduling
        scheduling.cancelled(request_id, now)
        return scheduling.drain_rate.retry_after_s(scheduling.fleet.waiting, now)

    def finished(self, exchange: Exchange) -> None:
        """Count an exchange that has its outcome, and give its lease back."""
        record = exchange.record
        request_id, outcome, ended_at = record.request.id, record.outcome, record.ended_at
        del self.exchanges[request_id]
        assert outcome is not None
        assert ended_at is not None
        if record.ticket is not None:
            output = record.output_tokens or record.estimated_output_tokens
            record.ticket.ended(record.prompt_tokens_total, output, ended_at)
        lease, scheduling = record.lease, self.scheduling
        ended = self._ended
        ended.append(record)
        if len(ended) >= SETTLED_REQUESTS or not self.exchanges:
            self.settle()
        if lease is not None:
            scheduling.drain_rate.ended(ended_at)
            assert record.end is not None, "expected a lease to end in one of the ways of `exchange.ends`"
            scheduling.lease_ended(lease, record.end.told, ended_at, retry=False)
        elif record.ended_in is Phase.QUEUED and outcome in (Outcome.CLIENT_GONE, Outcome.SHUTDOWN):
            scheduling.cancelled(request_id, ended_at)
        self._told_if_idle()

    def dropped(self, exchange: Exchange) -> None:
        """End an exchange that could not end itself; the guard gives back its bookings."""
        record = exchange.record
        del self.exchanges[record.request.id]
        self.pools.drop(exchange.attempt)
        if record.ended_at is None:
            record.ended_at, record.ended_in = self.now(), exchange.phase
        exchange.phase = Phase.DONE
        record.outcome = Outcome.LOCAL_FAULT
        self._ended.append(record)
        if record.ticket is not None:
            record.ticket.ended(record.prompt_tokens_total, record.output_tokens, self.now())
        self._told_if_idle()

    def abandon(self, request_id: RequestId) -> None:
        """Give back all bookings of a request at the scheduler."""
        self.scheduling.abandon(request_id, self.now())

    def _told_if_idle(self) -> None:
        if self._idle_waiters and not self.exchanges:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def refused(self, outcome: Outcome, status: int, record: RequestRecord | None = None) -> None:
        """Count a request answered before the scheduler saw it; `record` where its head was read."""
        self.counted.count(outcome.value, Phase.QUEUED.value, "", status)
        if record is not None and self.on_ended is not None:
            self.on_ended([record])

    def log_lost(self, why: str) -> None:
        """Note that lines of a log are lost. May be called in any thread."""
        self.counted.recent.own["log_lost"] = self.now(), why

    def settle(self) -> None:
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        self.guard.run(lambda: _count(ended, self.scheduling, self.counted), "counting of ended requests")
        told = self.on_ended
        if told is not None:
            on_ended: Callable[[list[RequestRecord]], None] = told
            self.guard.run(lambda: on_ended(ended), "logging of ended requests")

    @property
    def totals(self) -> Totals:
        self.settle()
        return self.counted

    def tokens_so_far(self, lease: Lease) -> int:
        """Return the output tokens of a lease: all of them, or the tokens until now."""
        exchange = None if lease.ended else self.exchanges.get(lease.request.id)
        if exchange is None or exchange.record.lease is not lease:  # it is tried again with another one
            return lease.output_tokens
        return exchange.attempt.tokens_so_far

    # --- commands ---

    def dispatch(self, command: Dispatch, instance: Instance, decode: Instance | None) -> None:
        """Send a request to its instance; its decode leg, if it is split, goes to `decode`."""
        lease = command.lease
        exchange = self.exchanges[command.request_id]
        command.label = exchange.record.label
        try:
            self.open_pool(instance.incarnation, instance.name, instance.spec.url)
            maker: Maker = exchange.maker
            if decode is not None:
                self.open_pool(decode.incarnation, decode.name, decode.spec.url)
                assert self.splits is not None, "expected an instance with kv_transfer"
                maker = self.splits
            longest = instance.capacity.max_model_len or 0
            exchange.dispatched(maker, lease, gives_ids(instance), longest)
        except Exception as error:
            self.guard.ended(exchange, error)

    def reject(self, command: Reject, retry_after_s: float | None) -> None:
        """Reject a request; `retry_after_s` is None if another try is useless."""
        exchange, answer = self.exchanges[command.request_id], error_responses.REJECTIONS[command.reason]
        try:
            detail = command.detail
            if command.reason is RejectReason.NO_RESPONSE and exchange.dropped:
                detail = exchange.dropped
            exchange.refuse(answer, detail, retry_after_s)
        except Exception as error:
            self.guard.ended(exchange, error)

    def features(self, lease: Lease) -> tuple[str, ...]:
        """Return the features of the request of a lease (`request_features.py`)."""
        exchange = self.exchanges.get(lease.request.id)
        return () if exchange is None else exchange.outgoing.features

    def may_turn_away(self, lease: Lease) -> bool:
        """Return True if a lease without any answer bytes can be taken from its engine."""
        exchange = self.exchanges.get(lease.request.id)
        return (
            exchange is not None
            and exchange.record.lease is lease
            and exchange.phase in TURNED_AWAY.before
            and exchange.attempt.may_be_taken
            and exchange.response.state is not STARTED
        )

    def turned_away(self, lease: Lease, outcome: Outcome) -> None:
        """Give a request another lease: its engine refused it, is silent, or was thought to be faster."""
        self.counted.tried_again(lease.instance, outcome)
        self.exchanges[lease.request.id].back_to_queue(TURNED_AWAY)

    # --- connections to engines ---

    def identify(self, own: str, table: ProxyTable | None = None) -> None:
        """Set the name in `Via`: processes that serve one fleet share one."""
        self.forward_rules = ForwardRules((table or self.table).forward_headers, own)

    def configure(self, table: ProxyTable) -> None:
        if table.forward_headers != self.table.forward_headers:
            self.identify(self.forward_rules.own.decode("ascii"), table)
        self.table = table
        self.pools.configure(table, self.scheduling.scheduler.instances)

    def open_pool(self, incarnation: int, name: str, url: str) -> None:
        self.pools.open(incarnation, name, url)

    def pool(self, lease: Lease) -> Upstream:
        return self.pools.of(lease)

    def instances_changed(self) -> None:
        """Close connections to instances that left. Prepare splits if an instance has `kv_transfer`."""
        scheduler = self.scheduling.scheduler
        self.pools.drop_unused({each.incarnation for each in scheduler.instances})
        if self.splits is None and any(each.spec.kv_transfer for each in scheduler.instances):
            self.splits = self._make_splits(self, scheduler, self.scheduling.carry_out)

    def sampled(self) -> None:
        """Note that the metrics of an engine were read."""
        if self.splits is not None:
            self.splits.judged()

    # --- time ---

    def swept(self, lag_s: float) -> None:
        """Sweep, twice a second; this time `lag_s` late."""
        self.counted.lag.observe(lag_s)
        self.counted.recent.late(lag_s)
        self.settle()
        now, table = self.now(), self.table
        if lag_s <= GAP_S:
            if self.on_swept is not None:
                self.on_swept(now)
            for exchange in list(self.exchanges.values()):
                if exchange.phase is not Phase.DONE:
                    try:
                        exchange.sweep(now, table)
                    except Exception as error:
                        self.guard.ended(exchange, error)
        run = self.guard.run
        instances = self.scheduling.scheduler.instances
        if any(each.leaves_at is not None for each in instances):
            run(lambda: move_all_away(self, now), "moving requests away")
        run(lambda: self.pools.sweep(now), "sweeping connections")
        run(lambda: self.pools.drop_unused({each.incarnation for each in instances}), "closing connections")
        run(lambda: self.counted.keep({each.name for each in instances}), "counting")
        run(lambda: self.scheduling.sweep(now), "sweeping the scheduler")

    # --- the end ---

    async def drain(self, grace_s: float) -> None:
        """Wait until no request is open, for at most `grace_s`; then end the others."""
        if self.exchanges:
            waiter: asyncio.Future[None] = self.loop.create_future()
            self._idle_waiters.append(waiter)
            await asyncio.wait([waiter], timeout=grace_s)
        self.shut_down()

    def shut_down(self) -> None:
        for exchange in list(self.exchanges.values()):
            if exchange.phase is not Phase.DONE:
                try:
                    exchange.shut_down()
                except Exception as error:
                    self.guard.ended(exchange, error)

    def close(self) -> None:
        """Stop the timers and close idle connections. Call after `drain`."""
        self.settle()
        self.sweeper.close()
        if self.splits is not None:
            self.splits.stop()
        self.scheduling.close()
        self.pools.close()


def _count(ended: list[RequestRecord], scheduling: SchedulerDriver, counted: Totals) -> None:
    for record in ended:
        # A name that no instance ever served was made up by a client. It must not become a label.
        served = record.lease is not None or record.request.model in scheduling.fleet.models
        counted.finished(record, served)
