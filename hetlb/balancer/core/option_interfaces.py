"""Interfaces of the options that decisions ask: types alone. `interfaces.py` has the others.

Each names in brackets the option that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from hetlb.balancer.core.instance import Instance
    from hetlb.balancer.core.objective import ServiceClass
    from hetlb.balancer.core.placement import Decision
    from hetlb.balancer.core.policies.sight import SchedulingContext
    from hetlb.balancer.core.queue import QueueKey
    from hetlb.balancer.core.ready import ReadyInstances
    from hetlb.balancer.core.types import (
        Command,
        EngineSample,
        Hold,
        Lease,
        LeaseId,
        Outcome,
        Request,
        RequestId,
    )

#: Block size in tokens, and the digest of every full block of a prompt but for its last token.
PromptBlocks: TypeAlias = tuple[int, tuple[int, ...]]
#: Events of one message, in their order: `KvEventBatch` of the option `kv_events`.
BlockEvents: TypeAlias = Any


class EngineBlocks(Protocol):
    """Blocks in one engine's cache, and blocks that the prompts of live leases will add (`kv_events`)."""

    live: bool
    #: Reason why it is not live.
    reason: str
    block_tokens: int

    def exact(self, request: Request, engines: int) -> int | None: ...
    def begin(self, lease_id: int, model: str, blocks: PromptBlocks) -> None: ...
    def end(self, lease_id: int) -> None: ...


class EngineAdapters(Protocol):
    """Adapters that one engine lists, and adapters that it is believed to have in its slots (`adapters`)."""

    names: frozenset[str]
    slots: int

    def begin(self, name: str) -> None: ...
    def end(self, name: str) -> None: ...
    def told(self, running: Iterable[str]) -> None: ...
    def loads(self, name: str) -> bool | None: ...
    def cost_s(self, name: str, load_s: float, wait_s: float) -> float: ...
    def count(self) -> dict[str, int]: ...


class LoadTimes(Protocol):
    """Seconds that engines need to load an adapter (`adapters`)."""

    seconds: float
    expected: dict[LeaseId, tuple[float, bool]]

    def first_token(self, lease: LeaseId, took_s: float) -> None: ...


class ProtectedClass(Protocol):
    """Requests of one class with targets (`classes`)."""

    name: str
    newest_s: float

    @property
    def hopeless(self) -> bool: ...
    def tightness(self) -> tuple[float, float, float]: ...
    def arrived(self, service: ServiceClass, prompt: float, output: float, now: float) -> None: ...
    def answered(self, lease: Lease, now: float, alone: bool) -> None: ...


class QueueTargets(Protocol):
    """Targets of waiting requests: when each is due, and the ones that meet theirs no more (`classes`)."""

    def due(self, request: Request, now: float, predicted: float) -> float: ...
    def late(self, key: QueueKey, now: float) -> list[Command]: ...


class TenantShares(Protocol):
    """Shares of tenants in the queue and in service: the one with the least service is next (`tenants`)."""

    #: Requests and bytes that wait, by tenant.
    waiting: dict[str | None, list[int]]

    def waits(self, request: Request) -> None: ...
    def left(self, request: Request) -> None: ...
    def booked(self, tenant: str | None, tokens: int) -> None: ...
    def ended(self, tenant: str | None, tokens: int) -> None: ...
    def served(self, tenant: str | None) -> float: ...
    def may_wait(self, request: Request) -> bool: ...
    def crowding_out(self, request: Request) -> Sequence[RequestId]: ...


class Splitting(Protocol):
    """Decisions to split requests, facts about their two legs, and holds between the legs (`split`)."""

    @property
    def held(self) -> int: ...
    def choose(
        self, ctx: SchedulingContext, ready: ReadyInstances, ceiling: int | None
    ) -> tuple[bool, Decision | None]: ...
    def first_token(self, lease: Lease, instance: Instance, now: float) -> None: ...
    def prefilled(self, lease: Lease, now: float) -> list[Command]: ...
    def unsplit(self, lease: Lease, outcome: Outcome, now: float) -> list[Command]: ...
    def released(self, hold: Hold, now: float) -> list[Command]: ...
    def sampled(self, instance: Instance, sample: EngineSample, now: float) -> None: ...
    def failing(self, now: float) -> list[tuple[str, str]]: ...
    def forget(self, incarnation: int) -> None: ...
    def let_go_expired(self, now: float) -> None: ...
    def hold_of(self, number: int) -> Hold | None: ...
    def check_integrity(self, instances: Sequence[Instance]) -> None: ...
