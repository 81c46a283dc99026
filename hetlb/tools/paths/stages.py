"""A model divided into layer ranges over several workers (stages), and the links between them.

Plain values. Layers are numbered from 0; a range is half open, [first, end). Times are seconds,
sizes bytes, KV is counted in token-layers: one token in one layer. `SOURCE` and `SINK` name the coordinator,
where requests enter and tokens come out.

A path books token-layers of KV on each of its stages and gives back exactly the same, once, however it ends.
Figures are integers: a `StageLedger` is at any moment the sum over its leases.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeAlias

from hetlb.balancer.core.types import LeaseId, Request

SOURCE: Final = "source"
SINK: Final = "sink"

#: Names of the two ends of a link.
Edge: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Curve:
    """A piecewise linear function through points with ascending x; the last piece goes on."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.xs) != len(self.ys) or len(self.xs) < 2:
            raise ValueError("expected two points or more")
        if any(a >= b for a, b in pairwise(self.xs)):
            raise ValueError("expected x in ascending order")

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        right = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        x0, y0 = xs[right - 1], ys[right - 1]
        return y0 + (ys[right] - y0) * (x - x0) / (xs[right] - x0)

    def table(self, count: int) -> list[float]:
        """Return the values at 0, 1, ... count - 1."""
        return [self(x) for x in range(count)]


def decode_curve(points: Sequence[tuple[float, float]]) -> Curve:
    """Return the curve of measured decode times (requests, seconds).

    The stage model counts a single decode twice (Helix's rule), so half of its time is taken.
    """
    return Curve(tuple(x for x, _ in points), tuple(y / 2.0 if x == 1 else y for x, y in points))


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Most that one batch of a stage may hold: prompts, their tokens, decodes, their cached tokens."""

    prompts: int
    prompt_tokens: int
    decodes: int
    decode_context: int


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A worker that holds the layers [first, end).

    `prompt` gives the time of one layer on a batch's prompt tokens, `decode` on its decoding requests.
    """

    name: str
    first: int
    end: int
    prompt: Curve
    decode: Curve
    kv_token_layers: int
    batch: BatchLimits
    nic_in_bytes_per_s: float = math.inf
    nic_out_bytes_per_s: float = math.inf

    @property
    def layers(self) -> int:
        """Number of layers held."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A connection in one direction."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Hop:
    """The part of a path that one stage computes: layers [first, end)."""

    stage: str
    first: int
    end: int

    @property
    def layers(self) -> int:
        """Number of layers computed."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class StageNetwork:
    """All stages of one model with the links between them.

    With `partial_inference` a stage may be entered behind its first layer. `flows` (tokens/s by link) is the
    maximum flow that weighted round robin follows; empty if no plan was made.
    """

    layers: int
    stages: tuple[StageSpec, ...]
    links: Mapping[Edge, LinkSpec]
    activation_bytes: int
    token_bytes: int
    partial_inference: bool = False
    flows: Mapping[Edge, float] = field(default_factory=dict)

    def successors(self, stage: StageSpec | None) -> tuple[StageSpec, ...]:
        """Return stages linked to `stage` (None: the source) that may compute the layers behind its own."""
        at = 0 if stage is None else stage.end
        sender = SOURCE if stage is None else stage.name
        return tuple(
            other
            for other in self.stages
            if other is not stage and (sender, other.name) in self.links and self.enters(other, at)
        )

    def enters(self, stage: StageSpec, at: int) -> bool:
        """Return True if a path that computed the layers below `at` may go on with this stage."""
        return stage.first == at or (self.partial_inference and stage.first < at < stage.end)

    def leads_out(self, stage: StageSpec) -> bool:
        """Return True if tokens come out behind `stage`."""
        return stage.end == self.layers and (stage.name, SINK) in self.links

    def message_bytes(self, sender: str, receiver: str) -> int:
        """Return the bytes per token on a link: ids to and from the coordinator, an activation elsewhere."""
        return self.token_bytes if sender == SOURCE or receiver == SINK else self.activation_bytes


@dataclass(eq=False, slots=True)
class PathLease:
    """One dispatch of one request over a path, which its policy chooses, and its bookings on every stage.

    `context_tokens` counts the first pass: the prompt and, after a replay, the tokens so far. The
    driver counts `output_tokens` before it reports the end.
    """

    id: LeaseId
    request: Request
    context_tokens: int
    predicted_output: float
    dispatched_at: float
    hops: tuple[Hop, ...] = ()
    #: Earlier paths of the request that broke.
    replays: int = 0
    first_token_at: float | None = None
    output_tokens: int = 0
    #: Tokens it is expected to hold in the end.
    kv_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.kv_tokens = self.context_tokens + round(self.predicted_output)

    @property
    def edges(self) -> list[Edge]:
        """Links from the source over its stages to the sink."""
        return list(pairwise((SOURCE, *(hop.stage for hop in self.hops), SINK)))

    def __repr__(self) -> str:
        stages = " ".join(f"{hop.stage}[{hop.first}:{hop.end}]" for hop in self.hops)
        return f"PathLease({self.id}, request={self.request.id}, {stages})"


@dataclass(eq=False, slots=True)
class StageLedger:
    """Bookings on one stage. `up` is False once it is lost."""

    spec: StageSpec
    up: bool = True
    #: Token-layers booked now.
    kv_token_layers: int = 0
    #: Live leases with the layers that each computes here.
    leases: dict[LeaseId, tuple[PathLease, int]] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """Number of requests with a path through this stage."""
        return len(self.leases)

    def takes(self, lease: PathLease, high_water: float) -> bool:
        """Return True if it is up and a lease on all its layers stays within this share of its KV cache.

        An idle stage takes any request if its first pass and one token fit, whatever is predicted.
        """
        spec = self.spec
        if not self.up:
            return False
        if not self.leases:
            return (lease.context_tokens + 1) * spec.layers <= spec.kv_token_layers
        return self.kv_token_layers + lease.kv_tokens * spec.layers <= high_water * spec.kv_token_layers

    def acquire(self, lease: PathLease, layers: int) -> None:
        """Book a lease that computes `layers` layers here."""
        assert 0 < layers <= self.spec.layers, f"{lease!r} uses {layers} layers of {self.spec.name}"
        assert lease.id not in self.leases, f"{lease!r} crosses {self.spec.name} twice"
        self.leases[lease.id] = (lease, layers)
        self.kv_token_layers += lease.kv_tokens * layers

    def release(self, lease: PathLease) -> None:
        """Give back exactly what the lease booked, once."""
        booked = self.leases.pop(lease.id, None)
        assert booked is not None, f"{lease!r} is not booked on {self.spec.name}"
        self.kv_token_layers -= lease.kv_tokens * booked[1]
        assert self.kv_token_layers >= 0, f"{self.spec.name} fell below zero when {lease!r} was released"

    def check_integrity(self) -> None:
        """Assert that the ledger is the sum over the live leases."""
        booked = sum(lease.kv_tokens * layers for lease, layers in self.leases.values())
        assert self.kv_token_layers == booked, self.spec.name


def kv_by_layer(ledgers: Iterable[StageLedger], layers: int) -> list[tuple[float, float]]:
    """Return KV tokens of each layer, booked and in all, summed over the running stages with this layer."""
    booked, total = [0.0] * layers, [0.0] * layers
    for ledger in ledgers:
        spec = ledger.spec
        for layer in range(spec.first, spec.end) if ledger.up else ():
            booked[layer] += ledger.kv_token_layers / spec.layers
            total[layer] += spec.kv_token_layers / spec.layers
    return list(zip(booked, total, strict=True))
