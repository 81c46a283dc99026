"""Origins of pages, and what a browser is told about them (Fetch, 3.2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hetlb.balancer.http import error_responses
from hetlb.balancer.http.http1 import RequestHead

_LINES: Final = (
    b"access-control-allow-origin: %b\r\nvary: Origin\r\n"
    b"access-control-expose-headers: x-request-id, x-hetlb-instance, retry-after\r\n"
)
_PREFLIGHT: Final = (
    b"access-control-allow-methods: GET, POST, DELETE\r\naccess-control-allow-headers: %b\r\n"
    b"access-control-max-age: 600\r\n"
)


class PageOrigins:
    """Origins of pages that may read answers; `*` is each."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(each.encode("ascii") for each in origins)

    def lines(self, head: RequestHead) -> bytes:
        """Return header lines that let a page read the answer; b"" for a client that is no such page."""
        origin = head.fields.get(b"origin")
        if origin is None or not self._origins & {origin.lower(), b"*"}:
            return b""
        return _LINES % origin

    def permission(self, head: RequestHead) -> bytes:
        """Return the answer to a browser's preflight request (`OPTIONS`)."""
        asked = head.fields.get(b"access-control-request-headers", b"*")
        return error_responses.response(200, b"", lines=_PREFLIGHT % asked, close=not head.keep_alive)
