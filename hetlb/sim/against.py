"""A log of a real server against the engine model: replay, errors with sign, and what they come from.

The requests of the log are sent to the engine model at the times at which the server got them. The error of
the whole answer is then split: the times of prefill passes, mixed steps and decode steps and the host's time
are corrected one after the other, each by the factor that fits the log best, and each share is by how much
its correction moves the mean. What is left once all are corrected is scheduling, contents and chance. The
shares and the rest add up to the error.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from hetlb.core.latency import MIXED_DECODE_ATTENTION_FACTOR, LatencyModel, MixedTerm
from hetlb.errors import TraceError
from hetlb.sim.against_logs import Log, Measured
from hetlb.sim.engine import EngineLimits, EngineModel, SequenceState
from hetlb.sim.engine import Sequence as EngineSequence
from hetlb.workload.content import HASH_BLOCK_TOKENS, UNSHARED, PromptContent, contents_of

#: The kinds of time that are corrected, in this order, and what is left.
PARTS = ("prefill", "mixed", "decode", "host")
REST = "scheduling"
#: A mean error up to this share counts as right.
RIGHT = 0.03
#: Loads at the arrival of a request: the larger of KV cache and places in use, 1 where requests wait.
LOADS = (("below 50 % load", 0.0, 0.5), ("at 50 to 80 % load", 0.5, 0.8), ("above 80 % load", 0.8, math.inf))
_LEAST_OF_A_LOAD = 10
#: Corrections are fitted to so many requests at most.
_FITTED = 1500
#: Expected distance of factors from 1, in logarithms, and the seconds that the host is expected to add;
#: and by how much a correction of that size must bring the log nearer.
_SPREADS = (0.3, 0.6, 0.3)
_HOST_SPREAD_S = 0.002
_LEAST_GAIN = 0.003
#: Groups whose means are fitted: by arrival, and by the length of prompts and of answers.
_IN_ORDER, _ALIKE = 12, 4
#: Steps of the search are shares of its variables, so these are kept off 0.
_SHIFT = 5.0


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that a log is held against; `request_s` is what its server adds to a request."""

    latency: LatencyModel
    limits: EngineLimits
    request_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """Times of one request by the engine model; `load` is that at its arrival."""

    queue_s: float
    ttft_s: float
    e2e_s: float
    load: float


@dataclass(slots=True)
class Replay:
    """A replayed log: one entry for each request, and the KV cache in use over time (seconds, share)."""

    requests: list[Simulated]
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
    requests: Sequence[Measured], engine: Engine, hash_block_tokens: int = HASH_BLOCK_TOKENS
) -> Replay:
    """Send the requests to one engine model. Raises `TraceError` for one that does not fit its KV cache."""
    contents: list[PromptContent] | None = None
    rows = [each.row for each in requests if each.row is not None]
    if engine.limits.enable_prefix_caching and any(row.hash_ids or row.session for row in rows):
        contents = contents_of(rows, hash_block_tokens)
    model = EngineModel(engine.latency, engine.limits, prefix_cache=contents is not None)
    found: list[Simulated | None] = [None] * len(requests)
    kv: list[tuple[float, float]] = []
    batches: dict[int, float] = {}
    unseen: deque[EngineSequence] = deque()
    now, begun, sent = 0.0, 0.0, 0

    def submit_due(before: float) -> None:
        nonlocal sent
        while sent < len(requests) and requests[sent].arrival_s + engine.request_s <= before:
            at_s = requests[sent].arrival_s + engine.request_s
            content = UNSHARED if contents is None else contents[sent]
            sequence = _sequence(_Course(sent, _load(model)), requests[sent], content)
            if not model.fits(sequence.prompt_tokens, sequence.output_tokens):
                raise TraceError(
                    f"request {sent + 1}: expected at most {engine.limits.max_sequence_tokens} tokens "
                    f"(engine.kv_cache_tokens), got {sequence.prompt_tokens + sequence.output_tokens}"
                )
            if model.in_flight is not None and not model.admission_blocked:
                model.submit(sequence, at_s - begun)
                model.cut(at_s - begun, for_arrival=True)
            else:
                model.submit(sequence, max(0.0, at_s - begun))
            unseen.append(sequence)
            sent += 1

    while True:
        submit_due(now)
        stretch = model.begin_run()
        if stretch is None:
            if sent == len(requests):
                break
            now = requests[sent].arrival_s + engine.request_s
            continue
        begun = now
        while unseen and unseen[0].state not in (SequenceState.NEW, SequenceState.WAITING):
            course = unseen.popleft().tag
            course.queue_s = begun - requests[course.index].arrival_s
        kv.append((begun, model.kv_usage))
        while model.in_flight is not None:
            ends_s = begun + model.in_flight.duration_s
            if sent == len(requests) or requests[sent].arrival_s + engine.request_s >= ends_s:
                break
            submit_due(requests[sent].arrival_s + engine.request_s)
        ended = model.end_iteration()
        took_s = ended.stretch.duration_s
        batches[ended.stretch.decodes] = batches.get(ended.stretch.decodes, 0.0) + took_s
        now = begun + took_s
        for sequence in ended.first:
            sequence.tag.first_s = now
        for sequence in ended.finished:
            course = sequence.tag
            arrived_s = requests[course.index].arrival_s
            found[course.index] = Simulated(
                course.queue_s, course.first_s - arrived_s, now - arrived_s, course.load
            )
    return Replay([each for each in found if each is not None], kv, model.preemptions, batches)


