"""Files to frozen objects: latency profiles and fleet files, read once and then only read.

Promise: whatever is wrong in a file comes out as one `InputError` line that names the file, the key,
the value and what was expected. Unknown and repeated keys are errors. A number is a number however it
is written (`8.03e9`, `5e-8`). Paths inside a file are relative to that file.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec
import yaml

from hetlb.core.admission import QueueLimits
from hetlb.core.health import HealthParams
from hetlb.core.latency import DecodeTable, LatencyModel, MixedTerm, PnormPrefill, PrefillGrid
from hetlb.core.policies import COMBINE_FORMS, POLICIES, PolicyParams
from hetlb.core.policy import PlannedShares
from hetlb.core.predictor import PREDICTORS, LengthDistribution
from hetlb.core.types import Capacity, InstanceSpec
from hetlb.errors import ConfigError, InputError, ProfileError
from hetlb.image_tokens import NAMED_RULES, FixedTokens, ImageRule, LongestEdge, PixelBounds, Tiles
from hetlb.plan.tp_search import Machine, PlanModel
from hetlb.workload.traces import read_trace

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

_T = TypeVar("_T")


# --- reading YAML ------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's floats (PyYAML reads `5e-8` as text) and no repeated keys."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)
             |[-+]?(?:[0-9][0-9_]*)\.[0-9_]*
             |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
             |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    loader.flatten_mapping(node)
    seen: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int):
            raise yaml.MarkedYAMLError(problem="expected a plain key", problem_mark=key_node.start_mark)
        key = str(key)
        if key in seen:
            raise yaml.MarkedYAMLError(
                problem=f"the key {key!r} stands here twice", problem_mark=key_node.start_mark
            )
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def _read_text(path: Path, error: type[InputError]) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as caught:
        raise error(f"{path}: expected a readable file: {os.strerror(caught.errno or 0)}") from caught
    except UnicodeDecodeError as caught:
        raise error(f"{path}: expected UTF-8 text, got byte {caught.object[caught.start]:#04x}") from caught


_AT = re.compile(r" - at `\$(?P<path>[^`]*)`$")


def _value_at(raw: Any, path: str) -> Any:
    """The value that msgspec's `.a[0].b` points at, or a marker where it cannot be followed."""
    for name, index in re.findall(r"\.([^.\[\]]+)|\[([^\]]*)\]", path):
        try:
            raw = raw[name] if name else raw[int(index)]
        except (KeyError, IndexError, TypeError, ValueError):
            return ...
    return raw


#: msgspec's names of types in the words of someone who writes YAML.
_PLAIN_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping of keys",
    "null": "nothing",
}


def _keys_at(kind: Any, path: str) -> tuple[str, ...]:
    """The keys that the table at `path` of a `kind` may have."""
    for name, _ in re.findall(r"\.([^.\[\]]+)|\[([^\]]*)\]", path):
        if name:
            kind = get_type_hints(kind)[name]
        for inner in get_args(kind):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                kind = inner
    fields: tuple[str, ...] = kind.__struct_fields__
    return fields


