"""Requests in two legs as the scheduler sees them: decided, booked, handed over, held in between.

One lease is of the prefill, and names the lease of the decode (`Lease.decode`); what the first keeps for the
second is a `Hold`, which counts in the ledger of its instance.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.learning import learn_prefill
from hetlb.balancer.core.ledger import nearest
from hetlb.balancer.core.placement import Decision, Splitting, check_choice
from hetlb.balancer.core.policies.base import Choice
from hetlb.balancer.core.policies.sight import SchedulingContext
from hetlb.balancer.core.ready import Choices, ReadyInstances, tokens_of
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import (
    HAND_OVER,
    Command,
    Dispatch,
    Health,
    Hold,
    Lease,
    LeaseId,
    Outcome,
    Request,
    Role,
)
from hetlb.options.split.pairs import SplitChoice, choose_split, join_s
from hetlb.options.split.transfers import TransferTimes


class Parts:
    """Instances of a model that may get a part of a split request; [] if none of its requests are split."""

    def __init__(self, ready: ReadyInstances) -> None:
        self.ready = ready
        self.instances = ready.up if _splits(ready.up) else []
        #: True if none of them has a role.
        self.mixed = all(each.spec.role is Role.BOTH for each in self.instances)

    def fitting(
        self, request: Request, tried: Sequence[str] | None, now: float, ceiling: int | None
    ) -> list[Instance]:
        """Return the instances that may get a part of a request; class `ceiling` and above are kept."""
        ready, tokens = self.ready, tokens_of(request)
        if tried is None and not ready.throttled and ceiling is None and tokens <= ready.limits[0]:
            return self.instances
        found = [
            each
            for each in self.instances
            if (tried is None or each.name not in tried)
            and (each.longest_request_tokens is None or tokens <= each.longest_request_tokens)
            and not each.evidence.active(now)
            and (ceiling is None or ready.class_of(each) < ceiling)
        ]
        return found if _splits(found) else []


def _splits(instances: Sequence[Instance]) -> bool:
    """Return True if one of them can prefill for another one."""
    linked = [each for each in instances if each.spec.kv_transfer is not None]
    sources = [each for each in linked if each.spec.role is not Role.DECODE]
    return any(
        target is not source and target.spec.role is not Role.PREFILL
        for source in sources
        for target in linked
    )


class HandOvers(Splitting):
    """Splits the requests of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._placement, self._backlog = scheduler.placement, scheduler.backlog
        self._ledger, self._retries = scheduler.ledger, scheduler.placement.retries
        self.transfers = TransferTimes()
        #: By model.
        self._parts: dict[str, Parts] = {}
        #: Live holds, with their instances, by the lease of their prefill.
        self._kept: dict[LeaseId, tuple[Instance, Hold]] = {}

    # --- decisions ---

    def parts(self, model: str, ready: ReadyInstances) -> Parts:
        """Return the instances of a model that may get parts of requests."""
        found = self._parts.get(model)
        if found is None or found.ready is not ready:
            found = self._parts[model] = Parts(ready)
        return found

    def choose(
        self, ctx: SchedulingContext, ready: ReadyInstances, ceiling: int | None
    ) -> tuple[bool, Decision | None]:
        """Return True if the request is decided here, and the decision (see `Placement.choose`)."""
        request, now = ctx.request, ctx.now
        attempts = self._retries.attempts.get(request.id)
        found = self.parts(request.model, ready)
        if not found.instances or (attempts is not None and attempts.whole):
            return False, None
        fitting = found.fitting(request, None if attempts is None else attempts.tried, now, ceiling)
        parts = [each for each in fitting if each.leaves_at is None]
        if not parts:
            return False, None
        choice = choose_split(self._placement.policy, ctx, parts, self.transfers, found.mixed)
        if choice is None:
            return True, None
        if choice.forecast is None:
            return False, None
        check_choice(choice.prefill, choice.work_s, len(parts))
        check_choice(choice.decode, choice.decode_work_s, len(parts))
        source, target = parts[choice.prefill], parts[choice.decode]
        chosen = Choice(choice.prefill, choice.work_s, choice.candidates, choice.forecast)
        decision = Decision(ctx, ready, Choices(parts, {}), chosen, source)
        if source is not target:
            decision.book_pair = lambda: self._book(ctx, choice, chosen, source, target)
        return True, decision

    def _book(
        self, ctx: SchedulingContext, choice: SplitChoice, prefill: Choice, source: Instance, target: Instance
    ) -> Lease:
        """Book both legs of a request; return the lease of the prefill, which names the other."""
        request, now, ledger = ctx.request, ctx.now, self._ledger
        lease = ledger.grant(request, source, 1.0, nearest(choice.work_s * 1e9), now)
        lease.expected_first_s = prefill.forecast.first_token_s / source.reading_factor
        decode_ns = nearest(choice.decode_work_s * 1e9)
        decode = ledger.grant(request, target, ctx.predicted_output, decode_ns, now)
        decode.unread_tokens, decode.waited_s = 1, ctx.waited_s
        decode.forecast_first_s, decode.forecast_end_s = choice.decode_first_s, choice.decode_end_s
        source.acquire(lease)
        decode.incoming = True  # until its prompt has been prefilled elsewhere
        target.acquire(decode)
        target.incoming[decode.id] = decode
        lease.decode = decode
        for journal in ledger.journals:
            journal.booked(lease, now)
            journal.booked(decode, now)
        self.transfers.checks.booked(source, target, now)
        return lease

    # --- facts ---

    def first_token(self, lease: Lease, instance: Instance, now: float) -> None:
        """Note that the first token of a decode leg came."""
        if lease.incoming:  # both legs were sent at once, and the other one's answer is on its way
            instance.begin(lease, now)
        elif lease.hold is not None and not lease.hold.ended:
            self._fetched(lease.hold, lease, instance, now)

    def prefilled(self, lease: Lease, now: float) -> list[Command]:
        """Dispatch the decode leg of a finished prefill leg, or the request anew if the target is gone."""
        request, decode = lease.request, lease.decode
        assert decode is not None, f"{lease!r} is no prefill leg"
        leased = self._ledger.leased
        source, target = leased[lease.id], leased[decode.id]
        if decode.incoming and (target.removed or target.evidence.health.state is Health.EJECTED):
            return self.unsplit(lease, Outcome.OK, now)
        self._end_prefill(lease, decode, now)
        commands: list[Command] = []
        if source.evidence.health.on_answering(whole=True):
            commands = self._scheduler.fleet.health_changed(source, now)
        if decode.incoming:
            target.begin(decode, now)
            commands.append(Dispatch(request.id, decode, HAND_OVER))
        return commands + self._backlog.flush(now)

    def _end_prefill(self, lease: Lease, decode: Lease | None, now: float) -> None:
        """End the lease of a prefill leg. If its connector keeps blocks, hold them for `decode`."""
        self._ledger.leased[lease.id].first_token(lease, now)
        self._retries.leases.discard(lease.id)
        source = self._ledger.drop(lease, now, Outcome.OK)
        if learn_prefill(source, lease, now):
            self._scheduler.fleet.share_speed(source.spec.model, source.profiled)
        link = source.spec.kv_transfer
        planned = lease.decode
        if link is None or planned is None:
            return
        if decode is not None and decode.first_token_at is not None:
            return  # fetched already: both legs were sent at once
        tokens = lease.request.prompt_tokens
        held = 0 if planned.shared is None else planned.shared.held_tokens
        hold = Hold(
            lease.id,
            source.name,
            planned.instance,
            tokens,
            tokens - held,
            0.0 if decode is None else join_s(self._ledger.leased[decode.id], tokens),
            now + link.lease_s,
        )
        if not len(self._scheduler.queue) and not self._kept:
            self._backlog.ticked_at = now
        source.keep(hold.tokens)
        self._kept[hold.id] = source, hold
        if decode is not None:
            decode.hold = hold

    def unsplit(self, lease: Lease, outcome: Outcome, now: float) -> list[Command]:
        """Give the whole request to one instance (see `Scheduler.on_unsplit`)."""
        scheduler, placement = self._scheduler, self._placement
        request, predicted = lease.request, lease.predicted_output
        commands: list[Command] = []
        if outcome is Outcome.CLIENT_GONE:  # no fault of either engine
            self._transfer_failed(lease, now)
        if lease.decode is not None:
            predicted = lease.decode.predicted_output
            scheduler.failover.drop(lease.decode, now)
        if outcome is Outcome.OK and lease.decode is not None:
            self._end_prefill(lease, None, now)
        else:
            instance = scheduler.failover.drop(lease, now)
            known = self._retries.attempts.get(request.id)
            commands = scheduler.failover.ended_badly(instance, lease, outcome, known, now, again=False)
        attempts = self._retries.attempts[request.id]
        attempts.whole = True
        if outcome in (Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE):
            attempts.tried.append(lease.instance)
        ready = scheduler.fleet.ready.get(request.model)
        placed = None if ready is None else placement.place(request, ready, now, predicted)
        if placed is not None:
            commands.append(placed)
        elif (
            request.id not in placement.failed
            and ready is not None
            and attempts.tried
            and not placement.able(request, ready, now).instances
        ):
            commands.append(self._backlog.give_up(request, unsent=False))
        else:
            commands += self._backlog.push(request, now, predicted)
        return commands + self._backlog.flush(now)

    def _transfer_failed(self, lease: Lease, now: float) -> None:
        """Count a failed transfer against its pair, unless the engine of this leg is at fault."""
        leased, decode, hold = self._ledger.leased, lease.decode, lease.hold
        source = leased.get(lease.id) if decode is not None else None
        if hold is not None:
            kept = self._kept.get(hold.id)
            source = None if kept is None else kept[0]
        target = leased.get(lease.id if decode is None else decode.id)
        if source is not None and target is not None:
            self.transfers.checks.failed(source, target, now)

    def released(self, hold: Hold, now: float) -> list[Command]:
        """Note that a prefill instance was told to drop a prompt."""
        if hold.ended:
            return []
        self._let_go(hold)
        return self._backlog.flush(now)

    def sampled(self, instance: Instance, sample: EngineSample, now: float) -> None:
        """Judge transfers to an instance by its counters."""
        coming: dict[int, float] = {}
        for source, hold in self._kept.values():
            if hold.target == instance.name:
                coming[source.incarnation] = coming.get(source.incarnation, 0.0) + hold.sent_tokens
        self.transfers.checks.sampled(
            instance, sample.fetched_tokens, sample.computed_tokens, coming, now - sample.age_s, now
        )

    def forget(self, incarnation: int) -> None:
        """Note that an instance is gone."""
        self.transfers.forget(incarnation)

    # --- holds ---

    @property
    def held(self) -> int:
        """Return the number of live holds."""
        return len(self._kept)

    @property
    def holds(self) -> list[Hold]:
        """Return the live holds."""
        return [hold for _, hold in self._kept.values()]

    def hold_of(self, number: int) -> Hold | None:
        """Return the hold of a prefill's lease, None once it has ended."""
        kept = self._kept.get(number)
        return None if kept is None else kept[1]

    def _let_go(self, hold: Hold) -> None:
        """Note that a prompt was fetched, released or has expired."""
        source, _ = self._kept.pop(hold.id)
        assert not hold.ended, f"hold {hold.id} has ended before"
        hold.ended = True
        source.keep(-hold.tokens)

    def let_go_expired(self, now: float) -> None:
        """Drop holds that have expired: their instances no longer keep the prompts."""
        for hold in self.holds:
            if hold.expires_at <= now:
                self._let_go(hold)

    def _fetched(self, hold: Hold, lease: Lease, target: Instance, now: float) -> None:
        """Note that the blocks of a prompt were fetched."""
        source, _ = self._kept[hold.id]
        self._let_go(hold)
        link = target.spec.kv_transfer
        if link is not None and hold.sent_tokens > 0:
            seconds = max(0.0, now - lease.dispatched_at - hold.expected_s)
            self.transfers.observe(source, target, link, hold.sent_tokens, seconds, now)
            self.transfers.checks.answered(source, target, hold.sent_tokens, now)

    def failing(self, now: float) -> list[tuple[str, str]]:
        """Return the pairs that get no request now as their transfers fail: source and target."""
        return [each.names for each in self.transfers.checks.resting(now)]

    def check_integrity(self, instances: Sequence[Instance]) -> None:
        """Assert that each instance keeps its holds and nothing else."""
        tokens = {id(instance): 0 for instance in instances}
        for source, hold in self._kept.values():
            assert not hold.ended, f"hold {hold.id} has ended"
            tokens[id(source)] = tokens.get(id(source), 0) + hold.tokens
        for instance in (*instances, *[source for source, _ in self._kept.values()]):
            assert instance.held_tokens == tokens[id(instance)], f"holds of {instance.name}"
