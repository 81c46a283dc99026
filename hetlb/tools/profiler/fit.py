"""Measured points to the constants k1..k8 and to the better forms; with errors on points left out.

No fitted model predicts a negative time, a time below its floor, or one that falls as batch or length grows.
R2 is never looked at: plain least squares reaches 1.000 here and is 25 to 115 % wrong somewhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, TypeAlias

import numpy as np
import scipy
from numpy.typing import NDArray

from hetlb.balancer.config.profile_file import PhaseReport, fit_warnings
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.step_times import (
    DecodeTable,
    MixedTerm,
    PnormPrefill,
    PrefillGrid,
    in_tiles,
)
from hetlb.errors import ProfileError
from hetlb.tools.profiler.grid import Point, StepKind, merge_repeats
from hetlb.tools.profiler.launched import LaunchedPrefill, fit_launched

_Array = NDArray[np.float64]
#: The four constants of the paper's form, or a better form.
Fitted: TypeAlias = tuple[float, float, float, float] | PnormPrefill | LaunchedPrefill | DecodeTable

#: Factor on the held-out error of a table over the batch, compared with k5..k8. It is below 1, to favour the
#: table.
_TABLE_GAIN = 0.75
#: Prefill with launch times is chosen if its held-out error is below this share of the other forms'.
_LAUNCH_GAIN = 0.75
#: Relative error at a point of a live sweep. A form with a larger one gives way to the grid's form.
_LEAST_POINT_ERROR = 0.03

#: Fewest points to fit a phase.
_LEAST_POINTS = 8
#: Most groups of points left out in turn: with fewer points each is its own group.
_MAX_FOLDS = 12


class PrefillForm(StrEnum):
    """Forms of prefill: k1..k4; the p-norm form; p-norm with the measured grid, also with launch times."""

    PAPER = "paper"
    PNORM = "pnorm"
    GRID = "grid"
    LAUNCH = "launch"


class DecodeForm(StrEnum):
    """Forms of a decode step: k5..k8, or a table over the batch."""

    PAPER = "paper"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class FitResult:
    """A fitted latency model, the form taken of prefill and of decode, and warnings for a reader.

    `reports` have the held-out errors of each phase (and, as `PHASE_paper`, of the paper's form if
    another was taken) under the names of `FitReport`. `tile` is None if no point shows it and none was
    stated.
    """

    latency: LatencyModel
    forms: dict[StepKind, Fitted]
    reports: dict[str, PhaseReport]
    warnings: tuple[str, ...]
    tile: int | None = None


def fit(
    points: Iterable[Point],
    *,
    form: PrefillForm | None = None,
    usual_tile: int | None = None,
    launched: bool = False,
    estimated: bool = False,
) -> FitResult:
    """Fit all phases. `form` fixes the prefill form, None chooses by held-out error.

    `launched`: the points include the host's kernel launches, unlike points of tables. `estimated`: the
    points are computed, so the forms through all of them are right, and the errors are at these points.

    The tile comes from the points, else it is the usual one. Mixed points are fitted if there are at least
    `LEAST_MIXED_POINTS`. Raises `ProfileError` if a phase has too few or unusable points.
    """
    merged = merge_repeats(points)
    by_phase = {phase: [p for p in merged if p.phase is phase] for phase in StepKind}
    for phase, phase_points in by_phase.items():
        _check_enough(phase, phase_points)
    prefill, decode, mixed = by_phase[StepKind.PREFILL], by_phase[StepKind.DECODE], by_phase[StepKind.MIXED]
    forms = tuple(each for each in PrefillForm if launched or each is not PrefillForm.LAUNCH)
    tile = None if form is PrefillForm.PAPER else shown_tile(prefill)
    tiles = dict.fromkeys(PrefillForm, tile or usual_tile or 1)
    tiles[PrefillForm.LAUNCH] = 1  # passes that launching holds up do not show one to the others
    if estimated:
        better, reports = _through(prefill, PrefillForm.GRID, tiles)
        table, of_decode = _through(decode, DecodeForm.TABLE, {})
    else:
        better, reports = _choose(prefill, forms, form, tiles)
        table, of_decode = _choose(decode, tuple(DecodeForm), None, {})
    launch = None
    if isinstance(better, LaunchedPrefill):
        launch, tile = better.launch, better.form.tile
        better = better.form
    reports |= of_decode
    latency = LatencyModel(
        *fit_linear(_usual(prefill)),
        *fit_linear(_usual(decode)),
        better_prefill=better if isinstance(better, PnormPrefill) else None,
        better_decode=table if isinstance(table, DecodeTable) else None,
        launch=launch,
    )
    if len(mixed) >= LEAST_MIXED_POINTS:
        reports[StepKind.MIXED] = _report("kernels", mixed, held_out_mixed_errors(latency, mixed))
        latency = replace(latency, mixed=fit_mixed(latency, mixed))
    return FitResult(
        latency,
        {StepKind.PREFILL: better, StepKind.DECODE: table},
        reports,
        tuple(line for phase in StepKind if phase in reports for line in fit_warnings(phase, reports[phase])),
        tile,
    )


_AnyForm = PrefillForm | DecodeForm
#: Largest sizes in the fit of k1..k8. A plane through larger ones is wrong for most requests.
_USUAL_BATCH, _USUAL_LENGTH = 128, 8192


def _usual(points: Sequence[Point]) -> Sequence[Point]:
    usual = [p for p in points if p.length <= _USUAL_LENGTH and p.batch <= _USUAL_BATCH]
    return usual if len(usual) >= _LEAST_POINTS else points


def _choose(
    points: Sequence[Point],
    forms: Sequence[_AnyForm],
    form: _AnyForm | None,
    tiles: Mapping[PrefillForm, int],
) -> tuple[Fitted, dict[str, PhaseReport]]:
    """Fit in `form`, or in the form of the least held-out error; the first of `forms` is the paper's."""
    paper = forms[0]
    errors: dict[_AnyForm, _Array] = {}
    fitted: dict[_AnyForm, Fitted] = {}
    for each in forms if form is None else dict.fromkeys((paper, form)):
        tile = tiles.get(each, 1) if isinstance(each, PrefillForm) else 1
        try:
            error, fitted[each] = held_out_errors(points, each, tile=tile), fit_form(points, each, tile)
            errors[each] = error
        except ProfileError:
            if each in (paper, form):
                raise  # else the points are too odd for this form: it is not a candidate
    # A plane has no attention to what was computed before: it is half the time of a prompt of 128k.
    long = any(point.length > _USUAL_LENGTH for point in points)
    candidates = [each for each in errors if not (long and each is paper)] or [paper]
    if PrefillForm.LAUNCH in forms and PrefillForm.GRID in candidates:  # a live sweep
        smooth = (PrefillForm.PAPER, PrefillForm.PNORM)
        allowed = np.array([max(_LEAST_POINT_ERROR, 2.0 * point.uncertainty) for point in points])
        missed = [each for each in smooth if (errors_on(fitted[each], points) > allowed).any()]
        candidates = [each for each in candidates if each not in missed]
    # By the median: with 12 points one that the others do not determine would decide the mean. Between
    # measured batches a table is right where a line is not, which few points can show: it is preferred.
    chosen = form or min(
        candidates,
        key=lambda each: _preference(each) * float(np.median(errors[each])),
    )
    phase, (_, left_out) = points[0].phase, _corners(points)
    reports = {str(phase): _report(chosen, left_out, errors[chosen])}
    if chosen is not paper:
        reports[f"{phase}_paper"] = _report(paper, left_out, errors[paper])
    return fitted[chosen], reports


