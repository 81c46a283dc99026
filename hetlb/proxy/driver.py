"""Drivers between the exchanges of this process and the scheduler.

`ExchangeDriver` owns the clock, the exchanges, the connections to engines and the counters; `Driver` adds a
scheduler in this process: it reports facts to it and carries out its commands in the same turn of the event
loop. A relay's driver (`workers/relay_driver.py`) does so over a socket. Every accepted request has one
exchange until its one terminal outcome, every lease ends once; with nothing in flight, every figure is zero.
What is only counted, kept or logged of a request is done for many at once (`settle`), and before the counters
are read.
"""

from __future__ import annotations

import asyncio
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Final

from hetlb.config.fleet_tables import ProxyTable
from hetlb.core.instance import NOTICE_MARGIN_S
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import (
    HAND_OVER,
    Abort,
    AdminState,
    AdminStateSet,
    Dispatch,
    Lease,
    Outcome,
    Reject,
    Request,
    RequestId,
)
from hetlb.proxy.access import EngineAccess
from hetlb.proxy.ends import End
from hetlb.proxy.engine_pools import EnginePools, Target
from hetlb.proxy.exchange import Exchange
from hetlb.proxy.exchange_states import TURNED_AWAY, Phase
from hetlb.proxy.http import error_responses
from hetlb.proxy.http.error_responses import Refusal
from hetlb.proxy.http.forward_headers import ForwardRules
from hetlb.proxy.http.openai_body import Call
from hetlb.proxy.http.retry_after import DrainRate
from hetlb.proxy.scheduler_driver import EMITS_S, SchedulerDriver
from hetlb.proxy.scheduling import (
    Responses,
    StallWatch,
    log_loop,
    only_model,
    retry_after_s,
    served_at,
    several_models,
)
from hetlb.proxy.telemetry.counters import Totals
from hetlb.proxy.telemetry.histograms import GapHistogram
from hetlb.proxy.telemetry.request_record import RequestRecord
from hetlb.proxy.token_estimator import TokenEstimator
from hetlb.proxy.upstream import Upstream

if TYPE_CHECKING:
    from hetlb.proxy.kv_transfers import KvTransfers

#: Deadlines of requests are looked at this often.
SWEEP_S: Final = 0.5
#: So many ended requests are counted and logged at once; fewer at the next sweep.
SETTLED_AT_ONCE: Final = 64
#: Reads of streams that may go on elsewhere are kept as they come up to this number, 330 bytes each, in all
#: streams; so many of those beyond are looked at in one sweep, 3 us each.
MOST_KEPT: Final = 200_000
_LOOKED_AT: Final = 10_000
#: After a pause of the process this long, what came meanwhile is read before a request times out.
GAP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class DriverSetup:
    """Parts of every driver of exchanges.

    `on_ended` gets the requests that ended, some at once, `on_refused` each that did not pass. `access`
    says how the engines are reached, by instance; the owner of this mapping alone changes it.
    """

    table: ProxyTable
    token_estimator: TokenEstimator
    loop: asyncio.AbstractEventLoop
    on_ended: Callable[[list[Exchange]], None] | None = None
    on_refused: Callable[[RequestRecord], None] | None = None
    access: Mapping[str, EngineAccess] = field(default_factory=dict)


