"""One view of several schedulers: each books what the others have booked.

A scheduler's journal (`balancer/core/ledger.py`) goes to its peers, and a peer's lease is a lease of this
scheduler as well: it counts in the ledger, its end teaches lengths, speeds and health, and places waiting
requests.

News is late, so all schedulers would choose the same instance: a decision does not see the requests that
peers book meanwhile. So their number is drawn uniformly, from none to all, and the decision is made as if
this number of similar requests had just been placed. And each scheduler prefers its own share of the
instances, an equal number of every kind, if the best of the share is hardly worse than the best of all. It
does so the more, the more requests are unseen.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.queue import WaitingElsewhere
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command, Lease, LeaseId, Outcome, Request
from hetlb.options.peers.lease_wire import (
    LeaseJournal,
    RequestFacts,
    WireBegun,
    WireBooked,
    WireChange,
    WireEnded,
    WireWaiting,
    live,
)

#: Seconds over which the rate of peers' bookings is a mean.
_RATE_S: Final = 1.0
#: Requests that a decision assumes to be unseen, at most: each costs a decision.
_MOST_UNSEEN_REQUESTS: Final = 8.0
#: Largest share of the score that an instance of the own share may be worse than the best.
_MOST_WORSE_SHARE: Final = 0.15
#: Largest fleet divided into shares, in instances: beyond, the division costs more than a decision.
_MOST_DEALT_INSTANCES: Final = 128
#: Ids of peers' requests count down from here: they are below all of this process's own.
_FIRST_ID: Final = -(1 << 40)
#: Leases of one peer, at most; a later one is not booked.
MOST_LEASES: Final = 1 << 16
#: Leases of peers that are gone, to end in one go: the others follow in later turns of the event loop.
SOME: Final = 64


class SharedView:
    """Tells peers the leases of one scheduler, and books the leases of peers there."""

    def __init__(self, scheduler: Scheduler, seed: int, name: str | None = None) -> None:
        """`seed` and `name` differ from scheduler to scheduler; the name is by default the seed in hex."""
        self._scheduler = scheduler
        self._name = f"{seed:x}" if name is None else name
        #: Names of the own share of the instances, and of the instances it was dealt from.
        self._own_share: tuple[str, ...] = ()
        self._share_of: tuple[str, ...] = ()
        #: Changes for peers. To be read by the transport.
        self.journal = LeaseJournal()
        scheduler.ledger.subscribe(self.journal)
        self._next_id = _FIRST_ID
        #: Leases by peer and by the number that they have there.
        self._leases: dict[str, dict[LeaseId, Lease]] = {}
        #: Leases that no peer holds any more; `end_some` ends them.
        self.leaving: deque[Lease] = deque()
        #: Leases of peers that are not part of a state, of which the end has not come yet.
        self._stale: dict[str, set[LeaseId]] = {}
        #: Waiting requests at each peer, with the time of the news, and at this process when it said so last.
        self._waits: dict[str, tuple[WireWaiting, float]] = {}
        self._said: tuple[dict[str, int], int, dict[str, float]] = {}, 0, {}
        #: Age of news of peers when it comes, in seconds.
        self.delay_s = 0.0
        #: Requests per second that peers book, as of a time.
        self._rate = 0.0
        self._rate_at = -math.inf
        self._rng = random.Random(seed)

    @property
    def peers(self) -> list[str]:
        """Return the names of the peers with known leases."""
        return list(self._leases)

    @property
    def peer_leases(self) -> int:
        """Number of peers' leases."""
        return len(self.leaving) + sum([len(leases) for leases in self._leases.values()])

    # --- of this scheduler ---

    def take(self, now: float) -> list[WireChange]:
        """Return the changes since the last time, for the peers."""
        changes, queue = self.journal.take(), self._scheduler.queue
        waits = queue.waiting_sizes(), len(queue), queue.oldest_by_model()
        if waits != self._said:
            self._said = waits
            changes.append(self._waiting(now))
        return changes

    def _waiting(self, now: float) -> WireWaiting:
        queue = self._scheduler.queue
        ages_s = {model: max(0.0, now - at) for model, at in queue.oldest_by_model().items()}
        return WireWaiting(queue.waiting_sizes(), len(queue), queue.bytes, ages_s)

    def live(self, now: float) -> list[WireChange]:
        """Return all that a new peer must know: every live lease, and the waiting requests."""
        return [*live(self._scheduler.ledger.leases(), now), self._waiting(now)]

    # --- of peers ---

    def receive(self, peer: str, changes: Sequence[WireChange], now: float) -> list[Command]:
        """Take over a peer's changes; return the commands for this scheduler's own requests."""
        waits, stale = None, self._stale.get(peer)
        for change in changes:
            if isinstance(change, WireBooked):
                self._heard(now)
                if stale is not None:
                    stale.discard(change.number)
            elif isinstance(change, WireWaiting):
                waits = change
        commands = self._book(peer, changes, now)
        if waits is not None:
            if stale is not None:
                del self._stale[peer]
                leases = self._leases.get(peer, {})
                self.leaving.extend([leases.pop(number) for number in stale if number in leases])
                commands += self.end_some(now)
            self._waits[peer] = waits, now
            commands += self._say_elsewhere(now)
        return commands

    def replace(self, peer: str, changes: Sequence[WireChange], now: float) -> list[Command]:
        """Replace the state of a peer by `changes`, and by its next ones up to its waiting requests.

        Leases that are not part of it end at its end: until then their places are not free.
        """
        self._stale[peer] = set(self._leases.get(peer, ()))
        return self.receive(peer, changes, now)

    def gone(self, peer: str, now: float) -> list[Command]:
        """Forget a peer that ended, and end its leases; of many `end_some` ends the rest."""
        self._stale.pop(peer, None)
        self.leaving.extend(self._leases.pop(peer, {}).values())
        commands = self.end_some(now)
        if self._waits.pop(peer, None) is not None:
            commands += self._say_elsewhere(now)
        return commands

    def end_some(self, now: float) -> list[Command]:
        """End some of the leases that peers left behind; they count against no instance."""
        commands: list[Command] = []
        for _ in range(min(SOME, len(self.leaving))):
            lease = self.leaving.popleft()
            commands += self._scheduler.on_lease_ended(lease, Outcome.CLIENT_GONE, now, retry=False)
        return commands

    def _book(self, peer: str, changes: Iterable[WireChange], now: float) -> list[Command]:
        """Book the changes of a peer: first the begun leases, then the ended ones.

        In the other order the room of an ended lease would seem free here, though it was given away there.
        The commands are for this scheduler's own requests.
        """
        leases, scheduler = self._leases.setdefault(peer, {}), self._scheduler
        commands: list[Command] = []
        later: list[WireBegun | WireEnded] = []
        for change in changes:
            if isinstance(change, WireBooked):
                if change.number not in leases:
                    if len(leases) < MOST_LEASES:
                        booked = change.change(self._copy(change.request))
                        lease = scheduler.restore(booked, now, own=False, arrived=True)
                        if lease is not None:
                            leases[change.number] = lease
                elif change.begun and leases[change.number].first_token_at is None:
                    later.append(WireBegun(change.number))
            elif isinstance(change, WireBegun | WireEnded):
                later.append(change)
        for each in later:
            lease = leases.get(each.number)
            if lease is None:
                continue
            if isinstance(each, WireBegun):
                commands += scheduler.on_first_token(lease, now)
            else:
                del leases[each.number]
                lease.output_tokens = each.output_tokens
                lease.reported_cached_tokens = each.cached_tokens
                lease.odd = each.odd
                commands += scheduler.on_lease_ended(lease, each.outcome, now, retry=False)
        return commands

    def _copy(self, facts: RequestFacts) -> Request:
        """Return a request under an id of its own."""
        self._next_id -= 1
        return facts.request(self._next_id)

    def on_arrival(self, request: Request, now: float) -> list[Command]:
        """Place a new request of this scheduler, or announce to peers that it waits."""
        commands = self._place(request, now)
        if len(self._scheduler.queue):
            self.journal.on_change()
        return commands

    def _place(self, request: Request, now: float) -> list[Command]:
        """Place a request as if unseen requests of peers had been placed."""
        scheduler = self._scheduler
        if not self._leases:
            return scheduler.on_arrival(request, now)
        expected = self._unseen(now)
        if expected and len(scheduler.instances) <= _MOST_DEALT_INSTANCES:
            within = min(_MOST_WORSE_SHARE, expected)
            places = replace(request.places, preferred=self._share(), preferred_within=within)
            request = replace(request, places=places)
        unseen = int(self._rng.random() * (0.5 + expected))
        if not unseen or len(scheduler.queue):
            return scheduler.on_arrival(request, now)
        leases, facts = [], RequestFacts.of(request)
        for _ in range(unseen):
            assumed = scheduler.assume(self._copy(facts), now)
            if assumed is None:
                break
            leases.append(assumed)
        commands = scheduler.on_arrival(request, now)
        for assumed in leases:
            commands += scheduler.on_lease_ended(assumed, Outcome.CLIENT_GONE, now, retry=False)
        return commands

    def _share(self) -> tuple[str, ...]:
        """Return this scheduler's share of the instances. All schedulers divide them alike, by kind."""
        names, instances = sorted([self._name, *self._leases]), self._scheduler.instances
        of = (*names, *[str(each.incarnation) for each in instances])
        if of != self._share_of:
            self._share_of = of
            dealt, rank, count = sorted(instances, key=_kind), names.index(self._name), len(names)
            self._own_share = tuple([each.name for each in dealt[rank::count]])
        return self._own_share

    def _unseen(self, now: float) -> float:
        """Return the number of requests that peers book within the delay of their news."""
        rate = self._rate * math.exp((self._rate_at - now) / _RATE_S)
        return min(_MOST_UNSEEN_REQUESTS, rate * self.delay_s)

    def _heard(self, now: float) -> None:
        """Count a request that a peer booked: its rate is a mean over the last second or so."""
        self._rate = self._rate * math.exp((self._rate_at - now) / _RATE_S) + 1.0 / _RATE_S
        self._rate_at = now

    # --- inside ---

    def _say_elsewhere(self, now: float) -> list[Command]:
        sizes: dict[str, int] = {}
        oldest_at: dict[str, float] = {}
        requests = held_bytes = 0
        for waits, heard_at in self._waits.values():
            for model, size in waits.sizes.items():
                sizes[model] = sizes.get(model, 0) + size
            for model, age_s in waits.ages_s.items():
                at = heard_at - age_s
                oldest_at[model] = min(at, oldest_at.get(model, at))
            requests, held_bytes = requests + waits.requests, held_bytes + waits.held_bytes
        there = WaitingElsewhere(requests, held_bytes, oldest_at)
        return self._scheduler.on_waiting_elsewhere(sizes, now, there)


def _kind(instance: Instance) -> tuple[float, str]:
    """Return the sort key that puts instances of one kind next to each other."""
    latency = instance.spec.latency
    return 0.0 if latency is None else latency.step_s(1.0, 1.0), instance.name
