"""Classes with targets, as the scheduler keeps them (`options/classes/protected.py` has them)."""

from __future__ import annotations

from typing import Protocol

from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.types import Lease


class ProtectedClass(Protocol):
    """Requests of one class with targets."""

    name: str
    newest_s: float

    @property
    def hopeless(self) -> bool: ...
    def tightness(self) -> tuple[float, float, float]: ...
    def arrived(self, service: ServiceClass, prompt: float, output: float, now: float) -> None: ...
    def answered(self, lease: Lease, now: float, alone: bool) -> None: ...
