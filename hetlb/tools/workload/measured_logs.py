"""Results of load tests and logs of real servers: each request's lengths, arrival and times.

Read are per-request results of vLLM, SGLang, AIPerf, GuideLLM and inference-perf, hetlb's event log, and
records with self-explaining keys. A file with too little is one `TraceError` line naming what
is missing.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from hetlb.balancer.core.setup import SchedulerSetup
from hetlb.errors import TraceError
from hetlb.tools.workload.chats import asked_texts, estimate_tokens
from hetlb.tools.workload.content import UNSHARED, PromptContent, block_tokens, contents_of
from hetlb.tools.workload.record_file import (
    UNITS_S,
    Record,
    RecordFile,
    decode_json,
    open_records,
    say,
    squashed,
    unit_of,
    unwrapped,
)
from hetlb.tools.workload.rows import is_own, own_rows
from hetlb.tools.workload.trace_columns import ARRIVALS, INPUT, OUTPUT, known_trace

#: Least requests of a log that say something.
LEAST_REQUESTS = 10
_BENCH = "vllm bench serve --save-result --save-detailed"


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request that ended well. Times in seconds; `queue_s` is None if the log does not say.

    `arrival_s` is when the server got it; `content` is known if the log is a trace.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float
    queue_s: float | None = None
    instance: str = ""
    content: PromptContent = UNSHARED

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 for answers of one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Log:
    """The requests of a log in order of arrival; `failed` did not end well; `setup` is an event log's own."""

    kind: str
    requests: tuple[LoggedRequest, ...]
    failed: int = 0
    setup: SchedulerSetup | None = None
    #: Requests of a warm-up, which are none of the load.
    warm_ups: int = 0


def read_log(path: Path) -> Log:
    """Read a log of any supported kind. Raises `TraceError`.

    What a file of another program was taken for goes to stderr.
    """
    file = open_records(path)
    if not file.text.strip():
        raise TraceError(f"{path}: expected the log of a server, got an empty file")
    found = kind_of_log(file)
    if (
        found is None
        and summary_of(file) is None
        and (inner := unwrapped(file)) is not None
        and kind_of_log(inner) is not None
    ):
        file, found = inner, kind_of_log(inner)
    if found is None:
        raise TraceError(f"{path}: {_why_no_log(file)}")
    title, reader = found
    log = reader(file)
    usable = [each for each in log.requests if each.ttft_s > 0.0 and each.output_tokens > 0]
    if len(usable) < LEAST_REQUESTS:
        raise TraceError(
            f"{path}: {title}: expected at least {LEAST_REQUESTS} requests that ended well, got {len(usable)}"
        )
    usable.sort(key=lambda each: each.arrival_s)
    if all(each.ttft_s >= each.e2e_s for each in usable):
        raise TraceError(f"{path}: expected times to the first token, got whole answers only (not streamed)")
    first_s = usable[0].arrival_s
    shifted = tuple(replace(each, arrival_s=each.arrival_s - first_s) for each in usable)
    failed = log.failed + len(log.requests) - len(usable)
    parts = [f"{len(shifted):,} requests over {shifted[-1].arrival_s:,.0f} s"]
    parts += [f"{failed:,} that failed left out"] if failed else []
    parts += [f"{log.warm_ups:,} of the warm-up left out"] if log.warm_ups else []
    if log.kind not in ("csv", "events"):
        say(path, f"read as {title}: {', '.join(parts)}")
    return replace(log, requests=shifted, failed=failed)


_Reader: TypeAlias = Callable[[RecordFile], Log]


