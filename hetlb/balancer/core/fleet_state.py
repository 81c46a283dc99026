"""State of the fleet: its instances, the models that they answer to, and which of them may be taken out."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from hetlb.balancer.core import learning
from hetlb.balancer.core.evidence.evidence import Evidence
from hetlb.balancer.core.evidence.table import HealthParams
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.occupancy import ChangeCounter
from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.predictor import LengthSample
from hetlb.balancer.core.prefix_index import PrefixIndex, Tree
from hetlb.balancer.core.queue import Queue, QueueLimits
from hetlb.balancer.core.ready import ReadyInstances
from hetlb.balancer.core.speed import SLOWED_FACTOR, averaged
from hetlb.balancer.core.types import Command, Health, HealthChanged, InstanceSpec, Request

if TYPE_CHECKING:
    from hetlb.balancer.core.evidence.losses import Losses
    from hetlb.balancer.core.twins import Twins


@dataclass(frozen=True, slots=True)
class SchedulerSetup(PickleByFields):
    """Everything that a scheduler is built from: the proxy's, a worker's or the simulator's.

    `lengths` is the sample of some predictors. `first_lease` is the number of its first lease: schedulers of
    one proxy share none.
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


#: Seconds that the name of a model outlives its last instance, and most such names.
_PROMISE_S: Final = 3600.0
_MOST_PROMISES: Final = 1024
#: Weight of a factor with little evidence, in a mean of factors.
_LEAST_WEIGHT: Final = 0.01


