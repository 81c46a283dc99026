"""Event log: facts and decisions of the scheduler as JSON lines, and a replay of them.

A log holds everything a decision depends on (the set-up with its seed, then every fact with its
time), so that replaying it gives the same decisions, to the last bit. The first line is the set-up; every
further line is one fact with the decisions it led to. No prompt text is in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from enum import Enum
from typing import Any, Final, get_args

from hetlb.balancer.core.block_index import KINDS, KvEventBatch
from hetlb.balancer.core.evidence.table import HealthParams
from hetlb.balancer.core.facts import (
    AdminStateSet,
    CapacityLearned,
    EngineHistory,
    EngineSample,
    InstanceAdded,
    InstanceChange,
    InstanceUpdated,
    Probed,
    ProbeResult,
)
from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.kv_need import KvNeed
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.ledger import Booked
from hetlb.balancer.core.length_samples import LengthDistribution
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.placement import Splitting
from hetlb.balancer.core.policies.base import PlannedType, PolicyParams
from hetlb.balancer.core.queue import QueueLimits, WaitingElsewhere
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.step_times import (
    DecodeTable,
    LaunchTime,
    MixedTerm,
    PnormPrefill,
    PrefillGrid,
    SplitKv,
)
from hetlb.balancer.core.types import (
    AdminState,
    CanarySide,
    Capacity,
    Command,
    Connector,
    Dispatch,
    Health,
    HealthChanged,
    Hold,
    InstanceSpec,
    KvLink,
    Lease,
    LeaseId,
    Outcome,
    Places,
    Reject,
    Request,
    RequestId,
    Role,
)

FORMAT_VERSION: Final = 6


class RecordingScheduler(Scheduler):
    """A scheduler that writes every fact and its commands to `write`, a line at a time."""

    def __init__(
        self,
        setup: SchedulerSetup,
        *,
        write: Callable[[str], object],
        splitting: Callable[[Scheduler], Splitting] | None = None,
    ) -> None:
        self._write = write
        super().__init__(setup, splitting=splitting)

    def _record(self, kind: str, now: float, commands: list[Command], **fact: Any) -> list[Command]:
        fact = {name: _plain(value) for name, value in fact.items()}
        line = {"t": now, "kind": kind, **fact, "out": [encode_command(command) for command in commands]}
        self._write(json.dumps(line, separators=(",", ":")) + "\n")
        return commands

    def on_arrival(self, request: Request, now: float) -> list[Command]:
        return self._record("arrival", now, super().on_arrival(request, now), request=request)

    def on_first_token(self, lease: Lease, now: float) -> list[Command]:
        return self._record("first_token", now, super().on_first_token(lease, now), lease=lease)

    def on_prefilled(self, lease: Lease, now: float) -> list[Command]:
        return self._record("prefilled", now, super().on_prefilled(lease, now), lease=lease)

    def on_unsplit(self, lease: Lease, outcome: Outcome, now: float) -> list[Command]:
        commands = super().on_unsplit(lease, outcome, now)
        return self._record("unsplit", now, commands, lease=lease, outcome=outcome)

    def on_hold_released(self, hold: Hold, now: float) -> list[Command]:
        return self._record("hold_released", now, super().on_hold_released(hold, now), hold=hold)

    def on_lease_ended(
        self,
        lease: Lease,
        outcome: Outcome,
        now: float,
        *,
        retry: bool = True,
        generated: int | None = None,
    ) -> list[Command]:
        commands = super().on_lease_ended(lease, outcome, now, retry=retry, generated=generated)
        told = {
            "output_tokens": lease.output_tokens,
            "cached_tokens": lease.reported_cached_tokens,
            "odd": lease.odd,
        }
        end = {"lease": lease, "outcome": outcome, **told, "retry": retry, "generated": generated}
        return self._record("lease_ended", now, commands, **end)

    def on_moving(self, lease: Lease, generated: int, now: float) -> list[Command]:
        commands = super().on_moving(lease, generated, now)
        return self._record("moving", now, commands, lease=lease, generated=generated)

    def on_refused(
        self,
        lease: Lease,
        status: int,
        retry_after_s: float | None,
        now: float,
        *,
        features: Sequence[str] = (),
        may_move: bool = True,
    ) -> list[Command]:
        commands = super().on_refused(lease, status, retry_after_s, now, features=features, may_move=may_move)
        fact = {"lease": lease, "status": status, "retry_after_s": retry_after_s, "may_move": may_move}
        return self._record("refused", now, commands, features=list(features), **fact)

    def on_sweep(
        self,
        tokens_at: Mapping[str, float],
        now: float,
        *,
        by_counters: bool = False,
        features: Sequence[tuple[int, Sequence[str]]] = (),
        still: Sequence[int] = (),
        lag_s: float = 0.0,
    ) -> list[Command]:
        commands = super().on_sweep(
            tokens_at, now, by_counters=by_counters, features=features, still=still, lag_s=lag_s
        )
        told = {"tokens_at": dict(tokens_at), "by_counters": by_counters, "features": features}
        told |= ({"still": list(still)} if still else {}) | ({"lag_s": lag_s} if lag_s else {})
        return self._record("sweep", now, commands, **told)

    def on_stranded(self, lease: Lease, now: float) -> list[Command]:
        return self._record("stranded", now, super().on_stranded(lease, now), lease=lease)

    def on_misplaced(self, lease: Lease, now: float) -> list[Command]:
        return self._record("misplaced", now, super().on_misplaced(lease, now), lease=lease)

    def wait_again(self, now: float) -> list[Command]:
        return self._record("wait_again", now, super().wait_again(now))

    def on_cancelled(self, request_id: RequestId, now: float) -> list[Command]:
        return self._record("cancelled", now, super().on_cancelled(request_id, now), request=request_id)

    def restore(self, live: Booked, now: float, *, own: bool = True, arrived: bool = False) -> Lease | None:
        lease = super().restore(live, now, own=own, arrived=arrived)
        self._record("restore", now, [], lease=lease, live=live, arrived=arrived)
        return lease

    def assume(self, request: Request, now: float) -> Lease | None:
        lease = super().assume(request, now)
        self._record("assume", now, [], lease=lease, request=request)
        return lease

    def on_waiting_elsewhere(
        self, sizes: Mapping[str, int], now: float, there: WaitingElsewhere | None = None
    ) -> list[Command]:
        commands = super().on_waiting_elsewhere(sizes, now, there)
        return self._record("waiting_elsewhere", now, commands, sizes=dict(sizes), there=there)

    def on_instance(self, change: InstanceChange, now: float) -> list[Command]:
        commands = super().on_instance(change, now)
        return self._record("instance", now, commands, change=type(change).__name__, **{"with": change})

    def on_scrape(self, name: str, sample: EngineSample, now: float) -> list[Command]:
        commands = super().on_scrape(name, sample, now)
        return self._record("scrape", now, commands, name=name, sample=sample)

    def on_kv_events(self, name: str, batch: KvEventBatch, now: float) -> list[Command]:
        commands = super().on_kv_events(name, batch, now)
        events = [{"kind": type(event).__name__, **asdict(event)} for event in batch.events]
        told = {"begins": batch.begins, "lost": batch.lost, "events": events}
        return self._record("kv_events", now, commands, name=name, batch=told)

    def set_policy(self, name: str, now: float) -> list[Command]:
        return self._record("policy", now, super().set_policy(name, now), name=name)

    def on_tick(self, now: float) -> list[Command]:
        return self._record("tick", now, super().on_tick(now))


def _plain(value: Any) -> Any:
    """Encode a part of a fact for JSON: a lease or hold by its number, a dataclass by its fields."""
    if isinstance(value, Lease | Hold):
        return value.id
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _frozen(value: Any) -> Any:
    """Return a value of JSON as dataclasses hold it: lists are tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