def kind_of_log(file: RecordFile) -> tuple[str, _Reader] | None:
    """Return the kind of a file of measured requests, in words, and its reader; None if it is none."""
    if file.records and file.records[0].values.get("kind") == "setup":
        return "hetlb's event log", _read_events
    if file.has("metadata", "metrics") and file.shape != "CSV":
        return "AIPerf's profile_export.jsonl", _read_aiperf
    if file.has("benchmarks") and file.shape != "CSV":
        return "GuideLLM's results", _read_guidellm
    if file.has("experiments") and file.shape != "CSV":
        return "GenAI-Perf's profile_export.json", _read_genai_perf
    if file.has("starttime", "endtime", "info"):
        return "inference-perf's per-request metrics", _read_inference_perf
    # Not by the squashed key: `ttft_s` of a request is no list of all.
    if file.shape != "CSV" and file.records and file.records[0].values.keys() & {"runs", "ttfts"}:
        backend = str(file.records[0].values.get("backend", ""))
        return _SGLANG if backend.startswith("sglang") else _VLLM, _read_bench
    if is_own(file) and file.name("ttfts", "measuredttfts") and file.name("e2es", "measurede2es"):
        return "hetlb's CSV of measured requests", _read_own
    if (_named(file, _TTFT) or file.name(*_FIRSTS)) and file.name(*INPUT) and file.name(*OUTPUT):
        return NAMED_RECORDS, _read_named
    return None


NAMED_RECORDS = "records whose keys name what they are"
_VLLM, _SGLANG = "the results of vllm bench serve", "the results of SGLang's bench_serving"
_BENCH = "vllm bench serve --save-result --save-detailed"
#: Supported forms, for a refusal.
LOG_TITLES = (
    f"{_BENCH} (also hetlb bench --save-detailed)",
    "SGLang's bench_serving --output-details",
    "AIPerf's profile_export.jsonl",
    "GuideLLM's JSON",
    "GenAI-Perf's profile_export.json",
    "inference-perf's per_request_lifecycle_metrics.json",
    "an event log of hetlb",
    "CSV or JSON with arrival_s, input_tokens, output_tokens, ttft_s, e2e_s (or _ms, _ns)",
)


#: Keys of documents that hold figures of whole runs, with the file to take instead.
_SUMMARIES = (
    (("meanttftms",), f"a summary of vllm bench: take the document of {_BENCH}"),
    (("timetofirsttoken", "inputconfig"), "a summary of AIPerf or GenAI-Perf: take its profile_export"),
    (("requestcount", "failurecount"), "a summary of Locust, which counts no tokens"),
    (("usercount", "totalrequestcount"), "a summary of Locust, which counts no tokens"),
    (("bytesout", "bytesin", "latency"), "results of Vegeta, which counts no tokens"),
    (("elapsed", "responsecode"), "results of JMeter, which counts no tokens"),
    (("responsetime", "statuscode"), "results of hey, which counts no tokens"),
    (("responsetimehistogram",), "a summary of oha, which counts no tokens"),
    (("metric", "data", "type"), "results of k6, which counts no tokens"),
    (
        ("inputlen", "outputlen", "overallthroughput"),
        "batches of SGLang's bench_one_batch: take bench_serving's",
    ),
    (("customid", "response", "error"), "the results of a batch: take its requests"),
)


def summary_of(file: RecordFile) -> str | None:
    """Return the file to take instead of one without the tokens of each request, None of another file."""
    for keys, advice in _SUMMARIES:
        if file.has(*keys):
            return f"expected each request with its tokens, got {advice}"
    return None


def _why_no_log(file: RecordFile) -> str:
    """Return the kind of a file other than a log, and the supported kinds."""
    known = f"read are: {'; '.join(LOG_TITLES)}"
    if (summary := summary_of(file)) is not None:
        return summary
    if is_own(file) or (trace := known_trace(file)) is not None:
        title = "hetlb's CSV" if is_own(file) else trace[0]  # type: ignore[index]
        return f"expected measured requests, got {title} without ttft_s and e2e_s; {known}"
    if file.shape == "text" and ("Received request" in file.text or "vllm" in file.text[:4096].lower()):
        return (
            "expected token counts and first-token times, which a server's text log does not hold; "
            f"take the document of {_BENCH}"
        )
    return f"expected measured requests, got {file.described}; {known}"