def _through(
    points: Sequence[Point], form: _AnyForm, tiles: Mapping[PrefillForm, int]
) -> tuple[Fitted, dict[str, PhaseReport]]:
    """Fit in `form` to all points; return the errors at them."""
    fitted = fit_form(points, form, tiles.get(form, 1) if isinstance(form, PrefillForm) else 1)
    return fitted, {str(points[0].phase): _report(form, points, errors_on(fitted, points))}


def _preference(form: _AnyForm) -> float:
    """Return the factor on the held-out error of a form, to compare forms."""
    if form is DecodeForm.TABLE:
        return _TABLE_GAIN
    return 1.0 / _LAUNCH_GAIN if form is PrefillForm.LAUNCH else 1.0


def _check_enough(phase: StepKind, points: Sequence[Point]) -> None:
    for point in points:
        if not (math.isfinite(point.seconds) and point.seconds > 0):
            raise ProfileError(
                f"{phase} at batch {point.batch}, length {point.length}: "
                f"expected a time above 0, got {point.seconds}"
            )
    if phase is not StepKind.MIXED and (wrong := too_few([(p.batch, p.length) for p in points])):
        raise ProfileError(f"{phase}: {wrong}")


def too_few(sizes: Sequence[tuple[int, int]]) -> str:
    """Return why no phase can be fitted to points of these batches and lengths, "" if it can."""
    points, batches, lengths = set(sizes), {b for b, _ in sizes}, {n for _, n in sizes}
    if len(points) >= _LEAST_POINTS and len(batches) >= 2 and len(lengths) >= 2:
        return ""
    return (
        f"expected at least {_LEAST_POINTS} points over 2 batch sizes and 2 lengths, "
        f"got {len(points)} over {len(batches)} and {len(lengths)}"
    )


