"""The scheduler of pipelines: facts and the current time go in, commands come out, as in `core.scheduler`.

Every dispatch is one lease with a path that computes each layer once; what it booked on every stage is
given back exactly once, however it ends. A request is at any moment waiting, leased or gone. No path crosses
a lost stage. The simulator drives this object from a heap of events, the coordinator of `hetlb stage`
workers from real messages.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from hetlb.balancer.core.predictor import Predictor
from hetlb.balancer.core.types import LeaseId, Outcome, Reject, RejectReason, Request, RequestId
from hetlb.tools.paths.policies import (
    FixedPipelines,
    LeastTime,
    PathPolicy,
    RandomPaths,
    ShortestQueue,
    Swarm,
    WeightedRoundRobin,
)
from hetlb.tools.paths.stages import (
    BatchLimits,
    Curve,
    Hop,
    LinkSpec,
    PathLease,
    StageLedger,
    StageNetwork,
    StageSpec,
    kv_by_layer,
)

#: Share of a stage's KV cache that expected use may reach (Helix's high-water mark).
HIGH_WATER_SHARE: Final = 0.85

#: Policies by name; the first is the default.
PATH_POLICIES: Final[dict[str, type[PathPolicy]]] = {
    policy.name: policy
    for policy in (LeastTime, WeightedRoundRobin, Swarm, RandomPaths, ShortestQueue, FixedPipelines)
}

#: A lease is the command to send its request over its path now.
PathCommand: TypeAlias = PathLease | Reject

#: Most replays of a request: after more it is given up, as it may be what breaks stages.
MOST_REPLAYS: Final = 3

#: Ends of a lease after which the rest of the answer can be computed elsewhere.
_REPLAYED = frozenset({Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE, Outcome.BROKEN_STREAM})


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request without a path, with `done_tokens` of its answer after `replays` replays."""

    request: Request
    done_tokens: int = 0
    replays: int = 0

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
        high_water: float = HIGH_WATER_SHARE,
        queue_limit: int | None = None,
        seed: int = 0,
    ) -> None:
        self._network = network
        self._predictor = predictor
        self._high_water = high_water
        self._queue_limit = queue_limit
        self._rng = random.Random(seed)
        #: Ledgers by stage; drivers only read them.
        self.ledgers = {stage.name: StageLedger(stage) for stage in network.stages}
        self._policy_type = PATH_POLICIES[policy]
        self._policy = self._make_policy()
        self._queue: deque[_Waiting] = deque()
        self._leased: dict[LeaseId, PathLease] = {}
        self._next_lease = 1

    def _make_policy(self) -> PathPolicy:
        return self._policy_type(self._network, self.ledgers, self._high_water, self._rng)

    # --- for drivers ---

    @property
    def waiting(self) -> int:
        """Requests without a path."""
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        """Number of open leases."""
        return len(self._leased)

    @property
    def passable(self) -> bool:
        """True if the running stages hold all layers."""
        return self._covers(lambda stage: self.ledgers[stage.name].up)

    @property
    def reads_hops(self) -> bool:
        """True if the policy needs the times of hops."""
        return self._policy.reads_hops

    def kv_usage(self) -> float:
        """Booked share of the KV cache of the fullest layer (Helix's measure)."""
        layers = kv_by_layer(self.ledgers.values(), self._network.layers)
        return max((booked / total if total else 1.0) for booked, total in layers)

    # --- facts ---

    def on_arrival(self, request: Request, now: float) -> list[PathCommand]:
        """Take in a request. No command for it means that it waits."""
        entry = _Waiting(request)
        if not self._fits(entry):
            return [self._too_long(entry)]
        if not self._queue and (lease := self._place(entry, now)) is not None:
            return [lease]
        if self._queue_limit is not None and len(self._queue) >= self._queue_limit:
            detail = "Too many requests are waiting for a path."
            return [Reject(request.id, RejectReason.QUEUE_FULL, detail, retry_after_s=1.0)]
        self._queue.append(entry)
        return []

    def on_first_token(self, lease: PathLease, now: float) -> list[PathCommand]:
        """Note that the first pass of a lease is through. A repeated report changes nothing."""
        if lease.first_token_at is not None:
            return []
        lease.first_token_at = now
        return self._flush(now) if self._queue else []

    def on_hop(self, sender: str, receiver: str, seconds: float) -> None:
        """Note that a message left one stage and was computed by the next `seconds` later."""
        self._policy.hop_took(sender, receiver, seconds)

    def on_lease_ended(self, lease: PathLease, outcome: Outcome, now: float) -> list[PathCommand]:
        """Give back what a lease booked that ended, and place a waiting request if there is one.

        `lease.output_tokens` holds what was produced. After a broken path the request goes first in the
        queue: its next path prefills the prompt and the tokens so far.
        """
        request, done = lease.request, self._release(lease, now)
        if outcome in _REPLAYED:
            if lease.replays < MOST_REPLAYS:
                return self._requeue(_Waiting(request, done, lease.replays + 1), now)
            detail = "Every path of the request broke."
            return [Reject(request.id, RejectReason.NO_RESPONSE, detail), *self._flush(now)]
        if outcome is Outcome.OK:
            self._predictor.observe(request, done)
        return self._flush(now)

    def on_preempted(self, lease: PathLease, now: float) -> list[PathCommand]:
        """Queue a preempted request first: a stage gave its KV blocks to an older one."""
        return self._requeue(_Waiting(lease.request, self._release(lease, now), lease.replays), now)

    def _requeue(self, entry: _Waiting, now: float) -> list[PathCommand]:
        """Put a request first in the queue; turn it away if no path could ever hold its tokens so far."""
        self._queue.appendleft(entry)
        return [*self._drop_misfits(), *self._flush(now)]

    def _release(self, lease: PathLease, now: float) -> int:
        """Give back a lease's bookings; return the tokens of the answer so far."""
        del self._leased[lease.id]
        for hop in lease.hops:
            self.ledgers[hop.stage].release(lease)
        self._policy.ended(lease, now)
        return lease.context_tokens - lease.request.prompt_tokens + lease.output_tokens

    def on_cancelled(self, request_id: RequestId, now: float) -> list[PathCommand]:
        """Forget a waiting request of a disconnected client. (The driver ends a leased one.)"""
        self._queue = deque(entry for entry in self._queue if entry.request.id != request_id)
        return self._flush(now)

    def on_stage_lost(self, name: str, now: float) -> list[PathCommand]:
        """Use a stage no more. Leases that cross it end when the driver reports it."""
        self.ledgers[name].up = False
        return [*self._drop_misfits(), *self._flush(now)]

    def on_network(self, network: StageNetwork, now: float) -> list[PathCommand]:
        """Take changed stages, all without a lease. The ledgers of the others stay."""
        ledgers = {stage.name: StageLedger(stage) for stage in network.stages}
        for name, ledger in self.ledgers.items():
            kept = name in ledgers and ledgers[name].spec == ledger.spec
            assert kept or not ledger.leases, f"{name} went or changed with leases"
            if kept:
                ledgers[name] = ledger
        self._network, self.ledgers = network, ledgers
        misfits = self._drop_misfits()
        self._policy = self._make_policy()
        for lease in self._leased.values():
            self._policy.dispatched(lease)
        return [*misfits, *self._flush(now)]

    # --- inside ---

    def _fits(self, entry: _Waiting) -> bool:
        """Return True if some path could ever hold the context and one token."""
        return self._covers(lambda stage: (entry.context_tokens + 1) * stage.layers <= stage.kv_token_layers)

    def _too_long(self, entry: _Waiting) -> Reject:
        detail = f"No path through the stages holds {entry.context_tokens} tokens."
        return Reject(entry.request.id, RejectReason.TOO_LONG, detail)

    def _drop_misfits(self) -> list[PathCommand]:
        """Turn away requests that fit no path of the present stages, and would hold up the others.

        Without any path all wait.
        """
        if not self._queue or not self._covers(lambda stage: True):
            return []
        misfits = [entry for entry in self._queue if not self._fits(entry)]
        self._queue = deque(entry for entry in self._queue if entry not in misfits)
        return [self._too_long(entry) for entry in misfits]

    def _covers(self, usable: Callable[[StageSpec], bool]) -> bool:
        """Return True if usable stages can follow each other through all layers."""
        network, reached = self._network, {0}
        for stage in sorted(network.stages, key=lambda stage: stage.end):
            if usable(stage) and any(network.enters(stage, at) for at in reached):
                reached.add(stage.end)
        return network.layers in reached

    def _flush(self, now: float) -> list[PathCommand]:
        """Give paths to waiting requests, in order, until the first that finds none."""
        commands: list[PathCommand] = []
        while self._queue and (lease := self._place(self._queue[0], now)) is not None:
            self._queue.popleft()
            commands.append(lease)
        return commands

    def _place(self, entry: _Waiting, now: float) -> PathLease | None:
        predicted = max(1.0, self._predictor.predict(entry.request) - entry.done_tokens)
        lease = PathLease(self._next_lease, entry.request, entry.context_tokens, predicted, now)
        hops = self._policy.choose(lease)
        if hops is None:
            return None
        lease.hops, lease.replays = hops, entry.replays
        self._next_lease += 1
        for hop in hops:
            self.ledgers[hop.stage].acquire(lease, hop.layers)
        self._leased[lease.id] = lease
        self._policy.dispatched(lease)
        return lease

    def check_integrity(self) -> None:
        """Assert that token-layers and requests are all accounted for and every path is whole."""
        for ledger in self.ledgers.values():
            ledger.check_integrity()
        booked = sum(len(ledger.leases) for ledger in self.ledgers.values())
        assert booked == sum(len(lease.hops) for lease in self._leased.values())
        for lease in self._leased.values():
            at = 0
            for hop in lease.hops:
                spec = self.ledgers[hop.stage].spec
                assert hop.first == at, f"{lease!r} goes on at layer {hop.first}, not {at}"
                assert spec.first <= hop.first < hop.end <= spec.end, f"{lease!r} leaves {spec.name}"
                at = hop.end
            assert at == self._network.layers, f"{lease!r} ends at layer {at}"
        leased = {lease.request.id for lease in self._leased.values()}
        waiting = [entry.request.id for entry in self._queue]
        assert len(set(waiting)) == len(waiting), "a request waits twice"
        assert not leased & set(waiting), "a request waits and is leased"


