"""Linear, quadratic and mixed-integer programs, solved by HiGHS (MIT licence, the package `highspy`).

`highspy` and not `scipy.optimize.milp`, which runs the same solver: plans need the incumbent and the bound
while the solver runs, a warm start, an end on Ctrl-C with the incumbent kept, and duals.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import FrameType
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from hetlb.errors import PlanError
from hetlb.tools.sim.deadline import ends_when

INFINITY = math.inf
#: (incumbent objective, proven bound), either of them NaN before there is one.
OnProgress = Callable[[float, float], None]
#: The values of all columns of an incumbent.
OnSolution = Callable[[NDArray[np.float64]], None]
_PROGRESS_INTERVAL_S = 0.2
#: Wall time that a solve with a limit in CPU time may take, as a multiple of it.
_WALL_PER_CPU = 20.0
#: Wall time of a solve that begins after the end of the time.
_LEAST_SOLVE_S = 0.01
#: Flows over 24 machines need about a hundred.
_MOST_QUADRATIC_ITERATIONS = 1000


class Interrupt:
    """A request to stop solving and keep the best solution so far; set by Ctrl-C inside `catching`."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Take the first Ctrl-C as a request to stop; a second one ends the process as usual."""
        before = signal.getsignal(signal.SIGINT)

        def stop(_number: int, _frame: FrameType | None) -> None:
            self.requested = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True)
class SolveLimits:
    """Limits of a solve: `gap` is relative, `deadline` a time of `clock`; `seed` makes runs repeatable."""

    gap: float = 1e-4
    deadline: float = INFINITY
    seed: int = 0
    interrupt: Interrupt | None = None
    clock: Callable[[], float] = time.monotonic

    @property
    def interrupted(self) -> bool:
        return self.interrupt is not None and self.interrupt.requested

    @property
    def over(self) -> bool:
        return self.interrupted or self.clock() >= self.deadline

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, 0 after an interrupt."""
        return 0.0 if self.interrupted else max(0.0, self.deadline - self.clock())

    def stopping(self) -> AbstractContextManager[None]:
        """Return a context: simulations inside stop once the limits are over."""
        return ends_when(lambda: self.over)

    def within(self, seconds: float, gap: float | None = None) -> SolveLimits:
        """Return the same limits, with a deadline at most `seconds` from now, and another gap."""
        deadline = min(self.deadline, self.clock() + seconds)
        return replace(self, deadline=deadline, gap=self.gap if gap is None else gap)


def _new_solver() -> Any:
    """Return a HiGHS object that prints nothing, on one thread."""
    _print_banner_nowhere()
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.changeObjectiveSense(highspy.ObjSense.kMaximize)
    highs.setOptionValue("threads", 1)
    # The active-set method may cycle where much is degenerate; every point on its way is feasible.
    highs.setOptionValue("qp_iteration_limit", _MOST_QUADRATIC_ITERATIONS)
    return highs


@cache
def _print_banner_nowhere() -> None:
    """Make the first object of a process: its banner (1.16) would go to stdout, among a command's JSON."""
    sys.stdout.flush()
    try:
        stdout = os.dup(1)
    except OSError:  # closed
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        highspy.Highs()  # type: ignore[no-untyped-call]
        ctypes.CDLL(None).fflush(None)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)


@dataclass(frozen=True, slots=True)
class Solution:
    """Values of all columns, the objective and the proven bound on it. `duals` (one a row) of LPs only."""

    values: NDArray[np.float64]
    objective: float
    bound: float
    duals: NDArray[np.float64]


