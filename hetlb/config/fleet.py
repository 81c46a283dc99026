"""Fleet files of `serve` and `simulate`: the tables, and the `Fleet` that they resolve to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from hetlb.config.discovery import DiscoveryTable, LeaseTable, parse_selector, select_profile
from hetlb.config.profile import Profile, load_profile
from hetlb.config.stages import StageGroup, StagesTable, resolve_stages
from hetlb.config.yaml_file import (
    Mistakes,
    NonNegative,
    Port,
    Positive,
    PositiveInt,
    Share,
    did_you_mean,
    load_yaml,
    short,
    with_lines,
)
from hetlb.core.admission import QueueLimits
from hetlb.core.health import HealthParams
from hetlb.core.policies.base import COMBINE_FORMS, PlannedShares, PolicyParams
from hetlb.core.policies.registry import POLICIES
from hetlb.core.predictor import PREDICTORS, LengthDistribution
from hetlb.core.types import Capacity, Connector, InstanceSpec, KvTransfer, Role
from hetlb.errors import ConfigError
from hetlb.image_tokens import NAMED_RULES, FixedTokens, ImageRule, LongestEdge, PixelBounds, Tiles
from hetlb.workload.traces import read_trace

#: vLLM's own defaults: `VLLM_MOONCAKE_BOOTSTRAP_PORT`, `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`.
MOONCAKE_BOOTSTRAP_PORT: Final = 8998
MOONCAKE_LEASE_S: Final = 480.0


class TlsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A PEM certificate (with its chain) and its private key, as paths."""

    cert: str
    key: str


class Listen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Address of the main listener; with `tls` it speaks TLS there and nothing else."""

    host: str = "127.0.0.1"
    port: Port = 8080
    tls: TlsTable | None = None


class Admin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The admin listener. Elsewhere than on loopback it needs a token; with `tls` it speaks TLS alone.

    `registration_networks` are the networks (CIDR) in which instances may be registered.
    """

    host: str = "127.0.0.1"
    port: Port = 8081
    tls: TlsTable | None = None
    token_file: str | None = None
    token_env: str | None = None
    registration: bool = False
    registration_networks: tuple[str, ...] = ()


class SharesTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A type of request in a plan: mean lengths in tokens, its share of all, each instance's share of it."""

    type: str
    share: Positive = 1.0
    input_tokens: Positive
    output_tokens: Positive
    instances: dict[str, NonNegative]
    model: str | None = None


class PolicyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The policy and its parameters.

    `theta` and `combine` form the paper's workload; `predictor` guesses output lengths, from `trace`
    where it needs a data set; `decay_s` is the memory of `peak-ewma`; `seed` makes random draws repeatable;
    `state_file` keeps what was learnt over restarts.
    `shares` are what `planned` holds (written by `hetlb rent`). `adapter_load_s` is the time to load a LoRA
    adapter that is in none of an engine's slots.
    """

    name: str = "hetlb"
    theta: Positive = 2.0
    combine: str = "power"
    predictor: str | None = None
    trace: str | None = None
    decay_s: Positive = 10.0
    seed: int = 0
    state_file: str | None = None
    shares: tuple[SharesTable, ...] = ()
    adapter_load_s: NonNegative = 0.25


class QueueTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The bounded queue in front of the instances.

    `tenant_share` is how much of it one tenant may hold, `tenant_weights` the share of what is served that
    each gets while several wait, by name, 1 for who is not named.
    """

    max_requests: PositiveInt = 16_384
    max_bytes: PositiveInt = 256 << 20
    timeout_s: Positive = 300.0
    no_instance_timeout_s: NonNegative = 30.0
    tenant_share: Share = 1.0
    tenant_weights: dict[str, Positive] = msgspec.field(default_factory=dict)


class HealthTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Return of instances to full load. `slow_start_s` 0: at once."""

    slow_start_s: NonNegative = 30.0


class ScrapeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Intervals and limits of probes and scrapes."""

    interval_s: Positive = 1.0
    timeout_s: Positive = 2.0


