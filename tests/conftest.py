"""Settings of all property tests: what they judge are results, never speed.

A run draws the same examples every time, so that a test that fails has been broken by a change.
`make properties` looks for new ones (the profile `search`).
"""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
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


def _rewrite_share(config: pytest.Config) -> None:
    """Rewrite the asserts of this worker's share of the files: in a fresh checkout each would rewrite all."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or sys.dont_write_bytecode:
        return
    asked_for = [Path(each.partition("::")[0]) for each in config.args]
    files = sorted(
        file for path in asked_for for file in ([path] if path.suffix else path.rglob("test_*.py"))
    )
    for file in files[int(worker[2:]) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        kept = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
        kept.parent.mkdir(exist_ok=True)
        if file.parent.name != "vllm" and rewrite._read_pyc(file, kept) is None:
            file_stat, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, file_stat, kept)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Find the tests without garbage collections: what is found, hundreds of thousands of objects, stays."""
    _rewrite_share(session.config)
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
