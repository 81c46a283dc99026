"""Requests of a file in any known form: one recogniser, by the keys that its records have.

Most forms are columns (`trace_columns.py`). More than columns are texts (`chats.py`), the lists of one run
(`vllm bench serve`) and hetlb's event log.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hetlb.errors import TraceError
from hetlb.tools.workload.chats import (
    BATCH,
    CHATS,
    PAIRS,
    PROMPTS,
    batch_rows,
    chat_rows,
    encodable,
    estimate_tokens,
    is_batch,
    is_chats,
    is_pairs,
    pair_rows,
    prompt_rows,
)
from hetlb.tools.workload.input_limit import numbered_lines
from hetlb.tools.workload.record_file import (
    Record,
    RecordFile,
    flat,
    open_records,
    records_at,
    replaced,
    say,
    unwrapped,
)
from hetlb.tools.workload.rows import REQUIRED_COLUMNS, Row, is_own, own_rows
from hetlb.tools.workload.trace_columns import (
    FORMATS,
    NAMED,
    Columns,
    Format,
    Requests,
    Times,
    read_requests,
    times_of,
)

#: Largest depth of nested objects read.
_MOST_WRAPPED: Final = 3
BENCH: Final = "vllm bench serve --save-result --save-detailed"
_OWN = Format("hetlb's CSV", "", 1.0, "csv")
_EVENTS = Format("hetlb's event log", "", 1.0, "events")
#: Supported forms, for a refusal.
LOG_TITLES = (
    f"{BENCH} (also hetlb bench --save-detailed)",
    "SGLang's bench_serving --output-details",
    *(each.title for each in (*FORMATS, _EVENTS) if each.kind),
    "CSV or JSON with arrival_s, input_tokens, output_tokens, ttft_s, e2e_s (or _ms, _ns)",
)
_TITLES = (
    f"hetlb's CSV ({','.join(REQUIRED_COLUMNS)})",
    *dict.fromkeys(each.title for each in FORMATS if not each.kind),
    "records whose keys name what they are (arrival_s, _ms or _ns, prompt_tokens, completion_tokens)",
    CHATS,
    PAIRS,
    BATCH,
    PROMPTS,
    "results of a load test with the times of each request",
)
#: Keys of documents that hold figures of whole runs, with the file to take instead.
_SUMMARIES: Final = {
    "experiments version": "texts of GenAI-Perf: take the profile_export.jsonl of AIPerf",
    "meanttftms": f"a summary of vllm bench: take the document of {BENCH}",
    "timetofirsttoken inputconfig": "a summary of AIPerf or GenAI-Perf: take its profile_export",
    "requestcount failurecount": "a summary of Locust, which counts no tokens",
    "usercount totalrequestcount": "a summary of Locust, which counts no tokens",
    "bytesout bytesin latency": "results of Vegeta, which counts no tokens",
    "elapsed responsecode": "results of JMeter, which counts no tokens",
    "responsetime statuscode": "results of hey, which counts no tokens",
    "responsetimehistogram": "a summary of oha, which counts no tokens",
    "metric data type": "results of k6, which counts no tokens",
    "inputlen outputlen overallthroughput": "batches of SGLang's bench_one_batch: take bench_serving's",
    "customid response error": "the results of a batch: take its requests",
}


def summary_of(file: RecordFile) -> str | None:
    """Return why a summary is refused, with the file to take instead; None for any other file."""
    for keys, advice in _SUMMARIES.items():
        if file.has(*keys.split()):
            return f"expected each request with its tokens, got {advice}"
    return None


def read_trace(path: Path, answer_tokens: int | None = None) -> list[Row]:
    """Return every request of a file, in its order. Raises `TraceError`; a file without any is an error.

    `answer_tokens` is the length of answers if the file has none. What a file of another program was taken
    for goes to stderr.
    """
    return rows_in(open_records(path), answer_tokens)


def rows_in(file: RecordFile, answer_tokens: int | None = None, chat_tokens: int | None = None) -> list[Row]:
    """Return the requests of an open file; see `read_trace`.

    `chat_tokens` replaces the length of the answers of conversations.
    """
    if is_own(file):
        return own_rows(file)
    found = recognised(file, answer_tokens, chat_tokens)
    if found is None:
        raise TraceError(
            f"{file.path}: {summary_of(file) or f'expected requests, got {file.described}'}; "
            f"hetlb reads: {'; '.join(_TITLES)}"
        )
    title, rows = found.title, found.reading.rows
    if not rows:
        raise TraceError(f"{file.path}: {title}: expected at least one request, got none of use")
    times = [row.arrival_s for row in rows if row.arrival_s is not None]
    timed = len(times) == len(rows)
    span = f" over {max(times) - min(times):,.1f} s" if timed else ", not all with times" if times else ""
    notes = "".join(f"; left out: {each}" for each in found.reading.left_out)
    say(file.path, f"read as {title}: {len(rows):,} request{'s'[: len(rows) > 1]}{span}{notes}")
    return rows


@dataclass(frozen=True, slots=True)
class Recognised:
    """A file's kind in words, and its requests."""

    title: str
    reading: Requests


