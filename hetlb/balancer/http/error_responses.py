"""Answers of hetlb's own: one table from the reason to status, body, `Retry-After` and `x-should-retry`.

A client is told to retry only where nothing can have run.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from hetlb.balancer.core.types import Outcome, RejectReason
from hetlb.balancer.http.http1 import GateError
from hetlb.errors import NOT_JSON


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer for one reason. `should_retry` None leaves it to the client."""

    outcome: Outcome
    status: int
    error_type: str
    code: str
    should_retry: bool | None


#: Reasons of the scheduler.
REJECTIONS: dict[RejectReason, Answer] = {
    RejectReason.UNKNOWN_MODEL: Answer(Outcome.BAD_REQUEST, 404, "NotFoundError", "model_not_found", False),
    RejectReason.TOO_LONG: Answer(
        Outcome.BAD_REQUEST, 400, "BadRequestError", "context_length_exceeded", False
    ),
    RejectReason.QUEUE_FULL: Answer(Outcome.REJECTED_FULL, 429, "TooManyRequests", "queue_full", True),
    RejectReason.NO_INSTANCE: Answer(Outcome.NO_INSTANCE, 503, "ServiceUnavailable", "no_instance", True),
    RejectReason.QUEUE_EXPIRED: Answer(
        Outcome.EXPIRED_QUEUE, 503, "ServiceUnavailable", "queue_expired", True
    ),
    RejectReason.CONNECT_FAILED: Answer(Outcome.CONNECT_FAILED, 502, "BadGateway", "connect_failed", True),
    RejectReason.NO_RESPONSE: Answer(Outcome.NO_RESPONSE, 502, "BadGateway", "no_response", False),
    RejectReason.POLICY_FAILED: Answer(
        Outcome.LOCAL_FAULT, 500, "InternalServerError", "policy_failed", False
    ),
}

#: The proxy's own answers to a request after it was dispatched.
FIRST_BYTE_TIMEOUT = Answer(Outcome.NO_RESPONSE, 504, "GatewayTimeout", "first_byte_timeout", False)
BAD_UPSTREAM = Answer(Outcome.NO_RESPONSE, 502, "BadGateway", "bad_response", False)
BROKEN_STREAM = Answer(Outcome.BROKEN_STREAM, 502, "BadGateway", "broken_stream", False)
FAULT = Answer(Outcome.LOCAL_FAULT, 500, "InternalServerError", "internal_error", False)
LOCAL_FAULT = Answer(Outcome.LOCAL_FAULT, 503, "ServiceUnavailable", "local_fault", True)
TOO_MANY_CONNECTIONS = Answer(Outcome.REJECTED_FULL, 429, "TooManyRequests", "too_many_connections", True)
TOO_MANY_BYTES = Answer(Outcome.REJECTED_FULL, 429, "TooManyRequests", "too_many_bytes", True)
RATE_LIMITED = Answer(Outcome.RATE_LIMITED, 429, "RateLimitError", "rate_limit_exceeded", True)
LOOP = Answer(Outcome.BAD_REQUEST, 508, "LoopDetected", "loop", False)
SHUTTING_DOWN = Answer(Outcome.SHUTDOWN, 503, "ServiceUnavailable", "shutting_down", True)

_TYPES = {404: "NotFoundError", 401: "AuthenticationError", 403: "PermissionDeniedError"}
_CODES = {401: "invalid_api_key", 403: "model_not_allowed", 404: "not_found"}


def bad_request(status: int, code: str | None = None) -> Answer:
    return Answer(
        Outcome.BAD_REQUEST,
        status,
        _TYPES.get(status, "BadRequestError"),
        code or _CODES.get(status, "bad_request"),
        False,
    )


class Refusal(GateError):
    """Refusal of a request without a fault. Its client may send it again after `retry_after_s`.

    `lines` are header lines of the answer.
    """

    def __init__(self, answer: Answer, message: str, retry_after_s: float = 1.0, lines: bytes = b"") -> None:
        super().__init__(answer.status, message)
        self.answer = answer
        self.retry_after_s = retry_after_s
        self.lines = lines


REASONS = {each.value: each.phrase.encode("ascii") for each in HTTPStatus}
#: Anthropic's types of errors by status; others below 500 are `invalid_request_error`.
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def speaks_anthropic(path: str) -> bool:
    """Return True if clients of a path expect errors in the form of Anthropic's Messages API."""
    return path.startswith("/v1/messages")


def error_body(answer: Answer, message: str, path: str = "") -> bytes:
    """Return the error document: OpenAI's, or Anthropic's on its paths."""
    if speaks_anthropic(path):
        status = answer.status
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    error = {"message": message, "type": answer.error_type, "code": answer.code, "param": None}
    return msgspec.json.encode({"error": error})


def error_event(answer: Answer, message: str, path: str = "") -> bytes:
    return _event(error_body(answer, message, path), path)


def _event(document: bytes, path: str) -> bytes:
    name = b"event: error\n" if speaks_anthropic(path) else b""
    return b"%bdata: %b\n\n" % (name, document)


def upstream_error_event(status: int, body: bytes, path: str = "") -> bytes:
    """Return an engine's whole answer of 400 or more, as an event of a stream that has begun."""
    try:
        document = msgspec.json.decode(body)
    except NOT_JSON:
        document = None
    if not isinstance(document, dict) or not document.get("error"):
        answer = Answer(Outcome.UPSTREAM_ERROR, status, "UpstreamError", "upstream_error", None)
        return error_event(answer, f"The instance answered with status {status}.", path)
    return _event(msgspec.json.encode(document), path)


def response(
    status: int,
    body: bytes,
    *,
    lines: bytes = b"",
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """Return a whole response of hetlb's own, with these header lines."""
    status_line = b"HTTP/1.1 %d %b\r\n" % (status, REASONS.get(status, b""))
    fields = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    end = b"connection: close\r\n\r\n" if close else b"\r\n"
    head = status_line + fields + lines + end
    return head if head_only else head + body


def refusal(
    answer: Answer,
    message: str,
    retry_after_s: float | None,
    lines: bytes,
    path: str = "",
    *,
    close: bool = False,
    head_only: bool = False,
) -> bytes:
    """Return a whole response with the reason of a refusal, with these header lines."""
    if answer.should_retry is not None:
        lines = b"x-should-retry: %b\r\n" % (b"true" if answer.should_retry else b"false") + lines
    if retry_after_s is not None:
        # OpenAI's clients read the second one first: whole seconds would bring them back all at once.
        waits = max(1, round(retry_after_s)), max(1000, round(retry_after_s * 1e3))
        lines = b"retry-after: %d\r\nretry-after-ms: %d\r\n" % waits + lines
    if answer.status == 401:
        lines = b"www-authenticate: Bearer\r\n" + lines
    body = error_body(answer, message, path)
    return response(answer.status, body, lines=lines, close=close, head_only=head_only)


def refused_for(error: GateError) -> tuple[Answer, float | None, bytes]:
    """Return the answer to a refused request, seconds until a retry, and header lines."""
    if isinstance(error, Refusal):
        return error.answer, error.retry_after_s if error.answer.should_retry else None, error.lines
    return bad_request(error.status), None, b""
