"""States of an instance that may sleep: the table that `Waker` obeys and the docs show."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from hetlb.balancer.core.state_transition import Transition


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
