"""Per-request record, read by the access log, the counters, the spans, `/metrics` and the history.

The exchange of a request (`balancer/exchange/exchange.py`) and its attempts write it. Every count has one
home here, so that all readers give the same number.
"""

from __future__ import annotations

from typing import Final, Protocol

from hetlb.balancer.core.types import Lease, Outcome, Request
from hetlb.balancer.exchange.ends import End
from hetlb.balancer.exchange.exchange_states import Phase
from hetlb.balancer.http.endpoints import Kind

_QUEUED: Final = Phase.QUEUED


class KeyTicket(Protocol):
    """Reservation of a request against the limits of its key."""

    def used(self, prompt_tokens: int, output_tokens: int, now: float) -> None: ...
    def ended(self, prompt_tokens: int, output_tokens: int, now: float) -> None: ...
    def headers(self, now: float) -> bytes: ...


class RequestSpans(Protocol):
    """Ids of the spans of one request, which writes them to the head for the engine."""

    def onto(self, lines: bytes) -> bytes: ...


class RequestRecord:
    """Facts of one request. Times in seconds on the proxy's clock.

    Prompt tokens count once per prompt, however many sequences are sampled from it.

    A class and not a protocol: compiled, its attributes are read without a lookup by name.
    """

    __slots__ = (
        "address", "arrived_at", "cached_tokens", "dispatched_at", "end", "ended_at", "ended_in",
        "estimated_output_tokens", "estimated_prompt_tokens", "first_byte_at", "kind", "label", "lease",
        "method", "not_resumed",
        "outcome", "path", "prefill_instance", "request", "resumed", "resumed_tokens", "retries", "status",
        "streamed", "tenant", "ticket", "trace", "usage_prompt_tokens",
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
        estimated_prompt_tokens: int,
    ) -> None:
        self.request = request
        self.kind = kind
        self.method = method
        self.path = path
        #: `x-request-id`, for clients and engines.
        self.label = label
        #: IP address of the client, "-" where it is not known.
        self.address = "-"
        #: Name of the client's API key, None where none is needed.
        self.tenant = tenant
        #: Reservation of its key's limits for it, None without limits.
        self.ticket: KeyTicket | None = None
        #: Ids of its spans, None without tracing.
        self.trace: RequestSpans | None = None
        #: Phase when it got its outcome.
        self.ended_in = _QUEUED
        self.outcome: Outcome | None = None
        #: End of its last lease, None without one.
        self.end: End | None = None
        self.lease: Lease | None = None
        #: Instance that prefilled the prompt, where another one decodes the answer.
        self.prefill_instance: str | None = None
        self.status = self.retries = 0
        #: Times that its answer went on at another instance, and its tokens from before the last one.
        self.resumed = self.resumed_tokens = 0
        #: Reason why a lost answer could not go on elsewhere, "" if it could, or was not lost.
        self.not_resumed = ""
        #: True if the answer was a stream of server-sent events; set as it begins.
        self.streamed = False
        #: Tokens of all prompts as known at arrival: counted for token ids, else estimated.
        self.estimated_prompt_tokens = estimated_prompt_tokens
        #: Tokens of all prompts by the engine's `usage`, None without one.
        self.usage_prompt_tokens: int | None = None
        #: Output tokens of an answer whose engine counts none, for the limits of its key.
        self.estimated_output_tokens = 0
        #: Prompt tokens that the engine read from its prefix cache, None where it does not say.
        self.cached_tokens: int | None = None
        self.arrived_at = now
        self.dispatched_at: float | None = None
        self.first_byte_at: float | None = None
        self.ended_at: float | None = None

    @property
    def prompt_tokens_total(self) -> int:
        """Tokens of all prompts, each once: the engine's count where it gave one."""
        usage = self.usage_prompt_tokens
        return self.estimated_prompt_tokens if usage is None else usage

    @property
    def output_tokens(self) -> int:
        lease = self.lease
        return self.resumed_tokens + (0 if lease is None else lease.output_tokens)

    def counted(self, completion: int | None, prompt: int | None, cached: int | None) -> bool:
        """Take an engine's counts of tokens in place of estimates; True if the prompt's count makes sense."""
        lease = self.lease
        assert lease is not None, "expected an answer of an instance"
        if completion is not None and 0 <= completion <= 1 << 31:
            lease.output_tokens = completion
        if prompt is None or not 0 < prompt <= 1 << 31:
            return False
        self.usage_prompt_tokens = prompt
        if cached is not None and 0 <= cached <= prompt:
            self.cached_tokens = cached
            if self.request.sequences == 1 and self.prefill_instance is None:
                lease.reported_cached_tokens = cached
        return True

    def unplaced(self) -> None:
        """Forget the instances of a request that waits again."""
        self.lease = self.prefill_instance = None

    def own_lines(self, now: float) -> bytes:
        lease = self.lease
        assert lease is not None, "expected an answer of an instance"
        lines = b"x-hetlb-instance: %b\r\n" % lease.instance.encode("ascii")
        if self.ticket is not None:
            lines += self.ticket.headers(now)
        if self.prefill_instance is not None:
            lines += b"x-hetlb-prefill-instance: %b\r\n" % self.prefill_instance.encode("ascii")
        if self.resumed:
            lines += b"x-hetlb-resumed: %d\r\n" % self.resumed
        return lines

    @property
    def queue_s(self) -> float:
        """Seconds from arrival to the last dispatch, or to the end of a request that had none."""
        until = self.ended_at if self.dispatched_at is None else self.dispatched_at
        assert until is not None, "expected a request that was dispatched or has ended"
        return until - self.arrived_at

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first byte of the answer, None without one."""
        first = self.first_byte_at
        return None if first is None else first - self.arrived_at

    @property
    def e2e_s(self) -> float:
        assert self.ended_at is not None, "expected a request that has ended"
        return self.ended_at - self.arrived_at
