"""What of a head goes on, to an engine and back to a client: made once for a head that comes again.

Promise: headers that belong to one connection stay there (RFC 9110, 7.6.1, and what `Connection` names);
what a stranger must not claim, and what is ours to say, is not taken from others. Lengths, names of
instances and of requests are put in for each message by whoever sends it.
"""

from __future__ import annotations

from hetlb.proxy.http1 import Headers, RequestHead, ResponseHead

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
#: Headers of a client that do not reach an engine, besides the hop-by-hop ones: they are made anew, are
#: ours to set, or claim something about the way here that a stranger must not claim.
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"host", b"content-length", b"expect", b"authorization", b"accept-encoding", b"x-request-id",
    b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-port", b"x-forwarded-proto",
    b"x-forwarded-prefix", b"x-real-ip", b"x-api-key", b"api-key", b"cookie",
}  # fmt: skip
_NOT_FORWARDED_BUT_KEYS = _NOT_FORWARDED - {b"authorization", b"x-api-key", b"api-key"}
_NOT_RETURNED = _HOP_BY_HOP | {b"content-length", b"x-hetlb-instance", b"x-request-id", b"set-cookie"}


def request_lines(head: RequestHead, *, passthrough: bool) -> bytes:
    """The request line and the headers that go on, each with its line end; `passthrough`: the keys too."""
    lines = head.onward.get(passthrough)
    if lines is None:
        target = head.path.encode("ascii") + (b"?" + head.query if head.query else b"")
        dropped = _NOT_FORWARDED_BUT_KEYS if passthrough else _NOT_FORWARDED
        lines = b"%b %b HTTP/1.1\r\n%baccept-encoding: identity\r\n" % (
            head.method,
            target,
            _kept(head.headers, dropped),
        )
        head.onward[passthrough] = lines
    return lines


def response_lines(head: ResponseHead) -> bytes:
    """The status line and the headers that go back, each with its line end."""
    lines = head.onward
    if lines is None:
        status = b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)
        lines = head.onward = status + _kept(head.headers, _NOT_RETURNED)
    return lines


def _kept(headers: Headers, dropped: frozenset[bytes]) -> bytes:
    nominated: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            nominated.update(option.strip() for option in value.lower().split(b","))
    return b"".join(
        b"%b: %b\r\n" % (name, value)
        for name, value in headers
        if name not in dropped and name not in nominated
    )
