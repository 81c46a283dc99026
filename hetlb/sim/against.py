"""A log of a real server against the engine model: replay, errors with sign, and what they come from.

The requests of the log are sent to the engine model at the times at which the server got them. The error of
the whole answer is then split: the times of prefill passes, mixed steps and decode steps and the host's time
of an iteration and of a request are corrected one after the other, each by what fits the log best, and each
share is by how much its correction moves the mean. What is left once all are corrected is scheduling,
contents and chance. The shares and the rest add up to the error.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import Any

import numpy as np
from scipy.optimize import least_squares, minimize_scalar

from hetlb.core.latency import IterationRule, LatencyModel, corrected
from hetlb.core.step_times import MixedTerm
from hetlb.errors import TraceError
from hetlb.sim.against_logs import Log, LoggedRequest
from hetlb.sim.engine_model import EngineModel
from hetlb.sim.engine_sequence import EngineSequence, SequenceState
from hetlb.sim.fleet_engine import EngineSpec
from hetlb.workload.content import HASH_BLOCK_TOKENS, UNSHARED, PromptContent, contents_of

#: The kinds of time that are corrected, in this order, and what is left.
PARTS = ("prefill", "mixed", "decode", "host", "request")
REST = "scheduling"
#: A mean error up to this share counts as right.
RIGHT = 0.03
#: Loads at the arrival of a request: the larger of KV cache and slots in use, 1 where requests wait.
LOADS = (("below 50 % load", 0.0, 0.5), ("at 50 to 80 % load", 0.5, 0.8), ("above 80 % load", 0.8, math.inf))
_LEAST_OF_A_LOAD = 10
#: Corrections are fitted to so many requests at most.
_FITTED = 1500
#: Expected distance of factors from 1, in logarithms, and of seconds of the host from the profile's, per
#: iteration and per request; and by how much a correction of that size must bring the log nearer.
_SPREADS = (0.3, 0.3, 0.3, 0.002, 0.005)
_LEAST_GAIN = 0.003
#: Groups whose means are fitted: by arrival, and by the length of prompts and of answers.
_IN_ORDER, _ALIKE = 12, 4
#: Steps of the search are shares of its variables, so these are kept off 0.
_SHIFT = 5.0
#: Residual from which the distance grows in proportion instead of with the square.
_CORNER = 0.1


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """Times of one request by the engine model; `load` is that at its arrival."""

    queue_s: float
    ttft_s: float
    e2e_s: float
    load: float


@dataclass(slots=True)
class ReplayedRun:
    """A replayed log: one entry for each request, and the KV cache in use over time (seconds, share)."""

    requests: list[ReplayedRequest]
    kv: list[tuple[float, float]]
    preemptions: int
    #: Decoding sequences of every iteration, by how long these ran.
    batches: dict[int, float]


@dataclass(slots=True)
class _Course:
    """Course of one request."""

    index: int
    load: float
    queue_s: float = 0.0
    first_s: float = 0.0


def replay(
    requests: Sequence[LoggedRequest], engine: EngineSpec, hash_block_tokens: int = HASH_BLOCK_TOKENS
) -> ReplayedRun:
    """Send the requests to one engine model. Raises `TraceError` for one that does not fit its KV cache."""
    contents = None
    rows = [each.row for each in requests if each.row is not None]
    if engine.limits.enable_prefix_caching and any(row.hash_ids or row.session for row in rows):
        contents = contents_of(rows, hash_block_tokens)
    model = replace(engine, prefix_cache=contents is not None).model(IterationRule.TOKEN)
    found: list[ReplayedRequest | None] = [None] * len(requests)
    kv: list[tuple[float, float]] = []
    batches: dict[int, float] = {}
    unseen: deque[EngineSequence] = deque()
    due = [each.arrival_s + engine.latency.request_s for each in requests]
    now, begun, sent = 0.0, 0.0, 0

    def submit_due(before: float) -> None:
        nonlocal sent
        while sent < len(requests) and due[sent] <= before:
            content = UNSHARED if contents is None else contents[sent]
            sequence = _sequence(_Course(sent, _load(model)), requests[sent], content)
            if not model.limits.fits(sequence.prompt_tokens, sequence.output_tokens):
                raise TraceError(
                    f"request {sent + 1}: expected at most {engine.limits.max_sequence_tokens} tokens "
                    f"(engine.kv_cache_tokens), got {sequence.prompt_tokens + sequence.output_tokens}"
                )
            _submit(model, sequence, due[sent] - begun)
            unseen.append(sequence)
            sent += 1

    while True:
        submit_due(now)
        stretch = model.begin_run()
        if stretch is None:
            if sent == len(requests):
                break
            now = due[sent]
            continue
        begun = now
        while unseen and unseen[0].state not in (SequenceState.NEW, SequenceState.WAITING):
            course = unseen.popleft().tag
            course.queue_s = begun - requests[course.index].arrival_s
        kv.append((begun, model.kv.pool.usage))
        while model.in_flight is not None:
            if sent == len(requests) or due[sent] >= begun + model.in_flight.duration_s:
                break
            submit_due(due[sent])
        ended = model.end_iteration()
        took_s = ended.stretch.duration_s
        batches[ended.stretch.decodes] = batches.get(ended.stretch.decodes, 0.0) + took_s
        now = begun + took_s
        for sequence in ended.first:
            sequence.tag.first_s = now
        for sequence in ended.finished:
            course = sequence.tag
            arrived_s = requests[course.index].arrival_s
            found[course.index] = ReplayedRequest(
                course.queue_s, course.first_s - arrived_s, now - arrived_s, course.load
            )
    return ReplayedRun([each for each in found if each is not None], kv, model.preemptions, batches)


def _sequence(course: _Course, request: LoggedRequest, content: PromptContent) -> EngineSequence:
    prompt = max(1, request.input_tokens)
    return EngineSequence(prompt, request.output_tokens, course, pieces=content.spans, answer=content.answer)


def _submit(model: EngineModel, sequence: EngineSequence, elapsed_s: float) -> None:
    if model.in_flight is not None and not model.admission_blocked:
        model.submit(sequence, elapsed_s)
        model.cut(elapsed_s, for_arrival=True)
    else:
        model.submit(sequence, max(0.0, elapsed_s))


def _load(model: EngineModel) -> float:
    if model.waiting:
        return 1.0
    return max(model.kv.pool.usage, model.running / model.limits.max_num_seqs)


# --- errors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetricError:
    """Means in seconds; `error` is that of the mean, with its sign.

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


