"""A scheduler among others over the same instances: processes that share the fleet's load.

Promise: every decision is made with what all of them have booked; each writes only what is its own, so that
the sum needs no lock and who dies takes its part along. Bounds of the queue and of retries hold for all
together. Who goes next for a model is whose turn it is over all of them (priority, tenant, age), wherever it
waits: who could place another one wakes its fellow instead, and goes itself at the tick by which that one has
not gone. No I/O here: the ledger is an object that others write to as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias

from hetlb.core.admission import Lane, Queue, Queued
from hetlb.core.demand import Demand
from hetlb.core.instance import Instance
from hetlb.core.ledger import NOTHING, Cell, Cells, Ledger, Standing
from hetlb.core.scheduler import TICK_S, Scheduler
from hetlb.core.setup import SchedulerSetup
from hetlb.core.shared_queue import SharedQueue
from hetlb.core.types import (
    Command,
    Dispatch,
    InstanceChange,
    InstanceRemoved,
    InstanceSpec,
    Lease,
    Outcome,
    Probed,
    ProbeResult,
    Request,
    RequestId,
)

__all__ = ["Evidence", "SharedScheduler"]

#: What decides who goes next for a model, the least: priority, its tenant's tag, arrival (ns), the fellow.
_Turn: TypeAlias = tuple[int, int, int, int]

#: Arrivals are told in sums: what is derived from them looks at seconds.
_ARRIVALS_S: Final = 0.01
#: For so long arrivals leave freed room to the one that was woken to take it.
HANDOVER_S: Final = 0.005

#: What one fellow saw of an instance's answers, for the others: a kind, the name, and what belongs to it.
Evidence: TypeAlias = tuple[Any, ...]

#: What is known of an instance besides its health, its speed and what is booked.
_KNOWN = (
    "admin", "busy_places", "busy_until", "capacity", "engines", "max_num_seqs", "ramp_s", "ramp_since",
    "rejoining", "sample", "sample_at", "served", "was_up",
)  # fmt: skip
_FAILURES = frozenset(
    {Outcome.CONNECT_FAILED, Outcome.NO_RESPONSE, Outcome.BROKEN_STREAM, Outcome.UPSTREAM_ERROR}
)


class _SharedDemand(Demand):
    """What is asked for of a model, here and elsewhere; what arrived here is to be told."""

    __slots__ = ("here", "told_at")

    def __init__(self) -> None:
        super().__init__()
        #: The sizes that arrived here, added up, and when that was told last.
        self.here = 0.0
        self.told_at = 0.0

    def arrived(self, size: float, now: float) -> None:
        """A request came in here."""
        self.here += size
        super().arrived(size, now)

    def arrived_elsewhere(self, size: float, now: float) -> None:
        """Requests of these sizes together came in elsewhere."""
        super().arrived(size, now)


class _Own:
    """Of one incarnation: its cell in our row, and prompts and their tokens that were read there for us.

    `told`: whether the cell holds what is so.
    """

    __slots__ = ("cell", "prompts", "tokens", "told")

    def __init__(self, cell: int) -> None:
        self.cell = cell
        self.prompts = 0
        self.tokens = 0
        self.told = True


class SharedScheduler(Scheduler):
    """A scheduler that shares its instances with fellows, and tells them what it saw (`tell`)."""

    queue_kind: ClassVar[type[SharedQueue]] = SharedQueue

    def __init__(
        self,
        setup: SchedulerSetup,
        *,
        oracle: Mapping[RequestId, int] | None = None,
        ledger: Ledger,
        cells: Cells,
        tell: Callable[[Evidence], object],
    ) -> None:
        self._ledger = ledger
        self._cells = cells
        self._tell = tell
        self._own: dict[int, _Own] = {}
        #: Instances of which something is still to be told (`tell_rest`).
        self._untold: list[Instance] = []
        self._at: dict[int, Instance] = {}
        self._models_at: dict[int, str] = {}
        super().__init__(setup, oracle=oracle)
        self._shared_queue = self.queue_kind(self._queue, ledger, cells.models)
        self._queue = self._shared_queue
        self._told_models: dict[str, Cell] = {}
        self._told_standing: Standing = (0, 0, 0)
        self._told_waiting = False
        self._standings: Sequence[Standing] = ()
        #: By model: whom we let go first, and since when.
        self._gave_way: dict[str, tuple[_Turn, float]] = {}
        self._to_wake: int | None = None
        self.know_models(dict(cells.models))

    # --- what others have done ---

    def take_in(self, now: float, *, everything: bool = False) -> None:
        """Take over what others have booked since the last time."""
        ledger = self._ledger
        for cell, old, new in ledger.changed(everything=everything):
            instance = self._at.get(cell)
            if instance is not None:
                instance.share(old, new, now)
                continue
            model = self._models_at.get(cell)
            if model is not None and new[0] > old[0] and self._policy.reads_demand:
                self._demand(model).arrived_elsewhere(float(new[0] - old[0]), now)
        if ledger.standings is not self._standings:
            self._standings = standings = ledger.standings
            queue = self._shared_queue
            queue.elsewhere = sum(each[0] for each in standings)
            queue.elsewhere_bytes = sum(each[1] for each in standings)

    def know_models(self, models: Mapping[str, int]) -> None:
        """Where models stand in the ledger; those known already stay."""
        for name, cell in models.items():
            if self._models_at.get(cell) != name:
                self._cells.models[name] = cell
                self._models_at[cell] = name
                self._ledger.follow(cell)

    def begin_life(self, first: int) -> None:
        """Number leases from here on."""
        self._next_lease = first

    def place(self, name: str, cell: int) -> None:
        """Where the next instance of this name stands in the ledger."""
        self._cells.instances[name] = cell

    def cell_of(self, name: str) -> int | None:
        """Where an instance stands in the ledger."""
        return self._cells.instances.get(name)

    def name_at(self, cell: int) -> str | None:
        """Which instance stands there."""
        instance = self._at.get(cell)
        return None if instance is None else instance.name

    def saved(self) -> dict[str, dict[str, Any]]:
        """What is known of the instances, by name, for `restore` elsewhere."""
        return {
            instance.name: {
                "health": instance.health.saved(),
                **{name: getattr(instance, name) for name in _KNOWN},
            }
            for instance in self._instances.values()
        }

    def restore(self, name: str, saved: Mapping[str, Any], now: float) -> None:
        """Know of an instance what another one knew."""
        instance = self._instances.get(name)
        if instance is None:
            return
        instance.health.restore(saved["health"])
        for each in _KNOWN:
            setattr(instance, each, saved[each])
        instance.learn_capacity(instance.capacity)
        self._reindex(now)

    # --- what is told to others ---

    def _publish_later(self, instance: Instance, own: _Own) -> None:
        if own.told:
            own.told = False
            self._untold.append(instance)

    def _publish(self, instance: Instance) -> None:
        own = self._own.get(instance.incarnation)
        if own is None:
            return
        own.told = True
        others = instance.others
        self._ledger.write(
            own.cell,
            (
                instance.work_ns - others[0],
                instance.kv_tokens - others[1],
                instance.prompt_tokens - others[2],
                instance.pending_prompt_tokens - others[3],
                instance.in_flight - others[4],
                instance.sequences - others[5],
                own.prompts,
                own.tokens,
            ),
        )
        if instance.removed and not instance.leases:
            del self._own[instance.incarnation]

    def _told(self, now: float, commands: list[Command], *, handover: Sequence[str] = ()) -> list[Command]:
        """Tell the others how the queue stands after an event, and wake whoever is to go before us."""
        queue = self._shared_queue
        if queue.held or self._retrying or self._told_waiting:
            standing = (len(queue.held), queue.bytes, len(self._retrying))
            if standing != self._told_standing:
                self._told_standing = standing
                self._ledger.write_standing(standing)
            self._tell_models(now)
            self._told_waiting = bool(self._told_models) or standing != (0, 0, 0)
        if self._to_wake is None and handover and queue.elsewhere:
            self._to_wake = self._next_elsewhere(handover)
        if self._to_wake is not None:
            fellow, self._to_wake = self._to_wake, None
            for model in handover:
                self._hand_over(model, now)
            self._ledger.wake(fellow)
        return commands

    def _tell_models(self, now: float) -> None:
        queue = self._shared_queue
        waiting: dict[str, tuple[int, int, int, int, int]] = {}
        for lane in queue.lanes:
            if lane[1] is not None or lane[2]:
                continue  # nobody else could place these
            fair = queue.fair(lane)
            assert fair is not None, f"a lane in which nobody waits: {lane}"
            flow = fair.turn()
            head, behind = flow.head, 1 if len(fair.flows) > 1 else 0
            waiting[lane[0]] = (
                queue.count(lane),
                round(head.arrived_at * 1e9),
                head.request.priority,
                flow.key,
                2 * flow.tag + behind,
            )
        for model in waiting.keys() | self._told_models.keys():
            cell = self._cells.models.get(model)
            if cell is None:
                continue
            count, oldest_ns, priority, key, tag = waiting.get(model, (0, 0, 0, 0, 0))
            size = Queue.waiting(queue, model) if count else 0
            figures: Cell = (self._arrived_of(model, now), size, count, oldest_ns, priority, 0, key, tag)
            if self._told_models.get(model) != figures:
                self._ledger.write(cell, figures)
            if count:
                self._told_models[model] = figures
            else:
                self._told_models.pop(model, None)

    def _hand_over(self, model: str, now: float) -> None:
        cell = self._cells.models.get(model)
        if cell is not None:
            told = self._told_models.get(model, (self._arrived_of(model, now), 0, 0, 0, 0, 0, 0, 0))
            until_ns = round((now + HANDOVER_S) * 1e9)
            self._ledger.write(cell, (*told[:5], until_ns, told[6], told[7]))

    def _arrived_of(self, model: str, now: float) -> int:
        demand = self._demands.get(model)
        if demand is None:
            return 0
        assert isinstance(demand, _SharedDemand)
        demand.told_at = now
        return round(demand.here)

    # --- facts about requests ---

    def on_arrival(self, request: Request, now: float) -> list[Command]:
        """A request came in."""
        self.take_in(now)
        queue = self._shared_queue
        behind = queue.elsewhere > 0 and self._handed_elsewhere(request.model, now)
        commands = self._arrived(request, now, behind)
        demand = self._demands.get(request.model)
        if isinstance(demand, _SharedDemand) and now - demand.told_at >= _ARRIVALS_S:
            self._tell_arrivals(request.model, now)
        if queue.held or queue.elsewhere or self._told_waiting:
            self._told(now, commands)
        return commands

    def _tell_arrivals(self, model: str, now: float) -> None:
        cell = self._cells.models.get(model)
        if cell is not None and model not in self._told_models:
            self._ledger.write(cell, (self._arrived_of(model, now), 0, 0, 0, 0, 0, 0, 0))

    def on_first_token(self, lease: Lease, now: float) -> list[Command]:
        """The first byte of an answer came."""
        instance = self._leased[lease.id]
        first, clean = lease.first_token_at is None, instance.health.clean
        commands = super().on_first_token(lease, now)
        if first and (own := self._own.get(instance.incarnation)) is not None:
            own.prompts += lease.request.sequences
            own.tokens += lease.prompt_tokens
            self._publish_later(instance, own)
        if not clean:
            self._tell(("answering", instance.name))
        return commands

    @property
    def untold(self) -> bool:
        """Whether `tell_rest` is to be called within a millisecond or so."""
        return bool(self._untold)

    def tell_rest(self, now: float) -> list[Command]:
        """Tell of first tokens and ends. Most often the next request for an instance has done so already."""
        untold, self._untold = self._untold, []
        freed: list[str] = []
        for instance in untold:
            own = self._own.get(instance.incarnation)
            if own is not None and not own.told:
                self._publish(instance)
                freed += self._names(instance)
        if freed and self._ledger.anybody_waits():  # they began to wait before they heard of it
            self.take_in(now)
            return self._told(now, [], handover=freed)
        return []

    def on_lease_ended(
        self, lease: Lease, outcome: Outcome, now: float, *, retry: bool = True, server_error: bool = False
    ) -> list[Command]:
        """A lease ended."""
        instance = self._leased[lease.id]
        at_once = bool(self._queue.held) or outcome is not Outcome.OK or self._ledger.anybody_waits()
        if at_once:
            self.take_in(now)
        clean = instance.health.clean
        commands = super().on_lease_ended(lease, outcome, now, retry=retry, server_error=server_error)
        own = self._own.get(instance.incarnation)
        if at_once or own is None or instance.removed:
            self._publish(instance)
        else:  # nobody waits for what is free now: whoever is placed there next tells of both
            self._publish_later(instance, own)
        if outcome in _FAILURES or (outcome is Outcome.OK and not clean):
            self._tell(("ended", instance.name, outcome, server_error))
        queue = self._shared_queue
        if queue.elsewhere:
            return self._told(now, commands, handover=self._names(instance))
        if queue.held or self._retrying or self._told_waiting:
            self._told(now, commands)
        return commands

    def on_busy(self, lease: Lease, retry_after_s: float | None, now: float) -> list[Command]:
        """An engine said that it is busy."""
        instance = self._leased[lease.id]
        self.take_in(now)
        commands = super().on_busy(lease, retry_after_s, now)
        self._publish(instance)
        if retry_after_s is not None and retry_after_s > 0.0:
            self._tell(("busy", instance.name, retry_after_s, lease.request.sequences))
        return self._told(now, commands)

    def on_cancelled(self, request_id: int, now: float) -> list[Command]:
        """The client of a waiting request left."""
        return self._told(now, super().on_cancelled(request_id, now))

    def on_tick(self, now: float) -> list[Command]:
        """Time passed. Whom we let go first and who did not go keeps us no longer."""
        self.take_in(now, everything=True)
        return self._told(now, super().on_tick(now))

    def on_wake(self, now: float) -> list[Command]:
        """Another one made way, or has nothing more to place."""
        self.take_in(now)
        models = {lane[0] for lane in self._queue.lanes}
        commands = self._flush(now)
        if not models:
            models = set(self._ready)
        return self._told(now, commands, handover=tuple(models))

    def set_policy(self, name: str, now: float) -> list[Command]:
        """Switch the policy."""
        self.take_in(now)
        return self._told(now, super().set_policy(name, now))

    # --- facts about instances ---

    def on_instance(self, change: InstanceChange, now: float) -> list[Command]:
        """Something about an instance changed."""
        instance = None
        if isinstance(change, Probed | InstanceRemoved):
            instance = self._instances.get(change.name)
        clean = instance is None or instance.health.clean
        commands = super().on_instance(change, now)
        if instance is not None:
            if isinstance(change, Probed):
                if not clean or change.result is not ProbeResult.OK:
                    self._tell(("probed", change.name, change.result))
            else:
                own = self._own.get(instance.incarnation)
                if own is not None:
                    self._at.pop(own.cell, None)
                    if not instance.leases:
                        del self._own[instance.incarnation]
        return self._told(now, commands)

    def on_evidence(self, evidence: Evidence, now: float) -> list[Command]:
        """What another one saw of an instance."""
        kind, name = evidence[0], evidence[1]
        instance = self._instances.get(name)
        if instance is None:
            return []
        health = instance.health
        if kind == "busy":
            instance.say_busy(evidence[2], evidence[3], now)
            self._reindex(now)
            return []
        if kind == "probed":
            return super().on_instance(Probed(name, evidence[2]), now)
        if kind == "answering":
            changed = health.on_answering(now)
        elif evidence[2] is Outcome.OK:
            changed = health.on_success(now)
        else:
            return self._told(now, self._ended_badly(instance, evidence[2], now, evidence[3]))
        return self._health_changed(instance, now) + self._flush(now) if changed else []

    def adopt_health(self, name: str, state: Mapping[str, Any], now: float) -> list[Command]:
        """Take over how an instance's health stands by the evidence of all."""
        instance = self._instances.get(name)
        if instance is None:
            return []
        health = instance.health
        before, doubted = health.state, health.in_doubt(now)
        health.restore(state)
        if health.state is not before:
            return self._told(now, self._health_changed(instance, now) + self._flush(now))
        if doubted or health.in_doubt(now):
            self._reindex(now)
        return []

    # --- inside ---

    def _demand(self, model: str) -> _SharedDemand:
        demand = self._demands.get(model)
        if demand is None:
            demand = self._demands[model] = _SharedDemand()
        assert isinstance(demand, _SharedDemand)
        return demand

    def _add(self, spec: InstanceSpec, now: float) -> Instance:
        instance = super()._add(spec, now)
        cell = self._cells.instances.get(spec.name)
        if cell is not None:
            self._at[cell] = instance
            self._own[instance.incarnation] = _Own(cell)
            instance.share(NOTHING, self._ledger.follow(cell), now)
        return instance

    def _book(self, found: Any, ready: Any, now: float) -> Dispatch:
        placed = super()._book(found, ready, now)
        self._publish(found.instance)
        return placed

    def _may_retry(self) -> bool:
        standings = self._ledger.standings
        return self._within_budget(
            len(self._retrying) + sum(each[2] for each in standings),
            len(self._leased) + sum(each.others[4] for each in self._instances.values()),
        )

    def _place_next(self, lane: Lane, now: float) -> Command | None:
        if self._shared_queue.elsewhere and self._gives_way(lane, now):
            return None
        return super()._place_next(lane, now)

    def _gives_way(self, lane: Lane, now: float) -> bool:
        """Whether another one's next for the same model is to go before ours: for so long, then we go."""
        model, pinned, again = lane
        cell = self._cells.models.get(model)
        fair = self._queue.fair(lane)
        if cell is None or pinned is not None or again or fair is None:
            return False
        flow = fair.turn()
        head = flow.head
        mine = (head.request.priority, flow.tag, round(head.arrived_at * 1e9), self._ledger.number)
        found = self._turn_elsewhere(cell)
        if found is None or found > mine:
            return False
        if not self._could_place(head, now):
            return True
        known = self._gave_way.get(model)
        if known is None or known[0] != found:
            self._gave_way[model] = found, now
        elif now - known[1] >= TICK_S:
            return False
        self._to_wake = found[3]
        return True

    def _could_place(self, head: Queued, now: float) -> bool:
        request = head.request
        ready = self._ready.get(request.model)
        predicted = self._predictor.predict(request) if request.generates else 0.0
        return ready is not None and self._choose(request, ready, now, predicted, head.size) is not None

    def _turn_elsewhere(self, cell: int) -> _Turn | None:
        """Whose turn it is among those that wait in others, by the tags as they are by now."""
        ledger = self._ledger
        found: list[_Turn] = []
        for fellow, each in ledger.cells(cell):
            if not each[2]:
                continue
            told = each[7] >> 1
            tag = max([told, *[entry[0] for entry in ledger.entries(each[6])]])
            if tag > told and each[7] & 1:  # that tenant was served since: it may be another one's turn there
                ledger.wake(fellow)
            found.append((each[4], tag, each[3], fellow))
        return min(found, default=None)

    def _next_elsewhere(self, models: Sequence[str]) -> int | None:
        """Who waits longest elsewhere for one of these models that nobody waits for here."""
        mine = {lane[0] for lane in self._queue.lanes}
        found = [
            turn
            for model in models
            if model not in mine and (cell := self._cells.models.get(model)) is not None
            if (turn := self._turn_elsewhere(cell)) is not None
        ]
        return min(found)[3] if found else None

    def _handed_elsewhere(self, model: str, now: float) -> bool:
        cell = self._cells.models.get(model)
        return cell is not None and any(each[5] > now * 1e9 for _, each in self._ledger.cells(cell))

    def _names(self, instance: Instance) -> Sequence[str]:
        return instance.served or ((instance.spec.model,) if instance.spec.model else ())
