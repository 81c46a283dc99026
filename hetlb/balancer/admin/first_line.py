"""First line of a fleet that is not well: its first cause, or why no server takes requests."""

from __future__ import annotations

from collections.abc import Sequence

from hetlb.balancer.admin.causes import StateCause, listed, next_step_of, waiting_words
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import AdminState
from hetlb.balancer.engines.engine_mistakes import START


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
        from hetlb.balancer.admin.rare_causes import of_sleep

        found = of_sleep(dead[0])
        return f"{found.sentence}. {found.advice}{wait}"
    reason = f" ({dead[0].evidence.health.reason})" if dead[0].evidence.health.reason else ""
    step = next_step_of(dead[0])
    if len(dead) > 1:
        step = step.replace(START[0], START[2])
    verb = "is" if len(dead) == 1 else "are"
    return f"{listed([each.name for each in dead])} {verb} down{reason}. {step}{wait}"


def why_asleep(coming: Sequence[Instance], waiting: int, now: float) -> str:
    """Return what a model waits for whose servers sleep or wake up."""
    first = min(coming, key=lambda each: each.sleep.wake_s or 0.0)
    why = f"{first.name}: {first.sleep.reason} for {now - first.sleep_at:.0f} s."
    return why + (waiting_words(waiting) or " A request wakes it up.")
