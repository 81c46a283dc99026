"""Many simulations of one fleet: every policy at every rate for every seed, on as many processes as asked.

The results depend on the study alone, not on the number of processes or which is ready
first. Yardsticks (`bound`, `split`) are made once for all runs that share them. However a sweep ends, also
by Ctrl-C or because its own process is killed, none of its processes is left.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait as wait_for_any
from typing import Any

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.predictor import Predictor, make_predictor
from hetlb.balancer.core.types import Request
from hetlb.errors import HetlbError
from hetlb.tools.sim.alone import full_tokens_per_s, requests_while_full, run_alone
from hetlb.tools.sim.fleet_engine import EngineSpec
from hetlb.tools.sim.fleet_result import FleetSeries
from hetlb.tools.sim.fleet_simulation import FleetSimulation
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.workload.arrivals import Load, PlannedRequest
from hetlb.tools.workload.records import latencies_s

#: The arrivals that the trace recorded, in place of a rate.
TRACE = "trace"
_INFINITE = float("inf")
#: Weight of a prompt token against one output token in `fixed_split`.
_PROMPT_WEIGHT = 0.15


@dataclass(frozen=True, slots=True)
class Study:
    """Settings that all runs of a sweep have in common. The set-up's own policy and seed are not used.

    `classes` are the requests' by name, the default first.
    """

    setup: SchedulerSetup
    engines: Mapping[str, EngineSpec]
    model: str
    rule: IterationRule
    load: Load
    classes: Mapping[str, ServiceClass] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StudyCell:
    """One run. `rate`: requests/s, infinity (all at once) or `TRACE`; `watched` keeps what pictures need."""

    policy: str
    rate: float | str
    seed: int
    watched: bool = False


@dataclass(slots=True)
class Watched:
    """Data of a picture of one run: latencies of the completed requests by name in seconds, and the fleet."""

    latencies_s: dict[str, list[float]]
    series: FleetSeries


@dataclass(slots=True)
class Ran:
    """One run: figures as `hetlb.tools.workload.records` names them, yardsticks, and data for pictures.

    `bound` is the sum of what each instance reaches alone on all requests, its drain included. `steady_bound`
    is the same while each instance is full.
    """

    cell: StudyCell
    summary: dict[str, Any]
    bound: dict[str, float]
    steady_bound: dict[str, float]
    split: dict[str, float] | None
    watched: Watched | None


def run_sweep(
    study: Study,
    cells: Sequence[StudyCell],
    *,
    jobs: int = 1,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Ran]:
    """Run every cell on `jobs` processes; results in the order of `cells`.

    `on_progress` is told how many runs and yardsticks are done, and of how many. Raises `HetlbError` if a
    process is killed, and whatever a run raises.
    """
    # Alike engines are alike alone; and the order of the requests is the rows', unless arrivals are replayed.
    kinds = {study.engines[spec.name]: spec.name for spec in reversed(study.setup.specs)}
    alike = {spec.name: kinds[study.engines[spec.name]] for spec in study.setup.specs}
    orders = sorted({_order(cell.rate) for cell in cells}, key=str)
    split_seeds = list(dict.fromkeys(cell.seed for cell in cells if cell.rate == _INFINITE))
    tasks = len(orders) * len(kinds) + len(split_seeds) + len(cells)
    with _Workers(study, min(jobs, tasks), lambda done: on_progress(done, tasks)) as workers:
        alone = {
            (order, name): workers.submit(_alone, name, order) for order in orders for name in kinds.values()
        }
        runs = [workers.submit(_run, cell) for cell in cells]
        workers.wait(alone.values())
        splits: dict[int, Future[dict[str, float]]] = {}
        for seed in split_seeds:
            speeds = {name: alone[_INFINITE, kind].result()[0] for name, kind in alike.items()}
            splits[seed] = workers.submit(_split, seed, speeds)
        workers.wait([*runs, *splits.values()])
    ran = []
    for cell, future in zip(cells, runs, strict=True):
        summary, watched = future.result()
        figures = [alone[_order(cell.rate), kind].result() for kind in alike.values()]
        bound, steady_bound = ({"total_token_throughput": sum(each)} for each in zip(*figures, strict=True))
        split = splits[cell.seed].result() if cell.rate == _INFINITE else None
        ran.append(Ran(cell, summary, bound, steady_bound, split, watched))
    return ran


def _order(rate: float | str) -> float | str:
    """Return a rate that stands for all rates with the same order of requests."""
    return TRACE if rate == TRACE else _INFINITE


# --- one task, in whichever process ---------------------------------------------------------------------


def _split(study: Study, seed: int, alone: Mapping[str, float]) -> dict[str, float]:
    """Return the throughput of the fixed division of all requests at once; `alone` in tokens/s."""
    plan, setup = study.load.plan(_INFINITE, seed), study.setup
    oracle = {planned.index: max(1, planned.output_tokens) for planned in plan}
    predictor = make_predictor(setup.predictor, rng=random.Random(seed), lengths=setup.lengths, oracle=oracle)
    split = fixed_split(study.engines, plan, study.rule, alone, predictor, model=study.model)
    return {"total_token_throughput": split}


def fixed_split(
    engines: Mapping[str, EngineSpec],
    plan: Sequence[PlannedRequest],
    rule: IterationRule,
    alone: Mapping[str, float],
    predictor: Predictor,
    *,
    model: str,
) -> float:
    """Return the tokens/s of a division in proportion to `alone`, each engine running its part alone.

    In plan order, with w = 0.15 * input + predicted output tokens, each request goes to the instance
    j with the least (A_j + w) / alone_j; ties go to the first in `alone`.
    """
    assigned = dict.fromkeys(alone, 0.0)
    parts: dict[str, list[PlannedRequest]] = {name: [] for name in alone}
    for planned in plan:
        request = Request(
            id=planned.index,
            model=model,
            prompt_tokens=planned.prompt_tokens,
            generates=planned.generates,
            prompt_exact=True,
            tenant=planned.row.tenant or None,
        )
        output = predictor.predict(request) if planned.generates else 0.0
        work = planned.sequences * (_PROMPT_WEIGHT * planned.prompt_tokens + output)
        able = [name for name, speed in alone.items() if speed > 0 and engines[name].fits(planned)]
        if able:
            chosen = min(able, key=lambda name: (assigned[name] + work) / alone[name])
            assigned[chosen] += work
            parts[chosen].append(planned)
    runs = [run_alone(engines[name], part, rule) for name, part in parts.items() if part]
    longest = max((run.seconds for run in runs), default=0.0)
    return sum(run.tokens for run in runs) / longest if longest > 0 else 0.0


def _alone(study: Study, name: str, order: float | str) -> tuple[float, float]:
    """Return the tokens/s of one instance alone: on all requests at once, in order, and while it is full."""
    load, spec = study.load, study.engines[name]
    plan = load.plan(order, 0)
    whole = run_alone(spec, plan, study.rule)
    count = requests_while_full(spec, plan)
    if count > load.count:
        plan = replace(load, num_prompts=count).plan(order, 0)
    return whole.tokens_per_s, full_tokens_per_s(spec, plan, study.rule)


def _run(study: Study, cell: StudyCell) -> tuple[dict[str, Any], Watched | None]:
    series = FleetSeries() if cell.watched else None
    result = FleetSimulation(
        replace(study.setup, policy=cell.policy, seed=cell.seed),
        study.engines,
        study.load.plan(cell.rate, cell.seed),
        model=study.model,
        rule=study.rule,
        series=series,
        classes=study.classes,
    ).run()
    if series is None:
        return result.summary(), None
    done = [record for record in result.records if record.ok]
    times = {name: list(latencies_s(done, name)) for name in ("ttft", "tpot", "e2el")}
    return result.summary(), Watched(times, series)


# --- processes ------------------------------------------------------------------------------------------


class _Workers:
    """Runs tasks in `jobs` processes; 1: in this process."""

    def __init__(self, study: Study, jobs: int, on_done: Callable[[int], None]) -> None:
        self._study = study
        self._on_done = on_done
        self._done = 0
        self._others = frozenset(multiprocessing.active_children())
        self._pool: ProcessPoolExecutor | None = None
        if jobs > 1:
            # Not forked: the caller may have threads.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(jobs, context, _begin_worker, (study,))

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        if kind is None:
            self._pool.shutdown()
            return
        self._pool.shutdown(wait=False, cancel_futures=True)
        children = [child for child in multiprocessing.active_children() if child not in self._others]
        for child in children:
            child.kill()
        for child in children:
            child.join()

    def submit(self, task: Callable[..., Any], *args: Any) -> Future[Any]:
        """Return a future of the result of a function, which is called with the study and `args`."""
        if self._pool is not None:
            with _interrupts_blocked():
                return self._pool.submit(_perform_in_worker, task, *args)
        future: Future[Any] = Future()
        future.set_result(task(self._study, *args))
        self._count()
        return future

    def wait(self, futures: Iterable[Future[Any]]) -> None:
        """Wait until all of these are done. Raises the error of the first that fails."""
        for future in as_completed(futures):
            if self._pool is not None:
                self._count()
            try:
                future.result()
            except BrokenProcessPool as error:
                raise HetlbError(
                    "a process of the simulation was killed, perhaps for want of memory: fewer --jobs?"
                ) from error

    def _count(self) -> None:
        self._done += 1
        self._on_done(self._done)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT for processes started inside; one received meanwhile is delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_study: Study | None = None


def _begin_worker(study: Study) -> None:
    global _study
    _study = study
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "expected a process that was started by another"
    wait_for_any([parent.sentinel])
    os._exit(1)


def _perform_in_worker(task: Callable[..., Any], *args: Any) -> Any:
    assert _study is not None, "expected a process begun by _begin_worker"
    return task(_study, *args)
