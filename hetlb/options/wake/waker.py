"""Wakes an instance when requests wait for its model, and lets idle ones sleep.

Example: `small` and `large` share a GPU (`wake: {group: gpu-a}`), and `small` is awake. A request for `large`
comes. Once `small` was awake for `stay_s`, and nothing older waits for its model, it gets no more requests,
ends its own, and sleeps; then `large` wakes up. A second instance of a model is woken for load, but no
instance at work sleeps for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

from hetlb.balancer.config.fleet_tables import WakeTable
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.resend_budget import Resends
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.core.types import Health, InstanceChange, SleepSet
from hetlb.balancer.engines.engine_pools import EnginePool, EnginePools
from hetlb.balancer.telemetry.events import Event, Rarely, tell
from hetlb.options.wake.doors import MOST_SLEEP_S, MOST_WAKE_S, Door, DoorError, door
from hetlb.tasks import end, ended

logger = logging.getLogger("hetlb.wake")

#: Seconds between looks at the queue.
LOOK_S: Final = 0.1
#: Seconds of a wake that was not measured yet.
_USUAL_S: Final = 20.0
#: Seconds after a wake in which an older page may still say that the engine sleeps.
_STALE_S: Final = 30.0


class SleepState(StrEnum):
    """State of an instance that may sleep."""

    AWAKE = "awake"
    DRAINING = "draining to sleep"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking up"


FOUND_ASLEEP: Final = Transition(
    "its engine says so, or with commands: nothing answers", (SleepState.AWAKE,), SleepState.ASLEEP
)
LEFT: Final = Transition(
    "idle for sleep_after_s, or another one of its group is to wake", (SleepState.AWAKE,), SleepState.DRAINING
)
EMPTY: Final = Transition("its last request has ended", (SleepState.DRAINING,), SleepState.FALLING_ASLEEP)
SLEPT: Final = Transition("it sleeps", (SleepState.FALLING_ASLEEP,), SleepState.ASLEEP)
SLEEP_FAILED: Final = Transition("its server refused", (SleepState.FALLING_ASLEEP,), SleepState.AWAKE)
CALLED: Final = Transition("a request waits for its model", (SleepState.ASLEEP,), SleepState.WAKING)
WOKEN: Final = Transition("it answers", (SleepState.WAKING,), SleepState.AWAKE)
WAKE_FAILED: Final = Transition("it did not wake up", (SleepState.WAKING,), SleepState.ASLEEP)
TRANSITIONS: Final = (FOUND_ASLEEP, LEFT, EMPTY, SLEPT, SLEEP_FAILED, CALLED, WOKEN, WAKE_FAILED)


class Sleeper:
    """One instance that may sleep; `since` is when its state began, `idle_since` its last request's end."""

    def __init__(self, name: str, table: WakeTable, door: Door, now: float) -> None:
        self.name = name
        self.table = table
        self.door = door
        self.state = SleepState.AWAKE
        self.since = self.idle_since = now
        self.wake_s: float | None = None
        #: Tries to wake it and to let it sleep, with pauses between failed ones.
        self.tries = Resends()
        self.naps = Resends()
        self.failed = False
        self.task: asyncio.Task[None] | None = None

    @property
    def cost_s(self) -> float:
        """Seconds that a wake is expected to take."""
        return _USUAL_S if self.wake_s is None else self.wake_s


