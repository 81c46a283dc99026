"""Ledger of leases: each books on one incarnation of an instance, which gives that back once.

Journals share live leases between schedulers of two processes. A scheduler tells each of its journals that a
lease began, that its answer began and that it ended (`options/peers/lease_wire.py`). A lease of another
process is booked like an own one (`options/peers/shared_view.py`), and told to no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.policies.sight import SchedulingContext, Sight
from hetlb.balancer.core.prefix_index import Shared
from hetlb.balancer.core.queue import Queue
from hetlb.balancer.core.types import Lease, LeaseId, Outcome, Request


@dataclass(frozen=True, slots=True)
class Booked(PickleByFields):
    """Start of a lease, `age_s` ago.

    `number`: its number at its scheduler. `begun`: its answer has begun. `first_s`: the forecast of its first
    token, in seconds.
    """

    number: LeaseId
    instance: str
    request: Request
    work_ns: int
    predicted_output: float
    age_s: float = 0.0
    begun: bool = False
    first_s: float = 0.0


class Journal(Protocol):
    """Changes of one scheduler's own leases, for one reader."""

    def booked(self, lease: Lease, now: float) -> None: ...
    def begun(self, lease: Lease) -> None: ...
    def ended(self, lease: Lease, outcome: Outcome) -> None: ...


def nearest(value: float) -> int:
    """Return `round` of a number from 0, without a call in Python."""
    whole = int(value)
    rest = value - whole
    return whole + 1 if rest > 0.5 or (rest == 0.5 and whole % 2) else whole


@mypyc_attr(acyclic=True)
class Ledger:
    """Leases that have not ended, each with the incarnation that it is booked on."""

    def __init__(self, queue: Queue, first_lease: LeaseId = 1) -> None:
        """Start without leases. `queue` asks for the running ones; the first is number `first_lease`."""
        self._queue = queue
        queue.running = self._running
        #: Instances by lease, removed ones included.
        self.leased: dict[LeaseId, Instance] = {}
        #: Number of leases without a slot.
        self.slotless = 0
        self._next_lease = first_lease
        #: Readers of bookings and their ends.
        self.journals: tuple[Journal, ...] = ()

    def subscribe(self, journal: Journal) -> None:
        """Report every later booking and its end to a journal."""
        self.journals += (journal,)

    def unsubscribe(self, journal: Journal) -> None:
        """Stop reporting to a journal."""
        self.journals = tuple([each for each in self.journals if each is not journal])

    def book(self, ctx: SchedulingContext, instance: Instance, work_s: float, forecast: Sight) -> Lease:
        """Return the lease of a whole request on an instance, for `work_s` seconds of work."""
        predicted, work_ns = ctx.predicted_output, nearest(work_s * 1e9)
        lease = self.grant(ctx.request, instance, predicted, work_ns, ctx.now)
        lease.forecast_first_s, lease.forecast_end_s = forecast.first_token_s, forecast.end_s
        lease.forecast_step_s = forecast.step_s
        lease.waited_s = ctx.waited_s
        lease.expected_first_s = forecast.first_token_s / instance.reading_factor
        lease.beside = forecast.load.batch > 0.0
        instance.acquire(lease)
        for journal in self.journals:
            journal.booked(lease, ctx.now)
        return lease

    def drop(self, lease: Lease, now: float, outcome: Outcome = Outcome.CLIENT_GONE) -> Instance:
        """Give back the bookings of a lease and report its outcome to the journals. Return its instance."""
        leased, key = self.leased, lease.key
        instance = leased[key]
        del leased[key]
        self.slotless -= not lease.request.sequences
        instance.release(lease, now)
        instance.evidence.ended(lease.id)
        self._queue.ended(lease.request.tenant, lease.promised_tokens)
        for journal in self.journals:
            if lease.own:
                journal.ended(lease, outcome)
        return instance

    def grant(
        self, request: Request, instance: Instance, predicted: float, work_ns: int, now: float
    ) -> Lease:
        """Return the lease that the instance is to book."""
        cache, sequences, prompt = instance.kv_cache_tokens, request.sequences, request.prompt_tokens
        # One request never books more than its instance has: it would wait inside the engine.
        prompt_tokens, answers = sequences * prompt, sequences * nearest(predicted)
        promised = prompt_tokens + answers
        if promised > cache:
            prompt_tokens, promised = min(prompt_tokens, cache), cache
        shared: Shared | None = None
        exact = None if instance.blocks is None else instance.blocks.exact(request, instance.engines)
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
        kv_prompt_tokens, kv_tokens = own, own + answers
        if kv_tokens > cache:
            kv_tokens = max(own, cache)
        need = instance.kv_need
        if need is not None:
            kv_prompt_tokens, kv_tokens = [
                min(int(need.grows * grown + sequences * need.beside(prompt + more)), cache)
                for grown, more in ((own, 0.0), (own + answers, predicted))
            ]
        lease = Lease(
            self._next_lease,
            request,
            instance.name,
            instance.incarnation,
            work_ns=work_ns,
            kv_tokens=kv_tokens,
            kv_prompt_tokens=kv_prompt_tokens,
            promised_tokens=promised,
            prompt_tokens=prompt_tokens,
            unread_tokens=unread,
            predicted_output=predicted,
            dispatched_at=now,
            shared=shared,
        )
        self._next_lease += 1
        self._queue.booked(request.tenant, promised)
        self.leased[lease.key] = instance
        self.slotless += not sequences
        return lease

    def _running(self) -> list[tuple[str | None, int]]:
        return [(lease.request.tenant, lease.promised_tokens) for lease in self.leases()]

    def leases(self) -> list[Lease]:
        """Return the leases that have not ended."""
        return [instance.leases[lease_id] for lease_id, instance in self.leased.items()]
