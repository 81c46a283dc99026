"""Causes of any state but `well`: one table behind status, dashboard, `top`, alerts and `/metrics`.

Each has a severity, a sentence and advice. The state of a model is the worst severity among its causes. A
wait's severity follows from the oldest request alone: it never gets milder while that wait grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from hetlb.balancer.core.evidence.table import KEY_REFUSED
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import AdminState, Health
from hetlb.balancer.telemetry.recent import InstanceShare

#: Least ratio of measured to profiled time of a slow instance.
SLOW_FACTOR: Final = 1.5
#: The same by its engine's own count of tokens in the last seconds, a less certain measure.
PACE_FACTOR: Final = 2.5
#: Least ratio of an instance's time to its usual one, and to the best other's change, of a slowed one.
SLOWED_FACTOR: Final = 2.0
#: Least lag of this process that makes answers look slower, in seconds.
LEAST_LAG_S: Final = 0.02
#: Share of answers that fail by an engine's doing, and their least number.
FAILING_SHARE: Final = 0.01
LEAST_FAILED: Final = 3
FAILING_S: Final = 10.0
#: Age of an instance's report, in seconds, beyond which it is stale (an idle engine is asked each 15 s), and
#: up to which it shows the pace of now.
STALE_S: Final = 30.0
_FRESH_S: Final = 5.0
#: Outcomes of requests that no server got.
UNPLACED: Final = {
    "rejected_full": "the queue is full",
    "expired_queue": "they wait too long",
    "no_instance": "no server takes them",
}
#: Least ejections of a flapping instance; it flaps for these seconds after the last one.
LEAST_FLAPS: Final = 2
FLAPPED_S: Final = 10.0
#: Seconds up, after its wait, of an instance that flaps no longer.
PROVEN_S: Final = 6.0
#: Least number and share of requests at an instance that did not come through hetlb, to be a cause.
LEAST_FOREIGN: Final = 4
FOREIGN_SHARE: Final = 0.25
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


#: Severity by cause.
SEVERITIES: Final = {
    "all_down": State.DOWN,
    "dead": State.DEGRADED,
    "no_wake": State.DEGRADED,
    "no_sleep": State.DEGRADED,
    "stalled": State.DEGRADED,
    "key_refused": State.DEGRADED,
    "refuses": State.DEGRADED,
    "wrong_answers": State.DEGRADED,
    "other_model": State.DEGRADED,
    "fails": State.DEGRADED,
    "flaps": State.DEGRADED,
    "refused": State.DEGRADED,
    "one_process": State.DEGRADED,
    "not_fetched": State.DEGRADED,
    "slow": State.DEGRADED,
    "slowed": State.DEGRADED,
    "own_address": State.DEGRADED,
    "foreign_load": State.BUSY,
    "no_load": State.BUSY,
    "small_cache": State.BUSY,
    "long_wait": State.DEGRADED,
    "reload_refused": State.DEGRADED,
    "clients_refused": State.DEGRADED,
    "stale_report": State.BUSY,
    "client_errors": State.BUSY,
    "tenant_hog": State.BUSY,
    "hopeless_target": State.BUSY,
    "saturated": State.BUSY,
    "no_metrics": State.WELL,
    "drained": State.WELL,
    "notice": State.WELL,
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
        return SEVERITIES[self.cause]

    def document(self) -> dict[str, str]:
        """Return its JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {"severity": self.severity.value}


def worst(causes: Sequence[StateCause]) -> State:
    """Return the worst severity, well without a cause."""
    return max((each.severity for each in causes), key=ORDER.index, default=State.WELL)


def in_order(causes: Sequence[StateCause]) -> list[StateCause]:
    """Return the causes, the most severe first, then in the order of the table."""
    names = list(SEVERITIES)
    return sorted(causes, key=lambda each: (-ORDER.index(each.severity), names.index(each.cause)))


def listed(names: Sequence[str]) -> str:
    """Return `a, b and c`, the first three of many."""
    if len(names) > 3:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def waiting_words(number: int) -> str:
    """Return a sentence that requests wait, "" for none."""
    return "" if not number else " 1 request waits." if number == 1 else f" {number:,} requests wait."


def of_instance(
    each: Instance, share: InstanceShare | None, pace: float, now: float, own_share: float = 0.0
) -> StateCause | None:
    """Return the cause of trouble at an instance that should take requests, None without any.

    `pace`: see `balancer.telemetry.recent.EnginePace`; `own_share`: see `rare_causes.own_shares`.
    """
    found = _of_state(each, now)
    if found is None and each.sleep.fault:
        from hetlb.balancer.admin.rare_causes import of_sleep

        return of_sleep(each)
    if each.admin is AdminState.READY and (each.asleep or each.sleep.reason):
        return None
    return found or _of_answers(each, share, pace, now, own_share)


