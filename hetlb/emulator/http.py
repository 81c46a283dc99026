"""HTTP/1.1 as uvicorn speaks it, one connection at a time: bytes in, whole requests out, bytes back.

Requests of one connection are answered in order, one at a time; a client that is gone, or has
closed its sending side, is reported at once; an idle connection is closed after `keep_alive_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools


@dataclass(frozen=True, slots=True)
class HttpMessage:
    """One request: what the handlers look at. Header names were compared without regard to case."""

    method: str
    path: str
    content_type: str
    request_id: str
    body: bytes
    keep_alive: bool


class EmulatorListener:
    """State that the connections of one server share."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handle: Callable[[Connection, HttpMessage], None],
        keep_alive_s: float,
    ) -> None:
        self.loop = loop
        self.handle = handle
        self.keep_alive_s = keep_alive_s
        self.connections: set[Connection] = set()
        self._date = b""
        self._date_at = 0

    def date(self) -> bytes:
        """The headers that every response begins with."""
        now = int(time.time())
        if now != self._date_at:
            self._date_at = now
            self._date = b"date: %b\r\nserver: uvicorn\r\n" % formatdate(now, usegmt=True).encode()
        return self._date


class Connection(asyncio.Protocol):
    """One client. It is the `Out` of the reply in progress."""

    #: Sends bytes of a body, framed by the caller: the transport's own, for the price of one call.
    write: Callable[[bytes], None]

    def __init__(self, listener: EmulatorListener) -> None:
        self._listener = listener
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[HttpMessage] = deque()  # pipelined requests
        self._busy = False  # a request is being answered
        self._running = False  # the queue is being worked off
        self._paused = False
        self._keep_alive = True
        self._method = ""  # of the request being answered
        self._idle: asyncio.TimerHandle | None = None
        self._gone: Callable[[], None] | None = None
        self._reset()

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class
        self.write = self._transport.write
        self._listener.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request was answered, and the connection ends with it
        except httptools.HttpParserError:
            self._refuse()

    def eof_received(self) -> None:
        # Returning None lets the transport close itself; what runs for this client stops now.
        self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.connections.discard(self)
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._leave()

    def abort(self) -> None:
        """Drop the connection as a killed process would."""
        self._leave()
        self._transport.abort()

    def _leave(self) -> None:
        self._queue.clear()
        self._keep_alive = False
        if self._gone is not None:
            gone, self._gone = self._gone, None
            gone()

    # --- the parser's side ---

    def _reset(self) -> None:
        self._url = b""
        self._content_type = ""
        self._request_id = ""
        self._expects = False
        self._body: list[bytes] = []

    def on_message_begin(self) -> None:
        self._reset()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-type":
            self._content_type = value.decode("latin-1")
        elif lower == b"x-request-id":
            self._request_id = value.decode("latin-1")
        elif lower == b"expect":
            self._expects = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        if self._expects and not self._busy:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        parser = self._parser
        message = HttpMessage(
            parser.get_method().decode("ascii"),
            _path(self._url),
            self._content_type,
            self._request_id,
            self._body[0] if len(self._body) == 1 else b"".join(self._body),
            parser.get_http_version() != "1.0" and parser.should_keep_alive() and not parser.should_upgrade(),
        )
        self._queue.append(message)
        if self._busy and not self._paused:
            self._paused = True  # one request ahead is enough
            self._transport.pause_reading()
        self._work()

    # --- answering ---

    def _work(self) -> None:
        """Answer queued requests while nothing is in progress; handlers may answer within the call."""
        if self._running:
            return
        self._running = True
        while self._queue and not self._busy:
            message = self._queue.popleft()
            self._busy = True
            self._method = message.method
            self._keep_alive = message.keep_alive
            self._listener.handle(self, message)
        self._running = False
        if self._paused and not self._queue and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` once if the client leaves before the response is done."""
        self._gone = gone

    def start_stream(self) -> None:
        """Begin a chunked event stream; the caller writes chunks, then calls `done`."""
        self.write(
            b"HTTP/1.1 200 OK\r\n%bcontent-type: text/event-stream; charset=utf-8\r\nvary: Origin\r\n"
            b"%btransfer-encoding: chunked\r\n\r\n"
            % (self._listener.date(), b"" if self._keep_alive else b"connection: close\r\n")
        )

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str | None = "application/json",
        extra: bytes = b"",
    ) -> None:
        """Send a whole response and be done. `extra` holds further header lines."""
        kind = b"" if content_type is None else b"content-type: %b\r\n" % content_type.encode()
        self.write(
            b"HTTP/1.1 %d %b\r\n%b%bcontent-length: %d\r\n%bvary: Origin\r\n%b\r\n%b"
            % (
                status,
                HTTPStatus(status).phrase.encode(),
                self._listener.date(),
                extra,
                len(body),
                kind,
                b"" if self._keep_alive else b"connection: close\r\n",
                b"" if self._method == "HEAD" else body,
            )
        )
        self.done()

    def done(self) -> None:
        """The response is complete: the next request, or the wait for one."""
        self._gone = None
        self._busy = False
        if not self._keep_alive:
            self._queue.clear()
            self._transport.close()
        elif self._queue:
            self._work()
        else:
            self._idle = self._listener.loop.call_later(self._listener.keep_alive_s, self._transport.close)

    def _refuse(self) -> None:
        """Not HTTP: uvicorn's answer, and the end of the connection."""
        self._leave()
        text = b"Invalid HTTP request received."
        self._transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(text), text)
        )
        self._transport.close()


def _path(url: bytes) -> str:
    """The path of a request target, percent-decoded; "" if there is none."""
    if not url.startswith(b"/"):
        try:
            parsed: Any = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            return ""
        url = parsed.path or b""
    path = url.partition(b"?")[0].decode("latin-1")
    return unquote(path) if "%" in path else path
