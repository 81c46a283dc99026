"""Measured points to the constants k1..k8 and, for prefill, to the better forms; with honest errors.

Promise: no fitted model predicts a negative time, a time below its floor, or one that falls as batch or
length grows. Errors are relative and come from points that the fit did not see. R2 is never looked at:
plain least squares reaches 1.000 here and is 25 to 115 % wrong somewhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeWarning, curve_fit

from hetlb.core.latency import LatencyModel, PnormPrefill, PrefillGrid
from hetlb.errors import ProfileError

_Array = NDArray[np.float64]

#: Past these a fit is reported as one not to rely on.
MEAN_ERROR_LIMIT = 0.10
MAX_ERROR_LIMIT = 0.30

#: The default sweep: it fits as well as three times as many points.
DEFAULT_PREFILL_GRID = tuple((b, n) for b in (1, 4, 16) for n in (128, 512, 2048, 4096))
DEFAULT_DECODE_GRID = tuple((b, n) for b in (1, 8, 32, 128) for n in (256, 1024, 4096))

#: Up to so many points each is left out once; beyond, they are left out in this many groups.
_FOLDS = 12


class Phase(StrEnum):
    """Prefill: one forward pass of `batch` prompts of `length`; decode: one step at `length` cached."""

    PREFILL = "prefill"
    DECODE = "decode"


class Form(StrEnum):
    """What a prediction comes from: k1..k8, the p-norm form, or that corrected by the measured grid."""

    PAPER = "paper"
    PNORM = "pnorm"
    GRID = "grid"


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: seconds that `batch` requests of `length` tokens took.

    A live engine splits what exceeds its token budget: `passes` is how many forward passes a prefill took.
    """

    phase: Phase
    batch: int
    length: int
    seconds: float
    passes: int = 1


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Relative errors over some points, and the point where it is worst."""

    mean: float
    median: float
    p95: float
    max: float
    points: int
    worst_batch: int
    worst_length: int


@dataclass(frozen=True, slots=True)
class PhaseFit:
    """One phase: the chosen form, and the held-out errors of every form that was tried."""

    form: Form
    held_out: dict[Form, ErrorSummary]

    @property
    def error(self) -> ErrorSummary:
        """Of the chosen form."""
        return self.held_out[self.form]


@dataclass(frozen=True, slots=True)
class FitResult:
    """A fitted latency model, its times and their errors, and what a reader should be warned of."""

    latency: LatencyModel
    predict: dict[Phase, Predictor]
    prefill: PhaseFit
    decode: PhaseFit
    warnings: tuple[str, ...]


class Predictor(Protocol):
    """Seconds that `batch` requests of `length` tokens take in `passes` equal passes."""

    def __call__(self, batch: float, length: float, passes: int = 1) -> float:
        """Seconds."""


def merge_repeats(points: Iterable[Point]) -> list[Point]:
    """One point for each phase, batch and length: the median of its repeats. In sorted order."""
    repeats: dict[tuple[Phase, int, int], list[Point]] = {}
    for point in points:
        repeats.setdefault((point.phase, point.batch, point.length), []).append(point)
    return [
        replace(same[0], seconds=median(point.seconds for point in same))
        for _, same in sorted(repeats.items())
    ]


def fit(points: Iterable[Point], *, form: Form | None = None, relative: bool = True) -> FitResult:
    """Fit both phases. `form` fixes the prefill form, None chooses by held-out error.

    Raises `ProfileError` where a phase has too few or unusable points.
    """
    merged = merge_repeats(points)
    by_phase = {phase: [p for p in merged if p.phase is phase] for phase in Phase}
    for phase, phase_points in by_phase.items():
        _check_enough(phase, phase_points)
    prefill, decode = by_phase[Phase.PREFILL], by_phase[Phase.DECODE]
    tried = tuple(Form) if form is None else tuple(dict.fromkeys((Form.PAPER, form)))
    held_out: dict[Form, ErrorSummary] = {}
    for each in tried:
        try:
            held_out[each] = held_out_errors(prefill, each, relative=relative)
            fit_phase(prefill, each, relative=relative)
        except ProfileError:
            if each in (Form.PAPER, form):
                raise
            held_out.pop(each, None)  # points too odd for this form: it is not a candidate
    # By the median: with 12 points one that the others do not determine would decide the mean.
    chosen = form if form is not None else min(held_out, key=lambda each: held_out[each].median)
    k1, k2, k3, k4 = fit_linear(prefill, relative=relative)
    k5, k6, k7, k8 = fit_linear(decode, relative=relative)
    better = None if chosen is Form.PAPER else fit_pnorm(prefill)
    if better is not None and chosen is Form.GRID:
        better = with_grid(better, prefill)
    prefill_fit = PhaseFit(chosen, held_out)
    decode_errors = {Form.PAPER: held_out_errors(decode, Form.PAPER, relative=relative)}
    decode_fit = PhaseFit(Form.PAPER, decode_errors)
    return FitResult(
        LatencyModel(k1, k2, k3, k4, k5, k6, k7, k8, better),
        {
            Phase.PREFILL: fit_phase(prefill, chosen, relative=relative),
            Phase.DECODE: fit_phase(decode, Form.PAPER, relative=relative),
        },
        prefill_fit,
        decode_fit,
        (*_warnings(Phase.PREFILL, prefill_fit.error), *_warnings(Phase.DECODE, decode_fit.error)),
    )


def _check_enough(phase: Phase, points: Sequence[Point]) -> None:
    for point in points:
        if not (math.isfinite(point.seconds) and point.seconds > 0):
            raise ProfileError(
                f"{phase} at batch {point.batch}, length {point.length}: "
                f"expected a time above 0, got {point.seconds}"
            )
    batches, lengths = {p.batch for p in points}, {p.length for p in points}
    if len(points) < 8 or len(batches) < 2 or len(lengths) < 2:
        raise ProfileError(
            f"{phase}: expected at least 8 points over 2 batch sizes and 2 lengths, got {len(points)} "
            f"over {len(batches)} and {len(lengths)}"
        )


def _warnings(phase: Phase, error: ErrorSummary) -> list[str]:
    lines = []
    if error.mean > MEAN_ERROR_LIMIT:
        lines.append(f"{phase}: the mean held-out error is {error.mean:.1%} (over {MEAN_ERROR_LIMIT:.0%})")
    if error.max > MAX_ERROR_LIMIT:
        lines.append(
            f"{phase}: the largest held-out error is {error.max:.1%} (over {MAX_ERROR_LIMIT:.0%}), at batch "
            f"{error.worst_batch}, length {error.worst_length}"
        )
    return lines


# --- errors ------------------------------------------------------------------------------------------


def errors_on(predict: Predictor, points: Sequence[Point]) -> ErrorSummary:
    """Relative errors of `predict(batch, length)` on `points`."""
    return _summary(points, [abs(predict(p.batch, p.length, p.passes) / p.seconds - 1.0) for p in points])


def held_out_errors(points: Sequence[Point], form: Form, *, relative: bool = True) -> ErrorSummary:
    """Relative errors on points left out of the fit, each once (cross-validation, no randomness).

    The four corners of the grid are never left out: without its corner a fit would have to extrapolate
    to it, which the finished one never has to within the grid.
    """
    ends = [{min(axis), max(axis)} for axis in ([p.batch for p in points], [p.length for p in points])]
    corners = [p for p in points if p.batch in ends[0] and p.length in ends[1]]
    points = [p for p in points if p not in corners] or points
    folds = min(len(points), _FOLDS)
    errors = [0.0] * len(points)
    for fold in range(folds):
        # A stride that shares no factor with the grid's rows, so that no fold is a whole row of it.
        group = [i for i in range(len(points)) if (i * 7 + i // folds) % folds == fold]
        left_out = set(group)
        predict = fit_phase(
            [*corners, *(p for i, p in enumerate(points) if i not in left_out)], form, relative=relative
        )
        for i in group:
            point = points[i]
            errors[i] = abs(predict(point.batch, point.length, point.passes) / point.seconds - 1.0)
    return _summary(points, errors)


def _summary(points: Sequence[Point], errors: Sequence[float]) -> ErrorSummary:
    worst = max(range(len(points)), key=errors.__getitem__)
    return ErrorSummary(
        float(np.mean(errors)),
        float(np.median(errors)),
        float(np.percentile(errors, 95)),
        errors[worst],
        len(points),
        points[worst].batch,
        points[worst].length,
    )


def fit_phase(points: Sequence[Point], form: Form, *, relative: bool = True) -> Predictor:
    """The times of one phase, fitted in one form (decode knows only the paper's)."""
    if form is Form.PAPER:
        a, b, c, d = fit_linear(points, relative=relative)

        def linear_s(batch: float, length: float, passes: int = 1) -> float:
            longest = min(length, batch * length / passes)
            return a * batch * length + b * batch + passes * (c * longest + d)

        return linear_s
    better = fit_pnorm(points)
    if form is Form.GRID:
        better = with_grid(better, points)
    return partial(_passes_s, better)


def _passes_s(form: PnormPrefill, batch: float, length: float, passes: int = 1) -> float:
    """Equal passes, each over whole prompts or a piece of one; attention is over the whole prompt."""
    return passes * form.pass_s(
        batch * length / passes, max(1.0, batch / passes), batch * length * length / passes
    )


# --- the paper's four terms ---------------------------------------------------------------------------


def fit_linear(
    points: Sequence[Point], *, relative: bool = True, bounded: bool = True
) -> tuple[float, float, float, float]:
    """Coefficients of batch*length, batch, length and 1, none negative unless `bounded` is false.

    Non-negative coefficients are what keeps a prediction from falling with batch or length or below
    its floor at every batch and length, not only where it was measured.
    """
    batch, length, seconds, passes = _arrays(points)
    # Every pass pays for its longest piece of a prompt and for itself.
    longest = np.minimum(length, batch * length / passes)
    terms = np.stack([batch * length, batch, longest * passes, passes])
    # Every term is scaled to the size of the answer: curve_fit's steps are then alike in all of them.
    scale = np.median(seconds) / terms.max(axis=1)

    def model(_: _Array, *shares: float) -> _Array:
        total: _Array = (np.asarray(shares) * scale) @ terms
        return total

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizeWarning)  # a covariance nobody asked for
        shares, _ = curve_fit(
            model,
            batch,
            seconds,
            p0=[0.5, 0.1, 0.1, 0.5],
            sigma=seconds if relative else None,
            bounds=(0.0, np.inf) if bounded else (-np.inf, np.inf),
            method="trf",
            ftol=1e-12,
            xtol=1e-12,
            gtol=1e-12,
            max_nfev=2000,
        )
    if bounded:
        shares = np.where(shares < 1e-9, 0.0, shares)  # the solver stops just inside its bounds
    k1, k2, k3, k4 = (float(value) for value in shares * scale)
    return k1, k2, k3, k4