#: More processes than this would only take memory from each other.
MOST_WORKERS = 128


#: Names of headers that may be listed under `proxy.forward_headers`: none of those that frame or address a
#: message, belong to one connection, or are made here.
FORWARDED_HEADER = (
    "^(?i:(?!(?:host|content-length|transfer-encoding|connection|keep-alive|te|trailer|upgrade|expect|via"
    "|proxy-.*|http2-settings|accept-encoding|content-encoding|x-request-id|authorization|x-api-key|api-key)$)"
    "[a-z0-9-]{1,64})$"
)


class ProxyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits, timeouts and keys of the data plane. Sizes in bytes.

    `session_header` names a conversation, `tenant_header` whose share of a full fleet a request is of;
    `api_keys_file` lists the clients' keys; `passthrough_authorization` lets a client's own key through to
    the engines. `heartbeat_s` is how often a stream that waits gets a comment, 0 for never. `max_held_bytes`
    bounds all bodies together that are being read. `max_connections` of clients None is half of the process's
    file descriptors: the other half is for engines. `workers` processes share the port. `forward_headers`
    names headers of clients that reach the engines besides those that always do.
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
    max_multipart_bytes: PositiveInt = 64 << 20
    max_held_bytes: PositiveInt = 512 << 20
    min_body_bytes_per_s: NonNegative = 1024.0
    shutdown_grace_s: NonNegative = 120.0
    request_log: bool = True
    request_log_format: Literal["keyvalue", "json"] = "keyvalue"
    session_header: str = "x-session-id"
    tenant_header: str | None = None
    api_keys_file: str | None = None
    passthrough_authorization: bool = False
    forward_headers: tuple[Annotated[str, msgspec.Meta(pattern=FORWARDED_HEADER)], ...] = ()
    heartbeat_s: NonNegative = 0.0
    max_connections: PositiveInt | None = None
    workers: Annotated[int, msgspec.Meta(ge=1, le=MOST_WORKERS)] = 1


class TracingTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Collector of spans: its address (OTLP over HTTP).

    `service_name` is what they are found by; `sample_ratio` is the share that is kept of the requests of
    clients that do not say whether theirs is.
    """

    otlp_endpoint: str
    service_name: str = "hetlb"
    sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class SharedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sharing of several processes of one fleet, over Valkey or Redis (`url`, or the variable `url_env`).

    `group` keeps fleets apart that use one server. `mode`: all serve (`active-active`), or one does and the
    others are ready to (`active-standby`, pickers alone), by a key of that server or a `lease` of Kubernetes.
    A process that was silent for `silent_s` is gone.
    """

    url: str | None = None
    url_env: str | None = None
    group: str = "hetlb"
    mode: Literal["active-active", "active-standby"] = "active-active"
    silent_s: Annotated[float, msgspec.Meta(ge=0.2, le=60)] = 1.0
    lease: LeaseTable | None = None


class PickTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The endpoint picker of `hetlb pick`: where gateways reach it (gRPC), and what it tells them.

    With `tls` it speaks TLS; with `client_ca_file` only to gateways whose certificate those authorities have
    signed. `fallbacks` are named behind the chosen instance, for the gateway's own retries. `buffer_bytes`:
    Envoy's `per_connection_buffer_limit_bytes`, the largest body that it keeps where it streams the request.
    `objectives` are priorities by the names in `x-gateway-inference-objective`: the higher goes first, below
    0 does not wait.
    """

    host: str = "127.0.0.1"
    port: Port = 9002
    tls: TlsTable | None = None
    client_ca_file: str | None = None
    fallbacks: Annotated[int, msgspec.Meta(ge=0, le=16)] = 2
    buffer_bytes: PositiveInt = 8 << 20
    objectives: dict[str, int] = msgspec.field(default_factory=dict)
    shared: SharedTable | None = None


class KvEventsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Source of vLLM's KV events (`--kv-events-config`): ZeroMQ addresses, and the topic."""

    endpoint: str
    topic: str = ""
    replay: str | None = None


class InstanceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server. `name` defaults to the address in `url`.

    `api_key_file` or `api_key_env` say where its key stands; `ca_file` holds the authorities that may have
    signed its certificate, the system's where it is missing. `kv_events` is where it publishes KV events.
    `role` says which phases of a request it takes, `kv_bootstrap` where its Mooncake bootstrap server is.
    `labels` choose its profile under `profiles:` where it names none.
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
    role: Literal["prefill", "decode", "both"] = "both"
    kv_bootstrap: str | None = None


ConnectorName: TypeAlias = Literal["nixl", "mooncake", "shared-storage"]


class KvTransferTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hand-over of KV blocks between instances of a model: the connector of vLLM, and what is known of it.

    `lease_s` is the engines' `kv_lease_duration` (Mooncake: `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`), whole
    seconds in vLLM. The others are the first estimate of a transfer's time.
    """

    connector: ConnectorName
    lease_s: Annotated[float, msgspec.Meta(ge=1)] | None = None
    bytes_per_token: Positive | None = None
    bandwidth_bytes_per_s: Positive | None = None
    latency_s: NonNegative | None = None


class ImageTokensTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rule by which a model's image processor turns pixels into tokens: one of `tokens`, `patch`, `tile`.

    `tokens`: every image alike. `patch`, `merge`: a token for `merge` x `merge` patches of so many pixels a
    side, after a resize to `min_pixels` .. `max_pixels` or to `longest_edge`. `tile`, `tile_tokens`,
    `max_tiles`: square tiles of so many pixels a side, and a thumbnail. `markers` are added per image.
    """

    tokens: PositiveInt | None = None
    patch: PositiveInt | None = None
    merge: PositiveInt = 1
    min_pixels: PositiveInt | None = None
    max_pixels: PositiveInt | None = None
    longest_edge: PositiveInt | None = None
    tile: PositiveInt | None = None
    tile_tokens: PositiveInt | None = None
    max_tiles: Annotated[int, msgspec.Meta(ge=1, le=64)] = 12
    markers: Annotated[int, msgspec.Meta(ge=0, le=64)] = 2


class ModelTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pool: the instances that serve one model; its key is for those without one of their own.

    `stages` are workers of `hetlb stage` that together are one more instance.
    `kv_transfer` lets one instance prefill a prompt and another decode the answer.
    `aliases` are further names for clients. `fallback` is the model that answers while no instance of this
    one takes requests.
    """

    name: str
    instances: tuple[InstanceTable, ...] = ()
    stages: StagesTable | None = None
    aliases: tuple[str, ...] = ()
    fallback: str | None = None
    tokenizer: str | None = None
    image_tokens: str | ImageTokensTable | None = None
    api_key_file: str | None = None
    api_key_env: str | None = None
    kv_transfer: ConnectorName | KvTransferTable | None = None


class FleetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fleet file as written."""

    version: Literal[1]
    models: tuple[ModelTable, ...]
    listen: Listen = Listen()
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


class SecretSource(msgspec.Struct, frozen=True, kw_only=True):
    """Source of a secret: a file or an environment variable. `key` names it in errors."""

    key: str
    file: Path | None = None
    env: str | None = None