class Waker:
    """Decides about sleep and wake of the instances whose tables say `wake`, about ten times a second."""

    def __init__(
        self,
        scheduler: Scheduler,
        change: Callable[[InstanceChange], None],
        pools: EnginePools,
        now: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._change = change
        self._pools = pools
        self._now = now
        self.places: dict[str, Sleeper] = {}
        self._task: asyncio.Task[None] | None = None
        self._faults = Rarely()

    def configure(self, tables: Mapping[str, WakeTable]) -> None:
        """Take the tables that hold from now on, by instance; one without any is awake."""
        for name in [name for name, place in self.places.items() if tables.get(name) != place.table]:
            place = self.places.pop(name)
            if place.task is not None:
                end(place.task)
            if name in self._scheduler.fleet.instances:
                self._change(SleepSet(name, ""))
        for name, table in tables.items():
            if name not in self.places:
                self.places[name] = Sleeper(name, table, door(table, self._pool_of(name)), self._now())

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="wake")

    async def close(self) -> None:
        tasks = [each.task for each in self.places.values() if each.task is not None]
        await ended(*tasks, *([] if self._task is None else [self._task]))

    def _pool_of(self, name: str) -> Callable[[], EnginePool]:
        def pool() -> EnginePool:
            instance = self._scheduler.fleet.instances.get(name)
            if instance is None:
                raise DoorError("the instance has left")
            return self._pools.open(instance.incarnation, name, instance.spec.url)

        return pool

    # --- looking ---

    async def _run(self) -> None:
        while True:
            try:
                self.look(self._now())
            except Exception as error:
                text = "the sleep of instances could not be decided: %r"
                self._faults.tell(logger, Event.WAKE_FAILED, text, error)
            await asyncio.sleep(LOOK_S)

    def look(self, now: float) -> None:
        """Note what changed, and begin each sleep and wake that is due."""
        oldest = self._scheduler.queue.oldest_by_model()
        there: dict[Sleeper, Instance] = {}
        for place in self.places.values():
            instance = self._scheduler.fleet.instances.get(place.name)
            if instance is not None:
                there[place] = instance
                self._note(place, instance, oldest, now)
        for model in sorted(oldest, key=lambda name: oldest[name]):
            self._call(model, oldest, there, now)
        for place, instance in there.items():
            rests = place.table.sleep_after_s
            if place.state is SleepState.AWAKE and rests and now - place.idle_since >= rests:
                self._leave(place, f"idle for {rests:g} s", now)
            if place.state is SleepState.DRAINING and not _busy(instance):
                self._enter(place, EMPTY, now)
                place.task = asyncio.create_task(self._sleep(place), name=f"sleep-{place.name}")

    def _note(self, place: Sleeper, instance: Instance, oldest: Mapping[str, float], now: float) -> None:
        if _busy(instance) or any(name in oldest for name in instance.models):
            place.idle_since = now
        if place.state is not SleepState.AWAKE:
            if instance.sleep.reason != place.state.value:  # a new incarnation of it
                self._tell(place)
            return
        if place.table.command is not None:
            asleep = instance.evidence.health.state is Health.EJECTED
        else:
            asleep = instance.asleep and now - place.since >= (_STALE_S if place.wake_s else 0.0)
        if asleep:
            self._enter(place, FOUND_ASLEEP, now)

    def _call(
        self, model: str, oldest: Mapping[str, float], there: Mapping[Sleeper, Instance], now: float
    ) -> None:
        """Wake the instance of a model that costs least, unless one is about to answer.

        Beside one that answers, another is woken once a request has waited as long as the wake takes.
        """
        ready = self._scheduler.fleet.ready.get(model)
        of_model = [place for place, instance in there.items() if model in instance.models]
        if ready is None or any(place.state is SleepState.WAKING for place in of_model):
            return
        answers = any(each.routable for each in ready.instances)
        best: tuple[float, Sleeper, list[Sleeper]] | None = None
        for place in of_model:
            if place.state is not SleepState.ASLEEP or there[place].admin.value != "ready":
                continue
            others = [each for each in there if each is not place and _shares(each, place)]
            if any(each.state is SleepState.WAKING for each in others):
                continue
            awake = [each for each in others if each.state is SleepState.AWAKE]
            leaving = [each for each in others if each.state is not SleepState.ASLEEP and each not in awake]
            if answers and (
                now - oldest[model] < place.cost_s or any(_busy(there[each]) for each in (*awake, *leaving))
            ):
                continue
            if not all(self._may_leave(each, there[each], model, oldest, now) for each in awake):
                continue
            cost_s = place.cost_s + sum(_rest_s(there[each], now) for each in (*awake, *leaving))
            if (awake or leaving or place.tries.wait_s(now) <= 0.0) and (best is None or cost_s < best[0]):
                best = cost_s, place, [*awake, *leaving]
        if best is None:
            return
        _, place, others = best
        for each in others:
            if each.state is SleepState.AWAKE:
                self._leave(each, f"{place.name} is to wake up", now)
        if not others and place.tries.take(now):
            self._enter(place, CALLED, now)
            place.task = asyncio.create_task(self._wake(place), name=f"wake-{place.name}")

    def _may_leave(
        self, place: Sleeper, instance: Instance, model: str, oldest: Mapping[str, float], now: float
    ) -> bool:
        """Return True if an instance may sleep for one that serves `model`."""
        if now - place.since < place.table.stay_s:
            return False
        waits = min((oldest[name] for name in instance.models if name in oldest), default=math.inf)
        return oldest[model] <= waits

    # --- changes ---

    def _enter(self, place: Sleeper, transition: Transition[SleepState], now: float) -> None:
        place.state, place.since = transition.take(place.state), now
        if place.state is SleepState.AWAKE:
            place.idle_since = now
        self._tell(place)

    def _tell(self, place: Sleeper) -> None:
        """Tell the scheduler the state of an instance. Requests wait for one that is about to be awake."""
        reason = "" if place.state is SleepState.AWAKE else place.state.value
        self._change(SleepSet(place.name, reason, bool(reason) and not place.failed, place.wake_s))

    def _leave(self, place: Sleeper, why: str, now: float) -> None:
        if not place.naps.take(now):
            return
        tell(logger, Event.INSTANCE_ASLEEP, "%s is to sleep: %s", place.name, why, instance=place.name)
        self._enter(place, LEFT, now)

    async def _sleep(self, place: Sleeper) -> None:
        try:
            async with asyncio.timeout(MOST_SLEEP_S):
                await place.door.sleep()
        except Exception as error:  # of whatever kind: it must not stay on its way for ever
            tell(
                logger, Event.SLEEP_FAILED, "%s does not sleep: %s", place.name, _line(error),
                instance=place.name, reason=_line(error),
            )  # fmt: skip
            self._enter(place, SLEEP_FAILED, self._now())
            return
        place.failed = False
        place.naps.answered()
        self._enter(place, SLEPT, self._now())

    async def _wake(self, place: Sleeper) -> None:
        began = self._now()
        try:
            async with asyncio.timeout(MOST_WAKE_S):
                await place.door.wake()
        except Exception as error:  # of whatever kind: it must not stay on its way for ever
            place.failed = True
            tell(
                logger, Event.WAKE_FAILED, "%s does not wake up: %s", place.name, _line(error),
                instance=place.name, reason=_line(error),
            )  # fmt: skip
            self._enter(place, WAKE_FAILED, self._now())
            return
        now = self._now()
        took_s = now - began
        place.failed = False
        place.tries.answered()
        place.wake_s = took_s if place.wake_s is None else 0.5 * (place.wake_s + took_s)
        text = "%s woke up in %.1f s"
        tell(logger, Event.INSTANCE_AWAKE, text, place.name, took_s, instance=place.name)
        self._enter(place, WOKEN, now)


def _shares(one: Sleeper, other: Sleeper) -> bool:
    return one.table.group is not None and one.table.group == other.table.group


def _busy(instance: Instance) -> bool:
    """Return True if an instance has requests, of others too."""
    return instance.in_flight > 0 or instance.foreign > 0


def _rest_s(instance: Instance, now: float) -> float:
    """Return the seconds until the requests of an instance have ended."""
    ends = [each.dispatched_at + each.forecast_end_s for each in instance.leases.values()]
    return max(0.0, max(ends, default=now) - now) + _USUAL_S / 4.0


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or "no answer in time"
