"""`python -m hetlb.tools.loadtest.child PARENT ARGUMENT...`: hetlb, killed by Linux when its parent is gone.

The new process asks for it itself: code that runs between fork and exec may deadlock if threads run.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run `hetlb` with the arguments that follow the parent's process id."""
    parent = int(sys.argv.pop(1))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # gone before we asked
            sys.exit(1)
    runpy.run_module("hetlb", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
