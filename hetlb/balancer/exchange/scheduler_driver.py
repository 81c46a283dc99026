"""Driver of the scheduler of this process: facts go in, commands come out and are carried out at once.

A process that serves alone and the scheduler process of several differ in the `Carrier`, where commands go.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final

from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import (
    HAND_OVER,
    AdminState,
    AdminStateSet,
    Command,
    Dispatch,
    EngineSample,
    Health,
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
from hetlb.balancer.engines.engine_pools import Target
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.exchange.guard import policy_failed
from hetlb.balancer.exchange.scheduler_side import Carrier, DrainRate, SchedulerSide
from hetlb.balancer.telemetry.counters import Totals
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.balancer.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from hetlb.balancer.clients.api_keys import LimitsTable
    from hetlb.balancer.clients.key_limits import KeyJournal, Limiter, Limiters
    from hetlb.balancer.core.block_index import KvEventBatch
    from hetlb.balancer.fleet.shared_fleet import SharedBookings
    from hetlb.balancer.telemetry.request_record import KeyTicket

logger = logging.getLogger("hetlb.proxy")

#: Seconds after a pause of this process without conclusions from silence.
_OWN_STALL_S: Final = 1.0
#: Seconds until requests that found the budget of retries used up are looked at again.
_NEXT_MOVES_S: Final = 0.05
DECISIONS_KEPT: Final = 1000
#: Requests that may wait for a look at the engines' models.
_MOST_UNKNOWN: Final = 256
#: Candidates kept with decisions, some 10 MB: of a large fleet fewer decisions are kept.
CANDIDATES_KEPT: Final = 50_000
_HEALTH: Final = {
    Health.UP: Event.INSTANCE_UP,
    Health.SUSPECT: Event.INSTANCE_SUSPECT,
    Health.EJECTED: Event.INSTANCE_EJECTED,
}


def newest(decisions: Iterable[Dispatch], instances: int) -> deque[Dispatch]:
    """Return the last dispatches, the oldest first: as many as suit a fleet of this size."""
    return deque(decisions, min(DECISIONS_KEPT, CANDIDATES_KEPT // max(1, instances)))


class SchedulerDriver(SchedulerSide):
    """The scheduler of this process, driven; requests of a `splitting` driver may be split."""

    def __init__(self, scheduler: Scheduler, carrier: Carrier, splitting: Driver | None = None) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.carrier = carrier
        self._splitting = splitting
        #: Bookings of other processes of the fleet, None while this one is alone.
        self.view: SharedBookings | None = None
        #: Limits of clients' keys, None where no key ever had some.
        self._limiters: Limiters | None = None
        self._key_journal: KeyJournal | None = None
        #: The last dispatches, the oldest first; fewer of a large fleet.
        self.decisions = newest((), len(scheduler.instances))
        #: Seconds that a probe may take.
        self.probe_timeout_s = 0.0
        #: True if a request may leave a busy engine for another one.
        self.moves_busy = True
        #: True if silence counts only where an engine's own counters stand still.
        self.by_counters = False
        #: Takes an instance out that turned out to be this proxy.
        self.take_out: Callable[[InstanceChange], None] = self.change
        #: Looks which models the engines have and calls back; False right after another look.
        self.look_up: Callable[[Callable[[], None]], bool] | None = None
        #: Requests that wait for it.
        self._unknown: dict[RequestId, Request] = {}
        #: Seconds of the scheduler's calls that were not counted yet: arrivals, ends of leases.
        self._arrival_s: list[float] = []
        self._end_s: list[float] = []
        self._ticker: asyncio.TimerHandle | None = None
        self._mover: asyncio.TimerHandle | None = None
        #: Names of the instances that have stalled, as last reported.
        self._stalled: set[str] = set()
        self._look_for_splits()
        scheduler.contain(policy_failed)

    def _look_for_splits(self) -> None:
        driver = self._splitting
        if driver is None or driver.splits is not None:
            return
        if any(each.spec.kv_transfer is not None for each in self.scheduler.instances):
            driver.splits = driver.options.splits(driver, self.scheduler, self.carry_out)

    # --- limits of keys ---

    def limit(self, limits: Mapping[str, LimitsTable]) -> None:
        """Take limits of keys that hold from now on, by the name of the key."""
        if limits and self._limiters is None:
            from hetlb.balancer.clients.key_limits import Limiters

            self._limiters = Limiters(self._key_journal)
        if self._limiters is not None:
            self._limiters.configure(limits)

    def tell_of_keys(self, journal: KeyJournal | None) -> None:
        """Tell a journal of what the limits of keys count from now on, None: nothing."""
        self._key_journal = journal
        if self._limiters is not None:
            self._limiters.journal = journal

    def limiter(self, owner: str | None) -> Limiter | None:
        return None if self._limiters is None or owner is None else self._limiters.of(owner)

    def admit(self, request: Request, owner: str | None, prompt_tokens: int, now: float) -> KeyTicket | None:
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

    def takes(self, instance: str) -> bool | None:
        known = self.scheduler.fleet.instances.get(instance)
        return None if known is None else not known.why_not

    def targets(self) -> list[Target]:
        return [
            Target(each.name, each.incarnation, each.spec.url, each.leaves_at)
            for each in self.scheduler.instances
        ]

    def serves(self, lease: Lease) -> bool:
        instance = self.scheduler.ledger.leased[lease.id]
        if instance.evidence.state is Health.EJECTED:
            return False
        return instance.served is None or lease.request.model in instance.served

    # --- facts about requests ---

    def submit(self, record: RequestRecord) -> None:
        request, now = record.request, record.arrived_at
        record.ticket = self.admit(request, record.tenant, record.prompt_tokens_total, now)
        self.arrive(request, now)

    def arrive(self, request: Request, now: float) -> None:
        view = self.view
        started = perf_counter()
        commands = self.scheduler.on_arrival(request, now) if view is None else view.on_arrival(request, now)
        self._arrival_s.append(perf_counter() - started)
        if commands and type(commands[0]) is Reject and self._looked_up(request, commands[0]):
            return
        self.carry_out(commands)

    def _looked_up(self, request: Request, reject: Reject) -> bool:
        """Return True if the request waits for a look whether some engine has its model by now."""
        if self.look_up is None or reject.reason is not RejectReason.UNKNOWN_MODEL:
            return False

        def again() -> None:
            if self._unknown.pop(request.id, None) is not None:
                self.carry_out(self.scheduler.on_arrival(request, self.carrier.now()))

        self._unknown[request.id] = request
        if len(self._unknown) > _MOST_UNKNOWN or not self.look_up(again):
            del self._unknown[request.id]
            return False
        return True

    def first_token(self, lease: Lease, now: float) -> None:
        if commands := self.scheduler.on_first_token(lease, now):
            self.carry_out(commands)
        if self.scheduler.failover.misplaced_model is not None and self.carrier.takes_back():
            misplaced = self.scheduler.failover.misplaced()
            self._move(misplaced, self.scheduler.on_misplaced, now, Outcome.MISPLACED)
            self.carry_out(self.scheduler.wait_again(now))

    def lease_ended(
        self, lease: Lease, outcome: Outcome, now: float, *, retry: bool, generated: int | None = None
    ) -> None:
        started = perf_counter()
        commands = self.scheduler.on_lease_ended(lease, outcome, now, retry=retry, generated=generated)
        self._end_s.append(perf_counter() - started)
        if commands or self._ticker is None:
            self.carry_out(commands)

    def move(self, lease: Lease, generated: int, now: float) -> None:
        self.carry_out(self.scheduler.on_moving(lease, generated, now))

    def names(self, lease: Lease, model: str) -> bool:
        served = self.scheduler.ledger.leased[lease.id].served
        return served is None or model in served

    @property
    def refused_kinds(self) -> bool:
        return self.scheduler.fleet.kinds.known

    def refused(
        self, lease: Lease, status: int, retry_after_s: float | None, features: Sequence[str], now: float
    ) -> None:
        commands = self.scheduler.on_refused(
            lease, status, retry_after_s, now, features=features, may_move=self.moves_busy
        )
        if lease.ended:
            self.carrier.turned_away(lease, _outcome_of(status))
        self.carry_out(commands)

    def hung_s(self, lease: Lease, now: float) -> float | None:
        evidence = self.scheduler.ledger.leased[lease.id].evidence
        if evidence.works(now):
            return None
        if evidence.stalled_since is None or not evidence.counts(now):
            return 0.0
        return now - evidence.stalled_since

    def cancelled(self, request_id: RequestId, now: float) -> None:
        self._unknown.pop(request_id, None)
        self.carry_out(self.scheduler.on_cancelled(request_id, now))

    def abandon(self, request_id: RequestId, now: float) -> None:
        self._unknown.pop(request_id, None)
        self.carry_out(self.scheduler.abandon(request_id, now))

    def came_back(self, instance: str) -> None:
        text = "%s is this proxy itself, or leads back to it: taken out (state maint)"
        tell(logger, Event.INSTANCE_LOOP, text, instance, instance=instance)
        self.scheduler.fleet.instances[instance].leads_back = True
        self.take_out(AdminStateSet(instance, AdminState.MAINT))

    # --- facts about instances ---

    def change(self, change: InstanceChange) -> None:
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
        instance = self.scheduler.fleet.instances.get(name)
        slept = instance is not None and instance.asleep
        self.carry_out(self.scheduler.on_scrape(name, sample, self.carrier.now()))
        if self._splitting is not None and self._splitting.splits is not None:
            self._splitting.splits.judged()
        if instance is not None and instance.asleep is not slept:
            event = Event.INSTANCE_ASLEEP if instance.asleep else Event.INSTANCE_AWAKE
            text = "%s sleeps: it gets no requests" if instance.asleep else "%s woke up"
            tell(logger, event, text, name, instance=name)
            self.carrier.view_changed()

    def kv_events(self, name: str, batch: KvEventBatch) -> None:
        known = self.block_tokens
        self.carry_out(self.scheduler.on_kv_events(name, batch, self.carrier.now()))
        if self.block_tokens != known:
            self.carrier.view_changed()

    def set_policy(self, name: str) -> None:
        self.carry_out(self.scheduler.set_policy(name, self.carrier.now()))

    # --- commands ---

    def carry_out(self, commands: list[Command]) -> None:
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
                _log_health(command, carrier.counted)
                carrier.view_changed()
            else:
                assert isinstance(command, PassOn), f"expected a command, got {command!r}"
                carrier.pass_on(command.request_id)
        self.tick_later()

    def tick_later(self) -> None:
        if self._ticker is None and (deadline := self.scheduler.next_deadline()) is not None:
            self._ticker = self.carrier.loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        try:
            self.carry_out(self.scheduler.on_tick(self.carrier.now()))
        finally:
            self.tick_later()
        self.carrier.ticked()

    def sweep(self, now: float) -> None:
        """Check which instances work, and send elsewhere the requests that wait at others."""
        scheduler, carrier = self.scheduler, self.carrier
        if carrier.stalls.since(now - _OWN_STALL_S):
            return  # bytes that came meanwhile are not read yet
        if scheduler.in_flight or any(each.evidence.wary(now) for each in scheduler.instances):
            self.carry_out(scheduler.on_sweep(carrier.tokens_at(), now, by_counters=self.by_counters))
        self._tell_stalls(now)
        if self._mover is None:
            self._move_stranded()

    def _move_stranded(self) -> None:
        """Send elsewhere requests that wait at stalled instances; the rest soon if the budget is used up."""
        self._mover, now = None, self.carrier.now()
        left = self._move(self.scheduler.failover.stranded(now), self.scheduler.on_stranded, now)
        if left and self.scheduler.placement.retries.leases:
            self._mover = self.carrier.loop.call_later(_NEXT_MOVES_S, self._move_stranded)

    def _move(
        self,
        leases: list[Lease],
        place: Callable[[Lease, float], list[Command]],
        now: float,
        outcome: Outcome = Outcome.UPSTREAM_BUSY,
    ) -> bool:
        """Send leases elsewhere that may be taken back; they count as `outcome`. Return True if some stay."""
        left = False
        for lease in leases:
            if self.carrier.may_turn_away(lease):
                commands = place(lease, now)
                if lease.ended:
                    self.carrier.turned_away(lease, outcome)
                left = left or not lease.ended
                self.carry_out(commands)
        return left

    def _tell_stalls(self, now: float) -> None:
        """Log which instances have stalled, or do so no more."""
        stalled = {each.name for each in self.scheduler.instances if each.evidence.stalled_since is not None}
        for name in stalled - self._stalled:
            why = self.scheduler.fleet.instances[name].evidence.why(now)
            text = "%s has %s: it gets one request at a time"
            tell(logger, Event.INSTANCE_STALLED, text, name, why, instance=name, reason=why)
            self.carrier.counted.instances[name].stalls += 1
        for name in self._stalled - stalled:
            if name in self.scheduler.fleet.instances:
                tell(logger, Event.INSTANCE_MOVES, "%s goes on", name, instance=name)
        self._stalled = stalled

    def count_calls(self) -> None:
        counted = self.carrier.counted
        counted.arrival.observe_all(self._arrival_s)
        counted.end.observe_all(self._end_s)
        self._arrival_s.clear()
        self._end_s.clear()

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        if self._mover is not None:
            self._mover.cancel()


def _outcome_of(status: int) -> Outcome:
    """Return the outcome of a lease that its engine refused or failed by a status."""
    if status in (429, 503):
        return Outcome.UPSTREAM_BUSY
    return Outcome.UPSTREAM_REFUSED if status < 500 else Outcome.UPSTREAM_ERROR


def _log_health(command: HealthChanged, totals: Totals) -> None:
    if command.health is Health.EJECTED:
        totals.instances[command.instance].ejections += 1
    tell(
        logger, _HEALTH[command.health], "%s is %s: %s", command.instance, command.health, command.reason,
        instance=command.instance, reason=command.reason,
    )  # fmt: skip


def _retry_after_s(reject: Reject, drain_rate: DrainRate, waiting: int, now: float) -> float | None:
    """Return seconds until the client of a rejected request should retry, None where a retry is useless."""
    if reject.retry_after_s is None:
        return None
    if reject.reason in (RejectReason.QUEUE_FULL, RejectReason.QUEUE_EXPIRED):
        return drain_rate.retry_after_s(waiting, now)
    return drain_rate.spread(reject.retry_after_s)