class FleetState:
    """The instances and, computed at the first use after a change, the results for each model."""

    def __init__(self, setup: SchedulerSetup, queue: Queue, rng: random.Random) -> None:
        """Start without instances.

        `queue` learns from it which lengths the instances of a model can take.
        """
        self._params = setup.health
        self._initial_health = setup.initial_health
        self._queue = queue
        self._rng = rng
        self._changes = ChangeCounter()
        self._next_incarnation = 1
        self._next_cache = -1
        #: By name, in file order.
        self.instances: dict[str, Instance] = {}
        #: Time of the last change that `_ready` lacks, None if it is up to date.
        self._changed_at: float | None = None
        self._ready: dict[str, ReadyInstances] = {}
        #: Models without an instance that takes requests, and since when; as of the last look at `ready`.
        self.down_since: dict[str, float] = {}
        #: Names that the fleet file and its sources promise. Names of models without an instance, each with
        #: the time at which it is forgotten.
        self.promised: tuple[str, ...] = ()
        #: Further names for clients, which are replaced before a request comes here.
        self.aliases: tuple[str, ...] = ()
        self._outlive: dict[str, float] = {}
        #: Names of all LoRA adapters, as of the same look.
        self.adapters: frozenset[str] = frozenset()
        #: Prefixes in the caches of all instances.
        self.prefixes = PrefixIndex()
        #: Account of lost answers, None before the first one.
        self.losses: Losses | None = None
        #: Instances by the start time of their process, if it is known.
        self.by_start: dict[float, list[Instance]] = {}
        #: Comparison of instances with equal start times, None before the first.
        self._twins: Twins | None = None
        #: Instances that publish KV events.
        self.publishers: list[Instance] = []
        for spec in setup.specs:
            self.add(spec, setup.now)
        self.reindex(setup.now)

    def available(self, model: str) -> bool:
        """Return True if some instance of a model takes requests."""
        return model in self.ready and model not in self.down_since

    @property
    def ready(self) -> dict[str, ReadyInstances]:
        """Ready instances by every name that some instance answers to."""
        if self._changed_at is not None:
            self._rebuild(self._changed_at)
        return self._ready

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the engines that publish KV events, 0 if none does."""
        return max((each.blocks.block_tokens for each in self.publishers if each.blocks), default=0)

    def fit_of(self, request: Request) -> int:
        """Return the smallest class of instances that can take a request (see `ReadyInstances`)."""
        ready = self.ready.get(request.model)
        return 0 if ready is None else ready.fit_of(request)

    # --- changes; `reindex` follows ---

    def add(self, spec: InstanceSpec, now: float) -> Instance:
        """Return a new incarnation of an instance."""
        evidence = Evidence(self._rng, now, self._initial_health)
        instance = Instance(spec, self._next_incarnation, evidence, now, self._changes, self.prefixes)
        self.instances[spec.name] = instance
        self._next_incarnation += 1
        return instance

    def promise(self, models: tuple[str, ...]) -> None:
        """Take the names that the file and its sources promise, and forget names that they no longer have."""
        for name in self.promised:
            if name not in models:
                self._outlive.pop(name, None)
        self.promised = models

    def outlives(self, names: tuple[str, ...], now: float) -> None:
        """Keep the names of models known for a while after the instance that served them has gone."""
        for name in names:
            self._outlive.pop(name, None)
            self._outlive[name] = now + _PROMISE_S
        while len(self._outlive) > _MOST_PROMISES:
            del self._outlive[next(iter(self._outlive))]

    def _promises(self, now: float) -> list[str]:
        """Return the names that need no instance to be known.

        A name is left out if its instance lists other models: the client is told the valid names.
        """
        for name in [name for name, until in self._outlive.items() if until <= now]:
            del self._outlive[name]
        other = {each.spec.model for each in self.instances.values() if each.served}
        return [name for name in (*self.promised, *self._outlive) if name not in other]

    def remove(self, instance: Instance, now: float) -> None:
        """Note that an instance has left; its leases go on."""
        instance.removed = True
        self.outlives(instance.models, now)
        if self.losses is not None:
            self.losses.kinds.forget(instance.name)
        self._forget_twins(instance)
        self._leave_start(instance)
        instance.tree.retire()
        del self.instances[instance.name]
        self.publishers = [each for each in self.publishers if each is not instance]

    def restarted(self, instance: Instance, now: float) -> None:
        """Note that the process of an instance is new: its prefix cache is empty; it starts slowly."""
        self.emptied(instance)
        instance.evidence.health.gone = False
        instance.evidence.forget()
        if self.losses is not None:
            self.losses.kinds.forget(instance.name)
        if instance.evidence.health.state is Health.UP:
            instance.evidence.room.begin_slow_start(self._params.slow_start_s, now)
        else:
            instance.evidence.room.restarted = True

    def emptied(self, instance: Instance) -> None:
        """Note that the prefix cache of an instance is empty."""
        instance.tree.retire()
        instance.tree = Tree(self.prefixes, self._next_cache)
        self._next_cache -= 1
        instance.touched()
        if instance.ranks is not None:
            from hetlb.balancer.core.ranks import Ranks

            instance.ranks = Ranks(len(instance.ranks.each))

    def share_speed(self, model: str, profiled: bool) -> None:
        """Give instances without an answer yet the geometric mean of the others' factors.

        Instances with and without a profile are kept apart, since their factors refer to different models.
        Without a profile, each instance with answers gets the mean of the factors near its own.
        """
        alike = [e for e in self.instances.values() if e.spec.model == model and e.profiled is profiled]
        seen = [each for each in alike if each.speed.seen]
        if not seen:
            return
        shown = [(each.speed.shown, max(_LEAST_WEIGHT, each.speed.confidence)) for each in seen]
        if not profiled and len(seen) > 1:
            for each, factor in zip(seen, averaged(shown), strict=True):
                if factor != each.speed.factor:
                    each.speed.factor = factor
                    each.take_speed()
        logs = math.fsum([weight * math.log(factor) for factor, weight in shown])
        mean = math.exp(logs / math.fsum([weight for _, weight in shown]))
        for each in alike:
            if each.speed.assume(mean):
                each.take_speed()

    def process_seen(self, instance: Instance, began: float, now: float) -> bool:
        """Note when an instance's process began. Return True if that is another process than before."""
        known = instance.began
        if known == began:
            instance.evidence.health.gone = False
            alike = self.by_start[began]
            if len(alike) > 1:
                if self._twins is None:
                    from hetlb.balancer.core.twins import Twins

                    self._twins = Twins()
                self._twins.scraped(instance, alike, now)
            return False
        self._forget_twins(instance)
        if known is not None and began < known:  # another server's at its address
            return False
        self._leave_start(instance)
        instance.began = began
        self.by_start.setdefault(began, []).append(instance)
        if known is None:
            return False
        self.restarted(instance, now)
        return True

    def _leave_start(self, instance: Instance) -> None:
        """Take an instance out of the list of its start."""
        if instance.began is not None:
            left = [each for each in self.by_start[instance.began] if each is not instance]
            if left:
                self.by_start[instance.began] = left
            else:
                del self.by_start[instance.began]

    def _forget_twins(self, instance: Instance) -> None:
        """Forget how an instance compares with others: its process is another one, or it has left."""
        if self._twins is not None:
            self._twins.forget(instance)
        instance.twin = ""

    def end_slow_starts(self, model: str) -> bool:
        """End the slow starts of a model's instances: its requests wait. Return True if there was one."""
        ready = self.ready.get(model)
        if ready is None or not ready.throttled:
            return False
        ended = [instance.evidence.room.end_slow_start() for instance in ready.able]
        return any(ended)

    def reindex(self, now: float) -> None:
        """Recompute the instances of each model: at once if requests wait, else at the next use."""
        self._changed_at = now
        if self._queue.held:
            self._rebuild(now)
            self._queue.refit(self.fit_of)

    def _rebuild(self, now: float) -> None:
        """Compute the instances that answer to each name, and the names without an instance to go to."""
        self._changed_at = None
        by_model: dict[str, list[Instance]] = {}
        for instance in self.instances.values():
            for name in instance.models:
                by_model.setdefault(name, []).append(instance)
        for name in self._promises(now):
            by_model.setdefault(name, [])
        self.adapters = frozenset(
            name
            for each in self.instances.values()
            if each.adapters is not None
            for name in each.adapters.names
        )
        self._ready = {model: ReadyInstances(instances, now) for model, instances in by_model.items()}
        waiting = {entry.request.model for entry in self._queue}
        self.down_since = {
            model: self.down_since.get(model, now)
            for model in by_model.keys() | waiting
            if not any(instance.routable or instance.comes for instance in by_model.get(model, ()))
        }

    def health_changed(self, instance: Instance, now: float) -> list[Command]:
        """Recompute the instances of each model after the health of one changed. Return commands."""
        if instance.evidence.health.state is Health.UP and (
            instance.evidence.room.restarted or instance.evidence.health.gone
        ):
            self.restarted(instance, now)
        self.reindex(now)
        if instance.removed:  # its name may be another's by now
            return []
        return [HealthChanged(instance.name, instance.evidence.health.state, instance.evidence.health.reason)]

    # --- evidence ---

    def account(self) -> Losses:
        """Return the account of lost answers; make it if no answer was lost before."""
        if self.losses is None:
            from hetlb.balancer.core.evidence.losses import Losses

            self.losses = Losses(self)
        return self.losses

    def peers(self, instance: Instance) -> list[Instance]:
        """Return the instances that answer to a name of an instance, itself among them."""
        return list(dict.fromkeys(each for pool in self._pools(instance) for each in pool))

    def watch(self, tokens_at: Mapping[str, float], now: float, by_counters: bool, lag_s: float) -> bool:
        """Check whether each instance works and is in doubt. Return True if one of these changed."""
        changed = False
        if self.losses is not None:
            self.losses.age(now)
        for instance in self.instances.values():
            evidence = instance.evidence
            evidence.answers.age(now)
            sample = instance.sample
            if not by_counters or (evidence.silence.counts(now) and sample is not None and sample.running):
                changed = learning.watch(instance, tokens_at.get(instance.name), now) or changed
            if evidence.silence.silent_since is None:
                instance.speed.age(now)
            if instance.speed.changed:
                instance.speed.changed = False
                instance.take_speed()
                self.share_speed(instance.spec.model, instance.profiled)
            if instance.speed.lately >= SLOWED_FACTOR * instance.speed.usual:
                from hetlb.balancer.core.evidence.slowness import compare

                compare(instance, self.peers(instance), lag_s, now)
            if evidence.answers.excess > 0.0:
                changed = self.account().judge(instance, now) or changed
        if changed:
            self.reindex(now)
        return changed

    def _pools(self, instance: Instance) -> list[Sequence[Instance]]:
        """Return the instances by each name that they answer to."""
        return [ready.instances for ready in self.ready.values() if instance in ready.instances]

    def has_another(self, instance: Instance) -> bool:
        """Return True if some other instance could take over the requests of this one."""
        names = instance.models
        return any(
            other is not instance and other.routable and any(name in names for name in other.models)
            for other in self.instances.values()
        )