def _read_bench(file: RecordFile) -> Log:
    path, records = file.path, file.records
    if len(records) > 1:
        raise TraceError(f"{path}: expected one run, got {len(records)} (a line each): keep one of them")
    record = records[0]
    document: Any = record.values
    if isinstance(runs := document.get("runs"), list) and runs:
        if len(runs) > 1:
            raise TraceError(f"{path}: runs: expected one run, got {len(runs)} (one rate and seed a log)")
        document = runs[0]
    names: tuple[str, ...] = ("input_lens", "output_lens", "ttfts", "itls")
    missing = [name for name in names if not isinstance(document, dict) or not document.get(name)]
    if missing:
        raise TraceError(f"{path}: expected {', '.join(names)} ({_BENCH}), missing {', '.join(missing)}")
    columns = [document[name] for name in names]
    for optional in ("start_times", "errors"):
        if document.get(optional):
            names, columns = (*names, optional), [*columns, document[optional]]
    lengths = [len(column) if isinstance(column, list) else None for column in columns]
    if None in lengths or len(set(lengths)) != 1:
        raise TraceError(f"{path}: {', '.join(names)}: expected lists of one length, got {lengths}")
    of_each = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    durations = [_bench_times_s(record, index, each) for index, each in enumerate(of_each)]
    starts = [each["start_times"] for each in of_each] if "start_times" in names else None
    if starts is None:
        starts = _starts_s(path, document, [end_s for _, end_s in durations])
    requests, failed = [], 0
    for index, (each, start_s, (first_s, end_s)) in enumerate(zip(of_each, starts, durations, strict=True)):
        if each.get("errors") or not each["output_lens"] or not each["ttfts"]:
            failed += 1
            continue
        requests.append(
            LoggedRequest(
                record.moment(f"start_times[{index}]", start_s, 1.0),
                record.tokens(f"input_lens[{index}]", each["input_lens"]),
                record.tokens(f"output_lens[{index}]", each["output_lens"]),
                first_s,
                end_s,
            )
        )
    kind = "sglang" if str(document.get("backend", "")).startswith("sglang") else "bench"
    return Log(kind, tuple(requests), failed)


def _bench_times_s(record: Record, index: int, each: Mapping[str, Any]) -> tuple[float, float]:
    """Return the times of one request to the first and to the last token; of a failed one the known ones."""
    first_s = record.seconds(f"ttfts[{index}]", each["ttfts"] or 0.0)
    try:
        gaps_s = math.fsum(each["itls"] or ())
    except (TypeError, ValueError, OverflowError):
        gaps_s = math.nan
    return first_s, first_s + record.seconds(f"sum of itls[{index}]", gaps_s)


def _starts_s(path: Path, document: Mapping[str, Any], durations_s: Sequence[float]) -> list[float]:
    """Return the send times of a run without `start_times`. Raises `TraceError` if they stay unknown.

    At an infinite rate all are sent at once; with a concurrency limit, each at the end of an earlier one.
    """
    rate, most = document.get("request_rate"), document.get("max_concurrency")
    if rate not in ("inf", math.inf):
        raise TraceError(
            f"{path}: start_times: expected the time of each request, which a run at request_rate "
            f"{rate!r:.20} does not tell: measure at --request-rate inf, or by hetlb bench --save-detailed"
        )
    if not isinstance(most, int) or most >= len(durations_s) or most < 1:
        return [0.0] * len(durations_s)
    ends = [0.0] * most
    starts = []
    for duration_s in durations_s:
        starts.append(heapq.heappop(ends))
        heapq.heappush(ends, starts[-1] + duration_s)
    return starts


def _table(record: Record, key: str, value: object) -> Mapping[str, Any]:
    """Return an object within a record, an empty one if it is missing. Raises `TraceError`."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise record.error(key, "an object", value)
    return value


def _listed(record: Record, key: str, value: object) -> list[Any]:
    """Return a list within a record, an empty one if it is missing. Raises `TraceError`."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise record.error(key, "a list", value)
    return value


