"""The proxy's driver of the scheduler: it owns the clock, reports facts and carries out commands.

Promise: the scheduler is called from the event loop only, and what it says is done in the same turn; every
accepted request has one exchange until its one terminal outcome, every lease ends once; when nothing is in
flight, every figure is zero.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable

from hetlb.config import ProxyTable
from hetlb.core.instance import Instance
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import (
    Abort,
    Command,
    Dispatch,
    EngineSample,
    HealthChanged,
    InstanceChange,
    Lease,
    Outcome,
    Reject,
    RequestId,
)
from hetlb.proxy.exchange import Exchange, Phase
from hetlb.proxy.metrics import Totals
from hetlb.proxy.sizes import PromptSizes
from hetlb.proxy.upstream import EnginePool

logger = logging.getLogger("hetlb.proxy")

#: Deadlines of requests are looked at this often.
SWEEP_S = 0.5
DECISIONS_KEPT = 1000
RESPONSES_KEPT = 10_000


class Driver:
    """Between exchanges and scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        table: ProxyTable,
        sizes: PromptSizes,
        loop: asyncio.AbstractEventLoop,
        on_finished: Callable[[Exchange, Phase], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.table = table
        self.sizes = sizes
        self.loop = loop
        self.now = loop.time
        self.totals = Totals()
        self.decisions: deque[Dispatch] = deque(maxlen=DECISIONS_KEPT)
        self.exchanges: dict[RequestId, Exchange] = {}
        #: Where an answer that can be asked for again was made: response id -> instance.
        self.made_at: OrderedDict[str, str] = OrderedDict()
        self._on_finished = on_finished
        self._pools: dict[int, EnginePool] = {}
        self._next_id = 1
        self._ticker: asyncio.TimerHandle | None = None
        self._sweeper: asyncio.TimerHandle | None = loop.call_later(SWEEP_S, self._sweep)
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
        self.carry_out(self.scheduler.on_arrival(exchange.request, exchange.arrived_at))

    def first_token(self, lease: Lease, now: float) -> None:
        """The answer of a lease began."""
        self.carry_out(self.scheduler.on_first_token(lease, now))

    def lease_ended(self, lease: Lease, outcome: Outcome, *, retry: bool) -> None:
        """A lease ended; with `retry` the scheduler says what becomes of its request."""
        totals, key = self.totals, (lease.instance, outcome)
        totals.instance_requests[key] = totals.instance_requests.get(key, 0) + 1
        if retry:
            totals.retries += 1
        self.carry_out(self.scheduler.on_lease_ended(lease, outcome, self.now(), retry=retry))

    def finished(self, exchange: Exchange, phase: Phase) -> None:
        """An exchange has its terminal outcome; it ended in `phase`."""
        outcome = exchange.outcome
        assert outcome is not None
        del self.exchanges[exchange.request.id]
        totals, key = self.totals, (outcome, phase.value)
        totals.requests[key] = totals.requests.get(key, 0) + 1
        lease = exchange.lease
        if self._on_finished is not None:
            self._on_finished(exchange, phase)
        if lease is not None:
            name = lease.instance
            totals.instance_tokens[name] = totals.instance_tokens.get(name, 0) + lease.output_tokens
            prompt = exchange.prompt_tokens_used or exchange.request.prompt_tokens
            totals.prompt_tokens[name] = totals.prompt_tokens.get(name, 0) + prompt
            self.lease_ended(lease, outcome, retry=False)
        elif phase is Phase.QUEUE and outcome in (Outcome.CLIENT_GONE, Outcome.SHUTDOWN):
            self.carry_out(self.scheduler.on_cancelled(exchange.request.id, self.now()))
        if not self.exchanges:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def learn_size(self, model: str, text_bytes: int, tokens: int) -> None:
        """An engine said how long a prompt was."""
        self.sizes.learn(model, text_bytes, tokens)

    def remember_response(self, response_id: str, instance: str) -> None:
        """An answer that can be asked for again was made at `instance`."""
        self.made_at[response_id] = instance
        if len(self.made_at) > RESPONSES_KEPT:
            del self.made_at[next(iter(self.made_at))]

    # --- instances ---

    def change(self, change: InstanceChange) -> None:
        """Something about an instance changed."""
        self.carry_out(self.scheduler.on_instance(change, self.now()))
        self._drop_unused_pools()

    def sample(self, name: str, sample: EngineSample) -> None:
        """An engine's metrics were read."""
        self.carry_out(self.scheduler.on_scrape(name, sample, self.now()))

    def set_policy(self, name: str) -> None:
        """Switch the policy."""
        self.carry_out(self.scheduler.set_policy(name, self.now()))

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
            if isinstance(command, Dispatch):
                self._dispatch(command)
            elif isinstance(command, Reject):
                self.exchanges[command.request_id].rejected(command)
            elif isinstance(command, HealthChanged):
                level = logging.INFO if command.health.value == "up" else logging.WARNING
                logger.log(level, "%s is %s: %s", command.instance, command.health, command.reason)
            else:
                assert isinstance(command, Abort)
                self.exchanges[command.request_id].client_gone()
        if self._ticker is None and (deadline := self.scheduler.next_deadline()) is not None:
            self._ticker = self.loop.call_at(deadline, self._tick)

    def _dispatch(self, command: Dispatch) -> None:
        self.totals.decisions += 1
        self.decisions.append(command)
        lease = command.lease
        if lease.incarnation not in self._pools:
            self._pool_of(next(i for i in self.scheduler.instances if i.incarnation == lease.incarnation))
        self.exchanges[command.request_id].dispatched(lease, lease.dispatched_at)

    # --- time ---

    def _tick(self) -> None:
        self._ticker = None
        self.carry_out(self.scheduler.on_tick(self.now()))

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        now, table = self.now(), self.table
        for exchange in list(self.exchanges.values()):
            if exchange.phase is not Phase.DONE:
                exchange.sweep(now, table.first_byte_timeout_s, table.idle_timeout_s)
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
        for timer in (self._ticker, self._sweeper):
            if timer is not None:
                timer.cancel()
        self._ticker = self._sweeper = None
        for pool in self._pools.values():
            pool.close()