def explain_validation_error(caught: msgspec.ValidationError, raw: Any, kind: Any) -> str:
    """One `key: expected …, got …` phrase from msgspec's message and the data it complains about."""
    text = str(caught)
    match = _AT.search(text)
    path = match["path"].lstrip(".") if match else ""
    message = text[: match.start()] if match else text
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", message):
        key = f"{path}.{unknown[1]}" if path else unknown[1]
        keys = ", ".join(_keys_at(kind, match["path"] if match else ""))
        return f"{key}: unknown key, expected one of {keys}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        key = f"{path}.{missing[1]}" if path else missing[1]
        return f"{key}: expected a value, but the key is missing"
    value = _value_at(raw, match["path"]) if match else raw
    if message.startswith("Invalid enum value"):
        versions = "1 or 2" if kind is Profile else "1, the only version there is"
        return f"{path}: expected {versions}, got {_short(value)}"
    expected = re.sub(r", got `.*`$", "", message)
    expected = re.sub(r"`(\w+)( \| \w+)*`", lambda m: _PLAIN_WORDS.get(m[1], m[1]), expected)
    expected = expected[:1].lower() + expected[1:]
    got = "" if value is ... else f", got {_short(value)}"
    return f"{path or 'the file'}: {expected}{got}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def convert(raw: Any, kind: type[_T]) -> _T:
    """Plain data as a `kind`. Raises `ConfigError` naming key, value and what was expected."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as caught:
        raise ConfigError(explain_validation_error(caught, raw, kind)) from caught


def _parse_yaml(path: Path, error: type[InputError]) -> Any:
    text = _read_text(path, error)
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as caught:
        mark = caught.problem_mark or caught.context_mark
        where = f" line {mark.line + 1}:" if mark else ""
        raise error(f"{path}:{where} expected valid YAML: {caught.problem or caught.context}") from caught
    except (yaml.YAMLError, ValueError, RecursionError) as caught:
        line = str(caught).splitlines()[0] if str(caught) else type(caught).__name__
        raise error(f"{path}: expected valid YAML: {line}") from caught


def load_yaml(path: Path, kind: type[_T], error: type[InputError]) -> _T:
    """Read `path` as a `kind`. Raises `error` with one line on anything that is not as expected."""
    raw = _parse_yaml(path, error)
    if not isinstance(raw, dict):
        raise error(f"{path}: the file: expected a mapping of keys, got {_short(raw)}")
    try:
        return convert(raw, kind)
    except ConfigError as caught:
        raise error(f"{path}: {caught}") from caught


# --- latency profiles --------------------------------------------------------------------------------


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the profile was measured on. `memory_bytes` is of one GPU."""

    gpu: str
    gpus: PositiveInt = 1
    memory_bytes: PositiveInt | None = None


class ModelInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model served. `layers` and `attention_heads` are of the whole model, not of one GPU."""

    name: str
    kv_bytes_per_token: PositiveInt | None = None
    layers: PositiveInt | None = None
    attention_heads: PositiveInt | None = None


class EngineInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine and its limits, in vLLM's own spellings."""

    name: str = "vllm"
    version: str | None = None
    tensor_parallel_size: PositiveInt | None = None
    kv_cache_tokens: PositiveInt | None = None
    block_size: PositiveInt | None = None
    max_num_seqs: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    max_model_len: PositiveInt | None = None
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None

    def schedules_asynchronously(self, gpu: str | None) -> bool | None:
        """`async_scheduling`, or the default of vLLM: on from 0.14 on, but for CPUs. None: not known."""
        if self.async_scheduling is not None:
            return self.async_scheduling
        found = re.match(r"(\d+)\.(\d+)", self.version or "")
        if self.name != "vllm" or found is None:
            return None
        on_cpu = "cpu" in (self.version or "").lower() or (gpu or "").lower().startswith("cpu")
        return (int(found[1]), int(found[2])) >= (0, 14) and not on_cpu


class PrefillCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """k1*B*I + k2*B + k3*I + k4, seconds."""

    k1: float
    k2: float
    k3: float
    k4: float


class DecodeCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """k5*B*c + k6*B + k7*c + k8, seconds of one step."""

    k5: float
    k6: float
    k7: float
    k8: float


class PrefillGridTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """log(measured / p-norm form) at the points of a grid, one row per batch, one column per length."""

    batches: tuple[PositiveInt, ...]
    lengths: tuple[PositiveInt, ...]
    log_ratio: tuple[tuple[float, ...], ...]


class BetterPrefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """(floor_s^p + (token_s*B*I)^p)^(1/p) + attention_s*B*I^2, times the grid's factor where there is one.

    Dense work (B*I) is done in whole tiles of `tile` tokens.
    """

    floor_s: NonNegative
    token_s: Positive
    attention_s: NonNegative
    p: Annotated[float, msgspec.Meta(ge=1)]
    tile: PositiveInt | None = None
    grid: PrefillGridTable | None = None

    @property
    def form(self) -> PnormPrefill:
        """The form in the latency model's own type. Raises `ValueError`."""
        g = self.grid
        grid = PrefillGrid(g.batches, g.lengths, g.log_ratio) if g is not None else None
        return PnormPrefill(self.floor_s, self.token_s, self.attention_s, self.p, grid, self.tile or 1)


