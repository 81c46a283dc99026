"""`make fuzz`: every target for a minute, one on each core, then ten thousand raw mutants; 1 on a find.

T targets of S seconds on C cores and the mutants take about S T / C + 30 seconds; the target `cost` takes six
times as long, since it looks for what is slow, and begins first. Finds lie under `.cache/fuzz/TARGET`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from fuzz import run_target  # noqa: E402 -- the tests are no package

AT_ONCE = max(2, os.cpu_count() or 1)
#: Seconds of a target in place of one: what is slow shows itself late.
TIMES = {"cost": 6}


def start(name: str, seconds: int, output: IO[bytes]) -> int:
    """Fork a process that fuzzes a target, its output in a file; return its id."""
    if pid := os.fork():
        return pid
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    status = 1
    try:
        status = run_target.fuzz(name, seconds * TIMES.get(name, 1), seed=1)
    finally:
        sys.stdout.flush()
        os._exit(status)


def show(name: str, status: int, output: IO[bytes]) -> bool:
    """Print the end of the output of a target that found something, else its last figure; True if none."""
    output.seek(0)
    text = output.read().decode(errors="replace")
    if status:
        print(f"{name}: FOUND SOMETHING (exit status {status})\n{text[-6000:]}", flush=True)
        return False
    runs = [line.split()[-1] for line in text.splitlines() if "number_of_executed_units" in line]
    print(f"{name}: {runs[0]} runs, nothing found" if runs else text.strip(), flush=True)
    return True


def everything(seconds: int, mutants: int) -> bool:
    """All targets, then the mutants alone: they are timed. True if nothing was found."""
    run_target.load()
    waiting = sorted(run_target.TARGETS, key=lambda name: TIMES.get(name, 1))
    running: dict[int, tuple[str, IO[bytes]]] = {}
    quiet = []
    with contextlib.ExitStack() as files:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name, output = waiting.pop(), files.enter_context(tempfile.TemporaryFile())
                running[start(name, seconds, output)] = name, output
            pid, status = os.wait()
            name, output = running.pop(pid)
            quiet.append(show(name, os.waitstatus_to_exitcode(status), output))
        output = files.enter_context(tempfile.TemporaryFile())
        command = [sys.executable, str(HERE / "mutants.py"), "--count", str(mutants)]
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
        quiet.append(show("mutants", done.returncode, output))
    return all(quiet)


def main() -> int:
    """Fuzz as the arguments say."""
    parser = argparse.ArgumentParser(description="Fuzz everything.")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--mutants", type=int, default=10_000)
    arguments = parser.parse_args()
    return 0 if everything(arguments.seconds, arguments.mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