# --- errors ------------------------------------------------------------------------------------------


def errors_on(fitted: Fitted, points: Sequence[Point]) -> _Array:
    """Return the relative errors of a fit on `points`."""
    return np.array([abs(seconds_of(fitted, p.batch, p.length, p.passes) / p.seconds - 1.0) for p in points])


def _corners(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Return the corners of the grid, and the other points.

    The other points are all points if there are only corners.
    """
    batches, lengths = [p.batch for p in points], [p.length for p in points]
    ends = {min(batches), max(batches)}, {min(lengths), max(lengths)}
    corners = [p for p in points if p.batch in ends[0] and p.length in ends[1]]
    return corners, [p for p in points if p not in corners] or list(points)


def held_out_errors(points: Sequence[Point], form: _AnyForm, *, tile: int = 1) -> _Array:
    """Return the relative errors on points left out of the fit, each once (cross-validation, no randomness).

    The four corners of the grid are never left out: without its corner a fit would have to extrapolate
    to it, which the finished one never has to within the grid.
    """
    corners, points = _corners(points)
    folds = min(len(points), _MAX_FOLDS)
    errors = np.zeros(len(points))
    for fold in range(folds):
        # A stride that shares no factor with the grid's rows, so that no fold is a whole row of it.
        group = [i for i in range(len(points)) if (i * 7 + i // folds) % folds == fold]
        left_in = [*corners, *(p for i, p in enumerate(points) if i not in group)]
        errors[group] = errors_on(fit_form(left_in, form, tile), [points[i] for i in group])
    return errors


def _report(form: str, points: Sequence[Point], errors: _Array) -> PhaseReport:
    worst = points[int(errors.argmax())]
    place: dict[Literal["batch", "length", "prefill_tokens"], int] = {
        "batch": worst.batch,
        "length": worst.length,
    }
    if worst.prefill_tokens:
        place["prefill_tokens"] = worst.prefill_tokens
    return PhaseReport(
        form=str(form),
        mean_error=float(errors.mean()),
        p95_error=float(np.percentile(errors, 95)),
        max_error=float(errors.max()),
        points=len(points),
        worst=place,
        uncertainty=max((point.uncertainty for point in points), default=0.0) or None,
    )


def fit_form(points: Sequence[Point], form: _AnyForm, tile: int = 1) -> Fitted:
    """Fit prefill or decode in one form. Raises `ProfileError` if the points do not allow it."""
    if form is DecodeForm.TABLE:
        return fit_table(points)
    if form in (PrefillForm.PAPER, DecodeForm.PAPER):
        return fit_linear(points)
    if form is PrefillForm.LAUNCH:
        launched = fit_launched(*_arrays(points), None if tile == 1 else tile)
        return replace(launched, form=_computing_grid(launched, points))
    better = fit_pnorm(points, tile)
    return with_grid(better, points) if form is PrefillForm.GRID else better


def seconds_of(fitted: Fitted, batch: float, length: float, passes: int = 1) -> float:
    """Return the seconds that `batch` requests of `length` tokens take, in `passes` equal passes.

    Each pass is over whole prompts or a piece of one; attention is over the whole prompt.
    """
    if isinstance(fitted, PnormPrefill | LaunchedPrefill):
        attended = batch * length * length / passes
        return passes * fitted.pass_s(batch * length / passes, max(1.0, batch / passes), attended)
    if isinstance(fitted, DecodeTable):
        return passes * fitted.step_s(batch, batch * length)
    a, b, c, d = fitted
    longest = min(length, batch * length / passes)
    return a * batch * length + b * batch + passes * (c * longest + d)


# --- the paper's four terms ---------------------------------------------------------------------------


def fit_linear(points: Sequence[Point]) -> tuple[float, float, float, float]:
    """Return the coefficients of batch*length, batch, length and 1, weighted by 1/seconds, none negative.

    Non-negative coefficients are what keeps a prediction from falling with batch or length or below
    its floor at every batch and length, not only where it was measured.
    """
    batch, length, seconds, passes = _arrays(points)
    # Every pass pays for its longest piece of a prompt and for itself.
    longest = np.minimum(length, batch * length / passes)
    terms = np.stack([batch * length, batch, longest * passes, passes])
    # Every term is scaled to the size of the answer: the system is well conditioned then.
    scale = np.median(seconds) / terms.max(axis=1)
    shares, _ = scipy.optimize.nnls((terms.T * scale) / seconds[:, None], np.ones(len(points)))
    shares = np.where(shares < 1e-9, 0.0, shares)  # rounding, not work
    k1, k2, k3, k4 = (float(value) for value in shares * scale)
    return k1, k2, k3, k4


#: Standard error up to which all points weigh alike. The same is the weight of a mixed constant for each
#: e-fold off the assumed one.
_SURE_ERROR = 0.01


def _doubt(points: Sequence[Point]) -> _Array:
    """Return each point's uncertainty over `_SURE_ERROR`, at least 1. Its errors are divided by that."""
    return np.array([max(1.0, point.uncertainty / _SURE_ERROR) for point in points])


def _arrays(points: Sequence[Point]) -> tuple[_Array, _Array, _Array, _Array]:
    rows = [(p.batch, p.length, p.seconds, p.passes) for p in points]
    batch, length, seconds, passes = np.array(rows, dtype=np.float64).T
    return batch, length, seconds, passes


# --- the better forms of prefill ------------------------------------------------------------------------


#: Maximum evaluations of a fit. Times as they should be take 30; times without any order never end.
_MOST_EVALUATIONS = 300


def fit_pnorm(points: Sequence[Point], tile: int = 1) -> PnormPrefill:
    """Fit `(floor^p + (a*N*L)^p)^(1/p) + b*N*L^2`, weighted by 1/seconds; floor, a and b are not negative."""
    batch, length, seconds, passes = _arrays(points)
    tokens = np.array([in_tiles(each, tile) for each in batch * length / passes])
    quadratic = batch * length * length
    floor_0, rate_0 = float((seconds / passes).min()), float(np.min(seconds / (tokens * passes)))
    bend_0 = float(np.max(seconds / quadratic)) * 1e-3

    def model(_: _Array, floor: float, rate: float, p: float, bend: float) -> _Array:
        larger = np.maximum(floor * floor_0, rate * rate_0 * tokens)
        smaller = np.minimum(floor * floor_0, rate * rate_0 * tokens)
        dense: _Array = larger * (1.0 + (smaller / larger) ** p) ** (1.0 / p)
        return passes * dense + bend * bend_0 * quadratic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.optimize.OptimizeWarning)
        try:
            best, _ = scipy.optimize.curve_fit(
                model,
                batch,
                seconds,
                p0=[0.8, 0.9, 2.0, 0.1],
                sigma=seconds * _doubt(points),
                bounds=([1e-6, 1e-6, 1.0, 0.0], [np.inf, np.inf, 12.0, np.inf]),
                method="trf",
                max_nfev=_MOST_EVALUATIONS,
            )
        except RuntimeError as error:
            raise ProfileError(f"prefill: expected points that the p-norm form fits: {error}") from error
    floor, rate, p, bend = (float(value) for value in best)
    return PnormPrefill(floor * floor_0, rate * rate_0, bend * bend_0, p, None, tile)


