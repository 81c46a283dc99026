"""Fields of Envoy's messages: heads of requests and answers as the proxy reads them, and metadata."""

from __future__ import annotations

from typing import Any, Final

from hetlb.balancer.exchange import ends
from hetlb.balancer.http.http1 import MAX_HEAD_BYTES, GateError, RequestHead, ResponseHead

ENDPOINT: Final = "x-gateway-destination-endpoint"
LB_SPACE: Final = "envoy.lb"
_SERVED: Final = "x-gateway-destination-endpoint-served"
_SUBSET: Final = "x-gateway-destination-endpoint-subset"
_SUBSET_SPACE: Final = "envoy.lb.subset_hint"
#: Headers of a message, at most (Envoy's own default is 100).
_MAX_HEADERS: Final = 200
#: Addresses of a subset, at most: each is looked up.
_MAX_SUBSET_ADDRESSES: Final = 4096
#: Envoy's own answers by the beginning of their `response.code_details`.
_LOCAL_REPLIES: Final = (
    ("upstream_reset_before_response_started{remote_connection_failure", ends.NOT_ACCEPTED),
    ("upstream_reset_before_response_started{connection_timeout", ends.NOT_ACCEPTED),
    ("upstream_reset_before_response_started{overflow", ends.LOCAL),
    ("upstream_reset_before_response_started", ends.DROPPED),
    ("upstream_response_timeout", ends.SILENT),
    ("upstream_per_try_timeout", ends.SILENT),
    ("response_timeout", ends.SILENT),
    ("no_healthy_upstream", ends.NOT_ACCEPTED),
)


class MalformedMessage(ValueError):
    """A message that no gateway sends: the call ends with INVALID_ARGUMENT."""


def _checked(headers: Any) -> list[tuple[str, bytes]]:
    """Return the names and values of a header map. Raises `GateError` (431) if it is too large."""
    if len(headers) > _MAX_HEADERS:
        raise GateError(431, f"The request has more than {_MAX_HEADERS} headers.")
    found = [(str(each.key), bytes(each.raw_value or each.value)) for each in headers]
    if sum([len(key) + len(value) for key, value in found]) > MAX_HEAD_BYTES:
        raise GateError(431, f"The headers are larger than {MAX_HEAD_BYTES} bytes.")
    return found


def request_head(headers: Any) -> RequestHead:
    """Return a request's head as the router reads it. Raises `GateError`."""
    head = RequestHead()
    head.http11 = False
    fields, lines = head.fields, head.headers
    for key, value in _checked(headers):
        if key == ":method":
            head.method = value
        elif key == ":path":
            path, _, head.query = value.partition(b"?")
            try:
                head.path = path.decode("ascii")
            except UnicodeDecodeError as error:
                raise GateError(400, "The path is not ASCII.") from error
        elif key == ":authority":
            fields.setdefault(b"host", value)
        elif not key.startswith(":"):
            name = key.encode()
            lines.append((name, value))
            fields.setdefault(name, value)
    head.content_type = fields.get(b"content-type", b"").lower()
    return head


def response_head(headers: Any) -> ResponseHead:
    """Return an answer's head as the exchange reads it. Raises `MalformedMessage`."""
    head = ResponseHead()
    try:
        found = _checked(headers)
    except GateError as error:
        raise MalformedMessage(error.message) from error
    for key, value in found:
        if key != ":status":
            head.fields.setdefault(key.encode(), value)
        elif len(value) == 3 and value.isdigit():
            head.status = int(value)
    if not 100 <= head.status <= 599:
        raise MalformedMessage("expected a :status from 100 to 599")
    head.forwarded = b""  # Envoy sends the headers on
    return head


def served_by(message: Any) -> str:
    """Return the address of the instance that Envoy reached, "" if it does not say."""
    spaces = message.metadata_context.filter_metadata
    if LB_SPACE not in spaces:
        return ""
    fields = spaces[LB_SPACE].fields
    return str(fields[_SERVED].string_value) if _SERVED in fields else ""


def subset(message: Any) -> tuple[str, ...] | None:
    """Return addresses that the gateway restricts a request to, None for all. Raises `MalformedMessage`."""
    spaces = message.metadata_context.filter_metadata
    if _SUBSET_SPACE not in spaces or _SUBSET not in spaces[_SUBSET_SPACE].fields:
        return None
    value = spaces[_SUBSET_SPACE].fields[_SUBSET]
    if value.WhichOneof("kind") == "list_value":
        found = tuple([str(each.string_value) for each in value.list_value.values])
    else:
        found = tuple([part.strip() for part in str(value.string_value).split(",") if part.strip()])
    if len(found) > _MAX_SUBSET_ADDRESSES:
        raise MalformedMessage(f"expected a subset of at most {_MAX_SUBSET_ADDRESSES} endpoints")
    return found


def code_details(message: Any) -> str:
    """Return Envoy's `response.code_details` attribute, "" if it is not sent."""
    for struct in message.attributes.values():
        if "response.code_details" in struct.fields:
            return str(struct.fields["response.code_details"].string_value)
    return ""


def local_reply(details: str, head: ResponseHead) -> ends.End | None:
    """Return the end of the lease for Envoy's own answer, None for an engine's answer."""
    if head.status < 500:
        return None
    if details:
        for beginning, end in _LOCAL_REPLIES:
            if details.startswith(beginning):
                return end
        return None
    # Without the attribute: servers date their answers, and Envoy adds the time of an answer from upstream.
    if head.fields.keys() & {b"date", b"server", b"x-envoy-upstream-service-time"}:
        return None
    return ends.DROPPED if head.fields.get(b"content-type") == b"text/plain" else None


#: The Gateway API's header of a fair share.
FAIRNESS: Final = "x-gateway-inference-fairness-id"
#: Maximum number of names at once.
MAX_NAMES: Final = 256
#: Seconds without a request after which a name makes room for another.
_IDLE_S: Final = 60.0
#: Tenant of requests with names that found no room.
OTHERS: Final = b"others"


class TenantNames:
    """Tenants that requests name without proof: a limited number at once, all others share one.

    The longest unused name is first.
    """

    def __init__(self) -> None:
        self._field = FAIRNESS.encode()
        self._seen: dict[bytes, float] = {}

    def configure(self, header: str) -> None:
        """Read names from this header from now on."""
        self._field = header.lower().encode()

    def __len__(self) -> int:
        return len(self._seen)

    def confine(self, fields: dict[bytes, bytes], now: float) -> None:
        """Count a request that names one tenant too many as of the tenant `OTHERS`. `now` in seconds."""
        name = fields.get(self._field)
        if name is None:
            return
        seen = self._seen
        if seen.pop(name, None) is None and len(seen) >= MAX_NAMES:
            oldest = next(iter(seen))
            if now - seen[oldest] < _IDLE_S:
                fields[self._field] = OTHERS
                return
            del seen[oldest]
        seen[name] = now
