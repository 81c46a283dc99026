"""The simulator's driver: the production scheduler and one engine model per instance, in virtual time.

The scheduler is the very object the proxy drives; a run depends on nothing but its arguments
(same seed, same result); every planned request ends in exactly one record. Time is a heap of events;
ties are broken by kind, then by order of creation.

A request that the scheduler splits runs twice: on the prefill engine for one token, whose blocks are then
held, and on the decode engine, which fetches them over `KvLinks`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mypy_extensions import mypyc_attr

from hetlb.core.latency import IterationRule, LatencyModel
from hetlb.core.objective import UNSTATED, ServiceClass
from hetlb.core.pickle_by_fields import PickleByFields
from hetlb.core.predictor import Predictor
from hetlb.core.scheduler import Scheduler
from hetlb.core.setup import SchedulerSetup
from hetlb.core.types import (
    Command,
    Dispatch,
    EngineSample,
    HealthChanged,
    InstanceSpec,
    Lease,
    ModelsLearned,
    Outcome,
    Reject,
    RejectReason,
    Request,
    Role,
)
from hetlb.sim.engine_limits import EngineLimits
from hetlb.sim.engine_model import EngineModel
from hetlb.sim.engine_sequence import EngineSequence
from hetlb.sim.iterations import IterationEnd, IterationRun
from hetlb.sim.kv_links import KvLinks, KvPath
from hetlb.sim.series import Series
from hetlb.workload.arrivals import PlannedRequest
from hetlb.workload.content import UNSHARED, Span
from hetlb.workload.records import Gaps, RequestResult, summarize

#: Simulated engines are scraped as often as real ones by default.
SCRAPE_INTERVAL_S: Final = 1.0

#: Outcome of a request that the scheduler rejects; any other reason is the request's own fault.
_REJECTED = {
    RejectReason.QUEUE_FULL: Outcome.REJECTED_FULL,
    RejectReason.QUEUE_EXPIRED: Outcome.EXPIRED_QUEUE,
    RejectReason.NO_INSTANCE: Outcome.NO_INSTANCE,
}

# Order of events at the same instant: work ends, then the world changes, then engines begin anew, so that
# requests that arrive together are in the same batch. A look at the fleet comes last: it changes nothing.
_END: Final = 0
_FETCHED: Final = 1
_EXPIRED: Final = 2
_ARRIVAL: Final = 3
_CHANGE: Final = 4
_SUBMIT: Final = 5
_RESTART: Final = 6
SHARED: Final = 7
_SCRAPE: Final = 8
_TICK: Final = 9
_BEGIN: Final = 10
_LOOK: Final = 11


@dataclass(frozen=True, slots=True)
class EngineSpec(PickleByFields):
    """One simulated engine: how fast it is and what it holds.

    `changes` are pairs of a time (s) and a factor: iterations begun from then on take so many times as long.
    `prefix_cache`: whether it keeps the blocks of prompts for later ones that begin alike. `max_model_len` is
    the most tokens of one sequence, where that is less than its KV cache holds. `adapter_load_s`: seconds to
    load a LoRA adapter that is in none of its slots.
    """

    latency: LatencyModel
    limits: EngineLimits
    changes: tuple[tuple[float, float], ...] = ()
    prefix_cache: bool = False
    max_model_len: int | None = None
    adapter_load_s: float = 0.0

    def model(self, rule: IterationRule) -> EngineModel:
        """An engine that has done nothing yet."""
        return EngineModel(
            self.latency,
            self.limits,
            rule,
            prefix_cache=self.prefix_cache,
            adapter_load_s=self.adapter_load_s,
        )

    def fits(self, planned: PlannedRequest) -> bool:
        """True if it can run every sequence of a request to its end."""
        tokens = planned.prompt_tokens + max(1, planned.answer_tokens)
        most = self.limits.max_sequence_tokens
        return tokens <= (most if self.max_model_len is None else min(most, self.max_model_len))


class Flight:
    """One planned request on its way, with the scheduler that has it and the sequences still running."""

    __slots__ = ("held", "lease", "outcome", "planned", "record", "running", "scheduler")

    def __init__(self, planned: PlannedRequest) -> None:
        self.planned = planned
        self.record = RequestResult(
            planned.scheduled_s, planned.input_tokens, sequences=planned.sequences, service=planned.service
        )
        self.scheduler: Scheduler | None = None
        self.lease: Lease | None = None
        self.outcome: Outcome | None = None
        self.running = planned.sequences
        #: Its prompt on the prefill engine, until the decode engine has fetched it.
        self.held: tuple[_Engine, _Run] | None = None


class _Run(EngineSequence):
    """One sequence of a request in an engine; `paused_s`: when it got its last token before a preemption.

    `leg`: of a split request, the part that runs there; `BOTH` is all of it.
    """

    __slots__ = ("flight", "leg", "paused_s")

    def __init__(
        self, flight: Flight, pieces: tuple[Span, ...], answer: Hashable | None, leg: Role = Role.BOTH
    ) -> None:
        planned, prefill = flight.planned, leg is Role.PREFILL
        super().__init__(
            planned.prompt_tokens,
            1 if prefill else planned.answer_tokens,
            pieces=pieces,
            answer=None if prefill else answer,
            remote_tokens=planned.prompt_tokens if leg is Role.DECODE else 0,
            held=prefill,
            adapter=planned.adapter,
        )
        self.flight = flight
        self.leg = leg
        self.paused_s = 0.0


def _sequences(flight: Flight, leg: Role) -> list[_Run]:
    """The sequences of a request: each of its prompts, which begin alike, `n` times."""
    planned, content = flight.planned, flight.planned.content
    own = planned.prompt_tokens - sum(length for _, length in content.spans)
    runs = []
    for prompt in range(planned.prompts):
        pieces = content.spans
        if planned.n > 1 and own:
            pieces = (*pieces, ((planned.index, prompt), own))
        runs += [_Run(flight, pieces, content.answer, leg) for _ in range(planned.n)]
    return runs


def sequences_of(planned: PlannedRequest) -> Sequence[EngineSequence]:
    """The engine's sequences of a request that is not split."""
    return _sequences(Flight(planned), Role.BOTH)