class EngineSource(msgspec.Struct, frozen=True, kw_only=True):
    """Sources of the key and the authorities of one instance. `key` names the instance in errors.

    `kv_events` is where it publishes KV events, None where it does not; `kv_bootstrap` the URL of its
    Mooncake bootstrap server.
    """

    key: str
    api_key: SecretSource | None = None
    ca_file: Path | None = None
    kv_events: KvEventsTable | None = None
    kv_bootstrap: str | None = None


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet file resolved: every instance with its profile read, in file order.

    Secrets and certificates are named, not read: only who serves the fleet needs them. `engines` has an
    entry for every instance, `model_keys` one for every model with a key. `written` is the file as it
    stood there, before any flag.
    """

    path: Path | None
    written: FleetFile
    listen: Listen
    admin: Admin
    policy: PolicyTable
    queue: QueueTable
    health: HealthTable
    scrape: ScrapeTable
    proxy: ProxyTable
    tracing: TracingTable | None
    instances: tuple[InstanceSpec, ...]
    profiles: dict[str, Profile]
    tokenizers: dict[str, Path]
    engines: dict[str, EngineSource]
    model_keys: dict[str, SecretSource]
    image_rules: dict[str, ImageRule] = {}
    pick: PickTable = PickTable()
    shared: SharedTable | None = None
    #: Stages by the name of the instance that they are.
    stages: dict[str, StageGroup] = {}

    @property
    def discovery(self) -> DiscoveryTable | None:
        """Sources of instances besides the file."""
        return self.written.discovery

    def resolve_found(self, table: InstanceTable, model: str, cache: dict[Path, Profile]) -> InstanceSpec:
        """An instance that is in no file, with the profile that its labels choose. Raises `InputError`."""
        return resolve_instance(table, model, "", self.base, cache, self.written.profiles)[0]

    @property
    def where(self) -> str:
        """Beginning of an error about this fleet."""
        return f"{self.path}: " if self.path else ""

    @property
    def base(self) -> Path:
        """Folder that paths in the file are relative to."""
        return self.path.parent if self.path else Path()

    @property
    def policy_params(self) -> PolicyParams:
        """The parameters in the scheduler's own type."""
        p = self.policy
        first = self.written.models[0].name if self.written.models else ""
        shares = tuple(
            PlannedShares(
                each.type,
                each.model or first,
                each.input_tokens,
                each.output_tokens,
                each.share,
                tuple(each.instances.items()),
            )
            for each in p.shares
        )
        return PolicyParams(p.theta, p.combine, p.decay_s, shares, p.adapter_load_s)

    @property
    def queue_limits(self) -> QueueLimits:
        """The queue's limits in the scheduler's own type."""
        q = self.queue
        return QueueLimits(
            max_requests=q.max_requests,
            max_bytes=q.max_bytes,
            timeout_s=q.timeout_s,
            no_instance_timeout_s=q.no_instance_timeout_s,
            tenant_share=q.tenant_share,
            tenant_weights=q.tenant_weights,
        )

    @property
    def health_params(self) -> HealthParams:
        """The parameters of health in the scheduler's own type."""
        return HealthParams(slow_start_s=self.health.slow_start_s)

    def output_lengths(self) -> LengthDistribution | None:
        """The output lengths of `policy.trace`, None without one. Raises `TraceError`."""
        if self.policy.trace is None:
            return None
        rows = read_trace(self.base / self.policy.trace)
        return LengthDistribution(row.output_tokens for row in rows)


#: Address of an instance made of stages until its coordinator listens.
STAGES_URL = "http://stages.invalid"

#: Characters between `//` and the path of a URL: they are sent as the Host header.
_NETLOC = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")


def check_url(url: str, where: str) -> str:
    """An engine's base URL without a trailing slash. Raises `ConfigError` naming `where`."""
    shown = re.sub(r"//[^/]*@", "//***@", url)  # a password may stand there
    expected = f"{where}: expected a URL like http://host:8000, got {shown!r}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as caught:
        raise ConfigError(expected) from caught
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(expected)
    if _NETLOC.fullmatch(parts.netloc) is None or parts.path not in ("", "/") or port == 0:
        raise ConfigError(expected)
    if re.search(r"[\x00-\x20\x7f]", url):
        raise ConfigError(expected)
    return url.rstrip("/")


def same_server(one: str, other: str) -> bool:
    """True if two base URLs lead to one address: scheme, host and port, the default port filled in."""
    return _origin(one) == _origin(other)


