"""Ledger of the stages of a model: the ledger of `core.instance`, for requests that use several workers.

A path books token-layers of KV on every stage it crosses and gives back exactly those, once, however
it ends. Figures are integers: a ledger is at any moment the sum over its leases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetlb.core.paths.stages import Hop, StageSpec
from hetlb.core.types import LeaseId, Request, RequestId


class PathLease:
    """One dispatch of one request over a path, and what it booked on every stage.

    `context_tokens` is what the first pass reads (the prompt and, after a replay, the tokens so far),
    `kv_tokens` that and the output predicted. The driver counts `output_tokens` before it reports the end.
    """

    __slots__ = (
        "context_tokens", "dispatched_at", "ended", "first_token_at", "hops", "id", "kv_tokens",
        "output_tokens", "predicted_output", "request",
    )  # fmt: skip

    def __init__(
        self,
        lease_id: LeaseId,
        request: Request,
        hops: tuple[Hop, ...],
        *,
        context_tokens: int,
        predicted_output: float,
        dispatched_at: float,
    ) -> None:
        self.id = lease_id
        self.request = request
        self.hops = hops
        self.context_tokens = context_tokens
        self.predicted_output = predicted_output
        self.kv_tokens = context_tokens + round(predicted_output)
        self.dispatched_at = dispatched_at
        self.first_token_at: float | None = None
        self.output_tokens = 0
        self.ended = False

    def __repr__(self) -> str:
        stages = " ".join(f"{hop.stage}[{hop.first}:{hop.end}]" for hop in self.hops)
        return f"PathLease({self.id}, request={self.request.id}, {stages})"


@dataclass(frozen=True, slots=True)
class PathDispatch:
    """Send the request over the lease's path now."""

    request_id: RequestId
    lease: PathLease


class StageLedger:
    """Bookings on one stage. `up` is False once it is lost."""

    __slots__ = ("kv_token_layers", "leases", "pending_prompt_tokens", "spec", "up")

    def __init__(self, spec: StageSpec) -> None:
        self.spec = spec
        self.up = True
        #: Token-layers booked now.
        self.kv_token_layers = 0
        #: Tokens of first passes that have not come out of the path yet.
        self.pending_prompt_tokens = 0
        #: Layers that each lease computes here.
        self.leases: dict[LeaseId, tuple[PathLease, int]] = {}

    @property
    def in_flight(self) -> int:
        """Requests whose path crosses this stage."""
        return len(self.leases)

    def has_room(self, context_tokens: int, kv_tokens: int, high_water: float) -> bool:
        """True if a request that would use all layers stays within this share of the KV cache.

        An idle stage takes any request whose first pass and one token fit, whatever is predicted.
        """
        spec = self.spec
        if not self.leases:
            return (context_tokens + 1) * spec.layers <= spec.kv_token_layers
        return self.kv_token_layers + kv_tokens * spec.layers <= high_water * spec.kv_token_layers

    def acquire(self, lease: PathLease, layers: int) -> None:
        """Book a lease that computes so many layers here."""
        assert 0 < layers <= self.spec.layers, f"{lease!r} uses {layers} layers of {self.spec.name}"
        assert lease.id not in self.leases, f"{lease!r} crosses {self.spec.name} twice"
        self.leases[lease.id] = (lease, layers)
        self.kv_token_layers += lease.kv_tokens * layers
        self.pending_prompt_tokens += lease.context_tokens

    def first_token(self, lease: PathLease) -> None:
        """The first pass of a lease is through."""
        self.pending_prompt_tokens -= lease.context_tokens

    def release(self, lease: PathLease) -> None:
        """Give back exactly what the lease booked, once."""
        booked = self.leases.pop(lease.id, None)
        assert booked is not None, f"{lease!r} is not booked on {self.spec.name}"
        self.kv_token_layers -= lease.kv_tokens * booked[1]
        if lease.first_token_at is None:
            self.pending_prompt_tokens -= lease.context_tokens
        negative = self.kv_token_layers < 0 or self.pending_prompt_tokens < 0
        assert not negative, f"the ledger of {self.spec.name} fell below zero when {lease!r} was released"

    def check_integrity(self) -> None:
        """Assert that the ledger is the sum over the live leases."""
        leases = self.leases.values()
        pending = sum(lease.context_tokens for lease, _ in leases if lease.first_token_at is None)
        assert self.kv_token_layers == sum(lease.kv_tokens * layers for lease, layers in leases), (
            self.spec.name
        )
        assert self.pending_prompt_tokens == pending, self.spec.name
        assert all(not lease.ended for lease, _ in leases), self.spec.name


def fullest_layer(ledgers: Iterable[StageLedger], layers: int) -> float:
    """Booked share of the KV cache of the fullest layer, summed over the stages that hold it (Helix's
    measure).
    """
    booked, total = [0.0] * layers, [0.0] * layers
    for ledger in ledgers:
        spec = ledger.spec
        if not ledger.up:
            continue
        for layer in range(spec.first, spec.end):
            booked[layer] += ledger.kv_token_layers / spec.layers
            total[layer] += spec.kv_token_layers / spec.layers
    return max((used / size if size else 1.0) for used, size in zip(booked, total, strict=True))
