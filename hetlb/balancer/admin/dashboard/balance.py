"""Check whether the work is shared in proportion to speed, by model: figures per instance and one sentence.

Work is weighted tokens (`core.demand.size_of`): output tokens and a share of the prompt's. The share that an
instance should have is its speed at the mean request over the speeds of all that take requests.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hetlb.balancer.core.demand import PROMPT_WEIGHT
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import AdminState, Health
from hetlb.balancer.telemetry.recent import InstanceShare, Recent

#: Seconds of ended requests that count; running ones count with their tokens so far.
WINDOW_S: Final = 60.0
#: Largest difference of shares that are alike.
NEAR_SHARE: Final = 0.1
#: Share of the places in use below which the load is light.
LIGHT_SHARE: Final = 0.5
#: Instances named in a sentence, at most.
_LISTED: Final = 3
_BY_SPEED: Final = frozenset({"hetlb", "paper", "paper-memory", "planned"})


@dataclass(frozen=True, slots=True)
class BalancePart:
    """One instance: its shares of work and speed (0 to 1), share of slots in use, and why it is `out`."""

    name: str
    work_share: float
    speed_share: float
    busy: float
    out: str = ""


def sentence(
    parts: Sequence[BalancePart], waiting: int, policy: str, requests: int = 1 << 30
) -> tuple[bool, str]:
    """Return True if the work is shared well, and a sentence that says it.

    The shares of few `requests` vary much by chance, so a larger difference counts as well.
    """
    able = [part for part in parts if not part.out]
    gone = [f"{part.name} is {part.out}" for part in parts if part.out]
    out = "; ".join(gone[:_LISTED] + ([f"{len(gone) - _LISTED} more are out"] if gone[_LISTED:] else []))
    tail = f" ({out})" if out else ""
    if not able:
        return False, f"No instance takes requests{tail}."
    if not any(part.work_share for part in parts):
        return True, f"No request in the last minute{tail}."
    if len(able) == 1:
        return True, f"{able[0].name} is the only one that takes requests{tail}."
    off = max(able, key=lambda part: abs(part.work_share - part.speed_share))
    if abs(off.work_share - off.speed_share) <= NEAR_SHARE + 1 / max(1, requests):
        worst = round(100 * abs(off.work_share - off.speed_share))
        plural = "" if worst == 1 else "s"
        begin = "Balanced" if worst <= 100 * NEAR_SHARE else "Few requests"
        return True, f"{begin}: shares of work and speed agree within {worst} point{plural}{tail}."
    less = min(able, key=lambda part: part.work_share - part.speed_share)
    more = max(able, key=lambda part: part.work_share - part.speed_share)
    work, speed = f"{100 * less.work_share:.0f} %", f"{100 * less.speed_share:.0f} %"
    begin = f"{less.name} does {work} of the work with {speed} of the speed: "
    if policy not in _BY_SPEED:
        return False, f"{begin}the policy {policy} does not consider speed{tail}."
    if not waiting and more.busy < LIGHT_SHARE:
        return True, f"{begin}slots are free, and a request ends soonest at {more.name}{tail}."
    if waiting:
        return (
            False,
            f"{begin}{waiting:,} requests wait: too large for it, or waiting for a faster one{tail}.",
        )
    return False, f"{begin}the last decisions show why{tail}."


def parts(
    instances: Sequence[Instance], shares: Mapping[str, InstanceShare], speed: Mapping[str, float], now: float
) -> list[BalancePart]:
    """Return the figures of the instances of one model over the last `WINDOW_S` seconds."""
    work = []
    for each in instances:
        own = shares.get(each.name) or InstanceShare()
        tokens = own.output_tokens + each.steps.grown_tokens
        work.append(PROMPT_WEIGHT * (own.prompt_tokens + each.prompt_tokens) + tokens)
    whole = sum(work)
    out = {each.name: _out(each, now) for each in instances}
    fast = sum(speed.get(name, 0.0) for name, reason in out.items() if not reason)
    return [
        BalancePart(
            each.name,
            done / whole if whole else 0.0,
            speed.get(each.name, 0.0) / fast if fast and not out[each.name] else 0.0,
            each.sequences / each.max_num_seqs,
            out[each.name],
        )
        for each, done in zip(instances, work, strict=True)
    ]


def _out(instance: Instance, now: float) -> str:
    """Return why an instance takes no requests, or one at a time; "" if neither."""
    if instance.admin is not AdminState.READY:
        return "draining" if instance.admin is AdminState.DRAIN else "in maintenance"
    if instance.sleep.reason:
        return instance.sleep.reason
    if instance.evidence.health.state is Health.EJECTED:
        return "ejected"
    if instance.asleep:
        return "asleep"
    if instance.evidence.silence.stalled_since is not None:
        return "stalled"
    return "held back" if instance.evidence.standing(now) is not None else ""


def documents(
    scheduler: Scheduler,
    recent: Recent,
    pools: dict[str, list[Instance]],
    now: float,
    shown: Container[str] | None = None,
) -> list[dict[str, Any]]:
    """Return the part of a snapshot about the balance of each model's work; `shown` instances are listed."""
    shares = recent.last(WINDOW_S, now).shares
    waiting = scheduler.queue.by_model()
    found = []
    for model, instances in pools.items():
        speed = scheduler.placement.speeds(model, instances)
        each = parts(instances, shares, speed, now)
        requests = sum(shares[one.name].ended for one in instances if one.name in shares)
        requests += sum(one.in_flight for one in instances)
        balanced, text = sentence(each, waiting.get(model, 0), scheduler.placement.policy_name, requests)
        named = [
            {
                "name": part.name,
                "work_share": round(part.work_share, 4),
                "speed_share": round(part.speed_share, 4),
            }
            for part in each
            if shown is None or part.name in shown
        ]
        found.append({"model": model, "balanced": balanced, "sentence": text, "instances": named})
    return found
