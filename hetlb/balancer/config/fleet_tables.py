"""Tables of a fleet file: the one declaration of its keys, for the reader and for `hetlb schema fleet`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.policies.base import PlannedType
from hetlb.inputs.yaml_file import NonNegative, Port, Positive, PositiveInt, Share


class TlsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A PEM certificate (with its chain) and its private key, as paths."""

    cert: str
    key: str


class Listen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Address of the main listener, or a list of addresses; with `tls` one speaks TLS and nothing else.

    The host `::` takes IPv4 too.
    """

    host: str = "127.0.0.1"
    port: Port = 8080
    tls: TlsTable | None = None


class Admin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The admin listener. On an address other than loopback it needs a token. With `tls` it speaks TLS alone.

    Instances may be registered in `registration_networks` (CIDR) alone.
    """

    host: str = "127.0.0.1"
    port: Port = 8081
    tls: TlsTable | None = None
    token_file: str | None = None
    token_env: str | None = None
    registration: bool = False
    registration_networks: tuple[str, ...] = ()


class PlannedTypeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A type of request in a plan: its model, mean lengths in tokens, its share, each instance's of it."""

    type: str
    share: Positive = 1.0
    input_tokens: Positive
    output_tokens: Positive
    model: str | None = None
    instances: dict[str, NonNegative] = {}

    def planned(self, model: str) -> PlannedType:
        """Return the type for the scheduler; one that names no model is of `model`."""
        instances = tuple(self.instances.items())
        return PlannedType(self.model or model, self.input_tokens, self.output_tokens, self.share, instances)


class PolicyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The policy and its parameters.

    `theta` and `combine` form the paper's workload. `predictor` guesses output lengths; some predictors read
    the data set `trace`. `seed` makes random draws repeatable. `hetlb rent` writes a plan's `worth` of
    instances, in requests per second, and its `types` of requests. `adapter_load_s` is the time to load a
    LoRA adapter into an engine's slot. `weights` are the weights of the terms of `hetlb`.
    """

    name: str = "hetlb"
    theta: Positive = 2.0
    combine: str = "power"
    predictor: str | None = None
    trace: str | None = None
    seed: int = 0
    worth: dict[str, NonNegative] = {}
    types: tuple[PlannedTypeTable, ...] = ()
    adapter_load_s: NonNegative = 0.25
    weights: dict[str, NonNegative] = {}


class QueueTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The bounded queue in front of the instances.

    `tenant_share` is how much of it one tenant may hold, `tenant_weights` the share of what is served that
    each gets while several wait, by name, 1 for others.
    """

    max_requests: PositiveInt = 16_384
    max_bytes: PositiveInt = 256 << 20
    timeout_s: Positive = 300.0
    no_instance_timeout_s: NonNegative = 30.0
    tenant_share: Share = 1.0
    tenant_weights: dict[str, Positive] = {}


class HealthTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Return of instances to full load. `slow_start_s` 0: at once."""

    slow_start_s: NonNegative = 30.0


class ScrapeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Intervals and limits of probes and scrapes."""

    interval_s: Positive = 1.0
    timeout_s: Positive = 2.0


#: Upper bound of worker processes.
MOST_WORKERS = 128


#: Headers that frame or address a message, belong to one connection, or are made here.
OWN_HEADERS = frozenset(
    [
        "accept-encoding", "api-key", "authorization", "connection", "content-encoding", "content-length",
        "expect", "host", "http2-settings", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
        "via", "x-api-key", "x-request-id",
    ]
)  # fmt: skip
OriginText: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(\*|https?://[A-Za-z0-9._:\[\]-]{1,253})$",
        description="an origin like https://chat.example, or *",
    ),
]
HeaderName: TypeAlias = Annotated[
    str, msgspec.Meta(pattern="^[A-Za-z0-9-]{1,64}$", description="the name of a header")
]
#: Continuation of a lost answer at another instance: by token ids, or not (False).
Resume: TypeAlias = bool | Literal["ids"]


class ProxyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits, timeouts and keys of the data plane. Sizes in bytes.

    `session_header` names a conversation, `tenant_header` the tenant that shares a full fleet with others.
    `api_keys_file` lists the clients' keys; `passthrough_authorization` forwards a client's own key to the
    engines. `heartbeat_s` is the time between comments in a waiting stream, 0 for none. With `resume: ids`
    an answer continues at another instance after its engine is lost, if its token ids are known; False:
    never. Models and classes have this key too. `max_held_bytes` bounds the sum of all bodies being read.
    `max_connections` bounds the clients' connections. None is nearly half of the process's descriptors; the
    other half is for engines. `workers` processes share the port. `forward_headers` names more headers of
    clients to forward to the engines. From `trusted_proxies` (networks, CIDR) `X-Forwarded-For` gives the
    client's address for the log. Pages of `cors_origins` (`https://chat.example`, or `*`) may read answers
    in a browser.
    """

    extra_paths: tuple[str, ...] = ()
    connect_timeout_s: Positive = 1.0
    first_byte_timeout_s: Positive = 300.0
    idle_timeout_s: Positive = 60.0
    head_timeout_s: Positive = 10.0
    body_timeout_s: Positive = 30.0
    keepalive_timeout_s: Positive = 75.0
    write_timeout_s: Positive = 60.0
    upstream_idle_s: Annotated[float, msgspec.Meta(gt=0, le=3)] = 3.0
    max_body_bytes: PositiveInt = 64 << 20
    max_held_bytes: PositiveInt = 512 << 20
    shutdown_grace_s: NonNegative = 120.0
    request_log: bool = True
    request_log_format: Literal["keyvalue", "json"] = "keyvalue"
    session_header: HeaderName = "x-session-id"
    tenant_header: HeaderName | None = None
    api_keys_file: str | None = None
    passthrough_authorization: bool = False
    forward_headers: tuple[HeaderName, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    cors_origins: tuple[OriginText, ...] = ()
    heartbeat_s: NonNegative = 0.0
    resume: Resume = False
    max_connections: PositiveInt | None = None
    workers: Annotated[int, msgspec.Meta(ge=1, le=MOST_WORKERS)] = 1


#: Labels that name the GPU of an instance; all but the first are of Kubernetes' nodes.
GPU_LABELS = ("gpu", "nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")


def gpu_of(labels: Mapping[str, str]) -> str:
    """Return the GPU named by labels, "" if none."""
    return next((labels[name] for name in GPU_LABELS if labels.get(name)), "")


class KvEventsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Source of vLLM's KV events (`--kv-events-config`): ZeroMQ addresses."""

    endpoint: str
    replay: str | None = None


