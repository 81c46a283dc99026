"""Starts real vLLM servers (CPU, .venv-vllm) as subprocesses for the tests.

Promises:
- ``with vllm_servers(specs, models_dir, log_dir) as servers`` gives the servers in the order of the specs,
  all started side by side, every one answering ``/health`` with 200 before the body runs. One overall
  deadline covers all of them.
- nothing outlives the block, whatever happens: each server has its own process group (the API server and
  its engine process), which is ended with SIGTERM, then SIGKILL. If this Python itself is killed, a
  guard (one waiting ``sh`` per server) sees its pipe close and kills the group.
- a server that dies or does not come up raises ``ServerFailed``, whose text ends with the tail of the log.
- each server has its own process group but stays in the SESSION of this process. Keep it so, and start
  proxies and load generators of these tests in that session too (``process_group=0``, never
  ``start_new_session=True``): a waiting vLLM engine spins on ``sched_yield``, and under Linux 6.18 with
  ``sched_autogroup`` a spinning session starves every other one for seconds; a client in its own session
  got all chunks of a stream at once, 2 s late. ``data/README.md`` has the figures.
- with `forked` a server is a fork of a process that has imported vLLM (forks.py), ready in a fifth of the CPU
  time; benches, and tests of how a server starts, start it as its users do.
- one server per core: ``VLLM_CPU_OMP_THREADS_BIND`` gets a core of its own from the cores this process may
  use, so that two models of unequal size are a steady unequal pair.

Standard library only, and nothing of hetlb: it must also say something when hetlb is broken.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forks import VENV, Fork, forks

HOST = "127.0.0.1"
REPO_ROOT = Path(__file__).resolve().parents[2]
VENV_PYTHON = VENV / "bin" / "python"
SERVED_MODEL_NAME = "tiny"
MODULE = "vllm.entrypoints.openai.api_server"

# Below the range from which Linux gives ports to outgoing connections, so that none of these can take
# the port between our look and vLLM's bind, seconds later.
PORTS = range(20000, 32000)


class ServerFailed(RuntimeError):
    """A server died or was not ready in time; the text ends with the tail of its log."""


@dataclass(frozen=True)
class ServerSpec:
    """One server to start. ``core``: the CPU its engine is bound to; by default the next one in turn."""

    name: str
    model: str
    core: int | None = None
    served_model_name: str = SERVED_MODEL_NAME
    max_model_len: int = 2048
    max_num_seqs: int = 64
    kv_space_gib: int = 1
    gpu_blocks: int | None = None
    extra_args: tuple[str, ...] = ()
    extra_env: tuple[tuple[str, str], ...] = ()


TINY_FAST = ServerSpec(name="tiny-fast", model="tiny-fast")
TINY_SLOW = ServerSpec(name="tiny-slow", model="tiny-slow")


@dataclass
class Server:
    """A running server. ``process`` leads its own process group: signal the group, not the process."""

    name: str
    url: str
    host: str
    port: int
    process: subprocess.Popen[bytes] | Fork
    log_path: Path
    spec: ServerSpec
    ready_after_s: float = field(default=0.0)

    def signal_group(self, number: int) -> None:
        """Send a signal to the API server and its engine process together (SIGSTOP, SIGCONT, SIGKILL)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def get(self, path: str, timeout_s: float = 60.0) -> tuple[int, bytes]:
        """One GET on a connection of its own."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def log_tail(self, lines: int = 40) -> str:
        """The end of the log, for a message."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-lines:])


def command_line(spec: ServerSpec, models_dir: Path, port: int, python: Path) -> list[str]:
    """The command that starts one server."""
    command = [
        str(python),
        "-m",
        MODULE,
        *("--model", str(models_dir / spec.model)),
        *("--served-model-name", spec.served_model_name),
        *("--dtype", "bfloat16"),
        "--enforce-eager",
        *("--max-model-len", str(spec.max_model_len)),
        *("--max-num-seqs", str(spec.max_num_seqs)),
        *("--host", HOST),
        *("--port", str(port)),
    ]
    if spec.gpu_blocks is not None:
        command += ["--num-gpu-blocks-override", str(spec.gpu_blocks)]
    return [*command, *spec.extra_args]


