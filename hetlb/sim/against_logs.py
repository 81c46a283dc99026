"""Logs of real servers: what each request asked for, when it came and how long it took.

Read are: the document of `vllm bench serve --save-result --save-detailed` (and of `hetlb bench
--save-detailed`), AIPerf's `profile_export.jsonl`, hetlb's event log, and CSV files with the columns
`arrival_s, input_tokens, output_tokens, ttft_s, e2e_s`, and `queue_s` and contents where known. A log that
holds too little is one `TraceError` line that names what is missing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetlb.core.eventlog import decode_setup
from hetlb.core.setup import SchedulerSetup
from hetlb.errors import TraceError
from hetlb.workload.traces import Row, read_trace

#: Fewer requests say little about anything.
LEAST_REQUESTS = 10
_BENCH = "vllm bench serve --save-result --save-detailed"


@dataclass(frozen=True, slots=True)
class Measured:
    """One request that ended well. Times in seconds; `queue_s` is None where the log does not say.

    `arrival_s` is when the server got it. `row` names its content, where the log is a trace.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float
    queue_s: float | None = None
    instance: str = ""
    row: Row | None = None

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 for answers of one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Log:
    """The requests of a log in order of arrival; `failed` did not end well; `setup` is an event log's own."""

    kind: str
    requests: tuple[Measured, ...]
    failed: int = 0
    setup: SchedulerSetup | None = None