def _arrays(points: Sequence[Point]) -> tuple[_Array, _Array, _Array, _Array]:
    rows = [(p.batch, p.length, p.seconds, p.passes) for p in points]
    batch, length, seconds, passes = np.array(rows, dtype=np.float64).T
    return batch, length, seconds, passes


# --- the better forms of prefill ------------------------------------------------------------------------


def fit_pnorm(points: Sequence[Point]) -> PnormPrefill:
    """`(floor^p + (a*N*L)^p)^(1/p) + b*N*L^2`, weighted by 1/seconds; floor, a and b are not negative."""
    batch, length, seconds, passes = _arrays(points)
    tokens = batch * length / passes
    quadratic = batch * length * length
    floor_0, rate_0 = float((seconds / passes).min()), float(np.min(seconds / (tokens * passes)))
    bend_0 = float(np.max(seconds / quadratic)) * 1e-3

    def model(_: _Array, floor: float, rate: float, p: float, bend: float) -> _Array:
        larger = np.maximum(floor * floor_0, rate * rate_0 * tokens)
        smaller = np.minimum(floor * floor_0, rate * rate_0 * tokens)
        dense: _Array = larger * (1.0 + (smaller / larger) ** p) ** (1.0 / p)
        return passes * dense + bend * bend_0 * quadratic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizeWarning)
        try:
            best, _ = curve_fit(
                model,
                batch,
                seconds,
                p0=[0.8, 0.9, 2.0, 0.1],
                sigma=seconds,
                bounds=([1e-6, 1e-6, 1.0, 0.0], [np.inf, np.inf, 12.0, np.inf]),
                method="trf",
                max_nfev=5000,
            )
        except RuntimeError as error:
            raise ProfileError(f"prefill: expected points that the p-norm form fits: {error}") from error
    floor, rate, p, bend = (float(value) for value in best)
    return PnormPrefill(floor * floor_0, rate * rate_0, bend * bend_0, p)


