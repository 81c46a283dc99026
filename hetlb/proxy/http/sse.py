"""Watching a stream of server-sent events as it passes: its first token, its tokens, its usage, its end.

Any split of the same bytes gives the same facts and the same output. With `hold_usage`, the usage-only event
that hetlb itself asked for is taken out. Of an event that is not whole at most `MAX_HELD_BYTES` wait for its
end.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from mypy_extensions import i64, mypyc_attr

from hetlb.proxy.http.http1 import CHUNK_LINES
from hetlb.proxy.http.openai_fields import EventFields

MAX_HELD_BYTES: Final = 64 << 10

_END: Final = b"\n\n"


_decoder = msgspec.json.Decoder(EventFields)


class SseWatcher:
    """Facts about one stream. `feed` returns what may be passed on."""

    __slots__ = (
        "_each", "_hold", "_long", "_max_held", "_passing", "_tail", "cached_tokens", "completion_tokens",
        "done", "events", "failed", "prompt_tokens", "refused",
    )  # fmt: skip

    def __init__(self, hold_usage: bool) -> None:
        self._hold = hold_usage
        #: True if every event is looked at; the longest event that is held until it is whole.
        self._each = False
        self._max_held = MAX_HELD_BYTES
        self._tail = bytearray()  # the unfinished event at the end of what was fed
        self._passing = 0  # how much of the tail was passed on already
        self._long = False  # the tail is what was kept of an event too long to be read
        #: Events that carry content: about one per token.
        self.events = 0
        self.done = False
        self.failed = False
        #: True if the error was the request's: its code is 4xx.
        self.refused = False
        self.completion_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None

    @property
    def between(self) -> bool:
        """True if what was fed ended with an event: the next byte begins one."""
        return not self._tail

    def feed(self, data: bytes) -> bytes:
        """Look at the next bytes of the stream; returns those to pass on (maybe with some held before)."""
        tail = self._tail
        whole_events = data.endswith(_END) and not data.endswith(b"\n" + _END)
        if not tail and whole_events and len(data) <= MAX_HELD_BYTES and not self._each:
            # The usual read: whole events. One look decides whether any of them is special.
            if b'"usage":{' not in data and b"[DONE]" not in data and b"error" not in data:
                # A line feed inside text is escaped, so `data: ` begins a line only where an event has data.
                self.events += data.count(b"\ndata: ") + data.startswith(b"data: ")
                return data
            return self._events(data.split(_END)[:-1])
        if tail:
            # An event may end at a line end that lies across two reads: nothing before that is new.
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

    @property
    def part_is_out(self) -> bool:
        """True if a part of an event that is not whole was passed on."""
        return self._passing > 0

    def flush(self) -> bytes:
        """The stream is over: what was held of an unfinished event."""
        rest = bytes(self._tail[self._passing :])
        self._tail.clear()
        self._passing = 0
        return rest

    def cut(self) -> bytes:
        """The stream broke off: what ends the event of which a part is out; what was held is dropped."""
        part_is_out = self.part_is_out
        self._tail.clear()
        self._passing = 0
        return b"\n\n" if part_is_out else b""

    def _keep(self) -> bytes:
        """Pass on of an unfinished event what cannot be held for good."""
        tail = self._tail
        if len(tail) <= self._max_held and not self._passing:
            return b""
        out = bytes(tail[self._passing :])
        if len(tail) > self._max_held + 1:
            # Too long to be any event we must read: keep enough to see its end. (One more than an event
            # may have, since the first line feed of its end may be there already.)
            if not self._long:
                self._long = True
                self.events += tail.startswith(b"data: ")
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
                self.events += event.startswith(b"data: ")
                self._passed_in_parts()
            elif self._read(event) and self._hold and not passed:
                continue
            elif event and not passed:
                event = self._pass_on(event)
                if not event:
                    continue
            # The first line feed of the event's end may be out already too.
            kept.append((event + _END)[passed:])
            passed = 0
        return b"".join(kept)

    def _pass_on(self, event: bytes) -> bytes:
        """Choose what goes on of an event that was read, b"" for nothing."""
        return event

    def _passed_in_parts(self) -> None:
        """An event was too long to be read."""

    def _read(self, event: bytes) -> bool:
        """Take the facts out of one event; True if it is nothing but usage."""
        if event.startswith(b"data: "):
            start = 0
        else:
            start = event.find(b"\ndata: ") + 1
            if not start:
                return False
        payload = event[start + 6 :]
        if payload.startswith(b"[DONE]"):
            self.done = True
            return False
        if b'"usage":{' not in payload and b'"error"' not in payload:
            self.events += 1 + payload.count(b"\ndata: ")
            return False
        try:
            decoded = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.events += 1
            return False
        if bytes(decoded.error) not in (b"", b"null"):
            self.failed = True
            self.refused = _is_refusal(bytes(decoded.error))
            return False
        usage = decoded.usage or (decoded.response.usage if decoded.response else None)
        if usage is not None:
            self.completion_tokens = _first(
                usage.completion_tokens, usage.output_tokens, self.completion_tokens
            )
            self.prompt_tokens = _first(usage.prompt_tokens, usage.input_tokens, self.prompt_tokens)
            details = usage.prompt_tokens_details or usage.input_tokens_details
            if details is not None:
                self.cached_tokens = _first(details.cached_tokens, self.cached_tokens)
        only_usage = usage is not None and not start and bytes(decoded.choices) == b"[]"
        if not only_usage:
            self.events += 1
        return only_usage


#: Maximum bytes of an event before its choices: an id, a name of a model.
_MAX_BEGINNING: Final = 1024
_GOES_ON: Final = b'"finish_reason":null'
_TOKEN_IDS: Final = b'"token_ids":['
#: Maximum bytes of an event that passes by its shape.
_MOST: Final = 4095


@mypyc_attr(acyclic=True)
class TextShape:
    """Shape of the events of text of one stream: all but their text and token ids.

    `beginning` ends with the first choice; `ending` says that it goes on, and ends with the event, its chunk
    included, or where token ids begin; behind them comes `after_ids`, b"" where there are none. `instead` is
    what takes the place of `ending`, the ids and `after_ids`, b"" where they go on.
    """

    __slots__ = ("after_ids", "beginning", "ending", "instead")

    def __init__(self, beginning: bytes, ending: bytes, after_ids: bytes, instead: bytes) -> None:
        self.beginning = beginning
        self.ending = ending
        self.after_ids = after_ids
        self.instead = instead


def text_shape(data: bytes, *, hide_ids: bool = False) -> TextShape | None:
    """Shape of the last event in `data`, None if it is none of text that goes on.

    `hide_ids`: its token ids are taken out of what passes; None if it has none.
    """
    start = data.rfind(b"data: {") if data.endswith(_END) else -1
    at = data.find(b'"choices":[{', start, start + _MAX_BEGINNING) if start >= 0 else -1
    if at < 0 or b"\n" in data[start:at] or b'"usage"' in data[start:at] or b'"error"' in data[start:at]:
        return None
    goes_on = data.rfind(_GOES_ON, at)
    if goes_on < 0 or data.find(b'"usage":{', goes_on) >= 0 or data.find(b"\n", goes_on) != len(data) - 2:
        return None
    ending, after_ids = data[goes_on:] + b"\r\n", b""
    ids = ending.find(_TOKEN_IDS)
    if ids >= 0:
        close = ending.find(b"]", ids)
        ending, after_ids = ending[: ids + len(_TOKEN_IDS)], ending[close:]
    elif hide_ids:
        return None
    instead = ending[:-1] + b"null" + after_ids[1:] if hide_ids else b""
    return TextShape(data[start : at + 12], ending, after_ids, instead)


# Compiled, three slices cost as much as a call of `bytes.find` with a start.
def pass_events(chunks: bytes, shape: TextShape) -> tuple[int, bytes]:
    """(number of events, what goes on of them) of `chunks`, if each is whole and one event of text.

    Each begins as the others of its stream did, so it is no error, no usage alone, nor the end; and ends as
    they did. (0, b"") means that it takes a closer look.
    """
    beginning, ending, after_ids, instead = shape.beginning, shape.ending, shape.after_ids, shape.instead
    width: i64 = len(beginning)
    tail: i64 = len(ending)
    behind: i64 = len(after_ids)
    length: i64 = len(chunks)
    position: i64 = 0
    size: i64
    digit: i64
    events, passed = 0, chunks
    before: list[bytes] | None = None  # made for a second event
    while position < length:
        start, size = position, 0
        while start < length and size < _MOST:
            digit = chunks[start]
            if 48 <= digit <= 57:
                digit -= 48
            elif 97 <= digit <= 102:
                digit -= 87
            else:
                break
            size = 16 * size + digit
            start += 1
            if size == 0:
                break
        start += 2
        if size == 0 or size > _MOST or start > length or chunks[start - 2] != 13 or chunks[start - 1] != 10:
            return 0, b""
        position = start + size + 2
        begun = start + width
        if position > length or chunks[start:begun] != beginning:
            return 0, b""
        end = position - behind
        if behind:
            if end < begun or chunks[end:position] != after_ids:
                return 0, b""
            while end > begun:
                digit = chunks[end - 1]
                if digit != 44 and (digit < 48 or digit > 57):
                    break
                end -= 1
        said = end - tail
        if said < begun or chunks[said:end] != ending:
            return 0, b""
        text = chunks[start:said]  # with its beginning, which has no line feed
        if 10 in text:
            return 0, b""
        if instead:
            if events:
                before = before or []
                before.append(passed)
            passed = CHUNK_LINES[len(text) + len(instead) - 2] + text + instead
        events += 1
    return events, passed if before is None else b"".join(before) + passed


_REFUSAL = re.compile(rb'"code":\s?"?4[0-9][0-9]"?[,}\s]')


def _is_refusal(error: bytes) -> bool:
    """True if the error of an event says that the request was wrong: vLLM's `code` is an HTTP status."""
    return _REFUSAL.search(error, 0, 4096) is not None


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


