"""Settings of all property tests: what they judge are results, never speed.

A run draws the same examples every time, so that a test that fails has been broken by a change.
`make properties` looks for new ones (the profile `search`).
"""

import contextlib
import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shell's job in the background ignores Ctrl-C, and what it starts does too: tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One authority that signs nothing in place of the system's 140: a process that starts reads them all (50 ms).
os.environ.setdefault("SSL_CERT_FILE", str(Path(__file__).with_name("lone-authority.pem")))

#: Checks of how examples are drawn, by the clock or by their size: no result of a test.
DRAWING = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)

settings.register_profile("search", deadline=None, suppress_health_check=DRAWING, print_blob=True)
settings.register_profile("hetlb", settings.get_profile("search"), derandomize=True, max_examples=40)
#: For code that `make test` has tried on more: compiled, and on another Python.
settings.register_profile("again", settings.get_profile("hetlb"), max_examples=10)
settings.register_profile("other_python", settings.get_profile("hetlb"), max_examples=3)
settings.load_profile("hetlb")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the tests against real vLLM alone where none of them is asked for: they import a lot."""
    asked_for = collection_path.name != "vllm" or "not vllm" not in config.getoption("markexpr")
    return None if asked_for else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Find the tests without garbage collections: what is found, hundreds of thousands of objects, stays."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def _children() -> set[int]:
    """Process ids of the direct children of this process."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            found.update(map(int, file.read_text().split()))
    return found


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
