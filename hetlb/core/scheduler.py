"""The mapper: facts and the current time go in, commands come out.

No I/O, no clock, no logging. One dispatch, one lease, tied to the incarnation of its instance;
what a lease booked is given back exactly once, however it ends. A request is at any moment waiting,
leased or gone; nothing is dispatched to an instance that is drained, ejected or removed; what restrains one
for a while (it has just come back, is busy, has failed) throttles none where all are alike. Queues are
bounded. The proxy drives this object from real traffic, the simulator from a heap, a replay from a file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from mypy_extensions import mypyc_attr

from hetlb.core import rejections
from hetlb.core.adapters import AdapterLoadTime
from hetlb.core.admission import MOST_OVERTAKEN, FairQueue, Flow, Queue, Queued, QueueKey
from hetlb.core.block_index import KvEventBatch
from hetlb.core.demand import Demand, Mix, size_of
from hetlb.core.health import HealthTracker, Verdict, verdict
from hetlb.core.holds import Holds
from hetlb.core.instance import ChangeCounter, Instance
from hetlb.core.policies.base import Policy, SchedulingContext, SplitChoice, best, paper_terms
from hetlb.core.policies.registry import make_policy
from hetlb.core.predicted_duration import expected_s
from hetlb.core.predictor import OnlinePredictor, Predictor
from hetlb.core.prefix_index import Held, PrefixIndex, Shared, Tree
from hetlb.core.ready import ReadyInstances, least_tokens, with_excluded
from hetlb.core.setup import SchedulerSetup
from hetlb.core.types import (
    HAND_OVER,
    AdminState,
    AdminStateSet,
    Candidate,
    CapacityLearned,
    Command,
    Dispatch,
    EngineSample,
    Health,
    HealthChanged,
    Hold,
    InstanceAdded,
    InstanceChange,
    InstanceRemoved,
    InstanceSpec,
    InstanceUpdated,
    Lease,
    LeaseId,
    LiveLease,
    ModelsLearned,
    Outcome,
    PassOn,
    Probed,
    ProbeResult,
    Reject,
    Request,
    RequestId,
)

__all__ = ["TICK_S", "Scheduler"]

#: While something waits for time to pass (queue limits, ejections), the driver is asked to tick this often.
TICK_S: Final = 0.25
#: Retries of requests that an engine dropped without an answer: at most this share of those in flight…
RETRY_SHARE: Final = 0.2
#: …but always this many at a time.
RETRY_FLOOR: Final = 3
#: Instances that are ejected for failed answers hold at most this share of the capacity for a model...
MOST_EJECTED: Final = 0.5
#: ...which is their speed at the mean request, or before there was one at this prompt and output, in tokens.
_USUAL_REQUEST = (512.0, 256.0)

#: So many of those that wait are given a new predicted length whenever an answer has taught one.
_REPREDICTED: Final = 8
#: Looked up here and not for every request: a member of an enum costs as much as a call.
_OK: Final = Outcome.OK


@mypyc_attr(acyclic=True)
class _Decision:
    """Decision of a policy for a request, before anything is booked."""

    __slots__ = ("able", "candidates", "ctx", "excluded", "instance", "pair", "target", "work_s")

    def __init__(
        self,
        ctx: SchedulingContext,
        work_s: float,
        candidates: Callable[[], list[Candidate]],
        able: Sequence[Instance],
        excluded: dict[str, str],
        instance: Instance,
        pair: SplitChoice | None = None,
        target: Instance | None = None,
    ) -> None:
        #: Instance that decodes the answer, if that is not `instance`, and what that books.
        self.pair = pair
        self.target = target
        self.ctx = ctx
        self.work_s = work_s
        self.candidates = candidates
        self.able = able
        self.excluded = excluded
        self.instance = instance


def _bounded_tokens(request: Request) -> int:
    """Tokens of its longest sequence, one of output where the client does not bound it."""
    return (request.longest_prompt_tokens or request.prompt_tokens) + (request.max_tokens or 1)


def _nearest(value: float) -> int:
    """`round` of a number from 0, without a call in Python."""
    whole = int(value)
    rest = value - whole
    return whole + 1 if rest > 0.5 or (rest == 0.5 and whole % 2) else whole


class _Attempts:
    """Earlier destinations of a request that is being retried, and how often it may have been run."""

    __slots__ = ("runs", "tried", "turned_away", "whole")

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.runs = 0
        #: True if it is not to be split: a hand-over has failed.
        self.whole = False
        #: Of the runs, those that ended with an engine saying that it is busy.
        self.turned_away = 0


class Scheduler:
    """Places requests on instances by a policy and keeps the ledger."""

    def __init__(
        self,
        setup: SchedulerSetup,
        *,
        oracle: Mapping[RequestId, int] | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        """`oracle` holds true lengths by request, for the predictor of that name; `predictor` is another one.

        Raises `ValueError` if the predictor that `setup` names lacks what it needs.
        """
        now = setup.now
        self._rng = random.Random(setup.seed)
        self._health = setup.health
        self._params = setup.params
        self._initial_health = setup.initial_health
        self._predictor = setup.make_predictor(self._rng, oracle) if predictor is None else predictor
        self._policy: Policy = make_policy(setup.policy, setup.params, self._rng)
        #: As the policy says: asked for several times a request.
        self._reads_demand = self._policy.reads_demand
        self._queue = Queue(setup.limits)
        self._instances: dict[str, Instance] = {}
        self._leased: dict[LeaseId, Instance] = {}
        self._changes = ChangeCounter()
        self._ready: dict[str, ReadyInstances] = {}
        self._attempts: dict[RequestId, _Attempts] = {}
        self._retrying: set[LeaseId] = set()
        self._down_since: dict[str, float] = {}
        self._demands: dict[str, Demand] = {}
        #: Mean request by which capacity is measured before the first one.
        self._usual = Mix()
        prompt, output = _USUAL_REQUEST
        self._usual.add(prompt, output, prompt, output)
        self._prefixes = PrefixIndex()
        self._holds = Holds()
        #: Instances that publish KV events.
        self._telling: list[Instance] = []
        #: Names of all LoRA adapters in the fleet.
        self._adapters: frozenset[str] = frozenset()
        self._adapter_load = AdapterLoadTime(setup.params.adapter_load_s)
        #: Leases of requests for adapters until their first token: seconds from the dispatch until it is
        #: expected without a load, and whether the adapter is loaded.
        self._first_tokens: dict[LeaseId, tuple[float, bool]] = {}
        #: Waiting requests whose predicted length is older than what was learnt since.
        self._stale: list[RequestId] = []
        self._next_lease = 1
        self._next_incarnation = 1
        self._next_cache = -1
        self._last_tick = now
        #: Sizes of what waits at other schedulers of the fleet, by model.
        self._elsewhere: dict[str, int] = {}
        for spec in setup.specs:
            self._add(spec, now)
        self._reindex(now)

    # --- what drivers and pages may look at ---

    @property
    def policy_name(self) -> str:
        """The policy in force."""
        return self._policy.name

    @property
    def instances(self) -> list[Instance]:
        """The instances of the fleet, in file order. To be read, not written."""
        return list(self._instances.values())

    @property
    def predictor(self) -> Predictor:
        """The predictor of output lengths. To be read, not written."""
        return self._predictor

    def restore_lengths(self, state: Mapping[str, Any]) -> None:
        """Take over what an earlier predictor has learnt. Raises `ValueError` where that is nothing."""
        if isinstance(self._predictor, OnlinePredictor):
            self._predictor.restore(state)

    @property
    def queue(self) -> Queue:
        """The requests no instance has been chosen for yet."""
        return self._queue

    @property
    def in_flight(self) -> int:
        """Leases that have not ended, also those of removed instances."""
        return len(self._leased)

    def holder(self, lease: Lease) -> Instance:
        """The incarnation that a live lease is booked on. To be read, not written."""
        return self._leased[lease.id]

    def available(self, model: str) -> bool:
        """True if some instance of a model takes requests."""
        return model in self._ready and model not in self._down_since

    def speeds(self, model: str, instances: Sequence[Instance]) -> dict[str, float]:
        """Weighted tokens per second of each instance at the mean request of a model; for people."""
        demand = self._demands.get(model)
        mix = self._usual if demand is None or not demand.mix.count else demand.mix
        return {instance.name: mix.speed(instance) for instance in instances}

    @property
    def models(self) -> list[str]:
        """Every name that some instance answers to."""
        return list(self._ready)

    def any_routable(self, request: Request) -> bool:
        """True unless the model of a request is served, but by no routable instance of its subset."""
        ready = self._ready.get(request.model)
        if ready is None or request.subset is None:
            return True
        return any(each.routable and each.name in request.subset for each in ready.instances)

    # --- facts about requests ---

    def on_arrival(self, request: Request, now: float) -> list[Command]:
        """A request came in. No command for it means it is queued."""
        ready = self._ready.get(request.model)
        if ready is None:
            return [rejections.unknown_model(request, self._instances.values())]
        if request.prompt_exact and least_tokens(request) > ready.longest_prompt:
            return [rejections.too_long(request, ready.instances)]
        long: float | None = None
        residual = 0.0
        if self._reads_demand:
            demand = self._demands.get(request.model)
            if demand is None:
                demand = self._demand(request.model)
            predictor = self._predictor
            if request.generates:
                predicted, long, residual = predictor.outlook(request)
            else:
                predicted, long, residual = 0.0, predictor.long(request), predictor.residual(request)
            demand.arrived(size_of(request, predicted), now)
            demand.mix.add(request.prompt_tokens, predicted, long, residual)
        else:
            predicted = self._predictor.predict(request) if request.generates else 0.0
        if self._queue.held:
            return self._arrive_behind(request, ready, now, predicted)
        found = self._choose(request, ready, now, predicted, long=long, residual=residual)
        return self._enqueue(request, now, predicted) if found is None else [self._book(found, ready, now)]

    def _arrive_behind(
        self, request: Request, ready: ReadyInstances, now: float, predicted: float
    ) -> list[Command]:
        """A request came in while others wait: it may be what suits an instance that they do not suit."""
        queue = self._queue
        # With restraints slots come with time, and those that wait have been waiting for them.
        if ready.throttled or not queue.may_pass(request):
            return self._enqueue(request, now, predicted) + self._flush(now)
        found = self._choose(request, ready, now, predicted)
        if found is None:
            return self._enqueue(request, now, predicted)
        queue.passed(request, size_of(request, predicted), ready.class_of(found.instance))
        return [self._book(found, ready, now)]

    def on_prefilled(self, lease: Lease, now: float) -> list[Command]:
        """A prefill leg ended well: its KV blocks are held there, and the decode leg is dispatched.

        Where the decode instance is gone the request is dispatched anew, to one instance.
        """
        request, decode = lease.request, lease.decode
        assert decode is not None, f"{lease!r} is no prefill leg"
        source = self._leased[lease.id]
        target = self._leased[decode.id]
        if decode.incoming and (target.removed or target.health.state is Health.EJECTED):
            return self.on_unsplit(lease, Outcome.OK, now)
        self._end_prefill(lease, decode, now)
        commands: list[Command] = []
        if source.health.on_success(now):
            commands = self._health_changed(source, now)
        if decode.incoming:
            target.begin(decode, now)
            commands.append(Dispatch(request.id, decode, HAND_OVER))
        return commands + self._flush(now)

    def _end_prefill(self, lease: Lease, decode: Lease | None, now: float) -> Hold | None:
        """End the lease of a prefill leg; its blocks are held where its connector does that.

        `decode` is the lease that fetches them; None where nothing will.
        """
        source = self._leased.pop(lease.id)
        self._retrying.discard(lease.id)
        source.first_token(lease, now)
        source.release(lease, now)
        source.learn_prefill(lease, now)
        link = source.spec.kv_transfer
        planned = lease.decode
        if link is None or planned is None or not link.holds:
            return None
        if decode is not None and decode.first_token_at is not None:
            return None  # fetched already: both legs were sent at once
        tokens = lease.request.prompt_tokens
        held = 0 if planned.shared is None else planned.shared.held_tokens
        hold = Hold(
            lease.id,
            source.name,
            planned.instance,
            tokens,
            tokens - held,
            0.0 if decode is None else self._leased[decode.id].join_s(tokens),
            now + link.lease_s,
        )
        if not len(self._queue) and not self._holds.count:
            self._last_tick = now
        self._holds.keep(source, hold)
        if decode is not None:
            decode.hold = hold
        return hold

    def on_unsplit(self, lease: Lease, outcome: Outcome, now: float) -> list[Command]:
        """A hand-over failed before anything reached the client: one instance gets the whole request.

        `lease` is that of either leg; `outcome` is what its end says about the instance, where `OK` is that
        of a prefill leg whose blocks will not be fetched. The commands hold another dispatch, or a reject, or
        nothing of the request if it waits in the queue.
        """
        request, predicted = lease.request, lease.predicted_output
        commands: list[Command] = []
        if lease.decode is not None:
            predicted = lease.decode.predicted_output
            self._drop(lease.decode, now)
        if outcome is Outcome.OK and lease.decode is not None:
            self._end_prefill(lease, None, now)
        else:
            instance = self._drop(lease, now)
            commands = self._ended_badly(instance, outcome, now, False)
        attempts = self._attempts.setdefault(request.id, _Attempts())
        attempts.whole = True
        if outcome in (Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE):
            attempts.tried.append(lease.instance)
        ready = self._ready.get(request.model)
        placed = None if ready is None else self._place(request, ready, now, predicted)
        commands += [placed] if placed is not None else self._enqueue(request, now, predicted)
        return commands + self._flush(now)

    def _drop(self, lease: Lease, now: float) -> Instance:
        """Give back what a lease booked."""
        instance = self._leased.pop(lease.id)
        self._retrying.discard(lease.id)
        self._first_tokens.pop(lease.id, None)
        instance.release(lease, now)
        return instance

    def on_hold_released(self, hold: Hold, now: float) -> list[Command]:
        """A prefill instance was told that a prompt will not be fetched."""
        if hold.ended:
            return []
        self._holds.let_go(hold)
        return self._flush(now)

    @property
    def holds(self) -> list[Hold]:
        """Prompts that prefill instances keep for others. To be read, not written."""
        return self._holds.all()

    def on_first_token(self, lease: Lease, now: float) -> list[Command]:
        """The first byte of the answer came; of an answer that says 4xx or 5xx this is not to be said."""
        instance = self._leased[lease.id]
        if lease.incoming:  # both legs were sent at once, and the other one's answer is on its way
            instance.begin(lease, now)
        elif lease.hold is not None and not lease.hold.ended:
            self._holds.fetched(lease.hold, lease, instance, now)
        instance.first_token(lease, now)
        if self._first_tokens and (expected := self._first_tokens.pop(lease.id, None)) is not None:
            self._adapter_load.observe(now - lease.dispatched_at - expected[0], expected[1])
        instance.peak_ewma.observe(now - lease.dispatched_at, now, self._params.decay_s)
        if self._retrying:  # another instance answers: this one costs nothing more than any other
            self._retrying.discard(lease.id)
        if instance.health.on_answering(now):
            return self._health_changed(instance, now)
        return []

    def on_lease_ended(
        self, lease: Lease, outcome: Outcome, now: float, *, retry: bool = True, server_error: bool = False
    ) -> list[Command]:
        """A lease ended; its work, tokens and slot are given back.

        `lease.output_tokens` holds what the engine produced. After `CONNECT_FAILED` (nothing was sent) and
        `NO_RESPONSE` (sent, dropped without a byte), with `retry`, the commands hold what becomes of the
        request: another dispatch, or a reject; or none if it waits in the queue again. With any other
        outcome the request is finished. `server_error`: an `UPSTREAM_ERROR` that says 5xx, which may be the
        request's fault or the engine's.
        """
        request = lease.request
        instance = self._leased.pop(lease.id)
        if self._retrying:
            self._retrying.discard(lease.id)
        if self._first_tokens:
            self._first_tokens.pop(lease.id, None)
        instance.release(lease, now)
        lease.outcome, lease.ended_at = outcome, now
        if lease.decode is not None and not lease.decode.ended:
            self._drop(lease.decode, now)
        health = instance.health
        commands: list[Command] = []
        if outcome is _OK:
            if request.generates:
                self._predictor.observe(request, lease.output_tokens / request.sequences)
                instance.learn_speed(lease, now)
                if self._queue.held and self._reads_demand:
                    self._predict_again()
            if health.on_success(now):
                commands = self._health_changed(instance, now)
        else:
            commands = self._ended_badly(instance, outcome, now, server_error)
            if retry and outcome in (Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE):
                commands += self._retry(lease, outcome, now)
                return commands + self._flush(now)
        if self._attempts:
            self._attempts.pop(request.id, None)
        return commands + self._flush(now) if self._queue.held else commands

    def _ended_badly(
        self, instance: Instance, outcome: Outcome, now: float, server_error: bool
    ) -> list[Command]:
        """Effect of the end of a lease on the health of its instance."""
        health, says = instance.health, verdict(outcome, server_error)
        if says is Verdict.ABSENT:
            changed = health.on_refused(now)
        elif says is Verdict.FAILED:
            changed = health.on_failure(now, may_eject=self._may_eject(instance))
        elif says is Verdict.ERROR:
            changed = health.on_server_error(now, may_eject=self._may_eject(instance))
        elif says is Verdict.WELL:
            return self._health_changed(instance, now) if health.on_success(now) else []
        else:
            return []
        if changed:
            return self._health_changed(instance, now)
        if health.probation.active(now):
            self._reindex(now)
        return []

    def on_busy(
        self, lease: Lease, retry_after_s: float | None, now: float, *, may_move: bool = True
    ) -> list[Command]:
        """An engine answered 429 or 503: it has no room, which is no failure.

        If it said when to come again (`retry_after_s`), it is ranked last until then, for `BUSY_CAP_S` at
        most, and another instance that has room gets the request, within the budget of retries: then the
        lease is given back and the commands hold the new dispatch. Otherwise, and without `may_move`, they
        hold a `PassOn`, and the lease goes on.
        """
        request = lease.request
        instance = self._leased[lease.id]
        passed_on: list[Command] = [PassOn(request.id, lease)]
        if retry_after_s is None or retry_after_s <= 0.0:
            return passed_on
        instance.mark_busy(retry_after_s, request.sequences, now)
        self._reindex(now)
        attempts = self._attempts.get(request.id)
        ready = self._ready.get(request.model)
        if not may_move or ready is None or (attempts is not None and attempts.runs) or not self._may_retry():
            return passed_on
        known = attempts is not None
        if attempts is None:
            attempts = self._attempts[request.id] = _Attempts()
        attempts.tried.append(lease.instance)
        found = self._choose(request, ready, now, lease.predicted_output)
        if found is None or found.instance.throttle.busy_until > now:
            if not known:
                del self._attempts[request.id]
            return passed_on
        attempts.runs += 1
        attempts.turned_away += 1
        attempts.whole = attempts.whole or lease.hold is not None
        self._drop(lease, now)
        if lease.decode is not None:
            self._drop(lease.decode, now)
        placed = self._book(found, ready, now)
        self._retrying.add(placed.lease.id)
        return [placed, *self._flush(now)]

    def restore(self, live: LiveLease, now: float, *, arrived: bool = False) -> Lease | None:
        """Book a lease that another scheduler granted; None where its instance is gone.

        It ends like any other, but teaches nothing about speed: the load beside its first part is unknown.
        `arrived`: its request has just come to a scheduler of the same fleet, and is demand here too.
        """
        request = live.request
        assert request.id not in self._queue, f"request {request.id} waits and is restored"
        instance = self._instances.get(live.instance)
        if instance is None:
            return None
        # The other scheduler's is not known: what this one would expect keeps as much room free.
        known = request.generates and self._reads_demand
        residual = self._predictor.residual(request) if known else 0.0
        lease = self._lease(
            request, instance, live.predicted_output, live.work_ns, live.dispatched_at, residual
        )
        self._next_lease += 1
        instance.acquire(lease)
        if live.begun:
            instance.first_token(lease, now)
        lease.mark = lease.first_mark = None
        self._leased[lease.id] = instance
        if arrived and self._reads_demand:
            self._demand(request.model).arrived(size_of(request, live.predicted_output), now)
        return lease

    def assume(self, request: Request, now: float) -> Lease | None:
        """Book a request as if it had come, None where no instance would get it now: it waits nowhere."""
        ready = self._ready.get(request.model)
        predicted = self._predictor.predict(request) if request.generates else 0.0
        found = None if ready is None else self._choose(request, ready, now, predicted)
        if ready is None or found is None:
            return None
        return self._book(found, ready, now).lease

    def on_waiting_elsewhere(self, sizes: Mapping[str, int], now: float) -> list[Command]:
        """Other schedulers of the same fleet have requests of these sizes waiting, by model."""
        self._elsewhere = dict(sizes)
        return []

    def on_cancelled(self, request_id: RequestId, now: float) -> list[Command]:
        """The client of a waiting request left. (With a lease, the driver ends the lease instead.)"""
        self._queue.remove(request_id)
        self._attempts.pop(request_id, None)
        return []

    # --- facts about instances ---

    def on_instance(self, change: InstanceChange, now: float) -> list[Command]:
        """Something about an instance changed. Unknown names are ignored: facts may arrive late."""
        if isinstance(change, InstanceAdded):
            self._join(self._add(change.spec, now), now)
            self._reindex(now)
            return self._flush(now)
        instance = self._instances.get(change.name)
        if instance is None:
            return []
        if isinstance(change, CapacityLearned):
            instance.learn_capacity(change.capacity)
            self._reindex(now)
            return self._flush(now)
        if isinstance(change, Probed):
            alone = change.result is ProbeResult.FAILED and not self._has_another(instance)
            if not instance.health.on_probe(change.result, now, alone=alone, detail=change.detail):
                return []
            return self._health_changed(instance, now) + self._flush(now)
        if isinstance(change, InstanceRemoved):
            instance.removed = True
            instance.tree.retire()
            self._holds.transfers.forget(instance.incarnation)
            del self._instances[change.name]
            self._telling = [each for each in self._telling if each is not instance]
        elif isinstance(change, AdminStateSet):
            left, instance.admin = instance.admin, change.state
            if left is not AdminState.READY and change.state is AdminState.READY:
                self._join(instance, now)
        elif isinstance(change, InstanceUpdated):
            instance.update(change.spec, now)
        elif isinstance(change, ModelsLearned):
            if instance.served == change.models:
                return []
            instance.learn_models(change.models, change.adapters)
        self._reindex(now)
        return self._flush(now)

    def on_scrape(self, name: str, sample: EngineSample, now: float) -> list[Command]:
        """An engine's metrics were read."""
        instance = self._instances.get(name)
        if instance is None:
            return []
        longest, slept = instance.longest_request_tokens, instance.asleep
        finished = instance.finished_sequences
        instance.learn_sample(sample, now)
        if sample.asleep is not None:
            instance.asleep = sample.asleep
        if instance.longest_request_tokens != longest or instance.asleep is not slept:
            self._reindex(now)
        woken = slept and not instance.asleep
        return self._flush(now) if woken or instance.finished_sequences > finished else []

    def on_kv_events(self, name: str, batch: KvEventBatch, now: float) -> list[Command]:
        """An engine told what came into its prefix cache and what left it."""
        instance = self._instances.get(name)
        if instance is None:
            return []
        if instance.blocks is None:
            self._telling.append(instance)
        instance.learn_blocks(batch)
        return []

    def set_policy(self, name: str, now: float) -> list[Command]:
        """Switch the policy; the ledger stays. Raises `KeyError` for an unknown name."""
        self._policy = make_policy(name, self._params, self._rng)
        self._reads_demand = self._policy.reads_demand
        return self._flush(now)

    # --- time ---

    def next_deadline(self) -> float | None:
        """Time at which `on_tick` is due, None while nothing waits for time to pass."""
        return self._last_tick + TICK_S if len(self._queue) or self._holds.count else None

    def on_tick(self, now: float) -> list[Command]:
        """Time passed: expire what has waited too long."""
        self._last_tick = now
        self._holds.let_go_expired(now)
        commands = self._flush(now)
        for waiting in self._queue.flows():
            for entry in waiting:
                reject = self._waited(entry, now)
                if reject is None:
                    break  # those behind it have waited for less
                self._forget(entry.request.id)
                commands.append(reject)
        return commands

    def _waited(self, entry: Queued, now: float) -> Reject | None:
        """Rejection of a request that has waited for too long, None if it has not."""
        limits, request, waited_s = self._queue.limits, entry.request, now - entry.arrived_at
        if limits.timeout_s is not None and waited_s >= limits.timeout_s:
            return rejections.expired(request.id, waited_s)
        down_since = self._down_since.get(request.model)
        if down_since is None or now - max(down_since, entry.arrived_at) < limits.no_instance_timeout_s:
            return None
        return rejections.no_instance(request)

    # --- integrity ---

    def check_integrity(self) -> None:
        """Assert that blocks, work and requests are all accounted for."""
        everyone = {id(instance): instance for instance in self._leased.values()}
        everyone.update({id(instance): instance for instance in self._instances.values()})
        for instance in everyone.values():
            instance.check_integrity()
        assert sum(len(instance.leases) for instance in everyone.values()) == len(self._leased)
        for lease_id, instance in self._leased.items():
            assert lease_id in instance.leases, f"lease {lease_id} is not booked on {instance.name}"
        leased = {instance.leases[lease_id].request.id for lease_id, instance in self._leased.items()}
        legs = [instance.leases[lease_id] for lease_id, instance in self._leased.items()]
        incoming = {lease.id for lease in legs if lease.incoming}
        expected = {lease.decode.id for lease in legs if lease.decode is not None and lease.decode.incoming}
        assert incoming == expected, "a decode leg is booked without its prefill leg"
        self._holds.check_integrity(everyone.values())
        for entry in self._queue:
            assert entry.request.id not in leased, f"request {entry.request.id} waits and is leased"
        self._queue.check_integrity()
        assert self._retrying <= self._leased.keys(), "a retry outlived its lease"
        known = leased | {entry.request.id for entry in self._queue}
        assert self._attempts.keys() <= known, "retry notes outlived their request"

    # --- explaining ---

    def explain(self, request: Request, predicted: float, now: float) -> tuple[list[Candidate], str | None]:
        """Every instance of the request's model with all its terms, in file order, and who would be chosen.

        Nothing is booked. Terms that the policy does not use are filled with the paper's (they are what
        the ledger would book). A policy that draws at random draws here too.
        """
        ready = self._ready.get(request.model)
        if ready is None:
            return [], None
        instances = ready.instances
        waiting = self._queue.waiting(request.model)
        candidates = self._score(request, predicted, ready, now, waiting)
        for instance, candidate in zip(instances, candidates, strict=True):
            terms = paper_terms(instance, request, predicted, self._params)
            if candidate.ideal_batch is None:
                candidate.ideal_batch, candidate.processing_s = terms.ideal_batch, terms.processing_s
                candidate.kv_utilization, candidate.workload = terms.kv_utilization, terms.workload
        chosen = best(candidates)
        return candidates, None if chosen is None else candidates[chosen].instance

    # --- inside ---

    def _add(self, spec: InstanceSpec, now: float) -> Instance:
        health = HealthTracker(self._rng, self._initial_health)
        instance = Instance(spec, self._next_incarnation, health, now, self._changes, self._prefixes)
        self._instances[spec.name] = instance
        self._next_incarnation += 1
        return instance

    def _join(self, instance: Instance, now: float) -> None:
        """An instance came (back): its prefix cache is taken for empty; it starts slowly once it is up."""
        instance.tree.retire()
        instance.tree = Tree(self._prefixes, self._next_cache)
        self._next_cache -= 1
        if instance.health.state is Health.UP:
            instance.throttle.was_up = True
            instance.throttle.begin_slow_start(self._health.slow_start_s, now)
        else:
            instance.throttle.rejoining = True

    def _reindex(self, now: float) -> None:
        """Rebuild which instances answer to which name, and since when a name has had none to go to."""
        by_model: dict[str, list[Instance]] = {}
        for instance in self._instances.values():
            names = instance.served
            if names is None:
                names = (instance.spec.model,) if instance.spec.model else ()
            for name in names:
                by_model.setdefault(name, []).append(instance)
        self._adapters = frozenset(
            name
            for each in self._instances.values()
            if each.adapters is not None
            for name in each.adapters.names
        )
        self._ready = {model: ReadyInstances(instances, now) for model, instances in by_model.items()}
        if self._queue.held:
            self._queue.refit(self._fit_of)
        waiting = {entry.request.model for entry in self._queue} if len(self._queue) else set()
        self._down_since = {
            model: self._down_since.get(model, now)
            for model in by_model.keys() | waiting
            if not any(instance.routable for instance in by_model.get(model, ()))
        }

    def _fit_of(self, request: Request) -> int:
        ready = self._ready.get(request.model)
        return 0 if ready is None else ready.fit_of(request)

    def _health_changed(self, instance: Instance, now: float) -> list[Command]:
        state, throttle = instance.health.state, instance.throttle
        if state is Health.EJECTED and throttle.was_up:
            throttle.rejoining = True
        elif state is Health.UP:
            throttle.was_up = True
            if throttle.rejoining:
                self._join(instance, now)
        self._reindex(now)
        if instance.removed:  # its name may be another's by now
            return []
        return [HealthChanged(instance.name, state, instance.health.reason)]

    def _pools(self, instance: Instance) -> list[Sequence[Instance]]:
        """For each name that an instance answers to: all that do."""
        return [ready.instances for ready in self._ready.values() if instance in ready.instances]

    def _has_another(self, instance: Instance) -> bool:
        """True if some other instance could take over what this one is answering."""
        return any(
            other is not instance and other.routable for pool in self._pools(instance) for other in pool
        )

    def _may_eject(self, instance: Instance) -> bool:
        """True if failed answers may take an instance out: of every model it serves enough must be left.

        What has left for other reasons (drained, refused, not answering) is no capacity to begin with.
        """
        pools = self._pools(instance)
        for pool in pools:
            if not any(other is not instance and other.routable for other in pool):
                return False
            out = left = 0.0
            for other in pool:
                if other is instance or other.health.ejected_for_failures:
                    out += self._capacity(other, pool)
                elif other.routable:
                    left += self._capacity(other, pool)
            if out > MOST_EJECTED * (out + left):
                return False
        return bool(pools)

    def _capacity(self, instance: Instance, pool: Sequence[Instance]) -> float:
        """Sizes per second that an instance does of what is asked for."""
        demand = self._demands.get(instance.spec.model)
        mix = self._usual if demand is None or not demand.mix.count else demand.mix
        return mix.speed(instance)

    def _able(
        self, request: Request, ready: ReadyInstances, now: float
    ) -> tuple[Sequence[Instance], dict[str, str], list[tuple[int, str]] | None]:
        """Filter: see `ReadyInstances.choices`. Most requests may go to all, and nothing is looked at."""
        if (
            _bounded_tokens(request) <= ready.longest_tokens
            and request.pinned is None
            and request.subset is None
            and (not self._attempts or request.id not in self._attempts)
        ):
            return ready.able, ready.excluded, None
        if ready.throttled and not any(instance.throttle.active(now) for instance in ready.able):
            ready = self._ready[request.model] = ReadyInstances(ready.instances, now)
        attempts = self._attempts.get(request.id)
        tried = None if attempts is None else attempts.tried
        return ready.choices(request, tried, now, holds_back=self._policy.holds_back)

    def _question(
        self,
        request: Request,
        predicted: float,
        waiting: int,
        now: float,
        availabilities: list[tuple[int, str]] | None,
        long: float | None = None,
        residual: float = 0.0,
    ) -> SchedulingContext:
        if not request.generates or not self._reads_demand:
            long = residual = 0.0
        elif long is None:
            long, residual = self._predictor.long(request), self._predictor.residual(request)
        demand = self._demands.get(request.model)
        if demand is None:
            demand = self._demand(request.model)
        if not demand.mix.count and self._reads_demand:  # to explain one request: it is the mean one
            demand = Demand()
            demand.mix.add(request.prompt_tokens, predicted, long, residual)
        held = (
            self._prefixes.held(request.prefix_keys, request.prompt_tokens) if request.prefix_keys else None
        )
        if self._telling and request.blocks is not None:
            held = self._exact(request, held)
        ctx = SchedulingContext(
            request, predicted, long, waiting, demand, now, held, availabilities, residual
        )
        if self._adapters and request.model in self._adapters:
            ctx.adapter_load_s = self._adapter_load.seconds
        return ctx

    def _exact(self, request: Request, held: Held | None) -> Held:
        """Held tokens of a prompt, with the exact figures of engines that publish KV events."""
        if held is None:
            held = Held()
        for instance in self._telling:
            exact = instance.exact_held(request)
            if exact is not None:
                cache = instance.tree.cache_id
                held.tokens[cache] = exact
                held.credits[cache] = min(held.credit, float(exact))
        return held

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the engines that publish KV events, 0 where none does."""
        return max((each.blocks.block_tokens for each in self._telling if each.blocks), default=0)

    def _score(
        self, request: Request, predicted: float, ready: ReadyInstances, now: float, waiting: int
    ) -> list[Candidate]:
        """Filter and score: a candidate per instance in file order."""
        able, excluded, availabilities = self._able(request, ready, now)
        ctx = self._question(request, predicted, waiting, now, availabilities)
        candidates = self._policy.score(ctx, able) if able else []
        return with_excluded(candidates, ready.instances, excluded)

    def _demand(self, model: str) -> Demand:
        demand = self._demands.get(model)
        if demand is None:
            demand = self._demands[model] = Demand()
        return demand

    def _place(
        self, request: Request, ready: ReadyInstances, now: float, predicted: float
    ) -> Dispatch | None:
        found = self._choose(request, ready, now, predicted)
        return None if found is None else self._book(found, ready, now)

    def _choose(
        self,
        request: Request,
        ready: ReadyInstances,
        now: float,
        predicted: float,
        own_size: int = 0,
        long: float | None = None,
        residual: float = 0.0,
        ceiling: int | None = None,
    ) -> _Decision | None:
        """Filter, then let the policy choose; None if no instance would get the request now. Books nothing.

        `own_size` is what it counts for in the queue; `long` and `residual` are the predictor's, where it was
        asked already; instances of class `ceiling` and above are kept for another.
        """
        if ready.parts and request.splittable and (parts := self._parts(request, ready, now, ceiling)):
            waiting = self._queue.waiting(request.model) - own_size if self._queue.held else 0
            ctx = self._question(request, predicted, waiting, now, None, long, residual)
            choice = self._policy.choose_split(ctx, parts, self._holds.transfers, ready.mixed)
            if choice is None:
                return None
            if choice.prefill >= 0:
                source, target = parts[choice.prefill], parts[choice.decode]
                pair = None if source is target else choice
                return _Decision(ctx, choice.work_s, choice.candidates, parts, {}, source, pair, target)
        able, excluded, availabilities = self._able(request, ready, now)
        if ceiling is not None:
            below = [ready.class_of(instance) < ceiling for instance in able]
            able = [instance for instance, keep in zip(able, below, strict=True) if keep]
            if availabilities is not None:
                availabilities = [each for each, keep in zip(availabilities, below, strict=True) if keep]
        if not able:
            return None
        waiting = self._queue.waiting(request.model) - own_size if self._queue.held else 0
        if self._elsewhere:
            waiting += self._elsewhere.get(request.model, 0)
        ctx = self._question(request, predicted, waiting, now, availabilities, long, residual)
        index, work_s, candidates = self._policy.choose(ctx, able)
        if index is None:
            return None
        return _Decision(ctx, work_s, candidates, able, excluded, able[index])

    def _parts(
        self, request: Request, ready: ReadyInstances, now: float, ceiling: int | None
    ) -> Sequence[Instance]:
        """The instances that may get a part of a request, [] where it is not to be split."""
        attempts = self._attempts.get(request.id)
        if request.pinned is not None or (attempts is not None and attempts.whole):
            return []
        return ready.parts_for(request, None if attempts is None else attempts.tried, now, ceiling)

    def _book_pair(
        self, ctx: SchedulingContext, pair: SplitChoice, source: Instance, target: Instance, now: float
    ) -> Lease:
        """Book both legs of a request: the lease of the prefill, which names that of the decode."""
        request = ctx.request
        lease = self._lease(request, source, 1.0, round(pair.work_s * 1e9), now)
        lease.expected_first_s = pair.first_s / source.speed.factor
        self._next_lease += 1
        decode = self._lease(
            request,
            target,
            ctx.predicted_output,
            round(pair.decode_work_s * 1e9),
            now,
            ctx.residual,
            transferred=True,
        )
        decode.expected_first_s = pair.decode_first_s
        self._next_lease += 1
        source.acquire(lease)
        target.reserve(decode)
        self._leased[decode.id] = target
        lease.decode = decode
        return lease

    def _book(self, found: _Decision, ready: ReadyInstances, now: float) -> Dispatch:
        ctx, instance = found.ctx, found.instance
        if found.pair is not None and found.target is not None:
            lease = self._book_pair(found.ctx, found.pair, instance, found.target, now)
        else:
            work_ns = _nearest(found.work_s * 1e9)
            lease = self._lease(ctx.request, instance, ctx.predicted_output, work_ns, now, ctx.residual)
            self._next_lease += 1
            slots = instance.adapters if ctx.adapter_load_s > 0.0 else None
            loads = None if slots is None else slots.loads(ctx.request.model)
            instance.acquire(lease)
            if loads is not None:
                _, first_s, _ = expected_s(instance, lease)
                self._first_tokens[lease.id] = first_s * instance.speed.factor, loads
        if ctx.availabilities is not None:
            instance.health.probation.dispatched(now)
            for other in ready.able:
                if other is not instance and other.health.probation.held(now):
                    other.health.probation.passed_over()
        if self._reads_demand:
            shared = lease.shared
            used = lease.kv_prompt_tokens if shared is None else lease.kv_prompt_tokens + shared.new_tokens
            sequences = ctx.request.sequences
            ctx.demand.mix.add_booking(used / sequences, lease.unread_tokens / sequences)
        self._leased[lease.id] = instance
        policy = self._policy
        if policy.remembers:
            policy.committed(ctx, instance, found.able)
        considered: Callable[[], Sequence[Candidate]] = found.candidates
        excluded = found.excluded
        if excluded:
            scored, instances = considered, ready.instances
            considered = lambda: with_excluded(scored(), instances, excluded)  # noqa: E731
        return Dispatch(ctx.request.id, lease, policy.name, considered)

    def _lease(
        self,
        request: Request,
        instance: Instance,
        predicted: float,
        work_ns: int,
        now: float,
        residual: float = 0.0,
        transferred: bool = False,
    ) -> Lease:
        """Lease of a request on an instance: its prefixes are used from now on.

        An answer of O tokens holds U * O at a random moment, U uniform in (0, 1): with E[O^2] = 2 E[O] *
        `residual` its variance is E[O^2] / 3 - E[O]^2 / 4. Where O is known it is O^2 / 12.
        `transferred`: the KV cache of its prompt comes from another instance; its last token is computed.
        """
        cache, sequences, prompt = instance.kv_cache_tokens, request.sequences, request.prompt_tokens
        # One request never books more than its instance has: it would wait inside the engine.
        prompt_tokens = min(sequences * prompt, cache)
        answers = sequences * _nearest(predicted)
        promised = min(sequences * prompt + answers, cache)
        variance = answers * (2.0 / 3.0 * residual - predicted / 4.0)
        shared: Shared | None = None
        exact = instance.exact_held(request) if self._telling else None
        if (sequences == 1 and not request.prefix_keys and exact is None) or not instance.caches_prefixes:
            own, unread = prompt_tokens, prompt_tokens
        else:
            prompts = -(-sequences // request.samples)
            common = held = 0
            if request.prefix_keys:
                shared = instance.tree.attach(request.prefix_keys, prompt)
                common = shared.tokens
                if exact is not None:
                    shared.held_tokens = exact
                held = shared.held_tokens
            elif exact is not None:
                shared, held = Shared(None, 0, 0, exact), exact
            own = min(prompts * (prompt - common), cache)
            unread = max(prompts, prompts * (prompt - max(common, held)) + max(0, common - held))
        if transferred:
            unread = 1
        return Lease(
            self._next_lease,
            request,
            instance.name,
            instance.incarnation,
            work_ns=work_ns,
            kv_tokens=max(own, min(own + answers, cache)),
            kv_prompt_tokens=own,
            promised_tokens=promised,
            prompt_tokens=prompt_tokens,
            unread_tokens=unread,
            predicted_output=predicted,
            dispatched_at=now,
            shared=shared,
            kv_variance=_nearest(variance) if variance > 0.0 else 0,
        )

    def _enqueue(
        self, request: Request, now: float, predicted: float, *, again: bool = False
    ) -> list[Command]:
        if request.model in self._down_since and self._queue.limits.no_instance_timeout_s <= 0:
            return [rejections.no_instance(request)]
        commands: list[Command] = []
        if not self._queue.has_room(request):
            leave = self._queue.crowding_out(request)
            if not leave:
                return [rejections.queue_full(request.id)]
            for request_id in leave:
                self._forget(request_id)
                commands.append(rejections.queue_full(request_id))
        if not len(self._queue):
            self._last_tick = now
        size = round(size_of(request, predicted))
        self._queue.push(request, now, predicted, size, again, self._fit_of(request))
        return commands

    def _predict_again(self) -> None:
        """Give the next few that wait the length that is predicted now, in turns."""
        queue, stale = self._queue, self._stale
        if not stale:
            stale = self._stale = list(queue.held)
        for _ in range(min(_REPREDICTED, len(stale))):
            place = queue.held.get(stale.pop())
            if place is not None and place[3].request.generates:
                entry = place[3]
                predicted = self._predictor.predict(entry.request)
                queue.resize(entry, predicted, round(size_of(entry.request, predicted)))

    def _flush(self, now: float) -> list[Command]:
        """Place what waits."""
        if not self._queue.held:
            return []
        commands: list[Command] = []
        for key in self._queue.keys:
            while (command := self._place_next(key, now)) is not None:
                commands.append(command)
        return commands

    def _place_next(self, key: QueueKey, now: float) -> Command | None:
        """Place one request of a line: the first that some instance can take now, by fit.

        Where one has been overtaken as often as may be, what it could use is kept for it.
        """
        ready = self._ready.get(key.model)
        if ready is None:
            return None
        ceiling: int | None = None
        for fair, flow, fit in self._queue.heads(key):
            command = self._place_head(ready, key, fair, flow, fit, ceiling, now)
            if command is not None:
                return command
            if fair.stopping(fit) is not None:
                ceiling = fit if ceiling is None else min(ceiling, fit)
        return None

    def _place_head(
        self,
        ready: ReadyInstances,
        key: QueueKey,
        fair: FairQueue,
        flow: Flow,
        fit: int,
        ceiling: int | None,
        now: float,
    ) -> Command | None:
        """Place the head of a flow, or one close behind that suits the free instance better."""
        queue = self._queue
        stopping = fair.stopping(fit)
        waiting = flow.by_fit[fit].values()
        entries = [stopping] if stopping is not None else list(islice(waiting, self._policy.lookahead))
        head = entries[0]
        request = head.request
        if request.prompt_exact and least_tokens(request) > ready.longest_prompt:
            self._forget(request.id)
            return rejections.too_long(request, ready.instances)
        predicted = self._predictor.predict(request) if request.generates else 0.0
        found = self._choose(request, ready, now, predicted, head.size, ceiling=ceiling)
        if found is None:
            if key.retry and not self._able(request, ready, now)[0]:
                return self._give_up(request, unsent=False)
            return None
        if key.retry:
            if not self._may_retry():
                return None
            queue.take(request.id, ready.class_of(found.instance))
            placed = self._book(found, ready, now)
            self._retrying.add(placed.lease.id)
            return placed
        if len(entries) > 1:
            found = self._suited(found, entries, ready, ceiling, now)
        queue.take(found.ctx.request.id, ready.class_of(found.instance))
        return self._book(found, ready, now)

    def _suited(
        self, found: _Decision, entries: list[Queued], ready: ReadyInstances, ceiling: int | None, now: float
    ) -> _Decision:
        """The choice for the head, or for one behind it that suits the same instance better."""
        head, queue = entries[0], self._queue
        for index, entry in enumerate(entries):  # none may be overtaken too often
            if queue.overtaken(entry) >= MOST_OVERTAKEN:
                del entries[index + 1 :]
                break
        demand = self._demand(head.request.model)
        entry = self._policy.suited(found.instance, entries, demand, ready.instances)
        if entry is head:
            return found
        other = self._choose(entry.request, ready, now, entry.predicted_output, entry.size, ceiling=ceiling)
        return other if other is not None and other.instance is found.instance else found

    def _may_retry(self) -> bool:
        """True if the budget of retries that may run twice allows one more."""
        return len(self._retrying) < max(RETRY_FLOOR, int(RETRY_SHARE * len(self._leased)))

    def _retry(self, lease: Lease, outcome: Outcome, now: float) -> list[Command]:
        """Retry or reject a request that an engine did not answer."""
        request, predicted = lease.request, lease.predicted_output
        attempts = self._attempts.setdefault(request.id, _Attempts())
        attempts.tried.append(lease.instance)
        if outcome is Outcome.NO_RESPONSE:
            attempts.runs += 1
        unsent = outcome is Outcome.CONNECT_FAILED and attempts.runs == attempts.turned_away
        ready = self._ready.get(request.model)
        # Dropped twice: the request itself may be what kills engines.
        if attempts.runs <= 1 and ready is not None and self._able(request, ready, now)[0]:
            within = outcome is Outcome.CONNECT_FAILED or self._may_retry()
            placed = self._place(request, ready, now, predicted) if within else None
            if placed is not None:
                if outcome is Outcome.NO_RESPONSE:
                    self._retrying.add(placed.lease.id)
                return [placed]
            # An instance can take it, but not now: none has room, or too many are being tried again.
            if unsent:
                self._attempts.pop(request.id)
            if self._queue.has_room(request):
                return self._enqueue(request, now, predicted, again=not unsent)
        elif unsent and request.model in self._down_since:
            self._attempts.pop(request.id)
            return self._enqueue(request, now, predicted)
        return [self._give_up(request, unsent=unsent)]

    def _give_up(self, request: Request, *, unsent: bool) -> Reject:
        """A request that no engine answered is tried no more. `unsent`: none can have run it."""
        self._forget(request.id)
        return rejections.not_answered(request.id, unsent=unsent)

    def _forget(self, request_id: RequestId) -> None:
        self._queue.remove(request_id)
        self._attempts.pop(request_id, None)
