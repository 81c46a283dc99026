"""Choosing the stages that a request passes: one policy per name.

A path computes every layer once and in order, over existing links, on running stages with
room in their KV cache; None if there is no such path now. `choose` changes nothing; a policy learns
from the events reported afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

from hetlb.tools.paths.path_ledger import PathLease, StageLedger
from hetlb.tools.paths.stages import SINK, SOURCE, Edge, Hop, StageNetwork

#: Least share of a node's outgoing flow of a link that `iwrr` uses (Helix's rule).
LEAST_FLOW_SHARE: Final = 0.05
#: Swarm's estimate of a hop before one was measured (s), and the weight of a new measurement.
SWARM_PRIOR_S: Final = 0.05
SWARM_SMOOTHING: Final = 0.8


class PathPolicy:
    """Base of all policies: the graph of stages that may follow each other, and which of them have room."""

    name = ""
    #: True if `hop_took` is to be called.
    reads_hops = False

    def __init__(
        self, network: StageNetwork, ledgers: Mapping[str, StageLedger], high_water: float, rng: random.Random
    ) -> None:
        self._network = network
        self._ledgers = ledgers
        self._high_water = high_water
        self._rng = rng
        self._specs = {stage.name: stage for stage in network.stages}
        #: By sender: stages that may follow, in file order, then `SINK` if the stage leads out.
        self._next: dict[str, list[str]] = {SOURCE: [stage.name for stage in network.successors(None)]}
        for stage in network.stages:
            after = [other.name for other in network.successors(stage)]
            self._next[stage.name] = [*after, SINK] if network.leads_out(stage) else after
        self._prune()
        self._prepare()

    def _prepare(self) -> None:
        """Set up the policy's own state."""

    def _prune(self) -> None:
        """Leave out stages without a way to the sink."""
        while dead := [name for name, after in self._next.items() if not after and name != SOURCE]:
            for name in dead:
                del self._next[name]
            for name, after in self._next.items():
                self._next[name] = [other for other in after if other not in dead]

    def choose(self, lease: PathLease) -> tuple[Hop, ...] | None:
        """Return the path for a request, None if there is none now."""
        blocked: set[str] = set()
        names: list[str] = []
        while True:
            sender = names[-1] if names else SOURCE
            open_to = [
                name for name in self._next[sender] if name not in blocked and self._takes(name, lease)
            ]
            if SINK in open_to:
                return self._hops(names)
            receiver = self._pick(sender, open_to, lease) if open_to else None
            if receiver is not None:
                names.append(receiver)
            elif names:
                blocked.add(names.pop())
            else:
                return None

    def _takes(self, name: str, lease: PathLease) -> bool:
        return name == SINK or self._ledgers[name].takes(lease, self._high_water)

    def _hops(self, names: Sequence[str]) -> tuple[Hop, ...]:
        at, hops = 0, []
        for name in names:
            end = self._specs[name].end
            hops.append(Hop(name, at, end))
            at = end
        return tuple(hops)

    def _pick(self, sender: str, receivers: Sequence[str], lease: PathLease) -> str | None:
        """Return one of the stages that may follow, None if the policy uses none of them."""
        raise NotImplementedError

    def dispatched(self, lease: PathLease) -> None:
        """Note that a path was booked."""

    def ended(self, lease: PathLease, now: float) -> None:
        """Note that a lease ended."""

    def hop_took(self, sender: str, receiver: str, seconds: float) -> None:
        """Note that a message left `sender` and was computed by `receiver` `seconds` later."""


class RandomPaths(PathPolicy):
    """Any stage that may follow, with equal chance."""

    name = "random"

    def _pick(self, sender: str, receivers: Sequence[str], lease: PathLease) -> str:
        return self._rng.choice(receivers)