def _origin(url: str) -> tuple[str, str | None, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _check_endpoint(url: str, where: str) -> None:
    """Raise `ConfigError` unless spans can be posted to `url`."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and _NETLOC.fullmatch(parts.netloc) is not None
        right = right and parts.port != 0 and re.search(r"[\x00-\x20\x7f?#]", url) is None
    except ValueError:
        right = False
    if not right:
        shown = re.sub(r"//[^/]*@", "//***@", url)  # a password may stand there
        raise ConfigError(f"{where}: expected a URL like http://collector:4318, got {shown!r}")


def secret_source(file: str | None, env: str | None, key: str, base: Path) -> SecretSource | None:
    """The source that `{key}_file` or `{key}_env` names, None without either. Raises `ConfigError`."""
    if file is not None and env is not None:
        name = key.rpartition(".")[2]
        raise ConfigError(f"{key}_file: expected either {name}_file or {name}_env, got both")
    if file is None and env is None:
        return None
    return SecretSource(key=key, file=None if file is None else base / file, env=env)


def _engine_source(instance: InstanceTable, url: str, key: str, base: Path) -> EngineSource:
    api_key = secret_source(instance.api_key_file, instance.api_key_env, f"{key}.api_key", base)
    kv_events = _kv_events(instance.kv_events, f"{key}.kv_events")
    bootstrap = instance.kv_bootstrap
    if bootstrap is not None:
        bootstrap = check_url(bootstrap, f"{key}.kv_bootstrap")
    elif url:
        bootstrap = f"http://{_bracketed(urlsplit(url).hostname or '')}:{MOONCAKE_BOOTSTRAP_PORT}"
    if instance.ca_file is None:
        return EngineSource(key=key, api_key=api_key, kv_events=kv_events, kv_bootstrap=bootstrap)
    if not url.startswith("https://"):
        raise ConfigError(f"{key}.ca_file: expected one only where the url begins with https://, got {url!r}")
    return EngineSource(
        key=key,
        api_key=api_key,
        ca_file=base / instance.ca_file,
        kv_events=kv_events,
        kv_bootstrap=bootstrap,
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _kv_transfer(stated: str | KvTransferTable | None) -> KvTransfer | None:
    if stated is None:
        return None
    table = KvTransferTable(connector=stated) if isinstance(stated, str) else stated  # type: ignore[arg-type]
    connector = Connector(table.connector)
    known = {
        name: value
        for name in ("lease_s", "bytes_per_token", "bandwidth_bytes_per_s", "latency_s")
        if (value := getattr(table, name)) is not None
    }
    if connector is Connector.MOONCAKE:
        known.setdefault("lease_s", MOONCAKE_LEASE_S)
    return KvTransfer(connector, **known)


def _with_kv_transfer(
    spec: InstanceSpec,
    role: str,
    kv_transfer: KvTransfer | None,
    stated: KvTransferTable | None,
    profile: Profile | None,
) -> InstanceSpec:
    """The instance with its role; the KV bytes of a token are its profile's unless stated."""
    if kv_transfer is not None and (stated is None or stated.bytes_per_token is None):
        model = None if profile is None else profile.model
        if model is not None and model.kv_bytes_per_token is not None:
            kv_transfer = replace(kv_transfer, bytes_per_token=float(model.kv_bytes_per_token))
    return replace(spec, role=Role(role), kv_transfer=kv_transfer)


def _check_roles(model: ModelTable, key: str) -> None:
    """Raise `ConfigError` unless the roles of a model's instances can serve a request."""
    roles = [instance.role for instance in model.instances]
    if model.kv_transfer is None:
        for i, role in enumerate(roles):
            if role != "both":
                raise ConfigError(
                    f"{key}.instances[{i}].role: expected both where there is no kv_transfer, got {role!r}"
                )
        return
    if all(role == "prefill" for role in roles):
        raise ConfigError(f"{key}.instances: expected one with the role decode or both, got none")


_ZMQ_ADDRESS = re.compile(r"tcp://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}|ipc:///[!-~]+")


def _kv_events(stated: str | KvEventsTable | None, key: str) -> KvEventsTable | None:
    """The source of KV events, checked. Raises `ConfigError` unless the addresses can be connected to."""
    if stated is None:
        return None
    table = KvEventsTable(endpoint=stated) if isinstance(stated, str) else stated
    for name, address in (("", table.endpoint), (".replay", table.replay)):
        if address is not None and _ZMQ_ADDRESS.fullmatch(address) is None:
            raise ConfigError(f"{key}{name}: expected an address like tcp://host:5557, got {short(address)}")
    return table


def check_policy(table: PolicyTable, where: str) -> None:
    """Raise `ConfigError` unless policy, combine form and predictor are names that exist."""
    for key, value, names in (
        ("name", table.name, tuple(POLICIES)),
        ("combine", table.combine, tuple(COMBINE_FORMS)),
        ("predictor", table.predictor, PREDICTORS),
    ):
        if value is not None and value not in names:
            hint = did_you_mean(value, names)
            raise ConfigError(f"{where}policy.{key}: expected one of {', '.join(names)}, got {value!r}{hint}")


def image_rule(stated: str | ImageTokensTable, key: str) -> ImageRule:
    """The rule that a fleet file states, by name or in numbers. Raises `ConfigError`."""
    if isinstance(stated, str):
        if stated not in NAMED_RULES:
            raise ConfigError(f"{key}: expected one of {', '.join(NAMED_RULES)}, got {short(stated)}")
        return NAMED_RULES[stated]
    kinds = [name for name in ("tokens", "patch", "tile") if getattr(stated, name) is not None]
    if len(kinds) != 1:
        raise ConfigError(f"{key}: expected one of tokens, patch, tile, got {' and '.join(kinds) or 'none'}")
    if stated.tokens is not None:
        return FixedTokens(stated.tokens)
    if stated.tile is not None:
        if stated.tile_tokens is None:
            raise ConfigError(f"{key}.tile_tokens: expected a value, but the key is missing")
        return Tiles(stated.tile, stated.tile_tokens, stated.max_tiles, stated.markers)
    assert stated.patch is not None
    if stated.longest_edge is not None:
        if stated.min_pixels is not None or stated.max_pixels is not None:
            raise ConfigError(f"{key}.longest_edge: expected it without min_pixels and max_pixels")
        return LongestEdge(stated.patch, stated.merge, stated.longest_edge)
    side = stated.patch * stated.merge
    least = side * side if stated.min_pixels is None else stated.min_pixels
    if stated.max_pixels is None or stated.max_pixels < max(least, side * side):
        raise ConfigError(
            f"{key}.max_pixels: expected at least {max(least, side * side)}, min_pixels or a merged patch, "
            f"got {stated.max_pixels or 'none'}"
        )
    return PixelBounds(stated.patch, stated.merge, least, stated.max_pixels, stated.markers)


def resolve_instance(
    instance: InstanceTable,
    model: str,
    key: str,
    base: Path,
    cache: dict[Path, Profile],
    profiles: Mapping[str, str] = MappingProxyType({}),
) -> tuple[InstanceSpec, Profile | None]:
    """Check one instance and read its profile, once per file. Raises `ConfigError` or `ProfileError`.

    `key` is how errors name the table, with its dot: `models[0].instances[1].`, or nothing. `profiles` are
    those by label, for an instance that names none.
    """
    url = "" if instance.url is None else check_url(instance.url, f"{key}url")
    name = instance.name or urlsplit(url).netloc
    if not name:
        raise ConfigError(f"{key}name: expected a name, but neither name nor url is given")
    if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,128}", name):
        raise ConfigError(f"{key}name: expected letters, digits and . _ : - (128 at most), got {short(name)}")
    profile: Profile | None = None
    named = instance.profile or select_profile(instance.labels, profiles)
    if named is not None:
        path = base / named
        if path not in cache:
            if not path.is_file():
                raise ConfigError(
                    f"{key}profile: expected the path of a latency profile, got {named!r}: no such file"
                )
            cache[path] = load_profile(path)
        profile = cache[path]
    spec = InstanceSpec(
        name=name,
        model=model,
        url=url,
        weight=instance.weight,
        latency=profile.latency if profile else None,
        capacity=profile.capacity if profile else Capacity(),
    )
    return spec, profile


