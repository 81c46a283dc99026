"""Causes of any state but `well`: one table behind status, dashboard, `top`, alerts and `/metrics`.

Each has a severity, a sentence and advice. The state of a model is the worst severity among its causes. A
wait's severity follows from the oldest request alone: it never gets milder while that wait grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import Health
from hetlb.balancer.telemetry.recent import InstanceShare

#: Least ratio of measured to profiled time of a slow instance, by its engine's own count of tokens: a less
#: certain measure than its answers.
PACE_FACTOR: Final = 2.5
#: Seconds of ended answers in which failures count.
FAILING_S: Final = 10.0
#: Age of an instance's report, in seconds, beyond which it is stale (an idle engine is asked each 15 s at
#: least), and up to which it shows the pace of now.
STALE_S: Final = 30.0
FRESH_S: Final = 5.0
#: KV cache below which a server serves next to nothing, in tokens.
LEAST_KV_TOKENS: Final = 2048
#: Greatest age of recent wrong answers, and of the last refused connection, in seconds.
WRONG_S: Final = 60.0


class State(StrEnum):
    """State of a fleet or model, the best first."""

    WELL = "well"
    BUSY = "busy"
    DEGRADED = "degraded"
    DOWN = "down"


class CauseKind(NamedTuple):
    """A kind of cause: its severity, the event of the log that tells it, and the alert."""

    severity: State
    event: str
    alert: str


_BUSY, _DEGRADED, _CAUSE = State.BUSY, State.DEGRADED, "cause"
#: Kinds of causes, of each severity the one to be said first before the others.
CAUSES: Final = {
    "all_down": CauseKind(State.DOWN, "instance_ejected", "HetlbNoInstanceUp"),
    "dead": CauseKind(_DEGRADED, "instance_ejected", "HetlbServerEjected"),
    "no_wake": CauseKind(_DEGRADED, "wake_failed", "HetlbServerDegraded"),
    "no_sleep": CauseKind(_DEGRADED, "sleep_failed", "HetlbServerDegraded"),
    "stalled": CauseKind(_DEGRADED, "instance_stalled", "HetlbStalled"),
    "key_refused": CauseKind(_DEGRADED, _CAUSE, "HetlbStalled"),
    "refused_by_all": CauseKind(_DEGRADED, _CAUSE, "HetlbRefused"),
    "other_model": CauseKind(_DEGRADED, "instance_other_model", "HetlbServerDegraded"),
    "refuses": CauseKind(_DEGRADED, _CAUSE, "HetlbStalled"),
    "wrong_answers": CauseKind(_DEGRADED, _CAUSE, "HetlbStalled"),
    "fails": CauseKind(_DEGRADED, _CAUSE, "HetlbStalled"),
    "flaps": CauseKind(_DEGRADED, _CAUSE, "HetlbStalled"),
    "refused": CauseKind(_DEGRADED, _CAUSE, "HetlbRefused"),
    "one_process": CauseKind(_DEGRADED, _CAUSE, "HetlbServerDegraded"),
    "not_fetched": CauseKind(_DEGRADED, "transfers_fail", "HetlbServerDegraded"),
    "slow": CauseKind(_DEGRADED, _CAUSE, "HetlbServerDegraded"),
    "slowed": CauseKind(_DEGRADED, _CAUSE, "HetlbServerDegraded"),
    "own_address": CauseKind(_DEGRADED, "instance_loop", "HetlbServerDegraded"),
    "long_wait": CauseKind(_DEGRADED, _CAUSE, "HetlbQueueOld"),
    "reload_refused": CauseKind(_DEGRADED, "reload_refused", "HetlbReloadRefused"),
    "clients_refused": CauseKind(_DEGRADED, "too_many_connections", "HetlbRefused"),
    "unhealthy": CauseKind(_BUSY, _CAUSE, "HetlbServerDegraded"),
    "foreign_load": CauseKind(_BUSY, _CAUSE, "HetlbForeignLoad"),
    "no_load": CauseKind(_BUSY, _CAUSE, "HetlbServerDegraded"),
    "small_cache": CauseKind(_BUSY, _CAUSE, "HetlbServerDegraded"),
    "stale_report": CauseKind(_BUSY, _CAUSE, "HetlbServerSilent"),
    "client_errors": CauseKind(_BUSY, _CAUSE, "HetlbClientErrors"),
    "log_lost": CauseKind(_BUSY, _CAUSE, "HetlbLogLinesLost"),
    "tenant_hog": CauseKind(_BUSY, _CAUSE, "HetlbQueueOld"),
    "hopeless_target": CauseKind(_BUSY, _CAUSE, "HetlbFirstTokenSlow"),
    "saturated": CauseKind(_BUSY, _CAUSE, "HetlbQueueOld"),
    "refuses_some": CauseKind(State.WELL, _CAUSE, "HetlbServerDegraded"),
    "no_metrics": CauseKind(State.WELL, _CAUSE, "HetlbServerDegraded"),
    "drained": CauseKind(State.WELL, "instance_state", ""),
    "notice": CauseKind(State.WELL, "instance_state", ""),
}
ORDER: Final = tuple(State)


@dataclass(frozen=True, slots=True)
class StateCause:
    """One cause: its name, the instance (or tenant) concerned ("": none), sentence, advice."""

    cause: str
    instance: str
    sentence: str
    advice: str

    @property
    def severity(self) -> State:
        """Return the state of a model with this cause alone."""
        return CAUSES[self.cause].severity

    def document(self) -> dict[str, str]:
        """Return its JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {"severity": self.severity.value}


def worst(causes: Sequence[StateCause]) -> State:
    """Return the worst severity, well without a cause."""
    return max((each.severity for each in causes), key=ORDER.index, default=State.WELL)


def in_order(causes: Sequence[StateCause]) -> list[StateCause]:
    """Return the causes, the most severe first, then in the order of the table."""
    names = list(CAUSES)
    return sorted(causes, key=lambda each: (-ORDER.index(each.severity), names.index(each.cause)))


def listed(names: Sequence[str]) -> str:
    """Return `a, b and c`, the first three of many."""
    if len(names) > 3:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def waiting_words(number: int) -> str:
    """Return a sentence that requests wait, "" for none."""
    return "" if not number else " 1 request waits." if number == 1 else f" {number:,} requests wait."


def may_have_one(each: Instance, share: InstanceShare | None, pace: float, now: float) -> bool:
    """Return True unless an instance is certainly well.

    `pace`: see `balancer.telemetry.recent.EnginePace`.
    """
    evidence, sample, model = each.evidence, each.sample, each.spec.model
    return bool(
        each.why_not
        or each.sleep.fault
        or each.leaves_at is not None
        or (model and model not in each.models)
        or evidence.health.state is not Health.UP
        or evidence.health.ejections
        or evidence.silence.stalled_since is not None
        or evidence.answers.excess > 0.0
        or each.unhealthy
        or each.pageless
        or each.foreign
        or (each.profiled and (each.speed.slow or pace >= PACE_FACTOR))
        or (share is not None and share.failed)
        or (each.sample_at is not None and now - each.sample_at > STALE_S)
        or (sample is not None and sample.running is None)
        or (sample is not None and (sample.capacity.kv_tokens_per_request or math.inf) < LEAST_KV_TOKENS)
    )


def next_step_of(each: Instance, reason: str = "") -> str:
    """Return what to do about an instance that is down, or that fails probes for a reason."""
    from hetlb.balancer.engines.engine_mistakes import next_step

    return next_step(reason or each.evidence.health.reason)