#: Bytes of the end of a plain body that are kept: `usage` stands near it.
TAIL_BYTES: Final = 16 << 10
_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s?([0-9]{1,10})[,}\s]')
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s?([0-9]{1,10})[,}\s]')
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens":\s?([0-9]{1,10})[,}\s]')


#: As vLLM and OpenAI write it, without details.
_USUAL_USAGE = re.compile(
    rb'"usage":\{"prompt_tokens":([0-9]{1,10})(?:,"total_tokens":[0-9]{1,10})?'
    rb',"completion_tokens":([0-9]{1,10})(?:,"prompt_tokens_details":null|\})'
)


def usage_in_tail(tail: bytes) -> tuple[int | None, int | None, int | None]:
    """(completion tokens, prompt tokens, cached prompt tokens) of a plain JSON answer, from its last bytes.

    Inside a JSON string the quotes of `"usage":` would be escaped, so generated text cannot forge it.
    """
    at = tail.rfind(b'"usage":')
    if at < 0:
        return None, None, None
    if (usual := _USUAL_USAGE.match(tail, at)) is not None:
        return int(usual[2]), int(usual[1]), None
    if tail[at + 8 : at + 10].lstrip()[:1] != b"{":
        return None, None, None
    completion, prompt = _COMPLETION_TOKENS.search(tail, at), _PROMPT_TOKENS.search(tail, at)
    cached = _CACHED_TOKENS.search(tail, at)
    return (
        None if completion is None else int(completion[1]),
        None if prompt is None else int(prompt[1]),
        None if cached is None else int(cached[1]),
    )