def resolve_fleet(file: FleetFile, path: Path | None) -> Fleet:
    """Check a fleet as a whole and read its profiles. Raises `ConfigError`, of all mistakes together."""
    where = f"{path}: " if path else ""
    base = path.parent if path else Path()
    mistakes = Mistakes()
    with mistakes.here():
        check_policy(file.policy, where)
    for tenant, weight in file.queue.tenant_weights.items():
        with mistakes.here():
            if not math.isfinite(weight):
                raise ConfigError(
                    f"{where}queue.tenant_weights.{tenant}: expected a finite number, got {weight}"
                )
    with mistakes.here():
        if file.tracing is not None:
            _check_endpoint(file.tracing.otlp_endpoint, f"{where}tracing.otlp_endpoint")
    with mistakes.here():
        secret_source(file.admin.token_file, file.admin.token_env, f"{where}admin.token", base)
    with mistakes.here():
        if not file.models and file.discovery is None:
            raise ConfigError(f"{where}models: expected at least one model, got none")
    for text, profile in file.profiles.items():
        with mistakes.here():
            parse_selector(text, f"{where}profiles")
            if not (base / profile).is_file():
                raise ConfigError(
                    f"{where}profiles.{text}: expected the path of a latency profile, got {profile!r}: "
                    "no such file"
                )
    resolved = _Resolved(base, mistakes, file)
    for m, model in enumerate(file.models):
        resolved.add_model(model, f"{where}models[{m}]")
    with mistakes.here():
        _check_names(file, where)
    for s, shares in enumerate(file.policy.shares):
        for name in shares.instances:
            with mistakes.here():
                if not any(spec.name == name for spec in resolved.specs):
                    raise ConfigError(
                        f"{where}policy.shares[{s}].instances: expected names of instances, got {name!r}"
                    )
    if mistakes.found:
        raise with_lines(path, mistakes.found) if path else mistakes.found[0]
    return Fleet(
        path=path,
        written=file,
        listen=file.listen,
        admin=file.admin,
        policy=file.policy,
        queue=file.queue,
        health=file.health,
        scrape=file.scrape,
        tracing=file.tracing,
        proxy=file.proxy,
        pick=file.pick,
        shared=file.shared,
        instances=tuple(resolved.specs),
        profiles=resolved.profiles,
        tokenizers=resolved.tokenizers,
        image_rules=resolved.image_rules,
        stages=resolved.stages,
        engines=resolved.engines,
        model_keys=resolved.model_keys,
    )


