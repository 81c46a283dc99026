"""Imports vLLM once and forks for each server and script that is asked for; run by vLLM's Python.

A server of vLLM is three processes, each of which imports torch and vLLM (10 s of CPU); here they are forks.
A line of JSON on standard input is a request, a line on standard output its answer:
- {"module" or "script", "arguments", "environment", "files": [stdin, stdout, stderr]} -> {"pid"}: a fork,
  the leader of a process group;
- {"ended": pid} -> {"status"}: its exit status, as `Popen.poll` says it.
The end of standard input ends this process, not its forks.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from vllm.utils import system_utils

SERVER = "vllm.entrypoints.openai.api_server"
#: Modules of a server's processes and of the scripts.
MODULES = (
    "transformers",
    SERVER,
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
#: Flags of the files that a fork has as standard input, output and errors.
FLAGS = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def bind_to_cores() -> None:
    """Bind a worker to the cores that vLLM names to OpenMP, which reads them at its own start alone."""
    if cores := os.environ.get("GOMP_CPU_AFFINITY"):
        os.sched_setaffinity(0, set(map(int, cores.split())))


def run(asked: dict[str, Any]) -> None:
    """Become the process that is asked for, and run it."""
    os.setpgid(0, 0)
    files = asked["files"]
    for number, (path, flags) in enumerate(zip(files, FLAGS, strict=True)):
        same = files.index(path)
        os.dup2(os.open(path, flags, 0o644) if same == number else same, number)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.register_at_fork(after_in_child=bind_to_cores)
    if module := asked.get("module"):
        sys.path[:0] = filter(None, asked["environment"].get("PYTHONPATH", "").split(os.pathsep))
        sys.modules.pop(module, None)
        sys.argv = [module, *asked["arguments"]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(asked["script"]).parent)
        sys.argv = [asked["script"], *asked["arguments"]]
        runpy.run_path(asked["script"], run_name="__main__")


def ended(pid: int, statuses: dict[int, int]) -> int | None:
    """Return the exit status of a fork, None while it runs."""
    if pid not in statuses:
        gone, status = os.waitpid(pid, os.WNOHANG)
        if not gone:
            return None
        statuses[pid] = os.waitstatus_to_exitcode(status)
    return statuses[pid]


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints as it is imported is no answer
    # On CPU vLLM spawns its processes: threads of OpenMP do not live on in a fork. Here no process has any.
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    statuses: dict[int, int] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "ended" in asked:
            answer = {"status": ended(asked["ended"], statuses)}
        elif pid := os.fork():
            answer = {"pid": pid}
        else:
            run(asked)
            return
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
