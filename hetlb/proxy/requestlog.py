"""The request log: one line, in every format, for a request that is over, whatever its client called it."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Protocol

import msgspec

from hetlb.core.types import Lease, Outcome, Request
from hetlb.proxy.fields import LogLine

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


class Ended(Protocol):
    """What is told of a request that is over. Times in seconds on one clock; `ended_in` names its phase."""

    @property
    def label(self) -> str: ...
    @property
    def tenant(self) -> str | None: ...
    @property
    def path(self) -> str: ...
    @property
    def request(self) -> Request: ...
    @property
    def lease(self) -> Lease | None: ...
    @property
    def outcome(self) -> Outcome | None: ...
    @property
    def ended_in(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def retries(self) -> int: ...
    @property
    def prompt_tokens_used(self) -> int | None: ...
    @property
    def arrived_at(self) -> float: ...
    @property
    def dispatched_at(self) -> float | None: ...
    @property
    def first_byte_at(self) -> float | None: ...
    @property
    def ended_at(self) -> float | None: ...


_KEYVALUE = (
    "request=%s tenant=%s model=%s path=%s instance=%s outcome=%s phase=%s status=%d prompt_tokens=%d "
    "output_tokens=%d predicted_output=%.0f queue_s=%.4f ttft_s=%s total_s=%.4f retries=%d\n"
)


def keyvalue_line(ended: Ended, _: float = 0.0) -> str:
    """`key=value` words, with a newline. What stands for text of a client has no blank in it."""
    lease, outcome, request = ended.lease, ended.outcome, ended.request
    arrived, first, end = ended.arrived_at, ended.first_byte_at, ended.ended_at
    assert end is not None, "expected a request that is over"
    assert outcome is not None, "expected a request that is over"
    # Compiled, one formatting of everything costs half of what as many f-strings do.
    return _KEYVALUE % (
        escape(ended.label),
        "-" if not ended.tenant else _word(ended.tenant),
        _word(request.model),
        _word(ended.path),
        "-" if lease is None else lease.instance,
        outcome.value,
        ended.ended_in,
        ended.status,
        ended.prompt_tokens_used or request.prompt_tokens,
        0 if lease is None else lease.output_tokens,
        0.0 if lease is None else lease.predicted_output,
        (end if ended.dispatched_at is None else ended.dispatched_at) - arrived,
        "-" if first is None else "%.4f" % (first - arrived),
        end - arrived,
        ended.retries,
    )


def json_line(ended: Ended, epoch_s: float) -> str:
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
FORMATS: dict[str, Callable[[Ended, float], str]] = {"keyvalue": keyvalue_line, "json": json_line}


def _whole(text: str) -> str:
    """Text without what is no character and no line end in anybody's eyes, so that it can be encoded."""
    return _LINE_ENDS.sub("\ufffd", text)
