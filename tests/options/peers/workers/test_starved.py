"""A process that waits for a CPU is told from one that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import turns_until

from hetlb.options.peers.supervisor import cpu_wait_s

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="needs a kernel that counts the time without a CPU"
)


async def test_a_process_that_shares_its_cpu_waits_and_a_stopped_one_does_not() -> None:
    cpu = min(os.sched_getaffinity(0))
    rivals = [_busy(cpu) for _ in range(3)]
    try:
        one = rivals[0].pid
        await turns_until(lambda: cpu_wait_s(one) > 0.1)
        os.kill(one, signal.SIGSTOP)
        await turns_until(lambda: _state(one) == "T")
        before, others = cpu_wait_s(one), cpu_wait_s(rivals[1].pid)
        await turns_until(lambda: cpu_wait_s(rivals[1].pid) > others + 0.1)
        assert cpu_wait_s(one) == before
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()


def test_a_process_that_is_gone_waits_for_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert cpu_wait_s(gone.pid) == 0.0


def _busy(cpu: int) -> subprocess.Popen[bytes]:
    """A process that wants this CPU all the time."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{cpu}])\nwhile True: pass"]
    )


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
