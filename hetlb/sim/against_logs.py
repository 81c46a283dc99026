"""Logs of real servers: what each request asked for, when it came and how long it took.

Read are: the document of `vllm bench serve --save-result --save-detailed` (and of `hetlb bench
--save-detailed`), AIPerf's `profile_export.jsonl`, hetlb's event log, and CSV files with the columns
`arrival_s, input_tokens, output_tokens, ttft_s, e2e_s`, and `queue_s` and contents where known. A log that
holds too little is one `TraceError` line that names what is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetlb.core.eventlog import decode_setup
from hetlb.core.setup import SchedulerSetup
from hetlb.errors import TraceError
from hetlb.files import read_text
from hetlb.workload.content import HASH_BLOCK_TOKENS, UNSHARED, PromptContent, contents_of
from hetlb.workload.traces import read_trace

#: Fewer requests say little about anything.
LEAST_REQUESTS = 10
#: Beyond these a value is a mistake: tokens of a sequence, seconds of an answer, seconds on any clock.
_MOST_TOKENS, _LONGEST_S, _LATEST_S = 1 << 31, 1e8, 1e12
_BENCH = "vllm bench serve --save-result --save-detailed"


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request that ended well. Times in seconds; `queue_s` is None where the log does not say.

    `arrival_s` is when the server got it; `content` is known where the log is a trace.
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


def read_log(path: Path, hash_block_tokens: int = HASH_BLOCK_TOKENS) -> Log:
    """Read a log of any supported kind; one of its `hash_ids` names so many tokens. Raises `TraceError`."""
    text = read_text(path, TraceError)
    if not text.strip():
        raise TraceError(f"{path}: expected the log of a server, got an empty file")
    log = _reader(path, text, hash_block_tokens)(path, text)
    usable = [each for each in log.requests if each.ttft_s > 0.0 and each.output_tokens > 0]
    if len(usable) < LEAST_REQUESTS:
        raise TraceError(
            f"{path}: expected at least {LEAST_REQUESTS} requests that ended well, got {len(usable)}"
        )
    usable.sort(key=lambda each: each.arrival_s)
    if all(each.ttft_s >= each.e2e_s for each in usable):
        raise TraceError(f"{path}: expected times to the first token, got whole answers only (not streamed)")
    first_s = usable[0].arrival_s
    shifted = tuple(replace(each, arrival_s=each.arrival_s - first_s) for each in usable)
    return Log(log.kind, shifted, log.failed + len(log.requests) - len(usable), log.setup)


def _reader(path: Path, text: str, hash_block_tokens: int) -> Callable[[Path, str], Log]:
    head = text.lstrip()[:4096]
    if head.startswith("{"):
        first = head.partition("\n")[0]
        if '"kind"' in first and '"setup"' in first:
            return _read_events
        if '"metadata"' in first and '"metrics"' in first:
            return _read_aiperf
        return _read_bench
    if "arrival_s" in head.partition("\n")[0]:
        return partial(_read_csv, hash_block_tokens)
    if "Received request" in text or "vllm" in head.lower():
        raise TraceError(
            f"{path}: expected token counts and first-token times, which a server's text log does not hold; "
            f"take the document of {_BENCH}"
        )
    raise TraceError(
        f"{path}: expected the document of {_BENCH}, AIPerf's profile_export.jsonl, an event log of hetlb "
        f"or a CSV file with arrival_s"
    )


def _read_bench(path: Path, text: str) -> Log:
    document = _json(str(path), text)
    if isinstance(document, dict) and isinstance(runs := document.get("runs"), list) and runs:
        if len(runs) > 1:
            raise TraceError(f"{path}: runs: expected one run, got {len(runs)} (one rate and seed a log)")
        document = runs[0]
    names: tuple[str, ...] = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
    missing = [name for name in names if not isinstance(document, dict) or not document.get(name)]
    if missing:
        raise TraceError(f"{path}: expected {', '.join(names)} ({_BENCH}), missing {', '.join(missing)}")
    columns = [document[name] for name in names]
    if errors := document.get("errors"):
        names, columns = (*names, "errors"), [*columns, errors]
    lengths = [len(column) if isinstance(column, list) else None for column in columns]
    if None in lengths or len(set(lengths)) != 1:
        raise TraceError(f"{path}: {', '.join(names)}: expected lists of one length, got {lengths}")
    read, requests, failed = _Fields(str(path)), [], 0
    for index, (start_s, prompt, output, ttft_s, gaps, *error) in enumerate(zip(*columns, strict=True)):
        if any(error) or not output or not ttft_s:
            failed += 1
            continue
        first_s = read.seconds(f"ttfts[{index}]", ttft_s)
        try:
            gaps_s = math.fsum(gaps)
        except (TypeError, ValueError, OverflowError):
            gaps_s = math.nan
        requests.append(
            LoggedRequest(
                read.moment(f"start_times[{index}]", start_s),
                read.tokens(f"input_lens[{index}]", prompt),
                read.tokens(f"output_lens[{index}]", output),
                first_s,
                first_s + read.seconds(f"sum of itls[{index}]", gaps_s),
            )
        )
    return Log("bench", tuple(requests), failed)


def _read_aiperf(path: Path, text: str) -> Log:
    requests, failed = [], 0
    for number, raw in _json_lines(path, text):
        read = _Fields(f"{path}: line {number}")
        metrics, metadata = raw.get("metrics") or {}, raw.get("metadata") or {}
        if not isinstance(metrics, dict) or not isinstance(metadata, dict):
            raise TraceError(f"{read.where}: expected metrics and metadata to be objects")
        if raw.get("error") or metadata.get("was_cancelled"):
            failed += 1
            continue
        found = {name: next((n for n in names if n in metrics), None) for name, names in _AIPERF.items()}
        missing = [_AIPERF[name][0] for name, key in found.items() if key is None]
        if metadata.get("request_start_ns") is None:
            missing.append("request_start_ns")
        if missing:
            raise TraceError(f"{read.where}: expected {', '.join(missing)}, but it is missing")
        value = {name: read.metric(str(key), metrics[key]) for name, key in found.items()}
        ttft_s = read.seconds(str(found["ttft_s"]), value["ttft_s"])
        requests.append(
            LoggedRequest(
                read.moment("request_start_ns", metadata["request_start_ns"], 1e-9),
                read.tokens(str(found["prompt"]), value["prompt"]),
                read.tokens(str(found["output"]), value["output"]),
                ttft_s,
                read.seconds(str(found["e2e_s"]), value["e2e_s"], ttft_s),
            )
        )
    return Log("aiperf", tuple(requests), failed)


#: Names of AIPerf's metrics, the one to be named first.
_AIPERF = {
    "prompt": ("input_sequence_length",),
    "output": ("output_sequence_length", "output_token_count"),
    "ttft_s": ("time_to_first_token",),
    "e2e_s": ("request_latency",),
}
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "tokens": 1.0}


def _read_csv(hash_block_tokens: int, path: Path, _: str) -> Log:
    rows = read_trace(path)
    columns = rows[0].extra.keys()
    names = {
        name: next((each for each in (name, f"measured_{name}") if each in columns), None)
        for name in ("ttft_s", "e2e_s", "queue_s")
    }
    if missing := [name for name in ("ttft_s", "e2e_s") if names[name] is None]:
        raise TraceError(
            f"{path}: header: expected the columns ttft_s and e2e_s, missing {', '.join(missing)}"
        )
    requests = []
    for number, row in enumerate(rows, start=2):
        read = _Fields(f"{path}: line {number}")
        if row.arrival_s is None:
            raise TraceError(f"{read.where}: arrival_s: expected seconds, got none")
        times = {
            name: read.seconds(column, _float(row.extra[column]))
            for name, column in names.items()
            if column is not None
        }
        requests.append(
            LoggedRequest(
                read.moment("arrival_s", row.arrival_s),
                row.input_tokens,
                row.output_tokens,
                times["ttft_s"],
                read.seconds("e2e_s", times["e2e_s"], times["ttft_s"]),
                times.get("queue_s"),
            )
        )
    # The prompt of a conversation depends on the turns before.
    order = sorted(range(len(rows)), key=lambda index: requests[index].arrival_s)
    contents = contents_of([rows[index] for index in order], hash_block_tokens)
    for index, content in zip(order, contents, strict=True):
        requests[index] = replace(requests[index], content=content)
    return Log("csv", tuple(requests))


def _read_events(path: Path, text: str) -> Log:
    first_line, _, rest = text.partition("\n")
    try:
        setup = decode_setup(first_line)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as caught:
        raise TraceError(f"{path}: line 1: expected the set-up of an event log: {caught}") from caught
    arrivals: dict[int, dict[str, Any]] = {}
    placed: dict[int, tuple[int, str, float]] = {}
    first: dict[int, float] = {}
    requests, failed = [], 0
    for number, fact in _json_lines(path, rest, start=2):
        read = _Fields(f"{path}: line {number}")
        try:
            now, kind = read.moment("t", fact["t"]), fact["kind"]
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
                    ttft_s = read.seconds("first_token", first[fact["lease"]] - began)
                    requests.append(
                        LoggedRequest(
                            began,
                            read.tokens("prompt_tokens", request["prompt_tokens"]),
                            read.tokens("output_tokens", output),
                            ttft_s,
                            read.seconds("lease_ended", now - began, ttft_s),
                            None,
                            instance,
                        )
                    )
            for command in fact["out"]:
                if command[0] == "dispatch":
                    placed[command[2]] = (command[1], command[3], now)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as caught:
            raise TraceError(f"{read.where}: expected a fact of hetlb's event log: {caught!r}") from caught
    return Log("events", tuple(requests), failed, setup)


# --- values ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fields:
    """Checks of the values at one place of a log; each raises `TraceError` with place, key and value."""

    where: str

    def tokens(self, key: str, value: object) -> int:
        """A number of tokens."""
        return int(self._number(key, value, "tokens", 0, _MOST_TOKENS))

    def seconds(self, key: str, value: object, least: float = 0.0) -> float:
        """A time that something took; by a rounding error it may be below `least`."""
        return max(least, self._number(key, value, "seconds", least * (1.0 - 1e-6), _LONGEST_S))

    def moment(self, key: str, value: object, unit: float = 1.0) -> float:
        """Parse a timestamp in units of `unit` seconds."""
        return self._number(key, value, "a time", -_LATEST_S / unit, _LATEST_S / unit) * unit

    def metric(self, key: str, raw: object) -> float:
        """The value of a metric of AIPerf, in seconds or tokens."""
        value, unit = (raw.get("value"), raw.get("unit")) if isinstance(raw, dict) else (raw, None)
        if not isinstance(unit, str) or unit not in _UNITS:
            raise TraceError(f"{self.where}: {key}: expected a unit of {', '.join(_UNITS)}, got {unit!r:.40}")
        return self._number(key, value, unit, 0.0, _LATEST_S) * _UNITS[unit]

    def _number(self, key: str, value: object, words: str, least: float, most: float) -> float:
        """A number within bounds. NaN is in none, and a whole number may have any number of digits."""
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            return float(value)
        got = f"{value!r:.40}"
        raise TraceError(f"{self.where}: {key}: expected {words} from {least:g} to {most:g}, got {got}")


def _float(text: str) -> object:
    """The number that a cell holds, or its text."""
    try:
        return float(text)
    except ValueError:
        return text


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as caught:
        raise TraceError(f"{where}: expected JSON: {caught}") from caught


def _json_lines(path: Path, text: str, start: int = 1) -> Iterable[tuple[int, dict[str, Any]]]:
    # Line ends alone: strings may hold U+2028 and what else `splitlines` splits at.
    for number, line in enumerate(text.split("\n"), start=start):
        if not line.strip():
            continue
        raw = _json(f"{path}: line {number}", line)
        if not isinstance(raw, dict):
            raise TraceError(f"{path}: line {number}: expected a JSON object")
        yield number, raw
