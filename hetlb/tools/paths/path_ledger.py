"""Ledger of the stages of a model: like `core.instance`, for requests that use several workers.

A path books token-layers of KV on every stage it crosses and gives back exactly the same, once, however
it ends. Figures are integers: a ledger is at any moment the sum over its leases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from hetlb.balancer.core.types import LeaseId, Request
from hetlb.tools.paths.stages import SINK, SOURCE, Edge, Hop, StageSpec


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