def read_log(path: Path) -> Log:
    """Read a log, whatever kind it is. Raises `TraceError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as caught:
        raise TraceError(f"{path}: expected a readable file: {os.strerror(caught.errno or 0)}") from caught
    except UnicodeDecodeError as caught:
        raise TraceError(f"{path}: expected UTF-8 text: {caught.reason}") from caught
    log = _reader(path, text)(path, text)
    usable = [each for each in log.requests if each.e2e_s > 0.0 and each.output_tokens > 0]
    if len(usable) < LEAST_REQUESTS:
        raise TraceError(
            f"{path}: expected at least {LEAST_REQUESTS} requests that ended well, got {len(usable)}"
        )
    usable.sort(key=lambda each: each.arrival_s)
    if all(each.ttft_s >= each.e2e_s for each in usable):
        raise TraceError(f"{path}: expected times to the first token, got whole answers only (not streamed)")
    first_s = usable[0].arrival_s
    shifted = tuple(_shifted(each, first_s) for each in usable)
    return Log(log.kind, shifted, log.failed + len(log.requests) - len(usable), log.setup)


def _shifted(each: Measured, first_s: float) -> Measured:
    return Measured(
        each.arrival_s - first_s,
        each.input_tokens,
        each.output_tokens,
        each.ttft_s,
        each.e2e_s,
        each.queue_s,
        each.instance,
        each.row,
    )


def _reader(path: Path, text: str) -> Callable[[Path, str], Log]:
    head = text.lstrip()[:4096]
    if head.startswith("{"):
        first = head.partition("\n")[0]
        if '"kind"' in first and '"setup"' in first:
            return _read_events
        if '"metadata"' in first and '"metrics"' in first:
            return _read_aiperf
        return _read_bench
    if "arrival_s" in head.partition("\n")[0]:
        return _read_csv
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
    try:
        document = json.loads(text)
    except ValueError as caught:
        raise TraceError(f"{path}: expected JSON: {caught}") from caught
    if isinstance(document, dict) and isinstance(document.get("runs"), list) and document["runs"]:
        document = document["runs"][0]
    names = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
    missing = [name for name in names if not isinstance(document, dict) or not document.get(name)]
    if missing:
        raise TraceError(f"{path}: expected {', '.join(names)} ({_BENCH}), missing {', '.join(missing)}")
    columns = [document[name] for name in names]
    if len({len(column) for column in columns}) != 1:
        raise TraceError(f"{path}: expected lists of one length, got {[len(each) for each in columns]}")
    errors = document.get("errors") or [""] * len(columns[0])
    requests, failed = [], 0
    for (start_s, prompt, output, ttft_s, gaps), error in zip(
        zip(*columns, strict=True), errors, strict=False
    ):
        if error or not output or not ttft_s:
            failed += 1
            continue
        e2e_s = float(ttft_s) + math.fsum(gaps)
        requests.append(Measured(float(start_s), int(prompt), int(output), float(ttft_s), e2e_s))
    return Log("bench", tuple(requests), failed)


def _read_aiperf(path: Path, text: str) -> Log:
    requests, failed = [], 0
    for number, raw in _json_lines(path, text):
        metrics, metadata = raw.get("metrics") or {}, raw.get("metadata") or {}
        if raw.get("error") or metadata.get("was_cancelled"):
            failed += 1
            continue
        found = {name: _metric(metrics, names) for name, names in _AIPERF.items()}
        start_ns = metadata.get("request_start_ns")
        missing = [_AIPERF[name][0] for name, value in found.items() if value is None]
        if start_ns is None:
            missing.append("request_start_ns")
        if missing or start_ns is None:
            raise TraceError(f"{path}: line {number}: expected {', '.join(missing)}, but it is missing")
        prompt, output, ttft_s, e2e_s = (found[name] or 0.0 for name in _AIPERF)
        requests.append(Measured(start_ns / 1e9, int(prompt), int(output), ttft_s, e2e_s))
    return Log("aiperf", tuple(requests), failed)


#: Names of AIPerf's metrics, the one to be named first.
_AIPERF = {
    "prompt": ("input_sequence_length",),
    "output": ("output_sequence_length", "output_token_count"),
    "ttft_s": ("time_to_first_token",),
    "e2e_s": ("request_latency",),
}
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def _metric(metrics: dict[str, Any], names: Sequence[str]) -> float | None:
    for name in names:
        found = metrics.get(name)
        if isinstance(found, dict) and isinstance(found.get("value"), int | float):
            return float(found["value"]) * _UNITS.get(str(found.get("unit")), 1.0)
    return None


def _read_csv(path: Path, _: str) -> Log:
    rows = read_trace(path)
    columns = rows[0].extra.keys() if rows else set()
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
        if row.arrival_s is None:
            raise TraceError(f"{path}: line {number}: arrival_s: expected seconds, got none")
        times = {}
        for name, column in names.items():
            try:
                times[name] = float(row.extra[column]) if column is not None else math.nan
            except ValueError:
                raise TraceError(
                    f"{path}: line {number}: {column}: expected seconds, got {row.extra[column or '']!r}"
                ) from None
        queue_s = None if math.isnan(times["queue_s"]) else times["queue_s"]
        requests.append(
            Measured(
                row.arrival_s,
                row.input_tokens,
                row.output_tokens,
                times["ttft_s"],
                times["e2e_s"],
                queue_s,
                row=row,
            )
        )
    return Log("csv", tuple(requests))


def _read_events(path: Path, text: str) -> Log:
    lines = text.splitlines()
    try:
        setup = decode_setup(lines[0])
    except ValueError as caught:
        raise TraceError(f"{path}: line 1: {caught}") from caught
    arrivals: dict[int, dict[str, Any]] = {}
    placed: dict[int, tuple[int, str, float]] = {}
    first: dict[int, float] = {}
    requests, failed = [], 0
    for number, fact in _json_lines(path, "\n".join(lines[1:]), start=2):
        try:
            now, kind = float(fact["t"]), fact["kind"]
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
                    ttft_s, prompt = first[fact["lease"]] - began, request["prompt_tokens"]
                    requests.append(Measured(began, prompt, output, ttft_s, now - began, None, instance))
            for command in fact["out"]:
                if command[0] == "dispatch":
                    placed[command[2]] = (command[1], command[3], now)
        except (KeyError, TypeError, ValueError, IndexError) as caught:
            raise TraceError(
                f"{path}: line {number}: expected a fact of hetlb's event log: {caught!r}"
            ) from caught
    return Log("events", tuple(requests), failed, setup)


def _json_lines(path: Path, text: str, start: int = 1) -> Iterable[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=start):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except ValueError as caught:
            raise TraceError(f"{path}: line {number}: expected JSON: {caught}") from caught
        if not isinstance(raw, dict):
            raise TraceError(f"{path}: line {number}: expected a JSON object")
        yield number, raw
