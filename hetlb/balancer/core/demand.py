"""Demand: the work of all requests, in sizes that no instance decides.

The size of a request is `PROMPT_WEIGHT * prompt + predicted output` tokens (a prompt token is prefilled
together with many others, an output token takes a step of its own).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.latency import ideal_batch
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.occupancy import EngineKind
from hetlb.balancer.core.rate import RecentRate
from hetlb.balancer.core.types import Request

if TYPE_CHECKING:
    from hetlb.balancer.core.blocks import Blocks
    from hetlb.balancer.core.protected import Protected

#: Weight of a prompt token against one output token (0.075, 0.3: tokens/s at once 0.994, 0.994 x).
PROMPT_WEIGHT: Final = 0.15
#: Longest gap between arrivals of one burst, as a share of an answer's time. A burst is no stream.
_BURST_SHARE: Final = 1.0 / 64.0
#: Gaps between bursts that make a stream; newest gaps that are averaged; mean gaps of silence that end it.
_STREAM_GAPS: Final = 4
_KEPT_GAPS: Final = 16
_SILENT_GAPS: Final = 8.0
#: Longest gap, in seconds, between the first two bursts of a stream.
_LONGEST_GAP_S: Final = 60.0


def size_of(request: Request, predicted_output: float) -> float:
    """Return the size of a request in weighted tokens, all sequences together; at least 1."""
    return max(1.0, request.sequences * (PROMPT_WEIGHT * request.prompt_tokens + predicted_output))


#: Newest requests that the mean request follows.
MIX_REQUESTS: Final = 1000.0
#: Relative change of the mean request after which costs are computed again.
_CHANGE_SHARE: Final = 0.02
#: Most kinds of instances with kept costs; and kinds kept beyond two for each instance. Each change of a
#: learnt speed makes another kind, with its loads.
_MOST_KINDS: Final = 1024
_SPARE_KINDS: Final = 16
#: Most sequences of instances with kept costs.
_MOST_FLEETS: Final = 128
#: Instances of the smallest fleet that is divided into blocks.
LEAST_FLEET: Final = 64


class Costs:
    """Costs of the mean request on an instance of given parameters. Times are in seconds.

    `speed`: size served per second with a full batch. `batch_s`: time of a full batch. `prefill_s`: prefill
    of the mean prompt alone; `token_prefill_s`: the same per computed token. `beside_s`: how much longer that
    prefill takes beside one decoding sequence. `delay_s`: delay of this one sequence. `delay_rise_s`:
    additional delay of each for every further decoding sequence.
    """

    __slots__ = ("batch_s", "beside_s", "delay_rise_s", "delay_s", "prefill_s", "speed", "token_prefill_s")

    def __init__(
        self, instance: Instance, prompt: float, output: float, booked: float, prefill: float
    ) -> None:
        """Measure the mean request by the latency model; lengths come from `Mix`."""
        latency, engines, budget = instance.latency, instance.engines, instance.token_budget
        cache, slots = instance.kv_cache_tokens // engines, instance.max_num_seqs // engines
        batch = ideal_batch(cache, booked, output, slots)
        computed = max(1.0, min(prefill, prompt))
        cached, context = max(0.0, prompt - computed), prompt + output / 2.0
        # One request's share of the time of a full batch, prompts in passes as full as they may be.
        together = max(1.0, min(batch, budget / computed))
        share_s = latency.prefill_s(max(1.0, prompt), together, cached) / together
        share_s += output * latency.step_s(batch, batch * context) / batch
        self.speed = engines * max(1.0, PROMPT_WEIGHT * prompt + output) / max(share_s, 1e-9)
        self.batch_s = share_s * batch
        self.prefill_s = prefill_s = latency.prefill_s(max(1.0, prompt), 1.0, cached)
        self.token_prefill_s = prefill_s / computed
        beside_s = latency.first_token_s(prompt, cached, 0.0, 1.0, context, budget)
        self.beside_s = max(0.0, beside_s - prefill_s)
        half = max(2.0, batch / 2.0)
        self.delay_s = delay_s = latency.read_delay_s(prompt, cached, 1.0, context, budget)
        delay_half_s = latency.read_delay_s(prompt, cached, half, half * context, budget)
        self.delay_rise_s = (delay_half_s - delay_s) / (half - 1.0)


class FleetCosts:
    """Facts about a sequence of instances under one mean request, until any of them changes.

    `costs` has the costs of each instance. `order` has their indices; the first one ends a full batch
    soonest. In this order a large fleet is divided into `blocks`.
    """

    __slots__ = ("blocks", "changes", "costs", "counter", "instances", "members", "order")

    def __init__(self, instances: Sequence[Instance], costs: Sequence[Costs]) -> None:
        self.instances = instances
        #: The same as a list, which compiled code goes through faster.
        self.members = list(instances)
        self.counter = instances[0].changes
        self.changes = self.counter.count
        self.costs = list(costs)
        self.order = order = sorted(range(len(costs)), key=lambda i: costs[i].batch_s)
        self.blocks: Blocks | None = None
        if len(order) >= LEAST_FLEET:
            from hetlb.balancer.core.blocks import Blocks

            self.blocks = Blocks([self.members[i] for i in order])


class Mix:
    """The mean request of a model, and how fast each instance is at it. Lengths are in tokens.

    `output` is the mean prediction. `booked` is the mean of a prompt's tokens that took room in a KV cache,
    `prefill` the mean of its computed tokens. Both are less than `prompt` if prompts begin alike.
    """

    __slots__ = (
        "_bookings", "_costs", "_fleets", "_measured", "_newest", "_used", "booked", "count",
        "output", "prefill", "prompt",
    )  # fmt: skip

    def __init__(self) -> None:
        self.booked = self.prefill = 0.0
        self._bookings = 0
        self.prompt = self.output = 0.0
        #: Requests so far.
        self.count = 0
        self._measured = (0.0, 0.0, 0.0, 0.0)
        self._costs: dict[EngineKind, Costs] = {}
        #: Kinds with an instance as kinds were forgotten last.
        self._used = 0
        #: Facts by the `id` of a sequence of instances. They hold the sequence, so that no other gets its
        #: `id`.
        self._fleets: dict[int, FleetCosts] = {}
        #: Costs of the last decision.
        self._newest: FleetCosts | None = None

    def add(self, prompt: float, output: float) -> None:
        """Count one more request, as predicted."""
        self.count = count = self.count + 1
        gain = 1.0 / count if count < MIX_REQUESTS else 1.0 / MIX_REQUESTS
        self.prompt = mean_prompt = self.prompt + gain * (prompt - self.prompt)
        self.output = mean_output = self.output + gain * (output - self.output)
        if not self._bookings:
            self.booked = self.prefill = mean_prompt
        old_prompt, old_output, old_booked, old_prefill = self._measured
        booked, prefill = self.booked, self.prefill
        if (
            abs(mean_prompt - old_prompt) > _CHANGE_SHARE * old_prompt
            or abs(mean_output - old_output) > _CHANGE_SHARE * old_output
            or abs(booked - old_booked) > _CHANGE_SHARE * old_booked
            or abs(prefill - old_prefill) > _CHANGE_SHARE * old_prefill
        ):
            self._measured = (mean_prompt, mean_output, booked, prefill)
            self._costs.clear()
            self._fleets.clear()
            self._newest = None

    def add_booking(self, kv_prompt_tokens: float, unread_tokens: float) -> None:
        """Record a sequence's KV tokens and uncached prompt tokens."""
        self._bookings = count = self._bookings + 1
        gain = 1.0 / count if count < MIX_REQUESTS else 1.0 / MIX_REQUESTS
        self.booked += gain * (kv_prompt_tokens - self.booked)
        self.prefill += gain * (unread_tokens - self.prefill)

    @property
    def size(self) -> float:
        """Size of the mean request: see `size_of`."""
        return PROMPT_WEIGHT * self.prompt + self.output

    def speed(self, instance: Instance) -> float:
        """Return the speed of an instance with a full batch of mean requests, in sizes per second."""
        return self.costs(instance).speed

    def fleet(self, instances: Sequence[Instance]) -> FleetCosts:
        """Return facts about all instances together, kept by the sequence's identity: do not change it."""
        known = self._newest
        if known is None or known.instances is not instances:
            known = self._fleets.get(id(instances))
        if known is None or known.instances is not instances or known.changes != known.counter.count:
            costs = [self.costs(instance) for instance in instances]
            if len(self._fleets) >= _MOST_FLEETS:
                self._fleets.clear()
            known = self._fleets[id(instances)] = FleetCosts(instances, costs)
            if len(self._costs) > 2 * max(len(costs), self._used) + _SPARE_KINDS:
                used = {each.kind for fleet in self._fleets.values() for each in fleet.members}
                self._costs = {kind: self._costs[kind] for kind in used if kind in self._costs}
                self._used = len(used)
        self._newest = known
        return known

    def costs(self, instance: Instance) -> Costs:
        """Return the costs of the mean request on an instance. Read-only, valid until the next change."""
        costs = self._costs.get(instance.kind)
        if costs is None:
            if len(self._costs) >= _MOST_KINDS:
                self._costs.clear()
            prompt, output, booked, prefill = self._measured
            costs = self._costs[instance.kind] = Costs(instance, prompt, output, booked, prefill)
        return costs