#: Fields of dataclasses with types unknown to JSON, and their classes. In a list each item has the class.
_FIELDS: Final[dict[type[Any], dict[str, type[Any]]]] = {
    SchedulerSetup: {
        "specs": InstanceSpec,
        "params": PolicyParams,
        "limits": QueueLimits,
        "initial_health": Health,
        "health": HealthParams,
    },
    PolicyParams: {"types": PlannedType},
    InstanceSpec: {"latency": LatencyModel, "capacity": Capacity, "role": Role, "kv_transfer": KvLink},
    KvLink: {"connector": Connector},
    Capacity: {"kv_need": KvNeed},
    LatencyModel: {
        "better_prefill": PnormPrefill,
        "better_decode": DecodeTable,
        "mixed": MixedTerm,
        "split_kv": SplitKv,
        "launch": LaunchTime,
    },
    PnormPrefill: {"grid": PrefillGrid},
    Request: {"service": ServiceClass, "places": Places},
    Places: {"side": CanarySide},
    Booked: {"request": Request},
    EngineSample: {"capacity": Capacity, "history": EngineHistory},
    InstanceAdded: {"spec": InstanceSpec, "more": InstanceSpec},
    InstanceUpdated: {"spec": InstanceSpec},
    AdminStateSet: {"state": AdminState},
    CapacityLearned: {"capacity": Capacity},
    Probed: {"result": ProbeResult},
}


