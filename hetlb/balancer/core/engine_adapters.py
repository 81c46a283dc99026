"""LoRA adapters, as decisions ask for them (`options/adapters` has them)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hetlb.balancer.core.types import LeaseId


class EngineAdapters(Protocol):
    """Adapters that one engine lists, and adapters that it is believed to have in its slots."""

    names: frozenset[str]
    slots: int

    def begin(self, name: str) -> None: ...
    def end(self, name: str) -> None: ...
    def told(self, running: Iterable[str]) -> None: ...
    def loads(self, name: str) -> bool | None: ...
    def cost_s(self, name: str, load_s: float, wait_s: float) -> float: ...
    def count(self) -> dict[str, int]: ...


class LoadTimes(Protocol):
    """Seconds that engines need to load an adapter."""

    seconds: float
    expected: dict[LeaseId, tuple[float, bool]]

    def first_token(self, lease: LeaseId, took_s: float) -> None: ...