#: Sizes of tiles tried, and by how much the error must fall for one to be believed.
_TILES = (16, 32, 64, 128, 256)
_TILE_GAIN = 0.9


def shown_tile(points: Sequence[Point]) -> int | None:
    """Return the tile that the points show; None if all their token counts are multiples of 128, or few.

    1: time is proportional to tokens.
    """
    tokens = [p.batch * p.length / p.passes for p in points]
    if sum(count > 128 and count % 128 != 0 for count in tokens) < 2:
        return None

    def error(tile: int) -> float:
        try:
            return float(held_out_errors(points, PrefillForm.PNORM, tile=tile).mean())
        except ProfileError:
            return math.inf

    plain = error(1)
    best = min(_TILES, key=error)
    return best if error(best) < _TILE_GAIN * plain else 1


def with_grid(base: PnormPrefill, points: Sequence[Point]) -> PnormPrefill:
    """Return `base` corrected by the measured points, bilinear in the logarithms of batch and length.

    Measured grids fall in places, so the correction is made monotone: between two neighbours the logarithm of
    measured / base may fall at most as fast as the logarithm of base rises. Two such surfaces are found: the
    smallest above the measurements and the largest below. Their mean is taken; it keeps the constraints,
    which are linear. Beyond the grid the correction of its edge holds.
    """
    # The correction of a pass is looked up by the tokens of the pass, not of its whole prompt.
    points = merge_repeats(_one_pass(p) for p in points)
    single = [p for p in points if p.passes == 1]
    if len({p.batch for p in single}) > 1 and len({p.length for p in single}) > 1:
        points = single
    batches = sorted({p.batch for p in points})
    lengths = sorted({p.length for p in points})
    ratio: dict[tuple[int, int], float] = {
        (p.batch, p.length): math.log(p.seconds / seconds_of(base, p.batch, p.length, p.passes))
        for p in points
    }
    measured = np.array([[_nearest(ratio, b, n) for n in lengths] for b in batches])
    steps_b, steps_l = _least_rises(base, batches, lengths)
    upper, lower = measured.copy(), measured.copy()
    nodes = list(np.ndindex(measured.shape))
    for i, j in nodes:
        if i:
            upper[i, j] = max(upper[i, j], upper[i - 1, j] - steps_b[i - 1, j])
        if j:
            upper[i, j] = max(upper[i, j], upper[i, j - 1] - steps_l[i, j - 1])
    for i, j in reversed(nodes):
        if i + 1 < len(batches):
            lower[i, j] = min(lower[i, j], lower[i + 1, j] + steps_b[i, j])
        if j + 1 < len(lengths):
            lower[i, j] = min(lower[i, j], lower[i, j + 1] + steps_l[i, j])
    logs = (upper + lower) / 2
    ratios = tuple(tuple(float(x) for x in row) for row in logs)
    return replace(base, grid=PrefillGrid(tuple(batches), tuple(lengths), ratios))


