"""Event logs, as a fuzzer and the tests of growth give them."""

from __future__ import annotations

import contextlib
import functools

from fuzz.costs import Make, Reader
from helpers import request, spec

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.options.event_log.eventlog import RecordingScheduler, Replay, encode_setup


@functools.cache
def recorded() -> tuple[str, ...]:
    """Return the lines of a short log."""
    setup = SchedulerSetup(specs=(spec("a"), spec("b")), policy="rr", params=PolicyParams())
    lines = [encode_setup(setup)]
    scheduler = RecordingScheduler(setup, write=lines.append)
    for number in range(1, 3):
        scheduler.on_arrival(request(number), float(number))
    scheduler.on_tick(3.0)
    return tuple(lines)


def event_log(data: bytes) -> None:
    """Lines behind a set-up: replayed, or one line that names the place."""
    said = ""
    try:
        for step in Replay([recorded()[0], *data.decode("utf-8", "replace").split("\n")]):
            assert step.same in (True, False)
    except ValueError as error:
        said = str(error)
    assert "\n" not in said


def line(data: bytes) -> None:
    """One line of a log."""
    with contextlib.suppress(ValueError):
        for _ in Replay([recorded()[0], data.decode()]):
            pass


def ticks(size: int) -> bytes:
    return b'{"t":1.0,"kind":"tick","out":[]}\n' * (size // 33)


def nested(size: int) -> bytes:
    return b'{"t":1.0,"kind":"tick","out":[' + b"[],".ljust(3) * (size // 3) + b"1]}"


def letters(size: int) -> bytes:
    return b'{"t":1.0,"kind":"' + b"x" * size + b'","out":[]}'


TARGETS = {"event_log": event_log}
#: name -> (reader, input of a size, the smaller size).
GROWTH: dict[str, tuple[Reader, Make, int]] = {
    "lines of an event log in small reads": (event_log, ticks, 32 << 10),
    "lists in a line of lines of an event log": (line, nested, 64 << 10),
    "a name in lines of an event log": (line, letters, 256 << 10),
}  # fmt: skip
