"""Types of the scheduler: instances, requests, leases and commands; facts about instances in `facts.py`.

Commands are frozen; in a `Lease` the driver counts tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

from mypy_extensions import mypyc_attr

from hetlb.balancer.core.kv_need import KvNeed
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.objective import UNSTATED, ServiceClass
from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.prefix_index import PrefixKey, Shared
from hetlb.balancer.core.speed import Mark

RequestId: TypeAlias = int
LeaseId: TypeAlias = int

#: Block size in tokens, and the digest of every full block of a prompt but for its last token.
PromptBlocks: TypeAlias = tuple[int, tuple[int, ...]]
#: Longest length in tokens that an engine can take; larger figures in a request are wrong input.
MAX_TOKENS_LIMIT: Final = 1 << 31


class AdminState(StrEnum):
    """Administrative state. `DRAIN` and `MAINT` both take no new work; maint also stops probing."""

    READY = "ready"
    DRAIN = "drain"
    MAINT = "maint"


class Health(StrEnum):
    """Health by evidence. `SUSPECT` is used only while no instance that can take a request is `UP`."""

    UP = "up"
    SUSPECT = "suspect"
    EJECTED = "ejected"


class Outcome(StrEnum):
    """End of a request, or of one of its leases. Every accepted request has exactly one.

    `UPSTREAM_REFUSED` is a complete 4xx response of an engine, `UPSTREAM_ERROR` one of 5xx, `UPSTREAM_BUSY`
    one of 429 or 503 with a `retry-after`. `MISPLACED` ends a lease alone: its request is placed again.
    `CAUSES` has the cause of each.
    """

    OK = "ok"
    UPSTREAM_REFUSED = "upstream_refused"
    UPSTREAM_BUSY = "upstream_busy"
    UPSTREAM_ERROR = "upstream_error"
    BAD_REQUEST = "bad_request"
    RATE_LIMITED = "rate_limited"
    REJECTED_FULL = "rejected_full"
    NO_INSTANCE = "no_instance"
    EXPIRED_QUEUE = "expired_queue"
    CONNECT_FAILED = "connect_failed"
    NO_RESPONSE = "no_response"
    BROKEN_STREAM = "broken_stream"
    CLIENT_GONE = "client_gone"
    LOCAL_FAULT = "local_fault"
    MISPLACED = "misplaced"
    SHUTDOWN = "shutdown"


#: Causes of the ends of requests: the client, a limit of its key, an engine, or hetlb and its fleet.
CAUSES: Final[dict[str, str]] = {
    Outcome.OK.value: "none",
    Outcome.UPSTREAM_REFUSED.value: "client",
    Outcome.BAD_REQUEST.value: "client",
    Outcome.CLIENT_GONE.value: "client",
    Outcome.RATE_LIMITED.value: "limit",
    Outcome.UPSTREAM_BUSY.value: "engine",
    Outcome.UPSTREAM_ERROR.value: "engine",
    Outcome.CONNECT_FAILED.value: "engine",
    Outcome.NO_RESPONSE.value: "engine",
    Outcome.BROKEN_STREAM.value: "engine",
    Outcome.REJECTED_FULL.value: "hetlb",
    Outcome.NO_INSTANCE.value: "hetlb",
    Outcome.EXPIRED_QUEUE.value: "hetlb",
    Outcome.LOCAL_FAULT.value: "hetlb",
    Outcome.MISPLACED.value: "hetlb",
    Outcome.SHUTDOWN.value: "hetlb",
}


@dataclass(frozen=True, slots=True)
class Capacity(PickleByFields):
    """Limits of one instance, by the names of vLLM. `None` means not known yet.

    `kv_cache_tokens` is the sum over its data-parallel `engines`, `kv_tokens_per_request` the largest part
    for a single request (one engine's share); all other limits are per engine. `kv_need` is the need of a
    sequence of its model, None if it equals the number of tokens. `rank_header`: the server lets a request
    choose one of its engines.
    """

    kv_cache_tokens: int | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_tokens_per_request: int | None = None
    engines: int | None = None
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    max_loras: int | None = None
    kv_need: KvNeed | None = None
    rank_header: bool | None = None

    def needed(self, tokens: float) -> float:
        """Return the tokens of the KV cache that a sequence of `tokens` needs."""
        return tokens if self.kv_need is None else self.kv_need.tokens(tokens)

    def updated(self, newer: Capacity) -> Capacity:
        """Return this capacity with each figure replaced that `newer` knows: itself if none differs."""
        told: dict[str, Any] = {name: getattr(newer, name) for name in _LIMITS}
        news = {n: told[n] for n in _LIMITS if told[n] is not None and told[n] != getattr(self, n)}
        return replace(self, **news) if news else self


_LIMITS: Final = tuple(each.name for each in fields(Capacity))


class Role(StrEnum):
    """Phases of a request that an instance takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Connector(StrEnum):
    """KV connectors of vLLM: they transfer the KV blocks of a prompt from one instance to another."""

    NIXL = "nixl"
    MOONCAKE = "mooncake"


@dataclass(frozen=True, slots=True)
class KvLink(PickleByFields):
    """Link for KV transfers between instances of one model.

    A prefill instance keeps unfetched blocks for `lease_s`. The other figures give the first estimate of a
    transfer's time; measured times of each pair correct it. `bootstrap` is the URL of the instance's Mooncake
    bootstrap server.
    """

    connector: Connector
    lease_s: float = 30.0
    bytes_per_token: float = 131_072.0
    bandwidth_bytes_per_s: float = 5e9
    latency_s: float = 0.01
    bootstrap: str | None = None


@dataclass(frozen=True, slots=True)
class InstanceSpec(PickleByFields):
    """One vLLM server as configured. `slots_stated`: its file states `max_num_seqs`.

    `latency` is None without a profile, and with `gpu_alone` it has the ratios of a GPU's data sheet. `model`
    is "" if only the engine knows its model.
    `host_assumed_in` is the file of a profile with an assumed host time, "" if it was measured.
    """

    name: str
    model: str
    url: str = ""
    weight: float = 1.0
    latency: LatencyModel | None = None
    capacity: Capacity = Capacity()
    role: Role = Role.BOTH
    kv_transfer: KvLink | None = None
    slots_stated: bool = False
    gpu: str = ""
    host_assumed_in: str = ""
    gpu_alone: bool = False

    @property
    def profiled(self) -> bool:
        """True with a profile."""
        return self.latency is not None and not self.gpu_alone


@dataclass(frozen=True, slots=True)
class CanarySide(PickleByFields):
    """Side of a request if one instance of its model is a canary: that `instance` alone, or the others.

    The other side serves it only while nothing of its own is left.
    """

    instance: str
    inside: bool


@dataclass(frozen=True, slots=True)
class Places(PickleByFields):
    """Instances that a request may get, and instances that it had better get.

    `subset` names the instances that a gateway allows, or the one that keeps an answer (None: all). `side`
    is None for a model without a canary. The best of the `preferred` instances is chosen if its score is at
    most `preferred_within` (a share) above the best of all.
    """

    subset: tuple[str, ...] | None = None
    side: CanarySide | None = None
    preferred: tuple[str, ...] = ()
    preferred_within: float = 0.0


ANYWHERE: Final = Places()


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Request(PickleByFields):
    """One request as the scheduler sees it; its fields are final (a frozen dataclass is not compiled).

    Example: 2 prompts with `n` = 3 are 6 `sequences`, and 3 `samples` share each prompt. `prompt_tokens` is
    the mean length of its prompts, `longest_prompt_tokens` the same unless stated. `max_tokens` is the
    client's cap on each output. `generates` is False for embeddings, scores and the like. A request without
    sequences (a WebSocket, `/tokenize`) takes no slot. `prompt_exact`: the length was counted, not estimated
    from bytes. `path` is the endpoint's; `client` the address of the client. `features` are fields of the
    body that not every request has; they are read only while they matter (None before). `kept_from` names
    instances that refuse such a request: it waits in a line of its own. `prefix_keys` name the prefixes of
    its prompts, shortest first, each with its length in tokens; None stands for the whole conversation so
    far. `band` is the operator's priority and comes first; `priority` is vLLM's (lower goes first), within a
    tenant. `blocks` are digests of a prompt with known token ids, for engines with KV events. `splittable`:
    prefill and decode may run on different instances. `generated` tokens of `prompt_tokens` are output of
    earlier leases. `service` is its class, with targets narrowed by the request.
    """

    id: Final[RequestId]
    model: Final[str]
    prompt_tokens: Final[int]
    max_tokens: Final[int | None]
    sequences: Final[int]
    longest_prompt_tokens: Final[int]
    generates: Final[bool]
    body_bytes: Final[int]
    prompt_exact: Final[bool]
    prefix_keys: Final[tuple[PrefixKey, ...]]
    priority: Final[int]
    tenant: Final[str | None]
    samples: Final[int]
    blocks: Final[PromptBlocks | None]
    splittable: Final[bool]
    streamed: Final[bool]
    places: Final[Places]
    generated: Final[int]
    service: Final[ServiceClass]
    band: Final[int]
    path: Final[str]
    client: Final[str]
    features: tuple[str, ...] | None
    kept_from: tuple[str, ...]

    def __init__(
        self,
        id: RequestId,
        model: str,
        prompt_tokens: int,
        max_tokens: int | None = None,
        sequences: int = 1,
        longest_prompt_tokens: int = 0,
        generates: bool = True,
        body_bytes: int = 0,
        prompt_exact: bool = False,
        prefix_keys: tuple[PrefixKey, ...] = (),
        priority: int = 0,
        tenant: str | None = None,
        samples: int = 1,
        blocks: PromptBlocks | None = None,
        splittable: bool = False,
        streamed: bool = False,
        places: Places = ANYWHERE,
        generated: int = 0,
        service: ServiceClass = UNSTATED,
        band: int = 0,
        path: str = "",
        client: str = "",
        features: tuple[str, ...] | None = None,
        kept_from: tuple[str, ...] = (),
    ) -> None:
        self.id = id
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.sequences = sequences
        self.longest_prompt_tokens = longest_prompt_tokens or prompt_tokens
        self.generates = generates
        self.body_bytes = body_bytes
        self.prompt_exact = prompt_exact
        self.prefix_keys = prefix_keys
        self.priority = priority
        self.band = band
        self.tenant = tenant
        self.samples = samples
        self.blocks = blocks
        self.places = places
        self.splittable = splittable
        self.streamed = streamed
        self.service = service
        self.generated = generated
        self.path = path
        self.client = client
        self.features = features
        self.kept_from = kept_from

    def goes_on(self, generated: int) -> Request:
        """Return the request for the rest of an answer, with `generated` tokens in its prompt."""
        more = generated - self.generated
        return replace(
            self,
            generated=generated,
            prompt_tokens=self.prompt_tokens + more,
            longest_prompt_tokens=self.longest_prompt_tokens + more,
            splittable=False,
            max_tokens=None if self.max_tokens is None else max(1, self.max_tokens - more),
        )

    @property
    def restriction(self) -> str | None:
        """Names of the allowed and of the refusing instances, and the canary's side; None for none of them.

        `/` and `,` are in no name of an instance, `-` is in many.
        """
        subset, kept_from, side = self.places.subset, self.kept_from, self.places.side
        if subset is None and not kept_from and side is None:
            return None
        aside = "" if side is None else f"/{side.instance},{side.inside}"
        return f"{'' if subset is None else ','.join(subset)}/{','.join(kept_from)}{aside}"


@dataclass(slots=True, eq=False)
class Hold:
    """KV blocks of a prompt that a prefill instance keeps for another one, until `expires_at` at most.

    `id` is the prefill lease's. `sent_tokens` of its `tokens` are to be transferred to `target`.
    `expected_s` is the time from the dispatch of the decode leg to its first token without the transfer.
    `ended`: fetched, released or expired.
    """

    id: LeaseId
    instance: str
    target: str
    tokens: int
    sent_tokens: int
    expected_s: float
    expires_at: float
    ended: bool = False


@mypyc_attr(acyclic=True)
class Lease:
    """One dispatch of one request to one incarnation of one instance, and its bookings in the ledger.

    Tokens of all sequences: `promised_tokens` (prompts and predicted answers), `prompt_tokens`,
    `unread_tokens` (prompt tokens still to compute), `kv_tokens` (in the KV cache, for itself),
    `kv_prompt_tokens` (the prompts' part of them), `shared` (used together with others). All but the unread
    ones are fixed at the dispatch and given back once. The driver sets `output_tokens` (all sequences
    together) and `reported_cached_tokens` (of one prompt, None if the engine did not say) before it reports
    the end."""

    __slots__ = (
        "ahead", "begun_steps", "beside", "decode", "dispatched_at", "ended", "ended_at", "expected_first_s",
        "expected_s", "first_mark", "first_token_at", "forecast_end_s", "forecast_first_s",
        "forecast_step_s", "hold", "id", "incarnation", "incoming", "instance", "judged", "key",
        "kv_prompt_tokens", "kv_tokens", "mark", "mixed", "odd", "outcome", "output_tokens",
        "own", "predicted_output", "promised_tokens", "prompt_tokens", "rank", "reported_cached_tokens",
        "request", "seen_s", "shared", "trial", "unread_tokens", "waited_s", "work_ns",
    )  # fmt: skip

    def __init__(
        self,
        lease_id: LeaseId,
        request: Request,
        instance: str,
        incarnation: int,
        *,
        work_ns: int,
        kv_tokens: int,
        kv_prompt_tokens: int,
        promised_tokens: int,
        prompt_tokens: int,
        unread_tokens: int,
        predicted_output: float,
        dispatched_at: float,
        shared: Shared | None = None,
    ) -> None:
        self.id = lease_id
        #: Boxed id, reused as dictionary key.
        self.key: Any = lease_id
        self.request = request
        self.instance = instance
        self.incarnation = incarnation
        self.work_ns = work_ns
        self.kv_tokens = kv_tokens
        self.kv_prompt_tokens = kv_prompt_tokens
        self.promised_tokens = promised_tokens
        self.prompt_tokens = prompt_tokens
        self.unread_tokens = unread_tokens
        self.predicted_output = predicted_output
        self.dispatched_at = dispatched_at
        self.shared = shared
        #: Engine of its instance chosen for it, -1 if the server chooses.
        self.rank = -1
        #: Seconds its request had waited at the dispatch.
        self.waited_s = 0.0
        self.first_token_at: float | None = None
        #: Steps of its instance when its answer began, None before.
        self.begun_steps: float | None = None
        #: Forecast at the dispatch, seconds: until the first token, per further token, until the end. For a
        #: decode leg without the transfer.
        self.forecast_first_s = self.forecast_step_s = self.forecast_end_s = 0.0
        #: Work of the instance when the lease began and when its first token came.
        self.mark: Mark | None = None
        self.first_mark: Mark | None = None
        #: For an answer that shows the speed of its instance: expected and measured seconds of its steps (0:
        #: it shows none). `mixed`: many steps also prefilled prompts.
        self.expected_s = self.seen_s = 0.0
        self.mixed = False
        #: Sequences of the instance at the dispatch, its own included.
        self.ahead = 0
        self.output_tokens = 0
        self.reported_cached_tokens: int | None = None
        self.ended = False
        #: True if its end is no more evidence: its refusal or loss was counted already.
        self.judged = False
        #: True for an odd answer. It counts as lost if other instances answer the same traffic otherwise.
        self.odd = False
        #: True if its instance is in doubt: the first tokens of its stream are kept until there are some.
        self.trial = False
        #: True if its request belongs to this process.
        self.own = True
        self.outcome: Outcome | None = None
        self.ended_at: float | None = None
        #: For a prefill leg: the lease of its decode leg. It begins at the end of this one.
        self.decode: Lease | None = None
        #: Predicted TTFT in seconds, uncorrected, 0 for a decode leg. `beside`: other sequences were running.
        self.expected_first_s = 0.0
        self.beside = False
        #: For a decode leg: `incoming` until its dispatch; afterwards it fetches the blocks of `hold`.
        self.incoming = False
        self.hold: Hold | None = None

    @property
    def read_by(self) -> float:
        """Time when the prompts of a whole answer are taken to have been read."""
        return self.dispatched_at + self.forecast_first_s

    def __repr__(self) -> str:
        return f"Lease({self.id}, request={self.request.id}, instance={self.instance!r})"


# --- commands ---


class RejectReason(StrEnum):
    """Reason of a rejection by the scheduler."""

    UNKNOWN_MODEL = "unknown_model"
    TOO_LONG = "too_long"
    QUEUE_FULL = "queue_full"
    NO_INSTANCE = "no_instance"
    QUEUE_EXPIRED = "queue_expired"
    CONNECT_FAILED = "connect_failed"
    NO_RESPONSE = "no_response"
    POLICY_FAILED = "policy_failed"


@dataclass(slots=True)
class Candidate(PickleByFields):
    """One instance as a policy saw it for one request: every term of the score, lowest score wins.

    `workload` is the seconds that the request would add to the instance, `processing_s` its share of the
    ideal batch, `kv_utilization` the promised fraction of the KV cache before this request. Unused ones are
    None. `terms` are a policy's own, by name, in seconds; the score is their weighted sum.
    """

    instance: str
    score: float = 0.0
    eligible: bool = True
    reason: str = ""
    ideal_batch: int | None = None
    processing_s: float | None = None
    kv_utilization: float | None = None
    workload: float | None = None
    terms: dict[str, float] | None = None
    weights: dict[str, float] | None = None
    forecast: dict[str, float] | None = None

    def document(self) -> dict[str, object]:
        """Return the fields for JSON, unrounded; an infinite score is null."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**found, "score": self.score if math.isfinite(self.score) else None}


#: Reason of the dispatch of a decode leg. Its place was decided together with its prefill leg's.
HAND_OVER: Final = "hand-over"


def pair_name(prefill: str, decode: str) -> str:
    """Return a display name of a pair of instances."""
    return f"{prefill} > {decode}"


@mypyc_attr(acyclic=True)
@dataclass(slots=True, init=False)
class Dispatch:
    """Send the request to the lease's instance now."""

    request_id: RequestId
    lease: Lease
    reason: str
    #: Makes the candidates from the state at the time: most decisions are never looked at.
    considered: Callable[[], Sequence[Candidate]] = field(compare=False, repr=False)
    #: `x-request-id` of the request, "" if unknown to the driver.
    label: str = field(compare=False, repr=False, default="")

    def __init__(
        self,
        request_id: RequestId,
        lease: Lease,
        reason: str,
        considered: Callable[[], Sequence[Candidate]] = tuple,
    ) -> None:
        self.request_id = request_id
        self.lease = lease
        self.reason = reason
        self.considered = considered
        self.label = ""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every instance of the model as the policy saw it, in file order."""
        return tuple(self.considered())


@dataclass(frozen=True, slots=True)
class Reject(PickleByFields):
    """Answer the client: the request will not be run. `detail` is a sentence for the client."""

    request_id: RequestId
    reason: RejectReason
    detail: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class PassOn(PickleByFields):
    """Send the client an engine's refusal: no other instance takes the request."""

    request_id: RequestId
    lease: Lease


@dataclass(frozen=True, slots=True)
class HealthChanged(PickleByFields):
    """An instance's health changed; for the log and the metrics."""

    instance: str
    health: Health
    reason: str


Command: TypeAlias = Dispatch | Reject | PassOn | HealthChanged