class FixedPipelines(PathPolicy):
    """Round robin over pipelines that share no stage, as over several vLLM servers with pipeline parallelism.

    Pipelines are found in file order: each takes, hop by hop, the first stage that no other one uses.
    """

    name = "round-robin"

    def _prepare(self) -> None:
        self._pipelines: list[tuple[str, ...]] = []
        used: set[str] = set()
        while (names := self._unused_pipeline(SOURCE, used)) is not None:
            self._pipelines.append(names)
            used.update(names)
        self._turn = 0

    def _unused_pipeline(self, sender: str, used: set[str]) -> tuple[str, ...] | None:
        """Return the stages behind `sender` to the end, none of them used. Dead ends are added to `used`."""
        for name in self._next.get(sender, ()):
            if name == SINK:
                return ()
            if name not in used:
                if (rest := self._unused_pipeline(name, used)) is not None:
                    return (name, *rest)
                used.add(name)
        return None

    def choose(self, lease: PathLease) -> tuple[Hop, ...] | None:
        """Return the next pipeline in turn with room on all stages."""
        count = len(self._pipelines)
        for step in range(count):
            names = self._pipelines[(self._turn + step) % count]
            if all(self._takes(name, lease) for name in names):
                return self._hops(names)
        return None

    def dispatched(self, lease: PathLease) -> None:
        names = tuple(hop.stage for hop in lease.hops)
        if names in self._pipelines:
            self._turn = self._pipelines.index(names) + 1


class ShortestQueue(PathPolicy):
    """The stage with the fewest requests in flight; the first of equals."""

    name = "shortest-queue"

    def _pick(self, sender: str, receivers: Sequence[str], lease: PathLease) -> str:
        return min(receivers, key=lambda name: self._ledgers[name].in_flight)


class WeightedRoundRobin(PathPolicy):
    """Helix's interleaved weighted round robin over the shares of a flow (ASPLOS 2025, section 5.1).

    The receiver with the least (tokens sent + tokens of this request) / flow is next; the output of a request
    is as predicted until it ends.
    """

    name = "iwrr"

    def _prepare(self) -> None:
        totals: dict[str, float] = {}
        for (sender, _), rate in self._network.flows.items():
            totals[sender] = totals.get(sender, 0.0) + rate
        self._flows = {
            edge: rate
            for edge, rate in self._network.flows.items()
            if rate >= LEAST_FLOW_SHARE * totals[edge[0]] > 0.0
        }
        self._sent: dict[Edge, float] = dict.fromkeys(self._flows, 0.0)

    def _pick(self, sender: str, receivers: Sequence[str], lease: PathLease) -> str | None:
        flows, sent, tokens = self._flows, self._sent, lease.context_tokens
        used = [name for name in receivers if (sender, name) in flows]
        return min(used, key=lambda name: (sent[sender, name] + tokens) / flows[sender, name], default=None)

    def _count(self, lease: PathLease, tokens: float) -> None:
        for edge in lease.edges:
            if edge in self._sent:
                self._sent[edge] += tokens

    def dispatched(self, lease: PathLease) -> None:
        self._count(lease, lease.context_tokens + lease.predicted_output)

    def ended(self, lease: PathLease, now: float) -> None:
        counted = lease.context_tokens + lease.predicted_output
        self._count(lease, lease.context_tokens + lease.output_tokens - counted)


class Swarm(PathPolicy):
    """SWARM's stochastic wiring (Ryabinin et al., ICML 2023, appendix C).

    A receiver's priority grows by its smoothed hop time whenever it is chosen; the lowest is next.
    """

    name = "swarm"
    reads_hops = True

    def _prepare(self) -> None:
        edges = [(sender, name) for sender, after in self._next.items() for name in after]
        self._hop_s: dict[Edge, float] = dict.fromkeys(edges, SWARM_PRIOR_S)
        self._priority: dict[Edge, float] = dict.fromkeys(edges, SWARM_PRIOR_S)

    def _pick(self, sender: str, receivers: Sequence[str], lease: PathLease) -> str:
        return min(receivers, key=lambda name: self._priority[sender, name])

    def dispatched(self, lease: PathLease) -> None:
        for edge in lease.edges[:-1]:
            self._priority[edge] += self._hop_s[edge]

    def hop_took(self, sender: str, receiver: str, seconds: float) -> None:
        edge = (sender, receiver)
        self._hop_s[edge] += SWARM_SMOOTHING * (seconds - self._hop_s[edge])
