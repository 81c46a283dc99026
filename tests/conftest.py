"""Settings of all property tests: what they judge are results, never speed.

A run draws the same examples every time, so that a test that fails has been broken by a change.
`make properties` looks for new ones (the profile `search`).
"""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shell's job in the background ignores Ctrl-C, and what it starts does too: tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Checks of how examples are drawn, by the clock or by what was drawn: no result of a test.
DRAWING = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)

settings.register_profile("search", deadline=None, suppress_health_check=DRAWING, print_blob=True)
settings.register_profile("hetlb", settings.get_profile("search"), derandomize=True)
settings.load_profile("hetlb")


def _children() -> set[int]:
    """Process ids of the direct children of this process."""
    return {
        int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Kill what a failed test has left running: uvloop waits for its children when it is closed."""
    before = _children()
    try:
        yield
    except BaseException:
        for pid in _children() - before:
            os.kill(pid, signal.SIGKILL)
        raise
