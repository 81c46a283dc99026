"""The request log: one line, in every format, for a request that is over, whatever its client called it."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from hetlb.proxy.fields import LogLine
from hetlb.proxy.telemetry.request_record import RequestRecord

_UNSAFE = re.compile(r"[^!-~]|[\"\\=]")
_SAFE = re.compile(r"[!#-<>-\[\]-~]+")
#: JSON may hold these as they are, but some readers of lines take them for the end of one.
_LINE_ENDS = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def escape(text: str) -> str:
    """Text from outside as one safe word: other than visible ASCII, quotes, `=` and `\\` become `%xx`."""
    if _SAFE.fullmatch(text) is not None:
        return text
    return _UNSAFE.sub(lambda match: "".join(f"%{byte:02x}" for byte in match[0].encode()), text) or "-"


#: Words that come again and again: models, paths, tenants. All are forgotten when there are too many.
_words: dict[str, str] = {}
_MOST_WORDS: Final = 1024


def _word(text: str) -> str:
    """As `escape`, for what comes again and again."""
    word = _words.get(text)
    if word is None:
        if len(_words) >= _MOST_WORDS:
            _words.clear()
        word = _words[text] = escape(text)
    return word


_TWO: Final = [f"{number:02}" for number in range(100)]


def _seconds(value: float) -> str:
    """A time with four decimals. `%.4f` costs four times as much."""
    ticks = int(value * 1e4 + 0.5)
    return f"{ticks // 10_000}.{_TWO[ticks // 100 % 100]}{_TWO[ticks % 100]}"


def keyvalue_line(ended: RequestRecord, _: float = 0.0) -> str:
    """`key=value` words, with a newline. What stands for text of a client has no blank in it."""
    lease, outcome, request = ended.lease, ended.outcome, ended.request
    arrived, first, end = ended.arrived_at, ended.first_byte_at, ended.ended_at
    assert end is not None, "expected a request that is over"
    assert outcome is not None, "expected a request that is over"
    tenant = "-" if not ended.tenant else _word(ended.tenant)
    name: str = outcome._value_  # `value` is a function in Python
    phase: str = ended.ended_in._value_
    instance, output_tokens, predicted = "-", 0, 0
    if lease is not None:
        instance, output_tokens = lease.instance, lease.output_tokens
        predicted = int(lease.predicted_output + 0.5)
    queue = _seconds((end if ended.dispatched_at is None else ended.dispatched_at) - arrived)
    ttft = "-" if first is None else _seconds(first - arrived)
    # Compiled, pieces that are text or whole numbers already are put together at once.
    return (
        f"request={escape(ended.label)} tenant={tenant} model={_word(request.model)} "
        f"path={_word(ended.path)} instance={instance} outcome={name} phase={phase} status={ended.status} "
        f"prompt_tokens={ended.prompt_tokens_used or request.prompt_tokens} output_tokens={output_tokens} "
        f"predicted_output={predicted} queue_s={queue} ttft_s={ttft} total_s={_seconds(end - arrived)} "
        f"retries={ended.retries}\n"
    )


def json_line(ended: RequestRecord, epoch_s: float) -> str:
    """A JSON object, with a newline; `epoch_s` is the Unix time of second 0 of the request's clock."""
    lease, outcome, request = ended.lease, ended.outcome, ended.request
    arrived, first, end = ended.arrived_at, ended.first_byte_at, ended.ended_at
    assert end is not None, "expected a request that is over"
    assert outcome is not None, "expected a request that is over"
    line = LogLine(
        time=datetime.fromtimestamp(epoch_s + end, UTC).isoformat(timespec="milliseconds"),
        request=_whole(ended.label),
        tenant=None if ended.tenant is None else _whole(ended.tenant),
        model=_whole(request.model),
        path=_whole(ended.path),
        instance=lease.instance if lease else None,
        outcome=outcome.value,
        phase=str(ended.ended_in),
        status=ended.status,
        prompt_tokens=ended.prompt_tokens_used or request.prompt_tokens,
        output_tokens=lease.output_tokens if lease else 0,
        predicted_output=round(lease.predicted_output, 1) if lease else 0.0,
        queue_s=round((end if ended.dispatched_at is None else ended.dispatched_at) - arrived, 6),
        ttft_s=None if first is None else round(first - arrived, 6),
        total_s=round(end - arrived, 6),
        retries=ended.retries,
    )
    return msgspec.json.encode(line).decode() + "\n"


#: How a line of the request log is written, by the value of `proxy.request_log_format`.
FORMATS: dict[str, Callable[[RequestRecord, float], str]] = {"keyvalue": keyvalue_line, "json": json_line}


def _whole(text: str) -> str:
    """Text without what is no character and no line end in anybody's eyes, so that it can be encoded."""
    return _LINE_ENDS.sub("\ufffd", text)