class BetterDecode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """token_s*C + context_s*C/B + seconds(B), C cached tokens in all; `seconds` stand for `batches`."""

    token_s: NonNegative
    context_s: NonNegative
    batches: tuple[PositiveInt, ...]
    seconds: tuple[Positive, ...]


class MixedSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds that D decodes over C cached tokens add to a pass over P prompt tokens.

    sequence_s*D + pair_s*D*P + max(token_s*C, context_s*C/D)
    """

    sequence_s: NonNegative
    pair_s: NonNegative
    token_s: NonNegative
    context_s: NonNegative


class HostTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is not in the points: the host's share of every iteration, and what a server adds to a request."""

    iteration_s: NonNegative = 0.0
    request_s: NonNegative = 0.0


class PhaseReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Held-out relative errors of one phase in one form; `worst` is where the largest one is."""

    form: str
    mean_error: NonNegative
    p95_error: NonNegative
    max_error: NonNegative
    points: PositiveInt
    worst: dict[Literal["batch", "length", "prefill_tokens"], PositiveInt] | None = None


class FitReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Relative errors of the fit, on points held out of it where hetlb made it.

    The four figures are over both phases; `prefill` and `decode` are each phase in the form that is used,
    `prefill_paper` and `decode_paper` are k1..k8 where that form is a better one.
    """

    mean_error: NonNegative
    p95_error: NonNegative
    max_error: NonNegative
    points: PositiveInt
    prefill: PhaseReport | None = None
    prefill_paper: PhaseReport | None = None
    decode: PhaseReport | None = None
    decode_paper: PhaseReport | None = None
    mixed: PhaseReport | None = None


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the points came from. `measured` is false for estimates that no hardware has confirmed."""

    kind: str
    measured: bool = True
    name: str | None = None
    system: str | None = None
    licence: str | None = None
    attribution: str | None = None
    note: str | None = None


class RawGrid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The points that were fitted: rows of batch, length, seconds; of mixed steps prefill_tokens first.

    `prefill_passes`, one number per row of `prefill`, is how many forward passes each took where the
    engine split them (missing: one each).
    """

    prefill: tuple[tuple[PositiveInt, PositiveInt, Positive], ...] = ()
    decode: tuple[tuple[PositiveInt, PositiveInt, Positive], ...] = ()
    prefill_passes: tuple[PositiveInt, ...] | None = None
    mixed: tuple[tuple[PositiveInt, PositiveInt, PositiveInt, Positive], ...] = ()