def _sequence(course: _Course, request: Measured, content: PromptContent) -> EngineSequence:
    prompt = max(1, request.input_tokens)
    return EngineSequence(prompt, request.output_tokens, course, pieces=content.spans, answer=content.answer)


def _load(model: EngineModel) -> float:
    if model.waiting:
        return 1.0
    return max(model.kv_usage, model.running / model.limits.max_num_seqs)


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
    """Of pairs of a measured and a simulated time; None where nothing was measured."""
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


def errors(requests: Sequence[Measured], simulated: Sequence[Simulated]) -> dict[str, MetricError]:
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
    """Factors on the times of a model, and seconds that the host adds to an iteration (may be negative)."""

    prefill: float = 1.0
    mixed: float = 1.0
    decode: float = 1.0
    host_s: float = 0.0

    def applied(self, k: LatencyModel, parts: Sequence[str] = PARTS) -> LatencyModel:
        """The model with some of its parts corrected."""
        prefill = self.prefill if "prefill" in parts else 1.0
        decode = self.decode if "decode" in parts else 1.0
        mixed = self.mixed if "mixed" in parts else 1.0
        host_s = k.host_s + (self.host_s if "host" in parts else 0.0)
        term = k.mixed or MixedTerm(
            k.k6, 0.0, MIXED_DECODE_ATTENTION_FACTOR * k.k5, MIXED_DECODE_ATTENTION_FACTOR * k.k7
        )
        better, table = k.better_prefill, k.better_decode
        # Where the host takes less than the profile says, the steps' own times hold it.
        less_s = min(0.0, host_s)
        if table is not None:
            table = table.scaled(decode)
            if less_s:
                least_s = 0.1 * table.seconds[0]
                own = tuple(max(least_s, each + less_s) for each in table.seconds)
                table = replace(table, seconds=own)
        constants = {
            f"k{index}": getattr(k, f"k{index}") * (prefill if index < 5 else decode) for index in range(1, 9)
        }
        return replace(
            k,
            **constants,
            better_prefill=None if better is None else better.scaled(prefill),
            better_decode=table,
            mixed=term if mixed == 1.0 else term.scaled(mixed),
            host_s=max(0.0, host_s),
        )


def fit_corrections(
    requests: Sequence[Measured], engine: Engine, hash_block_tokens: int = HASH_BLOCK_TOKENS
) -> Corrections:
    """The corrections with which the replay is nearest to the log; near none where it does not decide."""
    part = requests[:_FITTED]
    groups = _groups(part)
    measured = np.array([(each.ttft_s, each.tpot_s, each.e2e_s) for each in part])
    steps = np.array([max(1, each.output_tokens - 1) for each in part])
    means = np.array([measured[group].mean(axis=0) for group in groups])
    scale = np.maximum(means, 0.05 * measured.mean(axis=0)) + 1e-9

    def corrections(shifted: np.ndarray[Any, Any]) -> Corrections:
        values = shifted - _SHIFT
        factors = [
            math.exp(spread * float(value)) for spread, value in zip(_SPREADS, values[:3], strict=True)
        ]
        return Corrections(factors[0], factors[1], factors[2], float(values[3]) * _HOST_SPREAD_S)

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
        np.full(4, _SHIFT),
        bounds=(0.0, 2.0 * _SHIFT),
        diff_step=0.05,
        max_nfev=12,
        loss="soft_l1",
        f_scale=0.1,
    )
    return corrections(best.x)


def _groups(requests: Sequence[Measured]) -> list[np.ndarray[Any, Any]]:
    """Indices of requests that came one after the other, and of those with prompts and answers alike.

    Their means move smoothly with a correction. Single requests do not: they catch an iteration or miss it.
    """
    count = len(requests)
    orders = (
        (np.arange(count), _IN_ORDER),
        (np.argsort([each.input_tokens for each in requests], kind="stable"), _ALIKE),
        (np.argsort([each.output_tokens for each in requests], kind="stable"), _ALIKE),
    )
    return [group for order, parts in orders for group in np.array_split(order, min(parts, count))]


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
    measured: list[Measured]
    simulated: list[Simulated]
    kv: list[tuple[float, float]]


def compare(log: Log, engines: dict[str, Engine], hash_block_tokens: int = HASH_BLOCK_TOKENS) -> Comparison:
    """Hold a log against the engines that served it, by name ("" where the log names none)."""
    measured: list[Measured] = []
    simulated: list[Simulated] = []
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
        "host": "host time",
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


def varies_enough(run: Replay) -> str:
    """Reason for which a log cannot tell the parts of a model from each other; empty where it can.

    Prefill, mixed and decode times are told apart by steps of different batches: their middle nine tenths, by
    time, must span a factor of 2.
    """
    decoding = {batch: seconds for batch, seconds in run.batches.items() if batch}
    total_s = sum(decoding.values())
    if total_s <= 0.0:
        return "no answer has a second token"
    ends, elapsed_s = [], 0.0
    for batch in sorted(decoding):
        elapsed_s += run.batches[batch]
        ends.append((elapsed_s / total_s, batch))
    low = next(batch for share, batch in ends if share >= 0.05)
    high = next(batch for share, batch in ends if share >= 0.95)
    if high >= 2 * max(1, low):
        return ""
    return f"{low} to {high} sequences ran together nine tenths of the time"
