"""Failover: the next try of a request after its instance failed, fell silent, refused it or was to leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hetlb.balancer.core.backlog import Backlog
from hetlb.balancer.core.evidence.retries import MOST_MOVES, Attempts
from hetlb.balancer.core.evidence.table import LEAST_SILENCE_S, Verdict, verdict
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.learning import is_first_of_kind
from hetlb.balancer.core.placement import Decision, Placement
from hetlb.balancer.core.ready import ReadyInstances
from hetlb.balancer.core.types import Command, Health, Lease, Outcome, Request

if TYPE_CHECKING:
    from hetlb.balancer.core.placing_again import PlacingAgain

#: Least wait of a client, over its forecast and in seconds, for a leave without a byte to be a lost answer.
_UNHEARD_FACTOR: Final = 3.0
_UNHEARD_S: Final = 2.0
#: Seconds of silence after which the features of a request are read.
_UNREAD_S: Final = 1.0


class Failover:
    """Next tries of the leases of a scheduler."""

    def __init__(self, placement: Placement, backlog: Backlog) -> None:
        self._placement = placement
        self._fleet, self._queue = placement.fleet, placement.queue
        self._ledger, self._retries = placement.ledger, placement.retries
        self._backlog = backlog
        #: Model of an instance with first prompts at another speed than its profile's, until `misplaced` is
        #: called.
        self.misplaced_model: str | None = None
        self._placing_again: PlacingAgain | None = None

    @property
    def slots_taken(self) -> int:
        """Number of leases with a slot: a share of them may be retries."""
        return len(self._ledger.leased) - self._ledger.slotless

    def drop(self, lease: Lease, now: float, outcome: Outcome = Outcome.CLIENT_GONE) -> Instance:
        """Give back a lease's bookings and report the outcome to the journals. Return its instance."""
        self._retries.leases.discard(lease.id)
        if self._placement.adapter_load is not None:
            self._placement.adapter_load.expected.pop(lease.id, None)
        return self._ledger.drop(lease, now, outcome)

    def ended_badly(
        self,
        instance: Instance,
        lease: Lease,
        outcome: Outcome,
        known: Attempts | None,
        now: float,
        *,
        again: bool,
    ) -> list[Command]:
        """Count the end of a lease in the evidence about its instance. Return commands.

        `known` are earlier attempts. `again`: its request is tried elsewhere, to show if it is at fault.
        """
        evidence, fleet, says = instance.evidence, self._fleet, verdict(outcome)
        changed = False
        if says is Verdict.ABSENT:
            changed = evidence.health.on_absent(now)
            evidence.forget()
        elif says is not Verdict.NOTHING:
            changed = evidence.health.on_answering()
        if fleet.losses is not None:
            fleet.losses.kinds.ended(lease.request, instance.name, lease.id)
        if says is Verdict.LOST or _left_unheard(lease, outcome, now):
            if outcome is Outcome.UPSTREAM_ERROR and lease.first_token_at is not None:
                evidence.answers.odd_at = now  # a 200 without an answer
            if known is not None and known.failures:
                self.lost_twice(instance, lease, known, now)
            else:
                fleet.account().lost(instance, lease, now)
                if again and known is not None:
                    known.failures.append((instance, lease, 0, now))
        return fleet.health_changed(instance, now) if changed else []

    def lost_twice(self, instance: Instance, lease: Lease, known: Attempts, now: float) -> None:
        """Note that two instances lost the same request: it may be at fault itself.

        It counts only against an instance without another answer for a while, or without any answer yet.
        """
        for each, before, status, _ in known.failures:
            if not is_refusal(status) and not each.evidence.answers.lost_as_elsewhere():
                self._fleet.account().not_lost(each, before, now)
        known.failures.clear()
        if instance.evidence.answers.lost_as_elsewhere():
            self._fleet.account().lost(instance, lease, now)
        else:
            self.failed(instance, lease, now)
        lease.judged = True

    def failed(self, instance: Instance, lease: Lease, now: float) -> None:
        """Note a failure or a refusal that counts against no instance so far."""
        if lease.request.sequences and instance.evidence.failed(now):
            self._fleet.reindex(now)

    def untried(self, lease: Lease) -> bool:
        """Return True if some instance that takes requests was not asked for the request of a lease."""
        ready = self._fleet.ready.get(lease.request.model)
        known = self._retries.attempts.get(lease.request.id)
        tried = (lease.instance, *(() if known is None else known.tried))
        return ready is not None and any(each.name not in tried for each in ready.up)

    def refused_by_all(self, request: Request, known: Attempts, now: float) -> None:
        """Note that all instances that were asked refuse a request: it is its client's mistake."""
        self._fleet.account().kinds.asked_in_vain(request, now)
        for each, _, _, _ in known.failures:
            each.evidence.proven = each.evidence.proven or None
        known.failures.clear()

    def answered_elsewhere(self, request: Request) -> None:
        """Count earlier refusals of a request after another instance answered it."""
        known = self._retries.attempts.get(request.id)
        if known is None:
            return
        for instance, _, status, at in known.failures:
            if is_refusal(status):
                self._fleet.account().kinds.refused(request, instance.name, status, at)
        known.failures.clear()

    def elsewhere(
        self, lease: Lease, rest: Request, ready: ReadyInstances, now: float, *, with_room: bool
    ) -> Decision | None:
        """Return another instance for the rest of a lease, None if there is none: then the lease stays.

        `with_room` excludes restrained instances and instances at their limit.
        """
        retries, placement = self._retries, self._placement
        known, tried = rest.id in retries.attempts, retries.attempts[rest.id].tried
        tried.append(lease.instance)
        found = placement.choose(rest, ready, now, predicted_rest(lease, rest))
        if found is not None and with_room:
            evidence = found.instance.evidence
            if evidence.standing(now) is not None or found.instance.sequences >= evidence.room.limit(now):
                found = None
        if found is None:
            placement.take_failed(rest.id)
            tried.pop()
            if not known:
                retries.forget(rest.id)
        return found

    def move(self, lease: Lease, ready: ReadyInstances, now: float, *, ran: bool) -> list[Command]:
        """Move a request without a byte of an answer. Return no commands if no other instance takes it."""
        request, retries = lease.request, self._retries
        found = self.elsewhere(lease, request, ready, now, with_room=True)
        if found is None:
            return []
        attempts = retries.attempts[request.id]
        attempts.runs += 1
        attempts.turned_away += not ran
        attempts.whole = attempts.whole or lease.hold is not None
        self.drop(lease, now)
        if lease.decode is not None:
            self.drop(lease.decode, now)
        placed = self._placement.book(found)
        retries.leases.add(placed.lease.id)
        return [placed, *self._backlog.flush(now)]

    def unread(self, now: float) -> list[Lease]:
        """Return leases without a byte of an answer on silent instances, of requests with unread features."""
        return [
            lease
            for instance in self._fleet.instances.values()
            if instance.leases and now - instance.evidence.silence.token_at > _UNREAD_S
            for lease in instance.leases.values()
            if lease.request.features is None and lease.own and lease.first_token_at is None
            if now - lease.dispatched_at > _UNREAD_S
        ]

    def _answered_by(self, lease: Lease, instance: Instance) -> bool:
        """Return True if some instance of the model has answered such a request, or its kind is unknown."""
        ready = self._fleet.ready.get(lease.request.model)
        others = [] if ready is None else [each for each in ready.up if each is not instance]
        return not all(is_first_of_kind(each, lease.request) for each in (instance, *others))

    def stranded(self, now: float) -> list[Lease]:
        """Return leases without a byte of an answer on ejected or stalled instances.

        An instance that stands still for a request of a new kind keeps that one, unless another instance has
        answered this kind.
        """
        found: list[Lease] = []
        for instance in self._fleet.instances.values():
            ejected, silence = instance.evidence.health.state is Health.EJECTED, instance.evidence.silence
            certain = ejected or silence.stalled_since is not None
            if not instance.leases or not (certain or silence.begins):
                continue
            for lease in instance.leases.values():
                late = now - lease.dispatched_at >= max(LEAST_SILENCE_S, lease.forecast_first_s)
                goes = certain or self._answered_by(lease, instance)
                if goes and (ejected or (late and lease.request.sequences)) and may_move(lease):
                    found.append(lease)
        return found

    def misplaced(self) -> list[Lease]:
        """Return, once, the leases placed by a wrong profile and still without a token, newest first."""
        model, self.misplaced_model = self.misplaced_model, None
        return [] if model is None else self.placing_again.leases(model)

    @property
    def placing_again(self) -> PlacingAgain:
        """Places the leases of `misplaced` again."""
        if self._placing_again is None:
            from hetlb.balancer.core.placing_again import PlacingAgain

            self._placing_again = PlacingAgain(self, self._placement, self._backlog)
        return self._placing_again

    def move_stranded(self, lease: Lease, now: float) -> list[Command]:
        """Move a lease of `stranded`, within the budget of retries. Without commands it stays."""
        retries, ready = self._retries, self._fleet.ready.get(lease.request.model)
        known = retries.attempts.get(lease.request.id)
        if ready is None or (known is not None and known.runs >= MOST_MOVES):
            return []
        instance = self._ledger.leased[lease.id]
        if instance.evidence.health.state is not Health.EJECTED and not retries.allowed(self.slots_taken):
            return []
        begins = instance.evidence.silence.begins and not is_first_of_kind(instance, lease.request)
        commands = self.move(lease, ready, now, ran=True)
        if commands and not begins:
            self._fleet.account().lost(instance, lease, now)
        return commands

    def retry(self, lease: Lease, outcome: Outcome, now: float) -> list[Command]:
        """Retry or reject a request without an answer."""
        request, predicted, retries = lease.request, lease.predicted_output, self._retries
        attempts, sent = retries.attempts[request.id], outcome is Outcome.NO_RESPONSE
        attempts.tried.append(lease.instance)
        attempts.runs += sent
        attempts.drops += sent
        if not sent:
            attempts.unreached.append(lease.instance)
        unsent = not attempts.may_have_run
        ready, placement = self._fleet.ready.get(request.model), self._placement
        # Dropped twice: the request itself may be what kills engines.
        if attempts.drops <= 1 and attempts.runs <= MOST_MOVES and ready is not None:
            if placement.able(request, ready, now).instances:
                within = not sent or retries.allowed(self.slots_taken)
                placed = placement.place(request, ready, now, predicted) if within else None
                if placed is not None:
                    if sent:
                        retries.leases.add(placed.lease.id)
                    return [placed]
                # An instance can take it later: none has room, or there are too many retries.
                if unsent:
                    retries.wait(request.id)
                if self._queue.has_room(request) or request.id in placement.failed:
                    return self._backlog.push(request, now, predicted, again=not unsent)
            elif not unsent and placement.may_come(request, ready):
                return self._backlog.push(request, now, predicted, again=True)
        if unsent and request.model in self._fleet.down_since:
            retries.wait(request.id)
            return self._backlog.push(request, now, predicted)
        return [self._backlog.give_up(request, unsent=unsent)]