#: Sections that only version 2 has.
_SECOND_VERSION = ("better_decode", "mixed", "host", "assumed")


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A latency profile: eight constants of one model on one engine, and what that engine can hold.

    All else is what `hetlb profile` adds; any of it may be missing. `assumed` names what no point shows.
    """

    version: Literal[1, 2]
    name: str
    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    hardware: Hardware | None = None
    model: ModelInfo | None = None
    engine: EngineInfo = EngineInfo()
    fit: FitReport | None = None
    better_prefill: BetterPrefill | None = None
    better_decode: BetterDecode | None = None
    mixed: MixedSteps | None = None
    host: HostTime | None = None
    assumed: tuple[str, ...] = ()
    source: Source | None = None
    grid: RawGrid | None = None

    @property
    def latency(self) -> LatencyModel:
        """The latency model of these constants. Raises `ValueError`."""
        p, d, decode, mixed = self.prefill, self.decode, self.better_decode, self.mixed
        return LatencyModel(
            *(p.k1, p.k2, p.k3, p.k4, d.k5, d.k6, d.k7, d.k8),
            better_prefill=self.better_prefill.form if self.better_prefill is not None else None,
            better_decode=None
            if decode is None
            else DecodeTable(decode.token_s, decode.context_s, decode.batches, decode.seconds),
            mixed=None
            if mixed is None
            else MixedTerm(mixed.sequence_s, mixed.pair_s, mixed.token_s, mixed.context_s),
            host_s=self.host.iteration_s if self.host is not None else 0.0,
        )

    @property
    def lacks(self) -> tuple[str, ...]:
        """What the profile does not hold, and what is taken instead; one phrase each."""
        found = []
        if self.better_prefill is None or self.better_prefill.tile is None:
            found.append("tiles: time is taken to be proportional to tokens")
        if self.better_decode is None:
            found.append("a decode step that bends: k5..k8 are taken, a straight line in the batch")
        if self.mixed is None:
            found.append(
                "mixed steps: the attention of decodes beside a prompt is taken to be 1.5 times as long"
            )
        if self.host is None:
            found.append("host time: none is taken, per iteration and per request")
        return tuple(found)

    @property
    def capacity(self) -> Capacity:
        """What the engine can hold, None where the profile does not say."""
        e = self.engine
        return Capacity(
            kv_cache_tokens=e.kv_cache_tokens,
            block_size=e.block_size,
            max_num_seqs=e.max_num_seqs,
            max_num_batched_tokens=e.max_num_batched_tokens,
            max_model_len=e.max_model_len,
            kv_tokens_per_request=e.kv_cache_tokens,
            enable_prefix_caching=e.enable_prefix_caching,
            async_scheduling=e.schedules_asynchronously(self.hardware.gpu if self.hardware else None),
        )


#: Where a profile must predict positive times: both formulas are bilinear, so the corners suffice.
_CORNERS = ((1, 1), (256, 1), (1, 32768), (256, 32768))


def load_profile(path: Path) -> Profile:
    """Read a latency profile. Raises `ProfileError`."""
    profile = load_yaml(path, Profile, ProfileError)
    if profile.version == 1:
        for key in _SECOND_VERSION:
            if getattr(profile, key):
                raise ProfileError(f"{path}: {key}: expected version: 2 of the file for this key, got 1")
    for section in ("prefill", "decode"):
        table = getattr(profile, section)
        for key in table.__struct_fields__:
            value = getattr(table, key)
            if not math.isfinite(value):
                raise ProfileError(f"{path}: {section}.{key}: expected a finite number, got {value}")
    try:
        latency = profile.latency
    except ValueError as caught:
        raise ProfileError(f"{path}: better_prefill, better_decode or mixed: {caught}") from caught
    for batch, length in _CORNERS:
        for section, seconds in (
            ("prefill", latency.paper_prefill_s(batch, length)),
            ("decode", latency.paper_step_s(batch, length)),
        ):
            if seconds <= 0:
                raise ProfileError(
                    f"{path}: {section}: expected constants that predict a positive time, "
                    f"got {seconds:.3g} s for a batch of {batch} at length {length}"
                )
    return profile


# --- fleet files -------------------------------------------------------------------------------------


class TlsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A PEM certificate (with its chain) and its private key, as paths."""

    cert: str
    key: str


class Listen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the proxy accepts requests; with `tls` it speaks TLS there and nothing else."""

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
    """Which policy, and its parameters.

    `theta` and `combine` form the paper's workload; `predictor` guesses output lengths, from `trace`
    where it needs a data set; `decay_s` is the memory of `peak-ewma`; `seed` makes random draws repeatable;
    `state_file` keeps what was learnt over restarts.
    `shares` are what `planned` holds (written by `hetlb rent`).
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


class QueueTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The bounded queue in front of the instances.

    `tenant_share` is how much of it one tenant may hold, `tenant_weights` the share of what is served that
    each gets while several wait, by name, 1 for who is not named.
    """

    max_requests: PositiveInt = 16_384
    max_bytes: PositiveInt = 256 << 20
    timeout_s: Positive = 300.0
    no_instance_timeout_s: NonNegative = 30.0
    tenant_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    tenant_weights: dict[str, Positive] = msgspec.field(default_factory=dict)


class HealthTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How instances that come back are trusted again. `slow_start_s` 0: at once."""

    slow_start_s: NonNegative = 30.0


class ScrapeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How engines are watched."""

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
    max_body_bytes: PositiveInt = 8 << 20
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
    """Where spans of requests go: a collector's address (OTLP over HTTP).

    `service_name` is what they are found by; `sample_ratio` is the share that is kept of the requests of
    clients that do not say whether theirs is.
    """

    otlp_endpoint: str
    service_name: str = "hetlb"
    sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class KvEventsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where vLLM publishes its KV events (`--kv-events-config`): ZeroMQ addresses, and the topic."""

    endpoint: str
    topic: str = ""
    replay: str | None = None


class InstanceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server. `name` defaults to the address in `url`.

    `api_key_file` or `api_key_env` say where its key stands; `ca_file` holds the authorities that may have
    signed its certificate, the system's where it is missing. `kv_events` is where it publishes KV events.
    """

    name: str | None = None
    url: str | None = None
    profile: str | None = None
    weight: Positive = 1.0
    api_key_file: str | None = None
    api_key_env: str | None = None
    ca_file: str | None = None
    kv_events: str | KvEventsTable | None = None


class ImageTokensTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a model's image processor turns pixels into tokens: one of `tokens`, `patch`, `tile`.

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
    """One pool: the instances that serve one model; its key is for those without one of their own."""

    name: str
    instances: tuple[InstanceTable, ...]
    tokenizer: str | None = None
    image_tokens: str | ImageTokensTable | None = None
    api_key_file: str | None = None
    api_key_env: str | None = None


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


class SecretSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a secret stands: a file or an environment variable. `key` names it in errors."""

    key: str
    file: Path | None = None
    env: str | None = None


class EngineSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the key and the authorities of one instance stand. `key` names the instance in errors.

    `kv_events` is where it publishes KV events, None where it does not.
    """

    key: str
    api_key: SecretSource | None = None
    ca_file: Path | None = None
    kv_events: KvEventsTable | None = None


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

    @property
    def where(self) -> str:
        """How an error about this fleet begins."""
        return f"{self.path}: " if self.path else ""

    @property
    def base(self) -> Path:
        """What paths in the file are relative to."""
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
        return PolicyParams(theta=p.theta, combine=p.combine, decay_s=p.decay_s, shares=shares)

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


#: What may stand between `//` and the path: it is sent as the Host header.
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
    """Where the secret of `{key}_file` or `{key}_env` stands, None without either. Raises `ConfigError`."""
    if file is not None and env is not None:
        name = key.rpartition(".")[2]
        raise ConfigError(f"{key}_file: expected either {name}_file or {name}_env, got both")
    if file is None and env is None:
        return None
    return SecretSource(key=key, file=None if file is None else base / file, env=env)


def _engine_source(instance: InstanceTable, url: str, key: str, base: Path) -> EngineSource:
    api_key = secret_source(instance.api_key_file, instance.api_key_env, f"{key}.api_key", base)
    kv_events = _kv_events(instance.kv_events, f"{key}.kv_events")
    if instance.ca_file is None:
        return EngineSource(key=key, api_key=api_key, kv_events=kv_events)
    if not url.startswith("https://"):
        raise ConfigError(f"{key}.ca_file: expected one only where the url begins with https://, got {url!r}")
    return EngineSource(key=key, api_key=api_key, ca_file=base / instance.ca_file, kv_events=kv_events)


_ZMQ_ADDRESS = re.compile(r"tcp://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}|ipc:///[!-~]+")


def _kv_events(stated: str | KvEventsTable | None, key: str) -> KvEventsTable | None:
    """Where KV events are read. Raises `ConfigError` unless the addresses can be connected to."""
    if stated is None:
        return None
    table = KvEventsTable(endpoint=stated) if isinstance(stated, str) else stated
    for name, address in (("", table.endpoint), (".replay", table.replay)):
        if address is not None and _ZMQ_ADDRESS.fullmatch(address) is None:
            raise ConfigError(f"{key}{name}: expected an address like tcp://host:5557, got {_short(address)}")
    return table


def check_policy(table: PolicyTable, where: str) -> None:
    """Raise `ConfigError` unless policy, combine form and predictor are names that exist."""
    for key, value, names in (
        ("name", table.name, tuple(POLICIES)),
        ("combine", table.combine, tuple(COMBINE_FORMS)),
        ("predictor", table.predictor, PREDICTORS),
    ):
        if value is not None and value not in names:
            raise ConfigError(f"{where}policy.{key}: expected one of {', '.join(names)}, got {value!r}")


def image_rule(stated: str | ImageTokensTable, key: str) -> ImageRule:
    """The rule that a fleet file states, by name or in numbers. Raises `ConfigError`."""
    if isinstance(stated, str):
        if stated not in NAMED_RULES:
            raise ConfigError(f"{key}: expected one of {', '.join(NAMED_RULES)}, got {_short(stated)}")
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
    instance: InstanceTable, model: str, key: str, base: Path, cache: dict[Path, Profile]
) -> tuple[InstanceSpec, Profile | None]:
    """Check one instance and read its profile, once per file. Raises `ConfigError` or `ProfileError`.

    `key` is how errors name the table, with its dot: `models[0].instances[1].`, or nothing.
    """
    url = "" if instance.url is None else check_url(instance.url, f"{key}url")
    name = instance.name or urlsplit(url).netloc
    if not name:
        raise ConfigError(f"{key}name: expected a name, but neither name nor url is given")
    if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,128}", name):
        raise ConfigError(
            f"{key}name: expected letters, digits and . _ : - (128 at most), got {_short(name)}"
        )
    profile: Profile | None = None
    if instance.profile is not None:
        path = base / instance.profile
        if path not in cache:
            if not path.is_file():
                raise ConfigError(
                    f"{key}profile: expected the path of a latency profile, "
                    f"got {instance.profile!r}: no such file"
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
    """Check a fleet as a whole and read its profiles. Raises `ConfigError` or `ProfileError`."""
    where = f"{path}: " if path else ""
    base = path.parent if path else Path()
    check_policy(file.policy, where)
    for tenant, weight in file.queue.tenant_weights.items():
        if not math.isfinite(weight):
            raise ConfigError(f"{where}queue.tenant_weights.{tenant}: expected a finite number, got {weight}")
    if file.tracing is not None:
        _check_endpoint(file.tracing.otlp_endpoint, f"{where}tracing.otlp_endpoint")
    secret_source(file.admin.token_file, file.admin.token_env, f"{where}admin.token", base)
    if not file.models:
        raise ConfigError(f"{where}models: expected at least one model, got none")
    seen_models: set[str] = set()
    specs: list[InstanceSpec] = []
    profiles: dict[str, Profile] = {}
    cache: dict[Path, Profile] = {}
    tokenizers: dict[str, Path] = {}
    image_rules: dict[str, ImageRule] = {}
    engines: dict[str, EngineSource] = {}
    model_keys: dict[str, SecretSource] = {}
    for m, model in enumerate(file.models):
        key = f"{where}models[{m}]"
        if model.name in seen_models:
            raise ConfigError(f"{key}.name: expected a name used once, got {model.name!r} again")
        seen_models.add(model.name)
        if not model.instances:
            raise ConfigError(f"{key}.instances: expected at least one instance, got none")
        if model.tokenizer is not None:
            tokenizers[model.name] = base / model.tokenizer
        if model.image_tokens is not None:
            image_rules[model.name] = image_rule(model.image_tokens, f"{key}.image_tokens")
        if model_key := secret_source(model.api_key_file, model.api_key_env, f"{key}.api_key", base):
            model_keys[model.name] = model_key
        for i, instance in enumerate(model.instances):
            ikey = f"{key}.instances[{i}]"
            spec, profile = resolve_instance(instance, model.name, f"{ikey}.", base, cache)
            if any(other.name == spec.name for other in specs):
                raise ConfigError(
                    f"{ikey}.name: expected a name used once in the fleet, got {spec.name!r} again"
                )
            if profile is not None:
                profiles[spec.name] = profile
            specs.append(spec)
            engines[spec.name] = _engine_source(instance, spec.url, ikey, base)
    for s, shares in enumerate(file.policy.shares):
        for name in shares.instances:
            if not any(spec.name == name for spec in specs):
                raise ConfigError(
                    f"{where}policy.shares[{s}].instances: expected names of instances, got {name!r}"
                )
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
        instances=tuple(specs),
        profiles=profiles,
        tokenizers=tokenizers,
        image_rules=image_rules,
        engines=engines,
        model_keys=model_keys,
    )


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


# --- keys of clients ---------------------------------------------------------------------------------


class ApiKeyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One key of a client: `name` for the log, the SHA-256 of the key in hex, the models it is for."""

    name: str
    sha256: Any
    models: tuple[str, ...] | None = None


