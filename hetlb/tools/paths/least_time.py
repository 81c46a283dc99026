"""hetlb's own choice of paths: the least predicted time of a request and of the requests it delays.

A decision depends on the ledgers and on what was dispatched before; nothing is random. Dynamic
programming over the layers: the stages form a graph without cycles, ordered by their last layer, and the
cheapest way to each follows from the cheapest ways to the stages before it.

The cost of a path (s) has two parts.

- The first pass, as a timetable: when every stage and link is done with the prompts it was given before, by
  prediction, so that a prompt avoids stages busy with other prompts.
- The decode passes, times the output predicted: what one more request adds to the time that all requests
  spend on a stage or link, F(n + 1) - F(n) with F(n) = n T(n). T(n) is the time of a pass with n requests in
  flight: the batch, and prompts in between as in an M/G/1 queue. So a request pays for the delay of others
  too, and traffic is spread as a central planner would (marginal costs; Beckmann et al., 1956). Requests that
  take the same link travel as a convoy, and each makes the batches of the others longer: paths that part
  keep convoys short.
"""

from __future__ import annotations

from typing import Final

from hetlb.tools.paths.path_ledger import PathLease, StageLedger
from hetlb.tools.paths.policies import PathPolicy
from hetlb.tools.paths.stages import SINK, SOURCE, Edge, Hop, StageSpec

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
    """The path of least predicted time."""

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
