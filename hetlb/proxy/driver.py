"""The proxy's driver of the scheduler: it owns the clock, reports facts and carries out commands.

Promise: the scheduler is called from the event loop only, and what it says is done in the same turn; every
accepted request has one exchange until its one terminal outcome, every lease ends once; when nothing is in
flight, every figure is zero. What is only counted, kept or logged of a request is done for many of them at
once (`settle`), and before anybody looks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final

from hetlb.config import ProxyTable
from hetlb.core.instance import Instance
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import (
    Abort,
    Command,
    Dispatch,
    EngineSample,
    Health,
    HealthChanged,
    InstanceChange,
    Lease,
    Outcome,
    PassOn,
    Probed,
    ProbeResult,
    Reject,
    RejectReason,
    RequestId,
)
from hetlb.proxy.access import PLAIN_ACCESS, EngineAccess
from hetlb.proxy.body import Call
from hetlb.proxy.exchange import Exchange
from hetlb.proxy.expected import expected_s
from hetlb.proxy.retryafter import DrainRate
from hetlb.proxy.telemetry.counters import Totals
from hetlb.proxy.telemetry.histograms import Gaps
from hetlb.proxy.telemetry.request_record import Phase
from hetlb.proxy.token_estimator import TokenEstimator
from hetlb.proxy.upstream import EnginePool

logger = logging.getLogger("hetlb.proxy")

#: Deadlines of requests are looked at this often.
SWEEP_S: Final = 0.5
#: So many ended requests are counted and logged at once; fewer at the next sweep.
SETTLED_AT_ONCE: Final = 64
#: After a pause of the process this long, what came meanwhile is read before anybody is told of a timeout.
GAP_S: Final = 1.0
#: An instance from which something came within so many seconds is not failed by a probe.
EMITS_S: Final = 2.0
DECISIONS_KEPT: Final = 1000
#: A decision keeps figures of every instance: of a large fleet fewer are kept, so that they stay some 10 MB.
CANDIDATES_KEPT: Final = 50_000
RESPONSES_KEPT: Final = 10_000


class Driver:
    """Between exchanges and scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        table: ProxyTable,
        token_estimator: TokenEstimator,
        loop: asyncio.AbstractEventLoop,
        on_ended: Callable[[list[Exchange]], None] | None = None,
        access: Mapping[str, EngineAccess] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.table = table
        self.token_estimator = token_estimator
        self.loop = loop
        self.now = loop.time
        self._totals = Totals()
        self._arrival_s: list[float] = []
        self._end_s: list[float] = []
        #: Requests that ended and were not counted yet.
        self._ended: list[Exchange] = []
        self.decisions: deque[Dispatch] = deque()
        self._bound_decisions()
        self.exchanges: dict[RequestId, Exchange] = {}
        #: Where, and for whom, an answer that can be asked for again was made: by response id.
        self.made_at: OrderedDict[str, tuple[str, str | None]] = OrderedDict()
        #: How the engines are reached, by instance. To be changed by the owner of this mapping alone.
        self._access = {} if access is None else access
        self._on_ended = on_ended
        self._drain_rate = DrainRate(random.Random())
        self._pools: dict[int, EnginePool] = {}
        self._next_id = 1
        self._ticker: asyncio.TimerHandle | None = None
        self._sweeper: asyncio.TimerHandle | None = loop.call_later(SWEEP_S, self._sweep)
        self._sweep_due = perf_counter() + SWEEP_S
        self._idle_waiters: list[asyncio.Future[None]] = []

    # --- requests ---

    def next_id(self) -> RequestId:
        """A fresh request id: the client's own label may come twice."""
        request_id = self._next_id
        self._next_id += 1
        return request_id

    def submit(self, exchange: Exchange) -> None:
        """A whole request came in."""
        self.exchanges[exchange.request.id] = exchange
        started = perf_counter()
        commands = self.scheduler.on_arrival(exchange.request, exchange.arrived_at)
        self._arrival_s.append(perf_counter() - started)
        self.carry_out(commands)

    def first_token(self, lease: Lease, now: float) -> None:
        """The answer of a lease began."""
        if commands := self.scheduler.on_first_token(lease, now):
            self.carry_out(commands)

    def lease_ended(self, lease: Lease, outcome: Outcome, *, retry: bool, server_error: bool = False) -> None:
        """A lease ended; with `retry` the scheduler says what becomes of its request.

        `server_error`: the engine answered in full, with a status of 500 or more.
        """
        if retry:
            self._totals.tried_again(lease.instance, outcome)
        started = perf_counter()
        commands = self.scheduler.on_lease_ended(
            lease, outcome, self.now(), retry=retry, server_error=server_error
        )
        self._end_s.append(perf_counter() - started)
        if commands or self._ticker is None:
            self.carry_out(commands)

    def busy(self, exchange: Exchange, lease: Lease, retry_after_s: float) -> None:
        """An engine has no room for a request and says when to come again."""
        commands = self.scheduler.on_busy(lease, retry_after_s, self.now())
        if lease.ended:
            exchange.turned_away()
            self._totals.tried_again(lease.instance, Outcome.UPSTREAM_ERROR)
        self.carry_out(commands)

    def give_up(self, exchange: Exchange) -> float:
        """Nobody waits for this request much longer: take it out of the queue. When to try again, seconds."""
        self.carry_out(self.scheduler.on_cancelled(exchange.request.id, self.now()))
        return self._drain_rate.retry_after_s(len(self.scheduler.queue), self.now())

    def retry_after_s(self, reject: Reject) -> float | None:
        """When the client of a rejected request should come again, None where that would be of no use."""
        if reject.retry_after_s is None:
            return None
        if reject.reason in (RejectReason.QUEUE_FULL, RejectReason.QUEUE_EXPIRED):
            return self._drain_rate.retry_after_s(len(self.scheduler.queue), self.now())
        return self._drain_rate.spread(reject.retry_after_s)

    def finished(self, exchange: Exchange) -> None:
        """An exchange has its terminal outcome."""
        outcome, ended_at = exchange.outcome, exchange.ended_at
        assert outcome is not None
        assert ended_at is not None
        del self.exchanges[exchange.request.id]
        lease = exchange.lease
        ended = self._ended
        ended.append(exchange)
        if len(ended) >= SETTLED_AT_ONCE:
            self.settle()
        if lease is not None:
            self._drain_rate.ended(ended_at)
            self.lease_ended(lease, outcome, retry=False, server_error=exchange.server_error)
        elif exchange.ended_in is Phase.QUEUE and outcome in (Outcome.CLIENT_GONE, Outcome.SHUTDOWN):
            self.carry_out(self.scheduler.on_cancelled(exchange.request.id, ended_at))
        if self._idle_waiters and not self.exchanges:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def refused(self, outcome: Outcome) -> None:
        """A request was answered before it became one."""
        self._totals.count(outcome, Phase.QUEUE.value)

    def settle(self) -> None:
        """Count and log the requests that ended since the last time."""
        totals = self._totals
        totals.arrival.observe_all(self._arrival_s)
        totals.end.observe_all(self._end_s)
        self._arrival_s.clear()
        self._end_s.clear()
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        models = self.scheduler.models
        for exchange in ended:
            # A name that was never served is a client's: it must not become a label.
            totals.finished(exchange, exchange.lease is not None or exchange.request.model in models)
        if self._on_ended is not None:
            self._on_ended(ended)

    @property
    def totals(self) -> Totals:
        """Everything counted so far."""
        self.settle()
        return self._totals

    def gaps(self, model: str) -> Gaps:
        """Where the times between the tokens of a model's streams are counted."""
        return self._totals.model(model).gaps

    def learn_prompt(self, model: str, call: Call, tokens: int) -> None:
        """The engine counted `tokens` in the prompts of a body that were estimated."""
        self.token_estimator.learn(model, call.text_bytes, call.images, tokens)

    def remember_response(self, response_id: str, instance: str, tenant: str | None) -> None:
        """An answer that can be asked for again was made at `instance`, for `tenant`."""
        self.made_at[response_id] = instance, tenant
        if len(self.made_at) > RESPONSES_KEPT:
            del self.made_at[next(iter(self.made_at))]

    def kept_at(self, response_id: str, owner: str | None) -> tuple[str, str | None] | None:
        """Which instance keeps an answer, and whose it is; None where it is not known. `owner` asks."""
        return self.made_at.get(response_id)

    # --- instances ---

    def change(self, change: InstanceChange) -> None:
        """Something about an instance changed."""
        if isinstance(change, Probed) and change.result is ProbeResult.FAILED and self._emits(change.name):
            return  # busy, not dead: its probes wait behind its work
        self.carry_out(self.scheduler.on_instance(change, self.now()))
        self._drop_unused_pools()
        self._bound_decisions()

    def _emits(self, name: str) -> bool:
        """Whether part of an answer came from an instance lately."""
        since = self.now() - EMITS_S
        return any(
            exchange.phase is Phase.STREAM and exchange.since >= since
            for exchange in self.exchanges.values()
            if exchange.lease is not None and exchange.lease.instance == name
        )

    def _bound_decisions(self) -> None:
        kept = min(DECISIONS_KEPT, CANDIDATES_KEPT // max(1, len(self.scheduler.instances)))
        if self.decisions.maxlen != kept:
            self.decisions = deque(self.decisions, maxlen=kept)

    def sample(self, name: str, sample: EngineSample) -> None:
        """An engine's metrics were read."""
        self.carry_out(self.scheduler.on_scrape(name, sample, self.now()))

    def set_policy(self, name: str) -> None:
        """Switch the policy."""
        self.carry_out(self.scheduler.set_policy(name, self.now()))

    def configure(self, table: ProxyTable) -> None:
        """New limits, times and keys, for what begins from now on."""
        self.table = table
        for instance in self.scheduler.instances:
            if (pool := self._pools.get(instance.incarnation)) is not None:
                pool.configure(
                    self._access.get(instance.name, PLAIN_ACCESS),
                    connect_timeout_s=table.connect_timeout_s,
                    idle_s=table.upstream_idle_s,
                )

    def tokens_so_far(self, lease: Lease) -> int:
        """Output tokens of a lease: all of them, or those that came until now."""
        exchange = None if lease.ended else self.exchanges.get(lease.request.id)
        if exchange is None or exchange.lease is not lease:  # a request that is tried again has another lease
            return lease.output_tokens
        return exchange.tokens_so_far

    def pool(self, lease: Lease) -> EnginePool:
        """The connections to the incarnation a lease is tied to."""
        return self._pools[lease.incarnation]

    @property
    def engine_connections(self) -> int:
        """Connections to engines, in use or idle."""
        return sum(pool.open_connections for pool in self._pools.values())

    def _pool_of(self, instance: Instance) -> EnginePool:
        pool = self._pools.get(instance.incarnation)
        if pool is None:
            table = self.table
            pool = self._pools[instance.incarnation] = EnginePool(
                instance.spec.url,
                self.loop,
                self._access.get(instance.name, PLAIN_ACCESS),
                connect_timeout_s=table.connect_timeout_s,
                idle_s=table.upstream_idle_s,
            )
        return pool

    def _drop_unused_pools(self) -> None:
        if len(self._pools) <= len(self.scheduler.instances):
            return
        live = {instance.incarnation for instance in self.scheduler.instances}
        for incarnation, pool in list(self._pools.items()):
            if incarnation not in live:
                pool.close()
                if not pool.open_connections:
                    del self._pools[incarnation]

    # --- commands ---

    def carry_out(self, commands: list[Command]) -> None:
        """Do what the scheduler said."""
        for command in commands:
            if type(command) is Dispatch:
                self._dispatch(command)
            elif isinstance(command, Reject):
                self.exchanges[command.request_id].rejected(command)
            elif isinstance(command, HealthChanged):
                self._health_changed(command)
            elif isinstance(command, Abort):
                self.exchanges[command.request_id].client_gone()
            else:
                assert isinstance(command, PassOn)  # what the engine says goes on by itself
        if self._ticker is None and (deadline := self.scheduler.next_deadline()) is not None:
            self._ticker = self.loop.call_at(deadline, self._tick)

    def _health_changed(self, command: HealthChanged) -> None:
        if command.health is Health.EJECTED:
            self._totals.instance(command.instance).ejections += 1
        level = logging.INFO if command.health.value == "up" else logging.WARNING
        logger.log(level, "%s is %s: %s", command.instance, command.health, command.reason)

    def _dispatch(self, command: Dispatch) -> None:
        self._totals.decisions += 1
        self.decisions.append(command)
        lease = command.lease
        instance = self.scheduler.holder(lease)
        if lease.incarnation not in self._pools:
            self._pool_of(instance)
        exchange = self.exchanges[command.request_id]
        exchange.dispatched(lease, lease.dispatched_at, expected_s(instance, lease))

    # --- time ---

    def _tick(self) -> None:
        self._ticker = None
        self.carry_out(self.scheduler.on_tick(self.now()))

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        clock = perf_counter()
        self.settle()
        lag_s = max(0.0, clock - self._sweep_due)
        self._totals.lag.observe(lag_s)
        self._sweep_due = clock + SWEEP_S
        now, table = self.now(), self.table
        for exchange in list(self.exchanges.values()) if lag_s <= GAP_S else ():
            if exchange.phase is not Phase.DONE:
                exchange.sweep(now, table.first_byte_timeout_s, table.idle_timeout_s, table.heartbeat_s)
        for pool in self._pools.values():
            pool.sweep(now)
        self._drop_unused_pools()

    # --- the end ---

    async def drain(self, grace_s: float) -> None:
        """Wait until no request is open, for at most `grace_s`; then end the others."""
        if self.exchanges:
            waiter: asyncio.Future[None] = self.loop.create_future()
            self._idle_waiters.append(waiter)
            await asyncio.wait([waiter], timeout=grace_s)
        for exchange in list(self.exchanges.values()):
            if exchange.phase is not Phase.DONE:
                exchange.shut_down()

    def close(self) -> None:
        """Stop the timers and close idle connections. Call after `drain`."""
        self.settle()
        for timer in (self._ticker, self._sweeper):
            if timer is not None:
                timer.cancel()
        self._ticker = self._sweeper = None
        for pool in self._pools.values():
            pool.close()
