"""Placement of a request: filter the instances, let the policy score them and pick one, book the lease."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.demand import Demand, Mix
from hetlb.balancer.core.evidence.retries import Retries
from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.fleet_state import FleetState
from hetlb.balancer.core.instance import NOTICE_MARGIN_S, Instance
from hetlb.balancer.core.ledger import Ledger
from hetlb.balancer.core.policies.base import Choice, Policy
from hetlb.balancer.core.policies.sight import SchedulingContext, foreseen
from hetlb.balancer.core.predictor import Predictor
from hetlb.balancer.core.prefix_index import Held
from hetlb.balancer.core.queue import Queue
from hetlb.balancer.core.ready import Choices, ReadyInstances, with_excluded
from hetlb.balancer.core.types import (
    AdminState,
    Candidate,
    Command,
    Dispatch,
    Health,
    Hold,
    Lease,
    LeaseId,
    Outcome,
    Request,
    RequestId,
)

if TYPE_CHECKING:
    from hetlb.balancer.core.adapters import AdapterLoadTime

#: Lengths count as unknown if more answers than this run for each one that has ended: see `_as_running`.
_UNKNOWN: Final = 4.0
#: Multiple of the time to read its prompt after which a waiting request is due, and most seconds.
_READ_PATIENCE: Final = 20.0
_MOST_PATIENCE_S: Final = 30.0
#: Prompt and output tokens of the mean request before the first one, to measure capacity.
_USUAL_REQUEST = (512.0, 256.0)
_LEAVES: Final = "it leaves before the answer would end"


@mypyc_attr(acyclic=True, free_list_len=1)
class Decision:
    """Decision of a policy for a request, before anything is booked."""

    __slots__ = ("book_pair", "choice", "choices", "ctx", "instance", "ready")

    def __init__(
        self,
        ctx: SchedulingContext,
        ready: ReadyInstances,
        choices: Choices,
        choice: Choice,
        instance: Instance,
    ) -> None:
        self.ctx = ctx
        self.ready = ready
        self.choices = choices
        self.choice = choice
        self.instance = instance
        #: Books both legs of a request that is split, None for a whole one.
        self.book_pair: Callable[[], Lease] | None = None


class Splitting(ABC):
    """Decisions to split requests, facts about their two legs, and holds between the legs."""

    @property
    @abstractmethod
    def held(self) -> int: ...

    @abstractmethod
    def choose(
        self, ctx: SchedulingContext, ready: ReadyInstances, ceiling: int | None
    ) -> tuple[bool, Decision | None]: ...

    @abstractmethod
    def first_token(self, lease: Lease, instance: Instance, now: float) -> None: ...

    @abstractmethod
    def prefilled(self, lease: Lease, now: float) -> list[Command]: ...

    @abstractmethod
    def unsplit(self, lease: Lease, outcome: Outcome, now: float) -> list[Command]: ...

    @abstractmethod
    def released(self, hold: Hold, now: float) -> list[Command]: ...

    @abstractmethod
    def sampled(self, instance: Instance, sample: EngineSample, now: float) -> None: ...

    @abstractmethod
    def failing(self, now: float) -> list[tuple[str, str]]: ...

    @abstractmethod
    def forget(self, incarnation: int) -> None: ...

    @abstractmethod
    def let_go_expired(self, now: float) -> None: ...

    @abstractmethod
    def hold_of(self, number: int) -> Hold | None: ...

    @abstractmethod
    def check_integrity(self, instances: Sequence[Instance]) -> None: ...


def check_choice(index: int, work_s: float, instances: int) -> None:
    """Raise `ValueError` unless a choice can be booked: one of the instances, and a finite time of work."""
    if not (0 <= index < instances and 0.0 <= work_s < math.inf):
        raise ValueError(
            f"expected one of {instances} instances and seconds of work, got {index} and {work_s}"
        )


class Placement:
    """The policy and the state for its decisions: the fleet, demand, lengths, prefixes."""

    def __init__(
        self, policy: Policy, predictor: Predictor, fleet: FleetState, queue: Queue, first_lease: LeaseId = 1
    ) -> None:
        self.use(policy)
        self.predictor = predictor
        self.fleet = fleet
        self.queue = queue
        self.ledger = Ledger(queue, first_lease)
        self.retries = Retries()
        #: Demand by model.
        self.demands: dict[str, Demand] = defaultdict(Demand)
        #: Sizes of waiting requests at other schedulers, by model.
        self.elsewhere: dict[str, int] = {}
        #: Splits requests, None if no instance has a `kv_transfer`.
        self.splits: Splitting | None = None
        #: Seconds to load adapters, None before the first request for one.
        self.adapter_load: AdapterLoadTime | None = None
        self._usual = Mix()
        self._usual.add(*_USUAL_REQUEST)
        #: Called with each request that the policy raised an error for; None: the error is raised.
        self.on_failed: Callable[[Request, Exception], None] | None = None
        #: Requests for which the policy raised an error, until they are rejected.
        self.failed: set[RequestId] = set()

    def use(self, policy: Policy) -> None:
        """Decide by this policy from now on."""
        self.policy = policy
        self.policy_name = policy.name

    # --- demand ---

    def _mix(self, model: str) -> Mix:
        """Return the mean request of a model, or a usual one before the first."""
        demand = self.demands.get(model)
        return self._usual if demand is None or not demand.mix.count else demand.mix

    def capacity(self, instance: Instance) -> float:
        """Return the sizes per second that an instance serves of the demand."""
        return self._mix(instance.spec.model).speed(instance)

    def speeds(self, model: str, instances: Sequence[Instance]) -> dict[str, float]:
        """Return the weighted tokens per second of each instance at the mean request of a model."""
        mix = self._mix(model)
        return {instance.name: mix.speed(instance) for instance in instances}

    def patience_s(self, request: Request) -> float:
        """Return the seconds after which a request is due, by the time that its prompt takes to read.

        Requests with short prompts go first, so that fewer wait. A request waits for later ones for at most
        `_MOST_PATIENCE_S`.
        """
        ready = self.fleet.ready.get(request.model)
        if ready is None or not ready.able or not self.policy.holds_back:
            return 0.0
        costs, tokens = self._mix(request.model).fleet(ready.able), float(request.prompt_tokens)
        if request.prefix_keys:
            held = self.fleet.prefixes.held(request.prefix_keys, request.prompt_tokens)
            tokens -= 0 if held is None else max(held.tokens.values(), default=0)
        read_s = request.sequences * tokens * costs.costs[costs.order[0]].token_prefill_s
        return min(_READ_PATIENCE * read_s, _MOST_PATIENCE_S)

    def kind_of(self, request: Request, predicted: float) -> int:
        """Return the kind of a request, 0 without a plan. Each kind has a line of its own."""
        worth = self.policy.worth
        return 0 if worth is None else worth.kind(request.model, request.prompt_tokens, predicted)

    # --- filter, score, pick, book ---

    def place(self, request: Request, ready: ReadyInstances, now: float, predicted: float) -> Dispatch | None:
        """Choose an instance and book the request there. Return None if no instance would get it now."""
        found = self.choose(request, ready, now, predicted)
        return None if found is None else self.book(found)

    def choose(
        self,
        request: Request,
        ready: ReadyInstances,
        now: float,
        predicted: float,
        own_size: int = 0,
        long: float = -1.0,
        ceiling: int | None = None,
        waited_s: float = 0.0,
        kept: frozenset[str] = frozenset(),
    ) -> Decision | None:
        """Filter, then let the policy choose. Return None if no instance would get the request now.

        `own_size`: the size of the request in the queue. `long`: the predictor's long length, -1 if it was
        not asked. Instances of class `ceiling` and above, and the `kept` ones, are kept for other requests.
        `waited_s`: time since the request came. An instance that has been given notice gets only what ends in
        time. If the policy raises an error, return None, too; the request is then in `failed`.
        """
        try:
            waiting = self.queue.waiting(request.model) - own_size if self.queue.held else 0
            if self.elsewhere:
                waiting += self.elsewhere.get(request.model, 0)
            choices, worth, stays = self.able(request, ready, now), self.policy.worth, False
            ctx = self.context(request, predicted, waiting, now, long)
            ctx.waited_s = waited_s
            if not request.sequences:
                return self._slotless(ctx, ready, choices)
            if self.splits is not None and request.splittable:
                settled, decision = self.splits.choose(ctx, ready, ceiling)
                if settled:
                    return decision
            while True:
                left = choices
                if ceiling is not None or stays:
                    left = left.without(_kept_for_others(left, ready, ceiling, stays))
                if kept and worth is not None:
                    left = worth.without(left, kept)
                if not left.instances:
                    return None
                ctx.restraints = left.restraints
                found = self.policy.choose(ctx, left.instances)
                ctx.demand.answer_s = ctx.answer_s  # here: scoring changes nothing
                if found is None:
                    return None
                check_choice(found.index, found.work_s, len(left.instances))
                instance = left.instances[found.index]
                leaves_at, end_s = instance.leaves_at, found.forecast.end_s  # one without a forecast fails
                if leaves_at is None or stays or now + end_s <= leaves_at - NOTICE_MARGIN_S:
                    return Decision(ctx, ready, left, found, instance)
                stays = True
        except Exception as error:
            if self.on_failed is None:
                raise
            self.on_failed(request, error)
            self.failed.add(request.id)
            return None

    def _slotless(self, ctx: SchedulingContext, ready: ReadyInstances, choices: Choices) -> Decision | None:
        """Choose for a request without a slot: the instance with the fewest of these for its speed."""
        staying = choices.without({each.name: _LEAVES for each in choices.instances if each.leaves_at})
        left = staying if staying.instances else choices
        if not left.instances:
            return None
        mix, scored = ctx.demand.mix, []
        for each in left.instances:
            score = (each.slotless + 1) / max(mix.speed(each), sys.float_info.min)
            scored.append(Candidate(each.name, score))
        index = min(range(len(scored)), key=lambda i: (scored[i].score, left.instances[i].in_flight))
        instance = left.instances[index]
        choice = Choice(index, 0.0, lambda: scored, foreseen(ctx, instance))
        return Decision(ctx, ready, left, choice, instance)

    def take_failed(self, request_id: RequestId) -> bool:
        """Return True if the policy failed on a request, which is reported once."""
        if not self.failed or request_id not in self.failed:
            return False
        self.failed.remove(request_id)
        return True

    def able(self, request: Request, ready: ReadyInstances, now: float) -> Choices:
        """Return the instances that may get a request (see `ReadyInstances.choices`): most may go to all.

        A kind of request that an instance refuses goes there only if no other one is left.
        """
        choices = self._ready(request, ready, now)
        losses = self.fleet.losses
        if losses is not None and losses.kinds.by_key:
            attempts = self.retries.attempts.get(request.id)
            again = attempts is not None and bool(attempts.tried)
            against = losses.kinds.against(request, now, again=again)
            if against:
                left = choices.without(against)
                return left if left.instances else choices
        return choices

    def may_come(self, request: Request, ready: ReadyInstances) -> bool:
        """Return True if an instance that has not had a retried request may be up again in time."""
        tried, subset = self.retries.attempts[request.id].tried, request.places.subset
        for each in ready.instances:
            comes = each.evidence.health.state is Health.EJECTED and each.admin is AdminState.READY
            if comes and each.name not in tried and (subset is None or each.name in subset):
                return True
        return False

    def _ready(self, request: Request, ready: ReadyInstances, now: float) -> Choices:
        known = self.retries.attempts
        if (
            request.longest_prompt_tokens + (request.max_tokens or 1) <= ready.longest_tokens
            and request.places.subset is None
            and request.places.side is None
            and not request.generated
            and (not known or request.id not in known)
        ):
            return ready.everyone
        if ready.throttled and not any(each.evidence.active(now) for each in ready.active):
            ready = self.fleet.ready[request.model] = ReadyInstances(ready.instances, now)
        attempts = known.get(request.id)
        tried = None if attempts is None else attempts.tried
        return ready.choices(request, tried, now, holds_back=self.policy.holds_back, side=request.places.side)

    def context(
        self, request: Request, predicted: float, waiting: int, now: float, long: float = -1.0
    ) -> SchedulingContext:
        """Return the context of a decision; `long` as for `choose`."""
        fleet = self.fleet
        if not request.generates:
            long = 0.0
        elif long < 0.0:
            long = self.predictor.long(request)
        unknown = False
        if self.ledger.leased and request.generates:
            unknown, long = self._as_running(request, predicted, long)
        demand = self.demands[request.model]
        if not demand.mix.count:  # to explain one request: it is the mean one
            demand = Demand()
            demand.mix.add(request.prompt_tokens, predicted)
        held: Held | None = None
        if request.prefix_keys:
            usual = len(self.ledger.leased) / max(1, len(fleet.instances))
            held = fleet.prefixes.held(request.prefix_keys, request.prompt_tokens, usual)
        if fleet.publishers and request.blocks is not None:
            held = Held() if held is None else held
            for each in fleet.publishers:
                exact = None if each.blocks is None else each.blocks.exact(request, each.engines)
                if exact is not None:
                    held.tokens[each.tree.cache_id] = exact
        ctx = SchedulingContext(request, predicted, long, waiting, demand, now, held)
        if unknown:
            ctx.least_output = long / 2.0
        if fleet.adapters and request.model in fleet.adapters:
            if self.adapter_load is None:
                from hetlb.balancer.core.adapters import AdapterLoadTime

                self.adapter_load = AdapterLoadTime(self.policy.params.adapter_load_s)
            ctx.adapter_load_s = self.adapter_load.seconds
        return ctx

    def _as_running(self, request: Request, predicted: float, long: float) -> tuple[bool, float]:
        """Return True if lengths are unknown, and the length of a long answer, corrected by running answers.

        The tokens of a running answer are a lower bound of its length. While more answers run than have
        ended, `long` grows with their tokens. Lengths are unknown while four times as many run: then each
        answer is to have room for half a long one (R1's lengths, cold, at once: at least 0.95 of the best
        other in 26 -> 34 of 36; `front.py`: short runs 1.003, bursts 1.03 x the mean TTFT).
        """
        ended, running, grown = self.predictor.seen(request.model), 0.0, 0.0
        if ended >= float(len(self.ledger.leased)):
            return False, long
        for each in self.fleet.ready[request.model].able:
            running += each.sequences - each.finished_sequences
            grown += each.steps.grown_tokens
        if running > ended:
            long *= 1.0 + (1.0 - ended / running) * grown / (running * predicted)
            if request.max_tokens is not None and long > request.max_tokens:
                long = float(request.max_tokens)
        return running > _UNKNOWN * ended, long

    def book(self, found: Decision) -> Dispatch:
        """Book a decision."""
        ctx, instance, choice = found.ctx, found.instance, found.choice
        request, now = ctx.request, ctx.now
        if found.book_pair is not None:
            lease = found.book_pair()
        else:
            slots = instance.adapters if ctx.adapter_load_s > 0.0 else None
            loads = None if slots is None else slots.loads(request.model)
            lease = self.ledger.book(ctx, instance, choice.work_s, choice.forecast)
            if loads is not None and self.adapter_load is not None:
                self.adapter_load.expected[lease.id] = lease.forecast_first_s, loads
        if ctx.restraints is not None and request.sequences:
            lease.trial = instance.evidence.dispatched(lease.id, now)
        if self.fleet.losses is not None:
            self.fleet.losses.kinds.dispatched(request, instance.name, lease.id, now)
        if request.sequences:
            shared = lease.shared
            used = lease.kv_prompt_tokens if shared is None else lease.kv_prompt_tokens + shared.new_tokens
            sequences = request.sequences
            ctx.demand.mix.add_booking(used / sequences, lease.unread_tokens / sequences)
            try:
                self.policy.committed(ctx, instance, found.choices.instances)
            except Exception as error:  # the request has its instance all the same
                if self.on_failed is None:
                    raise
                self.on_failed(request, error)
        considered: Callable[[], Sequence[Candidate]] = choice.candidates
        excluded = found.choices.excluded
        if excluded:
            scored, instances = considered, found.ready.instances
            considered = lambda: with_excluded(scored(), instances, excluded)  # noqa: E731
        return Dispatch(request.id, lease, self.policy_name, considered)


def _kept_for_others(
    choices: Choices, ready: ReadyInstances, ceiling: int | None, stays: bool
) -> dict[str, str]:
    """Return reasons against instances of class `ceiling` and above; with `stays`, also leaving ones."""
    reasons: dict[str, str] = {}
    for each in choices.instances:
        if ceiling is not None and ready.class_of(each) >= ceiling:
            reasons[each.name] = "kept for a longer request that waits"
        elif stays and each.leaves_at:
            reasons[each.name] = _LEAVES
    return reasons