def _read_aiperf(file: RecordFile) -> Log:
    requests, failed, warm_ups = [], 0, 0
    for record in file.records:
        metrics = _table(record, "metrics", record.values.get("metrics"))
        metadata = _table(record, "metadata", record.values.get("metadata"))
        if "warmup" in str(metadata.get("benchmark_phase")).lower().replace("_", "").replace("-", ""):
            warm_ups += 1
            continue
        if record.values.get("error") or metadata.get("was_cancelled"):
            failed += 1
            continue
        found = {name: next((n for n in names if n in metrics), None) for name, names in _AIPERF.items()}
        missing = [_AIPERF[name][0] for name, key in found.items() if key is None]
        if metadata.get("request_start_ns") is None:
            missing.append("request_start_ns")
        if missing:
            raise TraceError(f"{record.where}: expected {', '.join(missing)}, but it is missing")
        value = {name: _metric(record, str(key), metrics.get(str(key))) for name, key in found.items()}
        ttft_s = record.seconds(str(found["ttft_s"]), value["ttft_s"])
        requests.append(
            LoggedRequest(
                record.moment("request_start_ns", metadata["request_start_ns"], 1e-9),
                record.tokens(str(found["prompt"]), value["prompt"]),
                record.tokens(str(found["output"]), value["output"]),
                ttft_s,
                record.seconds(str(found["e2e_s"]), value["e2e_s"], 1.0, ttft_s),
            )
        )
    return Log("aiperf", tuple(requests), failed, warm_ups=warm_ups)


#: Names of AIPerf's metrics, the one to be named first.
_AIPERF = {
    "prompt": ("input_sequence_length",),
    "output": ("output_sequence_length", "output_token_count"),
    "ttft_s": ("time_to_first_token",),
    "e2e_s": ("request_latency",),
}


def _metric(record: Record, key: str, raw: object) -> float:
    """Return the value of a metric of AIPerf, in seconds or tokens."""
    value, unit = (raw.get("value"), raw.get("unit")) if isinstance(raw, dict) else (raw, None)
    size = 1.0 if unit == "tokens" else UNITS_S.get(unit) if isinstance(unit, str) else None
    if size is None:
        raise record.error(key, "a unit of tokens, s, ms, us, ns", unit)
    return record.number(key, value, str(unit), 0.0, 1e12) * size


def _read_guidellm(file: RecordFile) -> Log:
    requests, failed = [], 0
    document = file.records[0]
    for number, raw in enumerate(_listed(document, "benchmarks", document.values.get("benchmarks"))):
        where = f"benchmarks[{number}].requests"
        benchmark = _table(document, f"benchmarks[{number}]", raw)
        parts = _table(document, where, benchmark.get("requests"))
        failed += sum(len(_listed(document, where, parts.get(name))) for name in ("errored", "incomplete"))
        for index, each in enumerate(_listed(document, where, parts.get("successful"))):
            at = f"{file.path}: {where}.successful[{index}]"
            record = Record(at, _table(document, at, each))
            info = _table(record, "info", record.values.get("info"))
            timings = _table(record, "info.timings", info.get("timings"))
            values = {**timings, **{key: value for key, value in record.values.items() if value is not None}}
            for key in ("input", "output"):  # newer versions count more beside the sums
                counts = _table(record, f"{key}_metrics", record.values.get(f"{key}_metrics"))
                values.setdefault(f"{key}_tokens", counts.get("text_tokens") or counts.get("total_tokens"))
            start = _first(
                record, values, "request_start_time", "start_time", "request_start", "resolve_start"
            )
            end = _first(record, values, "request_end_time", "end_time", "request_end", "resolve_end")
            e2e_s = record.seconds("request_latency", values.get("request_latency", _less(end, start)))
            ttft = values.get("time_to_first_token_ms")
            names = (
                *("first_token_iteration", "first_output_token_iteration", "first_iteration"),
                "first_token_time",
            )
            first = next((values[name] for name in names if values.get(name) is not None), None)
            if ttft is None and first is not None:
                ttft = 1e3 * record.seconds("first_token_iteration", _less(first, start))
            requests.append(
                LoggedRequest(
                    record.moment("request_start_time", start, 1.0),
                    record.tokens("prompt_tokens", _first(record, values, "prompt_tokens", "input_tokens")),
                    record.tokens("output_tokens", _first(record, values, "output_tokens")),
                    e2e_s if ttft is None else record.seconds("time_to_first_token_ms", ttft, 1e-3),
                    e2e_s,
                )
            )
    return Log("guidellm", tuple(requests), failed)


