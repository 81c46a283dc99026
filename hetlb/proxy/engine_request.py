"""The request as engines get it: head, body, and the id by which they know it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from hetlb.proxy.http.http1 import RequestHead, ResponseHead
from hetlb.proxy.upstream import EngineConnection

if TYPE_CHECKING:
    from hetlb.proxy.exchange import Exchange

#: Methods of a request that has no body and does not say so.
_BODILESS = frozenset({b"GET", b"HEAD", b"DELETE"})


def with_field(body: bytes, name: bytes, value: bytes) -> bytes:
    """A JSON object with one more field at its end."""
    end = body.rfind(b"}")
    return b'%b,"%b":%b%b' % (body[:end], name, value, body[end:])


class EngineRequest:
    """Request of one client for whichever engine gets it, its body of `size` bytes.

    `label` is its `x-request-id` there.
    """

    __slots__ = ("_pieces", "head", "label", "size")

    def __init__(self, head: RequestHead, pieces: list[bytes], size: int, label: str) -> None:
        """`pieces` of the body have `size` bytes together."""
        self.head = head
        self.label = label.encode("ascii")
        self._pieces = pieces
        self.size = size

    @property
    def body(self) -> bytes:
        """The whole body."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def salt(self) -> None:
        """Salt it so that engines use nothing cached before, unless it says which caches are its own."""
        if b'"cache_salt"' not in self._pieces[0]:
            salt = b'"hetlb-%b"' % secrets.token_hex(8).encode("ascii")
            self._pieces = [with_field(self._pieces[0], b"cache_salt", salt)]
            self.size = len(self._pieces[0])

    def send(self, connection: EngineConnection, lines: bytes, instead: bytes | None) -> None:
        """Send it with these lines as its head, and the body `instead` of its own if there is one."""
        pieces = self._pieces if instead is None else [instead]
        size = self.size if instead is None else len(instead)
        if not size and self.head.method in _BODILESS:
            connection.send(b"%bx-request-id: %b\r\n\r\n" % (lines, self.label), pieces)
            return
        connection.send(
            b"%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (lines, self.label, size), pieces
        )

    def agreed(self, exchange: Exchange, head: ResponseHead) -> None:
        """The engine agrees to another protocol, of a request that asks for one (`realtime.Handshake`)."""
        raise NotImplementedError

    def drop(self) -> None:
        """Forget the body: it is not sent again."""
        self._pieces = []
