"""Facts about instances: changes of the fleet and of its servers, and what their metrics say."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from hetlb.balancer.core.pickle_by_fields import PickleByFields
from hetlb.balancer.core.types import AdminState, Capacity, InstanceSpec

_UNKNOWN: Final = Capacity()


@dataclass(frozen=True, slots=True)
class InstanceAdded(PickleByFields):
    """A server joined the fleet, or came back as a new incarnation, together with `more`."""

    spec: InstanceSpec
    more: tuple[InstanceSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceRemoved(PickleByFields):
    """A server and `more` left the fleet. They get no new work; their leases end with their requests."""

    name: str
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceUpdated(PickleByFields):
    """A server has another profile, capacity or weight. Its leases stay."""

    spec: InstanceSpec

    @property
    def name(self) -> str:
        """Name of the instance."""
        return self.spec.name


@dataclass(frozen=True, slots=True)
class AdminStateSet(PickleByFields):
    """An operator set the administrative state. The instance leaves in `deadline_s` seconds."""

    name: str
    state: AdminState
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class CapacityLearned(PickleByFields):
    """The engine reported its capacity. Figures missing from the report keep their values."""

    name: str
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class ModelsLearned(PickleByFields):
    """The engine's own list of model names: base, aliases, LoRA adapters (named once more in `adapters`)."""

    name: str
    models: tuple[str, ...]
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelsPromised(PickleByFields):
    """Model names of the fleet file and its sources. They are known even while no instance serves them.

    They replace the names promised before. `aliases` are further names for clients. `name` is no instance's.
    """

    models: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    name: str = ""


class ProbeResult(StrEnum):
    """Result of a probe of an engine. A refused connection is proof of absence, a timeout is not.

    `LOADING`: the engine itself says that it serves no model yet.
    """

    OK = "ok"
    REFUSED = "refused"
    LOADING = "loading"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Probed(PickleByFields):
    """A health probe ended; `detail` says how one failed."""

    name: str
    result: ProbeResult
    detail: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class SleepSet(PickleByFields):
    """An instance gets no requests for now, since it sleeps or is about to (`reason`); "": it is awake.

    `comes`: it is woken for requests, which wait for it. `wake_s` is the time of its last wake in seconds,
    `fault` why its last wake or sleep failed.
    """

    name: str
    reason: str
    comes: bool = False
    wake_s: float | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class SpeedTried(PickleByFields):
    """An instance, idle otherwise, took `seconds` for decode steps of a request of hetlb's own."""

    name: str
    steps: float
    seconds: float


InstanceChange: TypeAlias = (
    InstanceAdded
    | InstanceRemoved
    | InstanceUpdated
    | AdminStateSet
    | CapacityLearned
    | ModelsLearned
    | ModelsPromised
    | SleepSet
    | SpeedTried
    | Probed
)


@dataclass(frozen=True, slots=True)
class EngineHistory(PickleByFields):
    """Means of all requests of a server since it started, in tokens and seconds.

    `prompt` tokens were computed in `prefill_s`, None if it is not told. Of answers of `output` tokens,
    `batch` at a time, each token took `step_s`.
    """

    prompt: float
    prefill_s: float | None
    output: float
    step_s: float
    batch: float


@dataclass(frozen=True, slots=True)
class EngineSample(PickleByFields):
    """One scrape of a server, summed over its data-parallel engines. Absent or absurd figures are None.

    `kv_usage` is a fraction 0..1, the mean of the engines weighted by their capacity; `kv_usage_max` is the
    fullest engine's. `preemptions` count since the engine started. `missing` and `invalid` name the absent
    and the absurd metrics.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    capacity: Capacity = _UNKNOWN
    missing: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()
    preemptions: int | None = None
    kv_usage_max: float | None = None
    #: True if one of its engines sleeps (vLLM's sleep mode).
    asleep: bool | None = None
    #: LoRA adapters with running requests.
    adapters: tuple[str, ...] | None = None
    #: Start of the server's process, Unix time in seconds.
    began: float | None = None
    #: Kind of the engine by its metrics, the name of its table; "" if unknown.
    engine: str = ""
    #: Prompt tokens fetched from other engines, and computed, since the engine started.
    fetched_tokens: int | None = None
    computed_tokens: int | None = None
    #: Tokens computed since it started: of prompts and answers; of answers alone.
    generated: int | None = None
    answered: int | None = None
    #: CPU seconds of the server's process.
    cpu_s: float | None = None
    #: Read while nothing else tells its speed.
    history: EngineHistory | None = None
    #: Seconds since it was asked for: what happened since may not be counted.
    age_s: float = 0.0
