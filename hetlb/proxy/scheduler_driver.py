"""Driver of the scheduler of this process: facts go in, commands come out and are carried out at once.

A process that serves alone and the scheduler process of several have one alike; they differ in the `Carrier`,
where a command goes. Timers, answers that can be asked for again, decisions and limits of keys are kept here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Final

from hetlb.core.scheduler import Scheduler
from hetlb.core.types import (
    HAND_OVER,
    Abort,
    AdminState,
    AdminStateSet,
    Command,
    Dispatch,
    EngineSample,
    HealthChanged,
    InstanceAdded,
    InstanceChange,
    InstanceRemoved,
    Lease,
    Outcome,
    PassOn,
    Probed,
    ProbeResult,
    Reject,
    RejectReason,
    Request,
    RequestId,
)
from hetlb.proxy.engine_pools import EnginePools, Target
from hetlb.proxy.http.error_responses import Refusal
from hetlb.proxy.http.retry_after import DrainRate
from hetlb.proxy.scheduler_side import Carrier, SchedulerSide
from hetlb.proxy.scheduling import Responses, log_health, log_loop, newest, several_models

if TYPE_CHECKING:
    from hetlb.config.api_keys import LimitsTable
    from hetlb.core.block_index import KvEventBatch
    from hetlb.core.shared_view import SharedView
    from hetlb.proxy.exchange import Exchange
    from hetlb.proxy.limits import Limiter, Limiters, Ticket

#: An instance from which something came within so many seconds is not failed by a probe.
EMITS_S: Final = 2.0


class SchedulerDriver(SchedulerSide):
    """The scheduler of this process, driven; with `pools`, requests may be split between instances."""

    def __init__(self, scheduler: Scheduler, carrier: Carrier, pools: EnginePools | None = None) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.carrier = carrier
        self._pools = pools
        #: Bookings of other processes of the fleet, None while this one is alone.
        self.view: SharedView | None = None
        #: Limits of clients' keys, None where no key ever had some.
        self._limiters: Limiters | None = None
        #: The last dispatches, the oldest first; fewer of a large fleet.
        self.decisions = newest((), len(scheduler.instances))
        self.responses = Responses()
        #: Seconds that a probe may take.
        self.probe_timeout_s = 0.0
        #: True if a request may leave a busy engine for another one.
        self.moves_busy = True
        #: Called with the name of an instance that turned out to be this proxy.
        self.on_loop: Callable[[str], None] | None = None
        #: Seconds of the scheduler's calls that were not counted yet: arrivals, ends of leases.
        self._arrival_s: list[float] = []
        self._end_s: list[float] = []
        self._ticker: asyncio.TimerHandle | None = None
        self._look_for_splits()

    def _look_for_splits(self) -> None:
        pools = self._pools
        if pools is None:
            return
        self.splits = any(each.spec.kv_transfer is not None for each in self.scheduler.instances)
        if self.splits and self.transfers is None:
            from hetlb.proxy.kv_transfers import KvTransfers

            self.transfers = KvTransfers(self.scheduler, pools, self.carrier, self.carry_out)

    # --- limits of keys ---

    def limit(self, limits: Mapping[str, LimitsTable]) -> None:
        """Limits of keys that hold from now on, by the name of the key."""
        if limits and self._limiters is None:
            from hetlb.proxy.limits import Limiters

            self._limiters = Limiters()
        if self._limiters is not None:
            self._limiters.configure(limits)

    def limiter(self, owner: str | None) -> Limiter | None:
        """Limiter of a key, None where it has no limits."""
        return None if self._limiters is None or owner is None else self._limiters.of(owner)

    def admit(self, request: Request, owner: str | None, prompt_tokens: int, now: float) -> Ticket | None:
        """Count a request against the limits of its key, if it has some. Raises `Refusal`."""
        limiter = self.limiter(owner)
        if limiter is None:
            return None
        return limiter.admit(prompt_tokens, (request.max_tokens or 0) * request.sequences, now)

    # --- the fleet ---

    @property
    def models(self) -> Collection[str]:
        return self.scheduler.fleet.ready

    @property
    def only_model(self) -> str:
        models = self.scheduler.fleet.ready
        if models and len({instance.spec.model for instance in self.scheduler.instances}) == 1:
            return next(iter(models))
        return ""

    @property
    def block_tokens(self) -> int:
        return self.scheduler.fleet.block_tokens

    @property
    def waiting(self) -> int:
        return len(self.scheduler.queue)

    def available(self, model: str) -> bool:
        return self.scheduler.fleet.available(model)

    def targets(self) -> list[Target]:
        return [
            Target(each.name, each.incarnation, each.spec.url, each.leaves_at)
            for each in self.scheduler.instances
        ]

    def serves(self, lease: Lease) -> bool:
        served = self.scheduler.ledger.leased[lease.id].served
        return served is None or lease.request.model in served

    # --- facts about requests ---

    def submit(self, exchange: Exchange) -> None:
        request, now = exchange.request, exchange.arrived_at
        try:
            exchange.ticket = self.admit(request, exchange.tenant, exchange.prompt_tokens_total, now)
        except Refusal as refusal:
            exchange.refuse(refusal.answer, refusal.message, refusal.retry_after_s, refusal.lines)
        else:
            self.arrive(request, now)

    def arrive(self, request: Request, now: float) -> None:
        """A request that its limits let pass came in."""
        view = self.view
        started = perf_counter()
        commands = self.scheduler.on_arrival(request, now) if view is None else view.on_arrival(request, now)
        self._arrival_s.append(perf_counter() - started)
        self.carry_out(commands)

    def first_token(self, lease: Lease, now: float) -> None:
        if commands := self.scheduler.on_first_token(lease, now):
            self.carry_out(commands)

    def lease_ended(
        self, lease: Lease, outcome: Outcome, now: float, *, retry: bool, generated: int | None = None
    ) -> None:
        started = perf_counter()
        commands = self.scheduler.on_lease_ended(lease, outcome, now, retry=retry, generated=generated)
        self._end_s.append(perf_counter() - started)
        if commands or self._ticker is None:
            self.carry_out(commands)

    def busy(self, lease: Lease, retry_after_s: float, now: float) -> None:
        commands = self.scheduler.on_busy(lease, retry_after_s, now, may_move=self.moves_busy)
        if lease.ended:
            self.carrier.turned_away(lease)
        self.carry_out(commands)

    def cancelled(self, request_id: RequestId, now: float) -> None:
        self.carry_out(self.scheduler.on_cancelled(request_id, now))

    def came_back(self, instance: str) -> None:
        log_loop(instance)
        if self.on_loop is not None:
            self.on_loop(instance)
        else:
            self.change(AdminStateSet(instance, AdminState.MAINT))

    def remember_response(self, response_id: str, instance: str, tenant: str | None) -> None:
        self.responses.add(response_id, instance, tenant)

    def pin(
        self, model: str, response_id: str, tenant: str | None, *, strict: bool
    ) -> tuple[str, str | None]:
        pinned = self.responses.find(response_id, tenant, self.scheduler, strict=strict)
        if pinned is None:
            return model or self.only_model or several_models(), None
        instance = self.scheduler.fleet.instances[pinned]
        served = instance.served or (instance.spec.model,)
        if strict or not model:
            return served[0], pinned
        # Of another model: it is not there, and the engine says so.
        return model, pinned if model in served else None

    # --- facts about instances ---

    def change(self, change: InstanceChange) -> None:
        """Something about an instance changed."""
        carrier = self.carrier
        now = carrier.now()
        if isinstance(change, Probed) and change.result is ProbeResult.FAILED:
            if carrier.emits(change.name):
                return  # busy, not dead: its probes wait behind its work
            if carrier.stalls.since(now - self.probe_timeout_s):
                return  # the probe may have been answered while this process stood still
        commands = self.scheduler.on_instance(change, now)
        if isinstance(change, InstanceAdded | InstanceRemoved | AdminStateSet):
            self.decisions = newest(self.decisions, len(self.scheduler.instances))
            self._look_for_splits()
            carrier.instances_changed()
        if commands or not isinstance(change, Probed):
            carrier.view_changed()
        self.carry_out(commands)

    def sample(self, name: str, sample: EngineSample) -> None:
        """An engine's metrics were read."""
        instance = self.scheduler.fleet.instances.get(name)
        slept = instance is not None and instance.asleep
        self.carry_out(self.scheduler.on_scrape(name, sample, self.carrier.now()))
        if instance is not None and instance.asleep is not slept:
            self.carrier.view_changed()

    def kv_events(self, name: str, batch: KvEventBatch) -> None:
        """An engine told what came into its prefix cache and what left it."""
        known = self.block_tokens
        self.carry_out(self.scheduler.on_kv_events(name, batch, self.carrier.now()))
        if self.block_tokens != known:
            self.carrier.view_changed()

    def set_policy(self, name: str) -> None:
        """Switch the policy."""
        self.carry_out(self.scheduler.set_policy(name, self.carrier.now()))

    # --- commands ---

    def carry_out(self, commands: list[Command]) -> None:
        """Do what the scheduler said."""
        carrier = self.carrier
        for command in commands:
            if type(command) is Dispatch:
                if command.reason != HAND_OVER:  # decided with its prefill leg
                    carrier.counted.decisions += 1
                    self.decisions.append(command)
                lease, leased = command.lease, self.scheduler.ledger.leased
                carrier.dispatch(
                    command, leased[lease.id], None if lease.decode is None else leased[lease.decode.id]
                )
            elif isinstance(command, Reject):
                again_s = _retry_after_s(command, self.drain_rate, self.waiting, carrier.now())
                carrier.reject(command, again_s)
            elif isinstance(command, HealthChanged):
                log_health(command, carrier.counted)
                carrier.view_changed()
            elif isinstance(command, PassOn):
                carrier.pass_on(command.request_id)
            else:
                assert isinstance(command, Abort), f"expected a command, got {command!r}"
                carrier.abort(command.request_id)
        self.tick_later()

    def tick_later(self) -> None:
        """Schedule the scheduler's next call."""
        if self._ticker is None and (deadline := self.scheduler.next_deadline()) is not None:
            self._ticker = self.carrier.loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        self.carry_out(self.scheduler.on_tick(self.carrier.now()))
        self.carrier.ticked()

    def count_calls(self) -> None:
        """Count the seconds of the scheduler's calls since the last time."""
        counted = self.carrier.counted
        counted.arrival.observe_all(self._arrival_s)
        counted.end.observe_all(self._end_s)
        self._arrival_s.clear()
        self._end_s.clear()

    def close(self) -> None:
        """Stop the timers."""
        if self.transfers is not None:
            self.transfers.close()
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None


def _retry_after_s(reject: Reject, drain_rate: DrainRate, waiting: int, now: float) -> float | None:
    """Seconds until the client of a rejected request should try again, None where that is of no use."""
    if reject.retry_after_s is None:
        return None
    if reject.reason in (RejectReason.QUEUE_FULL, RejectReason.QUEUE_EXPIRED):
        return drain_rate.retry_after_s(waiting, now)
    return drain_rate.spread(reject.retry_after_s)
