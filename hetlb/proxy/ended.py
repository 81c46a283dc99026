"""What is told of a request when it is over: in the log, the history, the spans.

Promise: plain facts, set by the exchange that they are of (`proxy/exchange.py`); nobody else writes them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from hetlb.core.types import Lease, Outcome, Request
from hetlb.proxy.endpoints import Kind

if TYPE_CHECKING:
    from hetlb.proxy.tracing import Trace


class Phase(StrEnum):
    """What a request waits for."""

    QUEUE = "queue"
    CONNECT = "connect"
    WAIT = "wait"
    STREAM = "stream"
    DONE = "done"


class Ended:
    """The facts of one request. Times in seconds on the proxy's clock.

    A class and no protocol: compiled, whoever reads it does so without looking anything up.
    """

    __slots__ = (
        "arrived_at", "dispatched_at", "ended_at", "ended_in", "expected_first_s", "expected_s",
        "first_byte_at", "kind", "label", "lease", "method", "mixed", "outcome", "path", "prompt_tokens_used",
        "request", "retries", "status", "tenant", "trace",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        kind: Kind,
        method: bytes,
        path: str,
        label: str,
        tenant: str | None,
        now: float,
    ) -> None:
        self.request = request
        self.kind = kind
        self.method = method
        self.path = path
        #: Its name for clients and engines, `x-request-id`.
        self.label = label
        #: Whose key the client showed, None where none is needed.
        self.tenant = tenant
        #: The ids of its spans, None without tracing.
        self.trace: Trace | None = None
        #: The phase in which it got its outcome.
        self.ended_in = Phase.QUEUE
        self.outcome: Outcome | None = None
        self.lease: Lease | None = None
        self.status = self.retries = 0
        #: As the engine counted them, all prompts together.
        self.prompt_tokens_used: int | None = None
        #: Seconds from dispatch to the end, as the latency model saw it then.
        self.expected_s = 0.0
        #: Seconds to the first token by the profile as it is, and whether others were beside it until then.
        self.expected_first_s = 0.0
        self.mixed = False
        self.arrived_at = now
        self.dispatched_at: float | None = None
        self.first_byte_at: float | None = None
        self.ended_at: float | None = None