@dataclass(frozen=True, slots=True)
class _Asked:
    """Lengths of answers and of conversations, and whether each request needs its times (`log`)."""

    answer_tokens: int | None
    chat_tokens: int | None
    log: bool


def recognised(
    file: RecordFile, answer_tokens: int | None = None, chat_tokens: int | None = None, *, log: bool = False
) -> Recognised | None:
    """Return a file's kind and requests, None for an unknown kind. Raises `TraceError`.

    Of a `log` each request must have its times; texts are none.
    """
    asked, inner, summary = _Asked(answer_tokens, chat_tokens, log), file, summary_of(file) is not None
    for _ in range(1 if summary else _MOST_WRAPPED + 1):
        for find in _FORMS:
            if (find is not _named or not summary) and (found := find(inner, asked)) is not None:
                return found
        if (within := unwrapped(inner)) is None:
            break
        inner = within
    return None


def _format(file: RecordFile, asked: _Asked) -> Recognised | None:
    """Recognise a file by the table of formats."""
    form = next((each for each in FORMATS if each.fits(file)), None)
    if form is None:
        return None
    inner = records_at(file, *form.inside) if form.inside is not None else file
    return Recognised(form.title, read_requests(inner, form, bool(form.kind)))


def _texts(file: RecordFile, asked: _Asked) -> Recognised | None:
    """Recognise a file of conversations, or a batch."""
    if asked.log or not (is_chats(file) or is_batch(file)):
        return None
    chats = is_chats(file)
    rows, left_out = chat_rows(file, asked.chat_tokens) if chats else batch_rows(file, asked.answer_tokens)
    return Recognised(CHATS if chats else BATCH, Requests(rows=rows, others=left_out))


def _special(file: RecordFile, asked: _Asked) -> Recognised | None:
    """Recognise a file that is more than a table of columns."""
    first = file.records[0].values if file.records else {}
    if first.get("kind") == "setup":
        return Recognised("hetlb's event log", _events(file))
    # Not by the squashed key: `ttft_s` of a request is no list of all.
    if file.shape != "CSV" and first.keys() & {"runs", "ttfts"}:
        sglang = str(first.get("backend", "")).startswith("sglang")
        title = "the results of SGLang's bench_serving" if sglang else "the results of vllm bench serve"
        form = Format(title, "", 1.0, "sglang" if sglang else "bench")
        return Recognised(title, read_requests(_transposed(file), form, measured=True))
    return _own(file) if is_own(file) else None


def _own(file: RecordFile) -> Recognised:
    """Read hetlb's own columns, with the times of each request if there are some."""
    rows, columns = own_rows(file), Columns(file, _OWN)
    if not (columns.has("ttft") and columns.has("e2e")):
        return Recognised(_OWN.title, Requests(rows=rows))
    times = [
        times_of(columns, _OWN, record, row.arrival_s) for record, row in zip(file.records, rows, strict=True)
    ]
    good = [index for index, each in enumerate(times) if each.ttft_s and rows[index].output_tokens]
    found = Requests("csv", [rows[index] for index in good], [times[index] for index in good])
    found.failed = len(rows) - len(good)
    return Recognised("hetlb's CSV of measured requests", found)


def _named(file: RecordFile, asked: _Asked) -> Recognised | None:
    """Recognise a file by keys that name their roles."""
    if not NAMED.fits(file):
        return None
    columns = Columns(flat(file), NAMED)
    timed = columns.has("arrival") and columns.has("e2e", "end")
    measured = columns.has("ttft", "first") and (asked.log or timed)
    return Recognised(NAMED.title, read_requests(file, NAMED, measured))


def _pairs(file: RecordFile, asked: _Asked) -> Recognised | None:
    """Recognise a file of prompts, with answers or without."""
    pairs = is_pairs(file)
    if asked.log or not (pairs or file.name("prompt", "textinput", "text")):
        return None
    rows, left_out = pair_rows(file) if pairs else prompt_rows(file, asked.answer_tokens)
    return Recognised(PAIRS if pairs else PROMPTS, Requests(rows=rows, others=left_out))


#: The more special ones first.
_FORMS: Final[tuple[Callable[[RecordFile, _Asked], Recognised | None], ...]] = (
    *(_format, _texts, _special, _named, _pairs),
)

# --- the lists of one run ---------------------------------------------------------------------------------


