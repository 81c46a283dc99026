"""Reader of a stream of server-sent events as it passes: its first token, its tokens, its usage, its end.

A stream is parsed as in WHATWG HTML, 9.2.6, its JSON by its meaning. The spelling of vLLM has a fast path.
Any split of the same bytes gives the same facts and output. The client gets lines ended by LF and no byte
order mark. At most `MAX_HELD_BYTES` of an unfinished event are held. Unknown content passes unread.
"""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

from hetlb.balancer.http.answer_form import SAMPLE_BYTES
from hetlb.balancer.http.openai_fields import (
    AnswerFields,
    ErrorFields,
    EventFields,
    FinishedFields,
    Holder,
    Usage,
)
from hetlb.errors import NOT_JSON

MAX_HELD_BYTES: Final = 64 << 10

_END: Final = b"\n\n"
#: First bytes of lines that keep connections open: of a comment, of an empty line.
_COMMENT: Final = (b":", b"\n")
_BOM: Final = b"\xef\xbb\xbf"
#: JSON without a value, and lists without a choice.
_NO_VALUE: Final = (b"", b"null")
_NO_CHOICES: Final = (b"", b"null", b"[]")
_NO_ERROR: Final = (*_NO_VALUE, b'""', b"false", b"{}", b"[]")
#: Fields that hold a plain answer, of OpenAI, Anthropic and Cohere; first bytes of a list and an object.
_ANSWERS: Final = ("choices", "output", "content", "message", "data", "results")
_NESTED: Final = (b"[", b"{")
#: Fields without meaning in an event without a choice.
_NAMES: Final = ("id", "object", "created", "model", "choices", "usage")
_FIELD_BEGINS: Final = re.compile(rb"(?:\A|[\r\n])[^:\r\n]")
_FINISH_REASON: Final = b'"finish_reason"'
#: Number of events kept as a sample of a stream's beginning.
_SAMPLED_EVENTS: Final = 4
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"([a-z_]{0,32})')

#: Types of errors of a request's own fault, of the APIs of OpenAI and Anthropic.
_REFUSALS: Final = re.compile(
    r"invalid_|rate_limit_|not_found|authentication|permission|billing|insufficient_quota"
    r"|request_too_large|context_length_exceeded|content_policy_violation"
)
_NO_HOLDER: Final = Holder()
_NONE: Final = msgspec.Raw(b"")

_decoder = msgspec.json.Decoder(EventFields)
_answer_decoder = msgspec.json.Decoder(AnswerFields)
_usage_decoder = msgspec.json.Decoder(Usage, strict=False)
_holder_decoder = msgspec.json.Decoder(Holder)
_error_decoder = msgspec.json.Decoder(ErrorFields, strict=False)
_choices_decoder = msgspec.json.Decoder(FinishedFields)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def data_of(event: bytes) -> bytes:
    """Return the data of an event, b"" if the standard dispatches none. Its lines end in LF."""
    if event[:6] == b"data: " and event.find(b"\n") < 0:
        return event[6:]
    values: list[bytes] = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            values.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif line == b"data":
            values.append(b"")
    return b"\n".join(values)


def _with_data(event: bytes, data: bytes) -> bytes:
    """Return the same event with other data, behind its other lines."""
    lines = [line for line in event.split(b"\n") if line[:5] != b"data:" and line != b"data"]
    return b"\n".join([*lines, *(b"data: " + line for line in data.split(b"\n"))])


