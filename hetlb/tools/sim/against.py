"""A log of a real server against the engine model: replay, errors with sign, and corrections of a profile.

The engine model gets the requests of the log at the server's arrival times. `fit_corrections` finds the
factors on the times of prefill passes, mixed steps and decode steps, and the host's time of an iteration and
of a request, that bring the replay nearest to the log.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import Any, TypeAlias

import numpy as np
from scipy.optimize import least_squares, minimize_scalar

from hetlb.balancer.core.latency import LatencyModel, corrected, mixed_term
from hetlb.balancer.core.step_times import MixedTerm
from hetlb.errors import TraceError
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence, SequenceState
from hetlb.tools.sim.event_queue import EventQueue
from hetlb.tools.sim.fleet_engine import BEGIN, SUBMIT, EngineSpec, FleetEngine
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.workload.measured_logs import Log, LoggedRequest
from hetlb.tools.workload.rows import UNSHARED

_Array: TypeAlias = np.ndarray[Any, Any]

#: The kinds of time that are corrected: fields of `Corrections`.
_PARTS = ("prefill", "mixed", "decode", "host_s", "request_s")
#: Largest mean error that counts as right.
RIGHT_ERROR = 0.03
#: Loads at the arrival of a request: the larger of KV cache and slots in use, 1 if requests wait.
LOADS = (("below 50 % load", 0.0, 0.5), ("at 50 to 80 % load", 0.5, 0.8), ("above 80 % load", 0.8, math.inf))
_LEAST_LOAD_REQUESTS = 10
#: Most requests that a fit of corrections uses.
_MOST_FITTED = 1500
#: Expected size of corrections: of factors, as logarithms; of the host's seconds per iteration and per
#: request. Least gain in agreement with the log for a correction of that size.
_SPREADS = (0.3, 0.3, 0.3, 0.002, 0.005)
_LEAST_GAIN = 0.003
#: Number of groups in a fit of means: by arrival, and by the length of prompts and of answers.
_IN_ORDER, _ALIKE = 12, 4
#: Offset of the variables of the search. Its steps are shares of the variables, so these must not be near 0.
_SHIFT = 5.0
#: Residual up to which the distance grows with the square, and linearly beyond.
_CORNER = 0.1


@dataclass(frozen=True, slots=True)
class ReplayedRun:
    """A replayed log: its requests with the model's times, in their order, and the load at each arrival.

    `kv` is the KV cache in use over time (seconds, share).
    """

    requests: list[LoggedRequest]
    loads: list[float]
    kv: list[tuple[float, float]]
    preemptions: int
    #: Decoding sequences of every iteration, by how long these ran.
    batches: dict[int, float]


def replay(requests: Sequence[LoggedRequest], engine: EngineSpec) -> ReplayedRun:
    """Send the requests to one engine model and return the run.

    Raises `TraceError` for a request that does not fit its KV cache.
    """
    shared = engine.limits.enable_prefix_caching and any(each.content is not UNSHARED for each in requests)
    events = EventQueue()
    server = FleetEngine("", replace(engine, prefix_cache=shared), IterationRule.TOKEN, events)
    model = server.model
    for index, request in enumerate(requests):
        content = request.content
        prompt, output = max(1, request.input_tokens), request.output_tokens
        sequence = EngineSequence(prompt, output, index, pieces=content.spans, answer=content.answer)
        if not model.limits.fits(sequence.prompt_tokens, sequence.output_tokens):
            raise TraceError(
                f"request {index + 1}: expected at most {engine.limits.max_sequence_tokens} tokens "
                f"(engine.kv_cache_tokens), got {sequence.prompt_tokens + sequence.output_tokens}"
            )
        events.push(request.arrival_s + engine.latency.request_s, SUBMIT, sequence)
    queue_s, ttft_s, e2e_s, loads = ([0.0] * len(requests) for _ in range(4))
    kv: list[tuple[float, float]] = []
    batches: dict[int, float] = {}
    queued: deque[EngineSequence] = deque()

    def since_arrival_s(sequence: EngineSequence) -> float:
        index: int = sequence.tag
        return events.now - requests[index].arrival_s

    while (event := events.pop()) is not None:
        _, kind, _, payload = event
        if kind == SUBMIT:
            loads[payload.tag] = _load(model)
            queued.append(payload)
            server.submit([payload])
        elif kind == BEGIN:
            server.begin()
            if model.in_flight is None:
                continue
            while queued and queued[0].state not in (SequenceState.NEW, SequenceState.WAITING):
                admitted = queued.popleft()
                queue_s[admitted.tag] = since_arrival_s(admitted)
            kv.append((events.now, model.kv.pool.usage))
        elif (ended := server.end(payload[1])) is not None:
            stretch = ended.stretch
            batches[stretch.decodes] = batches.get(stretch.decodes, 0.0) + stretch.duration_s
            for sequence in ended.first:
                ttft_s[sequence.tag] = since_arrival_s(sequence)
            for sequence in ended.finished:
                e2e_s[sequence.tag] = since_arrival_s(sequence)
            server.wake()
    said = [
        replace(request, queue_s=queue, ttft_s=ttft, e2e_s=e2e)
        for request, queue, ttft, e2e in zip(requests, queue_s, ttft_s, e2e_s, strict=True)
    ]
    return ReplayedRun(said, loads, kv, model.preemptions, batches)


def _load(model: EngineModel) -> float:
    if model.waiting:
        return 1.0
    return max(model.kv.pool.usage, model.running / model.limits.max_num_seqs)


# --- errors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetricError:
    """Means in seconds; `error` is the error of the mean, with its sign.

    `per_request` is the mean distance between measured and simulated over the mean measured; `relative`
    the mean, `median` and `p95` of the distance over the measured value of each request.
    """

    measured_s: float
    simulated_s: float
    error: float
    per_request: float
    relative: float
    median: float
    p95: float
    requests: int


#: Metrics of a log, and their fields of a request.
_METRICS = {"queue": "queue_s", "ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}


def errors(measured: Sequence[LoggedRequest], simulated: Sequence[LoggedRequest]) -> dict[str, MetricError]:
    """Return the error of every metric that the log holds."""
    found = {}
    for name, field in _METRICS.items():
        each = [
            (getattr(was, field), getattr(said, field))
            for was, said in zip(measured, simulated, strict=True)
            if getattr(was, field) is not None and (name != "tpot" or was.output_tokens > 1)
        ]
        measured_s = fmean(was for was, _ in each) if each else 0.0
        if measured_s <= 0.0:
            continue
        simulated_s = fmean(said for _, said in each)
        relative = [abs(said / was - 1.0) for was, said in each if was > 0.0]
        found[name] = MetricError(
            measured_s,
            simulated_s,
            simulated_s / measured_s - 1.0,
            fmean(abs(said - was) for was, said in each) / measured_s,
            fmean(relative),
            median(relative),
            quantiles(relative, n=20)[-1] if len(relative) > 1 else relative[0],
            len(each),
        )
    return found


# --- corrections ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Corrections:
    """Factors on the times of a model, and seconds more of its host per iteration and per request.

    `errors` are how sure a log makes each: standard errors, of factors as shares of themselves.
    """

    prefill: float = 1.0
    mixed: float = 1.0
    decode: float = 1.0
    host_s: float = 0.0
    request_s: float = 0.0
    errors: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def applied(self, k: LatencyModel) -> LatencyModel:
        """Return the model with its parts corrected."""
        return corrected(k, **{part: getattr(self, part) for part in _PARTS})

    def described(self) -> list[str]:
        """Return one phrase for each part: its error, and whether the log shows it."""
        found = []
        for part, error in zip(_PARTS, self.errors, strict=True):
            value = getattr(self, part)
            if part.endswith("_s"):
                what = "an iteration" if part == "host_s" else "a request"
                phrase, off = f"host {1e3 * value:+.2f} ± {1e3 * error:.2f} ms {what}", abs(value)
            else:
                phrase, off = f"{part} x {value:.3f} ± {100 * error:.0f} %", abs(math.log(value))
            found.append(phrase if off > 2.0 * error else f"{phrase} (may be none)")
        return found


def fit_corrections(
    requests: Sequence[LoggedRequest], engine: EngineSpec, chosen: Sequence[bool] | None = None
) -> Corrections:
    """Return the corrections that bring the replay nearest to the log; near zero if the log does not decide.

    All requests are replayed; `chosen` ones are compared. The search starts from the part that explains most
    alone. Otherwise it confuses similar parts, such as decode steps and the host.
    """
    part = requests[:_MOST_FITTED]
    groups = _groups(part, None if chosen is None else np.array(chosen[: len(part)]))
    measured = _times(part)
    means = np.array([measured[group].mean(axis=0) for group in groups])
    scale = np.maximum(means, 0.05 * measured.mean(axis=0)) + 1e-9

    def corrections(shifted: _Array) -> Corrections:
        values = [spread * float(value - _SHIFT) for spread, value in zip(_SPREADS, shifted, strict=True)]
        factors = [math.exp(value) for value in values[:3]]
        return Corrections(factors[0], factors[1], factors[2], values[3], values[4])

    def residuals(shifted: _Array) -> _Array:
        model = corrections(shifted).applied(engine.latency)
        simulated = _times(replay(part, replace(engine, latency=model)).requests)
        off = (np.array([simulated[group].mean(axis=0) for group in groups]) - means) / scale
        return np.concatenate([off.ravel() / math.sqrt(off.size), _LEAST_GAIN * (shifted - _SHIFT)])

    best = least_squares(
        residuals,
        _single_part(residuals),
        bounds=(0.0, 2.0 * _SHIFT),
        jac="3-point",
        diff_step=0.1,
        xtol=1e-3,
        ftol=1e-4,
        max_nfev=12,
        loss="soft_l1",
        f_scale=_CORNER,
    )
    return replace(corrections(best.x), errors=_standard_errors(best, len(_SPREADS)))


def _times(requests: Sequence[LoggedRequest]) -> _Array:
    """Return the TTFT, TPOT and E2E of every request."""
    return np.array([(each.ttft_s, each.tpot_s, each.e2e_s) for each in requests])


def _single_part(residuals: Callable[[_Array], _Array]) -> _Array:
    """Return the variables of the best fit that corrects one part alone."""

    def distance(variables: _Array) -> float:
        return float(np.sum(np.sqrt(1.0 + (residuals(variables) / _CORNER) ** 2) - 1.0))

    none = np.full(len(_SPREADS), _SHIFT)
    best, least = none, distance(none)
    for part in np.eye(len(_SPREADS)):
        found = minimize_scalar(
            lambda value, part=part: distance(none + (value - _SHIFT) * part),
            bounds=(0.0, 2.0 * _SHIFT),
            method="bounded",
            options={"xatol": 0.05, "maxiter": 12},
        )
        if found.fun < least:
            best, least = none + (found.x - _SHIFT) * part, found.fun
    return best


def _standard_errors(best: Any, count: int) -> tuple[float, float, float, float, float]:
    """Compute the standard error of each variable from slopes and residuals at the optimum."""
    freedom = max(1, best.fun.size - 2 * count)
    variance = max(float(best.fun @ best.fun) / freedom, _LEAST_GAIN**2)
    covariance = np.linalg.pinv(best.jac.T @ best.jac) * variance
    found = np.sqrt(np.maximum(np.diag(covariance), 0.0)) * np.array(_SPREADS)
    return tuple(float(each) for each in found)  # type: ignore[return-value]


def _groups(requests: Sequence[LoggedRequest], chosen: _Array | None) -> list[_Array]:
    """Return groups of requests, by index: in order of arrival, and alike in prompt or in answer length.

    The means of groups move smoothly with a correction. Single requests do not: they catch an iteration or
    miss it.
    """
    count = len(requests)
    orders = (
        (np.arange(count), _IN_ORDER),
        (np.argsort([each.input_tokens for each in requests], kind="stable"), _ALIKE),
        (np.argsort([each.output_tokens for each in requests], kind="stable"), _ALIKE),
    )
    found = []
    for order, parts in orders:
        kept = order if chosen is None else order[chosen[order]]
        found += np.array_split(kept, min(parts, len(kept)))
    return found


@dataclass(frozen=True, slots=True)
class Reach:
    """Test of a correction at another load, and the highest load that it is valid for.

    The quieter half of the requests gives a correction, and the busier half tests it: `metric` is the mean
    that is furthest off there, `before` its error by the profile, `after` its error with the correction.
    The correction is valid up to `times` the log's rate. At most `sequences` run at once then, for 95 % of
    the time. Up to there, other forms of mixed steps give the same TTFT, TPOT and E2E.
    """

    metric: str
    before: float
    after: float
    times: float
    sequences: int

    @property
    def harms(self) -> bool:
        """True if the correction clearly increases the error at another load."""
        return abs(self.after) > max(abs(self.before), RIGHT_ERROR) + _MOST_HARM


#: Largest loss of a correction at another load, and largest difference between forms if it is valid.
_MOST_HARM, _MOST_DIFFERENCE = 0.01, 0.03
#: Loads tried, as multiples of the log's rate.
_RATE_FACTORS = (1.0, 1.25, 1.5, 1.75, 2.0)
#: Prompt tokens of a mixed step: all forms give it the same time.
_FORM_TOKENS = 512.0


def reach(requests: Sequence[LoggedRequest], engine: EngineSpec, found: Corrections) -> Reach:
    """Test a correction at another load, and find the highest load that it holds for.

    The quieter half of a log is corrected alone, and must not make the busier half worse. A log at one load
    shows how long mixed steps take there, but not how their time grows. So two corrected models are compared:
    in one it grows with decodes alone, in the other with pairs of decodes and prompt tokens. The correction
    holds up to the load at which they differ.
    """
    part = requests[:_MOST_FITTED]
    before = replay(part, engine)
    middle = median(before.loads)
    quiet = [load < middle for load in before.loads]
    if sum(quiet) < _LEAST_LOAD_REQUESTS:  # all alike: by time, then
        quiet = [index < len(part) // 2 for index in range(len(part))]
    lower = fit_corrections(part, engine, quiet)
    after = replay(part, replace(engine, latency=lower.applied(engine.latency)))
    busy = [index for index, each in enumerate(quiet) if not each]
    asked = [part[index] for index in busy]
    old, new = (errors(asked, [run.requests[index] for index in busy]) for run in (before, after))
    metric, off = _worst(new)
    models = [replace(engine, latency=found.applied(engine.latency))]
    for form in _other_forms(engine.latency, part):
        other = fit_corrections(part, replace(engine, latency=form))
        models.append(replace(engine, latency=other.applied(form)))
    times, sequences = 0.0, 0
    for factor in _RATE_FACTORS:
        faster = [replace(each, arrival_s=each.arrival_s / factor) for each in part]
        runs = [replay(faster, model) for model in models]
        means = [_means(run.requests) for run in runs]
        if any(max(each) > (1.0 + _MOST_DIFFERENCE) * min(each) for each in zip(*means, strict=True)):
            break
        times, sequences = factor, usual_batches(runs[0])[1]
    return Reach(metric, old[metric].error, off, times, sequences)


def _other_forms(k: LatencyModel, requests: Sequence[LoggedRequest]) -> list[LatencyModel]:
    """Return the model with mixed steps that grow with decodes, or with pairs of these and prompt tokens."""
    context = fmean(each.input_tokens + each.output_tokens / 2.0 for each in requests)
    seconds = mixed_term(k).seconds(_FORM_TOKENS, 1.0, context)
    terms = (MixedTerm(seconds, 0.0, 0.0, 0.0), MixedTerm(0.0, seconds / _FORM_TOKENS, 0.0, 0.0))
    return [replace(k, mixed=term) for term in terms]


def _means(requests: Sequence[LoggedRequest]) -> tuple[float, float, float]:
    """Return the TTFT, TPOT and E2E of a replay."""
    tokens = sum(max(0, each.output_tokens - 1) for each in requests)
    ttft_s, e2e_s = fmean(each.ttft_s for each in requests), fmean(each.e2e_s for each in requests)
    return ttft_s, (e2e_s - ttft_s) * len(requests) / max(1, tokens), e2e_s


# --- the comparison ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """A log against a model. `loads` are the errors of the requests that came at each load."""

    failed: int
    preemptions: int
    errors: dict[str, MetricError]
    loads: dict[str, dict[str, MetricError]]
    measured: list[LoggedRequest]
    simulated: list[LoggedRequest]
    kv: list[tuple[float, float]]

    @property
    def requests(self) -> int:
        """Number of compared requests."""
        return len(self.measured)

    @property
    def verdict(self) -> str:
        """One sentence: the errors of the model."""
        name, off = _worst(self.errors)
        worst = {label: _worst(found) for label, found in self.loads.items()}
        wrong = [
            f"{label} ({metric.upper()} {100 * error:+.1f} %)"
            for label, (metric, error) in worst.items()
            if abs(error) > RIGHT_ERROR
        ]
        if abs(off) <= RIGHT_ERROR and not wrong:
            return f"right within {max(1, math.ceil(100 * abs(off)))} %"
        if 0 < len(wrong) < len(worst):
            return f"right within {100 * RIGHT_ERROR:.0f} %, except {', '.join(wrong)}"
        return f"off by {100 * off:+.1f} % ({name.upper()})"


def compare(log: Log, engines: dict[str, EngineSpec]) -> Comparison:
    """Hold a log against the engines that served it, by name ("" if the log names none)."""
    measured: list[LoggedRequest] = []
    simulated: list[LoggedRequest] = []
    loads: list[float] = []
    kv: list[tuple[float, float]] = []
    preemptions = 0
    for name in sorted({each.instance for each in log.requests}):
        requests = [each for each in log.requests if each.instance == name]
        run = replay(requests, engines[name])
        measured += requests
        simulated += run.requests
        loads += run.loads
        kv += run.kv
        preemptions += run.preemptions
    by_load = {}
    for label, low, high in LOADS:
        here = [index for index, load in enumerate(loads) if low <= load < high]
        if len(here) >= _LEAST_LOAD_REQUESTS:
            by_load[label] = errors([measured[i] for i in here], [simulated[i] for i in here])
    return Comparison(
        log.failed,
        preemptions,
        errors(measured, simulated),
        by_load,
        measured,
        simulated,
        kv,
    )


def _worst(found: dict[str, MetricError]) -> tuple[str, float]:
    """Return the user-visible metric with the largest error of its mean, and that error."""
    names = [name for name in ("ttft", "tpot", "e2e") if name in found]
    name = max(names, key=lambda each: abs(found[each].error))
    return name, found[name].error


def varies_enough(run: ReplayedRun) -> str:
    """Return why a log cannot separate the parts of a model; empty if it can.

    Prefill, mixed and decode times are told apart by steps of different batches: their middle nine tenths, by
    time, must span a factor of 2.
    """
    low, high = usual_batches(run)
    if not high:
        return "no answer has a second token"
    if high >= 2 * max(1, low):
        return ""
    return f"{low} to {high} sequences ran together nine tenths of the time"


def usual_batches(run: ReplayedRun) -> tuple[int, int]:
    """Return the least and most sequences in decode in the middle nine tenths of the time; 0 without any."""
    decoding = {batch: seconds for batch, seconds in run.batches.items() if batch}
    total_s = sum(decoding.values())
    if total_s <= 0.0:
        return 0, 0
    ends, elapsed_s = [], 0.0
    for batch in sorted(decoding):
        elapsed_s += run.batches[batch]
        ends.append((elapsed_s / total_s, batch))
    low = next(batch for share, batch in ends if share >= 0.05)
    return low, next(batch for share, batch in ends if share >= 0.95)
