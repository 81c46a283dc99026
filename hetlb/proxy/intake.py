"""What becomes of a whole request: an exchange that goes to an engine, or an answer of hetlb's own.

Promise: nothing is sent here and nothing is booked; whoever is refused gets one `GateError` that says why.
Where keys are needed, nothing but `/health` and `/ping` is answered without one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

import hetlb
from hetlb.config import ProxyTable
from hetlb.core.types import Request
from hetlb.proxy import replies
from hetlb.proxy.access import Tenant
from hetlb.proxy.beginnings import beginnings_of
from hetlb.proxy.body import Call, inject_usage, read_json
from hetlb.proxy.driver import Driver
from hetlb.proxy.endpoints import ENDPOINTS, Kind, kept_response
from hetlb.proxy.exchange import ClientSide, Exchange
from hetlb.proxy.http1 import GateError, RequestHead
from hetlb.proxy.multipart import read_multipart
from hetlb.proxy.telemetry.tracing import Tracing
from hetlb.proxy.upload import Upload

_TENANT = re.compile(rb"[!-~]{1,64}")
_LABEL = re.compile(rb"[!-~]{1,128}")
#: Balancers ask here, and have no key.
_OPEN_PATHS = frozenset({"/health", "/ping"})
#: Looked up here and not for every request: a member of an enum costs as much as a call.
_AUDIO: Final = Kind.AUDIO
_PINNED: Final = Kind.PINNED
_PLAIN: Final = Kind.PLAIN
_MULTIPART: Final = b"multipart/"
_FORM: Final = b"application/x-www-form-urlencoded"
_READS: tuple[bytes, ...] = (b"GET", b"HEAD")


class FleetView(Protocol):
    """What is answered without an engine."""

    def models(self) -> list[dict[str, Any]]: ...
    def routable(self) -> bool: ...


class Intake:
    """Takes whole requests in. On the event loop only."""

    def __init__(self, driver: Driver, view: FleetView) -> None:
        self._driver = driver
        self._view = view
        self.configure(driver.table)
        #: Who may send requests, by the SHA-256 of their keys; None lets everybody in.
        self.tenants: Mapping[bytes, Tenant] | None = None
        #: Makes the ids of every request's spans, None without tracing.
        self.tracing: Tracing | None = None
        #: Engines take our request ids for their own, and another proxy may count from 1 too.
        self._label_prefix = f"hetlb-{secrets.token_hex(4)}-"

    def configure(self, table: ProxyTable) -> None:
        """Names of headers and paths that hold from now on."""
        self._extra_paths = frozenset(table.extra_paths)
        self._session_header = table.session_header.lower().encode()
        self._tenant_header = None if table.tenant_header is None else table.tenant_header.lower().encode()

    def recognise(self, head: RequestHead) -> Tenant | None:
        """Whose key came with a request; None where none is needed. Raises `GateError` (401)."""
        tenants = self.tenants
        if tenants is None:
            return None
        authorization = head.fields.get(b"authorization")
        if authorization is not None:
            scheme, _, key = authorization.partition(b" ")
            key = key.strip() if scheme.lower() == b"bearer" else b""
        else:
            key = head.fields.get(b"x-api-key") or b""  # as Anthropic's clients send it
        tenant = tenants.get(hashlib.sha256(key).digest()) if key else None
        if tenant is None and head.path not in _OPEN_PATHS:
            if key:
                raise GateError(401, "This API key is not known here.")
            raise GateError(401, "An API key is needed: Authorization: Bearer KEY.")
        return tenant

    def knows(self, path: str) -> bool:
        """Whether something that takes a body is at a path."""
        return path in ENDPOINTS or path in self._extra_paths or kept_response(path) is not None

    def upload(self, head: RequestHead, length: int) -> Upload | None:
        """What reads a large body that may go on while it arrives, if any. Raises `GateError` (400)."""
        if head.method != b"POST" or ENDPOINTS.get(head.path) is not _AUDIO:
            return None
        if not head.content_type.startswith(_MULTIPART):
            return None
        return Upload(head.fields[b"content-type"], length)

    def take(
        self,
        client: ClientSide,
        head: RequestHead,
        body: bytes,
        tenant: Tenant | None,
        upload: Upload | None = None,
    ) -> Exchange | bytes:
        """The exchange of a request, not yet submitted, or the whole answer to it. Raises `GateError`.

        Its body is `body`, or what came and will come of `upload`.
        """
        path = head.path
        kind: Kind | None = ENDPOINTS.get(path)
        if kind is None and path in self._extra_paths:
            kind = _PLAIN
        if kind is None:
            kept = kept_response(path)
            if kept is None:
                return self._own(head, tenant)
            allowed = (b"POST",) if kept[1] else (b"GET", b"DELETE")
            if head.method not in allowed:
                return _method_not_allowed(head, allowed)
            where = self._place_of(kept[0], tenant, strict=True)
            return self._exchange(client, head, _PINNED, Call(), body, where, tenant)
        if head.method != b"POST" and kind is not _PLAIN:
            return _method_not_allowed(head, (b"POST",))
        if upload is not None:
            call = upload.call
        elif head.content_type.startswith(_MULTIPART):
            call = read_multipart(head.fields[b"content-type"], body)
        elif kind is _AUDIO and head.content_type.startswith(_FORM):
            raise GateError(415, "This form is expected as multipart/form-data.")
        elif kind is _PLAIN and not body:
            call = Call()
        else:
            call = read_json(kind, body)
        pinned: str | None = None
        if call.continues is not None:
            pinned = self._place_of(call.continues, tenant, strict=False)
            if pinned is not None and call.model is not None and call.model not in self._served(pinned):
                pinned = None  # of another model: nobody has it there, and the engine says so
        return self._exchange(client, head, kind, call, body, pinned, tenant, upload)

    def _place_of(self, response_id: str, tenant: Tenant | None, *, strict: bool) -> str | None:
        """The instance that keeps an answer, for whom it was made for. Raises `GateError` (404).

        Unless `strict`, None where it is not known and anybody may have made it: the engine decides.
        """
        driver = self._driver
        owner = None if tenant is None else tenant.name
        known = driver.kept_at(response_id, owner)
        if known is None and owner is None and not strict:
            return None
        if known is None or known[1] != owner or all(i.name != known[0] for i in driver.scheduler.instances):
            raise GateError(404, f"Response with id '{response_id[:128]}' not found.")
        return known[0]

    def _exchange(
        self,
        client: ClientSide,
        head: RequestHead,
        kind: Kind,
        call: Call,
        body: bytes,
        pinned: str | None,
        tenant: Tenant | None,
        upload: Upload | None = None,
    ) -> Exchange:
        driver = self._driver
        model = call.model or self._only_model(pinned)
        if tenant is not None and kind is not _PINNED and not tenant.may_use(model):
            raise GateError(403, f"This API key is not for the model `{model}`.")
        body = inject_usage(kind, call, body)
        exact = call.prompt_tokens_total is not None
        if not kind.prompted:
            call.prompt_tokens_total, call.prompts = 0, 1
        elif call.prompt_tokens_total is None:
            call.prompt_tokens_total = driver.token_estimator.tokens(
                model, call.text, call.text_bytes, call.images
            )
        prompts = call.prompts
        each = max(1, -(-call.prompt_tokens_total // prompts))
        request_id = driver.next_id()
        label = head.fields.get(b"x-request-id")
        if label is None or _LABEL.fullmatch(label) is None:
            text = self._label_prefix + hex(request_id)[2:]
        else:
            text = label.decode("ascii")
        generates: bool = kind.generates
        beginnings: tuple[tuple[str, int | None], ...] = ()
        if generates and prompts == 1:
            beginnings = beginnings_of(head.fields.get(self._session_header), call.text, each)
        call.text = b""  # the size of the prompt is known: nobody needs it twice in memory
        owner = None if tenant is None else tenant.name
        request = Request(
            id=request_id,
            model=model,
            prompt_tokens=each,
            max_tokens=call.max_tokens,
            sequences=prompts * call.n,
            longest_prompt_tokens=call.longest_tokens or each,
            generates=generates,
            body_bytes=len(body) if upload is None else upload.length,
            prompt_exact=exact,
            pinned=pinned,
            beginnings=beginnings,
            priority=call.priority,
            tenant=owner if self._tenant_header is None else self._claimed(head, owner),
        )
        exchange = Exchange(
            driver, client, head, kind, call, request, body, text, driver.now(), owner, upload
        )
        if self.tracing is not None:
            exchange.trace = self.tracing.begin(head.fields.get(b"traceparent"))
        return exchange

    def _claimed(self, head: RequestHead, owner: str | None) -> str | None:
        """Whose share a request is of, where a header says it (of a key's owner, if there are keys)."""
        assert self._tenant_header is not None
        name = head.fields.get(self._tenant_header)
        if name is None or _TENANT.fullmatch(name) is None:
            return owner
        claimed = name.decode("ascii")
        return claimed if owner is None else f"{owner}/{claimed}"

    def _served(self, name: str) -> tuple[str, ...]:
        """What an instance answers to."""
        for instance in self._driver.scheduler.instances:
            if instance.name == name:
                return instance.served or (instance.spec.model,)
        return ()

    def _only_model(self, pinned: str | None) -> str:
        driver = self._driver
        if pinned is not None and (served := self._served(pinned)):
            return served[0]
        models = driver.scheduler.models
        if len({instance.spec.model for instance in driver.scheduler.instances}) == 1 and models:
            return models[0]
        raise GateError(400, "model: expected the name of a model, since several are served here.")

    # --- answers of hetlb's own ---

    def _own(self, head: RequestHead, tenant: Tenant | None) -> bytes:
        path, status, body = head.path, 200, b""
        methods = _READS
        if path == "/health":
            status = 200 if self._view.routable() else 503
        elif path == "/ping":
            status = 200 if self._view.routable() else 503
            methods = (*_READS, b"POST")
        elif path == "/version":
            body = msgspec.json.encode({"version": hetlb.__version__})
        elif path == "/v1/models":
            body = msgspec.json.encode({"object": "list", "data": self._models(tenant)})
        elif path.startswith("/v1/models/"):
            body = msgspec.json.encode(self._model(path[len("/v1/models/") :], tenant))
        else:
            raise GateError(404, "Not Found")
        if head.method not in methods:
            return _method_not_allowed(head, methods)
        return replies.response(status, body, close=not head.keep_alive, head_only=head.method == b"HEAD")

    def _models(self, tenant: Tenant | None) -> list[dict[str, Any]]:
        """The models that a client may use."""
        models = self._view.models()
        return models if tenant is None else [entry for entry in models if tenant.may_use(entry["id"])]

    def _model(self, name: str, tenant: Tenant | None) -> dict[str, Any]:
        for entry in self._models(tenant):
            if entry.get("id") == name:
                return entry
        raise GateError(404, f"The model `{name}` does not exist.")


def _method_not_allowed(head: RequestHead, allowed: tuple[bytes, ...]) -> bytes:
    answer = replies.bad_request(405, "method_not_allowed")
    return replies.response(
        405,
        replies.error_body(answer, "Method Not Allowed"),
        headers=((b"allow", b", ".join(allowed)),),
        close=not head.keep_alive,
        head_only=head.method == b"HEAD",
    )