class WakeCommands(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Commands that stop (`sleep`) and start (`wake`) a server, as lists of words without a shell."""

    sleep: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    wake: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


class WakeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sleep of a server that has no requests, and its wake for the next one.

    Instances of one `group` share a GPU: one of them is awake, for `stay_s` at least. `sleep_after_s` without
    a request one sleeps; 0: only for another one of its group. vLLM sleeps at `level` 1 (weights in memory)
    or 2 (weights are read again); its server needs `--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`.
    With `command` the server is stopped and started instead.
    """

    group: str | None = None
    sleep_after_s: NonNegative = 0.0
    stay_s: NonNegative = 30.0
    level: Literal[1, 2] = 1
    command: WakeCommands | None = None


class InstanceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server. `name` defaults to the address in `url`.

    `api_key_file` or `api_key_env` holds its key. `ca_file` holds the authorities for its certificate, by
    default the system's. `kv_events` is the address for its KV events, `kv_bootstrap` the address of its
    Mooncake bootstrap server. `role` says which phases of a request it takes. Without a profile of its own,
    `labels` choose one under `profiles:`; `gpu` is short for that label. Without a profile, `gpus` of a `gpu`
    that `hetlb profile --gpus` lists tell how fast it is beside others, until answers do. `max_num_seqs` is
    the flag of the same name of its `vllm serve`, per data-parallel engine. It overrides the profile's.
    `wake` lets it sleep without requests.
    """

    name: str | None = None
    url: str | None = None
    profile: str | None = None
    weight: Positive = 1.0
    api_key_file: str | None = None
    api_key_env: str | None = None
    ca_file: str | None = None
    kv_events: str | KvEventsTable | None = None
    labels: dict[str, str] = {}
    max_num_seqs: PositiveInt | None = None
    gpu: str | None = None
    gpus: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    role: Literal["prefill", "decode", "both"] = "both"
    kv_bootstrap: str | None = None
    wake: WakeTable | None = None

    @property
    def publisher(self) -> KvEventsTable | None:
        """Its publisher of KV events."""
        stated = self.kv_events
        return KvEventsTable(endpoint=stated) if isinstance(stated, str) else stated


#: Bounds of a target in milliseconds: within them every score is a number.
LEAST_TARGET_MS: Final = 1e-3
MOST_TARGET_MS: Final = 1e9
_Target: TypeAlias = Annotated[float, msgspec.Meta(ge=LEAST_TARGET_MS, le=MOST_TARGET_MS)]


class ClassTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Objective of one class of requests: targets in milliseconds for a share `attainment` of them.

    `background` requests take only what the other classes leave over. Without a target, a second until the
    first token weighs `first_token_weight` as much as a later one. With `refuse_hopeless` a request gets 503
    once it can no longer meet its targets.
    """

    ttft_ms: _Target | None = None
    tpot_ms: _Target | None = None
    e2e_ms: _Target | None = None
    attainment: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.95
    background: bool = False
    first_token_weight: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    refuse_hopeless: bool = False
    resume: Resume | None = None

    def objective(self, name: str) -> ServiceClass:
        """Return the class for the scheduler."""
        targets_ms = (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        ttft_s, tpot_s, e2e_s = (math.inf if target is None else target / 1e3 for target in targets_ms)
        return ServiceClass(
            name,
            ttft_s,
            tpot_s,
            e2e_s,
            attainment=self.attainment,
            background=self.background,
            first_token_weight=self.first_token_weight,
            refuse_hopeless=self.refuse_hopeless,
        )


ConnectorName: TypeAlias = Literal["nixl", "mooncake"]


class KvTransferTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hand-over of KV blocks between instances of a model: the connector of vLLM, and its figures.

    `lease_s` is the engines' `kv_lease_duration` (Mooncake: `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`), whole
    seconds in vLLM. The others are the first estimate of a transfer's time.
    """

    connector: ConnectorName
    lease_s: Annotated[float, msgspec.Meta(ge=1)] | None = None
    bytes_per_token: Positive | None = None
    bandwidth_bytes_per_s: Positive | None = None
    latency_s: NonNegative | None = None


class CanaryTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Share of a model's requests for a new version: an `instance` of it, or another model's `name`."""

    share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    instance: str | None = None
    name: str | None = None


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pool: the instances that serve one model; its key is for instances without one of their own.

    `kv_transfer` lets one instance prefill a prompt and another decode the answer.
    `aliases` are further names for clients. `fallback` is the model that answers while no instance of this
    one takes requests. `canary` gets a share of its requests. `classes` are its requests' by name, the
    default first.
    """

    name: str
    instances: tuple[InstanceTable, ...] = ()
    aliases: tuple[str, ...] = ()
    fallback: str | None = None
    canary: CanaryTable | None = None
    tokenizer: str | None = None
    api_key_file: str | None = None
    api_key_env: str | None = None
    kv_transfer: ConnectorName | KvTransferTable | None = None
    classes: dict[str, ClassTable] = {}
    resume: Resume | None = None


class DnsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """DNS name of servers: one per address (A, else AAAA), or one per SRV record.

    Resolved again when the TTL expires, after `interval_s` at the latest. `servers` are name servers (`host`
    or `host:port`), the system's by default.
    """

    name: str
    type: Literal["A", "SRV"] = "A"
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    scheme: Literal["http", "https"] = "http"
    model: str | None = None
    labels: dict[str, str] = {}
    interval_s: Positive = 1.0
    servers: tuple[str, ...] = ()


class ClusterTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Address and credentials of the API server: without these keys, hetlb's own pod's."""

    namespace: str | None = None
    api_server: str | None = None
    token_file: str | None = None
    ca_file: str | None = None


class KubernetesTable(ClusterTable, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Pods by label, the EndpointSlices of a service, or an InferencePool, watched at the API server.

    `pool` names the InferencePool; it states its pods and ports itself. `port` is a number or the name of a
    container's port. `model_label` names the label with the model. `namespace`, `api_server`, `token_file`
    and `ca_file` default to the values of the pod of hetlb.
    """

    resource: Literal["pods", "endpointslices", "inferencepools"] = "pods"
    selector: str = ""
    service: str | None = None
    pool: str | None = None
    port: Port | str = 8000
    scheme: Literal["http", "https"] = "http"
    model: str | None = None
    model_label: str | None = None


class DiscoveryTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sources of instances besides `models`.

    `files` are files or folders of files with `models`, as in a fleet file. `poll_s` is the polling interval
    of files. `ttl_s` is the default lifetime of registrations, 0 for unlimited.
    """

    files: tuple[str, ...] = ()
    dns: tuple[DnsTable | str, ...] = ()
    kubernetes: KubernetesTable | tuple[KubernetesTable, ...] = ()
    poll_s: Positive = 1.0
    ttl_s: NonNegative = 0.0

    @property
    def names(self) -> tuple[DnsTable, ...]:
        """The sources of `dns`."""
        return tuple(DnsTable(name=each) if isinstance(each, str) else each for each in self.dns)

    @property
    def clusters(self) -> tuple[KubernetesTable, ...]:
        """The sources of `kubernetes`."""
        stated = self.kubernetes
        return (stated,) if isinstance(stated, KubernetesTable) else stated


class TracingTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Collector of spans: its address (OTLP over HTTP).

    `service_name` is the key to find them. `sample_ratio` is the share of requests to keep, of clients that
    do not decide themselves.
    """

    otlp_endpoint: str
    service_name: str = "hetlb"
    sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class PickTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The endpoint picker of `hetlb pick`: where gateways reach it (gRPC), and what it tells them.

    With `tls` it speaks TLS. With `client_ca_file` these authorities must have signed a gateway's
    certificate. On an address reachable from other machines it needs both, or `any_gateway`, which admits
    every peer. `fallbacks` is the number of instances named behind the chosen one, for the gateway's own
    retries. `buffer_bytes` is Envoy's `per_connection_buffer_limit_bytes`, the largest body it keeps of a
    streamed request. `objectives` are priorities by the names in `x-gateway-inference-objective`. The higher
    goes first; one below 0 does not wait.
    """

    host: str = "127.0.0.1"
    port: Port = 9002
    tls: TlsTable | None = None
    client_ca_file: str | None = None
    any_gateway: bool = False
    fallbacks: Annotated[int, msgspec.Meta(ge=0, le=16)] = 2
    buffer_bytes: PositiveInt = 8 << 20
    objectives: dict[str, int] = msgspec.field(default_factory=dict)


class SharedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sharing of several processes of one fleet, over Valkey or Redis (`url`, or the variable `url_env`).

    `group` keeps fleets apart that use one server. A process that was silent for `silent_s` is gone.
    """

    url: str | None = None
    url_env: str | None = None
    group: str = "hetlb"
    silent_s: Annotated[float, msgspec.Meta(ge=0.2, le=60)] = 1.0


class FleetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fleet file as written. With `watch` it is read again when it, or a file named in it, changes."""

    version: Literal[1]
    models: tuple[ModelTable, ...]
    listen: Listen | tuple[Listen, ...] = Listen()
    admin: Admin = Admin()
    policy: PolicyTable = PolicyTable()
    queue: QueueTable = QueueTable()
    health: HealthTable = HealthTable()
    scrape: ScrapeTable = ScrapeTable()
    proxy: ProxyTable = ProxyTable()
    tracing: TracingTable | None = None
    pick: PickTable = PickTable()
    shared: SharedTable | None = None
    profiles: dict[str, str] = {}
    discovery: DiscoveryTable | None = None
    watch: bool = True

    @property
    def addresses(self) -> tuple[Listen, ...]:
        """The addresses of the main listener."""
        stated = self.listen
        return (stated,) if isinstance(stated, Listen) else stated

    @property
    def address_keys(self) -> list[str]:
        """The keys of these addresses."""
        count = len(self.addresses)
        return ["listen"] if count == 1 else [f"listen[{number}]" for number in range(count)]
