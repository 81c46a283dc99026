"""Wakes an instance when requests wait for its model, and lets idle ones sleep.

Example: `small` and `large` share a GPU (`wake: {group: gpu-a}`), and `small` is awake. A request for `large`
comes. Once `small` was awake for `stay_s`, and nothing older waits for its model, it gets no more requests,
ends its own, and sleeps; then `large` wakes up. A second instance of a model is woken for load, but no
instance at work sleeps for it.

A wake that takes several times as long as known is late: that is said, and no request waits for it. It goes
on until another one of its group is called; then that one's turn comes first.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

from hetlb.balancer.config.fleet_tables import WakeTable
from hetlb.balancer.core.facts import InstanceChange, SleepSet
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.resend_budget import Resends
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.state_transition import Transition
from hetlb.balancer.core.types import Health
from hetlb.balancer.engines.engine_pools import EnginePool, EnginePools
from hetlb.balancer.fleet.shared_fleet import Right
from hetlb.balancer.telemetry.events import Event, Rarely, tell
from hetlb.options.wake.doors import Door, DoorError, door
from hetlb.tasks import end, ended

logger = logging.getLogger("hetlb.wake")

#: Seconds between looks at the queue.
LOOK_S: Final = 0.1
#: Seconds of a wake that was not measured yet.
_USUAL_S: Final = 20.0
#: Seconds after a change in which an older page may still say what was before.
_STALE_S: Final = 30.0
#: Longest time to wake up, in seconds: others of its group may end it earlier.
MOST_WAKE_S: Final = 900.0
#: Longest first time to fall asleep, in seconds.
FIRST_SLEEP_S: Final = 60.0
#: Multiple of the known time after which a wake or sleep is late, and the least such time in seconds. After
#: each late one the next may take twice as long, up to a multiple.
LATE_FACTOR: Final = 4.0
LEAST_LATE_S: Final = 30.0
_MOST_PATIENCE: Final = 4
#: Pause after a failed try as a multiple of its time: others of the group have the rest.
_REST_FACTOR: Final = 4.0
#: Seconds in which others may go on using an instance that is to sleep.
OTHERS_S: Final = 60.0


class SleepState(StrEnum):
    """State of an instance that may sleep."""

    AWAKE = "awake"
    DRAINING = "draining to sleep"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking up"


_STATES: Final = {"": SleepState.AWAKE} | {each.value: each for each in SleepState}

FOUND_ASLEEP: Final = Transition(
    "its engine says so, or with commands: nothing answers", (SleepState.AWAKE,), SleepState.ASLEEP
)
LEFT: Final = Transition(
    "idle for sleep_after_s, or another one of its group is to wake", (SleepState.AWAKE,), SleepState.DRAINING
)
EMPTY: Final = Transition("its last request has ended", (SleepState.DRAINING,), SleepState.FALLING_ASLEEP)
SLEPT: Final = Transition("it sleeps", (SleepState.FALLING_ASLEEP,), SleepState.ASLEEP)
SLEEP_FAILED: Final = Transition(
    "its server refused, or took too long", (SleepState.FALLING_ASLEEP,), SleepState.AWAKE
)
USED: Final = Transition("others go on using it", (SleepState.DRAINING,), SleepState.AWAKE)
CALLED: Final = Transition("a request waits for its model", (SleepState.ASLEEP,), SleepState.WAKING)
WOKEN: Final = Transition("it answers", (SleepState.WAKING,), SleepState.AWAKE)
WAKE_FAILED: Final = Transition("it did not wake up", (SleepState.WAKING,), SleepState.ASLEEP)
GIVEN_UP: Final = Transition(
    "its wake is late, and another one of its group is to wake",
    (SleepState.WAKING,),
    SleepState.FALLING_ASLEEP,
)
LOST: Final = Transition(
    "it does not sleep either, or is down while others of its group wait",
    (SleepState.FALLING_ASLEEP,),
    SleepState.ASLEEP,
)
FOUND_AWAKE: Final = Transition("its wake had failed, and it answers", (SleepState.ASLEEP,), SleepState.AWAKE)
TRANSITIONS: Final = (
    FOUND_ASLEEP, LEFT, EMPTY, USED, SLEPT, SLEEP_FAILED, LOST, CALLED, WOKEN, WAKE_FAILED, GIVEN_UP,
    FOUND_AWAKE,
)  # fmt: skip


class Pace:
    """Known time of an instance's wakes, or sleeps; the limit that follows, and pauses after failures."""

    def __init__(self, first_limit_s: float) -> None:
        self.mean_s: float | None = None
        self._first_limit_s = first_limit_s
        self._patience = 1
        self._tries = Resends()
        self._rest_until = 0.0

    @property
    def limit_s(self) -> float:
        """Seconds after which one is late."""
        known = self._first_limit_s if self.mean_s is None else LATE_FACTOR * self.mean_s
        return self._patience * max(LEAST_LATE_S, known)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next try."""
        return max(self._tries.wait_s(now), self._rest_until - now)

    def take(self, now: float) -> bool:
        """Return True if one may be tried now."""
        return now >= self._rest_until and self._tries.take(now)

    def well(self) -> None:
        """Note that there is nothing to wait for any more."""
        self._tries.answered()
        self._patience, self._rest_until = 1, 0.0

    def took(self, seconds: float) -> None:
        """Note the time of one that went well."""
        self.well()
        self.mean_s = seconds if self.mean_s is None else 0.5 * (self.mean_s + seconds)

    def failed(self, seconds: float, late: bool, now: float) -> None:
        """Note one that failed, with all the time that it cost its group."""
        self._rest_until = now + _REST_FACTOR * seconds
        if late:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)


class Sleeper:
    """One instance that may sleep; `since` is when its state began, `idle_since` its last request's end.

    `called_at` is when the others of its group were told to leave for it, `own_at` when it last had a request
    of this process. `fault` says why its last wake or sleep failed, `late`: its wake takes too long.
    """

    def __init__(self, name: str, table: WakeTable, door: Door, now: float) -> None:
        self.name = name
        self.table = table
        self.door = door
        self.state = SleepState.AWAKE
        self.since = self.idle_since = now
        self.own_at = now
        self.called_at: float | None = None
        self.wakes = Pace(door.first_wake_s)
        self.naps = Pace(FIRST_SLEEP_S)
        self.fault = ""
        self.late = False
        self.task: asyncio.Task[None] | None = None

    @property
    def cost_s(self) -> float:
        """Seconds that a wake is expected to take."""
        return _USUAL_S if self.wakes.mean_s is None else self.wakes.mean_s


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
        #: Right to decide, where several processes could, and whether this one does.
        self._right: Right | None = None
        self._decides = True
        #: News for the others.
        self._tell_peers: Callable[[], object] = lambda: None
        self._unsent: dict[str, SleepSet] = {}

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
        self._decides = False
        if self._right is not None:
            self._right.release()

    # --- several processes: one decides, the others are told ---

    def share(self, right: Right | None, tell: Callable[[], object]) -> None:
        """Decide only with a right from now on; `tell` is called once `take` has news. None: alone again."""
        if self._right is not None:
            self._right.release()
        self._right, self._tell_peers = right, tell
        self._decides = right is None or right.held()

    def take(self) -> list[SleepSet]:
        """Return the changes for the other processes since the last call."""
        unsent, self._unsent = self._unsent, {}
        return list(unsent.values())

    def live(self) -> list[SleepSet]:
        """Return the state of every instance that is not awake, if this process decides."""
        places = self.places.values() if self._decides else ()
        return [_told(each) for each in places if each.state is not SleepState.AWAKE]

    def adopt(self, change: SleepSet) -> None:
        """Take over the state of an instance's sleep that the deciding process has sent."""
        place, state = self.places.get(change.name), _STATES.get(change.reason)
        if place is not None and state is not None and not self._decides:
            place.state, place.since = state, self._now()
            place.wakes.mean_s, place.fault = change.wake_s, change.fault
            self._tell(place)

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
        for model, at in self._scheduler.queue.elsewhere.oldest_at.items():
            oldest[model] = min(at, oldest.get(model, at))
        self._decides = self._right is None or self._right.held()
        there: dict[Sleeper, Instance] = {}
        for place in self.places.values():
            instance = self._scheduler.fleet.instances.get(place.name)
            if instance is not None:
                there[place] = instance
                self._note(place, instance, oldest, now)
        if not self._decides:
            return
        for model in sorted(oldest, key=lambda name: oldest[name]):
            self._call(model, oldest, there, now)
        for place, instance in there.items():
            rests = place.table.sleep_after_s
            if place.state is SleepState.AWAKE and rests and now - place.idle_since >= rests:
                self._leave(place, f"idle for {rests:g} s", now)
            # Another process may have sent a request before it was told.
            told = self._right is None or now > place.since
            if place.state is SleepState.DRAINING and told:
                if not _busy(instance):
                    self._enter(place, EMPTY, now)
                elif now - max(place.since, place.own_at) >= OTHERS_S:
                    self._stays(place, USED, "others go on using it", True, now)
            if place.task is not None and not place.task.done():
                continue
            # A process that ended may have begun it: it is begun again.
            if place.state is SleepState.FALLING_ASLEEP:
                place.task = asyncio.create_task(self._sleep(place), name=f"sleep-{place.name}")
            elif place.state is SleepState.WAKING:
                place.task = asyncio.create_task(self._wake(place), name=f"wake-{place.name}")

    def _note(self, place: Sleeper, instance: Instance, oldest: Mapping[str, float], now: float) -> None:
        waits = any(name in oldest for name in instance.models)
        if not waits:
            place.called_at = None
        if instance.in_flight:
            place.own_at = now
        if _busy(instance) or waits:
            place.idle_since = now
        if place.state is not SleepState.AWAKE and instance.sleep.reason != place.state.value:
            self._tell(place)  # a new incarnation of it
        if not self._decides:
            return
        if place.state is SleepState.WAKING and not place.late and now - place.since >= place.wakes.limit_s:
            place.late = True
            self._no_wake(place, f"not awake after {now - place.since:.0f} s")
            self._tell(place)
        elif place.state is SleepState.ASLEEP and place.fault and now - place.since >= _STALE_S:
            if _answers(place, instance):
                self._found_awake(place, now)
        elif place.state is SleepState.AWAKE:
            if place.fault and place.naps.wait_s(now) <= 0.0:
                place.fault = ""
                self._tell(place)
            if place.table.command is not None:
                asleep = instance.evidence.health.state is Health.EJECTED
            else:
                asleep = instance.asleep and now - place.since >= (_STALE_S if place.wakes.mean_s else 0.0)
            if asleep:
                place.fault = ""
                self._enter(place, FOUND_ASLEEP, now)

    def _call(
        self, model: str, oldest: Mapping[str, float], there: Mapping[Sleeper, Instance], now: float
    ) -> None:
        """Wake the instance of a model that costs least, unless one is about to answer.

        Beside one that answers, another is woken once a request has waited as long as the wake takes.
        """
        ready = self._scheduler.fleet.ready.get(model)
        of_model = [place for place, instance in there.items() if model in instance.models]
        if ready is None or any(place.state is SleepState.WAKING and not place.late for place in of_model):
            return
        answers = any(each.routable for each in ready.instances)
        best: tuple[float, Sleeper, list[Sleeper]] | None = None
        for place in of_model:
            if place.state is not SleepState.ASLEEP or there[place].admin.value != "ready":
                continue
            others = [each for each in there if _shares(each, place)]
            if place.wakes.wait_s(now) > 0.0 or any(
                each.state is SleepState.WAKING and not each.late for each in others
            ):
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
            if best is None or cost_s < best[0]:
                best = cost_s, place, [*awake, *leaving]
        if best is None:
            return
        _, place, others = best
        place.called_at = now if place.called_at is None else place.called_at
        for each in others:
            if each.state is SleepState.AWAKE:
                self._leave(each, f"{place.name} is to wake up", now)
            elif each.state is SleepState.WAKING:
                self._give_up(each, now)
        if not others and place.wakes.take(now):
            place.late = False
            self._enter(place, CALLED, now)

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
        self._change(_told(place))
        if self._decides:
            self._unsent[place.name] = _told(place)
            self._tell_peers()

    def _leave(self, place: Sleeper, why: str, now: float) -> None:
        if not place.naps.take(now):
            return
        tell(logger, Event.INSTANCE_ASLEEP, "%s is to sleep: %s", place.name, why, instance=place.name)
        self._enter(place, LEFT, now)

    def _give_up(self, place: Sleeper, now: float) -> None:
        """End a late wake: whatever it holds of the GPU, another one needs it."""
        if place.task is not None:
            end(place.task)
        self._wake_failed(place, GIVEN_UP, now)
        place.task = asyncio.create_task(self._sleep(place, LEAST_LATE_S), name=f"sleep-{place.name}")

    def _found_awake(self, place: Sleeper, now: float) -> None:
        place.fault = ""
        place.wakes.well()
        self._enter(place, FOUND_AWAKE, now)
        tell(logger, Event.INSTANCE_AWAKE, "%s answers after all", place.name, instance=place.name)
        for other in self.places.values():
            if _shares(other, place) and other.state in (SleepState.AWAKE, SleepState.WAKING):
                self._leave(place, f"{other.name} has the GPU", now)
                return

    def _stays(
        self, place: Sleeper, transition: Transition[SleepState], why: str, late: bool, now: float
    ) -> None:
        """Note that an instance does not sleep. Others of its group wait; it serves meanwhile."""
        place.fault = why
        place.naps.failed(now - place.since, late, now)
        text = "%s does not sleep: %s"
        tell(logger, Event.SLEEP_FAILED, text, place.name, why, instance=place.name, reason=why)
        self._enter(place, transition, now)

    def _no_wake(self, place: Sleeper, why: str) -> None:
        place.fault = why
        text = "%s does not wake up: %s"
        tell(logger, Event.WAKE_FAILED, text, place.name, why, instance=place.name, reason=why)

    def _wake_failed(self, place: Sleeper, transition: Transition[SleepState], now: float) -> None:
        began = place.since if place.called_at is None else place.called_at
        place.wakes.failed(now - began, place.late, now)
        place.called_at = None
        self._enter(place, transition, now)

    async def _sleep(self, place: Sleeper, given_up_s: float = 0.0) -> None:
        """Let an instance sleep; `given_up_s`: the longest time for one whose wake was given up."""
        limit_s = given_up_s or place.naps.limit_s
        began = self._now()
        try:
            async with asyncio.timeout(limit_s):
                await place.door.sleep()
        except Exception as error:  # of whatever kind: it must not stay on its way for ever
            why, now = _line(error, limit_s), self._now()
            if given_up_s:
                self._enter(place, LOST, now)
            elif self._is_down(place) and any(_shares(each, place) for each in self.places.values()):
                self._no_wake(place, f"it is down; {why}")
                self._enter(place, LOST, now)
            else:
                self._stays(place, SLEEP_FAILED, why, isinstance(error, TimeoutError), now)
            return
        now = self._now()
        if not given_up_s:
            place.fault = ""
            place.naps.took(now - began)
        self._enter(place, SLEPT, now)

    async def _wake(self, place: Sleeper) -> None:
        began = self._now()
        try:
            async with asyncio.timeout(MOST_WAKE_S):
                await place.door.wake()
        except Exception as error:  # of whatever kind: it must not stay on its way for ever
            if not place.late:
                self._no_wake(place, _line(error, MOST_WAKE_S))
            self._wake_failed(place, WAKE_FAILED, self._now())
            return
        now = self._now()
        took_s = now - began
        place.fault, place.called_at = "", None
        place.wakes.took(took_s)
        text = "%s woke up in %.1f s"
        tell(logger, Event.INSTANCE_AWAKE, text, place.name, took_s, instance=place.name)
        self._enter(place, WOKEN, now)

    def _is_down(self, place: Sleeper) -> bool:
        instance = self._scheduler.fleet.instances.get(place.name)
        return instance is not None and instance.evidence.health.state is Health.EJECTED


