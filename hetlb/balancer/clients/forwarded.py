"""Headers for proxies before hetlb and for browsers: `X-Forwarded-For` of trusted ones, and CORS."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

from hetlb.balancer.http import error_responses
from hetlb.balancer.http.http1 import RequestHead


class ForwardedAddresses:
    """Addresses of clients, as proxies in these networks (CIDR) state them."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._trusted = tuple(ipaddress.ip_network(each) for each in networks)

    def of(self, head: RequestHead, peer: str) -> str:
        """Return the client's address: of `peer` and `X-Forwarded-For` the last that is no trusted proxy."""
        forwarded = head.fields.get(b"x-forwarded-for")
        if forwarded is None:
            return peer
        for text in [peer, *reversed(forwarded.decode("latin-1").split(","))]:
            text = text.strip()
            try:
                address = ipaddress.ip_address(text)
            except ValueError:
                break
            peer = str(address)
            if not any(address in network for network in self._trusted):
                break
        return peer


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
