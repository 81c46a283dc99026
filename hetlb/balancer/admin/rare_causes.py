"""Causes that a plain fleet in a good hour cannot have; they are imported once one is possible."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Final

from hetlb.balancer.admin.causes import SLOWED_FACTOR, UNPLACED, StateCause
from hetlb.balancer.core.demand import Demand
from hetlb.balancer.core.evidence.table import KEY_STATUSES
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.telemetry.recent import Recent

#: Newest answers, and the greatest age in seconds, that an instance's mean time is taken from.
_NEWEST_POINTS: Final = 200
_POINTS_S: Final = 10.0
#: Answers of an instance that can be compared with another's.
LEAST_COMPARED: Final = 5
#: Greatest time in seconds between the newest answers of two instances that are compared.
COMPARED_S: Final = 3.0
#: Greatest age of a class's recent requests, in seconds.
RECENT_S: Final = 60.0
#: Share of the waiting requests that makes one tenant of several a cause, and their least number.
HOG_SHARE: Final = 0.6
LEAST_WAITING: Final = 8
#: Share of requests that end as their client's mistakes, and the least number of requests.
CLIENTS_OWN_SHARE: Final = 0.5
LEAST_ENDED: Final = 10
#: Wait of the oldest request, in seconds, that degrades a model.
LONG_WAIT_S: Final = 5.0
#: Least share and number of unanswered requests that degrade a model.
REFUSED_SHARE: Final = 0.01
LEAST_REFUSED: Final = 2
KEY_ADVICE: Final = "Set api_key_env or api_key_file to its `vllm serve --api-key`."


def own_shares(recent: Recent, now: float) -> dict[str, float]:
    """Return by instance the share of its answers' time that may be this process's own lag, at most 1."""
    took: dict[str, tuple[float, int]] = {}
    for ended_at, instance, _, _, _, took_s in recent.points[-_NEWEST_POINTS:]:
        if now - ended_at <= _POINTS_S:
            seconds, count = took.get(instance, (0.0, 0))
            took[instance] = seconds + took_s, count + 1
    return {
        name: min(1.0, recent.lag_s * count / seconds) for name, (seconds, count) in took.items() if seconds
    }


def of_speeds(among: Sequence[Instance], own_shares: Mapping[str, float]) -> list[StateCause]:
    """Return a cause for each instance that has become slower while another of its model has not.

    The other one answered at that time: other traffic, or a machine without a free CPU, slows all of them.
    This process's own lag (`own_shares`) is no time of an engine.
    """
    found: list[StateCause] = []
    changes = [
        (each, each.speed.shown / each.speed.usual) for each in among if each.speed.answers >= LEAST_COMPARED
    ]
    for each, change in changes:
        sure = change * (1.0 - own_shares.get(each.name, 0.0))
        if sure < SLOWED_FACTOR or not each.speed.settled:
            continue
        best = min(
            [
                other
                for peer, other in changes
                if peer is not each and abs(peer.speed.seen_at - each.speed.seen_at) <= COMPARED_S
            ],
            default=math.inf,
        )
        if sure >= SLOWED_FACTOR * best:
            sentence = f"{each.name} is {change:.1f} times as slow as usual"
            advice = f"Look at the GPU of {each.name}, and at what else uses it."
            found.append(StateCause("slowed", each.name, sentence, advice))
    return found


def of_sleep(each: Instance) -> StateCause:
    """Return the cause of an instance whose last wake or sleep failed."""
    advice = f"Look at the log of {each.name}, or restart it; the pauses between tries grow."
    if each.sleep.reason:
        return StateCause("no_wake", each.name, f"{each.name} does not wake up ({each.sleep.fault})", advice)
    sentence = f"{each.name} does not sleep ({each.sleep.fault}): others of its group wait"
    return StateCause("no_sleep", each.name, sentence, advice)


def of_processes(among: Sequence[Instance]) -> list[StateCause]:
    """Return a cause for each instance that is the same process as one listed before it."""
    found: list[StateCause] = []
    for index, each in enumerate(among):
        for other in among[:index]:
            if each.twin == other.name:
                sentence = f"{other.name} and {each.name} are one process: its room is counted twice"
                found.append(StateCause("one_process", each.name, sentence, f"Remove {each.name}."))
                break
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


def of_key(name: str, refused: Sequence[int]) -> StateCause | None:
    """Return the cause of a server that does not accept hetlb's key, by the statuses of its refusals."""
    for status in refused:
        if status in KEY_STATUSES:
            sentence = f"{name} refuses hetlb's key ({status})"
            return StateCause("key_refused", name, sentence, KEY_ADVICE)
    return None


def of_unplaced(counts: Mapping[str, int], ended: int) -> StateCause | None:
    """Return a cause if many of the `ended` requests got no instance; `counts` has these by outcome."""
    total = sum(counts.values())
    if total < LEAST_REFUSED or total < REFUSED_SHARE * ended:
        return None
    outcome = max(counts, key=lambda each: counts[each])
    sentence = f"{100 * total / ended:.0f} % of requests are refused: {UNPLACED[outcome]}"
    return StateCause("refused", "", sentence, "Add a server, or limit clients.")


def of_clients(refused: int, ended: int) -> StateCause | None:
    """Return the cause of mostly wrong requests, None if most are right."""
    if ended < LEAST_ENDED or refused < CLIENTS_OWN_SHARE * ended:
        return None
    sentence = f"{100 * refused / ended:.0f} % of the requests are refused as their clients' mistakes"
    return StateCause("client_errors", "", sentence, "Look in the request log which client sends them.")


def of_wait(
    waiting: int, oldest_s: float, able: Sequence[Instance], held: str = "", hog: StateCause | None = None
) -> StateCause | None:
    """Return a cause if requests wait for the `able` instances; `held` names drained servers."""
    if not waiting:
        return None
    wait = "1 request waits" if waiting == 1 else f"{waiting:,} requests wait"
    whose = "" if hog is None else f", most of them of tenant {hog.instance or 'without a name'}"
    if oldest_s >= LONG_WAIT_S:
        back = f"set {held} ready again, " if held else ""
        advice = f"More comes than can be served: {back}add a server, or limit clients."
        return StateCause("long_wait", "", f"{wait}, the oldest for {oldest_s:.0f} s{whose}", advice)
    spare = [each for each in able if each.unfinished_sequences < each.max_num_seqs]
    advice = "All servers are full. Add one, or limit clients."
    if any(not each.explored for each in spare):
        advice = "A server gets few requests until its speed is known. Wait a minute."
    elif spare:
        advice = "Free servers lack KV cache, or a faster one is sooner. Add a server to shorten the wait."
    return StateCause("saturated", "", f"{wait}, the oldest for {oldest_s:.1f} s{whose}", advice)
