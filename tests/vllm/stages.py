"""Real stages of a small model, a coordinator and `hetlb serve` as processes; shared with bench/stages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from forks import VENV, Fork, answered, forks

ROOT = Path(__file__).parents[2]
TORCH_PYTHON = VENV / "bin" / "python"
MODELS = ROOT / ".cache" / "stage-models"
#: Layers by worker: ranges that overlap.
RANGES = {"a": "0:7", "b": "0:6", "c": "5:12", "d": "6:12"}
#: Milliseconds of one layer of a fast machine, and how much longer a slow one takes: far above what the small
#: model needs, so that a busy machine changes little.
FAST_MS, SLOW = 8.0, 2.5
#: Limit for the start of a process.
READY_S = 300.0


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def make_models() -> Path:
    """The models, made once."""
    answered("make_stage_models.py", "make", str(MODELS))
    return MODELS


def reference(folders: Sequence[Path], prompts: list[list[int]], count: int) -> list[list[list[int]]]:
    """Greedy tokens by transformers: of every model, of every prompt."""
    arguments = ("answer", str(count), *map(str, folders))
    found: list[list[list[int]]] = json.loads(
        answered("make_stage_models.py", *arguments, question=json.dumps(prompts))
    )
    return found


def write_times(path: Path, kind: str) -> Path:
    """Write the layer times of a kind of machine, `fast` or `slow`."""
    rows = ["gpu_type,phase,batch_tokens,time_per_layer_ms"]
    fast_ms = FAST_MS * (SLOW if kind == "slow" else 1.0)
    rows += [
        f"{kind},prompt,{n},{fast_ms * ms / 2}" for n, ms in ((0, 0.0), (64, 1.0), (256, 3.0), (2048, 24.0))
    ]
    rows += [f"{kind},decode,{n},{fast_ms * ms}" for n, ms in ((0, 0.0), (1, 1.0), (64, 2.0))]
    path.write_text("\n".join(rows) + "\n")
    return path


def _first_line(output: Path) -> str:
    """The line that says that a process is ready, once it has written it to its output."""
    until = time.monotonic() + READY_S
    while "\n" not in (text := output.read_text() if output.exists() else ""):
        assert time.monotonic() < until, f"no line in {output}"
        time.sleep(0.02)
    return text.partition("\n")[0]


class StageProcess:
    """One `hetlb stage`; `forked` from a process that has imported torch (forks.py)."""

    def __init__(
        self, folder: Path, layers: str, *flags: str, output: Path, port: int = 0, forked: bool = False
    ) -> None:
        self._arguments = [
            "stage", "--model", str(folder), "--layers", layers, "--dtype", "float32",
            "--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "64", *flags,
        ]  # fmt: skip
        self._output, self._forked = output, forked
        self.url = ""
        self.process = self._start(port)

    def _start(self, port: int) -> subprocess.Popen[bytes] | Fork:
        arguments = [*self._arguments, "--port", str(port)]
        self._output.unlink(missing_ok=True)
        if self._forked:
            files = (Path(os.devnull), self._output, self._output.with_suffix(".err"))
            return forks().start({"module": "hetlb"}, arguments, environment(), files)
        with self._output.open("wb") as output:
            return subprocess.Popen(
                [TORCH_PYTHON, "-m", "hetlb", *arguments], env=environment(), stdout=output
            )

    def ready(self) -> str:
        """Wait for its address."""
        self.url = _first_line(self._output).split()[-1]
        return self.url

    def restart(self) -> None:
        """Start it again on its port."""
        self.process = self._start(int(self.url.rpartition(":")[2]))
        self.ready()

    def kv_usage(self) -> float:
        """Its report of its KV cache."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as page:
            text = page.read().decode()
        return float(re.findall(r"^vllm:kv_cache_usage_perc\S* (\S+)$", text, re.MULTILINE)[0])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)


class Rig:
    """Four stages, their coordinator and the proxy in front of it."""

    def __init__(
        self, url: str, admin: str, coordinator: str, stages: Mapping[str, StageProcess], events: Path
    ) -> None:
        self.url, self.admin, self.coordinator = url, admin, coordinator
        self.stages, self.events = stages, events

    def seen(self, figure: str) -> dict[str, float]:
        """A figure of each stage, as the coordinator sees it."""
        with urllib.request.urlopen(f"{self.coordinator}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        found = re.findall(rf'^hetlb_stage_{figure}{{stage="(\w+)"}} (\S+)$', text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def fleet(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.admin}/v1/fleet", timeout=60) as reply:
            document: dict[str, Any] = json.load(reply)
        return document

    def idle(self) -> bool:
        """True once nothing is in flight or held anywhere."""
        instance = self.fleet()["models"][0]["instances"][0]
        booked = [instance["in_flight"], instance["kv_reserved_tokens"], instance["workload"]]
        booked += [*self.seen("in_flight").values(), *self.seen("kv_reserved_token_layers").values()]
        held = [stage.kv_usage() for stage in self.stages.values() if stage.process.poll() is None]
        return not any(booked) and not any(held)

    def wait_idle(self, seconds: float = 120.0) -> None:
        until = time.monotonic() + seconds
        while not self.idle():
            assert time.monotonic() < until, self.fleet()
            time.sleep(0.1)


@contextlib.contextmanager
def rig(
    folder: Path,
    where: Path,
    *,
    scheduler: str = "hetlb",
    flags: Mapping[str, tuple[str, ...]] | None = None,
    names: str = "abcd",
    apart: bool = False,
    forked: bool = False,
) -> Iterator[Rig]:
    """Stages with overlapping layers behind one proxy; `flags` by worker. `apart`: they start one after
    the other, so that each measures itself alone. `forked`: as forks.py starts them.
    """
    stages: dict[str, StageProcess] = {}
    serving: list[subprocess.Popen[bytes]] = []

    def started(*arguments: object) -> list[str]:
        output = where / f"{arguments[0]}.out"
        with output.open("wb") as stdout:
            command = [sys.executable, "-m", "hetlb", *map(str, arguments)]
            serving.append(subprocess.Popen(command, env=environment(), stdout=stdout))
        return re.findall(r"http://[\d.:]+", _first_line(output))

    try:
        for name in names:
            more = (flags or {}).get(name, ())
            output = where / f"{name}.out"
            stages[name] = StageProcess(folder, RANGES[name], *more, output=output, forked=forked)
            if apart:
                stages[name].ready()
        workers = [{"name": name, "url": stage.url or stage.ready()} for name, stage in stages.items()]
        table = {"version": 1, "model": "m", "folder": str(folder), "workers": workers}
        file, events = where / "stages.yaml", where / "events.jsonl"
        file.write_text(yaml.safe_dump(table | {"scheduler": scheduler, "reconnect_s": 0.2}))
        (engine,) = started("stage", "--coordinate", file, "--port", 0, "--event-log", events)
        instance = {"name": "stages", "url": engine}
        fleet = {"version": 1, "listen": {"port": 0}, "admin": {"port": 0}, "proxy": {"request_log": False}}
        config = where / "fleet.yaml"
        config.write_text(yaml.safe_dump(fleet | {"models": [{"name": "m", "instances": [instance]}]}))
        url, admin = started("serve", "--config", config)
        yield Rig(url, admin, engine, stages, events)
    finally:
        for process in reversed(serving):
            process.send_signal(signal.SIGINT)
            process.wait(20)
        for stage in stages.values():
            stage.stop()
