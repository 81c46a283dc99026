"""`make fuzz`: every target for a minute, one on each core, then ten thousand raw mutants; 1 on a find.

T targets of S seconds on C cores and the mutants take about S T / C + 30 seconds; the target `cost` takes six
times as long, since it looks for what is slow, and begins first. Finds lie under `.cache/fuzz/TARGET`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from fuzz.corpora import corpora  # noqa: E402 -- the tests are no package

#: Each has a folder of inputs.
TARGETS = sorted(corpora())
AT_ONCE = max(2, os.cpu_count() or 1)
#: Seconds of a target in place of one: what is slow shows itself late.
TIMES = {"cost": 6}


async def command(name: str, *arguments: str, room: asyncio.Semaphore) -> bool:
    """Run one of the scripts here; its output is shown if it failed, else its last figures."""
    async with room:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / arguments[0]),
            *arguments[1:],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    text = output.decode(errors="replace")
    if process.returncode:
        print(f"{name}: FOUND SOMETHING (exit status {process.returncode})\n{text[-6000:]}", flush=True)
        return False
    runs = [line.split()[-1] for line in text.splitlines() if "number_of_executed_units" in line]
    print(f"{name}: {runs[0]} runs, nothing found" if runs else text.strip(), flush=True)
    return True


async def everything(seconds: int, mutants: int) -> bool:
    """All targets, then the mutants alone: they are timed."""
    room = asyncio.Semaphore(AT_ONCE)
    found = await asyncio.gather(
        *(
            command(name, "run_target.py", name, "--seconds", str(seconds * TIMES.get(name, 1)), room=room)
            for name in sorted(TARGETS, key=lambda name: -TIMES.get(name, 1))
        )
    )
    return all([*found, await command("mutants", "mutants.py", "--count", str(mutants), room=room)])


def main() -> int:
    """Fuzz as the arguments say."""
    parser = argparse.ArgumentParser(description="Fuzz everything.")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--mutants", type=int, default=10_000)
    arguments = parser.parse_args()
    return 0 if asyncio.run(everything(arguments.seconds, arguments.mutants)) else 1


if __name__ == "__main__":
    sys.exit(main())