def _one_pass(point: Point) -> Point:
    """Return one of the passes of a prefill if each is over whole prompts, else the point."""
    if point.passes == 1 or point.batch % point.passes:
        return point
    batch, seconds = point.batch // point.passes, point.seconds / point.passes
    return replace(point, batch=batch, seconds=seconds, passes=1)


def _computing_grid(launched: LaunchedPrefill, points: Sequence[Point]) -> PnormPrefill:
    """Return the computing form, corrected by the points not hidden by kernel launches."""
    computing = []
    for p in points:
        tokens, prompts = p.batch * p.length / p.passes, max(1.0, p.batch / p.passes)
        seconds = launched.computing_s(p.seconds / p.passes, tokens)
        if seconds is None:
            seconds = launched.form.pass_s(tokens, prompts, tokens * p.length)
        computing.append(replace(p, seconds=p.passes * seconds))
    return with_grid(launched.form, computing)


def _nearest(ratio: dict[tuple[int, int], float], batch: int, length: int) -> float:
    """Return the measured correction of a point; if it was not measured, the nearest point's."""
    if (batch, length) in ratio:
        return ratio[batch, length]
    nearest = min(ratio, key=lambda at: (math.hypot(math.log(at[0] / batch), math.log(at[1] / length)), at))
    return ratio[nearest]


