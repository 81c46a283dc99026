"""Access log: one line per ended request, as `key=value` words or as JSON. Text from clients is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from hetlb.balancer.core.types import CAUSES
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.logs import escape

#: Legal in JSON text, but some readers of lines take them for the end of a line.
_LINE_ENDS = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


#: Escaped models, paths and tenants; cleared when full.
_words: dict[str, str] = {}
_KEPT_WORDS: Final = 1024


def _word(text: str) -> str:
    """Escape like `escape`, with a cache, for text that recurs."""
    word = _words.get(text)
    if word is None:
        if len(_words) >= _KEPT_WORDS:
            _words.clear()
        word = _words[text] = escape(text)
    return word


_TWO: Final = [f"{number:02}" for number in range(100)]


def _seconds(value: float) -> str:
    """Return a time with four decimals. `%.4f` costs four times as much."""
    ticks = int(value * 1e4 + 0.5)
    return f"{ticks // 10_000}.{_TWO[ticks // 100 % 100]}{_TWO[ticks % 100]}"


#: Text of a second of the Unix time, the last one that was asked for.
_second: list[tuple[int, str]] = [(-1, "")]


def _time(epoch_s: float) -> str:
    """Return the time in UTC as ISO 8601 has it, to the millisecond."""
    ticks = int(epoch_s * 1000 + 0.5)
    second = ticks // 1000
    known, text = _second[0]
    if known != second:
        text = datetime.fromtimestamp(second, UTC).isoformat()[:19]
        _second[0] = second, text
    return f"{text}.{ticks % 1000:03d}+00:00"


def _level(outcome: str, status: int) -> str:
    """Return `warning` if an engine or hetlb itself failed, or an engine refused hetlb's key; else `info`."""
    cause = CAUSES[outcome]
    if cause == "engine" or cause == "hetlb":
        return "warning"
    return "warning" if outcome == "upstream_refused" and (status == 401 or status == 403) else "info"


def _resumed(record: RequestRecord) -> str:
    why = f" not_resumed={escape(record.not_resumed)}" if record.not_resumed else ""
    return f" resumed={record.resumed}{why}" if record.resumed else why


def keyvalue_line(record: RequestRecord, epoch_s: float = 0.0) -> str:
    """Return `key=value` words, with a newline. A client's text holds no blank; `epoch_s` as for JSON."""
    lease, outcome, cached, ttft_s = record.lease, record.outcome, record.cached_tokens, record.ttft_s
    assert outcome is not None, "expected a request that has ended"
    assert record.ended_at is not None, "expected a request that has ended"
    time = _time(epoch_s + record.ended_at)
    tenant = "-" if not record.tenant else _word(record.tenant)
    name: str = outcome._value_  # `value` is a function in Python
    phase: str = record.ended_in._value_
    instance, predicted = "-", 0
    if lease is not None:
        instance, predicted = lease.instance, int(lease.predicted_output + 0.5)
    cached_tokens = "-" if cached is None else str(cached)
    ttft = "-" if ttft_s is None else _seconds(ttft_s)
    # Compiled, pieces that are text or whole numbers already are put together at once.
    return (
        f"time={time} level={_level(name, record.status)} client={record.address} "
        f"request={escape(record.label)} tenant={tenant} model={_word(record.request.model)} "
        f"path={_word(record.path)} instance={instance} outcome={name} phase={phase} status={record.status} "
        f"prompt_tokens={record.prompt_tokens_total} cached_tokens={cached_tokens} "
        f"output_tokens={record.output_tokens} predicted_output={predicted} "
        f"queue_s={_seconds(record.queue_s)} ttft_s={ttft} total_s={_seconds(record.e2e_s)} "
        f"retries={record.retries}{_resumed(record)}\n"
    )


def json_line(record: RequestRecord, epoch_s: float) -> str:
    """Return a JSON object, with a newline; `epoch_s` is the Unix time of second 0 of the request's clock."""
    lease, outcome, end, ttft_s = record.lease, record.outcome, record.ended_at, record.ttft_s
    assert end is not None, "expected a request that has ended"
    assert outcome is not None, "expected a request that has ended"
    line: dict[str, object] = {
        "time": _time(epoch_s + end),
        "level": _level(outcome.value, record.status),
        "client": None if record.address == "-" else record.address,
        "request": _whole(record.label),
        "tenant": None if record.tenant is None else _whole(record.tenant),
        "model": _whole(record.request.model),
        "path": _whole(record.path),
        "instance": lease.instance if lease else None,
        "outcome": outcome.value,
        "phase": str(record.ended_in),
        "status": record.status,
        "prompt_tokens": record.prompt_tokens_total,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "predicted_output": round(lease.predicted_output, 1) if lease else 0.0,
        "queue_s": round(record.queue_s, 6),
        "ttft_s": None if ttft_s is None else round(ttft_s, 6),
        "total_s": round(record.e2e_s, 6),
        "retries": record.retries,
    }
    if record.resumed:
        line["resumed"] = record.resumed
    if record.not_resumed:
        line["not_resumed"] = _whole(record.not_resumed)
    return msgspec.json.encode(line).decode() + "\n"


#: Writers of a line of the request log, by the value of `proxy.request_log_format`.
FORMATS: dict[str, Callable[[RequestRecord, float], str]] = {"keyvalue": keyvalue_line, "json": json_line}


def _whole(text: str) -> str:
    """Return the text with lone surrogates and line ends replaced, so that it can be encoded on one line."""
    return _LINE_ENDS.sub("\ufffd", text)