class SseWatcher:
    """Facts about one stream. `feed` returns the bytes to pass on.

    `hold_usage`: remove usage from the stream, since hetlb asked for it and the client did not. Other fields
    of the usage event, as vLLM's `system_fingerprint`, move to the event that ends a choice: vLLM sends them
    there without usage. So that event waits for the next one.
    """

    __slots__ = (
        "_after_cr", "_begun", "_each", "_ending", "_first", "_hold", "_long", "_max_held", "_odd",
        "_passing", "_tail", "cached_tokens", "completion_tokens", "done", "events", "failed",
        "finish", "prompt_tokens", "refused", "sample", "understood", "unread",
    )  # fmt: skip

    def __init__(self, hold_usage: bool) -> None:
        self._hold = hold_usage
        #: True if every event is read, without the fast path; then the maximum bytes of a held event.
        self._each = False
        self._max_held = MAX_HELD_BYTES
        self._begun = False
        self._first = b""  # possible beginning of a byte order mark
        self._after_cr = False  # the last byte was CR: a line feed behind it ends no line of its own
        self._tail = bytearray()  # the unfinished event at the end of the input
        self._passing = 0  # bytes of the tail passed on already
        self._long = False  # the tail is the kept end of an event too long to be read
        self._odd = False  # bytes came that are neither a readable event nor a comment
        #: Event that ends a choice and waits for the next one, b"" for none.
        self._ending = b""
        #: Events that carry content: about one per token.
        self.events = 0
        self.done = False
        self.failed = False
        #: True if the error was the request's: its code is 4xx.
        self.refused = False
        #: True if an event had a JSON object or was the end: the stream is one that its kind should be.
        self.understood = False
        #: True if an event was too long to be read: what it says is not known.
        self.unread = False
        #: The finish reason that came last, and the beginning of the stream.
        self.finish = self.sample = b""
        self.completion_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None

    @property
    def between(self) -> bool:
        """True if the input ended with an event: the next byte begins one."""
        return not self._tail and not self._ending

    def feed(self, data: bytes) -> bytes:
        """Look at the next bytes of the stream; return the bytes to pass on (maybe with some held before)."""
        if not self._begun or self._after_cr or data.find(b"\r") >= 0:
            data = self._lines(data)
        return self._take(data)

    def _lines(self, data: bytes) -> bytes:
        """Return the same lines, each ending in LF, without a byte order mark before the first."""
        if not self._begun:
            data = self._first + data
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._first = data
                return b""
            self._begun, self._first = True, b""
            if data.startswith(_BOM):
                data = data[len(_BOM) :]
        if self._after_cr and data:
            self._after_cr = False
            if data.startswith(b"\n"):
                data = data[1:]
        if data.find(b"\r") >= 0:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data

    def _take(self, data: bytes) -> bytes:
        """Look at lines that end in LF."""
        tail = self._tail
        whole_events = data.endswith(_END) and not data.endswith(b"\n" + _END)
        if not tail and whole_events and len(data) <= MAX_HELD_BYTES and not self._each:
            # The usual read: whole events. One look decides whether any of them is special.
            if not self._ending and (count := self._usual(data)):
                if self.events <= _SAMPLED_EVENTS:
                    self._take_sample(data)
                self.events += count
                self.understood = True
                return data
            return self._events(data.split(_END)[:-1])
        if tail:
            # The end of an event may be split between two reads. Earlier bytes were searched already.
            start = len(tail) - 1
            tail += data
            if tail.find(_END, start) < 0:
                return self._keep()
            data = bytes(tail)
        *events, rest = data.split(_END)
        passed = self._passing if tail else 0
        self._tail, self._passing = bytearray(rest), 0
        out = self._events(events, passed) if events else b""
        return out + self._keep() if rest else out

    def _usual(self, data: bytes) -> int:
        """Return the number of whole events, 0 if one of them must be parsed.

        Counted events are spelt as vLLM spells them; none is usage, an error or the end. A line feed inside
        text is escaped, so `data: ` at the beginning of a line is always an event's data.
        """
        if (
            data.find(b'"usage"') >= 0 or data.find(b"[DONE]") >= 0 or data.find(b"error") >= 0
            or data.find(b"\\u00") >= 0
            or (data.find(_FINISH_REASON) >= 0 and _FINISHED.search(data) is not None)
        ):  # fmt: skip
            return 0
        if data.startswith(b"data: {"):
            events = data.count(b"\n\ndata: {") + 1
            return events if data.count(b"\n") == 2 * events else 0
        if data.startswith(b"event: "):
            events = data.count(b"\n\nevent: ") + 1
            exact = data.count(b"\n") == 3 * events and data.count(b"}\n\n") == events
            return events if exact and data.count(b"\ndata: {") == events else 0
        return 0

    @property
    def whole(self) -> bool:
        """True if it ended as streams of tokens do, or is a stream of an unknown kind."""
        return self.done or self.failed or ((self.events > 0 or self._odd) and not self.understood)

    @property
    def says_tokens(self) -> bool:
        """True if an event had a JSON object that carries content."""
        return self.understood and self.events > 0

    @property
    def part_is_out(self) -> bool:
        """True if a part of an unfinished event was passed on."""
        return self._passing > 0

    def flush(self) -> bytes:
        """Return all that was held at the stream's end, an unfinished event too: some clients read it."""
        tail, passed = bytes(self._first or self._tail), self._passing
        self._tail.clear()
        self._passing, self._first = 0, b""
        if passed or self._long or not tail:
            return self.release() + tail[passed:]
        out = self._events([tail])
        # No more than came: it had no end, or a part of one.
        return (out[: -len(_END)] if out.endswith(_END) else out) + self.release()

    def release(self) -> bytes:
        """Return the held end of an event, which was kept until more came; b"" for none."""
        ending, self._ending = self._ending, b""
        return ending and ending + _END

    def cut(self) -> bytes:
        """Drop held bytes of a stream that broke off; return the end of a begun event."""
        part_is_out = self.part_is_out
        self._tail.clear()
        self._passing = 0
        return self.release() + (_END if part_is_out else b"")

    def _keep(self) -> bytes:
        """Pass on the bytes of an unfinished event that cannot be held for good."""
        tail = self._tail
        comments = b""
        if not self._passing and not self._long and bytes(tail[:1]) in _COMMENT:
            # They keep connections open, and are never held.
            end = _comments_end(tail)
            comments = bytes(tail[:end])
            del tail[:end]
        if len(tail) <= self._max_held and not self._passing:
            return comments
        self._odd = True
        # Too long to wait. The held end of a choice belongs before it.
        out = comments + self.release() + bytes(tail[self._passing :])
        if len(tail) > self._max_held + 1:
            # Too long to be any event we must read: keep enough to see its end. (One more than an event
            # may have, since the first line feed of its end may be there already.)
            if not self._long:
                self._long = self.unread = True
                self.events += tail.startswith(b"data:")
            del tail[:-1]
        self._passing = len(tail)
        return out

    def _events(self, events: list[bytes], passed: int = 0) -> bytes:
        """Read complete events; `passed` bytes of the first are out already."""
        kept: list[bytes] = []
        for event in events:
            if self._long:
                self._long = False  # counted when it grew too long
                self._passed_in_parts()
            elif len(event) > self._max_held:
                self.unread = True
                self.events += event.startswith(b"data:")
                self._passed_in_parts()
            elif not passed:
                if event[:1] in _COMMENT:
                    end = _comments_end(event)
                    kept.append(event[:end])
                    event = event[end:]
                if event and event[:1] != b":":
                    self._read_and_pass(event, kept)
                else:
                    kept.append(event + _END)
                continue
            else:
                self._read(event, data_of(event))
            kept.append(self.release())
            # The first line feed of the event's end may be out already too.
            kept.append((event + _END)[passed:])
            passed = 0
        return b"".join(kept)

    def _read_and_pass(self, event: bytes, kept: list[bytes]) -> None:
        """Read one whole event and add its passed bytes to `kept`."""
        data = data_of(event)
        if not data:
            self._odd = True
            kept.append(event + _END)  # it dispatches nothing
            return
        ending = self._ending
        read = self._read(event, data)
        if self._ending is not ending:
            kept.append(self.release())  # all of it is there: no later event adds to it
            return
        if read:
            event = self._pass_on(read, data if read is event else data_of(read))
        if not read or not event:
            return
        if self._ending:
            kept.append(self.release())
        if self._hold and _finishes(data):
            self._ending = event
        else:
            kept.append(event + _END)

    def _pass_on(self, event: bytes, data: bytes) -> bytes:
        """Return the passed bytes of an event that was read, b"" for none."""
        return event

    def _passed_in_parts(self) -> None:
        """Note that an event was too long to be read."""

    def _read(self, event: bytes, data: bytes) -> bytes:
        """Take the facts out of one event with this data. Return the event without held usage."""
        if self.events <= _SAMPLED_EVENTS:
            self._take_sample(data)
        if data.find(_FINISH_REASON) >= 0 and (found := _FINISHED.search(data)) is not None:
            self.finish = found[1]
        begun = data if data[:1] == b"{" else data.lstrip(b" \t\n")
        if begun[:6] == b"[DONE]":
            self.done = self.understood = True
            return event
        if begun[:1] == b"{":
            self.understood = True
            if data.find(b'"usage"') >= 0 or data.find(b'"error"') >= 0 or data.find(b"\\u00") >= 0:
                return self._read_fields(event, data)
        self.events += 1
        return event

    def _take_sample(self, data: bytes) -> None:
        if len(self.sample) < SAMPLE_BYTES:
            self.sample += data[: SAMPLE_BYTES // 2]

    def _read_fields(self, event: bytes, data: bytes) -> bytes:
        """Read usage or an error in an event. Return the bytes for the client, without held usage."""
        try:
            fields = _decoder.decode(data)
        except NOT_JSON:
            self.events += 1
            return event
        if (error := _error_of(fields, data)) not in _NO_ERROR:
            self.failed = True
            self.refused = _is_refusal(error)
            self._take_usage(_inner(bytes(fields.response)).usage)
            return event
        if bytes(fields.usage) in _NO_VALUE:
            for holder in (fields.response, fields.message):
                self._take_usage(_inner(bytes(holder)).usage)
            self.events += 1
            return event
        self._take_usage(fields.usage)
        only_usage = bytes(fields.choices).translate(None, b" \t\n") in _NO_CHOICES
        if not only_usage:
            self.events += 1
        return self._without_usage(event, data, only_usage) if self._hold else event

    def _take_usage(self, own: msgspec.Raw) -> None:
        """Take the counts out of usage as it came; what is no count is none."""
        raw = bytes(own)
        if raw in _NO_VALUE:
            return
        try:
            usage = _usage_decoder.decode(raw)
        except NOT_JSON:
            return
        self.completion_tokens = _first(usage.completion_tokens, usage.output_tokens, self.completion_tokens)
        self.prompt_tokens = _first(usage.prompt_tokens, usage.input_tokens, self.prompt_tokens)
        cached = _CACHED_TOKENS.search(bytes(usage.prompt_tokens_details or usage.input_tokens_details))
        if cached is not None:
            self.cached_tokens = int(cached[1])

    def _without_usage(self, event: bytes, data: bytes, only_usage: bool) -> bytes:
        """Return an event without its usage, b"" if nothing is left of it to pass on.

        Names outside UTF-8 cannot be written again. Such an event passes unchanged.
        """
        try:
            fields = _object.decode(data)
        except NOT_JSON:
            return event
        del fields["usage"]
        if not only_usage:
            return _with_data(event, msgspec.json.encode(fields))
        rest = {
            name: value for name, value in fields.items()
            if name not in _NAMES and bytes(value) != b"null"
        }  # fmt: skip
        if not rest:
            return b""
        if self._ending:
            data = data_of(self._ending)
            end = data.rfind(b"}")
            more = msgspec.json.encode(rest)[1:]
            self._ending = _with_data(self._ending, data[:end] + b"," + more)
            return b""
        return _with_data(event, msgspec.json.encode(fields))


def _comments_end(lines: bytes | bytearray) -> int:
    """Return the end of the whole comments and empty lines at the beginning of `lines`."""
    end = 0
    while lines.startswith((b":", b"\n"), end):
        line_end = lines.find(b"\n", end)
        if line_end < 0:
            break
        end = line_end + 1
    return end


def is_comment(lines: bytes) -> bool:
    """Return True if these are whole comments and empty lines alone."""
    return lines[-1:] in (b"\r", b"\n") and _FIELD_BEGINS.search(lines) is None


def _finishes(data: bytes) -> bool:
    """Return True if an event ends a choice."""
    if data.find(b"\\u00") < 0:
        return data.find(_FINISH_REASON) >= 0 and _FINISHED.search(data) is not None
    try:
        return any(each.finish_reason for each in _choices_decoder.decode(data).choices or ())
    except NOT_JSON:
        return False


def _inner(raw: bytes) -> Holder:
    """Return the fields of an object of an event (a response, a message), none if it is no object."""
    try:
        return _holder_decoder.decode(raw) if raw.startswith(b"{") else _NO_HOLDER
    except NOT_JSON:
        return _NO_HOLDER


def _error_of(fields: EventFields, data: bytes) -> bytes:
    """Return the error of an event (of vLLM before 0.10 and of Responses the event itself), b"" for none."""
    kind, error = bytes(fields.type), bytes(fields.error)
    if error in _NO_ERROR and (kind == b'"error"' or bytes(fields.object) == b'"error"'):
        return data
    if kind == b'"response.failed"':
        inner = bytes(_inner(bytes(fields.response)).error)
        return data if inner in _NO_VALUE else inner
    return error


def _is_refusal(error: bytes) -> bool:
    """Return True if an error is the fault of the request: by its status (vLLM's `code`), or by its name."""
    try:
        fields = _error_decoder.decode(error)
    except NOT_JSON:
        return False
    code = fields.code
    if isinstance(code, str):
        if _REFUSALS.match(code) is not None:
            return True
        code = int(code) if code.isdigit() and len(code) == 3 else None
    if code is None:
        return fields.type is not None and _REFUSALS.match(fields.type) is not None
    return 400 <= code < 500


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


#: Bytes kept of the end of a plain body, with `usage` among them.
TAIL_BYTES: Final = 16 << 10
_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s?([0-9]{1,10})[,}\s]')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*"?([0-9]{1,10})[",.}\s]')
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens":\s?([0-9]{1,10})[,}\s]')


