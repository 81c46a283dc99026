"""Shape of the events of text of one stream: parts that are the same in all of them pass unread."""

from __future__ import annotations

import re
from typing import Final

from mypy_extensions import i64, mypyc_attr

from hetlb.balancer.http.http1 import CHUNK_LINES

#: Maximum bytes of an event before its choices: an id, a name of a model.
_MAX_BEGINNING_BYTES: Final = 1024
_CHOICES = re.compile(rb'"choices":\s?\[\s?\{')
_GOES_ON = re.compile(rb'"finish_reason":\s?null')
#: The text of a choice, and of a message.
_TEXT = re.compile(rb'"(?:content|text)":\s?"')
_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+')
_USAGE = re.compile(rb'"usage":(?!\s?null)')
#: Line ends of an event and behind it, in each of the three spellings.
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_NAMED = re.compile(rb"(?:(?:event|id|retry):[^\r\n]*+(?:\r\n|\n|\r))*")
#: Maximum bytes of an event that passes by its shape.
_MAX_EVENT_BYTES: Final = 4095


@mypyc_attr(acyclic=True)
class TextShape:
    """Shape of the events of text of one stream: all but their text and token ids.

    Example: `data: {..."choices":[{` + text + `"finish_reason":null,"token_ids":[` + ids + `]}]}` is
    `beginning`, text, `ending`, ids, `after_ids`. Without ids `ending` reaches to the end of the event and
    of its chunk, and `after_ids` is b"". `quoted`: the finish reason precedes the text, so the middle is the
    text alone. `instead` replaces `ending`, ids and `after_ids` for the client, b"" if they pass unchanged.
    """

    __slots__ = ("after_ids", "beginning", "ending", "in_lf", "instead", "quoted")

    def __init__(
        self, beginning: bytes, ending: bytes, after_ids: bytes, instead: bytes, *, quoted: bool = False
    ) -> None:
        self.beginning = beginning
        #: The same with lines that end in LF.
        self.in_lf = beginning.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self.ending = ending
        self.after_ids = after_ids
        self.instead = instead
        self.quoted = quoted


def text_shape(data: bytes, *, hide_ids: bool = False) -> TextShape | None:
    """Return the shape of the last event in `data`, as it came; None if it is no text or ends a choice.

    `hide_ids`: take its token ids out for the client; None if it has none. Lines end in LF for the client.
    """
    before, line, end = _last_event(data)
    found = _CHOICES.search(line, 0, _MAX_BEGINNING_BYTES)
    if found is None or line.find(b"\\", 0, found.start()) >= 0 or line.find(b'"error"') >= 0:
        return None
    if _USAGE.search(line) is not None:
        return None
    begun = found.end()
    goes_on = list(_GOES_ON.finditer(line, begun))
    if not goes_on:
        return None
    quoted = False
    ends_at = goes_on[-1].start()
    text = _TEXT.search(line, goes_on[-1].end())
    if text is not None:
        # The finish reason comes first, then the text.
        string = _STRING.match(line, text.end())
        assert string is not None
        quoted, begun, ends_at = True, text.end(), string.end()
    ending, after_ids = line[ends_at:] + end + b"\r\n", b""
    written = line[ends_at:] + b"\n\n\r\n"
    ids = ending.find(b'"token_ids":') + 12
    if ids > 11 and ending[ids : ids + 2].lstrip()[:1] == b"[":
        ids = ending.find(b"[", ids) + 1
        close = ending.find(b"]", ids)
        ending, after_ids = ending[:ids], ending[close:]
        if hide_ids:
            written = written[: ids - 1] + b"null" + written[close + 1 :]
        elif end == b"\n\n":
            written = b""
        else:
            return None  # `instead` is constant and cannot hold them
    elif hide_ids:
        return None
    elif end == b"\n\n":
        written = b""
    return TextShape(before + line[:begun], ending, after_ids, written, quoted=quoted)


def _last_event(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the last of several whole events in three parts.

    The parts are the lines before its data, the line of its data, and its line ends. Each is b"" if the event
    has more than one line of data.
    """
    line_end = len(data.rstrip(b"\r\n"))
    end = data[line_end:]
    if end not in _ENDS:
        return b"", b"", b""
    start = max(data.rfind(b"\n", 0, line_end), data.rfind(b"\r", 0, line_end)) + 1
    event = max([0, *(at + len(each) for each in _ENDS if (at := data.rfind(each, 0, start)) >= 0)])
    before, line = data[event:start], data[start:line_end]
    # Behind data that ends in LF alone, lines in front of it that do not would go on as they are.
    named = _NAMED.fullmatch(before) is not None and (end != b"\n\n" or b"\r" not in before)
    return (before, line, end) if named and line.startswith(b"data:") else (b"", b"", b"")


def _ids_begin(chunks: bytes, begun: i64, end: i64) -> i64:
    """Return the start of the list of token ids (digits, commas and spaces) that ends at `end`."""
    while end > begun:
        byte: i64 = chunks[end - 1]
        if byte != 44 and byte != 32 and (byte < 48 or byte > 57):
            break
        end -= 1
    return end


# Compiled, three slices cost as much as a call of `bytes.find` with a start.
def pass_events(chunks: bytes, shape: TextShape) -> tuple[int, bytes]:
    """Return (number of events, bytes to pass on) of `chunks`, if each is whole and one event of text.

    Each has the stream's usual beginning and ending, so it is no error, no usage alone, nor the end. (0, b"")
    means that the chunks must be parsed.
    """
    beginning, ending, after_ids, instead = shape.beginning, shape.ending, shape.after_ids, shape.instead
    quoted, in_lf = shape.quoted, shape.in_lf
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
        while start < length and size < _MAX_EVENT_BYTES:
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
        if size == 0 or size > _MAX_EVENT_BYTES or start > length:
            return 0, b""
        if chunks[start - 2] != 13 or chunks[start - 1] != 10:
            return 0, b""
        position = start + size + 2
        begun = start + width
        if position > length or chunks[start:begun] != beginning:
            return 0, b""
        end = position - behind
        if behind:
            if end < begun or chunks[end:position] != after_ids:
                return 0, b""
            end = _ids_begin(chunks, begun, end)
        said = end - tail
        if said < begun or chunks[said:end] != ending:
            return 0, b""
        text = chunks[begun:said]
        if 10 in text or 13 in text:
            return 0, b""
        if quoted and (chunks[said - 1] == 92 or chunks.find(b'"', begun, said) >= 0):
            return 0, b""  # an escaped quote may be its end
        if instead:
            if events:
                before = before or []
                before.append(passed)
            passed = CHUNK_LINES[len(in_lf) + len(text) + len(instead) - 2] + in_lf + text + instead
        events += 1
    return events, passed if before is None else b"".join(before) + passed