def _read_genai_perf(file: RecordFile) -> Log:
    """Read GenAI-Perf's export: times in ns, and texts. Tokens are estimated if no usage came."""
    requests, failed = [], 0
    document = file.records[0]
    for number, raw in enumerate(_listed(document, "experiments", document.values.get("experiments"))):
        part = _table(document, f"experiments[{number}]", raw)
        for index, each in enumerate(
            _listed(document, f"experiments[{number}].requests", part.get("requests"))
        ):
            where = f"{file.path}: experiments[{number}].requests[{index}]"
            record = Record(where, _table(document, where, each))
            came = _listed(record, "response_timestamps", record.values.get("response_timestamps"))
            outputs = _listed(record, "response_outputs", record.values.get("response_outputs"))
            answers = [
                (at, answer) for at, raw in zip(came, outputs, strict=False) for answer in _payloads(raw)
            ]
            texts = [(at, text) for at, answer in answers for text in _answered(answer)]
            if not texts or record.values.get("success") is False:
                failed += 1
                continue
            inputs = _table(record, "request_inputs", record.values.get("request_inputs"))
            asked = next(iter(_payloads(inputs)), dict(inputs))
            usage: dict[str, Any] = next(
                (found for _, answer in reversed(answers) if (found := answer.get("usage"))), {}
            )
            start_s = record.moment("timestamp", record.values.get("timestamp"), 1e-9)
            first_s, end_s = (
                record.moment("response_timestamps", texts[i][0], 1e-9) - start_s for i in (0, -1)
            )
            prompt = usage.get("prompt_tokens") or estimate_tokens("\n".join(asked_texts(asked)))
            whole = texts[0][0] == texts[-1][0]  # not streamed
            output = estimate_tokens("".join(text for _, text in texts)) if whole else len(texts)
            output = usage.get("completion_tokens") or output
            requests.append(
                LoggedRequest(
                    start_s,
                    record.tokens("prompt_tokens", prompt),
                    record.tokens("completion_tokens", output),
                    record.seconds("response_timestamps[0] - timestamp", first_s),
                    record.seconds("response_timestamps[-1] - timestamp", end_s, 1.0, first_s),
                )
            )
    return Log("genai-perf", tuple(requests), failed)


def _payloads(table: object) -> list[dict[str, Any]]:
    """Return the JSON objects of a request or response: its body, the events of a stream, or itself."""
    if not isinstance(table, dict):
        return []
    text = table.get("response", table.get("payload"))
    if not isinstance(text, str):
        return [table]
    found = []
    for piece in text.split("\n\n"):
        with contextlib.suppress(TraceError):
            found.append(decode_json("", piece.strip().removeprefix("data:").strip()))
    return [each for each in found if isinstance(each, dict)]


def _answered(answer: Mapping[str, Any]) -> Iterable[str]:
    """Yield the texts of an answer or of one of its events."""
    if isinstance(text := answer.get("text_output"), str) and text:
        yield text
    for choice in answer.get("choices") or ():
        if isinstance(choice, dict):
            message = choice.get("delta") or choice.get("message") or choice
            text = message.get("content", message.get("text")) if isinstance(message, dict) else None
            if isinstance(text, str) and text:
                yield text


