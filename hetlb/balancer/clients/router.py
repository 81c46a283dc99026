"""Router of whole requests: an exchange that goes to an engine, or an answer of hetlb's own.

Nothing is sent here and nothing is booked; a refused request gets one `GateError` with the reason.
Where keys are needed, nothing but `/health` and `/ping` is answered without one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

import msgspec

import hetlb
from hetlb.balancer.clients.client_response import ClientSide
from hetlb.balancer.clients.prompt_keys import keys_of, session_key
from hetlb.balancer.config.fleet_tables import ProxyTable, Resume
from hetlb.balancer.core.objective import UNSTATED, ServiceClass
from hetlb.balancer.core.prefix_index import PrefixKey
from hetlb.balancer.core.types import ANYWHERE, Places, PromptBlocks, RejectReason, Request
from hetlb.balancer.exchange.driver import Driver
from hetlb.balancer.exchange.exchange import EngineRequest, Exchange
from hetlb.balancer.exchange.plain_attempt import PlainMaker
from hetlb.balancer.http import error_responses
from hetlb.balancer.http.endpoints import ENDPOINTS, KEPT_PATHS, REALTIME_PATH, Kind
from hetlb.balancer.http.error_responses import Answer, Refusal
from hetlb.balancer.http.http1 import GateError, RequestHead
from hetlb.balancer.http.openai_body import MOST_PRIORITY, Call, read_json
from hetlb.balancer.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from hetlb.balancer.clients.api_keys import ClientKeys, Tenant
    from hetlb.balancer.clients.forwarded import ForwardedAddresses, PageOrigins
    from hetlb.balancer.clients.model_names import ModelNames
    from hetlb.balancer.clients.service_classes import ServiceClasses
    from hetlb.balancer.option_record import Options, Resumption, SpanMaker

_TENANT = re.compile(rb"[!-~]{1,64}")
_LABEL = re.compile(rb"[!-~]{1,128}")
#: Maximum characters of the path of a refused request in the request log.
_MAX_PATH_CHARACTERS: Final = 128
#: Paths of answers that can go on at another instance.
_RESUMED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
#: Balancers ask here, and have no key.
_OPEN_PATHS = frozenset({"/health", "/ping"})
_OWN_PATHS = _OPEN_PATHS | {"/version", "/v1/models"}
_AUDIO: Final = Kind.AUDIO
_PLAIN: Final = Kind.PLAIN
_REALTIME: Final = Kind.REALTIME
_RESPONSES: Final = Kind.RESPONSES
#: Kinds with a header of priority that vLLM reads, and the priority in it.
_WITH_PRIORITY: Final = (Kind.CHAT, Kind.COMPLETION, Kind.RESPONSES)
_PRIORITY: Final = re.compile(rb"[+-]?[0-9]{1,19}")
#: Paths of OpenAI's batch interface, and words about it.
_BATCH_PATHS: Final = ("/v1/batches", "/v1/files")
_NO_BATCHES: Final = (
    "Batches are not taken here: `hetlb batch IN.jsonl OUT.jsonl --url URL` runs a batch file."
)
_MULTIPART: Final = b"multipart/"
_FORM: Final = b"application/x-www-form-urlencoded"
_READS: tuple[bytes, ...] = (b"GET", b"HEAD")


class FleetView(Protocol):
    """Interface of the fleet for requests that are answered without an engine."""

    def models(self) -> list[dict[str, Any]]: ...
    def routable(self) -> bool: ...


class Router:
    """Takes whole requests in. On the event loop only."""

    def __init__(self, driver: Driver, view: FleetView, options: Options) -> None:
        self._driver = driver
        self._options = options
        self._view = view
        self.configure(driver.table)
        #: Keys of clients; None lets every client in.
        self.keys: ClientKeys | None = None
        #: Aliases and fallbacks, None without any.
        self.names: ModelNames | None = None
        #: Classes of the models' requests, None without any.
        self.classes: ServiceClasses | None = None
        #: Ways of resuming answers by model and class; others as `proxy.resume` says.
        self.resume: Mapping[tuple[str, str], Resume] = {}
        #: Makes the attempts of requests without options.
        self._plain = PlainMaker(driver)
        #: Makes the attempts of answers that may go on elsewhere, None before the first.
        self._resumption: Resumption | None = None
        #: Makes the ids of every request's spans, None without tracing.
        self.tracing: SpanMaker | None = None
        #: Engines take our request ids for their own, and another proxy may count from 1 too.
        self._label_prefix = f"hetlb-{secrets.token_hex(4)}-"

    def configure(self, table: ProxyTable) -> None:
        """Take the names of headers and paths that hold from now on."""
        self._extra_paths = frozenset(table.extra_paths)
        #: Origins of pages that may read answers; clients' addresses as other proxies state them. None
        #: without.
        self._pages: PageOrigins | None = None
        if table.cors_origins:
            from hetlb.balancer.clients.forwarded import PageOrigins

            self._pages = PageOrigins(table.cors_origins)
        self._forwarded: ForwardedAddresses | None = None
        if table.trusted_proxies:
            from hetlb.balancer.clients.forwarded import ForwardedAddresses

            self._forwarded = ForwardedAddresses(table.trusted_proxies)
        self._session_header = table.session_header.lower().encode()
        self._tenant_header = None if table.tenant_header is None else table.tenant_header.lower().encode()

    def authenticate(self, head: RequestHead) -> Tenant | None:
        """Return the tenant of a request by its key; None if none is needed. Raises `GateError` (401)."""
        keys = self.keys
        if keys is None or (self._pages is not None and head.method == b"OPTIONS"):
            return None  # browsers ask for permission without a key
        return keys.tenant_of(head, required=head.path not in _OPEN_PATHS)

    def cors_lines(self, head: RequestHead) -> bytes:
        """Return header lines that let a browser's page of another origin read the answer; b"" for others."""
        return b"" if self._pages is None else self._pages.lines(head)

    def knows(self, path: str) -> bool:
        """Return True if a path is known that takes a body."""
        return path in ENDPOINTS or path in self._extra_paths or path.startswith(KEPT_PATHS)

    def handle(
        self, client: ClientSide, head: RequestHead, body: bytes, tenant: Tenant | None
    ) -> Exchange | bytes:
        """Return an exchange, not yet submitted, or the whole answer to it. Raises `GateError`."""
        if b"via" in head.fields and self._driver.forward_rules.came_back(head.headers):
            raise Refusal(
                error_responses.LOOP,
                "The request came back: an instance leads to this proxy.",
                lines=b"via: 1.1 " + self._driver.forward_rules.own + b"\r\n",
            )
        if self._pages is not None and head.method == b"OPTIONS":
            return self._pages.permission(head)
        path = head.path
        kind: Kind | None = ENDPOINTS.get(path)
        if kind is None and path in self._extra_paths:
            kind = _PLAIN
        if kind is None:
            if path == REALTIME_PATH:
                return self._session(client, head, body, tenant)
            if path.startswith(KEPT_PATHS):
                return self._kept(client, head, body, tenant)
            return self._own(head, tenant)
        if head.method != b"POST" and kind is not _PLAIN:
            raise _method_not_allowed((b"POST",))
        is_form = head.content_type.startswith(_MULTIPART)
        if is_form:
            call = self._read_form(head, body)
        elif kind is _AUDIO and head.content_type.startswith(_FORM):
            raise GateError(415, "This form is expected as multipart/form-data.")
        elif kind is _PLAIN and not body:
            call = Call()
        else:
            call = read_json(kind, body)
        if self.names is not None and call.model is not None:
            model = self._resolve(self.names, head, call, tenant)
            if call.renamed:
                call.body = self.names.rename(call, model)
        if kind is _RESPONSES:
            return self._response(client, head, call, tenant)
        return self._exchange(client, head, kind, call, tenant)

    def _response(self, client: ClientSide, head: RequestHead, call: Call, tenant: Tenant | None) -> Exchange:
        """Return the exchange of a response that its engine may keep. Raises `GateError`."""
        from hetlb.balancer.exchange.kept_answers import UNKNOWN, NotingMaker, kept_place

        if call.previous is not None:
            place = kept_place(self._driver, call.previous, _owner(tenant))
            if place is None:
                raise GateError(400, f"previous_response_id: {UNKNOWN}")
            call.subset = (place.instance,)
        exchange = self._exchange(client, head, _RESPONSES, call, tenant)
        exchange.maker = NotingMaker(self._driver)
        return exchange

    def _kept(self, client: ClientSide, head: RequestHead, body: bytes, tenant: Tenant | None) -> Exchange:
        """Return the exchange with the instance that keeps a response. Raises `GateError`."""
        from hetlb.balancer.exchange.kept_answers import place_asked_for

        place = place_asked_for(self._driver, head, _owner(tenant))
        call = Call(body)
        call.model, call.subset = place.model, (place.instance,)
        call.renamed = True  # its key might use the model when it asked
        return self._exchange(client, head, _PLAIN, call, tenant)

    @staticmethod
    def _read_form(head: RequestHead, body: bytes) -> Call:
        """Return the call in a form. Raises `GateError`."""
        from hetlb.balancer.http.multipart import read_form

        return read_form(head.fields[b"content-type"], body)

    def _session(
        self, client: ClientSide, head: RequestHead, body: bytes, tenant: Tenant | None
    ) -> Exchange | bytes:
        """Return the session that an upgrade to WebSocket asks for. Raises `GateError`."""
        if head.method != b"GET":
            raise _method_not_allowed((b"GET",))
        handshake = self._options.handshake(self._driver, head, body, self.keys is None)
        call = Call()
        call.model = handshake.model
        if self.names is not None and call.model is not None:
            self._resolve(self.names, head, call, tenant)
        if call.model is None and tenant is not None and tenant.models is not None:
            raise GateError(403, "This API key is for some models: name one in the query, `?model=`.")
        exchange = self._exchange(client, head, _REALTIME, call, tenant)
        exchange.maker = handshake
        if call.renamed and call.model is not None:
            exchange.outgoing.head = handshake.with_model(call.model)
        return exchange

    def _resolve(self, names: ModelNames, head: RequestHead, call: Call, tenant: Tenant | None) -> str:
        """Set the model that serves a request in place of the one it asks for. Raises `GateError` (403)."""
        asked = call.asked = call.model or ""
        owner = _owner(tenant)
        session = self._session_of(head, owner) if names.canaries else None
        model = call.model = names.served(asked, self._driver.scheduling.fleet.available, session)
        call.renamed = model != asked
        # The right to an alias implies the right to its model and to the fallbacks of this.
        if call.renamed and tenant is not None and not tenant.may_use(asked) and not tenant.may_use(model):
            raise GateError(403, f"This API key is not for the model `{asked}`.")
        return model

    def _exchange(
        self, client: ClientSide, head: RequestHead, kind: Kind, call: Call, tenant: Tenant | None
    ) -> Exchange:
        driver, fleet = self._driver, self._driver.scheduling.fleet
        owner = _owner(tenant)
        model = call.model or fleet.only_model
        if not model:
            raise GateError(400, "model: expected the name of a model, since several are served here.")
        if tenant is not None and not call.renamed and not tenant.may_use(model):
            raise GateError(403, f"This API key is not for the model `{model}`.")
        service = UNSTATED
        if self.classes is not None:
            service = self.classes.of(model, head, None if tenant is None else tenant.classes)
        forwarded = self._forwarded
        address = client.address if forwarded is None else forwarded.of(head, client.address)
        request = self._request(head, kind, call, model, service, owner, address)
        text = label_of(head)
        if text is None:
            text = engine_text = self._label_prefix + hex(request.id)[2:]
        else:  # engines take it for their own id: no tenant may choose another one's
            engine_text = text if tenant is None else f"{text}.{hex(request.id)[2:]}"
        outgoing = EngineRequest(head, call.body, engine_text)
        exchange = Exchange(driver, client, outgoing, kind, call, request, text, self._plain, owner)
        record = exchange.record
        record.address = address
        if driver.resumes and request.generates and request.sequences == 1 and head.path in _RESUMED_PATHS:
            how = self.resume.get((model, service.name), driver.table.resume)
            if how is not False:
                if self._resumption is None:
                    self._resumption = self._options.resumption(driver)
                exchange.maker = self._resumption(kind, call, outgoing)
        call.body = call.text = call.tools = call.ids = b""  # no prompt is in memory twice, or for longer
        if self.tracing is not None:
            record.trace = self.tracing.begin(head.fields.get(b"traceparent"))
        return exchange

    def _request(
        self,
        head: RequestHead,
        kind: Kind,
        call: Call,
        model: str,
        service: ServiceClass,
        owner: str | None,
        address: str,
    ) -> Request:
        """Return the request as the scheduler sees it, of the tenant `owner` at an address."""
        driver = self._driver
        exact = call.prompt_tokens_total is not None
        if not kind.prompted:
            call.prompt_tokens_total, call.prompts = 0, 1
        elif call.prompt_tokens_total is None:
            call.prompt_tokens_total = driver.token_estimator.tokens(
                model, call.text, call.text_bytes, call.media
            )
        each = max(1, -(-call.prompt_tokens_total // call.prompts))
        sequences = call.prompts * call.n if kind.prompted else 0
        generates: bool = kind.generates
        prefix_keys: tuple[PrefixKey, ...] = ()
        blocks: PromptBlocks | None = None
        if generates:
            prefix_keys, blocks = keys_of(
                head, call, model, owner, self._session_header, driver.scheduling.fleet
            )
        splits = driver.splits if sequences == 1 else None
        canary = None if self.names is None else self.names.canaries.get(model)
        side = None if canary is None else canary.side(self._session_of(head, owner))
        features: tuple[str, ...] | None = None
        if driver.scheduling.fleet.reads_features():
            from hetlb.balancer.http.request_features import features_of

            features = features_of(call.body)
        return Request(
            id=driver.next_id(),
            model=model,
            prompt_tokens=each,
            max_tokens=call.max_tokens,
            sequences=sequences,
            samples=call.n,
            longest_prompt_tokens=call.longest_tokens or each,
            generates=generates,
            body_bytes=len(call.body),
            prompt_exact=exact,
            prefix_keys=prefix_keys,
            blocks=blocks,
            priority=call.priority if head.priority is None else _priority(head, kind, call),
            tenant=owner if self._tenant_header is None else self._claimed(head, owner),
            splittable=splits is not None and splits.may_split(kind, head.path, call.body),
            streamed=call.stream,
            service=service,
            path=head.path,
            client=address,
            features=features,
            places=ANYWHERE if call.subset is None and side is None else Places(call.subset, side),
        )

    def _session_of(self, head: RequestHead, owner: str | None) -> str | None:
        """Return the name of a request's session, which is its owner's alone; None without one."""
        found = session_key(head.fields.get(self._session_header), owner, "")
        return None if found is None else found[0]

    def _claimed(self, head: RequestHead, owner: str | None) -> str | None:
        """Return the tenant named by a header. With API keys it is a part of the tenant of the key."""
        assert self._tenant_header is not None
        name = head.fields.get(self._tenant_header)
        if name is None or _TENANT.fullmatch(name) is None:
            return owner
        claimed = name.decode("ascii")
        return claimed if owner is None else f"{owner}/{claimed}"

    # --- answers of hetlb's own ---

    def refused(
        self, head: RequestHead, tenant: Tenant | None, answer: Answer, since: float, peer: str
    ) -> str:
        """Count and log a refused request of `peer` that came at `since`; return its `x-request-id`."""
        driver = self._driver
        request_id = driver.next_id()
        label = label_of(head) or self._label_prefix + hex(request_id)[2:]
        path = (
            head.path if len(head.path) <= _MAX_PATH_CHARACTERS else head.path[:_MAX_PATH_CHARACTERS] + "..."
        )
        owner = _owner(tenant)
        request = Request(request_id, "", 0, generates=False)
        record = RequestRecord(request, _PLAIN, head.method, path, label, owner, since, 0)
        record.address = peer if self._forwarded is None else self._forwarded.of(head, peer)
        record.outcome, record.status, record.ended_at = answer.outcome, answer.status, driver.now()
        driver.refused(answer.outcome, answer.status, record)
        return label

    def _own(self, head: RequestHead, tenant: Tenant | None) -> bytes:
        path, status, body = head.path, 200, b""
        methods = (*_READS, b"POST") if path == "/ping" else _READS
        if path in _OPEN_PATHS:
            status = 200 if self._view.routable() else 503
        elif path == "/version":
            body = msgspec.json.encode({"version": hetlb.__version__})
        elif path == "/v1/models":
            body = msgspec.json.encode({"object": "list", "data": self._models(tenant)})
        elif path.endswith("/") and (path[:-1] in _OWN_PATHS or self.knows(path[:-1])):
            # As FastAPI does, and so vLLM.
            target = path[:-1].encode("ascii") + (b"?" + head.query if head.query else b"")
            lines = b"location: %b\r\n" % target
            return error_responses.response(307, b"", lines=lines, close=not head.keep_alive)
        elif path.startswith("/v1/models/"):
            body = msgspec.json.encode(self._model(unquote(path[len("/v1/models/") :]), tenant))
        else:
            raise GateError(404, _NO_BATCHES if path.startswith(_BATCH_PATHS) else "Not Found")
        if head.method not in methods:
            raise _method_not_allowed(methods)
        return error_responses.response(
            status, body, close=not head.keep_alive, head_only=head.method == b"HEAD"
        )

    def _models(self, tenant: Tenant | None) -> list[dict[str, Any]]:
        """Return the models that a client may use."""
        models = self._view.models()
        if self.names is not None:
            models = [*models, *self.names.entries(models)]
        if self.classes is not None:
            allowed = None if tenant is None else tenant.classes
            models = [self._with_class(self.classes, entry, allowed) for entry in models]
        return models if tenant is None else [entry for entry in models if tenant.may_use(entry["id"])]

    def _with_class(
        self, classes: ServiceClasses, entry: dict[str, Any], allowed: Sequence[str] | None
    ) -> dict[str, Any]:
        """Return the entry of a model with its background class, if it has one."""
        model = entry["id"] if self.names is None else self.names.aliases.get(entry["id"], entry["id"])
        name = classes.background(model, allowed)
        return entry if name is None else {**entry, "background_class": name}

    def _model(self, name: str, tenant: Tenant | None) -> dict[str, Any]:
        for entry in self._models(tenant):
            if entry.get("id") == name:
                return entry
        raise Refusal(
            error_responses.REJECTIONS[RejectReason.UNKNOWN_MODEL], f"The model `{name}` does not exist."
        )


def _method_not_allowed(allowed: tuple[bytes, ...]) -> Refusal:
    answer = error_responses.bad_request(405, "method_not_allowed")
    return Refusal(answer, "Method Not Allowed", lines=b"allow: " + b", ".join(allowed) + b"\r\n")


def _owner(tenant: Tenant | None) -> str | None:
    """Return the name of a tenant, None without one."""
    return None if tenant is None else tenant.name


def _priority(head: RequestHead, kind: Kind, call: Call) -> int:
    """Return the priority in a header, which goes before the body's, as vLLM has it. Raises `GateError`."""
    stated = head.priority
    if stated is None or kind not in _WITH_PRIORITY:
        return call.priority
    stated = stated.strip()
    if _PRIORITY.fullmatch(stated) is None:
        raise GateError(400, "X-Vllm-Priority: expected a whole number.")
    return min(max(int(stated), -MOST_PRIORITY), MOST_PRIORITY)


def label_of(head: RequestHead) -> str | None:
    """Return the client's `x-request-id`, None without a usable one."""
    label = head.fields.get(b"x-request-id")
    return None if label is None or _LABEL.fullmatch(label) is None else label.decode("ascii")