def predicted_rest(lease: Lease, rest: Request) -> float:
    """Return the predicted output of the rest of an answer, in tokens."""
    more = rest.generated - lease.request.generated
    return max(1.0, lease.predicted_output - more) if more else lease.predicted_output


def may_move(lease: Lease) -> bool:
    """Return True if a lease may be moved: nothing of its answer came yet."""
    request = lease.request
    whole = not lease.incoming and lease.decode is None and lease.hold is None
    return (
        lease.first_token_at is None
        and lease.own
        and whole
        and request.places.subset is None
        and not request.generated
    )


def _left_unheard(lease: Lease, outcome: Outcome, now: float) -> bool:
    """Return True if a client left after a long wait without a byte."""
    if outcome is not Outcome.CLIENT_GONE or lease.first_token_at is not None or lease.incoming:
        return False
    if not lease.request.sequences:
        return False  # it may wait for as long as it likes: a session, a long poll
    first_s = lease.forecast_first_s if lease.request.streamed else lease.forecast_end_s
    return now - lease.dispatched_at >= max(_UNHEARD_S, _UNHEARD_FACTOR * first_s)


def is_refusal(status: int) -> bool:
    """Return True if a status means "such requests are not served", not a failure."""
    return (400 <= status < 500 and status != 429) or status == 501
