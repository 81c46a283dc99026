"""Legal spellings of one event stream, drawn at random, and what a client by the standard reads of it.

The reader is written from the WHATWG standard (HTML, 9.2.6) and shares nothing with hetlb's.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from fuzz.costs import KEPT

#: Names of fields that no API has.
UNKNOWN = {"x_extra": [1, {"usage_note": "none"}], "nvext": None, "error_count": 0}
USAGE = {"prompt_tokens": 21, "total_tokens": 26, "completion_tokens": 5}
TEXTS = (
    "Hi",
    " there",
    ' "usage": {',
    "\n\ndata: [DONE]",
    "\u2028 é 🙂",
    "error",
    "\\",
    ' a\\"b',
    "",
    " <b>",
)


def events_of(api: str, texts: list[str], *, fingerprint: bool, usage: str) -> list[Any]:
    """Return the data of the events of an answer as vLLM writes them; `usage`: where it stands.

    `alone` in an event of its own, `last` in that which ends the choice, `each` in every one, `none`.
    """
    if api == "responses":
        done = {
            "response": {"id": "resp_1", "usage": {"input_tokens": 21, "output_tokens": 5}, "error": None}
        }
        deltas = [{"type": "response.output_text.delta", "delta": text} for text in texts]
        return [{"type": "response.created"}, *deltas, {"type": "response.completed", **done}]
    if api == "messages":
        start = {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 21}}}
        deltas = [{"type": "content_block_delta", "delta": {"text": text}} for text in texts]
        end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}}
        return [start, *deltas, end, {"type": "message_stop"}]
    chat = api == "chat"
    head = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    says: list[dict[str, Any]] = [{"delta": {"content": text}} if chat else {"text": text} for text in texts]
    if chat:
        says.insert(0, {"delta": {"role": "assistant", "content": ""}})
    events = [
        head | {"choices": [{"index": 0, **each, "logprobs": None, "finish_reason": None}]} for each in says
    ]
    ending = {"delta": {"content": "!"}} if chat else {"text": "!"}
    events.append(head | {"choices": [{"index": 0, **ending, "logprobs": None, "finish_reason": "stop"}]})
    if usage == "alone":
        events.append(head | {"choices": [], "usage": USAGE})
    elif usage == "null":
        events = [each | {"usage": None} for each in events]
        events.append(head | {"choices": None, "usage": USAGE})
    elif usage == "last":
        events[-1] = events[-1] | {"usage": USAGE}
    elif usage == "each":
        events = [each | {"usage": USAGE} for each in events]
    if fingerprint:
        events[-1] = events[-1] | {"system_fingerprint": "vllm-1"}
    return [*events, "[DONE]"]


def without_usage(events: list[Any]) -> list[Any]:
    """Return what a client gets that asked for no usage: as the engine writes it where nobody asks."""
    found: list[Any] = []
    for event in events:
        if not isinstance(event, dict) or not event.get("usage") or "type" in event:
            found.append(event)
            continue
        rest = {name: value for name, value in event.items() if name != "usage"}
        if event["choices"]:
            found.append(rest)
        elif "system_fingerprint" in rest:
            found[-1] = found[-1] | {"system_fingerprint": rest["system_fingerprint"]}
    return found


class Speller:
    """Writes the same events in one legal spelling."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ends = rng.choice(
            [["\n"], ["\r\n"], ["\r"], ["\n", "\r\n"], ["\r\n", "\r"], ["\n", "\r\n", "\r"]]
        )
        self._space = rng.choice([[" "], [""], [" ", ""]])
        self._separators = rng.choice([(",", ":"), (", ", ": "), (",", ": "), (" ,", " :"), (",\t", ":\t")])
        self._ascii, self._escapes = rng.random() < 0.5, rng.random() < 0.15
        self._order = rng.choice(["as it is", "sorted", "reversed", "random"])
        self._more, self._lines = rng.random() < 0.3, rng.random() < 0.3
        self._pads, self._fields = rng.random() < 0.2, rng.random() < 0.4

    def stream(self, events: list[Any]) -> bytes:
        """Return the stream."""
        rng = self._rng
        text = "\ufeff" if rng.random() < 0.2 else ""
        for event in events:
            while self._fields and rng.random() < 0.2:
                line = rng.choice([": ping", ":", "retry: 3000", "data", "unknown: x", "retry:1", ":\u00fc"])
                text = self._ended(text + line, 2 if line == "data" else rng.choice([1, 2, 2, 3]))
            named = [f"{name}:{rng.choice(self._space)}{value}" for name, value in self._named(event)]
            data = self._data(event)
            lines = [*data, *named] if rng.random() < 0.1 else [*named, *data]
            for line in lines:
                text = self._ended(text + line)
            text = self._ended(text, 2 if self._fields and rng.random() < 0.1 else 1)
        return text.encode()

    def _ended(self, text: str, times: int = 1) -> str:
        """Return a text with line ends behind it; LF behind CR would be a part of that."""
        for _ in range(times):
            ends = [end for end in self._ends if text[-1:] != "\r" or end[0] != "\n"]
            text += self._rng.choice(ends or ["\r"])
        return text

    def _named(self, event: Any) -> list[tuple[str, str]]:
        """Return the other fields of an event."""
        named = [("event", event["type"])] if isinstance(event, dict) and "type" in event else []
        if self._fields and self._rng.random() < 0.3:
            named.append(self._rng.choice([("id", "7"), ("retry", "10"), ("x", "y"), ("event", "message")]))
        return named

    def _data(self, event: Any) -> list[str]:
        """Return the lines of data of an event."""
        text = event if isinstance(event, str) else self._json(event)
        if self._pads and not isinstance(event, str):
            text = f" {text}\t"
        parts = [text]
        if self._lines and not isinstance(event, str):
            # Between two tokens of JSON a line end is white space, as any other.
            places = [found.end() for found in re.finditer(r"(?<=[\]}])[,:]|(?<=^)\{", text)]
            if places:
                at = self._rng.choice(places)
                parts = [text[:at], text[at:]]
        return [f"data:{self._rng.choice(self._space) if part[:1] != ' ' else ' '}{part}" for part in parts]

    def _json(self, value: Any) -> str:
        if self._more:
            value = value | UNKNOWN
        text = json.dumps(self._ordered(value), separators=self._separators, ensure_ascii=self._ascii)
        if self._escapes:
            for name in ("usage", "choices", "content"):
                text = text.replace(f'"{name}"', f'"\\u{ord(name[0]):04x}{name[1:]}"')
        return text

    def _ordered(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._ordered(each) for each in value]
        if not isinstance(value, dict):
            return value
        names = list(value)
        if self._order == "sorted":
            names.sort()
        elif self._order == "reversed":
            names.reverse()
        elif self._order == "random":
            self._rng.shuffle(names)
        return {name: self._ordered(value[name]) for name in names}


