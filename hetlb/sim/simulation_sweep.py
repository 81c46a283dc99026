"""Many simulations of one fleet: every policy at every rate for every seed, on as many processes as asked.

The results depend on what is asked for alone, not on the number of processes nor on which is ready
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
from typing import Any, TypeAlias

from hetlb.core.latency import IterationRule
from hetlb.core.objective import ServiceClass
from hetlb.core.predictor import make_predictor
from hetlb.core.setup import SchedulerSetup
from hetlb.errors import HetlbError
from hetlb.sim.alone import full_tokens_per_s, requests_while_full, run_alone
from hetlb.sim.fleet_engine import EngineSpec
from hetlb.sim.fleet_simulation import FleetSimulation
from hetlb.sim.reference import fixed_split
from hetlb.sim.series import FleetSeries
from hetlb.workload.arrivals import PlannedRequest, Waves, make_plan
from hetlb.workload.content import PromptContent
from hetlb.workload.traces import Row

#: The arrivals that the trace recorded, in place of a rate.
TRACE = "trace"
_INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class StudyLoad:
    """The requests of every run: rows of a trace, how many of them, and how evenly they arrive.

    `contents` are those of the rows, None where they share nothing.
    """

    rows: Sequence[Row]
    num_prompts: int | None = None
    burstiness: float = 1.0
    contents: Sequence[PromptContent] | None = None
    waves: Waves | None = None

    @property
    def count(self) -> int:
        """Requests of a run."""
        return len(self.rows) if self.num_prompts is None else self.num_prompts

    def plan(self, rate: float | str, seed: int) -> list[PlannedRequest]:
        """Due time of each request. Raises `ValueError` for `TRACE` on rows without arrival times."""
        return make_plan(
            self.rows,
            self.num_prompts,
            rate,
            random.Random(seed),
            self.burstiness,
            waves=self.waves,
            contents=self.contents,
        )


@dataclass(frozen=True, slots=True)
class Study:
    """Settings that all runs of a sweep have in common. The set-up's own policy and seed are not used.

    `classes` are those of the requests by name, the default first.
    """

    setup: SchedulerSetup
    engines: Mapping[str, EngineSpec]
    model: str
    rule: IterationRule
    load: StudyLoad
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
    """Data of a picture of one run: latencies of the completed requests in seconds, and the fleet."""

    ttft_s: list[float]
    tpot_s: list[float]
    e2el_s: list[float]
    series: FleetSeries


@dataclass(slots=True)
class Ran:
    """One run: figures as `hetlb.workload.records` names them, the yardsticks beside it, what was watched.

    `bound` is the sum of what each instance reaches alone on all requests, its drain included, `steady_bound`
    the same while each is full.
    """

    cell: StudyCell
    summary: dict[str, Any]
    bound: dict[str, float]
    steady_bound: dict[str, float]
    split: dict[str, float] | None
    watched: Watched | None


@dataclass(frozen=True, slots=True)
class _Alone:
    """One instance alone with all requests at once, in the order of the rows or of their arrival."""

    instance: str
    rate: float | str


@dataclass(frozen=True, slots=True)
class _Split:
    """The fixed division of all requests at once."""

    seed: int
    alone_tok_s: tuple[tuple[str, float], ...]


_Task: TypeAlias = StudyCell | _Alone | _Split


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
    orders = {_order(cell.rate) for cell in cells}
    alones = [_Alone(name, order) for order in sorted(orders, key=str) for name in kinds.values()]
    split_seeds = list(dict.fromkeys(cell.seed for cell in cells if cell.rate == _INFINITE))
    tasks = len(alones) + len(split_seeds) + len(cells)
    with _Workers(study, min(jobs, tasks), lambda done: on_progress(done, tasks)) as workers:
        alone = {task: workers.submit(task) for task in alones}
        runs = [workers.submit(cell) for cell in cells]
        workers.wait(alone.values())
        alone_tok_s, steady_tok_s = (
            {
                order: {
                    spec.name: alone[_Alone(kinds[study.engines[spec.name]], order)].result()[figure]
                    for spec in study.setup.specs
                }
                for order in orders
            }
            for figure in (0, 1)
        )
        splits = {
            seed: workers.submit(_Split(seed, tuple(alone_tok_s[_INFINITE].items()))) for seed in split_seeds
        }
        workers.wait([*runs, *splits.values()])
    ran = []
    for cell, future in zip(cells, runs, strict=True):
        summary, watched = future.result()
        bound = {"total_token_throughput": sum(alone_tok_s[_order(cell.rate)].values())}
        steady_bound = {"total_token_throughput": sum(steady_tok_s[_order(cell.rate)].values())}
        split = splits[cell.seed].result() if cell.rate == _INFINITE else None
        ran.append(Ran(cell, summary, bound, steady_bound, split, watched))
    return ran


def _order(rate: float | str) -> float | str:
    """A rate whose plan has the requests in the same order."""
    return TRACE if rate == TRACE else _INFINITE


# --- one task, in whichever process ---------------------------------------------------------------------


def _perform(study: Study, task: _Task) -> Any:
    if isinstance(task, StudyCell):
        return _run(study, task)
    if isinstance(task, _Alone):
        return _alone(study, task)
    plan = study.load.plan(_INFINITE, task.seed)
    oracle = {planned.index: max(1, planned.output_tokens) for planned in plan}
    setup, alone = study.setup, dict(task.alone_tok_s)
    predictor = make_predictor(
        setup.predictor, rng=random.Random(task.seed), lengths=setup.lengths, oracle=oracle
    )
    split = fixed_split(study.engines, plan, study.rule, alone, predictor, model=study.model)
    return {"total_token_throughput": split}


def _alone(study: Study, task: _Alone) -> tuple[float, float]:
    """Tokens/s of one instance alone: on all requests of a run, and while it is full."""
    load, spec = study.load, study.engines[task.instance]
    plan = load.plan(task.rate, 0)
    whole = run_alone(spec, plan, study.rule)
    count = requests_while_full(spec, plan)
    if count > load.count:
        plan = replace(load, num_prompts=count).plan(task.rate, 0)
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
    watched = Watched(
        [ttft for record in done if (ttft := record.ttft_s) is not None],
        [tpot for record in done if (tpot := record.tpot_s) is not None],
        [record.e2el_s for record in done],
        series,
    )
    return result.summary(), watched


# --- processes ------------------------------------------------------------------------------------------


class _Workers:
    """Performs tasks in `jobs` processes, or here if that is one."""

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

    def submit(self, task: _Task) -> Future[Any]:
        """The result of a task, in time."""
        if self._pool is not None:
            with _interrupts_blocked():
                return self._pool.submit(_perform_in_worker, task)
        future: Future[Any] = Future()
        future.set_result(_perform(self._study, task))
        self._count()
        return future

    def wait(self, futures: Iterable[Future[Any]]) -> None:
        """Wait until all of these are done. Raises what the first that fails raises."""
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


def _perform_in_worker(task: _Task) -> Any:
    assert _study is not None, "expected a process begun by _begin_worker"
    return _perform(_study, task)
