"""The fleet as exchanges see it: what the scheduler knows of models and engines, asked and never changed."""

from __future__ import annotations

from collections.abc import Collection

from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Health, Lease


class ServedFleet:
    """Answers about the fleet of a scheduler."""

    __slots__ = ("sampled", "scheduler")

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        #: True if a request of the last half second was read for its features, as a sample.
        self.sampled = False

    @property
    def models(self) -> Collection[str]:
        """Every name that some instance answers to."""
        return self.scheduler.fleet.ready

    @property
    def only_model(self) -> str:
        """The model of a fleet that serves one, "" of another."""
        models = self.scheduler.fleet.ready
        if models and len({instance.spec.model for instance in self.scheduler.instances}) == 1:
            return next(iter(models))
        return ""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of engines that publish blocks, 0 if none does or the size is unknown."""
        return self.scheduler.fleet.block_tokens

    @property
    def waiting(self) -> int:
        """Number of requests that wait for an instance."""
        return len(self.scheduler.queue)

    def reads_features(self) -> bool:
        """Return True if a request's features are read: some kind is refused, or it is a sample."""
        losses = self.scheduler.fleet.losses
        if self.sampled:
            return losses is not None and losses.kinds.known
        self.sampled = True
        return True

    def available(self, model: str) -> bool:
        """Return True if some instance of a model takes requests."""
        return self.scheduler.fleet.available(model)

    def takes(self, instance: str) -> bool | None:
        """Return True if an instance takes requests, False if it does not now, None if there is none."""
        known = self.scheduler.fleet.instances.get(instance)
        return None if known is None else not known.why_not

    def serves(self, lease: Lease) -> bool:
        """Return True if the instance of a lease serves its model."""
        instance = self.scheduler.ledger.leased[lease.id]
        if instance.evidence.health.state is Health.EJECTED:
            return False
        return instance.served is None or lease.request.model in instance.served

    def names(self, lease: Lease, model: str) -> bool:
        """Return True if the instance of a lease lists a model by this name, or lists none."""
        served = self.scheduler.ledger.leased[lease.id].served
        return served is None or model in served

    def hung_s(self, lease: Lease, now: float) -> float | None:
        """Return the seconds since an engine's counters last moved; None while they move, 0.0 if unknown."""
        evidence = self.scheduler.ledger.leased[lease.id].evidence
        if evidence.silence.works(now):
            return None
        if evidence.silence.stalled_since is None or not evidence.silence.counts(now):
            return 0.0
        return now - evidence.silence.stalled_since
