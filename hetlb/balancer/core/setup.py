"""Set-up of a scheduler: the same object makes the proxy's, a worker's and the simulator's."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetlb.balancer.core.evidence.table import HealthParams
from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.predictor import LengthSample
from hetlb.balancer.core.queue import QueueLimits
from hetlb.balancer.core.types import Health, InstanceSpec


@dataclass(frozen=True, slots=True)
class SchedulerSetup(PickleByFields):
    """Everything a scheduler is built from; `lengths` is the sample of some predictors.

    `first_lease` is the number of its first lease: schedulers of one proxy share none.
    """

    specs: tuple[InstanceSpec, ...]
    policy: str
    params: PolicyParams = field(default_factory=PolicyParams)
    limits: QueueLimits = field(default_factory=QueueLimits)
    predictor: str = "online"
    seed: int = 0
    lengths: LengthSample | None = None
    initial_health: Health = Health.SUSPECT
    health: HealthParams = field(default_factory=HealthParams)
    now: float = 0.0
    first_lease: int = 1