def usage_in_tail(tail: bytes) -> tuple[int | None, int | None, int | None]:
    """Return (completion tokens, prompt tokens, cached prompt tokens) of a plain JSON answer, from its end.

    Inside a JSON string the quotes of `"usage":` would be escaped, so generated text cannot forge it.
    """
    at = tail.rfind(b'"usage":')
    if at < 0:
        return None, None, None
    if tail[at + 8 : at + 10].lstrip()[:1] != b"{":
        return None, None, None
    completion, prompt = _COMPLETION_TOKENS.search(tail, at), _PROMPT_TOKENS.search(tail, at)
    cached = _CACHED_TOKENS.search(tail, at)
    return (
        None if completion is None else int(completion[1]),
        None if prompt is None else int(prompt[1]),
        None if cached is None else int(cached[1]),
    )


def read_answer(body: bytes) -> AnswerFields | None:
    """Return the fields of a whole answer with a choice and its usual usage, None if it has another form."""
    try:
        fields = _answer_decoder.decode(body)
    except NOT_JSON:
        return None
    usage = fields.usage
    detailed = usage.cached_tokens is not None or usage.input_tokens_details
    if detailed or bytes(usage.prompt_tokens_details) not in _NO_VALUE:
        return None
    return fields if fields.choices and not fields.error else None


def _lax_has_choices(body: bytes) -> bool:
    """Return True if a lax reader finds choices in a body that a strict one refuses."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and bool(document.get("choices"))


def is_answer(tail: bytes) -> bool:
    """Return True if a plain body that ends in `tail` answers a request for tokens, in the form of any API.

    If the body is longer than `tail`, its last byte alone decides. Half an emoji and `NaN` are no faults.
    """
    if len(tail) >= TAIL_BYTES:
        return tail.rstrip()[-1:] == b"}"
    try:
        fields = _object.decode(tail)
    except NOT_JSON:
        return _lax_has_choices(tail)
    failed = bytes(fields.get("error", _NONE)) not in _NO_ERROR
    return not failed and any(bytes(fields.get(name, _NONE))[:1] in _NESTED for name in _ANSWERS)