def _elasticity(form: PnormPrefill, batch: float, input_tokens: float) -> tuple[float, float]:
    """Return d log(seconds) / d log(batch) and / d log(input_tokens) without the grid.

    Both rise with either.
    """
    rate = form.token_s * batch * input_tokens
    bend = form.attention_s * batch * input_tokens * input_tokens
    high = max(rate, form.floor_s)
    if high <= 0:
        return (1.0, 2.0) if bend > 0 else (0.0, 0.0)
    sum_p = (rate / high) ** form.p + (form.floor_s / high) ** form.p
    dense = high * sum_p ** (1.0 / form.p)
    rising = dense * (rate / high) ** form.p / sum_p
    return (rising + bend) / (dense + bend), (rising + 2 * bend) / (dense + bend)


def _least_rises(base: PnormPrefill, batches: Sequence[int], lengths: Sequence[int]) -> tuple[_Array, _Array]:
    """Return lower bounds of the rise of log(`base`) from each node of the grid to the next, by axis.

    The slope of log(`base`) in log(batch) and log(length) grows along both axes. So the least slope of a cell
    is at its lower corner. The edge between two nodes belongs to up to two cells; the lower one decides.
    """
    log_b, log_l = np.log(batches), np.log(lengths)
    steps_b = np.empty((len(batches) - 1, len(lengths)))
    steps_l = np.empty((len(batches), len(lengths) - 1))
    for i, j in np.ndindex(steps_b.shape):
        slope = _elasticity(base, batches[i], lengths[max(0, j - 1)])[0]
        steps_b[i, j] = slope * (log_b[i + 1] - log_b[i])
    for i, j in np.ndindex(steps_l.shape):
        slope = _elasticity(base, batches[max(0, i - 1)], lengths[j])[1]
        steps_l[i, j] = slope * (log_l[j + 1] - log_l[j])
    # Beyond the grid's lower edges the correction is constant along one axis and varies along the other.
    # The base is even flatter there: use its slope at batch 1 and one token.
    steps_b[:, 0] = np.diff(log_b) * [_elasticity(base, each, 1)[0] for each in batches[:-1]]
    steps_l[0, :] = np.diff(log_l) * [_elasticity(base, 1, each)[1] for each in lengths[:-1]]
    return steps_b, steps_l


# --- decode ---------------------------------------------------------------------------------------------