def load_api_keys(path: Path) -> tuple[ApiKeyTable, ...]:
    """Read the keys of clients. Raises `ConfigError`, which never shows what stands in place of a hash."""
    raw = _parse_yaml(path, ConfigError)
    if not isinstance(raw, list) or not raw or not all(isinstance(entry, dict) for entry in raw):
        raise ConfigError(f"{path}: the file: expected a list of {{name, sha256, models}}, at least one")
    try:
        keys = convert(raw, tuple[ApiKeyTable, ...])
    except ConfigError as caught:
        raise ConfigError(f"{path}: {caught}") from caught
    seen: set[str] = set()
    for index, key in enumerate(keys):
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", key.name):
            raise ConfigError(
                f"{path}: [{index}].name: expected letters, digits and . _ - (64 at most), "
                f"got {_short(key.name)}"
            )
        if not isinstance(key.sha256, str) or not re.fullmatch(r"[0-9A-Fa-f]{64}", key.sha256):
            raise ConfigError(
                f"{path}: [{index}].sha256: expected the 64 hex digits (in quotes) that "
                "`printf %s KEY | sha256sum` prints"
            )
        if key.sha256.lower() in seen:
            raise ConfigError(
                f"{path}: [{index}].sha256: expected every key once, got that of {key.name} again"
            )
        if key.models is not None and not key.models:
            raise ConfigError(
                f"{path}: [{index}].models: expected at least one model, or no such key for all"
            )
        seen.add(key.sha256.lower())
    return keys


# --- cluster files -------------------------------------------------------------------------------------


class ClusterModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model to serve. `config` is its `config.json`, which gives the KV size where it is not stated."""

    name: str
    parameters: Positive
    bytes_per_parameter: Positive = 2.0
    kv_bytes_per_token: PositiveInt | None = None
    kv_bytes_per_value: Positive = 2.0
    config: str | None = None


class ClusterLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The longest request that every instance must be able to hold."""

    max_input_tokens: PositiveInt
    max_output_tokens: PositiveInt


class MachineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine, or `count` alike. `profiles` maps a tensor-parallel degree to a latency profile."""

    name: str
    gpu: str
    gpus: PositiveInt
    memory_bytes: PositiveInt
    profiles: dict[str, str]
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    reserved_bytes_per_gpu: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: PositiveInt = 1


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cluster file as written."""

    version: Literal[1]
    model: ClusterModel
    limits: ClusterLimits
    machines: tuple[MachineTable, ...]


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster file resolved: the planner's machines and the profile of every path they name."""

    path: Path
    file: ClusterFile
    model: PlanModel
    machines: tuple[Machine, ...]
    profiles: dict[str, Profile]