def metric_error(pairs: Sequence[tuple[float, float]]) -> MetricError | None:
    """Error of pairs of a measured and a simulated time; None where nothing was measured."""
    if not pairs:
        return None
    measured_s, simulated_s = fmean(each[0] for each in pairs), fmean(each[1] for each in pairs)
    if measured_s <= 0.0:
        return None
    relative = [abs(simulated / measured - 1.0) for measured, simulated in pairs if measured > 0.0]
    return MetricError(
        measured_s,
        simulated_s,
        simulated_s / measured_s - 1.0,
        fmean(abs(simulated - measured) for measured, simulated in pairs) / measured_s,
        fmean(relative),
        median(relative),
        quantiles(relative, n=20)[-1] if len(relative) > 1 else relative[0],
        len(pairs),
    )


def errors(requests: Sequence[LoggedRequest], simulated: Sequence[ReplayedRequest]) -> dict[str, MetricError]:
    """The error of every metric that the log holds."""
    pairs: dict[str, list[tuple[float, float]]] = {"queue": [], "ttft": [], "tpot": [], "e2e": []}
    for request, said in zip(requests, simulated, strict=True):
        if request.queue_s is not None:
            pairs["queue"].append((request.queue_s, said.queue_s))
        pairs["ttft"].append((request.ttft_s, said.ttft_s))
        if request.output_tokens > 1:
            tpot_s = (said.e2e_s - said.ttft_s) / (request.output_tokens - 1)
            pairs["tpot"].append((request.tpot_s, tpot_s))
        pairs["e2e"].append((request.e2e_s, said.e2e_s))
    return {name: error for name, each in pairs.items() if (error := metric_error(each)) is not None}


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

    def applied(self, k: LatencyModel, parts: Sequence[str] = PARTS) -> LatencyModel:
        """The model with some of its parts corrected."""
        return corrected(
            k,
            prefill=self.prefill if "prefill" in parts else 1.0,
            mixed=self.mixed if "mixed" in parts else 1.0,
            decode=self.decode if "decode" in parts else 1.0,
            host_s=self.host_s if "host" in parts else 0.0,
            request_s=self.request_s if "request" in parts else 0.0,
        )

    def described(self) -> list[str]:
        """One phrase for each part: how far it is off, and whether the log shows that."""
        factors = {"prefill": self.prefill, "mixed": self.mixed, "decode": self.decode}
        seconds = {"an iteration": self.host_s, "a request": self.request_s}
        found = [
            (f"{part} x {factor:.3f} ± {100 * error:.0f} %", abs(math.log(factor)) > 2.0 * error)
            for (part, factor), error in zip(factors.items(), self.errors[:3], strict=True)
        ] + [
            (f"host {1e3 * each_s:+.2f} ± {1e3 * error:.2f} ms {part}", abs(each_s) > 2.0 * error)
            for (part, each_s), error in zip(seconds.items(), self.errors[3:], strict=True)
        ]
        return [phrase if shown else f"{phrase} (may be none)" for phrase, shown in found]


