"""Causes at instances, of requests and of waits; a fleet in a good hour has none, and imports none."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence, Set
from typing import Final

from hetlb.balancer.admin.causes import (
    CAUSES,
    FAILING_S,
    FRESH_S,
    LEAST_KV_TOKENS,
    PACE_FACTOR,
    STALE_S,
    WRONG_S,
    StateCause,
    listed,
    next_step_of,
    waiting_words,
)
from hetlb.balancer.core.demand import Demand
from hetlb.balancer.core.evidence.clients import ClientAnswers
from hetlb.balancer.core.evidence.kinds import KindKey, RefusedKind
from hetlb.balancer.core.evidence.slowness import own_share
from hetlb.balancer.core.evidence.table import KEY_REFUSED, KEY_STATUSES
from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.speed import SLOW_FACTOR
from hetlb.balancer.core.types import AdminState, Health
from hetlb.balancer.engines.engine_mistakes import REFUSED, START, small_cache, without_load
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.balancer.telemetry.recent import InstanceShare, Recent, add_counts

logger = logging.getLogger("hetlb.status")

KEY_ADVICE: Final = "Set api_key_env or api_key_file to its `vllm serve --api-key`."
#: Share of answers that fail by an engine's doing, and their least number.
FAILING_SHARE: Final = 0.01
LEAST_FAILED: Final = 3
#: Least ejections of a flapping instance; it flaps for these seconds after the last one.
LEAST_FLAPS: Final = 2
FLAPPED_S: Final = 10.0
#: Seconds up, after its wait, of an instance that flaps no longer.
PROVEN_S: Final = 6.0
#: Least number and share of requests at an instance that did not come through hetlb, to be a cause.
LEAST_FOREIGN: Final = 4
FOREIGN_SHARE: Final = 0.25
#: Least lost answers, more than elsewhere, of an instance that fails: a doubt about it may come later.
_LEAST_LOST: Final = 1.5
LOG: Final = "Look at its log."
#: Seconds for which a server must be slower than usual.
SLOWED_S: Final = 1.0
#: Windows of ended requests, in seconds: the first with `LEAST_ENDED` requests counts.
_WINDOWS_S: Final = (4.0, 6.0, 10.0, 16.0, 30.0)
LEAST_ENDED: Final = 10
#: Share of requests that end as their client's mistakes, and of requests that all servers refuse.
CLIENTS_OWN_SHARE: Final = 0.5
ALL_SHARE: Final = 0.9
#: Seconds that requests without a server count for, and their least share and number.
UNPLACED_S: Final = 6.0
REFUSED_SHARE: Final = 0.01
LEAST_REFUSED: Final = 2
#: Outcomes of requests that no server got, and of a client's own mistakes.
UNPLACED: Final = {
    "rejected_full": "the queue is full",
    "expired_queue": "they wait too long",
    "no_instance": "no server takes them",
}
_MISTAKES: Final = ("upstream_refused", "bad_request")
#: Seconds after which an instance that refuses a kind of requests, and has answered others since, is seen to
#: do so, and the greatest age of its last answer then.
_SERVES_S: Final = 10.0
_SERVED_S: Final = 15.0
#: Next steps by the status that all servers, and that one of them, answers.
_STEPS_OF_ALL: Final = {
    401: "Give hetlb the servers' key (api_key_env or api_key_file), or let clients send it.",
    404: "Check the model's name: --served-model-name of the servers, and the name that clients send.",
}
_STEPS_OF_ALL[403] = _STEPS_OF_ALL[407] = _STEPS_OF_ALL[401]
_STEPS_OF_ONE: Final = {
    404: "Check the model's name, its --served-model-name, and its version.",
    413: "Compare its --max-model-len with the others'.",
}
#: Sentence and next step of trouble of this proxy itself.
_OWN: Final = {
    "clients_refused": (
        "clients are refused, all connections are taken",
        "Raise the limit, or add a proxy.",
    ),
    "log_lost": (
        "lines of the log are lost",
        "Free its disk, or give it a faster reader. An event log begins anew when hetlb restarts.",
    ),
}
#: Greatest age of a class's recent requests, in seconds.
RECENT_S: Final = 60.0
#: Wait of the oldest request, in seconds, that degrades a model.
LONG_WAIT_S: Final = 5.0
#: Seconds between two events of one cause.
_PAUSE_S: Final = 60.0
#: Share of the waiting requests that makes one tenant of several a cause, and their least number.
HOG_SHARE: Final = 0.6
LEAST_WAITING: Final = 8


def of_instance(
    each: Instance, share: InstanceShare | None, pace: float, now: float, lag_s: float = 0.0
) -> StateCause | None:
    """Return the cause of trouble at an instance that should take requests, None without any.

    `pace`: see `balancer.telemetry.recent.EnginePace`; `lag_s` is the lag of this process.
    """
    found = _of_state(each, now)
    if found is None and each.sleep.fault:
        return of_sleep(each)
    if each.admin is AdminState.READY and (each.asleep or each.sleep.reason):
        return None
    return found or _of_answers(each, share, pace, now, lag_s)


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
            wait = "Each time hetlb waits longer before it sends requests there."
            advice = next_step_of(each) if now_down else f"{LOG} {wait}"
            return StateCause("flaps", name, sentence + now_down, advice)
    if KEY_REFUSED in reason:
        sentence = reason.replace("it", name, 1)
        return StateCause("key_refused", name, sentence, "Correct its key in the fleet file.")
    if not each.routable or each.evidence.health.state is not Health.UP:
        sentence = f"{name} is down ({reason})" if reason else f"{name} is down"
        advice = (reason != REFUSED and _network(each)) or next_step_of(each)
        return StateCause("dead", name, sentence, advice)
    if evidence.silence.stalled_since is not None:
        advice = f"Look at the engine process of {name} and its GPU; restart it if it does not go on."
        return StateCause("stalled", name, f"{name} has {evidence.why(now)}", _network(each) or advice)
    answers = evidence.answers
    if answers.doubted or (answers.excess > 0.0 and answers.lost >= _LEAST_LOST):
        if now - evidence.answers.odd_at > WRONG_S:
            told = f"{name} failed {evidence.answers.told} requests; the other servers did not"
            return StateCause("fails", name, told, _network(each) or LOG)
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
    each: Instance, share: InstanceShare | None, pace: float, now: float, lag_s: float
) -> StateCause | None:
    """Return the cause that an instance answers badly or slowly, or tells too little; None without any."""
    name, sample = each.name, each.sample
    if share is not None and share.failed >= LEAST_FAILED and share.failed > FAILING_SHARE * share.ended:
        failed = 100 * share.failed / share.ended
        sentence = f"{failed:.0f} % of {name}'s responses in the last {FAILING_S:.0f} s were errors"
        return StateCause("fails", name, sentence, LOG)
    if each.unhealthy:
        sentence = f"{name} fails its probes ({each.unhealthy}); it gets requests while it answers them"
        return StateCause("unhealthy", name, sentence, next_step_of(each, each.unhealthy))
    if sample is not None and (found := of_engine(each, sample)) is not None:
        return found
    reported = 0 if sample is None else (sample.running or 0) + (sample.waiting or 0)
    if each.foreign >= max(LEAST_FOREIGN, FOREIGN_SHARE * reported):
        sentence = f"others use {name}: {each.foreign} of its {reported} requests are not hetlb's"
        advice = f"Send them through hetlb, too; meanwhile it gives {name} less."
        return StateCause("foreign_load", name, sentence, advice)
    stale_s = 0.0 if each.sample_at is None else now - each.sample_at
    speed = each.speed
    slower = max(speed.factor, speed.newest) * (1.0 - own_share(speed, lag_s)) if speed.slow else 1.0
    if pace >= PACE_FACTOR and stale_s <= FRESH_S:
        slower = max(slower, pace)
    if each.profiled and slower >= SLOW_FACTOR:
        sentence = f"{name} takes {slower:.1f} times as long as its profile says"
        advice = _network(each) or "Look at its GPU, or profile it again."
        return StateCause("slow", name, sentence, advice)
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


def _network(each: Instance) -> str:
    """Return what to do if the network to an instance is slow, "" if it is not."""
    trip = f"a packet and its answer take {1e3 * each.far_s:,.0f} ms"
    return f"Look at the network to {each.name}: {trip}." if each.far_s else ""


def of_speeds(among: Sequence[Instance], now: float) -> list[StateCause]:
    """Return a cause for each instance that has become slower while another of its model has not."""
    found: list[StateCause] = []
    for each in among:
        speed = each.speed
        if speed.slowed_since is not None and now - speed.slowed_since >= SLOWED_S:
            slower = max(speed.lately, speed.newest) / speed.usual
            sentence = f"{each.name} is {slower:.1f} times as slow as usual"
            advice = f"Look at the GPU of {each.name}, and at what else uses it."
            found.append(StateCause("slowed", each.name, sentence, _network(each) or advice))
    return found


def of_sleep(each: Instance) -> StateCause:
    """Return the cause of an instance whose last wake or sleep failed."""
    advice = f"Look at the log of {each.name}, or restart it; the pauses between tries grow."
    if each.sleep.reason:
        return StateCause("no_wake", each.name, f"{each.name} does not wake up ({each.sleep.fault})", advice)
    sentence = f"{each.name} does not sleep ({each.sleep.fault}): others of its group wait"
    return StateCause("no_sleep", each.name, sentence, advice)


def of_kinds(each: Instance, kinds: Sequence[tuple[KindKey, RefusedKind]]) -> StateCause:
    """Return the cause of an instance that refuses `kinds` of requests that others answer."""
    name = each.name
    for _, kind in kinds:
        if kind.status in KEY_STATUSES:
            return StateCause("key_refused", name, f"{name} refuses hetlb's key ({kind.status})", KEY_ADVICE)
    plain = [pair for pair in kinds if not pair[0][2] and pair[1].served_bytes < 0.0]
    (model, path, feature), kind = (plain or kinds)[0]
    if plain:
        answered_at = each.evidence.silence.token_at
        serves = answered_at > kind.since + _SERVES_S and answered_at > kind.at - _SERVED_S
        told = f"{name} answers {kind.status} to requests for {model} ({path}); the other servers take them"
        advice = _STEPS_OF_ONE.get(kind.status, f"{LOG} Compare its version and flags with the others'.")
        return StateCause("refuses_some" if serves else "refuses", name, told, advice)
    what = f"with {feature}" if feature else f"of {kind.least_bytes:,.0f} bytes and more"
    told = f"{name} answers {kind.status} to requests {what}; they go to the other servers"
    advice = "Start it with the others' flags, or leave it as it is."
    if not feature:
        advice = _STEPS_OF_ONE[413]
    return StateCause("refuses_some", name, told, advice)


def of_engine(each: Instance, sample: EngineSample) -> StateCause | None:
    """Return the cause of an engine that says something wrong about itself: no load, or hardly any cache."""
    tokens, longest = sample.capacity.kv_tokens_per_request, each.capacity.max_model_len
    for cause, found in (
        ("no_load", without_load(sample)),
        ("small_cache", small_cache(tokens, min(LEAST_KV_TOKENS, longest or LEAST_KV_TOKENS))),
    ):
        if found is not None:
            return StateCause(cause, each.name, f"{each.name}: {found[0]}", found[1])
    return None


def of_unplaced(outcomes: Mapping[str, int]) -> StateCause | None:
    """Return a cause if many recent requests got no instance."""
    counts = {each: outcomes.get(each, 0) for each in UNPLACED}
    total, ended = sum(counts.values()), sum(outcomes.values())
    if total < LEAST_REFUSED or total < REFUSED_SHARE * ended:
        return None
    outcome = max(counts, key=lambda each: counts[each])
    sentence = f"{100 * total / ended:.0f} % of requests are refused: {UNPLACED[outcome]}"
    return StateCause("refused", "", sentence, "Add a server, or limit clients by their keys.")


def of_refusals(recent: Recent, now: float) -> StateCause | None:
    """Return the cause of mostly refused requests: by all servers, or as mistakes; None if most are right."""
    for window_s in _WINDOWS_S:
        last = recent.last(window_s, now)
        ended = sum(last.outcomes.values())
        if ended >= LEAST_ENDED:
            break
    refused = sum([last.outcomes.get(each, 0) for each in _MISTAKES])
    if ended < LEAST_ENDED or refused < CLIENTS_OWN_SHARE * ended:
        return None
    for status, count in last.refusals.items():
        if count >= ALL_SHARE * ended and status in _STEPS_OF_ALL:
            sentence = f"the servers answer {status} to {100 * count / ended:.0f} % of the requests"
            return StateCause("refused_by_all", "", sentence, _STEPS_OF_ALL[status])
    mostly = max(last.refusals, key=lambda each: last.refusals[each], default=0)
    sentence = f"{100 * refused / ended:.0f} % of the requests are refused as their clients' mistakes"
    sentence += f" (mostly {mostly})" if mostly else ""
    return StateCause("client_errors", "", sentence, "Look in the request log which client sends them.")


def of_client(shares: Sequence[InstanceShare], clients: ClientAnswers) -> StateCause | None:
    """Take the failures of the one client that no instance answers out of `shares`, if others are answered.

    Return its cause, None if there is no such client, it has few failures, or one of its instances answers
    no other client.
    """
    failures: dict[str, int] = {}
    for each in shares:
        add_counts(failures, each.failures)
    everywhere = [client for client in failures if clients.fails_everywhere(client)]
    if len(everywhere) != 1:
        return None
    [client] = everywhere
    if any(each.failed == each.ended for each in shares if client in each.failures):
        return None
    for each in shares:
        each.failures.pop(client, None)
    if failures[client] < LEAST_FAILED:
        return None
    sentence = f"no server answers one client: {failures[client]} of its requests failed in the last"
    advice = "Look in the request log which client it is, and what it sends."
    return StateCause("client_errors", "", f"{sentence} {FAILING_S:.0f} s", advice)


def of_processes(among: Sequence[Instance]) -> list[StateCause]:
    """Return a cause for each instance that is the same process as one listed before it."""
    found: list[StateCause] = []
    before: set[str] = set()
    for each in among:
        if each.twin in before:
            sentence = f"{each.twin} and {each.name} are one process: its room is counted twice"
            found.append(StateCause("one_process", each.name, sentence, f"Remove {each.name}."))
        before.add(each.name)
    return found


def of_transfers(pairs: Sequence[tuple[str, str]], among: Sequence[Instance]) -> list[StateCause]:
    """Return a cause for each pair (source, target) of instances with failing KV transfers."""
    names = {each.name for each in among}
    advice = (
        "The log of {} says why its fetches fail; both need the same layers (no pipelines) and cache type."
    )
    return [
        StateCause(
            "not_fetched",
            target,
            f"KV caches of prompts read at {source} do not reach {target}, and are no longer sent there",
            advice.format(target),
        )
        for source, target in pairs
        if source in names and target in names
    ]


def of_tenants(waiting: Mapping[str, int], served: Set[str]) -> StateCause | None:
    """Return the cause of one tenant with most of the waiting requests, None if none has.

    `waiting` counts requests by tenant. Tenants in `served` have running requests, and may have none waiting.
    """
    total = sum(waiting.values())
    name, count = max(waiting.items(), key=lambda each: each[1], default=("", 0))
    if total < LEAST_WAITING or len(served | waiting.keys()) < 2 or count < HOG_SHARE * total:
        return None
    sentence = f"tenant {name or 'without a name'} has {count:,} of {total:,} requests that wait"
    return StateCause("tenant_hog", name, sentence, "Others go first; limit its key, or add a server.")


def of_targets(demand: Demand, now: float) -> list[StateCause]:
    """Return a cause for each class if all its recent requests missed their targets."""
    return [
        StateCause(
            "hopeless_target",
            "",
            f"no answer of class {each.name or 'without a name'} has met its targets",
            "No server is that fast: loosen the targets, or add a faster one.",
        )
        for each in demand.protected
        if each.hopeless and now - each.newest_s <= RECENT_S
    ]


def of_proxy(recent: Recent, now: float, reload_refused: str) -> list[StateCause]:
    """Return the causes at this proxy itself."""
    own: list[StateCause] = []
    if reload_refused:
        advice = "The previous one stays in force; fix the file, it is reread by itself."
        text = f"the edited fleet file was rejected ({reload_refused})"
        own.append(StateCause("reload_refused", "", text, advice))
    for cause, (at, why) in recent.own.items():
        if now - at < WRONG_S:
            text, advice = _OWN[cause]
            own.append(StateCause(cause, "", f"{text} ({why})", advice))
    return own


def of_wait(
    waiting: int,
    oldest_s: float,
    able: Sequence[Instance],
    held: str = "",
    hog: StateCause | None = None,
    more: str = "a server",
) -> StateCause | None:
    """Return a cause if requests wait for the `able` instances.

    `held` names drained servers, `more` the servers that are lacking.
    """
    if not waiting:
        return None
    wait = "1 request waits" if waiting == 1 else f"{waiting:,} requests wait"
    whose = "" if hog is None else f", most of them of tenant {hog.instance or 'without a name'}"
    if oldest_s >= LONG_WAIT_S:
        back = f"set {held} ready again, " if held else ""
        advice = f"More comes than can be served: {back}add {more}, or limit clients by their keys."
        return StateCause("long_wait", "", f"{wait}, the oldest for {oldest_s:.0f} s{whose}", advice)
    spare = [each for each in able if each.unfinished_sequences < each.max_num_seqs]
    advice = f"All servers are full. Add {more}, or limit clients by their keys."
    if any(each.exploring is not None for each in spare):
        advice = "A server gets few requests until its speed is known. Wait a minute."
    elif spare:
        advice = f"Free servers lack KV cache, or a faster one is sooner. Add {more} to shorten the wait."
    return StateCause("saturated", "", f"{wait}, the oldest for {oldest_s:.1f} s{whose}", advice)


def headline(causes: Sequence[StateCause], waiting: int) -> str:
    """Return the first cause with its advice; several instances with the same one are listed."""
    first = causes[0]
    alike = [each.instance for each in causes if each.cause == first.cause]
    sentence, advice = first.sentence, first.advice
    if len(alike) > 1 and first.cause == "dead":
        sentence = sentence.replace(f"{first.instance} is", f"{listed(alike)} are", 1)
        advice = advice.replace(START[0], START[1])
    if not (first.instance and sentence.startswith(first.instance)):
        sentence = sentence[:1].upper() + sentence[1:]
    waits = ("long_wait", "saturated")
    wait = "" if first.cause in waits else waiting_words(waiting)
    others = {each.cause: each.sentence for each in causes if each.cause not in (first.cause, *waits)}
    also = f" Also: {next(iter(others.values()))}." if others else ""
    more = f" And {len(others) - 1} more: `hetlb status --json`." if len(others) > 1 else ""
    return f"{sentence}. {advice}{wait}{also}{more}"


def all_down(model: str, instances: Sequence[Instance], waiting: int) -> StateCause:
    """Return the cause of a model of which no server takes requests."""
    why = _why_down(model, instances, waiting)
    return StateCause("all_down", "", f"no server of {model or 'the fleet'} takes requests", why)


def _why_down(model: str, instances: Sequence[Instance], waiting: int) -> str:
    """Return why no server of a model takes requests, with the next step."""
    held = [each.name for each in instances if each.admin is not AdminState.READY]
    wait = waiting_words(waiting)
    if len(held) == len(instances):
        return f"Every server of {model or 'the fleet'} is drained or in maintenance: set one ready.{wait}"
    dead = [each for each in instances if each.admin is AdminState.READY]
    if dead[0].sleep.fault:
        found = of_sleep(dead[0])
        return f"{found.sentence}. {found.advice}{wait}"
    reason = f" ({dead[0].evidence.health.reason})" if dead[0].evidence.health.reason else ""
    step = next_step_of(dead[0])
    if len(dead) > 1:
        step = step.replace(START[0], START[2])
    verb = "is" if len(dead) == 1 else "are"
    return f"{listed([each.name for each in dead])} {verb} down{reason}. {step}{wait}"


def why_asleep(coming: Sequence[Instance], waiting: int, now: float) -> str:
    """Return what the requests of a model wait for while its servers sleep or wake up."""
    first = min(coming, key=lambda each: each.sleep.wake_s or 0.0)
    why = f"{first.name}: {first.sleep.reason} for {now - first.sleep_at:.0f} s."
    return why + (waiting_words(waiting) or " A request wakes it up.")


class CauseLog:
    """Causes that last. One is logged as it begins, and once no instance has it."""

    def __init__(self) -> None:
        self._lasting: set[str] = set()
        self._told_at: dict[str, float] = {}

    def look(self, causes: Sequence[StateCause], now: float) -> None:
        """Log the begin or the end of causes."""
        told = [each for each in causes if CAUSES[each.cause].event == Event.CAUSE.event]
        found = {each.cause: each for each in reversed(told)}
        for cause in self._lasting - found.keys():
            self._lasting.remove(cause)
            tell(logger, Event.CAUSE_OVER, "%s is over", cause, cause=cause)
        for cause, each in found.items():
            if cause in self._lasting or now - self._told_at.get(cause, -math.inf) < _PAUSE_S:
                continue
            self._lasting.add(cause)
            self._told_at[cause] = now
            text = each.sentence, each.advice
            tell(logger, Event.CAUSE, "%s. %s", *text, cause=cause, instance=each.instance)