def kv_bytes_per_token(raw: dict[str, Any], bytes_per_value: float) -> int:
    """KV bytes of one token from a model's `config.json`: 2 * layers * kv_heads * head_dim * bytes.

    Grouped-query attention counts its KV heads, not its query heads. Raises `ConfigError`.
    """
    config = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else raw
    assert isinstance(config, dict)

    def whole(key: str) -> int:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key}: expected a whole number from 1, got {_short(value)}")
        return value

    if "kv_lora_rank" in config:
        raise ConfigError(
            "kv_lora_rank: expected a model whose cache holds keys and values per head; "
            "give model.kv_bytes_per_token for this one"
        )
    layers, heads = whole("num_hidden_layers"), whole("num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else whole("num_key_value_heads")
    head_dim = whole("hidden_size") // heads if config.get("head_dim") is None else whole("head_dim")
    return math.ceil(2 * layers * kv_heads * head_dim * bytes_per_value)


def model_kv_bytes(
    path: Path, where: str, stated: int | None, config: str | None, bytes_per_value: float
) -> int:
    """KV bytes of one token as stated in a file, or from the `config.json` it names. Raises `ConfigError`."""
    if stated is not None:
        if config is not None:
            raise ConfigError(
                f"{path}: {where}config: expected either config or kv_bytes_per_token, got both"
            )
        return stated
    if config is None:
        raise ConfigError(
            f"{path}: {where}kv_bytes_per_token: expected a value or {where}config, got neither"
        )
    config_path = path.parent / config
    try:
        raw = msgspec.json.decode(_read_text(config_path, ConfigError))
    except msgspec.DecodeError as caught:
        raise ConfigError(f"{config_path}: expected valid JSON: {caught}") from caught
    if not isinstance(raw, dict):
        raise ConfigError(f"{config_path}: the file: expected a mapping of keys, got {_short(raw)}")
    try:
        return kv_bytes_per_token(raw, bytes_per_value)
    except ConfigError as caught:
        raise ConfigError(f"{config_path}: {caught}") from caught


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file and every profile it names. Raises `ConfigError` or `ProfileError`."""
    file = load_yaml(path, ClusterFile, ConfigError)
    if not file.machines:
        raise ConfigError(f"{path}: machines: expected at least one machine, got none")
    model = PlanModel(
        file.model.name,
        file.model.parameters,
        file.model.bytes_per_parameter,
        model_kv_bytes(
            path, "model.", file.model.kv_bytes_per_token, file.model.config, file.model.kv_bytes_per_value
        ),
        file.limits.max_input_tokens,
        file.limits.max_output_tokens,
    )
    profiles: dict[str, Profile] = {}
    machines: list[Machine] = []
    for m, table in enumerate(file.machines):
        key = f"{path}: machines[{m}]"
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", table.name):
            raise ConfigError(f"{key}.name: expected letters, digits and . _ -, got {_short(table.name)}")
        by_degree: dict[int, str] = {}
        for text, written in table.profiles.items():
            where = f"{key}.profiles.{text}"
            if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
                raise ConfigError(
                    f"{where}: expected a tensor-parallel degree as the key, got {_short(text)}"
                )
            degree = int(text)
            by_degree[degree] = written
            if table.gpus % degree:
                raise ConfigError(
                    f"{where}: expected a degree that divides the {table.gpus} GPUs, got {degree}"
                )
            if written not in profiles:
                if not (path.parent / written).is_file():
                    raise ConfigError(
                        f"{where}: expected the path of a latency profile, got {written!r}: no such file"
                    )
                profiles[written] = load_profile(path.parent / written)
            stated = profiles[written].engine.tensor_parallel_size
            if stated is not None and stated != degree:
                raise ConfigError(
                    f"{where}: expected a profile of degree {degree}, got one of degree {stated}"
                )
        machines += [
            Machine(
                name=table.name if table.count == 1 else f"{table.name}-{copy}",
                gpu=table.gpu,
                gpus=table.gpus,
                memory_bytes=table.memory_bytes,
                gpu_memory_utilization=table.gpu_memory_utilization,
                reserved_bytes_per_gpu=table.reserved_bytes_per_gpu,
                profiles=tuple(sorted(by_degree.items())),
            )
            for copy in range(table.count)
        ]
    names = [machine.name for machine in machines]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path}: machines: expected every name once, got {twice!r} again")
    return Cluster(path=path, file=file, model=model, machines=tuple(machines), profiles=profiles)