class LinearProgram:
    """A maximisation over columns with bounds, subject to rows with bounds; some columns are integers."""

    def __init__(self) -> None:
        self._highs = _new_solver()
        self._integer = False
        self._squares: dict[int, float] = {}

    @classmethod
    def of_equations(
        cls,
        uppers: Sequence[float],
        rows: Sequence[Sequence[tuple[int, float]]],
        sums: Sequence[float],
        squares: Sequence[float],
    ) -> LinearProgram:
        """Return a quadratic program at once: columns from 0 to `uppers`, each row's sum, and `squares`.

        weight / 2 times the square of each column is subtracted from the objective.
        """
        program, lp = cls(), highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(uppers), len(rows)
        lp.col_cost_ = lp.col_lower_ = np.zeros(len(uppers))
        lp.col_upper_ = np.array(uppers)
        lp.row_lower_ = lp.row_upper_ = np.array(sums)
        matrix = lp.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = len(uppers), len(rows)
        matrix.start_ = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        matrix.index_ = np.array([column for row in rows for column, _ in row], dtype=np.int32)
        matrix.value_ = np.array([value for row in rows for _, value in row])
        lp.sense_ = highspy.ObjSense.kMaximize
        program._highs.passModel(lp)
        program._squares = dict(enumerate(squares))
        return program

    @property
    def columns(self) -> int:
        return int(self._highs.getNumCol())

    def column(
        self, cost: float = 0.0, lower: float = 0.0, upper: float = INFINITY, *, integer: bool = False
    ) -> int:
        """Add a column; returns its index."""
        index = self.columns
        self._highs.addCol(cost, lower, upper, 0, [], [])
        if integer:
            self._integer = True
            self._highs.changeColIntegrality(index, highspy.HighsVarType.kInteger)
        return index

    def row(
        self, entries: Iterable[tuple[int, float]], lower: float = -INFINITY, upper: float = INFINITY
    ) -> int:
        """Add `lower <= sum of coefficient * column <= upper`; returns its index."""
        held = [(column, coefficient) for column, coefficient in entries if coefficient]
        self._highs.addRow(lower, upper, len(held), [c for c, _ in held], [float(v) for _, v in held])
        return int(self._highs.getNumRow()) - 1

    def set_cost(self, column: int, cost: float) -> None:
        """Change one coefficient of the objective, also between solves."""
        self._highs.changeColCost(column, cost)

    def set_bounds(self, column: int, lower: float, upper: float) -> None:
        """Change the bounds of a column, also between solves."""
        self._highs.changeColBounds(column, lower, upper)

    def solve(
        self,
        limits: SolveLimits,
        *,
        start: Sequence[float] | None = None,
        on_progress: OnProgress | None = None,
        on_solution: OnSolution | None = None,
    ) -> Solution | None:
        """Return the best solution found within the limits, None if there is none or none was found.

        `start` is a feasible point to begin from; `on_solution` gets every incumbent of a program with
        integers. Raises `PlanError` if the solver fails.
        """
        highs = self._highs
        if self._squares:
            highs.passHessian(self._hessian())
        highs.setOptionValue("random_seed", limits.seed)
        highs.setOptionValue("mip_rel_gap", limits.gap)
        # The solver's clock goes on from solve to solve. It is the wall's: of limits in CPU time `look` keeps
        # account, and a busy machine may take longer.
        left = limits.left_s * (_WALL_PER_CPU if limits.clock is time.process_time else 1.0)
        until = highs.getRunTime() + max(_LEAST_SOLVE_S, left) if left < INFINITY else INFINITY
        highs.setOptionValue("time_limit", until)
        if start is not None:
            warm = highspy.HighsSolution()
            warm.col_value = list(start)
            highs.setSolution(warm)
        if not self._integer:
            highs.run()
        else:
            self._run_integer(limits, on_progress, on_solution)
        status = highs.getModelStatus()
        info = highs.getInfo()
        names = highspy.HighsModelStatus
        if status in (names.kInfeasible, names.kUnboundedOrInfeasible):
            return None
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            if status in (names.kTimeLimit, names.kInterrupt):
                return None
            raise PlanError(f"the solver gave no solution: {highs.modelStatusToString(status)}")
        solution = highs.getSolution()
        objective = info.objective_function_value
        return Solution(
            np.asarray(solution.col_value, dtype=np.float64),
            objective,
            info.mip_dual_bound if self._integer else objective,
            np.asarray(solution.row_dual, dtype=np.float64),
        )

    def _hessian(self) -> Any:
        hessian = highspy.HighsHessian()
        hessian.dim_ = self.columns
        hessian.format_ = highspy.HessianFormat.kTriangular
        hessian.start_ = np.arange(self.columns + 1, dtype=np.int32)
        hessian.index_ = np.arange(self.columns, dtype=np.int32)
        hessian.value_ = np.array([-self._squares.get(column, 0.0) for column in range(self.columns)])
        return hessian

    def _run_integer(
        self, limits: SolveLimits, on_progress: OnProgress | None, on_solution: OnSolution | None
    ) -> None:
        shown = time.monotonic()

        def look(event: Any) -> None:
            nonlocal shown
            cpu_over = limits.clock is time.process_time and limits.over
            event.data_in.user_interrupt = limits.interrupted or cpu_over
            now = time.monotonic()
            if on_progress is not None and now - shown >= _PROGRESS_INTERVAL_S:
                shown = now
                both = event.data_out.mip_primal_bound, event.data_out.mip_dual_bound
                on_progress(*(each if math.isfinite(each) else math.nan for each in both))

        def improved(event: Any) -> None:
            if on_solution is not None:
                on_solution(np.array(event.data_out.mip_solution, dtype=np.float64))

        self._highs.cbMipInterrupt += look
        self._highs.cbMipImprovingSolution += improved
        try:
            self._highs.run()
        finally:
            self._highs.cbMipInterrupt -= look
            self._highs.cbMipImprovingSolution -= improved