def read_value(kind: type[Any], raw: Any) -> Any:
    """Read what `asdict` made of a dataclass, or a member of an enum. Raises `TypeError`, `ValueError`."""
    if raw is None:
        return None
    if isinstance(raw, list):
        return tuple([read_value(kind, each) for each in raw])
    if issubclass(kind, Enum):
        return kind(raw)
    if not isinstance(raw, dict):
        raise TypeError(f"expected a {kind.__name__}")
    fields = _FIELDS.get(kind, {})
    return kind(
        **{
            name: read_value(fields[name], value) if name in fields else _frozen(value)
            for name, value in raw.items()
        }
    )


def _read_kv_events(raw: dict[str, Any]) -> KvEventBatch:
    events = [read_value(KINDS[each.pop("kind")], each) for each in raw.pop("events")]
    return KvEventBatch(tuple(events), **raw)


def encode_command(command: Command) -> list[Any]:
    """Return a command as a short JSON list: its kind, then its identity."""
    if isinstance(command, Dispatch):
        lease = command.lease
        said = ["dispatch", command.request_id, lease.id, lease.instance, lease.work_ns, lease.kv_tokens]
        decode = lease.decode
        return said if decode is None else [*said, decode.id, decode.instance]
    if isinstance(command, Reject):
        return ["reject", command.request_id, command.reason.value]
    if isinstance(command, HealthChanged):
        return ["health", command.instance, command.health.value]
    return ["pass_on", command.request_id, command.lease.id]


def encode_setup(setup: SchedulerSetup) -> str:
    """Return the first line of a log."""
    document = {"version": FORMAT_VERSION, "kind": "setup", **asdict(setup)}
    document["lengths"] = setup.lengths.lengths if setup.lengths else None
    return json.dumps(document, separators=(",", ":")) + "\n"


def decode_setup(line: str) -> SchedulerSetup:
    """Read the first line of a log. Raises `ValueError` when it is not one."""
    raw = _object(line)
    if raw.get("kind") != "setup" or raw.get("version") != FORMAT_VERSION:
        raise ValueError(f"expected a set-up line of format {FORMAT_VERSION}")
    try:
        fields = {name: value for name, value in raw.items() if name not in ("version", "kind", "lengths")}
        setup: SchedulerSetup = read_value(SchedulerSetup, fields)
        lengths = LengthDistribution(raw["lengths"]) if raw["lengths"] else None
    except Exception as caught:  # of whatever kind: a line may have any values
        raise ValueError(f"the set-up line lacks or has too much: {_said(caught)}") from caught
    return replace(setup, lengths=lengths)


def _object(line: str) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as caught:
        raise ValueError(f"expected JSON: {caught}") from caught
    if not isinstance(raw, dict):
        raise ValueError("expected a JSON object")
    return raw


_CHANGES: Final = {each.__name__: each for each in get_args(InstanceChange)}


@dataclass(frozen=True, slots=True)
class Replayed(PickleByFields):
    """One fact of a log: its line number, the decision then and the decision now."""

    line: int
    recorded: list[Any]
    commands: list[Command]

    @property
    def same(self) -> bool:
        """True if the decisions agree."""
        return self.recorded == [encode_command(command) for command in self.commands]