def _told(place: Sleeper) -> SleepSet:
    reason = "" if place.state is SleepState.AWAKE else place.state.value
    comes = bool(reason) and not place.fault
    return SleepSet(place.name, reason, comes, place.wakes.mean_s, place.fault)


def _shares(one: Sleeper, other: Sleeper) -> bool:
    return one is not other and one.table.group is not None and one.table.group == other.table.group


def _answers(place: Sleeper, instance: Instance) -> bool:
    """Return True if a server says that it is awake; with commands, if it says anything."""
    if instance.evidence.health.state is not Health.UP:
        return False
    sample, seen_at = instance.sample, instance.sample_at
    fresh = sample is not None and seen_at is not None and seen_at > place.since
    return place.table.command is not None or (fresh and sample is not None and sample.asleep is False)


def _busy(instance: Instance) -> bool:
    """Return True if an instance has requests, also of others while it still answers."""
    answers = instance.evidence.health.state is not Health.EJECTED
    return instance.in_flight > 0 or (answers and instance.foreign > 0)


def _rest_s(instance: Instance, now: float) -> float:
    """Return the seconds until the requests of an instance have ended."""
    ends = [each.dispatched_at + each.forecast_end_s for each in instance.leases.values()]
    return max(0.0, max(ends, default=now) - now) + _USUAL_S / 4.0


def _line(error: Exception, limit_s: float) -> str:
    return " ".join(str(error).split())[:300] or f"no answer in {limit_s:.0f} s"