def _first(record: Record, values: Mapping[str, Any], *names: str) -> Any:
    """Return the first value present; for end times also None."""
    found = next((values[name] for name in names if values.get(name) is not None), None)
    if found is None and "end" not in names[0]:
        raise TraceError(f"{record.where}: expected {names[0]}, but it is missing")
    return found


def _less(end: object, start: object) -> object:
    """Return a difference of two numbers, NaN of anything else."""
    numbers = isinstance(end, int | float) and isinstance(start, int | float)
    return float(end) - float(start) if numbers else math.nan  # type: ignore[arg-type]


def _read_inference_perf(file: RecordFile) -> Log:
    requests, failed = [], 0
    for record in file.records:
        if record.values.get("error"):
            failed += 1
            continue
        info = _table(record, "info", record.values.get("info"))
        answer = {**info, **_table(record, "info.response_metrics", info.get("response_metrics"))}
        asked = _table(record, "info.request_metrics", info.get("request_metrics"))
        asked = {**info, **_table(record, "info.request_metrics.text", asked.get("text"))}
        start_s = record.moment("start_time", record.values.get("start_time"), 1.0)
        end_s = record.moment("end_time", record.values.get("end_time"), 1.0)
        times = _listed(record, "info.output_token_times", answer.get("output_token_times"))
        first_s = record.moment("info.output_token_times[0]", times[0], 1.0) if times else end_s
        ttft_s = record.seconds("info.output_token_times[0] - start_time", first_s - start_s)
        requests.append(
            LoggedRequest(
                start_s,
                record.tokens("info.input_tokens", asked.get("input_tokens")),
                record.tokens("info.output_tokens", answer.get("output_tokens")),
                ttft_s,
                record.seconds("end_time - start_time", end_s - start_s, 1.0, ttft_s),
            )
        )
    return Log("inference-perf", tuple(requests), failed)


# --- records with self-explaining keys --------------------------------------------------------------------

_TTFT = ("ttft", "timetofirsttoken", "firsttokenlatency", "measuredttft")
#: Keys of the moment of the first token.
_FIRSTS = ("firsttokentime", "firsttokenat", "firsttokentimestamp", "completionstarttime", "firsttoken")
_E2E = (
    "e2e",
    "e2el",
    "e2elatency",
    "endtoendlatency",
    "requestlatency",
    "latency",
    "measurede2e",
    "duration",
    "generationtime",
)
_ENDS = (
    "endtime",
    "end",
    "requestend",
    "requestendtime",
    "finishtime",
    "finishedat",
    "completedat",
    "responsecreatedat",
)


def _named(file: RecordFile, begins: Iterable[str], *, plain: bool = False) -> str | None:
    """Return a key that begins so and ends with a unit, else (`plain`) one without."""
    names = [begin + unit for begin in begins for unit in UNITS_S]
    return file.name(*names, *(begins if plain else ()))


def _read_named(file: RecordFile) -> Log:
    start, ttft = _named(file, ARRIVALS, plain=True), _named(file, _TTFT) or file.name(*_FIRSTS)
    e2e, end = _named(file, _E2E), _named(file, _ENDS, plain=True)
    missing = [] if start else ["arrival_s"]
    missing += [] if e2e or end else ["e2e_s"]
    if missing or start is None or ttft is None:
        raise TraceError(f"{file.path}: expected {', '.join(missing)}, but it is missing ({file.described})")
    unit_s = unit_of(file, start, None)
    stamped = _named(file, _TTFT) is None  # the moment of the first token, not how long it took
    ttft_unit_s = unit_of(file, ttft, unit_s if stamped else None)
    end_unit_s = unit_of(file, e2e or str(end), unit_s)
    prompt, output = file.name(*INPUT) or "", file.name(*OUTPUT) or ""
    error = file.name("error", "errormsg", "errormessage", "errorcode")
    requests, failed = [], 0
    for record in file.records:
        if record.get(error):
            failed += 1
            continue
        start_s = record.moment(start, record.get(start), unit_s)
        if stamped:
            first_s = record.moment(ttft, record.get(ttft), ttft_unit_s)
            ttft_s = record.seconds(f"{ttft} - {start}", first_s - start_s)
        else:
            ttft_s = record.seconds(ttft, record.get(ttft), ttft_unit_s)
        if e2e is not None:
            e2e_s = record.seconds(e2e, record.get(e2e), end_unit_s, ttft_s)
        else:
            end_s = record.moment(str(end), record.get(end), end_unit_s)
            e2e_s = record.seconds(f"{end} - {start}", end_s - start_s, 1.0, ttft_s)
        requests.append(
            LoggedRequest(
                start_s,
                record.tokens(prompt, record.get(prompt)),
                record.tokens(output, record.get(output)),
                ttft_s,
                e2e_s,
            )
        )
    return Log("records", tuple(requests), failed)