#: Facts that call one method of `Scheduler` with the arguments of their line: its name, its other arguments.
_METHODS: Final[dict[str, tuple[str, dict[str, type[Any]]]]] = {
    "arrival": ("on_arrival", {"request": Request}),
    "first_token": ("on_first_token", {"lease": Lease}),
    "prefilled": ("on_prefilled", {"lease": Lease}),
    "unsplit": ("on_unsplit", {"lease": Lease, "outcome": Outcome}),
    "lease_ended": ("on_lease_ended", {"lease": Lease, "outcome": Outcome}),
    "refused": ("on_refused", {"lease": Lease}),
    "sweep": ("on_sweep", {}),
    "stranded": ("on_stranded", {"lease": Lease}),
    "misplaced": ("on_misplaced", {"lease": Lease}),
    "wait_again": ("wait_again", {}),
    "moving": ("on_moving", {"lease": Lease}),
    "waiting_elsewhere": ("on_waiting_elsewhere", {"there": WaitingElsewhere}),
    "scrape": ("on_scrape", {"sample": EngineSample}),
    "policy": ("set_policy", {}),
    "tick": ("on_tick", {}),
}


def _said(error: Exception) -> str:
    """Return the kind of an error and what it says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Replay:
    """Feeds the facts of a log to a scheduler built from the log's own set-up."""

    def __init__(
        self, lines: Iterable[str], splitting: Callable[[Scheduler], Splitting] | None = None
    ) -> None:
        self._lines = iter(lines)
        self.setup = decode_setup(next(self._lines, ""))
        try:
            self.scheduler = Scheduler(self.setup, splitting=splitting)
        except Exception as caught:  # of whatever kind: the line alone is its cause
            raise ValueError(f"the set-up line makes no scheduler: {_said(caught)}") from caught
        self.scheduler.contain(lambda request, error: None)
        self._leases: dict[LeaseId, Lease] = {}

    def __iter__(self) -> Iterator[Replayed]:
        """Yield the entries. Raises `ValueError` naming the line that fails."""
        for number, line in enumerate(self._lines, start=2):
            try:
                raw = _object(line)
                commands = self._feed(raw)
                recorded = [*raw["out"]]
            except Exception as caught:  # of whatever kind: a line may have any values
                raise ValueError(f"line {number}: {_said(caught)}") from caught
            for command in commands:
                if isinstance(command, Dispatch):
                    self._leases[command.lease.id] = command.lease
                    if command.lease.decode is not None:
                        self._leases[command.lease.decode.id] = command.lease.decode
            yield Replayed(number, recorded, commands)

    def _feed(self, raw: dict[str, Any]) -> list[Command]:
        """Feed one fact."""
        scheduler, leases, kind, now = self.scheduler, self._leases, raw["kind"], raw["t"]
        if kind in _METHODS:
            name, types = _METHODS[kind]
            told = {key: value for key, value in raw.items() if key not in ("t", "kind", "out")}
            for key, type_ in types.items():
                told[key] = leases[raw[key]] if type_ is Lease else read_value(type_, raw[key])
            if kind == "lease_ended":
                lease = leases.pop(raw["lease"])
                lease.output_tokens = told.pop("output_tokens")
                lease.odd = told.pop("odd", False)
                lease.reported_cached_tokens = told.pop("cached_tokens")
            commands: list[Command] = getattr(scheduler, name)(**told, now=now)
            return commands
        if kind == "cancelled":
            return scheduler.on_cancelled(raw["request"], now)
        if kind == "instance":
            return scheduler.on_instance(read_value(_CHANGES[raw["change"]], raw["with"]), now)
        if kind == "hold_released":
            splits = scheduler.placement.splits
            held = None if splits is None else splits.hold_of(raw["hold"])
            return [] if held is None else scheduler.on_hold_released(held, now)
        if kind == "kv_events":
            return scheduler.on_kv_events(raw["name"], _read_kv_events(raw["batch"]), now)
        if kind == "restore":
            found = scheduler.restore(read_value(Booked, raw["live"]), now, arrived=raw.get("arrived", False))
        elif kind == "assume":
            found = scheduler.assume(read_value(Request, raw["request"]), now)
        else:
            raise ValueError(f"unknown kind {kind!r}")
        if found is not None:
            leases[found.id] = found
        return []
