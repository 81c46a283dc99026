"""Scheduler: facts and the current time go in, commands come out.

One dispatch is one lease, tied to the incarnation of its instance. A lease's bookings are given back exactly
once, however it ends. At any moment a request is waiting, leased or gone. Drained, ejected and removed
instances get no dispatch. Temporary restraints count for nothing if all instances of a model have one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from hetlb.balancer.core import learning, rejections
from hetlb.balancer.core.backlog import Backlog
from hetlb.balancer.core.evidence.retries import MOST_MOVES
from hetlb.balancer.core.facts import (
    AdminStateSet,
    CapacityLearned,
    EngineSample,
    InstanceAdded,
    InstanceChange,
    InstanceRemoved,
    InstanceUpdated,
    ModelsPromised,
    Probed,
    ProbeResult,
    SleepSet,
    SpeedTried,
)
from hetlb.balancer.core.failover import Failover, is_refusal
from hetlb.balancer.core.fleet_state import FleetState, SchedulerSetup
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.ledger import Booked
from hetlb.balancer.core.placement import Placement, Splitting
from hetlb.balancer.core.policies.registry import make_policy
from hetlb.balancer.core.predictor import Predictor, make_predictor
from hetlb.balancer.core.queue import Queue, WaitingElsewhere
from hetlb.balancer.core.ready import least_tokens
from hetlb.balancer.core.types import Command, Hold, InstanceSpec, Lease, Outcome, PassOn, Request, RequestId

if TYPE_CHECKING:
    from hetlb.balancer.core.block_index import KvEventBatch

#: Seconds between ticks while something waits for time to pass (queue limits, ejections).
TICK_S: Final = 0.25
#: Looked up once: a member of an enum costs as much as a call.
_OK: Final = Outcome.OK
_NO_RESPONSE: Final = Outcome.NO_RESPONSE


class Scheduler:
    """Places requests on instances by a policy and keeps the ledger. Its parts are not to be written."""

    def __init__(
        self,
        setup: SchedulerSetup,
        *,
        oracle: Mapping[RequestId, int] | None = None,
        predictor: Predictor | None = None,
        splitting: Callable[[Scheduler], Splitting] | None = None,
    ) -> None:
        """`oracle` has true lengths; `splitting` decides about requests of two legs.

        Raises `ValueError` if the predictor's data are missing.
        """
        self._rng = random.Random(setup.seed)
        self._params = setup.params
        self.predictor = predictor or make_predictor(
            setup.predictor, rng=self._rng, lengths=setup.lengths, oracle=oracle
        )
        policy = make_policy(setup.policy, setup.params, self._rng)
        queue = Queue(setup.limits)
        fleet = FleetState(setup, queue, self._rng)
        self.placement = placement = Placement(policy, self.predictor, fleet, queue, setup.first_lease)
        self.fleet, self.queue = fleet, queue
        self.ledger, self._retries = placement.ledger, placement.retries
        self.backlog = Backlog(placement, setup.now)
        self.failover = Failover(placement, self.backlog)
        self._splitting = splitting
        self._look_for_links(setup.specs)

    def _look_for_links(self, specs: Sequence[InstanceSpec]) -> None:
        """Split requests once an instance can transfer its KV cache."""
        make, placement = self._splitting, self.placement
        if make is not None and placement.splits is None and any(each.kv_transfer for each in specs):
            placement.splits = make(self)

    @property
    def _splits(self) -> Splitting:
        """Decisions to split requests, in a fleet with KV transfers."""
        splits = self.placement.splits
        assert splits is not None, "expected an instance with kv_transfer"
        return splits

    # --- for drivers and pages ---

    @property
    def in_flight(self) -> int:
        """Number of live leases, removed instances' included."""
        return len(self.ledger.leased)

    @property
    def instances(self) -> list[Instance]:
        """The instances of the fleet, in file order."""
        return list(self.fleet.instances.values())

    def contain(self, on_failed: Callable[[Request, Exception], None]) -> None:
        """Reject a request if the policy raises an error for it, and call `on_failed` with both.

        Without this call the error is raised, as a simulation needs it.
        """
        self.placement.on_failed = on_failed

    def abandon(self, request_id: RequestId, now: float) -> list[Command]:
        """End all bookings of a request, waiting or leased, after its driver lost track of it."""
        commands: list[Command] = []
        for lease in [each for each in self.ledger.leases() if each.request.id == request_id]:
            if not lease.ended:
                commands += self.on_lease_ended(lease, Outcome.LOCAL_FAULT, now, retry=False)
        self.placement.take_failed(request_id)
        return commands + self.on_cancelled(request_id, now)

    # --- facts about requests ---

    def on_arrival(self, request: Request, now: float) -> list[Command]:
        """Take in a request. Without a command for it, it is queued."""
        fleet, placement = self.fleet, self.placement
        ready = fleet.ready.get(request.model)
        if ready is None:
            names = (*fleet.ready, *fleet.aliases)
            return [rejections.unknown_model(request, fleet.instances.values(), names)]
        if request.prompt_exact and least_tokens(request) > ready.longest_prompt:
            return [rejections.too_long(request, ready.longest_prompt)]
        if not request.sequences:
            placed = placement.place(request, ready, now, 0.0)
            return self.backlog.push(request, now, 0.0) if placed is None else [placed]
        demand = placement.demands[request.model]
        predicted, long = self.predictor.outlook(request) if request.generates else (0.0, 0.0)
        demand.arrived(request.prompt_tokens, predicted, now)
        if request.service.stated:
            protected = demand.of_class(request.service)
            protected.arrived(request.service, request.prompt_tokens, predicted, now)
        if fleet.losses is not None:
            request.kept_from = tuple(sorted(fleet.losses.kinds.against(request, now, again=False)))
        if self.queue.held and self.queue.ahead(request):
            return self.backlog.push(request, now, predicted) + self.backlog.flush(now)
        found = placement.choose(request, ready, now, predicted, long=long)
        return self.backlog.push(request, now, predicted) if found is None else [placement.book(found)]

    def on_prefilled(self, lease: Lease, now: float) -> list[Command]:
        """Dispatch the decode leg of a completed prefill leg, or the whole request if that leg is gone."""
        return self._splits.prefilled(lease, now)

    def on_unsplit(self, lease: Lease, outcome: Outcome, now: float) -> list[Command]:
        """Give the whole request to one instance: a hand-over failed before anything reached the client.

        `lease` is either leg's; `outcome` is its end. `OK` is for a prefill leg with blocks that will not be
        fetched. The request is placed as after a retry.
        """
        return self._splits.unsplit(lease, outcome, now)

    def on_hold_released(self, hold: Hold, now: float) -> list[Command]:
        """Note that a prefill instance was asked to drop a prompt."""
        return self._splits.released(hold, now)

    def on_first_token(self, lease: Lease, now: float) -> list[Command]:
        """Note that the first byte of the answer came. Not called for 4xx and 5xx."""
        instance = self.ledger.leased[lease.key]
        if lease.incoming or lease.hold is not None:
            self._splits.first_token(lease, instance, now)
        instance.evidence.begins(lease.id)
        if lease.request.features:
            instance.evidence.begun.update(lease.request.features)
        if lease.request.sequences and learning.token_came(instance, now):
            self.fleet.reindex(now)
        if not instance.profiled and lease.request.streamed and lease.decode is None:
            learning.learn_reading(instance, lease, now)
        instance.first_token(lease, now)
        if lease.request.streamed and instance.sample is None:
            learning.learn_slots_late(instance, lease, now)
        taught = not (instance.exploring is None and (instance.speed.begun or instance.speed.seen))
        if (
            taught
            and lease.request.streamed
            and lease.decode is None
            and learning.learn_prefill(instance, lease, now)
        ):
            if instance.profiled:
                self.failover.misplaced_model = instance.spec.model
            else:
                self.fleet.share_speed(instance.spec.model, False)
        for journal in self.ledger.journals:
            if lease.own:
                journal.begun(lease)
        adapter_load = self.placement.adapter_load
        if adapter_load is not None:
            adapter_load.first_token(lease.id, now - lease.dispatched_at)
        if lease.request.sequences and instance.speed.stood_at < lease.dispatched_at:
            self.placement.policy.answered(instance, now - lease.dispatched_at, now)
        retries = self._retries
        if retries.leases:  # another instance answers: the retry is an ordinary lease now
            retries.leases.discard(lease.id)
            self.failover.answered_elsewhere(lease.request)
        commands: list[Command] = []
        if instance.evidence.health.on_answering():
            commands = self.fleet.health_changed(instance, now)
        return commands + self.backlog.freed(lease.request.model, now)

    def on_lease_ended(
        self,
        lease: Lease,
        outcome: Outcome,
        now: float,
        *,
        retry: bool = True,
        generated: int | None = None,
    ) -> list[Command]:
        """End a lease: give back its work, tokens and slot.

        `lease.output_tokens` holds the engine's output. After `CONNECT_FAILED` (nothing was sent) and
        `NO_RESPONSE` (sent, dropped without a byte), with `retry`, the commands hold another dispatch or a
        reject; without either the request waits in the queue again. Any other outcome finishes the request,
        unless its answer continues elsewhere: then `generated` tokens of it are part of the prompt.
        """
        request, retries = lease.request, self._retries
        instance = self.failover.drop(lease, now, outcome)
        lease.outcome, lease.ended_at = outcome, now
        if lease.decode is not None and not lease.decode.ended:
            self.failover.drop(lease.decode, now)
        if outcome is _OK:
            commands = self._ended_well(instance, lease, now)
        else:
            again = retry and outcome is _NO_RESPONSE and generated is None
            known = retries.attempts[request.id] if again else retries.attempts.get(request.id)
            commands = self.failover.ended_badly(instance, lease, outcome, known, now, again=again)
            if generated is not None:
                commands += self.failover.placing_again.go_on(lease, lease.request.goes_on(generated), now)
                return commands + self.backlog.flush(now)
            if retry and outcome in (Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE):
                commands += self.failover.retry(lease, outcome, now)
                return commands + self.backlog.flush(now)
        if retries.attempts:
            retries.forget(request.id)
        return commands + self.backlog.freed(request.model, now)

    def _ended_well(self, instance: Instance, lease: Lease, now: float) -> list[Command]:
        """Learn from a whole answer: its length, the speed of its instance, and that the instance works."""
        request, evidence, fleet = lease.request, instance.evidence, self.fleet
        commands: list[Command] = []
        odd = lease.odd and fleet.account().odd(instance, lease, now)
        if request.generates and not request.generated and not odd:
            self.predictor.observe(request, lease.output_tokens / request.sequences)
            if instance.slot_times is not None and not request.streamed:
                from hetlb.balancer.core.slot_times import learn_slots_whole

                learn_slots_whole(instance, lease, now)
            if learning.learn_speed(instance, lease, now):
                fleet.share_speed(instance.spec.model, instance.profiled)
            instance.errors.learn(lease, now)
            if request.service.stated:
                alone = instance.sequences == instance.stated_sequences
                self.placement.demands[request.model].of_class(request.service).answered(lease, now, alone)
            if self.queue.held:
                self.backlog.estimate_again()
        if evidence.health.on_answering(whole=True):
            commands = fleet.health_changed(instance, now)
        if fleet.losses is not None:
            fleet.losses.answered(instance, lease, now, counts_as_odd=odd)
        if request.sequences and not lease.odd and evidence.ended_well(now):
            fleet.account().judge(instance, now)
        return commands

    def on_refused(
        self,
        lease: Lease,
        status: int,
        retry_after_s: float | None,
        now: float,
        *,
        features: Sequence[str] = (),
        may_move: bool = True,
    ) -> list[Command]:
        """Note that an engine refused or failed a request by `status` before a byte of an answer.

        `features` are the request's. Within the budget of retries it is tried elsewhere, and the commands
        hold the new dispatch. A refusal (4xx) is tried at up to two others, anything else at one. If another
        instance answers, the first answer counts: a refusal against that kind of request, anything else a
        lost answer. If the other one fails, too, the request is at fault. 429 or 503 of an engine busy with
        others is its limit. Otherwise, and without `may_move`, the commands hold a `PassOn`; the lease lives.
        """
        request, retries, fleet = lease.request, self._retries, self.fleet
        if retry_after_s is not None and retry_after_s <= 0.0:
            retry_after_s = None
        if request.features is None:
            request.features = tuple(features)
        instance = self.ledger.leased[lease.id]
        evidence, others = instance.evidence, instance.sequences - request.sequences
        known, ready = retries.attempts.get(request.id), fleet.ready.get(request.model)
        runs = 0 if known is None else known.runs
        refusal, busy = is_refusal(status), status in (429, 503)
        instance.refused_at = now if refusal else instance.refused_at
        if busy and others > 0 and request.sequences and not evidence.answers.doubted:
            lease.judged = True
            instance.evidence.room.is_full(others, retry_after_s, now)
            fleet.reindex(now)
        elif busy and request.sequences and retry_after_s is not None:
            evidence.asked(retry_after_s, now)
            fleet.reindex(now)
        elif refusal and fleet.account().kinds.refuses(request, instance.name, status, now):
            lease.judged = True  # it is known
        allowed = retries.allowed(self.failover.slots_taken)
        asks = may_move and runs < (MOST_MOVES if refusal else 1)
        asks = asks and (not refusal or fleet.account().kinds.may_ask(request, now))
        if asks and allowed and ready is not None:
            commands = self.failover.move(lease, ready, now, ran=False)
            if commands:
                if not lease.judged:
                    retries.attempts[request.id].failures.append((instance, lease, status, now))
                    if not refusal:
                        fleet.account().lost(instance, lease, now)
                    else:
                        self.failover.failed(instance, lease, now)
                return commands
        if refusal and asks and (not allowed or self.failover.untried(lease)):
            lease.judged = True  # another one has no room for it now, and may take such requests
            self.failover.failed(instance, lease, now)
        elif known is not None and known.failures:
            if refusal:
                self.failover.refused_by_all(request, known, now)
                lease.judged = True
            else:
                self.failover.lost_twice(instance, lease, known, now)
        elif refusal:
            lease.judged = True  # no other one was asked
        return [PassOn(request.id, lease)]

    def on_moving(self, lease: Lease, generated: int, now: float) -> list[Command]:
        """Move a lease away from a working instance, behind `generated` tokens. Without commands it stays."""
        return self.failover.placing_again.move_away(lease, generated, now)

    def on_stranded(self, lease: Lease, now: float) -> list[Command]:
        """Move a lease of `failover.stranded`. Without commands it stays."""
        return self.failover.move_stranded(lease, now)

    def on_misplaced(self, lease: Lease, now: float) -> list[Command]:
        """Place a lease of `failover.misplaced` again: it goes, stays, or ends until `wait_again`."""
        return self.failover.placing_again.place(lease, now)

    def wait_again(self, now: float) -> list[Command]:
        """Queue the requests that `on_misplaced` took back."""
        return self.failover.placing_again.wait(now)

    # --- silent instances ---

    def on_sweep(
        self,
        tokens_at: Mapping[str, float],
        now: float,
        *,
        by_counters: bool = False,
        features: Sequence[tuple[int, Sequence[str]]] = (),
        still: Sequence[int] = (),
        lag_s: float = 0.0,
    ) -> list[Command]:
        """Look for stalls, each half second; `tokens_at` has the time of each instance's newest token.

        `by_counters`: answers may be invisible, so silence counts only if an engine's counters do not move.
        `features` are by lease of `failover.unread`; `still` are leases of `missing.still`; `lag_s` is this
        process's lag.
        """
        for lease_id, found in features:
            self.ledger.leased[lease_id].leases[lease_id].request.features = tuple(found)
        if still:
            from hetlb.balancer.core.evidence import missing

            missing.count(self.fleet, still, now)
        if self.fleet.watch(tokens_at, now, by_counters, lag_s):
            return self.backlog.flush(now)
        return []

    def restore(self, live: Booked, now: float, *, own: bool = True, arrived: bool = False) -> Lease | None:
        """Book a lease granted by another scheduler. Return None if its instance is gone.

        It is no evidence of speed: the load during its first part is unknown. `own`: its request belongs to
        this process. `arrived`: it has just come to a scheduler of the same fleet, and counts as demand here.
        """
        request = live.request
        assert request.id not in self.queue, f"request {request.id} waits and is restored"
        instance = self.fleet.instances.get(live.instance)
        if instance is None:
            return None
        dispatched_at = now - live.age_s
        if arrived and request.sequences:
            demand = self.placement.demands[request.model]
            demand.arrived(request.prompt_tokens, live.predicted_output, now)
        lease = self.ledger.grant(request, instance, live.predicted_output, live.work_ns, dispatched_at)
        lease.forecast_first_s = live.first_s
        instance.acquire(lease)
        if live.begun:
            instance.first_token(lease, now)
        lease.mark = lease.first_mark = None
        instance.speed.begun = True
        lease.own = own
        for journal in self.ledger.journals if own else ():
            journal.booked(lease, now)
        return lease

    def assume(self, request: Request, now: float) -> Lease | None:
        """Book a request as if it had come. Return None if it would have to wait: it is not queued."""
        ready = self.fleet.ready.get(request.model)
        predicted = self.predictor.predict(request) if request.generates else 0.0
        ledger = self.ledger
        journals, ledger.journals = ledger.journals, ()  # not reported
        placed = None if ready is None else self.placement.place(request, ready, now, predicted)
        ledger.journals = journals
        if placed is None:
            self.placement.take_failed(request.id)
            return None
        placed.lease.own = False
        return placed.lease

    def on_waiting_elsewhere(
        self, sizes: Mapping[str, int], now: float, there: WaitingElsewhere | None = None
    ) -> list[Command]:
        """Store the sizes of the requests waiting at other schedulers of the same fleet, by model.

        Return the commands for requests of this one that are the oldest by this news.
        """
        self.placement.elsewhere = dict(sizes)
        queue = self.queue
        queue.elsewhere = there or WaitingElsewhere()
        if not queue.held or any(map(queue.is_older_elsewhere, queue.oldest_by_model())):
            return []
        return self.backlog.flush(now)

    def on_cancelled(self, request_id: RequestId, now: float) -> list[Command]:
        """Forget a waiting request after its client left."""
        self.backlog.forget(request_id)
        return []

    # --- facts about instances ---

    def on_instance(self, change: InstanceChange, now: float) -> list[Command]:
        """Note a change of an instance. Unknown names are ignored: facts may arrive late."""
        fleet = self.fleet
        if isinstance(change, InstanceAdded):
            for spec in (change.spec, *change.more):
                fleet.restarted(fleet.add(spec, now), now)
            for model, profiled in {(s.model, s.profiled) for s in (change.spec, *change.more)}:
                fleet.share_speed(model, profiled)
            self._look_for_links((change.spec, *change.more))
        elif isinstance(change, InstanceRemoved):
            for name in (change.name, *change.more):
                if (leaving := fleet.instances.get(name)) is not None:
                    fleet.remove(leaving, now)
                    if self.placement.splits is not None:
                        self._splits.forget(leaving.incarnation)
        elif isinstance(change, ModelsPromised):
            self.fleet.aliases = change.aliases
            fleet.promise(change.models)
        elif (instance := fleet.instances.get(change.name)) is None:
            return []
        elif isinstance(change, Probed):
            certain = change.result is ProbeResult.REFUSED or change.result is ProbeResult.LOADING
            alone = not certain and not fleet.has_another(instance)
            if not instance.evidence.health.on_probe(change.result, now, alone=alone, detail=change.detail):
                return []
            return fleet.health_changed(instance, now) + self.backlog.flush(now)
        elif isinstance(change, CapacityLearned):
            if not learning.learn_capacity(instance, change.capacity):
                return []
        elif isinstance(change, AdminStateSet):
            instance.admin = change.state
            instance.leaves_at = None if change.deadline_s is None else now + change.deadline_s
        elif isinstance(change, SleepSet):
            instance.sleep, instance.sleep_at = change, now
            if not change.reason:
                instance.asleep = False
                fleet.emptied(instance)
        elif isinstance(change, SpeedTried):
            from hetlb.balancer.core.evidence.slowness import learn_alone

            if learn_alone(instance, change.steps, change.seconds, now):
                fleet.share_speed(instance.spec.model, instance.profiled)
        elif isinstance(change, InstanceUpdated):
            learning.take_spec(instance, change.spec, now)
            self._look_for_links((change.spec,))
            fleet.share_speed(change.spec.model, instance.profiled)
        elif instance.served == change.models:
            return []
        else:
            if not change.models:
                fleet.outlives(instance.models, now)
            learning.learn_models(instance, change.models, change.adapters)
        fleet.reindex(now)
        return self.backlog.flush(now)

    def on_scrape(self, name: str, sample: EngineSample, now: float) -> list[Command]:
        """Take in an engine's metrics."""
        instance = self.fleet.instances.get(name)
        if instance is None:
            return []
        longest, slept = instance.longest_request_tokens, instance.asleep
        finished = instance.finished_sequences
        learning.learn_sample(instance, sample, now)
        if sample.history is not None and learning.learn_history(instance, sample.history, now):
            self.fleet.share_speed(instance.spec.model, False)
        if instance.spec.kv_transfer is not None:
            self._splits.sampled(instance, sample, now)
        if sample.asleep is not None:
            instance.asleep = sample.asleep
        restarted = sample.began is not None and self.fleet.process_seen(instance, sample.began, now)
        if restarted or instance.longest_request_tokens != longest or instance.asleep is not slept:
            self.fleet.reindex(now)
        woken = slept and not instance.asleep
        return self.backlog.flush(now) if woken or instance.finished_sequences > finished else []

    def on_kv_events(self, name: str, batch: KvEventBatch, now: float) -> list[Command]:
        """Take in an engine's report of blocks added to and evicted from its prefix cache."""
        instance = self.fleet.instances.get(name)
        if instance is not None:
            if instance.blocks is None:
                from hetlb.balancer.core.block_index import BlockIndex

                instance.blocks = BlockIndex()
                self.fleet.publishers.append(instance)
            instance.blocks.take(batch, instance.tree)
        return []

    def set_policy(self, name: str, now: float) -> list[Command]:
        """Switch the policy; the ledger stays. Raises `KeyError` for an unknown name."""
        self.placement.use(make_policy(name, self._params, self._rng))
        return self.backlog.flush(now)

    # --- time ---

    def next_deadline(self) -> float | None:
        """Return the time of the next `on_tick`, None while nothing waits for time to pass."""
        splits = self.placement.splits
        waits = len(self.queue) or (splits is not None and splits.held)
        return self.backlog.ticked_at + TICK_S if waits else None

    def on_tick(self, now: float) -> list[Command]:
        """Release expired holds, place waiting requests, reject expired ones."""
        self.backlog.ticked_at = now
        if self.placement.splits is not None:
            self._splits.let_go_expired(now)
        return self.backlog.flush(now) + self.backlog.expire(now)