def _of_state(each: Instance, now: float) -> StateCause | None:
    """Return the cause that an instance gets no requests, or should not; None without any."""
    name, evidence = each.name, each.evidence
    if each.admin is not AdminState.READY:
        if each.leads_back:
            sentence = f"{name} is hetlb's own address, or leads back to it"
            return StateCause("own_address", name, sentence, "Give the address of the engine in its url.")
        state = "is drained" if each.admin is AdminState.DRAIN else "is in maintenance"
        return StateCause("drained", name, f"{name} {state}", f"Set {name} ready when it may serve again.")
    if each.asleep or each.sleep.reason:
        return None
    flaps, reason = each.evidence.health.ejections, each.evidence.health.reason
    if len(flaps) >= LEAST_FLAPS:
        # The wait after an ejection grows: the time in which the next one may follow begins with its end.
        proven_at = max(flaps[-1] + FLAPPED_S, evidence.health.ejected_until + PROVEN_S)
        if not each.routable or now <= proven_at:
            sentence = f"{name} flaps: it was down {len(flaps)} times in {max(1.0, now - flaps[0]):.0f} s"
            now_down = "" if each.routable or not reason else f", now: {reason}"
            advice = next_step_of(each) if now_down else "Look at its log; its wait doubles each time."
            return StateCause("flaps", name, sentence + now_down, advice)
    if KEY_REFUSED in reason:
        sentence = reason.replace("it", name, 1)
        return StateCause("key_refused", name, sentence, "Correct its key in the fleet file.")
    if not each.routable or each.evidence.health.state is not Health.UP:
        sentence = f"{name} is down ({reason})" if reason else f"{name} is down"
        return StateCause("dead", name, sentence, next_step_of(each))
    if evidence.silence.stalled_since is not None:
        advice = f"Look at the engine process of {name} and its GPU; restart it if it does not go on."
        return StateCause("stalled", name, f"{name} has {evidence.why(now)}", advice)
    if evidence.answers.doubted:
        told = f"{name} failed {evidence.answers.told} requests; the other servers did not"
        if now - evidence.answers.odd_at > WRONG_S:
            return StateCause(
                "refuses", name, told, "Look at its log; check its API key, model name and limits."
            )
        told = f"{name} answered {evidence.answers.told} requests wrong; the other servers did not"
        advice = f"Send {name} a request by hand: look for no text, another model, or always the same text."
        return StateCause("wrong_answers", name, told, advice)
    if each.leaves_at is not None:
        left_s = max(0.0, each.leaves_at - now)
        advice = "Its requests move to other servers. Nothing to do."
        return StateCause("notice", name, f"{name} leaves in {left_s:.0f} s", advice)
    if each.spec.model and each.served is not None and each.spec.model not in each.models:
        serves = ", ".join(each.served) or "nothing"
        sentence = f"{name} serves {serves}, not {each.spec.model}"
        advice = f"Correct the model's name, or start it with --served-model-name {each.spec.model}."
        return StateCause("other_model", name, sentence, advice)
    return None


def _of_answers(
    each: Instance, share: InstanceShare | None, pace: float, now: float, own_share: float
) -> StateCause | None:
    """Return the cause that an instance answers badly or slowly, or tells too little; None without any."""
    name = each.name
    if share is not None and share.failed >= LEAST_FAILED and share.failed > FAILING_SHARE * share.ended:
        failed = 100 * share.failed / share.ended
        sentence = f"{failed:.0f} % of {name}'s responses in the last {FAILING_S:.0f} s were errors"
        return StateCause("fails", name, sentence, f"See {name}'s log.")
    for cause, found in _of_engine(each):
        return StateCause(cause, name, f"{name}: {found[0]}", found[1])
    reported = 0 if each.sample is None else (each.sample.running or 0) + (each.sample.waiting or 0)
    if each.foreign >= max(LEAST_FOREIGN, FOREIGN_SHARE * reported):
        sentence = f"others use {name}: {each.foreign} of its {reported} requests are not hetlb's"
        return StateCause("foreign_load", name, sentence, f"Send them through hetlb, or give {name} less.")
    stale_s = 0.0 if each.sample_at is None else now - each.sample_at
    slower = each.speed.factor * (1.0 - own_share) if each.speed.seen else 1.0
    if pace >= PACE_FACTOR and stale_s <= _FRESH_S:
        slower = max(slower, pace)
    if each.profiled and slower >= SLOW_FACTOR:
        sentence = f"{name} takes {slower:.1f} times as long as its profile says"
        return StateCause("slow", name, sentence, "Look at its GPU, or profile it again.")
    if each.pageless and each.evidence.answers.well:
        sentence = f"{name} has no /metrics: its load is known by hetlb's own requests alone"
        return StateCause(
            "no_metrics",
            name,
            sentence,
            "Start it without --disable-log-stats, or state its max_num_seqs if it has none.",
        )
    if stale_s > STALE_S:
        sentence = f"the last report of {name} is {stale_s:.0f} s old"
        return StateCause("stale_report", name, sentence, f"Check why {name} does not answer /metrics.")
    return None


def next_step_of(each: Instance) -> str:
    """Return what to do about an instance that is down."""
    from hetlb.balancer.engines.engine_mistakes import next_step

    return next_step(each.evidence.health.reason)


def _of_engine(each: Instance) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield what an engine says about itself that is wrong: cause, and what is found with the next step."""
    sample = each.sample
    if sample is None:
        return
    tokens, longest = sample.capacity.kv_tokens_per_request, each.capacity.max_model_len
    least = min(LEAST_KV_TOKENS, longest or LEAST_KV_TOKENS)
    if sample.running is None or (tokens is not None and tokens < least):
        from hetlb.balancer.engines.engine_mistakes import small_cache, without_load

        if (found := without_load(sample)) is not None:
            yield "no_load", found
        if (found := small_cache(tokens, least)) is not None:
            yield "small_cache", found