def fit_table(points: Sequence[Point]) -> DecodeTable:
    """Return a decode step over the batch (`DecodeTable`), weighted by 1/seconds, rising."""
    batch, length, seconds, _ = _arrays(points)
    batches = sorted({p.batch for p in points})
    if len(batches) < 2:
        raise ProfileError(f"decode: expected at least 2 batch sizes, got {len(batches)}")
    # Columns: tokens, mean tokens, and the rise from each batch to the next.
    rises = [(batch >= each).astype(float) for each in batches]
    terms = np.stack([batch * length, length, *rises], axis=1) / seconds[:, None]
    scale = np.maximum(terms.max(axis=0), 1e-300)
    shares, _ = scipy.optimize.nnls(terms / scale, np.ones(len(points)))
    constants = [float(value) for value in shares / scale]
    own = [float(value) for value in np.cumsum(constants[2:])]
    if own[0] <= 0.0:
        raise ProfileError("decode: expected times that do not go to 0 with the length")
    return DecodeTable(constants[0], constants[1], tuple(batches), tuple(own))


# --- mixed steps ----------------------------------------------------------------------------------------

#: Fewest mixed points to fit.
LEAST_MIXED_POINTS = 2
#: Factor on the attention of decodes beside a prompt. Measured: 1.3 to 3.4.
MIXED_FACTOR = 2.0
#: Start values of the search for constants that are assumed 0. The first two are in tokens of a decode step's
#: attention. A sequence starts at least at `_SEQUENCE_S` seconds: a host's time for it does not shrink with
#: the GPU's.
_SEQUENCE_TOKENS, _PAIR_TOKENS, _SEQUENCE_S = 24.0, 0.036, 1e-6


def assumed_mixed(latency: LatencyModel) -> MixedTerm:
    """Return the mixed term of a model without mixed points.

    It makes the attention of decodes `MIXED_FACTOR` times as long.
    """
    table = latency.better_decode
    token_s, context_s = (table.token_s, table.context_s) if table else (latency.k5, latency.k7)
    return MixedTerm(0.0, 0.0, MIXED_FACTOR * token_s, MIXED_FACTOR * (token_s + context_s))


def mixed_s(latency: LatencyModel, point: Point) -> float:
    tokens = point.prefill_tokens
    return latency.mixed_step_s(tokens, 1.0, tokens, point.batch, point.batch * point.length)


def fit_mixed(latency: LatencyModel, points: Sequence[Point]) -> MixedTerm:
    """Return the mixed term, weighted by 1/seconds, near the assumed one if the points do not decide."""
    assumed = assumed_mixed(latency)
    token_s = assumed.token_s / MIXED_FACTOR
    sequence_s = max(_SEQUENCE_TOKENS * token_s, _SEQUENCE_S)
    start = np.array([sequence_s, _PAIR_TOKENS * token_s, assumed.token_s, assumed.context_s])
    start = np.maximum(start, 1e-15)
    seconds = np.array([p.seconds for p in points])

    doubt = _doubt(points)

    def residuals(logs: _Array) -> _Array:
        term = MixedTerm(*(float(value) for value in start * np.exp(logs)))
        model = replace(latency, mixed=term)
        off = np.array([mixed_s(model, p) for p in points]) / seconds - 1.0
        return np.concatenate([off / doubt, _SURE_ERROR * logs])

    best = scipy.optimize.least_squares(
        residuals, np.zeros(4), bounds=(-8.0, 5.0), loss="soft_l1", f_scale=0.05
    )
    return MixedTerm(*(float(value) for value in start * np.exp(best.x)))


def held_out_mixed_errors(latency: LatencyModel, points: Sequence[Point]) -> _Array:
    """Return the relative errors of mixed points, each left out of the fit once."""
    errors = []
    for index, point in enumerate(points):
        others = [p for i, p in enumerate(points) if i != index]
        model = replace(latency, mixed=fit_mixed(latency, others))
        errors.append(abs(mixed_s(model, point) / point.seconds - 1.0))
    return np.array(errors)
