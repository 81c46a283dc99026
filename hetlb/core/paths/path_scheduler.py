"""The scheduler of pipelines: facts and the current time go in, commands come out, as in `core.scheduler`.

No I/O, no clock, no logging. Every dispatch is one lease with a path that computes each layer once;
what it booked on every stage is given back exactly once, however it ends. A request is at any moment
waiting, leased or gone. No path crosses a stage that is lost. The queue is bounded. The simulator drives
this object from a heap of events, a proxy in front of `hetlb stage` workers from real messages.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from hetlb.core.paths.least_time import LeastTime
from hetlb.core.paths.path_ledger import PathDispatch, PathLease, StageLedger, fullest_layer
from hetlb.core.paths.policies import (
    FixedPipelines,
    PathContext,
    PathPolicy,
    RandomPaths,
    ShortestQueue,
    Swarm,
    WeightedRoundRobin,
)
from hetlb.core.paths.stages import StageNetwork, StageSpec
from hetlb.core.predictor import Predictor
from hetlb.core.types import LeaseId, Outcome, Reject, RejectReason, Request, RequestId

#: Share of a stage's KV cache that expected use may reach (Helix's high-water mark).
HIGH_WATER: Final = 0.85

#: Policies by name; the first is the default.
PATH_POLICIES: Final[dict[str, type[PathPolicy]]] = {
    policy.name: policy
    for policy in (LeastTime, WeightedRoundRobin, Swarm, RandomPaths, ShortestQueue, FixedPipelines)
}

PathCommand: TypeAlias = PathDispatch | Reject

#: A request whose path broke so often is given up: it may be what breaks stages.
MOST_REPLAYS: Final = 3

#: Ends of a lease after which the rest of the answer can be computed elsewhere.
_REPLAYED = frozenset({Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE, Outcome.BROKEN_STREAM})


@dataclass(slots=True)
class _Waiting:
    """A request without a path yet. `done_tokens` of its answer were produced before its last path broke."""

    request: Request
    done_tokens: int = 0

    @property
    def context_tokens(self) -> int:
        """Tokens that its next path reads first."""
        return self.request.prompt_tokens + self.done_tokens


class PathScheduler:
    """Gives every request a path through the stages and keeps the ledger of each."""

    def __init__(
        self,
        network: StageNetwork,
        predictor: Predictor,
        *,
        policy: str = "hetlb",
        high_water: float = HIGH_WATER,
        queue_limit: int | None = None,
        seed: int = 0,
    ) -> None:
        self._network = network
        self._predictor = predictor
        self._high_water = high_water
        self._queue_limit = queue_limit
        self._rng = random.Random(seed)
        self._ledgers = {stage.name: StageLedger(stage) for stage in network.stages}
        self._policy = self._make_policy(policy)
        self._queue: deque[_Waiting] = deque()
        self._leased: dict[LeaseId, PathLease] = {}
        self._next_lease = 1
        self._replays: dict[RequestId, int] = {}

    def _make_policy(self, name: str) -> PathPolicy:
        return PATH_POLICIES[name](self._network, self._ledgers, self._high_water, self._rng)

    # --- what drivers may look at ---

    @property
    def ledgers(self) -> dict[str, StageLedger]:
        """Ledgers by stage. To be read, not written."""
        return self._ledgers

    @property
    def waiting(self) -> int:
        """Requests without a path."""
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        """Leases that have not ended."""
        return len(self._leased)

    @property
    def passable(self) -> bool:
        """True if the stages that are up hold all layers."""
        return self._covers(lambda stage: self._ledgers[stage.name].up)

    @property
    def policy_name(self) -> str:
        """Name of the policy in use."""
        return self._policy.name

    @property
    def reads_hops(self) -> bool:
        """True if the policy is to be told how long hops take."""
        return self._policy.reads_hops

    def kv_usage(self) -> float:
        """Booked share of the KV cache of the fullest layer."""
        return fullest_layer(self._ledgers.values(), self._network.layers)

    # --- facts ---

    def on_arrival(self, request: Request, now: float) -> list[PathCommand]:
        """A request came in. No command for it means that it waits."""
        entry = _Waiting(request)
        if not self._fits(entry):
            return [self._too_long(entry)]
        if not self._queue and (lease := self._place(entry, now)) is not None:
            return [PathDispatch(request.id, lease)]
        if self._queue_limit is not None and len(self._queue) >= self._queue_limit:
            detail = "Too many requests are waiting for a path."
            return [Reject(request.id, RejectReason.QUEUE_FULL, detail, retry_after_s=1.0)]
        self._queue.append(entry)
        return []

    def on_first_token(self, lease: PathLease, now: float) -> list[PathCommand]:
        """The first pass of a lease is through. Said again, it changes nothing."""
        if lease.first_token_at is not None:
            return []
        lease.first_token_at = now
        for hop in lease.hops:
            self._ledgers[hop.stage].first_token(lease)
        self._policy.first_token(lease, now)
        return self._flush(now) if self._queue else []

    def on_hop(self, sender: str, receiver: str, seconds: float) -> None:
        """A message left one stage and was computed by the next so many seconds later."""
        self._policy.hop_took(sender, receiver, seconds)

    def on_lease_ended(self, lease: PathLease, outcome: Outcome, now: float) -> list[PathCommand]:
        """A lease ended; what it booked is given back, and a waiting request may be placed.

        `lease.output_tokens` holds what was produced. After a broken path the request goes first in the
        queue: its next path prefills the prompt and the tokens so far.
        """
        request, done = lease.request, self._release(lease, now)
        if outcome in _REPLAYED:
            replays = self._replays.pop(request.id, 0) + 1
            if replays > MOST_REPLAYS:
                detail = "Every path of the request broke."
                return [Reject(request.id, RejectReason.NO_RESPONSE, detail), *self._flush(now)]
            self._replays[request.id] = replays
            return self._requeue(request, done, now)
        if outcome is Outcome.OK:
            self._predictor.observe(request, done)
        self._replays.pop(request.id, None)
        return self._flush(now)

    def on_preempted(self, lease: PathLease, now: float) -> list[PathCommand]:
        """A stage took the KV blocks of a lease for an older one; the request goes first in the queue."""
        return self._requeue(lease.request, self._release(lease, now), now)

    def _requeue(self, request: Request, done_tokens: int, now: float) -> list[PathCommand]:
        """Put a request first in the queue; turn it away if no path could ever hold what it has by now."""
        self._queue.appendleft(_Waiting(request, done_tokens))
        return [*self._drop_misfits(), *self._flush(now)]

    def _release(self, lease: PathLease, now: float) -> int:
        """Give back what a lease booked; returns the tokens of the answer so far."""
        del self._leased[lease.id]
        for hop in lease.hops:
            self._ledgers[hop.stage].release(lease)
        lease.ended = True
        self._policy.ended(lease, now)
        return lease.context_tokens - lease.request.prompt_tokens + lease.output_tokens

    def on_cancelled(self, request_id: RequestId, now: float) -> list[PathCommand]:
        """The client of a waiting request left. (With a lease, the driver ends the lease instead.)"""
        self._replays.pop(request_id, None)
        self._queue = deque(entry for entry in self._queue if entry.request.id != request_id)
        return self._flush(now)

    def on_stage(self, name: str, *, up: bool, now: float) -> list[PathCommand]:
        """A stage was lost or came back. Leases that cross it end when the driver says so. Unknown names are
        ignored.
        """
        ledger = self._ledgers.get(name)
        if ledger is None:
            return []
        ledger.up = up
        return [*self._drop_misfits(), *self._flush(now)]

    def on_network(self, network: StageNetwork, now: float) -> list[PathCommand]:
        """Stages came, went or changed. One that went or changed must have no lease; the ledgers of the
        others stay.
        """
        ledgers = {stage.name: StageLedger(stage) for stage in network.stages}
        for name, ledger in self._ledgers.items():
            kept = name in ledgers and ledgers[name].spec == ledger.spec
            assert kept or not ledger.leases, f"{name} went or changed with leases"
            if kept:
                ledgers[name] = ledger
        self._network, self._ledgers = network, ledgers
        return [*self._drop_misfits(), *self.set_policy(self._policy.name, now)]

    def set_policy(self, name: str, now: float) -> list[PathCommand]:
        """Switch the policy; the ledger stays. Raises `KeyError` for an unknown name."""
        self._policy = self._make_policy(name)
        for lease in self._leased.values():
            self._policy.dispatched(lease)
            if lease.first_token_at is not None:
                self._policy.first_token(lease, lease.first_token_at)
        return self._flush(now)

    # --- inside ---

    def _fits(self, entry: _Waiting) -> bool:
        """True if some path could ever hold the context and one token."""
        return self._covers(lambda stage: (entry.context_tokens + 1) * stage.layers <= stage.kv_token_layers)

    def _too_long(self, entry: _Waiting) -> Reject:
        self._replays.pop(entry.request.id, None)
        detail = f"No path through the stages holds {entry.context_tokens} tokens."
        return Reject(entry.request.id, RejectReason.TOO_LONG, detail)

    def _drop_misfits(self) -> list[PathCommand]:
        """Turn away those that wait and fit no path of the stages that there are, as they would hold up the
        others. Without any path all wait.
        """
        if not self._queue or not self._covers(lambda stage: True):
            return []
        waiting, self._queue = self._queue, deque()
        misfits: list[PathCommand] = []
        for entry in waiting:
            if self._fits(entry):
                self._queue.append(entry)
            else:
                misfits.append(self._too_long(entry))
        return misfits

    def _covers(self, usable: Callable[[StageSpec], bool]) -> bool:
        """True if usable stages can follow each other through all layers."""
        reached, partial = {0}, self._network.partial_inference
        for stage in sorted(self._network.stages, key=lambda stage: stage.end):
            if usable(stage) and any(
                at == stage.first or (partial and stage.first < at < stage.end) for at in reached
            ):
                reached.add(stage.end)
        return self._network.layers in reached

    def _flush(self, now: float) -> list[PathCommand]:
        """Give paths to waiting requests, in order, until the first that finds none."""
        commands: list[PathCommand] = []
        while self._queue and (lease := self._place(self._queue[0], now)) is not None:
            self._queue.popleft()
            commands.append(PathDispatch(lease.request.id, lease))
        return commands

    def _place(self, entry: _Waiting, now: float) -> PathLease | None:
        request = entry.request
        context = entry.context_tokens
        predicted = max(1.0, self._predictor.predict(request) - entry.done_tokens)
        hops = self._policy.choose(PathContext(context, predicted, now))
        if hops is None:
            return None
        lease = PathLease(
            self._next_lease,
            request,
            hops,
            context_tokens=context,
            predicted_output=predicted,
            dispatched_at=now,
        )
        self._next_lease += 1
        for hop in hops:
            self._ledgers[hop.stage].acquire(lease, hop.layers)
        self._leased[lease.id] = lease
        self._policy.dispatched(lease)
        return lease

    def check_integrity(self) -> None:
        """Assert that token-layers and requests are all accounted for and every path is whole."""
        for ledger in self._ledgers.values():
            ledger.check_integrity()
        booked = sum(len(ledger.leases) for ledger in self._ledgers.values())
        assert booked == sum(len(lease.hops) for lease in self._leased.values())
        for lease in self._leased.values():
            at = 0
            for hop in lease.hops:
                spec = self._ledgers[hop.stage].spec
                assert hop.first == at, f"{lease!r} goes on at layer {hop.first}, not {at}"
                assert spec.first <= hop.first < hop.end <= spec.end, f"{lease!r} leaves {spec.name}"
                at = hop.end
            assert at == self._network.layers, f"{lease!r} ends at layer {at}"
        leased = {lease.request.id for lease in self._leased.values()}
        waiting = [entry.request.id for entry in self._queue]
        assert len(set(waiting)) == len(waiting), "a request waits twice"
        assert not leased & set(waiting), "a request waits and is leased"
        assert self._replays.keys() <= leased | set(waiting), "a count of replays outlived its request"