def data_of(stream: bytes) -> list[str]:
    """Return the data of each event that a client by the standard dispatches."""
    text = stream.decode().removeprefix("\ufeff")
    found: list[str] = []
    data: list[str] = []
    for line in re.split("\r\n|\n|\r", text)[:-1]:
        if not line:
            if "".join(data):
                found.append("\n".join(data))
            data = []
            continue
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
    return found


def read(stream: bytes) -> list[Any]:
    """Return the events of a stream by their meaning, without what `UNKNOWN` added."""
    events: list[Any] = []
    for data in data_of(stream):
        if data == "[DONE]":
            events.append(data)
            continue
        event = json.loads(data)
        events.append({name: value for name, value in event.items() if name not in UNKNOWN})
    return events


HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
PATHS = {
    "chat": "/v1/chat/completions", "completion": "/v1/completions", "responses": "/v1/responses",
    "messages": "/v1/messages",
}  # fmt: skip


def through_hetlb(api: str, reads: list[bytes], *, asks_usage: bool = False, chunked: bool = True) -> Any:
    """Send a stream through a whole proxy; returns the client's body and the record of its request."""
    body: dict[str, Any] = {"model": "m", "prompt": "x", "stream": True}
    if asks_usage:
        body["stream_options"] = {"include_usage": True}
    sent = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nhost: p\r\ncontent-length: %d\r\n\r\n"
    asker, end = KEPT.engine(head % (PATHS[api].encode(), len(sent)) + sent)
    loop, driver = KEPT.proxy.loop, KEPT.proxy.driver
    driver.settle()
    KEPT.proxy.ended.clear()
    end.send(HEAD if chunked else HEAD.replace(b"transfer-encoding: chunked", b"connection: close"))
    for piece in reads:
        end.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        loop.settle(1)
    if chunked:
        end.send(b"0\r\n\r\n")
    else:
        end.leave()
    loop.rest()
    got = bytes(asker.got)
    KEPT.done(end, asker)
    driver.settle()
    [record] = KEPT.proxy.ended
    return _unchunked(got), record


def _unchunked(raw: bytes) -> bytes:
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length + 2 :]
        if not length:
            return body
    raise AssertionError(f"expected the last chunk, got {raw!r}")
