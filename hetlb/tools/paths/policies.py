"""Choosing the stages that a request passes: one policy per name.

A path computes every layer once and in order, over existing links, on running stages with
room in their KV cache; None if there is no such path now. `choose` changes nothing; a policy learns
from the events reported afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

from hetlb.tools.paths.stages import SINK, SOURCE, Edge, Hop, PathLease, StageLedger, StageNetwork, StageSpec

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


#: Weight of a new observation in the means of prompts, outputs and times of a pass.
_SMOOTHING: Final = 0.05
#: Prompt tokens and output tokens before any request was seen: about the means of public chat traces.
_PRIOR_PROMPT_TOKENS: Final = 750.0
_PRIOR_OUTPUT_TOKENS: Final = 240.0
#: Largest utilisation, so that an overloaded stage is slow and not undefined.
_MAX_UTILISATION: Final = 0.95
#: Weight of the time that a request adds to the batches on its link, as convoys merge on the way:
#: 4 served more than 1 on four placements (bench/place/run.py); 0.3, 2 and 10 were tried on one or two.
_CONVOY_WEIGHT: Final = 4.0
#: Decoding requests of a small and of a large batch; a request's share is interpolated between both.
_SMALL_BATCH, _LARGE_BATCH = 8.0, 64.0
#: E[t^2] / E[t]^2 of the prompts' times: chat prompts vary about as much as their mean.
_PROMPT_SPREAD: Final = 1.6


def _blocked_s(prompts_per_s: float, prompt_s: float) -> float:
    """Return the mean wait for the prompts in between: M/G/1."""
    used = min(_MAX_UTILISATION, prompts_per_s * prompt_s)
    return prompts_per_s * _PROMPT_SPREAD * prompt_s * prompt_s / (2.0 * (1.0 - used))


class _Stage:
    """Times of one stage (s)."""

    __slots__ = ("batch_s", "free_at", "ledger", "spec")

    def __init__(self, spec: StageSpec, ledger: StageLedger) -> None:
        self.spec = spec
        self.ledger = ledger
        #: Predicted end of all prompts sent here.
        self.free_at = 0.0
        #: A pass of one token alone, then with a few others.
        self.batch_s = spec.layers * (2.0 * spec.decode(1.0) + spec.decode(_SMALL_BATCH))

    def total_s(self, requests: float, prompts_per_s: float, prompt_tokens: float) -> float:
        """Return the seconds that `requests` in flight spend here per pass of each, at `prompts_per_s`."""
        prompt_s = self.spec.layers * self.spec.prompt(prompt_tokens)
        return requests * (self.batch_s + _blocked_s(prompts_per_s, prompt_s))


class _Link:
    """Times of one link (s)."""

    __slots__ = ("batch_s", "free_at", "latency_s", "requests", "token_s")

    def __init__(self, token_s: float, latency_s: float, receiver: StageSpec | None) -> None:
        self.token_s = token_s
        self.latency_s = latency_s
        #: Cost of one more request in a batch at the receiver.
        self.batch_s = 0.0
        if receiver is not None:
            more = receiver.decode(_LARGE_BATCH) - receiver.decode(_SMALL_BATCH)
            self.batch_s = receiver.layers * max(0.0, more) / (_LARGE_BATCH - _SMALL_BATCH)
        self.free_at = 0.0
        #: Requests in flight with it on their path.
        self.requests = 0

    def total_s(self, requests: float, prompts_per_s: float, prompt_tokens: float) -> float:
        """Return the total of the path, as for a stage."""
        blocked_s = _blocked_s(prompts_per_s, prompt_tokens * self.token_s)
        return requests * (self.latency_s + blocked_s + _CONVOY_WEIGHT * self.batch_s * requests)


class LeastTime(PathPolicy):
    """hetlb's own choice: the least predicted time of a request and of the requests that it delays.

    A decision depends on the ledgers and on earlier dispatches; nothing is random. Stages form a graph
    without cycles, ordered by their last layer. So the cheapest way to each follows from the cheapest ways to
    the stages before it. The cost of a path (s) has two parts:

    - The first pass, as a timetable: the predicted times at which each stage and link ends its earlier
      prompts. So a prompt avoids stages that are busy with other prompts.
    - The decode passes, times the predicted output: what one more request adds to the time that all requests
      spend on a stage or link, F(n + 1) - F(n) with F(n) = n T(n). T(n) is the time of a pass with n requests
      in flight: the batch, and prompts in between as in an M/G/1 queue. So a request pays for the delay of
      others, and traffic spreads as a central planner would spread it (marginal costs; Beckmann et al.,
      1956). Requests on one link travel as a convoy, and each makes the batches of the others longer: paths
      that part keep convoys short.
    """

    name = "hetlb"

    def _prepare(self) -> None:
        self._stages = {name: _Stage(spec, self._ledgers[name]) for name, spec in self._specs.items()}
        self._links: dict[Edge, _Link] = {}
        for sender, after in self._next.items():
            for receiver in after:
                spec = self._network.links[sender, receiver]
                size = self._network.message_bytes(sender, receiver)
                self._links[sender, receiver] = _Link(
                    size / spec.bytes_per_s, spec.latency_s, self._specs.get(receiver)
                )
        stages = (name for name in self._next if name != SOURCE)
        self._order = [SOURCE, *sorted(stages, key=lambda name: self._specs[name].end)]
        self._prompt_tokens = _PRIOR_PROMPT_TOKENS
        self._output_tokens = _PRIOR_OUTPUT_TOKENS
        #: Seconds of a decode pass: at first the layers' times alone, as if there were one stage per layer.
        all_s = sum(spec.decode(_SMALL_BATCH) for spec in self._specs.values())
        self._pass_s = 3.0 * self._network.layers * all_s / max(1, len(self._specs))

    def choose(self, lease: PathLease) -> tuple[Hop, ...] | None:
        """Return the cheapest path now."""
        tokens, output = lease.context_tokens, lease.predicted_output
        #: By stage: cost so far, when the prompt leaves it, the way to it.
        best: dict[str, tuple[float, float, tuple[str, ...]]] = {SOURCE: (0.0, lease.dispatched_at, ())}
        costs: dict[str, float | None] = {}
        for sender in self._order:
            if sender not in best:
                continue
            cost, at, way = best[sender]
            for receiver in self._next[sender]:
                link = self._links[sender, receiver]
                arrives = max(at, link.free_at) + tokens * link.token_s + link.latency_s
                reached = cost + output * self._added(link, link.requests)
                if receiver != SINK:
                    stage = self._stages[receiver]
                    if receiver not in costs:
                        takes = self._takes(receiver, lease)
                        costs[receiver] = self._added(stage, stage.ledger.in_flight) if takes else None
                    if (added := costs[receiver]) is None:
                        continue
                    arrives = max(arrives, stage.free_at) + stage.spec.layers * stage.spec.prompt(tokens)
                    reached += output * added
                known = best.get(receiver)
                if known is None or reached + arrives < known[0] + known[1]:
                    best[receiver] = (reached, arrives, (*way, receiver))
        return self._hops(best[SINK][2][:-1]) if SINK in best else None

    def _added(self, place: _Stage | _Link, requests: int) -> float:
        """Return the time per pass that one more request adds to the time of all of them."""
        rate = 1.0 / (self._output_tokens * self._pass_s)
        with_it = place.total_s(requests + 1, (requests + 1) * rate, self._prompt_tokens)
        return with_it - place.total_s(requests, requests * rate, self._prompt_tokens)

    def dispatched(self, lease: PathLease) -> None:
        tokens, at = lease.context_tokens, lease.dispatched_at
        self._prompt_tokens += _SMOOTHING * (tokens - self._prompt_tokens)
        for edge in lease.edges:
            link = self._links[edge]
            link.requests += 1
            if (stage := self._stages.get(edge[1])) is not None:
                link.free_at = max(at, link.free_at) + tokens * link.token_s
                stage.free_at = max(link.free_at + link.latency_s, stage.free_at)
                stage.free_at += stage.spec.layers * stage.spec.prompt(tokens)
                at = stage.free_at

    def ended(self, lease: PathLease, now: float) -> None:
        for edge in lease.edges:
            self._links[edge].requests -= 1
        if lease.first_token_at is not None and lease.output_tokens > 1:
            pass_s = (now - lease.first_token_at) / (lease.output_tokens - 1)
            self._pass_s += _SMOOTHING * (pass_s - self._pass_s)
            self._output_tokens += _SMOOTHING * (lease.output_tokens - self._output_tokens)
