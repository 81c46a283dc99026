"""CPU and memory of a program from outside: the scheduler's own nanosecond counts, over all its threads.

`cpu_ns` is the time that the scheduler counted for all threads of a program, nothing sampled and
nothing asked of the program. It is read through the processes' CPU clocks: the first fields of
`/proc/PID/task/*/schedstat` summed, together with what threads that ended had run (LiteLLM ends some).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except FileNotFoundError:
            continue
        for thread in threads:
            found += map(int, _read(f"/proc/{parent}/task/{thread}/children").split())
    return found


def cpu_ns(pids: Iterable[int]) -> int:
    """Nanoseconds that all threads of these processes have run so far."""
    total = 0
    for pid in pids:
        # clock_getcpuclockid(3): the clock of a whole process, CPUCLOCK_SCHED.
        with contextlib.suppress(OSError):
            total += time.clock_gettime_ns((~pid << 3) | 2)
    return total


def busy_s(cores: Iterable[int]) -> float:
    """Seconds for which these cores have been busy so far, to 10 ms."""
    wanted = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in _read("/proc/stat").splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / _TICKS_PER_S


def rss_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes, bytes; pages that they share count once for each."""
    total = 0
    for pid in pids:
        fields = _read(f"/proc/{pid}/statm").split()
        total += int(fields[1]) * _PAGE_BYTES if fields else 0
    return total


def measured(command: Sequence[str], cores: Sequence[int]) -> list[str]:
    """The command with which a program runs on these cores and is killed when this process is gone.

    Its process asks for both before it becomes the program: code between fork and exec may deadlock where
    threads run. It is to be started in a session of its own (`prefer`).
    """
    wanted = ",".join(map(str, cores))
    return [sys.executable, "-IS", os.path.abspath(__file__), str(os.getpid()), wanted, *command]


def become_measured(parent: int, cores: Sequence[int]) -> None:
    """Run on these cores, and be killed when `parent` is gone."""
    os.sched_setaffinity(0, cores)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before we asked
        sys.exit(1)


def prefer(pid: int) -> None:
    """Let the scheduler prefer this session to what else runs on the machine, where we may ask for it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "w") as file:
        file.write("-15")


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


if __name__ == "__main__":
    become_measured(int(sys.argv[1]), [int(core) for core in sys.argv[2].split(",")])
    os.execvp(sys.argv[3], sys.argv[3:])
