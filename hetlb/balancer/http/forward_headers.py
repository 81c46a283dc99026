"""Headers forwarded to an engine and back to a client, kept for a head that comes again.

Of a client's headers only listed ones reach an engine, and none that belongs to one connection
(RFC 9110, 7.6.1, and what `Connection` names). `Via` says that a request passed here, so that one that comes
back is noticed. Lengths, names of instances and of requests are put in for each message by the sender.
"""

from __future__ import annotations

import secrets

from hetlb.balancer.http.http1 import Headers, RequestHead, ResponseHead

_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
        b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings",
    }
)  # fmt: skip
#: Headers of a client that reach an engine: what vLLM, its APIs and another hetlb behind this one read. Any
#: other may carry an identity that the client must not claim, or steer an engine (`x-data-parallel-rank`).
_FORWARDED = frozenset(
    {
        b"accept", b"accept-language", b"content-type", b"user-agent", b"traceparent", b"tracestate",
        b"anthropic-version", b"anthropic-beta", b"openai-beta", b"openai-organization", b"openai-project",
        b"x-session-id", b"x-vllm-priority", b"x-stainless-read-timeout", b"x-stainless-retry-count",
        b"x-envoy-expected-rq-timeout-ms", b"x-hetlb-class", b"x-hetlb-slo-ttft-ms",
        b"x-hetlb-slo-tpot-ms", b"x-hetlb-slo-e2e-ms",
    }
)  # fmt: skip
_KEYS = frozenset({b"authorization", b"x-api-key", b"api-key"})
_NOT_RETURNED = _HOP_BY_HOP | {
    b"content-length", b"x-hetlb-instance", b"x-hetlb-prefill-instance", b"x-request-id", b"set-cookie",
}  # fmt: skip


class ForwardRules:
    """Headers of clients that reach the engines, and the name in `Via` of this proxy's own requests.

    `extra` are further names (`proxy.forward_headers`); `own` is the pseudonym in `Via` (RFC 9110, 7.6.3).
    """

    __slots__ = ("_forwarded", "_with_keys", "own")

    def __init__(self, extra: tuple[str, ...] = (), own: str | None = None) -> None:
        self.own = (own or f"hetlb-{secrets.token_hex(8)}").encode("ascii")
        self._forwarded = _FORWARDED | {name.lower().encode("ascii") for name in extra}
        self._with_keys = self._forwarded | _KEYS

    def came_back(self, headers: Headers) -> bool:
        """Return True if a message has passed this proxy before."""
        return any(name == b"via" and self.own in value for name, value in headers)

    def request_lines(self, head: RequestHead, *, passthrough: bool) -> bytes:
        """Return the request line and the headers that go on, with line ends (`passthrough`: keys too)."""
        if head.forward_rules is not self:  # the file was read again since the head was first seen
            head.forwarded.clear()
            head.forward_rules = self
        lines = head.forwarded.get(passthrough)
        if lines is None:
            target = head.path.encode("ascii") + (b"?" + head.query if head.query else b"")
            via = [value for name, value in head.headers if name == b"via"]
            lines = b"%b %b HTTP/1.1\r\n%baccept-encoding: identity\r\nvia: %b\r\n" % (
                head.method,
                target,
                _kept(head.headers, self._with_keys if passthrough else self._forwarded, listed=True),
                b", ".join([*via, b"1.1 " + self.own]),
            )
            head.forwarded[passthrough] = lines
        return lines


def response_lines(head: ResponseHead) -> bytes:
    """Return the status line and the headers that go back, each with its line end."""
    lines = head.forwarded
    if lines is None:
        status = b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)
        lines = head.forwarded = status + _kept(head.headers, _NOT_RETURNED, listed=False)
    return lines


def _kept(headers: Headers, names: frozenset[bytes], *, listed: bool) -> bytes:
    """Return the lines of headers in `names` (`listed`) or not in `names`.

    Headers that `Connection` names are left out.
    """
    nominated: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            nominated.update(option.strip() for option in value.lower().split(b","))
    return b"".join(
        b"%b: %b\r\n" % (name, value)
        for name, value in headers
        if (name in names) == listed and name not in nominated
    )