def _own_links(specs: Sequence[InstanceSpec]) -> KvLinks:
    """A link for every pair of instances, as the one that fetches describes it."""
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


@dataclass(slots=True)
class FleetResult:
    """Result of a run: a record per planned request, in plan order, and counts per instance."""

    records: list[RequestResult]
    outcomes: list[Outcome]
    gaps: Gaps
    preemptions: dict[str, int]
    kv_peak: dict[str, float]
    #: With prefix caches: prompt tokens found there, and computed.
    prefix_hits: dict[str, tuple[int, int]] | None = None
    #: Requests whose KV cache was to be transferred; of them, those that were too late and computed again.
    transfers: int = 0
    expired: int = 0
    #: LoRA adapters loaded, by instance; None where no request asked for one.
    adapter_loads: dict[str, int] | None = None
    classes: Mapping[str, ServiceClass] | None = None

    def summary(self) -> dict[str, Any]:
        """The figures of the run, as `vllm bench serve` names them.

        With prefix caches every instance has `prefix_hit_tokens` and `prefilled_tokens` too, with LoRA
        adapters `adapter_loads`.
        """
        found = summarize(
            self.records,
            self.gaps,
            instances=self.preemptions,
            preemptions=self.preemptions,
            kv_peak=self.kv_peak,
            classes=self.classes,
        )
        if self.prefix_hits is not None:
            for entry in found["instances"]:
                hit, computed = self.prefix_hits[entry["name"]]
                entry |= {"prefix_hit_tokens": hit, "prefilled_tokens": computed}
        if self.adapter_loads is not None:
            for entry in found["instances"]:
                entry["adapter_loads"] = self.adapter_loads[entry["name"]]
        return found