def fit_corrections(
    requests: Sequence[LoggedRequest],
    engine: EngineSpec,
    hash_block_tokens: int = HASH_BLOCK_TOKENS,
    chosen: Sequence[bool] | None = None,
) -> Corrections:
    """The corrections with which the replay is nearest to the log; near none where it does not decide.

    All requests are replayed; `chosen` ones are compared. The search starts from the part that explains most
    alone: parts that are nearly alike, such as decode steps and the host, are mistaken for each other else.
    """
    part = requests[:_FITTED]
    groups = _groups(part, None if chosen is None else np.array(chosen[: len(part)]))
    measured = np.array([(each.ttft_s, each.tpot_s, each.e2e_s) for each in part])
    steps = np.array([max(1, each.output_tokens - 1) for each in part])
    means = np.array([measured[group].mean(axis=0) for group in groups])
    scale = np.maximum(means, 0.05 * measured.mean(axis=0)) + 1e-9

    def corrections(shifted: np.ndarray[Any, Any]) -> Corrections:
        values = [spread * float(value - _SHIFT) for spread, value in zip(_SPREADS, shifted, strict=True)]
        factors = [math.exp(value) for value in values[:3]]
        return Corrections(factors[0], factors[1], factors[2], values[3], values[4])

    def residuals(shifted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        model = corrections(shifted).applied(engine.latency)
        said = replay(part, replace(engine, latency=model), hash_block_tokens).requests
        times = np.array([(each.ttft_s, each.e2e_s) for each in said])
        tpot = (times[:, 1] - times[:, 0]) / steps
        simulated = np.column_stack([times[:, 0], tpot, times[:, 1]])
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


def _single_part(residuals: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The variables with the one part changed that brings the log nearest; all `_SHIFT` where none does."""

    def distance(variables: np.ndarray[Any, Any]) -> float:
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


def _groups(
    requests: Sequence[LoggedRequest], chosen: np.ndarray[Any, Any] | None
) -> list[np.ndarray[Any, Any]]:
    """Indices of requests that came one after the other, and of those with prompts and answers alike.

    Their means move smoothly with a correction. Single requests do not: they catch an iteration or miss it.
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
    """The loads at which a correction was tested, and up to which it holds.

    `before` and `after` are the errors of the mean that is furthest off, of the busier half of the requests,
    as the profile has them and corrected by the quieter half. `sequences` run at once, for 95 % of the time
    at most, at the largest `times` the log's rate at which mixed steps of other forms, corrected by the same
    log, give the same TTFT, TPOT and E2E.
    """

    metric: str
    before: float
    after: float
    times: float
    sequences: int

    @property
    def harms(self) -> bool:
        """True if the correction makes a load worse that it was not fitted to."""
        return abs(self.after) > max(abs(self.before), RIGHT) + _HARM


#: By how much a correction may be worse at another load; and by how much forms may differ where it holds.
_HARM, _AGREE = 0.01, 0.03
#: Loads that are tried, as multiples of the log's rate.
_TIMES = (1.0, 1.25, 1.5, 1.75, 2.0)
#: Prompt tokens of a mixed step at which all forms of it take the same time.
_PART = 512.0


def reach(
    requests: Sequence[LoggedRequest],
    engine: EngineSpec,
    found: Corrections,
    hash_block_tokens: int = HASH_BLOCK_TOKENS,
) -> Reach:
    """Test a correction at another load, and find that up to which it holds.

    The quieter half of a log is corrected alone, and must not make the busier half worse. A log at one load
    shows how long mixed steps take there, not what that grows with: where corrected models in which it grows
    with decodes alone, or with pairs of decodes and prompt tokens, give other times, none is known.
    """
    part = requests[:_FITTED]
    before = replay(part, engine, hash_block_tokens).requests
    middle = median(each.load for each in before)
    quiet = [each.load < middle for each in before]
    if sum(quiet) < _LEAST_OF_A_LOAD:  # all alike: by time, then
        quiet = [index < len(part) // 2 for index in range(len(part))]
    lower = fit_corrections(part, engine, hash_block_tokens, quiet)
    after = replay(part, replace(engine, latency=lower.applied(engine.latency)), hash_block_tokens).requests
    busy = [index for index, each in enumerate(quiet) if not each]
    asked = [part[index] for index in busy]
    old, new = (errors(asked, [said[index] for index in busy]) for said in (before, after))
    metric, off = _worst(new)
    models = [replace(engine, latency=found.applied(engine.latency))]
    for form in _other_forms(engine.latency, part):
        other = fit_corrections(part, replace(engine, latency=form), hash_block_tokens)
        models.append(replace(engine, latency=other.applied(form)))
    times, sequences = 0.0, 0
    for factor in _TIMES:
        faster = [replace(each, arrival_s=each.arrival_s / factor) for each in part]
        runs = [replay(faster, model, hash_block_tokens) for model in models]
        means = [_means(part, run.requests) for run in runs]
        if any(max(each) > (1.0 + _AGREE) * min(each) for each in zip(*means, strict=True)):
            break
        times, sequences = factor, usual_batches(runs[0])[1]
    return Reach(metric, old[metric].error, off, times, sequences)


def _other_forms(k: LatencyModel, requests: Sequence[LoggedRequest]) -> list[LatencyModel]:
    """The model with mixed steps that grow with decodes, or with pairs of these and prompt tokens."""
    context = fmean(each.input_tokens + each.output_tokens / 2.0 for each in requests)
    seconds = k.mixed_term.seconds(_PART, 1.0, context)
    terms = (MixedTerm(seconds, 0.0, 0.0, 0.0), MixedTerm(0.0, seconds / _PART, 0.0, 0.0))
    return [replace(k, mixed=term) for term in terms]


def _means(requests: Sequence[LoggedRequest], said: Sequence[ReplayedRequest]) -> tuple[float, float, float]:
    """TTFT, TPOT and E2E of a replay."""
    tokens = sum(max(0, each.output_tokens - 1) for each in requests)
    ttft_s, e2e_s = fmean(each.ttft_s for each in said), fmean(each.e2e_s for each in said)
    return ttft_s, (e2e_s - ttft_s) * len(said) / max(1, tokens), e2e_s


# --- the comparison ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """A log against a model. `split` sums to the mean error of the whole answer, in seconds.

    `split_ttft` likewise of the time to the first token. `loads` are the errors of the requests that came at
    each load.
    """

    requests: int
    failed: int
    preemptions: int
    errors: dict[str, MetricError]
    split: dict[str, float]
    split_ttft: dict[str, float]
    corrections: Corrections
    loads: dict[str, dict[str, MetricError]]
    verdict: str
    measured: list[LoggedRequest]
    simulated: list[ReplayedRequest]
    kv: list[tuple[float, float]]


def compare(
    log: Log, engines: dict[str, EngineSpec], hash_block_tokens: int = HASH_BLOCK_TOKENS
) -> Comparison:
    """Hold a log against the engines that served it, by name ("" where the log names none)."""
    measured: list[LoggedRequest] = []
    simulated: list[ReplayedRequest] = []
    kv: list[tuple[float, float]] = []
    preemptions = 0
    split, split_ttft = dict.fromkeys((*PARTS, REST), 0.0), dict.fromkeys((*PARTS, REST), 0.0)
    found = Corrections()
    for name in sorted({each.instance for each in log.requests}):
        engine = engines[name]
        requests = [each for each in log.requests if each.instance == name]
        run = replay(requests, engine, hash_block_tokens)
        found = fit_corrections(requests, engine, hash_block_tokens)
        before = run.requests
        for index, part in enumerate(PARTS):
            model = found.applied(engine.latency, PARTS[: index + 1])
            after = replay(requests, replace(engine, latency=model), hash_block_tokens).requests
            split[part] += sum(a.e2e_s - b.e2e_s for a, b in zip(before, after, strict=True))
            split_ttft[part] += sum(a.ttft_s - b.ttft_s for a, b in zip(before, after, strict=True))
            before = after
        split[REST] += sum(a.e2e_s - m.e2e_s for a, m in zip(before, requests, strict=True))
        split_ttft[REST] += sum(a.ttft_s - m.ttft_s for a, m in zip(before, requests, strict=True))
        measured += requests
        simulated += run.requests
        kv += run.kv
        preemptions += run.preemptions
    count = len(measured)
    split = {part: seconds / count for part, seconds in split.items()}
    split_ttft = {part: seconds / count for part, seconds in split_ttft.items()}
    by_load = {}
    for label, low, high in LOADS:
        here = [(m, s) for m, s in zip(measured, simulated, strict=True) if low <= s.load < high]
        if len(here) >= _LEAST_OF_A_LOAD:
            by_load[label] = errors([m for m, _ in here], [s for _, s in here])
    all_errors = errors(measured, simulated)
    return Comparison(
        count,
        log.failed,
        preemptions,
        all_errors,
        split,
        split_ttft,
        found,
        by_load,
        verdict(all_errors, by_load, split, split_ttft),
        measured,
        simulated,
        kv,
    )


def _worst(found: dict[str, MetricError]) -> tuple[str, float]:
    """The metric that users see whose mean is furthest off, and by how much."""
    names = [name for name in ("ttft", "tpot", "e2e") if name in found]
    name = max(names, key=lambda each: abs(found[each].error))
    return name, found[name].error


def verdict(
    all_errors: dict[str, MetricError],
    by_load: dict[str, dict[str, MetricError]],
    split: dict[str, float],
    split_ttft: dict[str, float],
) -> str:
    """One sentence: how right the model is, where it is not, and what that comes from."""
    name, off = _worst(all_errors)
    shares = split_ttft if name == "ttft" else split
    largest = max(shares, key=lambda part: abs(shares[part]))
    wrong = {label: _worst(found) for label, found in by_load.items() if abs(_worst(found)[1]) > RIGHT}
    right = [label for label in by_load if label not in wrong]
    words = {
        "mixed": "mixed steps",
        "decode": "decode steps",
        "prefill": "prefill passes",
        "host": "host time of iterations",
        "request": "host time of requests",
    }
    cause = words.get(largest, largest)
    if abs(off) <= RIGHT and not wrong:
        return f"right within {max(1, math.ceil(100 * abs(off)))} %"
    if wrong and right:
        where = ", ".join(
            f"{label} ({metric.upper()} {100 * error:+.1f} %)" for label, (metric, error) in wrong.items()
        )
        return f"right within {100 * RIGHT:.0f} %, except {where}: {cause}"
    return f"off by {100 * off:+.1f} % ({name.upper()}): {cause}"


def varies_enough(run: ReplayedRun) -> str:
    """Reason for which a log cannot tell the parts of a model from each other; empty where it can.

    Prefill, mixed and decode times are told apart by steps of different batches: their middle nine tenths, by
    time, must span a factor of 2.
    """
    low, high = usual_batches(run)
    if not high:
        return "no answer has a second token"
    return (
        "" if high >= 2 * max(1, low) else f"{low} to {high} sequences ran together nine tenths of the time"
    )


def usual_batches(run: ReplayedRun) -> tuple[int, int]:
    """Least and most sequences that decode together in the middle nine tenths of the time; 0 without any."""
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