def environment(spec: ServerSpec, core: int) -> dict[str, str]:
    """The environment of one server: CPU KV cache, its core, and nothing that looks for a network."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_space_gib),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **dict(spec.extra_env),
    }


def free_ports(count: int) -> list[int]:
    """Distinct ports without a listener at the moment."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")


@contextlib.contextmanager
def vllm_servers(
    specs: Sequence[ServerSpec],
    models_dir: Path,
    log_dir: Path,
    *,
    deadline_s: float = 600.0,
    python: Path = VENV_PYTHON,
    forked: bool = False,
) -> Iterator[list[Server]]:
    """Run one server per spec for the length of the block; logs go to ``log_dir/NAME.log``."""
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two servers of one name")
    if not python.is_file():
        raise ServerFailed(f"{python} is missing: run tests/vllm/install.sh first")
    for spec in specs:
        if not (models_dir / spec.model / "config.json").is_file():
            raise ServerFailed(
                f"{models_dir / spec.model} holds no model: run tests/vllm/make_models.py first"
            )
    log_dir.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        started = time.monotonic()
        for index, (spec, port) in enumerate(zip(specs, free_ports(len(specs)), strict=True)):
            core = cores[index % len(cores)] if spec.core is None else spec.core
            running = _running(spec, models_dir, log_dir, port, core, python, forked=forked)
            servers.append(stack.enter_context(running))
        _await_ready(servers, started, deadline_s)
        yield servers


@contextlib.contextmanager
def _running(
    spec: ServerSpec,
    models_dir: Path,
    log_dir: Path,
    port: int,
    core: int,
    python: Path,
    *,
    forked: bool = False,
) -> Iterator[Server]:
    """One server process group from start to certain end; not yet ready when the block begins."""
    log_path = log_dir / f"{spec.name}.log"
    command, more = command_line(spec, models_dir, port, python), environment(spec, core)
    process: subprocess.Popen[bytes] | Fork
    if forked:
        module = command.index(MODULE)
        files = (Path(os.devnull), log_path, log_path)
        process = forks().start({"module": MODULE}, command[module + 1 :], more, files)
    else:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                env=more,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
    try:
        with _guard(process.pid):
            yield Server(spec.name, f"http://{HOST}:{port}", HOST, port, process, log_path, spec)
            _end_group(process)
    finally:
        _end_group(process)


@contextlib.contextmanager
def _guard(group: int) -> Iterator[None]:
    """A waiting shell that kills the group when this process ends without saying goodbye."""
    script = 'read -r word; [ "$word" = bye ] || kill -s KILL -- "-$1"'
    guard = subprocess.Popen(
        ["/bin/sh", "-c", script, "guard", str(group)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        yield
        assert guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(b"bye\n")
            guard.stdin.flush()
    finally:
        # An exception leaves without "bye": the pipe closes and the guard kills the group at once.
        assert guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.close()
        guard.wait()


def _await_ready(servers: Sequence[Server], started: float, deadline_s: float) -> None:
    """Poll /health of every server until all have said 200; the deadline is for all of them together."""
    waiting = list(servers)
    while waiting:
        for server in list(waiting):
            status = server.process.poll()
            if status is not None:
                raise ServerFailed(f"{server.name} ended with status {status}; its log:\n{server.log_tail()}")
            if _healthy(server):
                server.ready_after_s = time.monotonic() - started
                waiting.remove(server)
            elif time.monotonic() - started > deadline_s:
                raise ServerFailed(
                    f"{server.name} was not ready within {deadline_s:.0f} s; its log:\n{server.log_tail()}"
                )
        if waiting:
            time.sleep(0.25)


def _healthy(server: Server) -> bool:
    try:
        return server.get("/health", timeout_s=2.0)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _end_group(process: subprocess.Popen[bytes] | Fork, patience_s: float = 10.0) -> None:
    """End a whole process group: SIGTERM, then SIGKILL for what is left; returns when none is left."""
    for number, patience in ((signal.SIGTERM, patience_s), (signal.SIGKILL, patience_s)):
        until = time.monotonic() + patience
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, number)
        while time.monotonic() < until:
            process.poll()  # reaps the leader, so that the group can become empty
            if not _group_alive(process.pid):
                return
            time.sleep(0.05)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
