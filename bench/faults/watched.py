"""`hetlb`, which on SIGUSR2 says how many asyncio tasks it has: `python watched.py serve …`.

Nothing else differs from `hetlb`. The answer goes to the file that HETLB_WATCH names: JSON with the
coroutines of the tasks that are not done, and how many objects the collector tracks.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from hetlb.cli.main import main


def _say(number: int, frame: FrameType | None) -> None:
    gc.collect()
    tasks = [task for task in gc.get_objects() if isinstance(task, asyncio.Task) and not task.done()]
    file = Path(os.environ["HETLB_WATCH"])
    partial = file.with_suffix(".partial")
    coroutines = sorted(getattr(task.get_coro(), "__qualname__", "?") for task in tasks)
    partial.write_text(json.dumps({"tasks": coroutines, "objects": len(gc.get_objects())}))
    partial.replace(file)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, _say)
    sys.exit(main())
