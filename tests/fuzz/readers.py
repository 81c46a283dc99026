"""Three parsers that were written by others, each asked what a string of bytes says.

Requests come out as (method, target, headers, body), an answer as (status, body, whole); what a
parser refuses is `None`. h11, llhttp (through httptools) and the standard library share no code.
"""

from __future__ import annotations

import http.client
import io
from typing import Any, TypeAlias

import h11
import httptools

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
Request: TypeAlias = tuple[bytes, bytes, Headers, bytes]
Answer: TypeAlias = tuple[int, bytes, bool]


def _headers(pairs: Any) -> Headers:
    """Names small, values without blanks around them, sorted; the framing is in the body already."""
    return tuple(sorted((bytes(name).lower(), bytes(value).strip(b" \t")) for name, value in pairs))


def h11_requests(raw: bytes) -> list[Request] | None:
    """As a server in Python reads it."""
    found: list[Request] = []
    try:
        while raw:
            peer = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
            peer.receive_data(raw)
            head, body = peer.next_event(), b""
            if not isinstance(head, h11.Request):
                return None
            while isinstance(event := peer.next_event(), h11.Data):
                body += bytes(event.data)
            if not isinstance(event, h11.EndOfMessage):
                return None
            found.append((head.method, head.target, _headers(head.headers), body))
            raw = peer.trailing_data[0]
    except h11.RemoteProtocolError:
        return None
    return found


class _Llhttp:
    """llhttp's callbacks, for either direction."""

    def __init__(self) -> None:
        self.parser: Any = None
        #: Of every head: the method of a request, the status of an answer.
        self.heads: list[Any] = []
        self.messages: list[Any] = []
        self._start()

    def _start(self) -> None:
        self.url, self.headers, self.body = b"", [], b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_headers_complete(self) -> None:
        request = isinstance(self.parser, httptools.HttpRequestParser)
        self.heads.append(self.parser.get_method() if request else self.parser.get_status_code())

    def on_message_complete(self) -> None:
        self.messages.append((self.heads[-1], self.url, _headers(self.headers), self.body))
        self._start()


def llhttp_requests(raw: bytes) -> list[Request] | None:
    """As Node and uvicorn read it."""
    collector = _Llhttp()
    collector.parser = httptools.HttpRequestParser(collector)
    try:
        collector.parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    if collector.url or collector.headers or collector.body:
        return None
    return list(collector.messages)


def stdlib_requests(raw: bytes) -> list[Request] | None:
    """As `http.server` reads it."""
    found: list[Request] = []
    stream = io.BytesIO(raw)
    while line := stream.readline(65537):
        words = line.rstrip(b"\r\n").split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return None
        try:
            message = http.client.parse_headers(stream)
        except http.client.HTTPException:
            return None
        if message.defects or message.get("transfer-encoding"):
            return None  # the proxy sends lengths alone
        length = int(message.get("content-length", "0"))
        body = stream.read(length)
        if len(body) != length:
            return None
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in message.items()]
        found.append((words[0], words[1], _headers(pairs), body))
    return found


def h11_answer(raw: bytes) -> Answer | None:
    """As a client in Python reads it."""
    peer = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    peer.send(h11.Request(method="POST", target="/", headers=[("host", "p")]))
    peer.send(h11.EndOfMessage())
    head: h11.Response | None = None
    body = b""
    try:
        peer.receive_data(raw)
        peer.receive_data(b"")
        while isinstance(event := peer.next_event(), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response):
            return None
        head = event
        while isinstance(event := peer.next_event(), h11.Data):
            body += bytes(event.data)
    except h11.RemoteProtocolError:
        return None if head is None else (head.status_code, body, False)
    return head.status_code, body, isinstance(event, h11.EndOfMessage)


def llhttp_answer(raw: bytes) -> Answer | None:
    """As Node reads it."""
    collector = _Llhttp()
    collector.parser = httptools.HttpResponseParser(collector)
    try:
        collector.parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    final = [status for status in collector.heads if status >= 200]
    if len(final) != 1:
        return None
    if collector.messages:
        return final[0], collector.messages[-1][3], True
    by_closing = not any(n.lower() in (b"content-length", b"transfer-encoding") for n, _ in collector.headers)
    return final[0], collector.body, by_closing


class _Socket:
    """What `http.client` asks of a socket."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        """The bytes."""
        return io.BytesIO(self._raw)


def stdlib_answer(raw: bytes) -> Answer | None:
    """As `http.client` reads it."""
    reply = http.client.HTTPResponse(_Socket(raw), method="POST")  # type: ignore[arg-type]
    try:
        reply.begin()
        return reply.status, reply.read(), True
    except http.client.IncompleteRead as cut:
        return reply.status, cut.partial, False
    except (http.client.HTTPException, ValueError):
        return None


REQUEST_READERS = {"h11": h11_requests, "llhttp": llhttp_requests, "stdlib": stdlib_requests}
ANSWER_READERS = {"h11": h11_answer, "llhttp": llhttp_answer, "stdlib": stdlib_answer}
