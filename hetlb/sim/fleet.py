"""The simulator's driver: the production scheduler and one engine model per instance, in virtual time.

Promise: the scheduler is the very object the proxy drives; a run depends on nothing but its arguments
(same seed, same result); every planned request ends in exactly one record. Time is a heap of events;
ties are broken by kind, then by order of creation.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetlb.core.arrivals import PlannedRequest
from hetlb.core.latency import IterationRule, LatencyModel
from hetlb.core.records import Gaps, RequestRecord, summarize
from hetlb.core.scheduler import Scheduler
from hetlb.core.setup import SchedulerSetup
from hetlb.core.types import (
    Command,
    Dispatch,
    EngineSample,
    HealthChanged,
    Lease,
    Outcome,
    Reject,
    Request,
)
from hetlb.sim.contents import Named
from hetlb.sim.engine import Ended, EngineLimits, EngineModel, Stretch
from hetlb.sim.engine import Sequence as EngineSequence
from hetlb.sim.series import Series

#: Simulated engines are scraped as often as real ones by default.
SCRAPE_INTERVAL_S = 1.0

# Order of events at the same instant: work ends, then the world changes, then engines begin anew, so that
# requests that arrive together are in the same batch. A look at the fleet comes last: it changes nothing.
_END, _ARRIVAL, _CHANGE, _SUBMIT, _SCRAPE, _TICK, _BEGIN, _LOOK = range(8)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One simulated engine: how fast it is and what it holds.

    `request_overhead_s` is what its server takes to read a request and pass it on, before the engine has it.
    `changes` are pairs of a time (s) and a factor: iterations begun from then on take so many times as long.
    """

    latency: LatencyModel
    limits: EngineLimits
    request_overhead_s: float = 0.0
    changes: tuple[tuple[float, float], ...] = ()


class _Flight:
    """One planned request on its way."""

    __slots__ = ("lease", "outcome", "paused_s", "planned", "record")

    def __init__(self, planned: PlannedRequest) -> None:
        self.planned = planned
        self.record = RequestRecord(planned.scheduled_s, planned.prompt_tokens)
        self.lease: Lease | None = None
        self.outcome: Outcome | None = None
        #: When it got its last token before it was preempted.
        self.paused_s = 0.0


@dataclass(slots=True)
class FleetResult:
    """What a run gives: a record per planned request, in plan order, and counts per instance."""

    records: list[RequestRecord]
    outcomes: list[Outcome]
    gaps: Gaps
    preemptions: dict[str, int]
    kv_peak: dict[str, float]
    #: With prefix caches: prompt tokens found there, and computed.
    prefix_hits: dict[str, tuple[int, int]] | None = None

    def summary(self) -> dict[str, Any]:
        """The figures of the run, as `vllm bench serve` names them.

        With prefix caches every instance has `prefix_hit_tokens` and `prefilled_tokens` too.
        """
        found = summarize(
            self.records,
            self.gaps,
            instances=self.preemptions,
            preemptions=self.preemptions,
            kv_peak=self.kv_peak,
        )
        if self.prefix_hits is not None:
            for entry in found["instances"]:
                hit, computed = self.prefix_hits[entry["name"]]
                entry |= {"prefix_hit_tokens": hit, "prefilled_tokens": computed}
        return found


class _Engine:
    """An engine model and the iterations it has in flight."""

    __slots__ = ("begin_pending", "model", "name", "overhead_s", "started_s", "version")

    def __init__(self, name: str, spec: EngineSpec, rule: IterationRule, prefix_cache: bool) -> None:
        self.name = name
        self.model = EngineModel(spec.latency, spec.limits, rule, prefix_cache=prefix_cache)
        self.overhead_s = spec.request_overhead_s
        self.started_s = 0.0
        self.version = 0
        self.begin_pending = False


