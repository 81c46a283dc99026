"""Helper processes (engines, a proxy) that never outlive who started them.

Promise: a process is up when it printed its ready line; leaving the context kills every process group,
whatever happened; and the kernel kills them if this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from hetlb.errors import HetlbError

_PR_SET_PDEATHSIG = 1
#: Loaded here: between fork and exec nothing should be imported.
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class HelperProcess:
    """A `python -m hetlb …` child. `urls` are those in its ready line, in order."""

    def __init__(self, arguments: Sequence[str], log: IO[str]) -> None:
        self.arguments = list(arguments)
        self._log = log
        # A process group of its own (Ctrl-C reaches us alone), but the same session: a session's processes
        # share one slice of the processors, and another session can starve them.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hetlb", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        self.urls: list[str] = []

    async def ready(self, timeout_s: float = 30.0) -> None:
        """Wait for the ready line. Raises `HetlbError` with what the process said instead."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await asyncio.to_thread(self._process.stdout.readline)
        except TimeoutError:
            line = ""
        if " ready on " not in line:
            self.kill()
            raise HetlbError(f"`hetlb {' '.join(self.arguments)}` did not start: {self._last_words()}")
        self.urls = re.findall(r"http://[^\s)]+", line)

    def _last_words(self) -> str:
        self._log.flush()
        text = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
        return " / ".join(text.strip().splitlines()[-3:]) or "it said nothing"

    def kill(self) -> None:
        """End its whole group now and collect it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Helpers:
    """The processes started in one context."""

    def __init__(self, log: IO[str]) -> None:
        self._log = log
        self._processes: list[HelperProcess] = []

    def start(self, *arguments: str) -> HelperProcess:
        """Start `python -m hetlb ARGUMENTS`."""
        process = HelperProcess(arguments, self._log)
        self._processes.append(process)
        return process

    def kill_all(self) -> None:
        """End every process, the last started first."""
        while self._processes:
            self._processes.pop().kill()


@contextlib.contextmanager
def helper_processes() -> Iterator[Helpers]:
    """A context whose processes are gone when it is left."""
    with tempfile.NamedTemporaryFile("w", prefix="hetlb-", suffix=".log", encoding="utf-8") as log:
        helpers = Helpers(log)
        try:
            yield helpers
        finally:
            helpers.kill_all()
