"""Helper processes (engines, a proxy) that never outlive the process that started them.

Leaving the context kills every process group; on Linux the kernel kills them if this process is killed. Each
asks the kernel for that itself, before it runs `hetlb` (`python -m hetlb.tools.loadtest.processes PARENT
ARGUMENT...`): code that runs between fork and exec may deadlock if threads run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hetlb.errors import HetlbError

READY_TIMEOUT_S = 120.0
_PR_SET_PDEATHSIG = 1


class HelperProcess:
    """A `python -m hetlb …` child. `urls` come from its ready line, in order; `log` takes its stderr."""

    def __init__(self, name: str, arguments: tuple[str, ...], log: Path) -> None:
        self.name = name
        self.urls: list[str] = []
        self._log = log
        with log.open("wb") as stderr:
            # A process group of its own (Ctrl-C reaches us alone), but the same session: a session's
            # processes share one slice of the processors, and another session can starve them.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hetlb.tools.loadtest.processes", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                process_group=0,
            )

    async def ready(self) -> None:
        """Wait for the ready line. Raises `HetlbError` with the process's output otherwise."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                line = await asyncio.to_thread(self._process.stdout.readline)
        except TimeoutError:
            line = ""
        if " ready on " not in line:
            self.kill()
            raise HetlbError(f"{self.name} did not start: {self._last_words()}")
        self.urls = re.findall(r"http://[^\s)]+", line)

    def check(self) -> None:
        status = self._process.poll()
        if status is not None:
            raise HetlbError(f"{self.name} ended with status {status}: {self._last_words()}")

    def kill(self) -> None:
        """End its whole group now and collect it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " / ".join(lines[-3:]) or "it said nothing"


class Helpers:
    """The processes started in one context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[HelperProcess] = []

    def start(self, name: str, *arguments: str) -> HelperProcess:
        """Start `python -m hetlb ARGUMENTS`; `name` is for messages."""
        log = self._folder / f"{len(self._processes)}.log"
        process = HelperProcess(name, arguments, log)
        self._processes.append(process)
        return process

    async def engines(self, profiles: Mapping[str, Path], model: str) -> dict[str, str]:
        """Start an emulated engine of each profile at a free port; their addresses, once all are up."""
        serves = ("--port", "0", "--served-model-name", model)
        started = {
            name: self.start(f"engine {name}", "engine", "--profile", str(profile), *serves)
            for name, profile in profiles.items()
        }
        for engine in started.values():
            await engine.ready()
        return {name: engine.urls[0] for name, engine in started.items()}

    async def proxy(self, model: Mapping[str, Any]) -> tuple[str, str]:
        """Start a proxy of a model (a table of a fleet file) at free ports; its address and admin address."""
        ports = {"listen": {"port": 0}, "admin": {"port": 0}}
        file = self._folder / f"{len(self._processes)}.yaml"
        file.write_text(yaml.safe_dump({"version": 1, **ports, "models": [model]}))
        proxy = self.start("the proxy", "serve", "--config", str(file))
        await proxy.ready()
        return proxy.urls[0], proxy.urls[1]

    def check(self) -> None:
        for process in self._processes:
            process.check()

    def kill_all(self) -> None:
        while self._processes:
            self._processes.pop().kill()


@contextlib.contextmanager
def helper_processes() -> Iterator[Helpers]:
    """Yield a starter of processes, which are gone when the block ends."""
    with tempfile.TemporaryDirectory(prefix="hetlb-logs-") as folder:
        helpers = Helpers(Path(folder))
        try:
            yield helpers
        finally:
            helpers.kill_all()


def _run_child() -> None:
    """Run `hetlb` with the arguments that follow the parent's process id."""
    parent = int(sys.argv.pop(1))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # gone before we asked
            sys.exit(1)
    runpy.run_module("hetlb", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_child()