class FleetSimulation:
    """One run. `engines` has an entry for every instance of the set-up, by name.

    `series` is filled while the run goes on; `on_progress` is told how many requests have ended, once per
    simulated second. The clock begins at `start_s`; nothing of the plan is due before. With `contents`, one
    for every index of the plan, the engines have prefix caches.
    """

    def __init__(
        self,
        setup: SchedulerSetup,
        engines: Mapping[str, EngineSpec],
        plan: Sequence[PlannedRequest],
        *,
        model: str,
        rule: IterationRule = IterationRule.TOKEN,
        series: Series | None = None,
        on_progress: Callable[[int], None] | None = None,
        start_s: float = 0.0,
        contents: Sequence[Named] | None = None,
    ) -> None:
        oracle = {planned.index: max(1, planned.output_tokens) for planned in plan}
        self.scheduler: Scheduler = Scheduler(setup, oracle=oracle)
        self._engines = {
            spec.name: _Engine(spec.name, engines[spec.name], rule, contents is not None)
            for spec in setup.specs
        }
        self._contents = contents
        self._model = model
        self._series = series
        self._on_progress = on_progress
        self._flights = [_Flight(planned) for planned in plan]
        self._by_id = {flight.planned.index: flight for flight in self._flights}
        self._gaps = Gaps()
        self._heap: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._now = start_s
        self._open = len(plan)
        self._tick_pending = False
        for name, spec in engines.items():
            for at_s, factor in spec.changes:
                self._push(at_s, _CHANGE, (self._engines[name], spec.latency.scaled(factor)))

    def run(self) -> FleetResult:
        """Simulate until every request has ended."""
        self._push_arrival(0)
        self._push(self._now, _SCRAPE, None)
        if self._series is not None:
            self._push(self._now, _LOOK, self._series)
        handlers: dict[int, Callable[[Any], None]] = {
            _END: self._on_end,
            _ARRIVAL: self._on_arrival,
            _CHANGE: self._on_change,
            _SUBMIT: self._on_submit,
            _SCRAPE: self._on_scrape,
            _TICK: self._on_tick,
            _BEGIN: self._on_begin,
            _LOOK: self._on_look,
        }
        while self._open and self._heap:
            self._now, kind, _, payload = heapq.heappop(self._heap)
            handlers[kind](payload)
        assert self._open == 0, f"{self._open} requests never ended"
        self.scheduler.check_integrity()
        return FleetResult(
            [flight.record for flight in self._flights],
            [flight.outcome for flight in self._flights if flight.outcome is not None],
            self._gaps,
            {name: engine.model.preemptions for name, engine in self._engines.items()},
            {
                name: engine.model.kv_peak_blocks / engine.model.kv_total_blocks
                for name, engine in self._engines.items()
            },
            None
            if self._contents is None
            else {
                name: (engine.model.prefix_hit_tokens, engine.model.prefilled_tokens)
                for name, engine in self._engines.items()
            },
        )

    def make_request(self, planned: PlannedRequest) -> Request:
        """What the scheduler is told of a planned request: its prompt length, and what it begins with."""
        return Request(
            id=planned.index,
            model=self._model,
            prompt_tokens=planned.prompt_tokens,
            longest_prompt_tokens=planned.prompt_tokens,
            prompt_exact=True,
            beginnings=() if self._contents is None else self._contents[planned.index].beginnings,
        )

    # --- events ---

    def _push(self, when: float, kind: int, payload: object) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (when, kind, self._sequence, payload))

    def _push_arrival(self, index: int) -> None:
        if index < len(self._flights):
            self._push(self._flights[index].planned.scheduled_s, _ARRIVAL, index)

    def _on_arrival(self, index: int) -> None:
        request = self.make_request(self._flights[index].planned)
        self._carry_out(self.scheduler.on_arrival(request, self._now))
        self._push_arrival(index + 1)

    def _on_change(self, payload: tuple[_Engine, LatencyModel]) -> None:
        engine, latency = payload
        engine.model.latency = latency
        if engine.model.in_flight is not None:  # what is in flight ends with the iteration that runs now
            self._schedule_end(engine, engine.model.cut(self._now - engine.started_s))

    def _on_scrape(self, _: None) -> None:
        for name, engine in self._engines.items():
            model = engine.model
            sample = EngineSample(model.running, model.waiting, model.kv_usage)
            self._carry_out(self.scheduler.on_scrape(name, sample, self._now))
        self._push(self._now + SCRAPE_INTERVAL_S, _SCRAPE, None)
        if self._on_progress is not None:
            self._on_progress(len(self._flights) - self._open)

    def _on_look(self, series: Series) -> None:
        series.begin(self._now, len(self.scheduler.queue))
        for name, engine in self._engines.items():
            model = engine.model
            used = model.kv_used_blocks_at(self._now - engine.started_s)
            series.instances[name].add(used / model.kv_total_blocks, model.waiting, model.running)
        self._push(series.end(), _LOOK, series)

    def _on_tick(self, _: None) -> None:
        self._tick_pending = False
        self._carry_out(self.scheduler.on_tick(self._now))

    def _on_begin(self, engine: _Engine) -> None:
        engine.begin_pending = False
        stretch = engine.model.begin_stretch()
        if stretch is not None:
            engine.started_s = self._now
            self._schedule_end(engine, stretch)

    def _schedule_end(self, engine: _Engine, stretch: Stretch) -> None:
        engine.version += 1
        self._push(engine.started_s + stretch.duration_s, _END, (engine, engine.version))

    def _on_end(self, payload: tuple[_Engine, int]) -> None:
        engine, version = payload
        if version != engine.version:
            return  # the stretch was cut meanwhile
        ended = engine.model.end_iteration()
        self._count_gaps(engine, ended)
        self._wake(engine)
        now = self._now
        for sequence in ended.first:
            flight: _Flight = sequence.tag
            flight.record.first_token_s = now
            assert flight.lease is not None
            self._carry_out(self.scheduler.on_first_token(flight.lease, now))
        for sequence in ended.finished:
            flight = sequence.tag
            assert flight.lease is not None
            flight.lease.output_tokens = flight.record.output_tokens = sequence.output_tokens
            flight.record.last_token_s = now
            self._close(flight, Outcome.OK)
            self._carry_out(self.scheduler.on_lease_ended(flight.lease, Outcome.OK, now))

    def _count_gaps(self, engine: _Engine, ended: Ended) -> None:
        stretch = ended.stretch
        if stretch.decodes:
            self._gaps.add(stretch.first_s, stretch.increment_s, stretch.steps, stretch.decodes)
        for sequence in ended.preempted:
            sequence.tag.paused_s = engine.started_s
        for sequence in ended.resumed:
            self._gaps.add(self._now - sequence.tag.paused_s)

    # --- commands ---

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Dispatch):
                self._dispatch(command)
            elif isinstance(command, Reject):
                self._close(self._by_id[command.request_id], Outcome.BAD_REQUEST)
            else:
                assert isinstance(command, HealthChanged), command
        if not self._tick_pending and (deadline := self.scheduler.next_deadline()) is not None:
            self._tick_pending = True
            self._push(max(deadline, self._now), _TICK, None)

    def _dispatch(self, command: Dispatch) -> None:
        lease = command.lease
        flight = self._by_id[command.request_id]
        flight.lease, flight.record.instance = lease, lease.instance
        engine = self._engines[lease.instance]
        planned = flight.planned
        output = max(1, planned.output_tokens)
        if not engine.model.fits(planned.prompt_tokens, output):
            # A real engine would cut the answer at its context length: not what the trace asks for.
            self._close(flight, Outcome.UPSTREAM_ERROR)
            self._carry_out(self.scheduler.on_lease_ended(lease, Outcome.UPSTREAM_ERROR, self._now))
            return
        if self._contents is None:
            sequence = EngineSequence(planned.prompt_tokens, output, flight)
        else:
            named = self._contents[planned.index]
            sequence = EngineSequence(
                planned.prompt_tokens, output, flight, pieces=named.pieces, answer=named.answer
            )
        if engine.overhead_s > 0:
            self._push(self._now + engine.overhead_s, _SUBMIT, (engine, sequence))
        else:
            self._on_submit((engine, sequence))

    def _on_submit(self, payload: tuple[_Engine, EngineSequence]) -> None:
        engine, sequence = payload
        interrupts = engine.model.in_flight is not None and not engine.model.admission_blocked
        engine.model.submit(sequence, self._now - engine.started_s)
        if interrupts:
            self._schedule_end(engine, engine.model.cut(self._now - engine.started_s, for_arrival=True))
        self._wake(engine)

    def _wake(self, engine: _Engine) -> None:
        if engine.model.in_flight is None and not engine.begin_pending:
            engine.begin_pending = True
            self._push(self._now, _BEGIN, engine)

    def _close(self, flight: _Flight, outcome: Outcome) -> None:
        assert flight.outcome is None, f"request {flight.planned.index} ended twice"
        flight.outcome = outcome
        flight.record.ok = outcome is Outcome.OK
        self._open -= 1
