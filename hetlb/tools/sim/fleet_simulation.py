"""The simulator's driver: the production scheduler and one engine model per instance, in virtual time.

The scheduler is the very object the proxy drives; a run depends on nothing but its arguments
(same seed, same result); every planned request ends in exactly one record.

A request that the scheduler splits runs twice: on the prefill engine for one token, with its blocks then
held, and on the decode engine, which fetches them over `KvLinks`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.facts import EngineSample, ModelsLearned
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.objective import UNSTATED, ServiceClass
from hetlb.balancer.core.predictor import Predictor, make_predictor
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import (
    Command,
    Dispatch,
    HealthChanged,
    InstanceSpec,
    Outcome,
    Reject,
    RejectReason,
    Request,
    Role,
)
from hetlb.options.split.hand_overs import HandOvers
from hetlb.tools.sim.deadline import LOOK_EVENTS, look
from hetlb.tools.sim.engine_sequence import SequenceState
from hetlb.tools.sim.event_queue import EventQueue
from hetlb.tools.sim.fleet_engine import (
    ARRIVAL,
    BEGIN,
    CHANGE,
    END,
    EXPIRED,
    FETCHED,
    LOOK,
    RESTART,
    SCRAPE,
    SUBMIT,
    TICK,
    EngineSpec,
    FleetEngine,
)
from hetlb.tools.sim.fleet_result import FleetMoment, FleetResult, FleetSeries
from hetlb.tools.sim.flights import EngineRun, Flight, leg_sequences
from hetlb.tools.sim.integrity import check_scheduler
from hetlb.tools.sim.iteration_times import IterationEnd, IterationRule
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.records import Counted, Gaps
from hetlb.tools.workload.rows import UNSHARED


@dataclass(frozen=True, slots=True)
class KvPath:
    """Links from one instance to another, with the bytes per token that each of them carries."""

    parts: tuple[tuple[Hashable, float], ...]
    latency_s: float = 0.0


@dataclass(slots=True)
class KvLinks:
    """Shared links of a fleet: each carries one transfer after the other, at its whole rate.

    `rates` in bytes/s; `paths` by names of source and target. What is sent over several links at once (stages
    on several machines) has arrived when the last part has.
    """

    rates: Mapping[Hashable, float]
    paths: Mapping[tuple[str, str], KvPath]
    _free_at: dict[Hashable, float] = field(default_factory=dict)

    def send(self, source: str, target: str, tokens: int, now: float) -> float:
        """Begin a KV transfer of `tokens` tokens; returns its arrival time."""
        path = self.paths[source, target]
        arrived = now
        for link, bytes_per_token in path.parts:
            done = max(now, self._free_at.get(link, 0.0)) + bytes_per_token * tokens / self.rates[link]
            self._free_at[link] = done
            arrived = max(arrived, done)
        return arrived + path.latency_s


def own_links(specs: Sequence[InstanceSpec]) -> KvLinks:
    """Return a link for every pair of instances, as the one that fetches describes it."""
    paths: dict[tuple[str, str], KvPath] = {}
    rates: dict[Hashable, float] = {}
    for target in specs:
        if (link := target.kv_transfer) is None:
            continue
        for source in specs:
            pair = source.name, target.name
            paths[pair] = KvPath(((pair, link.bytes_per_token),), link.latency_s)
            rates[pair] = link.bandwidth_bytes_per_s
    return KvLinks(rates, paths)


#: Seconds between scrapes of simulated engines, by default as of real ones.
SCRAPE_INTERVAL_S: Final = 1.0
#: Last seconds of an idle time that have all their scrapes.
_IDLE_S: Final = 600.0

#: States of a sequence that its engine has, without a token.
_WITHOUT_TOKEN: Final = (SequenceState.WAITING, SequenceState.PREFILL)
#: Outcome of a request that the scheduler rejects; any other reason is the request's own fault.
_REJECTED = {
    RejectReason.QUEUE_FULL: Outcome.REJECTED_FULL,
    RejectReason.QUEUE_EXPIRED: Outcome.EXPIRED_QUEUE,
    RejectReason.NO_INSTANCE: Outcome.NO_INSTANCE,
}


@mypyc_attr(allow_interpreted_subclasses=True)
class FleetSimulation:
    """One run. `engines` has an entry for every instance of the set-up, by name.

    `series` is filled meanwhile. The clock begins at `start_s`; nothing of the plan is due before. At each of
    `restarts_s` the proxy is replaced. From then on a new scheduler, which knows nothing, takes the arrivals;
    the old one serves its requests to the end. The first scheduler has seen the answers of `history`.
    `classes` are the requests' by name, the default first. `links` carry KV caches between the instances;
    without them every pair has a link of its own, as the decode instance's `kv_transfer` describes it. A run
    raises `StoppedError` at its deadline (`deadline.py`).
    """

    def __init__(
        self,
        setup: SchedulerSetup,
        engines: Mapping[str, EngineSpec],
        plan: Sequence[PlannedRequest],
        *,
        model: str,
        rule: IterationRule = IterationRule.TOKEN,
        series: FleetSeries | None = None,
        start_s: float = 0.0,
        restarts_s: Sequence[float] = (),
        history: Sequence[PlannedRequest] = (),
        links: KvLinks | None = None,
        classes: Mapping[str, ServiceClass] | None = None,
    ) -> None:
        setup = self._setup = _choosing_ranks(setup, engines)
        self._events = EventQueue(start_s)
        self._classes = classes or {}
        self._default_class = next(iter(self._classes.values()), UNSTATED)
        self._links = links if links is not None else own_links(setup.specs)
        self._transfers = self._expired = 0
        self._model = model
        self._oracle = {planned.index: max(1, planned.output_tokens) for planned in plan}
        #: The scheduler that takes new arrivals, and replaced ones that still have requests.
        self.scheduler: Scheduler = Scheduler(
            setup,
            oracle=self._oracle,
            predictor=self._taught(history) if history else None,
            splitting=HandOvers,
        )
        self._replaced: list[Scheduler] = []
        #: Engines of each instance: several of a data-parallel server.
        self._engines = {
            spec.name: [
                FleetEngine(spec.name, engines[spec.name], rule, self._events)
                for _ in range(engines[spec.name].ranks)
            ]
            for spec in setup.specs
        }
        self._series = series
        self._flights = [Flight(planned) for planned in plan]
        self._by_id = {flight.planned.index: flight for flight in self._flights}
        self._gaps = Gaps()
        #: LoRA adapters of the plan: every engine lists them all.
        self._adapters = tuple(sorted({planned.row.adapter for planned in plan if planned.row.adapter}))
        self._list_adapters(self.scheduler)
        self._open = len(plan)
        self._ticks: set[Scheduler] = set()  # schedulers with a tick ahead
        self._handlers: dict[int, Callable[[Any], None]] = {
            END: self._on_end,
            FETCHED: self._on_fetched,
            EXPIRED: self._release_held,
            ARRIVAL: self._on_arrival,
            CHANGE: lambda payload: payload[0].slow_down(payload[1]),
            SUBMIT: lambda payload: payload[0].submit(payload[1]),
            RESTART: self._on_restart,
            SCRAPE: self._on_scrape,
            TICK: self._on_tick,
            BEGIN: self._on_begin,
            LOOK: self._on_look,
        }
        self._push_changes(engines, restarts_s)

    def _push_changes(self, engines: Mapping[str, EngineSpec], restarts_s: Sequence[float]) -> None:
        """Push the changes of engines' speed, and the restarts of the proxy."""
        for name, ranks in self._engines.items():
            for at_s, factor in engines[name].changes:
                for engine in ranks:
                    self._events.push(at_s, CHANGE, (engine, engines[name].latency.scaled(factor)))
        for at_s in restarts_s:
            self._events.push(at_s, RESTART, None)

    def run(self) -> FleetResult:
        """Simulate until every request has ended."""
        self._push_arrival(0)
        self._events.push(self._events.now, SCRAPE, None)
        if self._series is not None:
            self._events.push(self._events.now, LOOK, self._series)
        handlers, taken = self._handlers, 0
        while self._open and (event := self._events.pop()) is not None:
            taken += 1
            if taken % LOOK_EVENTS == 0:
                look()
            _, kind, _, payload = event
            handlers[kind](payload)
        assert self._open == 0, f"{self._open} requests never ended"
        for scheduler in (self.scheduler, *self._replaced):
            check_scheduler(scheduler)
        return self._result()

    def _result(self) -> FleetResult:
        cached = any(ranks[0].spec.prefix_cache for ranks in self._engines.values())
        counted: Counted = {}
        for name, ranks in self._engines.items():
            models = [engine.model for engine in ranks]
            own: dict[str, int | float] = {"preemptions": sum([model.preemptions for model in models])}
            own["kv_peak"] = max([model.kv.peak_blocks / model.kv.pool.total_blocks for model in models])
            if cached:
                own["prefix_hit_tokens"] = sum([model.kv.hit_tokens for model in models])
                own["prefilled_tokens"] = sum([model.prefilled_tokens for model in models])
            if self._adapters:
                own["adapter_loads"] = sum([model.adapters.loads for model in models])
            counted[name] = own
        return FleetResult(
            [flight.record for flight in self._flights],
            [flight.outcome for flight in self._flights if flight.outcome is not None],
            self._gaps,
            counted,
            self._transfers,
            self._expired,
            self._classes or None,
        )

    def make_request(self, planned: PlannedRequest) -> Request:
        """Make the request that the scheduler sees of a planned one: never the length of its answers.

        What its prompts begin with is named as the proxy does: nothing if there are several.
        """
        keyed = planned.generates and planned.row.sequences == 1 and planned.content is not UNSHARED
        return Request(
            id=planned.index,
            model=planned.row.adapter or self._model,
            prompt_tokens=planned.prompt_tokens,
            sequences=planned.sequences,
            samples=planned.row.n,
            longest_prompt_tokens=planned.prompt_tokens,
            generates=planned.generates,
            prompt_exact=True,
            prefix_keys=planned.content.keys(planned.index, planned.prompt_tokens) if keyed else (),
            tenant=planned.row.tenant or None,
            splittable=planned.generates and planned.sequences == 1,
            streamed=planned.row.streamed,
            service=self._classes.get(planned.row.service, self._default_class),
        )

    def _taught(self, history: Sequence[PlannedRequest]) -> Predictor:
        """Make a predictor from the answers to these requests."""
        setup, rng = self._setup, random.Random(self._setup.seed)
        predictor = make_predictor(setup.predictor, rng=rng, lengths=setup.lengths, oracle=self._oracle)
        for planned in history:
            if planned.generates:
                predictor.observe(self.make_request(planned), planned.answer_tokens)
        return predictor

    # --- events ---

    def _push_arrival(self, index: int) -> None:
        if index < len(self._flights):
            self._events.push(self._flights[index].planned.scheduled_s, ARRIVAL, index)

    def _on_arrival(self, index: int) -> None:
        flight, scheduler = self._flights[index], self.scheduler
        flight.scheduler = scheduler
        self._carry_out(scheduler, self._arrived(scheduler, self.make_request(flight.planned)))
        self._push_arrival(index + 1)

    def _arrived(self, scheduler: Scheduler, request: Request) -> list[Command]:
        """Give a scheduler a request."""
        return scheduler.on_arrival(request, self._events.now)

    def _scraped(self) -> Sequence[Scheduler]:
        """Return the schedulers that read engines' metrics."""
        # Forget replaced schedulers without work.
        self._replaced = [each for each in self._replaced if each.in_flight or len(each.queue)]
        return (self.scheduler, *self._replaced)

    def _on_restart(self, _: None) -> None:
        self._replaced.append(self.scheduler)
        setup = replace(self._setup, now=self._events.now)
        self.scheduler = Scheduler(setup, oracle=self._oracle, splitting=HandOvers)
        self._list_adapters(self.scheduler)

    def _list_adapters(self, scheduler: Scheduler) -> None:
        """Show a scheduler what the engines list, as the proxy does from `/v1/models`."""
        if self._adapters:
            names = (self._model, *self._adapters)
            for spec in self._setup.specs:
                scheduler.on_instance(ModelsLearned(spec.name, names, self._adapters), self._events.now)

    def _on_scrape(self, _: None) -> None:
        schedulers = self._scraped()
        for name, ranks in self._engines.items():
            models = [engine.model for engine in ranks]
            running = [names for model in models if (names := model.adapters.running) is not None]
            sample = EngineSample(
                sum([model.running for model in models]),
                sum([model.waiting for model in models]),
                self._kv_usage(name),
                preemptions=sum([model.preemptions for model in models]),
                adapters=tuple({name: None for names in running for name in names}) if running else None,
            )
            for scheduler in schedulers:
                self._carry_out(scheduler, scheduler.on_scrape(name, sample, self._events.now))
        self._events.push(self._events.now + SCRAPE_INTERVAL_S * self._rounds_at_once(), SCRAPE, None)

    def _rounds_at_once(self) -> int:
        """Return the number of rounds until the next scrape.

        It is 1, but more while a fleet is idle for long.
        """
        if any(each.in_flight or len(each.queue) for each in self._scraped()):
            return 1
        return max(1, int((self._events.next_s() - self._events.now - _IDLE_S) / SCRAPE_INTERVAL_S))

    def _on_look(self, series: FleetSeries) -> None:
        moment = FleetMoment(
            self._events.now,
            len(self.scheduler.queue),
            {name: self._kv_usage(name) for name in self._engines},
            {name: sum([e.model.waiting for e in ranks]) for name, ranks in self._engines.items()},
        )
        self._events.push(series.add(moment), LOOK, series)

    def _kv_usage(self, name: str) -> float:
        """Return the fraction of the KV blocks of an instance in use now."""
        ranks = self._engines[name]
        return math.fsum([engine.kv_usage() for engine in ranks]) / len(ranks)

    def _on_tick(self, scheduler: Scheduler) -> None:
        self._ticks.discard(scheduler)
        self._carry_out(scheduler, scheduler.on_tick(self._events.now))

    def _on_begin(self, engine: FleetEngine) -> None:
        engine.begin()
        for sequence in engine.model.fetches.take_begun():
            assert isinstance(sequence, EngineRun)
            self._fetch(engine, sequence)

    def _on_end(self, payload: tuple[FleetEngine, int]) -> None:
        engine, version = payload
        ended = engine.end(version)
        if ended is None:
            return  # the stretch was cut meanwhile
        self._count_gaps(engine, ended)
        engine.wake()
        now = self._events.now
        for sequence in ended.first:
            assert isinstance(sequence, EngineRun)
            flight = sequence.flight
            if sequence.leg is Role.PREFILL:
                continue  # its token is not shown: the decode engine computes it too
            if flight.record.first_token_s is None:
                flight.record.first_token_s = now
                if flight.planned.row.streamed:
                    self._answered(flight)
        engine.sent -= len(ended.finished)
        for sequence in ended.finished:
            assert isinstance(sequence, EngineRun)
            flight = sequence.flight
            if sequence.leg is Role.PREFILL:
                self._prefilled(engine, sequence)
                continue
            flight.record.output_tokens += sequence.output_tokens
            flight.running -= 1
            if flight.running == 0:
                if flight.planned.sequences == 1:
                    flight.leased[1].reported_cached_tokens = sequence.cached_tokens
                self._completed(flight)

    # --- split requests ---

    def _prefilled(self, engine: FleetEngine, run: EngineRun) -> None:
        """Report the end of the prefill of a split request; its blocks are held."""
        flight, now = run.flight, self._events.now
        scheduler, lease = flight.leased
        flight.held = engine, run
        link = scheduler.ledger.leased[lease.id].spec.kv_transfer
        assert link is not None, f"{lease.instance} takes part in no KV transfer"
        self._events.push(now + link.lease_s, EXPIRED, flight)
        self._carry_out(scheduler, scheduler.on_prefilled(lease, now))

    def _fetch(self, engine: FleetEngine, run: EngineRun) -> None:
        """Begin the KV transfer to a decode engine with blocks for it, if the KV cache is still held."""
        held = run.flight.held
        self._transfers += 1
        if held is not None:
            arrives = self._links.send(held[0].name, engine.name, run.fetch_tokens, self._events.now)
            self._events.push(arrives, FETCHED, (engine, run))
        else:
            self._on_fetched((engine, run))

    def _on_fetched(self, payload: tuple[FleetEngine, EngineRun]) -> None:
        """End a KV transfer: the cache has arrived, or the prefill engine holds it no longer."""
        engine, run = payload
        loaded = run.flight.held is not None
        self._expired += not loaded
        engine.cut(for_arrival=True)
        engine.model.complete_fetch(run, loaded=loaded)
        engine.wake()
        self._release_held(run.flight)

    def _release_held(self, flight: Flight) -> None:
        """Free the blocks that a prefill engine holds."""
        if flight.held is not None:
            engine, run = flight.held
            flight.held = None
            engine.cut(for_arrival=True)
            engine.model.release_held(run)
            engine.wake()

    def _answered(self, flight: Flight) -> None:
        """Report the first token of an answer."""
        scheduler, lease = flight.leased
        now = self._events.now
        self._carry_out(scheduler, scheduler.on_first_token(lease, now))
        if scheduler.failover.misplaced_model is None:
            return
        for misplaced in scheduler.failover.misplaced():
            moved = self._by_id[misplaced.request.id]
            sequences, engine = moved.sequences, moved.engine
            if all(each.state in _WITHOUT_TOKEN for each in sequences):
                commands = scheduler.on_misplaced(misplaced, now)
                if misplaced.ended and engine is not None:
                    engine.sent -= len(sequences)
                    for each in sequences:
                        engine.model.abort(each)
                self._carry_out(scheduler, commands)
        self._carry_out(scheduler, scheduler.wait_again(now))

    def _completed(self, flight: Flight) -> None:
        """End a request after its last sequence."""
        if not flight.planned.generates or not flight.planned.row.streamed:
            self._answered(flight)
        flight.leased[1].output_tokens = flight.record.output_tokens
        flight.record.last_token_s = self._events.now
        self._close(flight, Outcome.OK)
        self._lease_ended(flight, Outcome.OK)

    def _lease_ended(self, flight: Flight, outcome: Outcome) -> None:
        """Report the end of a request's lease."""
        scheduler, lease = flight.leased
        self._carry_out(scheduler, scheduler.on_lease_ended(lease, outcome, self._events.now))

    def _count_gaps(self, engine: FleetEngine, ended: IterationEnd) -> None:
        stretch = ended.stretch
        if stretch.decodes:
            self._gaps.add(stretch.first_s, stretch.increment_s, stretch.steps, stretch.decodes)
        for sequence in ended.preempted:
            assert isinstance(sequence, EngineRun)
            sequence.paused_s = engine.started_s
        for sequence in ended.resumed:
            assert isinstance(sequence, EngineRun)
            self._gaps.add(self._events.now - sequence.paused_s)

    # --- commands ---

    def _carry_out(self, scheduler: Scheduler, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Dispatch):
                self._dispatch(scheduler, command)
            elif isinstance(command, Reject):
                flight = self._by_id[command.request_id]
                flight.record.error = command.reason.value
                self._close(flight, _REJECTED.get(command.reason, Outcome.BAD_REQUEST))
            else:
                assert isinstance(command, HealthChanged), command
        if scheduler not in self._ticks and (deadline := scheduler.next_deadline()) is not None:
            self._ticks.add(scheduler)
            self._events.push(max(deadline, self._events.now), TICK, scheduler)

    def _dispatch(self, scheduler: Scheduler, command: Dispatch) -> None:
        lease = command.lease
        flight = self._by_id[command.request_id]
        flight.lease, flight.record.instance = lease, lease.instance
        # A data-parallel server gives a request to its least loaded engine, unless it states one.
        ranks = self._engines[lease.instance]
        engine = min(ranks, key=lambda each: each.sent) if lease.rank < 0 else ranks[lease.rank]
        if not engine.spec.fits(flight.planned):
            # A real engine would cut the answer at its context length: not what the trace asks for.
            flight.record.error = "too long"
            self._close(flight, Outcome.UPSTREAM_REFUSED)
            self._lease_ended(flight, Outcome.UPSTREAM_REFUSED)
            return
        if lease.decode is not None:
            leg = Role.PREFILL
        else:
            leg = Role.BOTH if lease.hold is None else Role.DECODE
        flight.sequences = sequences = leg_sequences(flight, leg)
        flight.engine = engine
        engine.sent += len(sequences)
        if engine.spec.latency.request_s > 0:
            self._events.push(self._events.now + engine.spec.latency.request_s, SUBMIT, (engine, sequences))
        else:
            engine.submit(sequences)

    def _close(self, flight: Flight, outcome: Outcome) -> None:
        assert flight.outcome is None, f"request {flight.planned.index} ended twice"
        flight.outcome = outcome
        flight.record.ok = outcome is Outcome.OK
        flight.record.end_s = self._events.now
        self._open -= 1


def _choosing_ranks(setup: SchedulerSetup, engines: Mapping[str, EngineSpec]) -> SchedulerSetup:
    """Return a set-up in which requests choose their rank of a data-parallel server, as vLLM allows."""
    specs = tuple(
        replace(spec, capacity=replace(spec.capacity, rank_header=True))
        if engines[spec.name].ranks > 1
        else spec
        for spec in setup.specs
    )
    return replace(setup, specs=specs)
