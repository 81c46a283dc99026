"""Messages between a relay and the scheduler process (rules: docs/reference/messages.md).

A message is an array that begins with its number. Fields may be appended within a version: a reader ignores
fields that it does not know. Times are in seconds and relative to now.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from hetlb.balancer.core.types import RejectReason
from hetlb.options.lease_wire import RequestFacts, WireBegun, WireBooked, WireEnded

VERSION: Final = 6


class RelayMessage(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One message of either side."""


# --- from a relay ---


class LiveRequest(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A lease that runs while its relay meets another scheduler process, and the tenant of its request."""

    lease: WireBooked
    owner: str | None


class Arrival(RelayMessage, tag=1, frozen=True):
    """A request to be dispatched; answered by `DispatchMessage` or `Rejected`.

    `owner` is the tenant whose key came with it. Its `blocks` are the digests of a prompt of token ids, in
    blocks of `View.block_tokens`.
    """

    request: RequestFacts
    owner: str | None = None


class Hello(RelayMessage, tag=2, frozen=True):
    """The first message of a relay: protocol version, generation of the fleet that it serves, live leases.

    Every id of its requests has `relay` in the bits above the lower 32: no two relays that ever were share
    one.
    """

    version: int
    relay: int
    generation: int
    leases: list[LiveRequest]


class LeaseChange(RelayMessage, tag=3, frozen=True):
    """News of a request's lease, as the journal has them: its answer began, or it ended.

    With `retry` the request goes on and gets a `DispatchMessage` or `Rejected`; `generated` tokens of its
    answer are part of the prompt then, None where the answer begins again.
    """

    request: int
    change: WireBegun | WireEnded
    retry: bool = False
    generated: int | None = None


class Refused(RelayMessage, tag=5, frozen=True):
    """The engine refused or failed the request by a status; `DispatchMessage` or `PassOnMessage` follows.

    `retry_after_s`: seconds until a retry, None without any. `features` are the request's.
    """

    request: int
    lease: int
    status: int
    retry_after_s: float | None
    features: tuple[str, ...] = ()


class Moving(RelayMessage, tag=14, frozen=True):
    """The answer of a lease is to go on elsewhere while its engine lives; a dispatch follows, or nothing."""

    request: int
    lease: int
    generated: int


class Cancelled(RelayMessage, tag=6, frozen=True):
    """The client of a request without a lease left."""

    request: int


class Report(RelayMessage, tag=8, frozen=True):
    """Counters, every half second and when asked.

    `number` is the last `Ask`'s. `totals` holds all counters since the relay began (pickled `Totals`).
    `tokens` are output tokens so far by lease, `streaming` the instances of which part of an answer came
    lately, `learnt` bytes and tokens of prompts by model, `recent` what ended since the last report (pickled
    `Recent`).
    """

    number: int
    totals: bytes = b""
    lost_lines: int = 0
    tokens: list[tuple[int, int]] = []
    streaming: list[str] = []
    learnt: list[tuple[str, int, int]] = []
    recent: bytes = b""


class CameBack(RelayMessage, tag=10, frozen=True):
    """A request to an instance came back to this proxy: the instance leads here."""

    instance: str


class ModelsRead(RelayMessage, tag=11, frozen=True):
    """The `/v1/models` answer of an engine since its connections had to be made again."""

    instance: str
    body: bytes


class Used(RelayMessage, tag=12, frozen=True):
    """Tokens that a request of a key with limits used: all at its end (`last`), a session's in between."""

    request: int
    prompt_tokens: int
    output_tokens: int
    last: bool


# --- from the scheduler process ---


class DispatchMessage(RelayMessage, tag=33, frozen=True):
    """Send a request to an instance: a lease and what it booked. `expected_s` is foreseen until its end.

    `model` is set for a request that named none. `limit_lines` are header lines about the limits of its key,
    None without limits. `gives_ids`: the engine takes and gives token ids, in requests of `max_model_len`
    tokens (0: not known).
    """

    request: int
    lease: int
    instance: str
    work_ns: int
    predicted_output: float
    expected_s: float
    model: str
    expected_first_s: float = 0.0
    mixed: bool = False
    limit_lines: bytes | None = None
    gives_ids: bool = False
    max_model_len: int = 0


class Rejected(RelayMessage, tag=34, frozen=True):
    """Answer the client: the scheduler turned the request down.

    Without a `reason` it has this status: what it asked for is not there, or (429) a limit of its key is
    reached. The client may come again after `retry_after_s`; `lines` are header lines of the answer.
    """

    request: int
    reason: RejectReason | None
    detail: str
    retry_after_s: float | None = None
    status: int = 0
    lines: bytes = b""


class PassOnMessage(RelayMessage, tag=35, frozen=True):
    """Let the client have the answer of the engine that refused."""

    request: int


class InstanceAddress(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Address of an instance. Another `incarnation` is another server, even under the same name.

    `registered` says that it stands in no file; `address` is then the one that its name was resolved to.
    `leaves_in_s`: seconds until it is gone, None without a notice.
    """

    name: str
    incarnation: int
    url: str
    model: str
    registered: bool
    address: str | None
    leaves_in_s: float | None = None


class ViewMessage(RelayMessage, tag=37, frozen=True):
    """State that relays answer from: instances, served names, `/v1/models` (a JSON array), readiness.

    It comes before the first `DispatchMessage` and before any to an instance that is new.
    `block_tokens` is the block size of engines that publish KV events, 0 where none does. `down` are names
    of which no instance takes requests.
    """

    instances: list[InstanceAddress]
    names: list[str]
    only_model: str
    models: bytes
    routable: bool
    block_tokens: int = 0
    down: list[str] = []


class Learnt(RelayMessage, tag=38, frozen=True):
    """Bytes and tokens of a model's prompts, learnt by other relays."""

    model: str
    text_bytes: int
    tokens: int


class WaitingMessage(RelayMessage, tag=39, frozen=True):
    """True if requests wait for an instance: while none do, `LeaseChange` may come late."""

    requests: bool


class Ask(RelayMessage, tag=40, frozen=True):
    """Send a `Report` with this number now."""

    number: int


class WorkMessage(RelayMessage, tag=42, frozen=True):
    """Instances whose own counters moved lately, and stalled instances with the seconds since then."""

    moving: list[str]
    stalled: dict[str, float]


class Reload(RelayMessage, tag=41, frozen=True):
    """Serve another fleet (pickled) from now on; it is reload number `generation`.

    The scheduler process has read its keys and certificates; a relay that cannot read them leaves.
    """

    generation: int
    fleet: bytes


FromRelay: TypeAlias = (
    Arrival | Hello | LeaseChange | Refused | Moving | Cancelled | Report | CameBack | ModelsRead | Used
)
FromScheduler: TypeAlias = (
    DispatchMessage
    | Rejected
    | PassOnMessage
    | ViewMessage
    | Learnt
    | WaitingMessage
    | Ask
    | Reload
    | WorkMessage
)

FROM_RELAY: Final = msgspec.msgpack.Decoder(list[FromRelay])
FROM_SCHEDULER: Final = msgspec.msgpack.Decoder(list[FromScheduler])


class RelayProtocolError(msgspec.DecodeError):
    """A message that the protocol does not allow: the channel is closed."""
