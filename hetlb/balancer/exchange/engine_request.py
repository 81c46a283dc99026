"""The request as engines get it: head, body, and its id at the engine."""

from __future__ import annotations

from hetlb.balancer.engines.upstream import EngineConnection
from hetlb.balancer.http.http1 import RequestHead

#: Methods of requests that may lack both a body and its length.
_BODILESS = frozenset({b"GET", b"HEAD", b"DELETE"})


class EngineRequest:
    """Request of one client for whichever engine gets it; `label` is its `x-request-id` there."""

    __slots__ = ("body", "head", "label")

    def __init__(self, head: RequestHead, body: bytes, label: str) -> None:
        self.head = head
        self.label = label.encode("ascii")
        self.body = body

    @property
    def features(self) -> tuple[str, ...]:
        """Features of its body that some engines refuse."""
        from hetlb.balancer.http.request_features import features_of

        return features_of(self.body)

    def send(self, connection: EngineConnection, lines: bytes, body: bytes) -> None:
        """Send it with these lines as its head, and this body."""
        if body or self.head.method not in _BODILESS:
            head = b"%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (lines, self.label, len(body))
        else:
            head = b"%bx-request-id: %b\r\n\r\n" % (lines, self.label)
        connection.send(head, body)