def _read_own(file: RecordFile) -> Log:
    rows = own_rows(file)
    names = {
        name: file.name(squashed(name), squashed(f"measured_{name}"))
        for name in ("ttft_s", "e2e_s", "queue_s")
    }
    requests = []
    for record, row in zip(file.records, rows, strict=True):
        if row.arrival_s is None:
            raise TraceError(f"{record.where}: arrival_s: expected seconds, got none")
        times = {
            name: record.seconds(column, record.values.get(column))
            for name, column in names.items()
            if column is not None
        }
        requests.append(
            LoggedRequest(
                record.moment("arrival_s", row.arrival_s, 1.0),
                row.input_tokens,
                row.output_tokens,
                times["ttft_s"],
                record.seconds("e2e_s", times["e2e_s"], 1.0, times["ttft_s"]),
                times.get("queue_s"),
            )
        )
    # The prompt of a conversation depends on the turns before.
    order = sorted(range(len(rows)), key=lambda index: requests[index].arrival_s)
    contents = contents_of([rows[index] for index in order], block_tokens(rows))
    for index, content in zip(order, contents, strict=True):
        requests[index] = replace(requests[index], content=content)
    return Log("csv", tuple(requests))


def _read_events(file: RecordFile) -> Log:
    from hetlb.options.event_log.eventlog import decode_setup

    path = file.path
    try:
        setup = decode_setup(file.text.partition("\n")[0])
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as caught:
        raise TraceError(f"{path}: line 1: expected the set-up of an event log: {caught}") from caught
    arrivals: dict[int, dict[str, Any]] = {}
    placed: dict[int, tuple[int, str, float]] = {}
    first: dict[int, float] = {}
    requests, failed = [], 0
    for record in file.records[1:]:
        fact = record.values
        try:
            now, kind = record.moment("t", fact["t"], 1.0), fact["kind"]
            if kind == "arrival":
                arrivals[fact["request"]["id"]] = fact["request"]
            elif kind == "first_token":
                first.setdefault(fact["lease"], now)
            elif kind == "lease_ended" and fact["lease"] in placed:
                request_id, instance, began = placed[fact["lease"]]
                request = arrivals[request_id]
                output = fact["output_tokens"] // max(1, request.get("sequences", 1))
                if fact.get("outcome") != "ok" or not output or fact["lease"] not in first:
                    failed += 1
                else:
                    ttft_s = record.seconds("first_token", first[fact["lease"]] - began)
                    requests.append(
                        LoggedRequest(
                            began,
                            record.tokens("prompt_tokens", request["prompt_tokens"]),
                            record.tokens("output_tokens", output),
                            ttft_s,
                            record.seconds("lease_ended", now - began, 1.0, ttft_s),
                            None,
                            instance,
                        )
                    )
            for command in fact["out"]:
                if command[0] == "dispatch":
                    placed[command[2]] = (command[1], command[3], now)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as caught:
            raise TraceError(f"{record.where}: expected a fact of hetlb's event log: {caught!r}") from caught
    return Log("events", tuple(requests), failed, setup)