def with_grid(base: PnormPrefill, points: Sequence[Point]) -> PnormPrefill:
    """`base` corrected by what was measured, bilinear in log(batch) and log(length) between the points.

    Measured grids fall in places, so what is interpolated is made monotone: between two neighbours the
    logarithm of measured / base may fall at most as fast as the logarithm of base rises. The smallest
    such surface above the measurements and the largest below are averaged; the constraints are linear,
    so the mean keeps them. Beyond the grid the correction of its edge goes on.
    """
    batches = sorted({p.batch for p in points})
    lengths = sorted({p.length for p in points})
    ratio: dict[tuple[int, int], float] = {
        (p.batch, p.length): math.log(p.seconds / _passes_s(base, p.batch, p.length, p.passes))
        for p in points
    }
    measured = np.array([[_nearest(ratio, b, n) for n in lengths] for b in batches])
    steps_b, steps_l = _least_rises(base, batches, lengths)
    upper, lower = measured.copy(), measured.copy()
    rows, columns = measured.shape
    for i in range(rows):
        for j in range(columns):
            if i:
                upper[i, j] = max(upper[i, j], upper[i - 1, j] - steps_b[i - 1, j])
            if j:
                upper[i, j] = max(upper[i, j], upper[i, j - 1] - steps_l[i, j - 1])
    for i in reversed(range(rows)):
        for j in reversed(range(columns)):
            if i + 1 < rows:
                lower[i, j] = min(lower[i, j], lower[i + 1, j] + steps_b[i, j])
            if j + 1 < columns:
                lower[i, j] = min(lower[i, j], lower[i, j + 1] + steps_l[i, j])
    logs = (upper + lower) / 2
    return PnormPrefill(
        base.floor_s,
        base.token_s,
        base.attention_s,
        base.p,
        PrefillGrid(tuple(batches), tuple(lengths), tuple(tuple(float(x) for x in row) for row in logs)),
    )