# Event log of pipelines as JSON lines: every network of stages, and the paths of the requests through it.
#
# The first line is the network at the start; a path belongs to the network above it. No prompt is in it.


_FORMAT: Final = "hetlb-paths"
_VERSION: Final = 2


class PathLog:
    """Writer of a log, a line at a time."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def network(self, network: StageNetwork, now: float) -> None:
        """Write the stages that hold from now on."""
        raw = asdict(network)
        raw["links"] = [[*edge, link.bytes_per_s, link.latency_s] for edge, link in network.links.items()]
        raw["flows"] = [[*edge, rate] for edge, rate in network.flows.items()]
        for stage in raw["stages"]:  # stages of workers have no limit, and JSON no infinity
            del stage["nic_in_bytes_per_s"], stage["nic_out_bytes_per_s"]
        self._line({"format": _FORMAT, "version": _VERSION, "t": now, "network": raw})

    def path(self, lease: PathLease) -> None:
        """Write that a request was sent over a path."""
        self._line(
            {
                "t": lease.dispatched_at,
                "request": lease.request.id,
                "lease": lease.id,
                "replays": lease.replays,
                "context_tokens": lease.context_tokens,
                "kv_tokens": lease.kv_tokens,
                "path": [[hop.stage, hop.first, hop.end] for hop in lease.hops],
            }
        )

    def _line(self, document: dict[str, Any]) -> None:
        self._write(json.dumps(document, separators=(",", ":")) + "\n")


def is_path_log(first_line: str) -> bool:
    """Return True for the first line of such a log."""
    return first_line.startswith(f'{{"format":"{_FORMAT}"')


def dispatches(lines: Iterable[str]) -> Iterator[tuple[int, StageNetwork, tuple[Hop, ...]]]:
    """Yield line number, network and path of every request in a log. Raises `ValueError` without a log."""
    network: StageNetwork | None = None
    for number, line in enumerate(lines, start=1):
        try:
            raw = json.loads(line)
            if network is None and (raw.get("format"), raw.get("version")) != (_FORMAT, _VERSION):
                raise ValueError(f"expected a log of paths, version {_VERSION}")
            if "network" in raw:
                network = _read_network(raw["network"])
                continue
            hops = tuple(Hop(str(name), int(first), int(end)) for name, first, end in raw["path"])
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"line {number}: expected a line of a log of paths: {error!r}") from error
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        assert network is not None
        yield number, network, hops


def _read_network(raw: dict[str, Any]) -> StageNetwork:
    stages = []
    for each in raw["stages"]:
        curves = {key: Curve(tuple(each[key]["xs"]), tuple(each[key]["ys"])) for key in ("prompt", "decode")}
        stages.append(StageSpec(**{**each, **curves, "batch": BatchLimits(**each["batch"])}))
    links = {(a, b): LinkSpec(rate, latency) for a, b, rate, latency in raw["links"]}
    flows = {(a, b): rate for a, b, rate in raw["flows"]}
    return StageNetwork(**{**raw, "stages": tuple(stages), "links": links, "flows": flows})