class ExchangeDriver(ABC):
    """Exchanges, connections to engines and counters of one process, wherever its scheduler is."""

    def __init__(self, setup: DriverSetup) -> None:
        self.table = table = setup.table
        self.token_estimator = setup.token_estimator
        self.loop = loop = setup.loop
        self.now = loop.time
        self._totals = Totals()
        #: Requests that ended and were not counted yet.
        self._ended: list[Exchange] = []
        self.exchanges: dict[RequestId, Exchange] = {}
        self.forward_rules = ForwardRules(table.forward_headers)
        self._access = setup.access
        self._on_ended = setup.on_ended
        self._on_refused = setup.on_refused
        self._drain_rate = DrainRate(random.Random())
        self._next_id = 1
        self._sweeper: asyncio.TimerHandle | None = loop.call_later(SWEEP_S, self._sweep)
        self._sweep_due = perf_counter() + SWEEP_S
        self.stalls = StallWatch(loop)
        self.pools = EnginePools(loop, table, setup.access, self.stalls.since)
        self._idle_waiters: list[asyncio.Future[None]] = []

    # --- the scheduler, here or in another process ---

    @property
    @abstractmethod
    def models(self) -> Collection[str]:
        """Every name that some instance answers to."""

    def available(self, model: str) -> bool:
        """True if some instance of a model takes requests, as far as this process knows."""
        return True

    @property
    def splits(self) -> bool:
        """True if some requests are prefilled at one instance and decoded at another."""
        return False

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests that wait for an instance."""

    @abstractmethod
    def submit(self, exchange: Exchange) -> None:
        """A whole request came in."""

    @abstractmethod
    def first_token(self, lease: Lease, now: float) -> None:
        """The answer of a lease began."""

    @abstractmethod
    def lease_ended(self, lease: Lease, outcome: Outcome, *, retry: bool) -> None:
        """A lease ended; with `retry` the scheduler says what becomes of its request."""

    def goes_on(self, rest: Request, lease: Lease, end: End) -> None:
        """The engine of a lease is lost; `rest`, what is missing of its answer, goes on elsewhere."""
        self._totals.resumed(rest.model, end.name, end.told, lease)
        self._go_on(rest, lease, end)

    @abstractmethod
    def _go_on(self, rest: Request, lease: Lease, end: End) -> None:
        """End a lease and let the scheduler place the rest of its answer."""

    @property
    def resumes(self) -> bool:
        """True if answers may go on at another instance."""
        return True

    @property
    @abstractmethod
    def leaving(self) -> dict[str, float]:
        """Times at which instances with a notice are gone, by their names."""

    @abstractmethod
    def busy(self, lease: Lease, retry_after_s: float) -> None:
        """An engine has no room for a request and says when to come again: another instance may get it."""

    @abstractmethod
    def cancelled(self, request_id: RequestId, now: float) -> None:
        """The client of a waiting request left."""

    @abstractmethod
    def retry_after_s(self, reject: Reject) -> float | None:
        """Seconds until the client of a rejected request should try again, None where that is of no use."""

    @abstractmethod
    def targets(self) -> Iterable[Target]:
        """The engines that may get requests."""

    @abstractmethod
    def remember_response(self, response_id: str, instance: str, tenant: str | None) -> None:
        """An answer that can be asked for again was made at `instance`, for `tenant`."""

    @abstractmethod
    def pin(self, response_id: str, tenant: str | None, *, strict: bool) -> str | None:
        """The instance to pin a request to that continues or asks for an earlier answer.

        Raises `GateError` (404) where it is not known, or not `tenant`'s. Unless `strict`, None where it is
        not known and may have been made before: the engine decides.
        """

    @abstractmethod
    def pinned_serves(self, pinned: str, model: str) -> bool:
        """True if the instance that a request is pinned to answers to a model."""

    @abstractmethod
    def serves(self, lease: Lease) -> bool:
        """True if the instance of a lease serves its model, as far as is known."""

    @abstractmethod
    def came_back(self, instance: str) -> None:
        """A request to an instance came back to this proxy: nothing goes there any more."""

    @abstractmethod
    def model_at(self, pinned: str | None) -> str:
        """The model of a request that names none. Raises `GateError` (400) where there are several."""

    @property
    def transfers(self) -> KvTransfers:
        """KV transfers; only where the scheduler is in this process."""
        raise NotImplementedError

    # --- requests ---

    def next_id(self) -> RequestId:
        """A fresh request id: the client's own label may come twice."""
        request_id = self._next_id
        self._next_id += 1
        return request_id

    def give_up(self, request_id: RequestId) -> float:
        """A request's client waits no longer: take it out of the queue. When to try again, in seconds."""
        now = self.now()
        self.cancelled(request_id, now)
        return self._drain_rate.retry_after_s(self.waiting, now)

    def finished(self, request_id: RequestId) -> None:
        """An exchange has its terminal outcome."""
        exchange = self.exchanges.pop(request_id)
        outcome, ended_at = exchange.outcome, exchange.ended_at
        assert outcome is not None
        assert ended_at is not None
        if exchange.ticket is not None:
            exchange.ticket.ended(exchange.prompt_tokens_total, exchange.output_tokens, ended_at)
        lease = exchange.lease
        ended = self._ended
        ended.append(exchange)
        if len(ended) >= SETTLED_AT_ONCE:
            self.settle()
        if lease is not None:
            self._drain_rate.ended(ended_at)
            end = exchange.end
            assert end is not None, "expected a lease to end in one of the ways of `proxy.ends`"
            self.lease_ended(lease, end.told, retry=False)
        elif exchange.ended_in is Phase.QUEUED and outcome in (Outcome.CLIENT_GONE, Outcome.SHUTDOWN):
            self.cancelled(request_id, ended_at)
        if self._idle_waiters and not self.exchanges:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def turn_down(self, exchange: Exchange, reject: Reject) -> None:
        """Answer a request that gets no instance."""
        answer = error_responses.REJECTIONS[reject.reason]
        exchange.refuse(answer, reject.detail, self.retry_after_s(reject))

    def refused(self, outcome: Outcome, status: int, record: RequestRecord | None = None) -> None:
        """A request was answered before the scheduler saw it; `record` where its head was read."""
        self._totals.count(outcome, Phase.QUEUED.value, "", status)
        if record is not None and self._on_refused is not None:
            self._on_refused(record)

    def settle(self) -> None:
        """Count and log the requests that ended since the last time."""
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        models, totals = self.models, self._totals
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

    def gaps(self, model: str) -> GapHistogram:
        """The counts of times between the tokens of a model's streams."""
        return self._totals.model(model).gaps

    def learn_prompt(self, model: str, call: Call, tokens: int) -> None:
        """The engine counted `tokens` in the prompts of a body that were estimated."""
        self.token_estimator.learn(model, call.text_bytes, call.images, tokens)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of engines that tell of theirs, 0 where none does or it is not known here."""
        return 0

    def streaming(self, since: float) -> set[str]:
        """The instances of which part of an answer came since then."""
        return {
            exchange.lease.instance
            for exchange in self.exchanges.values()
            if exchange.lease is not None and exchange.phase is Phase.STREAMING and exchange.since >= since
        }

    def identify(self, own: str, table: ProxyTable | None = None) -> None:
        """Set the name in `Via`: processes that serve one fleet share one."""
        self.forward_rules = ForwardRules((table or self.table).forward_headers, own)

    def tokens_so_far(self, lease: Lease) -> int:
        """Output tokens of a lease: all of them, or those that came until now."""
        exchange = None if lease.ended else self.exchanges.get(lease.request.id)
        if exchange is None or exchange.lease is not lease:  # a request that is tried again has another lease
            return lease.output_tokens
        return 0 if exchange.answer is None else exchange.answer.tokens_so_far

    # --- connections to engines ---

    def configure(self, table: ProxyTable) -> None:
        """New limits, times and keys, for what begins from now on."""
        if table.forward_headers != self.table.forward_headers:
            self.identify(self.forward_rules.own.decode("ascii"), table)
        self.table = table
        self.pools.configure(table, self.targets())

    @property
    def access(self) -> Mapping[str, EngineAccess]:
        """Keys and certificates of the engines, by instance."""
        return self._access

    def pool(self, lease: Lease) -> Upstream:
        """The way to the incarnation a lease is tied to."""
        return self.pools.of(lease)

    def open_pool(self, incarnation: int, name: str, url: str) -> None:
        """Open a pool for an instance that gets a request."""
        self.pools.open(incarnation, name, url)

    def drop_unused_pools(self) -> None:
        """Close the connections to instances that left, as soon as they carry nothing."""
        self.pools.drop_unused({target.incarnation for target in self.targets()})

    # --- time ---

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
        if leaving := self.leaving:
            self._move_away(leaving, now)
        self._keep_less()
        self.pools.sweep(now)
        self.drop_unused_pools()
        self._totals.keep({target.name for target in self.targets()})

    def _move_away(self, leaving: Mapping[str, float], now: float) -> None:
        """Move what cannot end before its instance leaves, evenly until then, the shortest first."""
        for name, gone_at in leaving.items():
            left_s = gone_at - NOTICE_MARGIN_S - now
            late = []
            for each in self.exchanges.values():
                if each.lease is not None and each.lease.instance == name and each.phase is not Phase.QUEUED:
                    ends_at = each.lease.dispatched_at + each.expected_s
                    if ends_at > now + left_s or left_s < SWEEP_S:
                        late.append((ends_at, each.request.id))
            late.sort()
            most = math.ceil(len(late) * SWEEP_S / max(left_s, SWEEP_S))
            for _, request_id in late:
                exchange = self.exchanges.get(request_id)
                if most > 0 and exchange is not None and exchange.move():
                    most -= 1

    def _keep_less(self) -> None:
        """Read some of what is kept of streams that may go on elsewhere, where that is much."""
        rests = [each.rest for each in self.exchanges.values() if each.rest is not None]
        left = min(sum([each.kept for each in rests]) - MOST_KEPT, _LOOKED_AT)
        if left > 0:
            for rest in sorted(rests, key=lambda each: each.kept, reverse=True):
                left -= rest.kept
                rest.read()
                if left <= 0:
                    return

    # --- the end ---

    async def drain(self, grace_s: float) -> None:
        """Wait until no request is open, for at most `grace_s`; then end the others."""
        if self.exchanges:
            waiter: asyncio.Future[None] = self.loop.create_future()
            self._idle_waiters.append(waiter)
            await asyncio.wait([waiter], timeout=grace_s)
        self.shut_down()

    def shut_down(self) -> None:
        """End every request that is open."""
        for exchange in list(self.exchanges.values()):
            if exchange.phase is not Phase.DONE:
                exchange.shut_down()

    def close(self) -> None:
        """Stop the timers and close idle connections. Call after `drain`."""
        self.settle()
        self.stalls.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self.pools.close()


class Driver(ExchangeDriver, SchedulerDriver):
    """A driver whose scheduler is in this process."""

    def __init__(self, scheduler: Scheduler, setup: DriverSetup) -> None:
        super().__init__(setup)
        self.schedule(scheduler)
        self.responses = Responses()
        #: Called with the name of an instance that turned out to be this proxy.
        self.on_loop: Callable[[str], None] | None = None
        #: KV transfers, None while no instance has ever taken part in any.
        self._transfers: KvTransfers | None = None
        self._splits = False
        self._look_for_splits()

    def _look_for_splits(self) -> None:
        self._splits = any(each.spec.kv_transfer is not None for each in self.scheduler.instances)
        if self._splits and self._transfers is None:
            from hetlb.proxy.kv_transfers import KvTransfers

            self._transfers = KvTransfers(
                self.scheduler, self.pools, self._totals, self.carry_out, self.now, self.stalls.since
            )

    @property
    def splits(self) -> bool:
        return self._splits

    @property
    def transfers(self) -> KvTransfers:
        assert self._transfers is not None, "expected an instance with kv_transfer"
        return self._transfers

    @property
    def models(self) -> Collection[str]:
        return self.scheduler.models

    def available(self, model: str) -> bool:
        return self.scheduler.available(model)

    @property
    def waiting(self) -> int:
        return len(self.scheduler.queue)

    # --- requests ---

    def submit(self, exchange: Exchange) -> None:
        self.exchanges[exchange.request.id] = exchange
        if exchange.tenant is None or self._admits(exchange, exchange.tenant):
            self._arrive(exchange.request, exchange.arrived_at)

    def _admits(self, exchange: Exchange, owner: str) -> bool:
        """Count a request against the limits of its key, if it has some; one beyond them is answered."""
        limiter = self._limiter(owner)
        if limiter is None:
            return True
        most = (exchange.request.max_tokens or 0) * exchange.request.sequences
        try:
            exchange.ticket = limiter.admit(exchange.prompt_tokens_total, most, exchange.arrived_at)
        except Refusal as refusal:
            exchange.refuse(refusal.answer, refusal.message, refusal.retry_after_s, refusal.lines)
            return False
        return True

    def settle(self) -> None:
        self._count_calls()
        super().settle()

    def first_token(self, lease: Lease, now: float) -> None:
        if commands := self.scheduler.on_first_token(lease, now):
            self.carry_out(commands)

    def lease_ended(self, lease: Lease, outcome: Outcome, *, retry: bool) -> None:
        if retry:
            self._totals.tried_again(lease.instance, outcome)
        commands = self._end_lease(lease, outcome, self.now(), retry)
        if commands or self._ticker is None:
            self.carry_out(commands)

    def _go_on(self, rest: Request, lease: Lease, end: End) -> None:
        self.carry_out(self._end_lease(lease, end.told, self.now(), True, rest.generated))

    def busy(self, lease: Lease, retry_after_s: float) -> None:
        commands = self.scheduler.on_busy(lease, retry_after_s, self.now())
        if lease.ended:
            self.exchanges[lease.request.id].back_to_queue(TURNED_AWAY)
            self._totals.tried_again(lease.instance, Outcome.UPSTREAM_BUSY)
        self.carry_out(commands)

    def cancelled(self, request_id: RequestId, now: float) -> None:
        self.carry_out(self.scheduler.on_cancelled(request_id, now))

    def retry_after_s(self, reject: Reject) -> float | None:
        return retry_after_s(reject, self._drain_rate, self.waiting, self.now())

    # --- answers that can be asked for again ---

    def remember_response(self, response_id: str, instance: str, tenant: str | None) -> None:
        self.responses.add(response_id, instance, tenant)

    def pin(self, response_id: str, tenant: str | None, *, strict: bool) -> str | None:
        return self.responses.find(response_id, tenant, self.scheduler, strict=strict)

    def pinned_serves(self, pinned: str, model: str) -> bool:
        return model in served_at(self.scheduler, pinned)

    def model_at(self, pinned: str | None) -> str:
        if pinned is not None and (served := served_at(self.scheduler, pinned)):
            return served[0]
        return only_model(self.scheduler) or several_models()

    # --- instances ---

    @property
    def leaving(self) -> dict[str, float]:
        return {each.name: each.leaves_at for each in self.scheduler.instances if each.leaves_at is not None}

    def targets(self) -> Iterable[Target]:
        return [Target(each.name, each.incarnation, each.spec.url) for each in self.scheduler.instances]

    def _instances_changed(self) -> None:
        self.drop_unused_pools()
        self._look_for_splits()

    def serves(self, lease: Lease) -> bool:
        served = self.scheduler.holder(lease).served
        return served is None or lease.request.model in served

    def came_back(self, instance: str) -> None:
        log_loop(instance)
        if self.on_loop is not None:
            self.on_loop(instance)
        else:
            self.change(AdminStateSet(instance, AdminState.MAINT))

    def _emits(self, name: str) -> bool:
        """True if part of an answer came from an instance lately."""
        return name in self.streaming(self.now() - EMITS_S)

    @property
    def block_tokens(self) -> int:
        return self.scheduler.fleet.block_tokens

    # --- commands ---

    def _reject(self, command: Reject) -> None:
        self.turn_down(self.exchanges[command.request_id], command)

    def _abort(self, command: Abort) -> None:
        self.exchanges[command.request_id].client_gone()

    def _dispatch(self, command: Dispatch) -> None:
        lease = command.lease
        if command.reason != HAND_OVER:  # decided with its prefill leg
            self._totals.decisions += 1
            self.decisions.add(command)
        instance = self.scheduler.holder(lease)
        self.open_pool(lease.incarnation, instance.name, instance.spec.url)
        exchange = self.exchanges[command.request_id]
        command.label = exchange.label
        if lease.decode is not None:
            target = self.scheduler.holder(lease.decode)
            self.open_pool(target.incarnation, target.name, target.spec.url)
        exchange.dispatched(
            lease,
            lease.dispatched_at,
            lease.forecast_end_s,
            lease.expected_first_s,
            lease.beside,
            instance.gives_ids,
        )

    def close(self) -> None:
        super().close()
        if self._transfers is not None:
            self._transfers.close()
        self._stop_ticking()
