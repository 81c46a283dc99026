"""Splitting of requests, as the scheduler asks for it (`options/split/hand_overs.py` has it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hetlb.balancer.core.types import Command, EngineSample, Hold, Lease, Outcome, Request

if TYPE_CHECKING:
    from hetlb.balancer.core.instance import Instance
    from hetlb.balancer.core.placement import Decision
    from hetlb.balancer.core.ready import ReadyInstances


class Splitting(Protocol):
    """Decisions to split requests, the facts about their two legs, and what is held between the legs."""

    @property
    def held(self) -> int: ...
    def choose(
        self,
        request: Request,
        ready: ReadyInstances,
        now: float,
        predicted: float,
        own_size: int,
        long: float | None,
        ceiling: int | None,
        waited_s: float,
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
