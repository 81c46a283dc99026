"""Starts servers of vLLM, and scripts that ask it, as forks of one process that has imported it (forked.py).

Promises:
- the process is started when it is first asked for something, and ends with this one;
- a fork has one thread of OpenMP;
- a fork leads a process group of its own in the session of this process (engines.py says why);
- `answered` fails with the end of what a script wrote to its standard error.

Standard library only.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VENV = HERE.parents[1] / ".venv-vllm"
#: Limit for a script.
SCRIPT_S = 500.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Fork:
    """A process that was forked, like `subprocess.Popen` to a reader."""

    pid: int
    _forks: Forks

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        status: int | None = self._forks.ask({"ended": self.pid})["status"]
        return status

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status once it has ended; raise TimeoutExpired where that takes longer."""
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return status


class Forks:
    """The process that has imported vLLM."""

    def __init__(self) -> None:
        # OpenMP reads its number of threads when torch is imported; vLLM preloads torch's libgomp, too.
        libraries = sorted(map(str, VENV.glob("lib/python*/site-packages/torch*/**/libgomp*.so*")))
        more = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": ":".join(libraries[:1]), "HF_HUB_OFFLINE": "1"}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [VENV / "bin" / "python", "-W", "ignore", HERE / "forked.py"],
            env={**os.environ, **more}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Return the answer to a request."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
            assert line, f"forked.py ended with status {self._process.wait()}"
            return json.loads(line)

    def start(
        self,
        what: Mapping[str, str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[Path],
    ) -> Fork:
        """Start a {"module"} or {"script"}; `files` are its standard input, output and errors."""
        more = {"arguments": [*arguments], "environment": {**environment}, "files": [*map(str, files)]}
        return Fork(self.ask({**what, **more})["pid"], self)

    def close(self) -> None:
        """End the process; forks that run go on."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


@functools.cache
def forks() -> Forks:
    """Return the process of this session."""
    made = Forks()
    atexit.register(made.close)
    return made


def answered(script: str, *arguments: str, question: str = "") -> str:
    """Return what a script of this folder prints, with `question` as its standard input."""
    with tempfile.TemporaryDirectory(prefix="fork-") as name:
        stdin, stdout, stderr = (Path(name) / each for each in ("stdin", "stdout", "stderr"))
        stdin.write_text(question)
        what = {"script": str(HERE / script)}
        status = forks().start(what, arguments, os.environ, (stdin, stdout, stderr)).wait(SCRIPT_S)
        assert status == 0, stderr.read_text()[-3000:]
        return stdout.read_text()