class Demand:
    """Demand for one model: the mean request, and whether and how fast requests keep arriving."""

    __slots__ = ("_bursts", "_silent_at", "answer_s", "arrivals", "burst", "mix", "protected", "rate")

    def __init__(self) -> None:
        #: Times when the newest bursts began, in seconds, without a long silence between them.
        self._bursts: list[float] = []
        #: Time when silence ends the stream.
        self._silent_at = -math.inf
        #: Forecast seconds of the newest request's answer at the fastest instance.
        self.answer_s = 0.0
        #: Requests that came so far, and how many per second lately.
        self.arrivals = 0
        self.rate = RecentRate()
        #: Requests that came in the newest burst.
        self.burst = 0
        self.mix = Mix()
        #: Classes with targets, the tightest first.
        self.protected: list[Protected] = []

    def of_class(self, service: ServiceClass) -> Protected:
        """Return the figures of the requests of a class with targets."""
        for each in self.protected:
            if each.name == service.name:
                return each
        from hetlb.balancer.core.protected import Protected

        found = Protected(service)
        self.protected.append(found)
        self.protected.sort(key=lambda each: each.tightness())
        return found

    def arrived(self, prompt: float, output: float, now: float) -> None:
        """Record an arrival as predicted, in tokens."""
        self.mix.add(prompt, output)
        self.arrivals += 1
        bursts = self._bursts
        if bursts and now - bursts[-1] <= _BURST_SHARE * self.answer_s:
            self.burst += 1
        else:
            if now > self._silent_at:
                bursts.clear()
            self.burst = 1
            bursts.append(now)
            gaps, longest_s = len(bursts) - 1, _LONGEST_GAP_S
            if gaps >= _KEPT_GAPS:
                del bursts[0]
                gaps -= 1
            if gaps:
                longest_s = _SILENT_GAPS * (now - bursts[0]) / gaps
            self._silent_at = now + longest_s
        self.rate = self.rate.plus(1.0, now)

    def goes_on(self, now: float) -> bool:
        """Return True if requests keep coming.

        Requests of one burst do not count: they wait in the queue, and are counted there.
        """
        return len(self._bursts) > _STREAM_GAPS and now <= self._silent_at