class _Engine:
    """An engine model and the iterations it has in flight."""

    __slots__ = ("begin_pending", "model", "name", "spec", "started_s", "version")

    def __init__(self, name: str, spec: EngineSpec, rule: IterationRule) -> None:
        self.name = name
        self.spec = spec
        self.model = spec.model(rule)
        self.started_s = 0.0
        self.version = 0
        self.begin_pending = False

    def kv_usage_at(self, now: float) -> float:
        """Fraction of the KV blocks in use."""
        model = self.model
        return model.kv_used_blocks_at(now - self.started_s) / model.limits.kv_blocks


@mypyc_attr(allow_interpreted_subclasses=True)
class FleetSimulation:
    """One run. `engines` has an entry for every instance of the set-up, by name.

    `series` is filled while the run goes on; `on_progress` is told how many requests have ended, once per
    simulated second. The clock begins at `start_s`; nothing of the plan is due before.

    At each of `restarts_s` the proxy is replaced: a scheduler that knows nothing takes what arrives from then
    on, the old one serves what it has to the end. The first one has seen the answers of `history`.

    `classes` are the service classes of the requests by name, the default first.

    `links` carry KV caches between the instances; without them every pair has a link of its own, as the
    decode instance's `kv_transfer` describes it.
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
        restarts_s: Sequence[float] = (),
        history: Sequence[PlannedRequest] = (),
        links: KvLinks | None = None,
        classes: Mapping[str, ServiceClass] | None = None,
    ) -> None:
        self._setup = setup
        self._classes = classes or {}
        self._default_class = next(iter(self._classes.values()), UNSTATED)
        self._links = links if links is not None else _own_links(setup.specs)
        self._transfers = self._expired = 0
        self._model = model
        self._oracle = {planned.index: max(1, planned.output_tokens) for planned in plan}
        #: The scheduler that takes what arrives now, and those it replaced that still have requests.
        self.scheduler: Scheduler = Scheduler(
            setup, oracle=self._oracle, predictor=self._taught(history) if history else None
        )
        self._replaced: list[Scheduler] = []
        self._engines = {spec.name: _Engine(spec.name, engines[spec.name], rule) for spec in setup.specs}
        self._series = series
        self._on_progress = on_progress
        self._flights = [Flight(planned) for planned in plan]
        self._by_id = {flight.planned.index: flight for flight in self._flights}
        self._gaps = Gaps()
        self._heap: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._now = start_s
        #: LoRA adapters of the plan: every engine lists them all.
        self._adapters = tuple(sorted({planned.adapter for planned in plan if planned.adapter}))
        self._list_adapters(self.scheduler)
        self._open = len(plan)
        self._ticks: set[Scheduler] = set()  # schedulers with a tick ahead
        for name, engine in self._engines.items():
            for at_s, factor in engines[name].changes:
                self._push(at_s, _CHANGE, (engine, engines[name].latency.scaled(factor)))
        for at_s in restarts_s:
            self._push(at_s, _RESTART, None)

    def run(self) -> FleetResult:
        """Simulate until every request has ended."""
        self._push_arrival(0)
        self._push(self._now, _SCRAPE, None)
        if self._series is not None:
            self._push(self._now, _LOOK, self._series)
        handlers: dict[int, Callable[[Any], None]] = {
            _END: self._on_end,
            _FETCHED: self._on_fetched,
            _EXPIRED: self._release_held,
            _ARRIVAL: self._on_arrival,
            _CHANGE: self._on_change,
            _SUBMIT: self._on_submit,
            _RESTART: self._on_restart,
            SHARED: self._on_shared,
            _SCRAPE: self._on_scrape,
            _TICK: self._on_tick,
            _BEGIN: self._on_begin,
            _LOOK: self._on_look,
        }
        while self._open and self._heap:
            self._now, kind, _, payload = heapq.heappop(self._heap)
            handlers[kind](payload)
        assert self._open == 0, f"{self._open} requests never ended"
        for scheduler in (self.scheduler, *self._replaced):
            scheduler.check_integrity()
        return FleetResult(
            [flight.record for flight in self._flights],
            [flight.outcome for flight in self._flights if flight.outcome is not None],
            self._gaps,
            {name: engine.model.preemptions for name, engine in self._engines.items()},
            {
                name: engine.model.kv.peak_blocks / engine.model.limits.kv_blocks
                for name, engine in self._engines.items()
            },
            {
                name: (engine.model.kv.hit_tokens, engine.model.prefilled_tokens)
                for name, engine in self._engines.items()
            }
            if any(engine.spec.prefix_cache for engine in self._engines.values())
            else None,
            self._transfers,
            self._expired,
            {name: engine.model.adapters.loads for name, engine in self._engines.items()}
            if self._adapters
            else None,
            self._classes or None,
        )

    def make_request(self, planned: PlannedRequest) -> Request:
        """The request that the scheduler sees of a planned one: never the length of its answers.

        What its prompts begin with is named as the proxy does: nothing where there are several.
        """
        keyed = planned.generates and planned.prompts == 1 and planned.content is not UNSHARED
        return Request(
            id=planned.index,
            model=planned.adapter or self._model,
            prompt_tokens=planned.prompt_tokens,
            sequences=planned.sequences,
            samples=planned.n,
            longest_prompt_tokens=planned.prompt_tokens,
            generates=planned.generates,
            prompt_exact=True,
            prefix_keys=planned.content.keys(planned.index, planned.prompt_tokens) if keyed else (),
            tenant=planned.tenant,
            splittable=planned.generates and planned.sequences == 1,
            streamed=True,
            service=self._classes.get(planned.service, self._default_class),
        )

    def _taught(self, history: Sequence[PlannedRequest]) -> Predictor:
        """A predictor that has seen the answers to these requests."""
        predictor = self._setup.make_predictor(random.Random(self._setup.seed), self._oracle)
        for planned in history:
            if planned.generates:
                predictor.observe(self.make_request(planned), planned.answer_tokens)
        return predictor

    # --- events ---

    def _push(self, when: float, kind: int, payload: object) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (when, kind, self._sequence, payload))

    def _push_arrival(self, index: int) -> None:
        if index < len(self._flights):
            self._push(self._flights[index].planned.scheduled_s, _ARRIVAL, index)

    def _on_arrival(self, index: int) -> None:
        flight, scheduler = self._flights[index], self._next_scheduler()
        flight.scheduler = scheduler
        self._carry_out(scheduler, self._arrived(scheduler, self.make_request(flight.planned)))
        self._push_arrival(index + 1)

    def _next_scheduler(self) -> Scheduler:
        """The scheduler that takes what arrives now."""
        return self.scheduler

    def _arrived(self, scheduler: Scheduler, request: Request) -> list[Command]:
        """Give a scheduler a request."""
        return scheduler.on_arrival(request, self._now)

    def _scraped(self) -> Sequence[Scheduler]:
        """The schedulers that read engines' figures."""
        # A scheduler that has nothing left to do is gone.
        self._replaced = [each for each in self._replaced if each.in_flight or len(each.queue)]
        return (self.scheduler, *self._replaced)

    def _on_shared(self, payload: Any) -> None:
        """News between schedulers: there is one (see `sim.shared`)."""
        raise AssertionError(f"expected one scheduler, got news {payload!r}")

    def _on_restart(self, _: None) -> None:
        self._replaced.append(self.scheduler)
        self.scheduler = Scheduler(replace(self._setup, now=self._now), oracle=self._oracle)
        self._list_adapters(self.scheduler)

    def _list_adapters(self, scheduler: Scheduler) -> None:
        """Have a scheduler read what the engines list, as the proxy does from `/v1/models`."""
        if self._adapters:
            names = (self._model, *self._adapters)
            for spec in self._setup.specs:
                scheduler.on_instance(ModelsLearned(spec.name, names, self._adapters), self._now)

    def _on_change(self, payload: tuple[_Engine, LatencyModel]) -> None:
        engine, latency = payload
        engine.model.latency = latency
        if engine.model.in_flight is not None:  # what is in flight ends with the iteration that runs now
            self._schedule_end(engine, engine.model.cut(self._now - engine.started_s))

    def _on_scrape(self, _: None) -> None:
        schedulers = self._scraped()
        for name, engine in self._engines.items():
            model = engine.model
            sample = EngineSample(
                model.running,
                model.waiting,
                engine.kv_usage_at(self._now),
                preemptions=model.preemptions,
                adapters=model.adapters.running,
            )
            for scheduler in schedulers:
                self._carry_out(scheduler, scheduler.on_scrape(name, sample, self._now))
        self._push(self._now + SCRAPE_INTERVAL_S, _SCRAPE, None)
        if self._on_progress is not None:
            self._on_progress(len(self._flights) - self._open)

    def _on_look(self, series: Series) -> None:
        series.begin(self._now, len(self.scheduler.queue))
        for name, engine in self._engines.items():
            model = engine.model
            series.instances[name].add(engine.kv_usage_at(self._now), model.waiting, model.running)
        self._push(series.end(), _LOOK, series)

    def _on_tick(self, scheduler: Scheduler) -> None:
        self._ticks.discard(scheduler)
        self._carry_out(scheduler, scheduler.on_tick(self._now))

    def _on_begin(self, engine: _Engine) -> None:
        engine.begin_pending = False
        stretch = engine.model.begin_run()
        if stretch is not None:
            engine.started_s = self._now
            self._schedule_end(engine, stretch)
        for sequence in engine.model.fetches.take_begun():
            assert isinstance(sequence, _Run)
            self._fetch(engine, sequence)

    def _schedule_end(self, engine: _Engine, stretch: IterationRun) -> None:
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
            assert isinstance(sequence, _Run)
            flight = sequence.flight
            if sequence.leg is Role.PREFILL:
                continue  # its token is not shown: the decode engine computes it too
            if flight.record.first_token_s is None:
                flight.record.first_token_s = now
                self._answered(flight)
        for sequence in ended.finished:
            assert isinstance(sequence, _Run)
            flight = sequence.flight
            if sequence.leg is Role.PREFILL:
                self._prefilled(engine, sequence)
                continue
            flight.record.output_tokens += sequence.output_tokens
            flight.running -= 1
            if flight.running == 0:
                if flight.lease is not None and flight.planned.sequences == 1:
                    flight.lease.reported_cached_tokens = sequence.cached_tokens
                self._completed(flight)

    # --- split requests ---

    def _prefilled(self, engine: _Engine, run: _Run) -> None:
        """The prompt of a split request is read, and its blocks are held."""
        flight, now = run.flight, self._now
        lease, scheduler = flight.lease, flight.scheduler
        assert lease is not None
        assert scheduler is not None
        flight.held = engine, run
        link = scheduler.holder(lease).spec.kv_transfer
        assert link is not None, f"{lease.instance} takes part in no KV transfer"
        self._push(now + link.lease_s, _EXPIRED, flight)
        self._carry_out(scheduler, scheduler.on_prefilled(lease, now))

    def _fetch(self, engine: _Engine, run: _Run) -> None:
        """A decode engine has blocks for a prompt: its KV cache is on its way, if it is still there."""
        held = run.flight.held
        self._transfers += 1
        if held is not None:
            arrives = self._links.send(held[0].name, engine.name, run.fetch_tokens, self._now)
            self._push(arrives, _FETCHED, (engine, run))
        else:
            self._on_fetched((engine, run))

    def _on_fetched(self, payload: tuple[_Engine, _Run]) -> None:
        """A KV cache has arrived, or the prefill engine keeps it no longer."""
        engine, run = payload
        loaded = run.flight.held is not None
        self._expired += not loaded
        self._interrupt(engine)
        engine.model.complete_fetch(run, loaded=loaded)
        self._wake(engine)
        self._release_held(run.flight)

    def _release_held(self, flight: Flight) -> None:
        """Free what a prefill engine holds."""
        if flight.held is not None:
            engine, run = flight.held
            flight.held = None
            self._interrupt(engine)
            engine.model.release_held(run)
            self._wake(engine)

    def _interrupt(self, engine: _Engine) -> None:
        """End the iterations in flight with the one that runs now: more may be admitted after it."""
        if engine.model.in_flight is not None:
            self._schedule_end(engine, engine.model.cut(self._now - engine.started_s, for_arrival=True))

    def _answered(self, flight: Flight) -> None:
        """The first byte of an answer came."""
        assert flight.lease is not None
        assert flight.scheduler is not None
        self._carry_out(flight.scheduler, flight.scheduler.on_first_token(flight.lease, self._now))

    def _completed(self, flight: Flight) -> None:
        """The last sequence of a request has ended."""
        lease, scheduler = flight.lease, flight.scheduler
        assert lease is not None
        assert scheduler is not None
        if not flight.planned.generates:
            self._answered(flight)
        lease.output_tokens = flight.record.output_tokens
        flight.record.last_token_s = self._now
        self._close(flight, Outcome.OK)
        self._lease_ended(flight, Outcome.OK)

    def _lease_ended(self, flight: Flight, outcome: Outcome) -> None:
        """Tell a request's scheduler that its lease ended."""
        lease, scheduler = flight.lease, flight.scheduler
        assert lease is not None
        assert scheduler is not None
        self._carry_out(scheduler, scheduler.on_lease_ended(lease, outcome, self._now))

    def _count_gaps(self, engine: _Engine, ended: IterationEnd) -> None:
        stretch = ended.stretch
        if stretch.decodes:
            self._gaps.add(stretch.first_s, stretch.increment_s, stretch.steps, stretch.decodes)
        for sequence in ended.preempted:
            assert isinstance(sequence, _Run)
            sequence.paused_s = engine.started_s
        for sequence in ended.resumed:
            assert isinstance(sequence, _Run)
            self._gaps.add(self._now - sequence.paused_s)

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
            self._push(max(deadline, self._now), _TICK, scheduler)

    def _dispatch(self, scheduler: Scheduler, command: Dispatch) -> None:
        lease = command.lease
        flight = self._by_id[command.request_id]
        flight.lease, flight.record.instance = lease, lease.instance
        engine = self._engines[lease.instance]
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
        sequences = _sequences(flight, leg)
        if engine.spec.latency.request_s > 0:
            self._push(self._now + engine.spec.latency.request_s, _SUBMIT, (engine, sequences))
        else:
            self._on_submit((engine, sequences))

    def _on_submit(self, payload: tuple[_Engine, list[_Run]]) -> None:
        engine, sequences = payload
        interrupts = engine.model.in_flight is not None and not engine.model.admission_blocked
        for sequence in sequences:
            engine.model.submit(sequence, self._now - engine.started_s)
        if interrupts:
            self._schedule_end(engine, engine.model.cut(self._now - engine.started_s, for_arrival=True))
        self._wake(engine)

    def _wake(self, engine: _Engine) -> None:
        if engine.model.in_flight is None and not engine.begin_pending:
            engine.begin_pending = True
            self._push(self._now, _BEGIN, engine)

    def _close(self, flight: Flight, outcome: Outcome) -> None:
        assert flight.outcome is None, f"request {flight.planned.index} ended twice"
        flight.outcome = outcome
        flight.record.ok = outcome is Outcome.OK
        flight.record.end_s = self._now
        self._open -= 1