def _transposed(file: RecordFile) -> RecordFile:
    """Return a record for each request of a run with its figures in lists. Raises `TraceError`."""
    path, document = file.path, file.records[0].values
    if len(file.records) > 1:
        raise TraceError(f"{path}: expected one run, got {len(file.records)} (a line each): keep one of them")
    if isinstance(runs := document.get("runs"), list) and runs:
        if len(runs) > 1:
            raise TraceError(f"{path}: runs: expected one run, got {len(runs)} (one rate and seed a log)")
        document = runs[0]
    names = ["input_lens", "output_lens", "ttfts", "itls"]
    missing = [name for name in names if not isinstance(document, dict) or not document.get(name)]
    if missing:
        raise TraceError(f"{path}: expected {', '.join(names)} ({BENCH}), missing {', '.join(missing)}")
    names += [name for name in ("start_times", "errors") if document.get(name)]
    columns = [document[name] for name in names]
    lengths = [len(column) if isinstance(column, list) else None for column in columns]
    if None in lengths or len(set(lengths)) != 1:
        raise TraceError(f"{path}: {', '.join(names)}: expected lists of one length, got {lengths}")
    values: list[dict[str, Any]] = [
        dict(zip(names, each, strict=True)) for each in zip(*columns, strict=True)
    ]
    for each in values:  # of a failed one there may be no first token
        each["ttfts"], each["itls"] = each["ttfts"] or 0.0, each["itls"] or []
    records = [Record(f"{path}: entry {number}", each) for number, each in enumerate(values, start=1)]
    if "start_times" not in names:
        form = Format("", "", 1.0)
        columns_of = Columns(replaced(file, records), form)
        whole_s = [times_of(columns_of, form, each, 0.0).e2e_s for each in records]
        for each, start_s in zip(values, _starts_s(path, document, whole_s), strict=True):
            each["start_times"] = start_s
    return replaced(file, records)


def _starts_s(path: Path, document: Mapping[str, Any], durations_s: list[float]) -> Iterator[float]:
    """Yield the send times of a run without `start_times`. Raises `TraceError` if they stay unknown.

    At an infinite rate all are sent at once; with a concurrency limit, each at the end of an earlier one.
    """
    rate, most = document.get("request_rate"), document.get("max_concurrency")
    if rate not in ("inf", math.inf):
        raise TraceError(
            f"{path}: start_times: expected the time of each request, which a run at request_rate "
            f"{rate!r:.20} does not tell: measure at --request-rate inf, or by hetlb bench --save-detailed"
        )
    ends = [0.0] * (most if isinstance(most, int) and 1 <= most < len(durations_s) else len(durations_s))
    for duration_s in durations_s:
        start_s = heapq.heappop(ends)
        yield start_s
        heapq.heappush(ends, start_s + duration_s)


# --- hetlb's event log ------------------------------------------------------------------------------------


def _events(file: RecordFile) -> Requests:
    from hetlb.options.event_log.eventlog import decode_setup

    try:
        setup = decode_setup(file.begin)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as caught:
        raise TraceError(f"{file.path}: line 1: expected the set-up of an event log: {caught}") from caught
    arrivals: dict[int, dict[str, Any]] = {}
    placed: dict[int, tuple[int, str, float]] = {}
    first: dict[int, float] = {}
    found = Requests("events", setup=setup)
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
                ttft_s = first.get(fact["lease"], began) - began
                if fact.get("outcome") != "ok" or not output or not ttft_s:
                    found.failed += 1
                else:
                    ttft_s = record.seconds("first_token", ttft_s)
                    e2e_s = record.seconds("lease_ended", now - began, 1.0, ttft_s)
                    prompt = max(1, record.tokens("prompt_tokens", request["prompt_tokens"]))
                    found.rows.append(Row(began, prompt, record.tokens("output_tokens", output)))
                    found.times.append(Times(ttft_s, e2e_s, None, instance))
            for command in fact["out"]:
                if command[0] == "dispatch":
                    placed[command[2]] = (command[1], command[3], now)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as caught:
            raise TraceError(f"{record.where}: expected a fact of hetlb's event log: {caught!r}") from caught
    return found


#: Suffixes of files with keyed records; others hold a prompt a line.
_KEYED = (".jsonl", ".json", ".csv", ".gz", ".ndjson")


def random_rows(
    count: int, input_tokens: int, output_tokens: int, range_ratio: float, rng: random.Random
) -> list[Row]:
    """Return rows with lengths drawn evenly within `range_ratio` of a length, at least 1."""

    def draw(length: int) -> int:
        low, high = math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))
        return max(1, rng.randint(low, high))

    return [Row(None, draw(input_tokens), draw(output_tokens)) for _ in range(count)]


def sharegpt_rows(path: Path, output_tokens: int | None, rng: random.Random) -> list[Row]:
    """Return the first question and answer of each conversation of a file, in an order that `rng` draws.

    The answer gives its length, unless `output_tokens` does. Raises `TraceError`.
    """
    file = open_records(path)
    if not is_chats(file):
        raise TraceError(f"{path}: expected {CHATS}, got {file.described}")
    rows = rows_in(file, chat_tokens=output_tokens)
    rng.shuffle(rows)
    return rows


def custom_rows(path: Path, output_tokens: int) -> list[Row]:
    """Return the prompts of a file, one a line, or the requests of a file in a known form.

    `output_tokens` is the length of answers if the file has none. Raises `TraceError`.
    """
    if path.suffix in _KEYED:
        return rows_in(open_records(path), output_tokens)
    lines = (line.removesuffix("\r") for _, line in numbered_lines(path))
    rows = [Row(None, estimate_tokens(line), output_tokens, encodable(line)) for line in lines]
    if not rows:
        raise TraceError(f"{path}: expected at least one prompt, got none")
    return rows
