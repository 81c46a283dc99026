"""Stages and links in virtual time, driven by the production scheduler of pipelines.

A run depends on its arguments alone (same seed, same result). Nothing is kept per token but one
4-byte latency.

The model, after Helix's simulator (Mei et al., ASPLOS 2025):

- A stage runs one batch at a time: what has arrived when the last batch ended, first come first served,
  within its `BatchLimits`. A batch takes, for each layer, the prompt time of its prompt tokens plus the
  decode time of its decoding requests (twice a single one's), and once the copying of the activations
  that came in.
- A stage with entries behind its first layer goes through its segments in turn; requests that
  enter at a segment join the batch there.
- Requests are messages of their own, or (`frames`) a batch's requests to one receiver are one message.
- A message passes the sender's NIC, the link and the receiver's NIC, each first in, first out and passing
  data on as it comes (cut-through), then the link's latency. Prompts are whole: no chunks.
- The first pass of a request is its prefill and gives its first token; every further token is one pass from
  the source to the sink.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hetlb.balancer.core.types import Outcome, Reject, Request
from hetlb.tools.paths.path_scheduler import PathCommand, PathScheduler
from hetlb.tools.paths.stages import SINK, SOURCE, Edge, PathLease, StageNetwork, StageSpec
from hetlb.tools.sim.deadline import LOOK_EVENTS, is_over
from hetlb.tools.sim.event_queue import EventQueue

if TYPE_CHECKING:
    Floats: TypeAlias = array[float]

#: Bytes/s of a worker that joins the activations of a batch and copies them to its device (Helix: 4 and 5
#: GB/s).
COPY_BYTES_PER_S: Final = 1.0 / (1.0 / 4e9 + 1.0 / 5e9)
#: Seconds between an event and the query of an offline load it calls for.
FEED_DELAY_S: Final = 0.1
#: Length of a prompt in passes of a decode, in a cluster that begins full.
_PROMPT_PASSES: Final = 20
#: Requests between checks of the fill of a cluster that begins full; seed of its answers' positions.
_FILL_LOOK_REQUESTS: Final = 8
_FILL_SEED: Final = 1

# Order of events at the same instant.
_TOKEN, _BATCH_END, _WAKE, _ARRIVAL = range(4)


@dataclass(eq=False, slots=True)
class _Nic:
    """One direction of a network card."""

    seconds_per_byte: float
    free_at: float = 0.0


@dataclass(eq=False, slots=True)
class _Link:
    """A connection from one sender to one receiver."""

    seconds_per_token: float
    latency_s: float
    nic_out: _Nic
    nic_in: _Nic
    free_at: float = 0.0
    #: Send time and arrival time of the coordinator's last frame.
    frame_sent_at: float = -1.0
    frame_arrives_at: float = 0.0


@dataclass(eq=False, slots=True)
class _Flight:
    """One request on its path. `tokens` of this pass: the prompt at first, then one; `cached` before it."""

    lease: PathLease
    nodes: list[_Node]
    links: list[_Link]
    output_tokens: int
    tokens: int
    pass_at: float
    #: Layers it computes at each node.
    layers: list[int]
    cached: int = 0
    position: int = 0
    sent_at: float = 0.0


class _Node:
    """A stage: arrived requests, the queue of each segment, the running batch."""

    __slots__ = (
        "batch", "busy_s", "copied_tokens", "decode_s", "entry", "inbox", "kv_peak", "kv_used", "prompt_s",
        "segment", "segments", "spec", "waiting", "wake_at",
    )  # fmt: skip

    def __init__(self, spec: StageSpec, entries: Sequence[int]) -> None:
        self.spec = spec
        #: Layers of each segment, and the segment of each first layer.
        bounds = [*entries, spec.end]
        self.segments = [end - first for first, end in pairwise(bounds)]
        self.entry = {first: i for i, first in enumerate(entries)}
        self.prompt_s = spec.prompt.table(1)
        self.decode_s = spec.decode.table(1)
        self.inbox: list[tuple[float, int, _Flight]] = []
        self.waiting: list[deque[_Flight]] = [deque() for _ in entries]
        self.segment = 0
        self.batch: list[_Flight] = []
        self.busy_s = 0.0
        self.wake_at = float("inf")
        self.copied_tokens = 0
        #: Token-layers held now, and the most there were.
        self.kv_used = 0
        self.kv_peak = 0

    def layer_s(self, prompt_tokens: int, decodes: int) -> float:
        """Return the time of one layer on a batch."""
        if prompt_tokens >= len(self.prompt_s):
            self.prompt_s = self.spec.prompt.table(2 * prompt_tokens + 1)
        if decodes >= len(self.decode_s):
            self.decode_s = self.spec.decode.table(2 * decodes + 1)
        time_s = self.decode_s[decodes]
        return self.prompt_s[prompt_tokens] + (2.0 * time_s if decodes == 1 else time_s)

    def collect(self, now: float) -> None:
        """Move arrived requests to the segments they enter."""
        inbox, waiting = self.inbox, self.waiting
        tokens = 0
        if len(waiting) == 1:
            enter = waiting[0].append
            while inbox and inbox[0][0] <= now:
                flight = heapq.heappop(inbox)[2]
                enter(flight)
                tokens += flight.tokens
        else:
            while inbox and inbox[0][0] <= now:
                flight = heapq.heappop(inbox)[2]
                waiting[self.entry[flight.lease.hops[flight.position].first]].append(flight)
                tokens += flight.tokens
        self.copied_tokens += tokens

    def form(self) -> tuple[int, int]:
        """Take a batch from the present segment. Return its prompt tokens and decodes."""
        limits = self.spec.batch
        left: deque[_Flight] = deque()
        prompts = prompt_tokens = decodes = context = 0
        for flight in self.waiting[self.segment]:
            tokens, cached = flight.tokens, flight.cached
            if cached:
                fits = decodes < limits.decodes and context + cached <= limits.decode_context
                if takes := fits or not decodes:
                    decodes += 1
                    context += cached
            else:
                fits = prompts < limits.prompts and prompt_tokens + tokens <= limits.prompt_tokens
                if takes := fits or not prompts:
                    prompts += 1
                    prompt_tokens += tokens
            (self.batch if takes else left).append(flight)
        self.waiting[self.segment] = left
        return prompt_tokens, decodes

    def next_segment(self) -> bool:
        """Turn to the next segment with something to do, the present one last; False if none has."""
        count = len(self.segments)
        for step in range(1, count + 1):
            segment = (self.segment + step) % count
            if self.waiting[segment]:
                self.segment = segment
                return True
        return False


@dataclass(slots=True)
class PassTimes:
    """Seconds of every pass of one kind that ended in the measured window."""

    seconds: Floats = field(default_factory=lambda: array("f"))

    def percentile(self, share: float) -> float:
        """Return the value at index floor(n * share) of the sorted passes (Helix's definition); 0 of none."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0

    @property
    def mean(self) -> float:
        """Mean seconds, 0 of none."""
        return sum(self.seconds) / len(self.seconds) if self.seconds else 0.0

    def document(self) -> dict[str, float]:
        """Return the JSON of it."""
        if not self.seconds:
            return {}
        return {"mean": self.mean, **{f"p{p}": self.percentile(p / 100) for p in (5, 25, 50, 75, 95)}}


@dataclass(slots=True)
class PipelineResult:
    """Figures of a run, over its measured window."""

    window_s: float
    output_tokens: int = 0
    prompt_tokens: int = 0
    completed: int = 0
    rejected: int = 0
    unfinished: int = 0
    most_in_flight: int = 0
    prompts: PassTimes = field(default_factory=PassTimes)
    decodes: PassTimes = field(default_factory=PassTimes)
    #: By stage: busy share of the window; peak token-layers held, as a share of its capacity.
    busy: dict[str, float] = field(default_factory=dict)
    kv_peak: dict[str, float] = field(default_factory=dict)

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.window_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens per second."""
        return (self.output_tokens + self.prompt_tokens) / self.window_s

    def document(self) -> dict[str, Any]:
        """Return the JSON of it, unrounded."""
        return {
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
            "completed": self.completed,
            "rejected": self.rejected,
            "unfinished": self.unfinished,
            "most_in_flight": self.most_in_flight,
            "prompt_latency_s": self.prompts.document(),
            "decode_latency_s": self.decodes.document(),
            "kv_peak": self.kv_peak,
            "busy": self.busy,
        }


@dataclass(frozen=True, slots=True)
class OfflineLoad:
    """Load that fills the cluster: `initial` queries at first, 0.1 s apart.

    One more comes whenever a prompt or a query is done while the booked KV of the fullest layer is at most
    `high_water`, or, with `constant`, whenever a query is.
    """

    initial: int = 20
    high_water: float = 0.8
    constant: bool = False


class PipelineSimulation:
    """One run: a network of stages, a scheduler, a load."""

    def __init__(
        self,
        network: StageNetwork,
        scheduler: PathScheduler,
        lengths: Iterator[tuple[int, int]],
        *,
        frames: bool = False,
        watch: Callable[[PathLease], object] | None = None,
    ) -> None:
        """`lengths` gives prompt and output tokens of each request; `watch` is told every lease.

        A run ends at its deadline (`deadline.py`); the result covers the window until then. With `frames` all
        that a batch has for one receiver travels together, as `hetlb stage` sends it; else every request is
        a message of its own (Helix).
        """
        self._network = network
        self._scheduler = scheduler
        self._lengths = lengths
        self._activation_bytes = network.activation_bytes
        self._copy_s = network.activation_bytes / COPY_BYTES_PER_S
        self._frames = frames
        self._watch = watch
        self._nodes = {stage.name: _Node(stage, _entries(network, stage)) for stage in network.stages}
        self._nics_out = {stage.name: _Nic(1.0 / stage.nic_out_bytes_per_s) for stage in network.stages}
        self._nics_in = {stage.name: _Nic(1.0 / stage.nic_in_bytes_per_s) for stage in network.stages}
        self._nics_out[SOURCE] = self._nics_in[SINK] = _Nic(0.0)
        self._links: dict[Edge, _Link] = {}
        self._events = EventQueue()
        self._delivered = 0
        #: Time of arrival and output tokens of open requests.
        self._open: dict[int, tuple[float, int]] = {}
        self._requests = 0
        self._load: OfflineLoad | None = None
        self._begin = self._end = 0.0
        self._taken = 0
        self._result = PipelineResult(1.0)
        self._reads_hops = scheduler.reads_hops

    def run_offline(
        self, load: OfflineLoad, *, warm_up_s: float, measured_s: float, filled: bool = False
    ) -> PipelineResult:
        """Keep the cluster full, and measure behind the warm-up.

        `filled`: begin with as many answers under way as the load takes, so that a short warm-up is enough.
        """
        self._load = load
        if filled:
            self._fill(load)
        else:
            for i in range(load.initial):
                self._events.push(i * FEED_DELAY_S, _ARRIVAL, None)
        return self._run(warm_up_s, warm_up_s + measured_s)

    def extend(self, measured_s: float) -> PipelineResult:
        """Go on with a run that was not stopped, until its window is that long; return the same result."""
        self._end = self._begin + measured_s
        self._result.window_s = measured_s
        return self._go_on()

    def _fill(self, load: OfflineLoad) -> None:
        """Begin answers with their prompts already computed, each at a random position.

        Long answers are more likely than short ones.
        """
        rng = random.Random(_FILL_SEED)
        scheduler, longest = self._scheduler, 1
        while not scheduler.waiting and (lengths := next(self._lengths, None)) is not None:
            prompt, output = lengths[0], max(1, lengths[1])
            longest = max(longest, output)
            if rng.random() * longest > output:
                continue
            self._requests += 1
            self._open[self._requests] = 0.0, output
            request = Request(self._requests, "", prompt, prompt_exact=True)
            for command in scheduler.on_arrival(request, 0.0):
                if isinstance(command, Reject):
                    del self._open[command.request_id]
                    continue
                done = max(0, rng.randrange(output + _PROMPT_PASSES) - _PROMPT_PASSES)
                self._go_on_with(command, output, done, rng.randrange(len(command.hops)))
            if self._requests % _FILL_LOOK_REQUESTS == 0 and scheduler.kv_usage() > load.high_water:
                break
        for _ in range(_FILL_LOOK_REQUESTS):
            self._events.push(FEED_DELAY_S, _ARRIVAL, None)

    def _go_on_with(self, lease: PathLease, output_tokens: int, done: int, position: int) -> None:
        """Begin an answer with its first `done` tokens already generated, at a stage of its path.

        With `done` 0 its prompt is under way. If all answers began at the first stage, they would go round as
        one batch for minutes.
        """
        flight = self._flight(lease, output_tokens, 0.0)
        if done:
            lease.output_tokens = done
            flight.cached, flight.tokens = lease.context_tokens + done - 1, 1
            self._obey(self._scheduler.on_first_token(lease, 0.0), 0.0)
        for at, (node, layers) in enumerate(zip(flight.nodes, flight.layers, strict=True)):
            node.kv_used += (flight.cached + (flight.tokens if at < position else 0)) * layers
        if not position:
            self._start_pass(flight, 0.0)
            return
        flight.position = position
        self._deliver(flight, flight.nodes[position], 0.0)

    def run_online(
        self, arrivals_s: Sequence[float], *, measured_s: float, warm_up_s: float = 0.0
    ) -> PipelineResult:
        """Return requests at given times; ones not done when the window ends are counted as unfinished."""
        for at in arrivals_s:
            self._events.push(at, _ARRIVAL, None)
        return self._run(warm_up_s, warm_up_s + measured_s)

    # --- events ---

    def _run(self, begin: float, end: float) -> PipelineResult:
        self._begin, self._end = begin, end
        self._result = PipelineResult(end - begin)
        return self._go_on()

    def _go_on(self) -> PipelineResult:
        """Take events until the end of the window."""
        events, begin, end = self._events, self._begin, self._end
        while (event := events.pop(end)) is not None:
            now, kind, _, what = event
            self._taken += 1
            if self._taken % LOOK_EVENTS == 0 and is_over():
                self._result.window_s = max(0.0, now - begin)
                break
            if kind == _TOKEN:
                self._token(what, now)
            elif kind == _BATCH_END:
                self._batch_ended(what, now)
            elif kind == _WAKE:
                if not what.batch and what.wake_at == now:
                    self._begin_batch(what, now)
            else:
                self._arrive(now)
        result = self._result
        result.unfinished = len(self._open)
        for name, node in self._nodes.items():
            result.busy[name] = node.busy_s / result.window_s if result.window_s else 0.0
            result.kv_peak[name] = node.kv_peak / node.spec.kv_token_layers
        return result

    def _arrive(self, now: float) -> None:
        lengths = next(self._lengths, None)
        if lengths is None:
            return
        self._requests += 1
        self._open[self._requests] = now, max(1, lengths[1])
        request = Request(self._requests, "", lengths[0], prompt_exact=True)
        self._obey(self._scheduler.on_arrival(request, now), now)
        self._result.most_in_flight = max(self._result.most_in_flight, self._scheduler.in_flight)

    def _obey(self, commands: list[PathCommand], now: float) -> None:
        for command in commands:
            if isinstance(command, Reject):
                del self._open[command.request_id]
                self._result.rejected += 1
                continue
            if self._watch is not None:
                self._watch(command)
            arrived_at, output_tokens = self._open[command.request.id]
            self._start_pass(self._flight(command, output_tokens, arrived_at), now)

    def _flight(self, lease: PathLease, output_tokens: int, arrived_at: float) -> _Flight:
        nodes = [self._nodes[hop.stage] for hop in lease.hops]
        links = [self._link(edge) for edge in lease.edges]
        layers = [hop.layers for hop in lease.hops]
        return _Flight(lease, nodes, links, output_tokens, lease.context_tokens, arrived_at, layers)

    def _link(self, edge: Edge) -> _Link:
        link = self._links.get(edge)
        if link is None:
            spec = self._network.links[edge]
            size = self._network.message_bytes(*edge)
            nics = self._nics_out[edge[0]], self._nics_in[edge[1]]
            link = self._links[edge] = _Link(size / spec.bytes_per_s, spec.latency_s, *nics)
        return link

    def _send(self, flight: _Flight, link: _Link, now: float) -> float:
        """Put a message on a link; returns when it is there."""
        tokens = flight.tokens
        nic_out, nic_in = link.nic_out, link.nic_in
        size = tokens * self._activation_bytes
        start, out, into = now, nic_out.free_at, nic_in.free_at
        if out > start:
            start = out
        else:
            out = now
        if link.free_at > start:
            start = link.free_at
        if into > start:
            start = into
        elif into < now:
            into = now
        nic_out.free_at = out + size * nic_out.seconds_per_byte
        nic_in.free_at = into + size * nic_in.seconds_per_byte
        link.free_at = done = start + tokens * link.seconds_per_token
        flight.sent_at = now
        return done + link.latency_s

    def _start_pass(self, flight: _Flight, now: float) -> None:
        flight.position = 0
        link = flight.links[0]
        arrives_at = self._send(flight, link, now)
        if self._frames:  # ids are small: the frame is there when its first message is
            if link.frame_sent_at == now:
                arrives_at = link.frame_arrives_at
            link.frame_sent_at, link.frame_arrives_at = now, arrives_at
        self._deliver(flight, flight.nodes[0], arrives_at)

    def _deliver(self, flight: _Flight, node: _Node, at: float) -> None:
        self._delivered += 1
        heapq.heappush(node.inbox, (at, self._delivered, flight))
        if not node.batch and at < node.wake_at:
            node.wake_at = at
            self._events.push(at, _WAKE, node)

    def _begin_batch(self, node: _Node, now: float) -> None:
        """Run the next batch, or sleep until something arrives."""
        node.collect(now)
        if not node.waiting[node.segment] and not node.next_segment():
            node.wake_at = float("inf")
            if node.inbox:
                node.wake_at = node.inbox[0][0]
                self._events.push(node.wake_at, _WAKE, node)
            return
        time_s = node.segments[node.segment] * node.layer_s(*node.form())
        if node.segment == 0:
            time_s += node.copied_tokens * self._copy_s
            node.copied_tokens = 0
        if now >= self._begin:
            node.busy_s += min(time_s, self._end - now)
        self._events.push(now + time_s, _BATCH_END, node)

    def _batch_ended(self, node: _Node, now: float) -> None:
        segment = node.segment
        batch, node.batch = node.batch, []
        if segment + 1 < len(node.segments):
            node.waiting[segment + 1].extend(batch)
        else:
            self._pass_on(batch, node, now)
            node.kv_peak = max(node.kv_peak, node.kv_used)
        node.collect(now)
        node.next_segment()
        self._begin_batch(node, now)

    def _pass_on(self, batch: list[_Flight], node: _Node, now: float) -> None:
        """Send a batch's results to the next stages and to the sink."""
        arrivals = [self._leave(flight, node, now) for flight in batch]
        if not self._frames:
            events, delivered = self._events, self._delivered
            for flight, arrives_at in zip(batch, arrivals, strict=True):
                if flight.position == len(flight.nodes):
                    events.push(arrives_at, _TOKEN, flight)
                    continue
                receiver = flight.nodes[flight.position]
                delivered += 1
                heapq.heappush(receiver.inbox, (arrives_at, delivered, flight))
                if not receiver.batch and arrives_at < receiver.wake_at:
                    receiver.wake_at = arrives_at
                    events.push(arrives_at, _WAKE, receiver)
            self._delivered = delivered
            return
        last: dict[_Link, float] = {}
        for flight, arrives_at in zip(batch, arrivals, strict=True):
            link = flight.links[flight.position]
            last[link] = max(last.get(link, 0.0), arrives_at)
        arrivals = [last[flight.links[flight.position]] for flight in batch]
        for flight, arrives_at in zip(batch, arrivals, strict=True):
            if flight.position < len(flight.nodes):
                self._deliver(flight, flight.nodes[flight.position], arrives_at)
            else:
                self._events.push(arrives_at, _TOKEN, flight)

    def _leave(self, flight: _Flight, node: _Node, now: float) -> float:
        """Send a flight from a stage on; return when it is at the next one."""
        position = flight.position
        node.kv_used += flight.tokens * flight.layers[position]
        if self._reads_hops:
            self._scheduler.on_hop(*flight.lease.edges[position], now - flight.sent_at)
        flight.position = position + 1
        return self._send(flight, flight.links[position + 1], now)

    def _token(self, flight: _Flight, now: float) -> None:
        lease, result = flight.lease, self._result
        first = flight.cached == 0
        lease.output_tokens += 1
        if now >= self._begin:
            result.output_tokens += 1
            (result.prompts if first else result.decodes).seconds.append(now - flight.pass_at)
            if first:
                result.prompt_tokens += flight.tokens
        flight.cached += flight.tokens
        flight.tokens = 1
        if first:
            self._obey(self._scheduler.on_first_token(lease, now), now)
        done = lease.output_tokens >= flight.output_tokens
        if done:
            self._finish(flight, now)
        else:
            flight.pass_at = now
            self._start_pass(flight, now)
        if self._load is not None and (first or done):
            self._feed(self._load, now, done=done)

    def _finish(self, flight: _Flight, now: float) -> None:
        for node, layers in zip(flight.nodes, flight.layers, strict=True):
            node.kv_used -= flight.cached * layers
        del self._open[flight.lease.request.id]
        if now >= self._begin:
            self._result.completed += 1
        self._obey(self._scheduler.on_lease_ended(flight.lease, Outcome.OK, now), now)

    def _feed(self, load: OfflineLoad, now: float, *, done: bool) -> None:
        if load.constant:
            more = done
        else:
            more = not self._scheduler.waiting and self._scheduler.kv_usage() <= load.high_water
        if more:
            self._events.push(now + FEED_DELAY_S, _ARRIVAL, None)


def _entries(network: StageNetwork, stage: StageSpec) -> list[int]:
    """Return the entry layers of a stage: its first layer, and ends of other stages inside it."""
    if not network.partial_inference:
        return [stage.first]
    inner = {other.end for other in network.stages if stage.first < other.end < stage.end}
    return [stage.first, *sorted(inner)]