def _check_names(file: FleetFile, where: str) -> None:
    """Raise `ConfigError` unless aliases are names of their own and fallbacks names of other models."""
    names = {model.name for model in file.models}
    seen: set[str] = set()
    for m, model in enumerate(file.models):
        for alias in model.aliases:
            if alias in names or alias in seen:
                raise ConfigError(
                    f"{where}models[{m}].aliases: expected names used once, got {alias!r} again"
                )
            seen.add(alias)
        if model.fallback is not None and (model.fallback == model.name or model.fallback not in names):
            raise ConfigError(
                f"{where}models[{m}].fallback: expected another model of this file, got {model.fallback!r}"
                f"{did_you_mean(model.fallback, names - {model.name})}"
            )


class _Resolved:
    """The models of a file, resolved one after the other."""

    def __init__(self, base: Path, mistakes: Mistakes, file: FleetFile) -> None:
        self._base = base
        self._file = file
        self._mistakes = mistakes
        self._models: set[str] = set()
        self._cache: dict[Path, Profile] = {}
        self.specs: list[InstanceSpec] = []
        self.profiles: dict[str, Profile] = {}
        self.tokenizers: dict[str, Path] = {}
        self.image_rules: dict[str, ImageRule] = {}
        self.stages: dict[str, StageGroup] = {}
        self.engines: dict[str, EngineSource] = {}
        self.model_keys: dict[str, SecretSource] = {}

    def add_model(self, model: ModelTable, key: str) -> None:
        """Resolve one model and its instances; `key` is how errors name it."""
        mistakes, base = self._mistakes, self._base
        with mistakes.here():
            if model.name in self._models:
                raise ConfigError(f"{key}.name: expected a name used once, got {model.name!r} again")
            self._models.add(model.name)
            if not model.instances and model.stages is None and self._file.discovery is None:
                raise ConfigError(f"{key}.instances: expected at least one instance, got none")
        if model.tokenizer is not None:
            self.tokenizers[model.name] = base / model.tokenizer
        with mistakes.here():
            if model.image_tokens is not None:
                self.image_rules[model.name] = image_rule(model.image_tokens, f"{key}.image_tokens")
        with mistakes.here():
            if model_key := secret_source(model.api_key_file, model.api_key_env, f"{key}.api_key", base):
                self.model_keys[model.name] = model_key
        with mistakes.here():
            _check_roles(model, key)
        for i, instance in enumerate(model.instances):
            with mistakes.here():
                self._add_instance(instance, model, f"{key}.instances[{i}]")
        if model.stages is not None:
            with mistakes.here():
                self._add_stages(model.stages, model.name, f"{key}.stages")

    def _add_stages(self, table: StagesTable, model: str, key: str) -> None:
        group = resolve_stages(table, model, key, self._base)
        instance = InstanceTable(name=group.name, url=STAGES_URL)
        spec, _ = resolve_instance(instance, model, f"{key}.", self._base, self._cache)
        if any(other.name == spec.name for other in self.specs):
            raise ConfigError(f"{key}.name: expected a name used once in the fleet, got {spec.name!r} again")
        self.specs.append(spec)
        self.engines[spec.name] = EngineSource(key=key)
        self.stages[spec.name] = group

    def _add_instance(self, instance: InstanceTable, model: ModelTable, key: str) -> None:
        spec, profile = resolve_instance(
            instance, model.name, f"{key}.", self._base, self._cache, self._file.profiles
        )
        stated = model.kv_transfer if isinstance(model.kv_transfer, KvTransferTable) else None
        spec = _with_kv_transfer(spec, instance.role, _kv_transfer(model.kv_transfer), stated, profile)
        for other in self.specs:
            if other.name == spec.name:
                raise ConfigError(
                    f"{key}.name: expected a name used once in the fleet, got {spec.name!r} again"
                )
            if spec.url and same_server(other.url, spec.url):
                raise ConfigError(
                    f"{key}.url: expected an address used once in the fleet, got {spec.url!r} again: "
                    f"{other.name} has it"
                )
        if profile is not None:
            self.profiles[spec.name] = profile
        self.specs.append(spec)
        self.engines[spec.name] = _engine_source(instance, spec.url, key, self._base)


def load_fleet(path: Path) -> Fleet:
    """Read a fleet file and every profile it names. Raises `ConfigError` or `ProfileError`."""
    return resolve_fleet(load_yaml(path, FleetFile, ConfigError), path)


def fleet_from_urls(urls: list[str]) -> Fleet:
    """A fleet without a file: what the engines serve, and how fast, is learnt from them."""
    instances = []
    seen: set[str] = set()
    for url in urls:
        clean = check_url(url, "--instance")
        name = urlsplit(clean).netloc
        if name in seen:
            raise ConfigError(f"--instance: expected every URL once, got {url!r} again")
        seen.add(name)
        instances.append(InstanceSpec(name=name, model="", url=clean))
    defaults = FleetFile(version=1, models=())
    return Fleet(
        path=None,
        written=defaults,
        listen=defaults.listen,
        admin=defaults.admin,
        policy=defaults.policy,
        queue=defaults.queue,
        health=defaults.health,
        scrape=defaults.scrape,
        tracing=defaults.tracing,
        proxy=defaults.proxy,
        instances=tuple(instances),
        profiles={},
        tokenizers={},
        engines={spec.name: EngineSource(key=f"--instance {spec.url}") for spec in instances},
        model_keys={},
    )
