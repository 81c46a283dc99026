"""Settings of all property tests: what they judge are results, never speed.

A run draws the same examples every time, so that a test that fails has been broken by a change.
`make properties` looks for new ones (the profile `search`).
"""

import contextlib
import gc
import os
import re
import signal
import sys
from collections.abc import Generator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

import hetlb.extras
import hetlb.options

# A shell's job in the background ignores Ctrl-C, and what it starts does too: tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One authority that signs nothing in place of the system's 140: a process that starts reads them all (50 ms).
os.environ.setdefault("SSL_CERT_FILE", str(Path(__file__).with_name("lone-authority.pem")))

OPTIONS = Path(hetlb.options.__file__).parent
#: Checks of how examples are drawn, by the clock or by their size: no result of a test.
DRAWING = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)

settings.register_profile("search", deadline=None, suppress_health_check=DRAWING, print_blob=True)
settings.register_profile("hetlb", settings.get_profile("search"), derandomize=True, max_examples=40)
#: For code that `make test` has tried on more: compiled, and on another Python.
settings.register_profile("again", settings.get_profile("hetlb"), max_examples=10)
settings.register_profile("other_python", settings.get_profile("hetlb"), max_examples=3)
settings.load_profile("hetlb")


#: Option whose folder was taken away (`without_options.py`), and the files of tests to run; without any, all.
GONE = os.environ.get("HETLB_WITHOUT", "")
ONLY = frozenset(filter(None, os.environ.get("HETLB_ONLY", "").split(os.pathsep)))


class GoneFinder(MetaPathFinder):
    """Sees who imports the option that was taken away, or its tests."""

    #: True while tests are found: a module that imports it is skipped.
    finding = False
    #: True once a test has asked for it.
    asked = False
    #: Errors of tests that were skipped for it: fixtures of several tests raise theirs again in each.
    excused: list[BaseException]

    def __init__(self) -> None:
        self.excused = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in (f"hetlb.options.{GONE}", f"options.{GONE}"):
            self.asked = True
            if self.finding:
                pytest.skip(f"needs the option {GONE}", allow_module_level=True)

    def excuse(self, error: BaseException) -> None:
        """Skip a failed test where a process of it asked for the option, or its error names the folder."""
        known = any(error is each for each in self.excused)
        named = bool(GONE and re.search(rf"\boptions[./]{GONE}\b", str(error)))
        if known or named or self.asked or (GONE and _process_asked()):
            self.excused.append(error)
            pytest.skip(f"asks for the option {GONE}")


def _process_asked() -> bool:
    """Return whether a process that the running test started asked for the option which was taken away."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    records = Path(os.environ.get("HETLB_ASKED", os.devnull)).glob("*")
    return any(f"{test}\t{GONE}\n" in each.read_text() for each in records)


_gone = GoneFinder()
if GONE:
    sys.meta_path.insert(0, _gone)
if "HETLB_ASKED" in os.environ:
    from asking.sitecustomize import noted

    hetlb.extras.option = noted(hetlb.extras.option)  # before any module takes it from there


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the tests against real vLLM alone where none of them is asked for: they import a lot."""
    asked_for = collection_path.name != "vllm" or "not vllm" not in config.getoption("markexpr")
    if ONLY and collection_path.suffix == ".py":
        asked_for = str(collection_path.relative_to(Path(__file__).parents[1])) in ONLY
    return None if asked_for else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need the option which was taken away."""
    for item in items:
        for name in [name for mark in item.iter_markers("option") for name in mark.args]:
            if name == GONE:
                item.add_marker(pytest.mark.skip(reason=f"needs the option {name}"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Find the tests without garbage collections: what is found, hundreds of thousands of objects, stays."""
    gc.disable()
    _gone.finding = True
    result = yield
    _gone.finding = False
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
    """Kill what a failed test has left running: uvloop waits for its children when it is closed.

    A test that fails and has asked for the option which was taken away is one of that option's own.
    """
    before, _gone.asked = _children(), False
    try:
        yield
    except BaseException as error:
        for pid in _children() - before:
            os.kill(pid, signal.SIGKILL)
        _gone.excuse(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Skip a test whose fixtures ask for the option that was taken away."""
    _gone.asked = False
    try:
        yield
    except BaseException as error:
        _gone.excuse(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Excuse fixtures that end what could not begin without the option."""
    try:
        yield
    except Exception as error:
        _gone.excuse(error)
        raise