def _nearest(ratio: dict[tuple[int, int], float], batch: int, length: int) -> float:
    """The measured correction, or where the grid has a hole that of the nearest point in logarithms."""
    if (batch, length) in ratio:
        return ratio[batch, length]
    nearest = min(ratio, key=lambda at: (math.hypot(math.log(at[0] / batch), math.log(at[1] / length)), at))
    return ratio[nearest]


def _least_rises(base: PnormPrefill, batches: Sequence[int], lengths: Sequence[int]) -> tuple[_Array, _Array]:
    """How much the logarithm of `base` rises at least from node to node, were its slope the least there.

    Its slope in log(batch) and log(length) grows along both axes, so the least slope of a cell is at its
    lower corner; the node's own edge is part of up to two cells, and the lower one decides.
    """
    log_b, log_l = np.log(batches), np.log(lengths)
    steps_b = np.empty((len(batches) - 1, len(lengths)))
    steps_l = np.empty((len(batches), len(lengths) - 1))
    for i in range(len(batches) - 1):
        for j in range(len(lengths)):
            slope = base.elasticity(batches[i], lengths[max(0, j - 1)])[0]
            steps_b[i, j] = slope * (log_b[i + 1] - log_b[i])
    for i in range(len(batches)):
        for j in range(len(lengths) - 1):
            slope = base.elasticity(batches[max(0, i - 1)], lengths[j])[1]
            steps_l[i, j] = slope * (log_l[j + 1] - log_l[j])
    # Beyond the grid's lower edges the correction is constant along one axis and varies along the other,
    # where the base is flatter still: there the slope at batch 1 and one token counts.
    steps_b[:, 0] = [base.elasticity(b, 1)[0] * (log_b[i + 1] - log_b[i]) for i, b in enumerate(batches[:-1])]
    steps_l[0, :] = [base.elasticity(1, n)[1] * (log_l[j + 1] - log_l[j]) for j, n in enumerate(lengths[:-1])]
    return steps_b, steps_l
