"""The mapper: facts and the current time go in, commands come out.

Promise: no I/O, no clock, no logging. One dispatch, one lease, tied to the incarnation of its instance;
what a lease booked is given back exactly once, however it ends. A request is at any moment waiting,
leased or gone; nothing is dispatched to an instance that is drained, ejected or removed. Queues are
bounded. The proxy drives this object from real traffic, the simulator from a heap, a replay from a file.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetlb.core.admission import Lane, Queue, QueueLimits
from hetlb.core.affinity import Affinity
from hetlb.core.demand import Demand, size_of
from hetlb.core.health import HealthTracker
from hetlb.core.instance import Instance
from hetlb.core.policies import make_policy
from hetlb.core.policy import Choice, Policy, PolicyParams, Question, best, paper_terms
from hetlb.core.predictor import Predictor
from hetlb.core.types import (
    AdminState,
    AdminStateSet,
    Candidate,
    CapacityLearned,
    Command,
    Dispatch,
    EngineSample,
    Health,
    HealthChanged,
    InstanceAdded,
    InstanceChange,
    InstanceRemoved,
    InstanceSpec,
    Lease,
    LeaseId,
    ModelsLearned,
    Outcome,
    Probed,
    Reject,
    RejectReason,
    Request,
    RequestId,
)

__all__ = ["TICK_S", "Scheduler"]

#: While something waits for time to pass (queue limits, ejections), the driver is asked to tick this often.
TICK_S = 0.25
#: Retries of requests that an engine dropped without an answer: at most this share of those in flight…
RETRY_SHARE = 0.2
#: …but always this many at a time.
RETRY_FLOOR = 3

_INSTANCE_FAILURES = frozenset({Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE, Outcome.BROKEN_STREAM})
_NOTHING: Mapping[tuple[str, int], int] = {}
_ADMIN_REASON = {AdminState.DRAIN: "draining", AdminState.MAINT: "in maintenance"}


def _with_excluded(
    candidates: Sequence[Candidate], instances: Sequence[Instance], excluded: Mapping[str, str]
) -> list[Candidate]:
    """The scored candidates and, in their places, those that were filtered out."""
    scored = iter(candidates)
    return [
        Candidate(instance.name, math.inf, eligible=False, reason=excluded[instance.name])
        if instance.name in excluded
        else next(scored)
        for instance in instances
    ]


@dataclass(frozen=True, slots=True)
class _Found:
    """What a policy chose for a request, before anything is booked."""

    question: Question
    choice: Choice
    able: list[Instance]
    excluded: dict[str, str]
    instance: Instance


class _Ready:
    """Of one model: who can take any request but a very long one, and why the others can't.

    Computed when something changes and not for every request.
    """

    __slots__ = ("able", "excluded", "longest_tokens")

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.excluded: dict[str, str] = {}
        routable: list[Instance] = []
        for instance in instances:
            if reason := _why_not(instance):
                self.excluded[instance.name] = reason
            else:
                routable.append(instance)
        self.able = [instance for instance in routable if instance.health.state is Health.UP] or routable
        if len(self.able) < len(routable):
            for instance in routable:
                if instance.health.state is not Health.UP:
                    self.excluded[instance.name] = f"suspect: {instance.health.reason}"
        limits = [instance.longest_request_tokens for instance in self.able]
        #: Whose prompt and output stay within this fits everywhere.
        self.longest_tokens = min((limit for limit in limits if limit is not None), default=math.inf)


def _why_not(instance: Instance) -> str:
    """Why an instance can take no request now, "" if it can."""
    if instance.admin is not AdminState.READY:
        return _ADMIN_REASON[instance.admin]
    if instance.health.state is Health.EJECTED:
        return f"ejected: {instance.health.reason}"
    return ""


class _Attempts:
    """Where a request that is being retried was sent before, and how often it was dropped."""

    __slots__ = ("dropped", "tried")

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.dropped = 0


class Scheduler:
    """Places requests on instances by a policy and keeps the ledger."""

    def __init__(
        self,
        specs: Iterable[InstanceSpec],
        policy: str,
        *,
        params: PolicyParams,
        limits: QueueLimits,
        predictor: Predictor,
        rng: random.Random,
        initial_health: Health = Health.SUSPECT,
        now: float = 0.0,
    ) -> None:
        self._rng = rng
        self._params = params
        self._initial_health = initial_health
        self._predictor = predictor
        self._policy: Policy = make_policy(policy, params, rng)
        self._queue = Queue(limits)
        self._instances: dict[str, Instance] = {}
        self._leased: dict[LeaseId, Instance] = {}
        self._by_model: dict[str, list[Instance]] = {}
        self._ready: dict[str, _Ready] = {}
        self._attempts: dict[RequestId, _Attempts] = {}
        self._retrying: set[LeaseId] = set()
        self._down_since: dict[str, float] = {}
        self._demands: dict[str, Demand] = {}
        self._affinity = Affinity()
        self._next_lease = 1
        self._next_incarnation = 1
        self._last_tick = now
        for spec in specs:
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

    @property
    def models(self) -> list[str]:
        """Every name that some instance answers to."""
        return list(self._by_model)

    # --- facts about requests ---

    def on_arrival(self, request: Request, now: float) -> list[Command]:
        """A request came in. No command means it is queued."""
        instances = self._by_model.get(request.model)
        if instances is None:
            return [self._unknown_model(request)]
        if request.prompt_exact and not any(instance.fits_prompt(request) for instance in instances):
            return [self._too_long(request, instances)]
        predicted = self._predict(request)
        if self._policy.reads_demand:
            demand = self._demand(request.model)
            demand.arrived(size_of(request, predicted), now)
            predictor = self._predictor
            demand.mix.add(
                request.prompt_tokens, predicted, predictor.long(request), predictor.residual(request)
            )
        placed = self._place(request, instances, now, predicted)
        if placed is not None:
            return [placed]
        return self._enqueue(request, now, predicted)

    def on_first_token(self, lease: Lease, now: float) -> list[Command]:
        """The first byte of the answer came."""
        instance = self._leased[lease.id]
        instance.first_token(lease, now)
        instance.peak_ewma.observe(now - lease.dispatched_at, now, self._params.decay_s)
        if instance.health.on_success(now):
            return self._health_changed(instance, now)
        return []

    def on_lease_ended(
        self, lease: Lease, outcome: Outcome, now: float, *, retry: bool = True
    ) -> list[Command]:
        """A lease ended; its work, tokens and slot are given back.

        `lease.output_tokens` holds what the engine produced. After `CONNECT_FAILED` (nothing was sent) and
        `NO_RESPONSE` (sent, dropped without a byte), with `retry`, the commands hold what becomes of the
        request: another dispatch, or a reject; or none if it waits in the queue again. With any other
        outcome the request is finished.
        """
        instance = self._leased.pop(lease.id)
        self._retrying.discard(lease.id)
        instance.release(lease, now)
        commands: list[Command] = []
        if outcome is Outcome.OK:
            if lease.request.generates:
                self._predictor.observe(lease.request, lease.output_tokens / lease.request.sequences)
                instance.learn_speed(lease, now)
            changed = instance.health.on_success(now)
        elif outcome is Outcome.CONNECT_FAILED:
            changed = instance.health.on_refused(now)
        elif outcome in _INSTANCE_FAILURES:
            changed = instance.health.on_failure(now, may_eject=self._has_another(instance))
        else:
            changed = False
        if changed:
            commands += self._health_changed(instance, now)
        again = retry and outcome in (Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE)
        if again:
            commands += self._retry(lease, outcome, now)
        else:
            self._attempts.pop(lease.request.id, None)
        return commands + self._flush(now)

    def on_cancelled(self, request_id: RequestId, now: float) -> list[Command]:
        """The client of a waiting request left. (With a lease, the driver ends the lease instead.)"""
        self._queue.remove(request_id)
        self._attempts.pop(request_id, None)
        return []

    # --- facts about instances ---

    def on_instance(self, change: InstanceChange, now: float) -> list[Command]:
        """Something about an instance changed. Unknown names are ignored: facts may arrive late."""
        if isinstance(change, InstanceAdded):
            self._add(change.spec, now)
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
            if not instance.health.on_probe(change.result, now):
                return []
            return self._health_changed(instance, now) + self._flush(now)
        if isinstance(change, InstanceRemoved):
            instance.removed = True
            del self._instances[change.name]
        elif isinstance(change, AdminStateSet):
            instance.admin = change.state
        elif isinstance(change, ModelsLearned):
            if instance.served == change.models:
                return []
            instance.served = change.models
        self._reindex(now)
        return self._flush(now)

    def on_scrape(self, name: str, sample: EngineSample, now: float) -> list[Command]:
        """An engine's metrics were read."""
        instance = self._instances.get(name)
        if instance is None:
            return []
        longest = instance.longest_request_tokens
        instance.learn_sample(sample, now)
        if instance.longest_request_tokens != longest:
            self._reindex(now)
        return []

    def set_policy(self, name: str, now: float) -> list[Command]:
        """Switch the policy; the ledger stays. Raises `KeyError` for an unknown name."""
        self._policy = make_policy(name, self._params, self._rng)
        return self._flush(now)

    # --- time ---

    def next_deadline(self) -> float | None:
        """When `on_tick` is due, None while nothing waits for time to pass."""
        return self._last_tick + TICK_S if len(self._queue) else None

    def on_tick(self, now: float) -> list[Command]:
        """Time passed: expire what has waited too long."""
        self._last_tick = now
        commands = self._flush(now)
        limits = self._queue.limits
        for entry in self._queue:
            request, waited_s = entry.request, now - entry.arrived_at
            if limits.timeout_s is not None and waited_s >= limits.timeout_s:
                self._forget(request.id)
                commands.append(
                    Reject(
                        request.id,
                        RejectReason.QUEUE_EXPIRED,
                        f"The request waited {waited_s:.0f} s for an instance and none became free.",
                        retry_after_s=1.0,
                    )
                )
                continue
            down_since = self._down_since.get(request.model)
            if down_since is None:
                continue
            if now - max(down_since, entry.arrived_at) >= limits.no_instance_timeout_s:
                self._forget(request.id)
                commands.append(self._no_instance(request))
        return commands

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
        instances = self._by_model.get(request.model, [])
        waiting = self._queue.waiting(request.model)
        candidates = self._score(request, predicted, instances, now, waiting)
        for instance, candidate in zip(instances, candidates, strict=True):
            terms = paper_terms(instance, request, predicted, self._params)
            if candidate.ideal_batch is None:
                candidate.ideal_batch, candidate.processing_s = terms.ideal_batch, terms.processing_s
                candidate.kv_utilization, candidate.workload = terms.kv_utilization, terms.workload
        chosen = best(candidates)
        return candidates, None if chosen is None else candidates[chosen].instance

    # --- inside ---

    def _add(self, spec: InstanceSpec, now: float) -> None:
        health = HealthTracker(self._rng, self._initial_health)
        self._instances[spec.name] = Instance(spec, self._next_incarnation, health, now)
        self._next_incarnation += 1

    def _reindex(self, now: float) -> None:
        """Rebuild which instances answer to which name, and since when a name has had none to go to."""
        by_model: dict[str, list[Instance]] = {}
        for instance in self._instances.values():
            names = instance.served
            if names is None:
                names = (instance.spec.model,) if instance.spec.model else ()
            for name in names:
                by_model.setdefault(name, []).append(instance)
        self._by_model = by_model
        self._ready = {model: _Ready(instances) for model, instances in by_model.items()}
        waiting = {entry.request.model for entry in self._queue} if len(self._queue) else set()
        self._down_since = {
            model: self._down_since.get(model, now)
            for model in by_model.keys() | waiting
            if not any(instance.routable for instance in by_model.get(model, ()))
        }

    def _health_changed(self, instance: Instance, now: float) -> list[Command]:
        self._reindex(now)
        return [HealthChanged(instance.name, instance.health.state, instance.health.reason)]

    def _has_another(self, instance: Instance) -> bool:
        """Whether some other instance could take over what this one is answering."""
        return any(
            other is not instance and other.routable
            for instances in self._by_model.values()
            if instance in instances
            for other in instances
        )

    def _able(self, request: Request, instances: Sequence[Instance]) -> tuple[list[Instance], dict[str, str]]:
        """Filter: the instances that may be chosen now, and why each other one may not."""
        attempts = self._attempts.get(request.id)
        if attempts is None and request.pinned is None:
            ready = self._ready[request.model]
            tokens = (request.longest_prompt_tokens or request.prompt_tokens) + (request.max_tokens or 1)
            if tokens <= ready.longest_tokens:
                return ready.able, ready.excluded
        tried: Sequence[str] = attempts.tried if attempts is not None else ()
        excluded: dict[str, str] = {}
        able: list[Instance] = []
        for instance in instances:
            if request.pinned is not None and instance.name != request.pinned:
                reason = "the request belongs to another instance"
            else:
                reason = _why_not(instance) or ("tried before" if instance.name in tried else "")
            if reason:
                excluded[instance.name] = reason
            else:
                able.append(instance)
        fitting = [instance for instance in able if instance.fits(request)]
        if not fitting and able:
            # vLLM serves a prompt that fits and cuts the answer at its context length; and a length that
            # was only estimated must not shut out everyone. The largest engine has the last word.
            longest = max(instance.longest_request_tokens or 0 for instance in able)
            fitting = [i for i in able if (i.longest_request_tokens or 0) == longest]
        up = [instance for instance in fitting if instance.health.state is Health.UP]
        chosen = up or fitting
        if len(chosen) < len(able):
            for instance in able:
                if instance not in fitting:
                    excluded[instance.name] = "too small for prompt and max_tokens"
                elif instance not in chosen:
                    excluded[instance.name] = f"suspect: {instance.health.reason}"
        return chosen, excluded

    def _question(self, request: Request, predicted: float, waiting: int, now: float) -> Question:
        long = self._predictor.long(request) if request.generates else 0.0
        demand = self._demand(request.model)
        if demand.mix.empty:  # to explain one request on a fleet that has had none: it is the mean one
            demand = Demand()
            demand.mix.add(request.prompt_tokens, predicted, long, self._predictor.residual(request))
        held = self._affinity.held(request) if request.beginnings else _NOTHING
        return Question(request, predicted, long, waiting, demand, now, held)

    def _score(
        self, request: Request, predicted: float, instances: Sequence[Instance], now: float, waiting: int
    ) -> list[Candidate]:
        """Filter and score: a candidate per instance in file order."""
        able, excluded = self._able(request, instances)
        question = self._question(request, predicted, waiting, now)
        candidates = self._policy.score(question, able) if able else []
        return _with_excluded(candidates, instances, excluded)

    def _demand(self, model: str) -> Demand:
        demand = self._demands.get(model)
        if demand is None:
            demand = self._demands[model] = Demand()
        return demand

    def _place(
        self,
        request: Request,
        instances: Sequence[Instance],
        now: float,
        predicted: float,
        own_size: int = 0,
    ) -> Dispatch | None:
        found = self._choose(request, instances, now, predicted, own_size)
        return None if found is None else self._book(found, instances, now)

    def _choose(
        self,
        request: Request,
        instances: Sequence[Instance],
        now: float,
        predicted: float,
        own_size: int = 0,
    ) -> _Found | None:
        """Who would get a request now, None if nobody. Books nothing."""
        able, excluded = self._able(request, instances)
        if not able:
            return None
        waiting = self._queue.waiting(request.model) - own_size
        question = self._question(request, predicted, waiting, now)
        choice = self._policy.choose(question, able)
        if choice.index is None:
            return None
        return _Found(question, choice, able, excluded, able[choice.index])

    def _book(self, found: _Found, instances: Sequence[Instance], now: float) -> Dispatch:
        request, predicted = found.question.request, found.question.predicted_output
        instance, choice = found.instance, found.choice
        tokens = request.sequences * (request.prompt_tokens + round(predicted))
        lease = Lease(
            self._next_lease,
            request,
            instance.name,
            instance.incarnation,
            work_ns=round(choice.work_s * 1e9),
            # One request never books more than its instance has: it would wait inside the engine.
            kv_tokens=min(tokens, instance.kv_cache_tokens),
            prompt_tokens=min(request.sequences * request.prompt_tokens, instance.kv_cache_tokens),
            predicted_output=predicted,
            dispatched_at=now,
        )
        self._next_lease += 1
        instance.acquire(lease)
        if request.beginnings:
            self._affinity.sent(request, instance, predicted)
        self._leased[lease.id] = instance
        self._policy.committed(instance, found.able)
        considered, excluded = choice.candidates, found.excluded
        if excluded:
            scored = considered
            considered = lambda: _with_excluded(scored(), instances, excluded)  # noqa: E731
        return Dispatch(request.id, lease, self._policy.name, considered)

    def _enqueue(self, request: Request, now: float, predicted: float) -> list[Command]:
        if request.model in self._down_since and self._queue.limits.no_instance_timeout_s <= 0:
            return [self._no_instance(request)]
        if not self._queue.has_room(request):
            return [
                Reject(
                    request.id,
                    RejectReason.QUEUE_FULL,
                    "Too many requests are waiting for an instance.",
                    retry_after_s=1.0,
                )
            ]
        if not len(self._queue):
            self._last_tick = now
        self._queue.push(request, now, predicted, round(size_of(request, predicted)))
        return []

    def _predict(self, request: Request) -> float:
        return self._predictor.predict(request) if request.generates else 0.0

    def _flush(self, now: float) -> list[Command]:
        """Place what waits."""
        if not len(self._queue):
            return []
        commands: list[Command] = []
        for lane in self._queue.lanes:
            while (command := self._place_next(lane, now)) is not None:
                commands.append(command)
        return commands

    def _place_next(self, lane: Lane, now: float) -> Command | None:
        """Place one request of a lane: the head, or one close behind that suits the free instance better.

        The head is overtaken a bounded number of times.
        """
        entries = self._queue.first(lane, self._policy.lookahead)
        instances = self._by_model.get(lane[0])
        if not entries or instances is None:
            return None
        head = entries[0]
        request = head.request
        if request.prompt_exact and not any(instance.fits_prompt(request) for instance in instances):
            self._forget(request.id)
            return self._too_long(request, instances)
        found = self._choose(request, instances, now, self._predict(request), head.size)
        if found is None:
            return None
        if head.overtaken < self._policy.lookahead and len(entries) > 1:
            entry = self._policy.suited(found.instance, entries, self._demand(request.model), instances)
            if entry is not head:
                other = self._choose(entry.request, instances, now, entry.predicted_output, entry.size)
                if other is not None and other.instance is found.instance:
                    found = other
                    head.overtaken += 1
        self._queue.remove(found.question.request.id)
        return self._book(found, instances, now)

    def _retry(self, lease: Lease, outcome: Outcome, now: float) -> list[Command]:
        request = lease.request
        attempts = self._attempts.setdefault(request.id, _Attempts())
        attempts.tried.append(lease.instance)
        if outcome is Outcome.NO_RESPONSE:
            attempts.dropped += 1
        budget = max(RETRY_FLOOR, int(RETRY_SHARE * len(self._leased)))
        instances = self._by_model.get(request.model, [])
        placed: Dispatch | None = None
        # Dropped twice: the request itself may be what kills engines.
        if attempts.dropped <= 1 and (outcome is Outcome.CONNECT_FAILED or len(self._retrying) < budget):
            placed = self._place(request, instances, now, lease.predicted_output)
        if placed is not None:
            if outcome is Outcome.NO_RESPONSE:
                self._retrying.add(placed.lease.id)
            return [placed]
        self._attempts.pop(request.id)
        unsent = outcome is Outcome.CONNECT_FAILED and attempts.dropped == 0
        if unsent and request.model in self._down_since:
            return self._enqueue(request, now, lease.predicted_output)
        reason = RejectReason.CONNECT_FAILED if unsent else RejectReason.NO_RESPONSE
        detail = (
            "No instance of this model accepts connections."
            if unsent
            else "The instance closed the connection without answering."
        )
        return [Reject(request.id, reason, detail, retry_after_s=1.0 if unsent else None)]

    def _forget(self, request_id: RequestId) -> None:
        self._queue.remove(request_id)
        self._attempts.pop(request_id, None)

    # --- rejections ---

    def _unknown_model(self, request: Request) -> Reject:
        unknown = [i.name for i in self._instances.values() if i.served is None and not i.spec.model]
        if unknown:
            return Reject(
                request.id,
                RejectReason.NO_INSTANCE,
                f"Not every instance has told yet what it serves; none is known to serve {request.model!r}.",
                retry_after_s=1.0,
            )
        return Reject(request.id, RejectReason.UNKNOWN_MODEL, f"The model `{request.model}` does not exist.")

    def _too_long(self, request: Request, instances: Sequence[Instance]) -> Reject:
        largest = max(instance.longest_request_tokens or 0 for instance in instances)
        prompt = request.longest_prompt_tokens or request.prompt_tokens
        return Reject(
            request.id,
            RejectReason.TOO_LONG,
            f"This model's maximum context length is {largest} tokens. "
            f"However, your prompt has {prompt} input tokens. Please reduce its length.",
        )

    def _no_instance(self, request: Request) -> Reject:
        return Reject(
            request.id,
            RejectReason.NO_INSTANCE,
            f"No instance of the model `{request.model}` is up.",
            retry_after_s=1.0,
        )
