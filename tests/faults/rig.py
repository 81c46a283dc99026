"""A proxy in front of engines that fail, with or without fifty streams in the background.

Every case gets a proxy of its own, in this process on the event loop of `hetlb serve`, or as a
process of its own (`Process`). The model `m` is served by the engines that a case spoils, `bg` by one that is
never spoilt: the streams in the background are the neighbours of invariant I9. When the case is over, the
invariants are checked, then everything is stopped and nothing may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from faults.checker import Checker, Snapshot, fleet, metrics, until
from faults.client import Answer, Client, body_of, get, request
from faults.engine import FaultEngine
from helpers import HANG_S
from proxy.services import PatientService

from hetlb.balancer.config.fleet import load_fleet
from hetlb.cli.serving_options import OPTIONS

BACKGROUND = 50


class Rig:
    """What a case works with."""

    def __init__(
        self, folder: Path, engines: list[FaultEngine], neighbour: FaultEngine, port: int, admin: int
    ) -> None:
        self.path = folder / "fleet.yaml"
        self.engines = engines
        self.neighbour = neighbour
        self.port, self.admin_port = port, admin
        #: How often a request may have been run, by its id; once where nothing is said.
        self.may_run: dict[str, int] = {}
        #: When the client of a request had its first byte, by id.
        self.first_bytes: dict[str, float] = {}
        self.pid: int | str = "self"
        self._numbers = iter(range(1, 1 << 30))

    @property
    def engine(self) -> FaultEngine:
        """The first engine."""
        return self.engines[0]

    def label(self) -> str:
        """An id for one more request."""
        return f"r{next(self._numbers)}"

    def client(self) -> Client:
        """One more connection."""
        return Client(self.port)

    async def ask(
        self, mode: str | None = None, *headers: str, runs: int = 1, label: str | None = None, **fields: Any
    ) -> Answer:
        """One request on a connection of its own. `mode` is what it meets at every engine of `m`.

        `runs` is how often it may be run. The tokens are checked to be its own.
        """
        label = label or self.label()
        self.may_run[label] = runs
        if mode is not None:
            for engine in self.engines:
                engine.modes[label] = mode
        async with self.client() as client:
            client.send(request(label, body_of(label, **fields), *headers))
            answer = await client.answer()
        self.first_bytes[label] = answer.first_byte_at
        answer.label = label  # type: ignore[attr-defined]
        return answer

    async def ask_many(self, count: int, mode: str | None = None, **fields: Any) -> list[Answer]:
        """That many requests at once."""
        return list(await asyncio.gather(*(self.ask(mode, **fields) for _ in range(count))))

    async def raw(self, data: bytes) -> Answer:
        """These bytes on a connection of their own, and the first answer."""
        async with self.client() as client:
            client.send(data)
            return await client.answer()

    def runs(self, label: str | None = None) -> int:
        """Executions at all engines: of one request, or of all."""
        counts = [engine.executions for engine in self.engines]
        return sum(each.total() if label is None else each[label] for each in counts)

    # --- the proxy from outside ---

    async def instance(self, name: str) -> dict[str, Any]:
        """An instance as `/v1/fleet` has it."""
        document = await fleet(self.admin_port)
        found = [i for model in document["models"] for i in model["instances"] if i["name"] == name]
        assert found, f"{name} is not in the fleet"
        entry: dict[str, Any] = found[0]
        return entry

    async def health(self, name: str) -> str:
        """`up`, `suspect` or `ejected`."""
        return str((await self.instance(name))["health"])

    async def becomes(self, name: str, **wanted: Any) -> None:
        """Wait until an instance has these figures."""
        seen: dict[str, Any] = {}

        async def holds() -> bool:
            nonlocal seen
            seen = await self.instance(name)
            return all(seen[key] == value for key, value in wanted.items())

        await until(holds, lambda: f"{name} never became {wanted}: {seen}")

    async def queued(self, count: int) -> None:
        """Wait until that many requests wait."""
        seen = -1

        async def holds() -> bool:
            nonlocal seen
            seen = (await fleet(self.admin_port))["queue"]["requests"]
            return seen == count

        await until(holds, lambda: f"expected {count} waiting, got {seen}")

    async def metric(self, name: str, labels: str = "") -> float:
        """The sum of the series of the metrics page that have these labels; 0 if there is none."""
        wanted = set(labels.split(",")) - {""}
        page = await metrics(self.admin_port)
        return sum(
            value for (found, has), value in page.items() if found == name and wanted <= set(has.split(","))
        )

    async def ejections(self, name: str) -> int:
        """Number of ejections of an instance."""
        return int(await self.metric("hetlb_instance_ejections_total", f'server="{name}"'))

    async def set_state(self, name: str, state: str) -> None:
        """ready, drain or maint."""
        body = json.dumps({"state": state}).encode()
        status, text = await get(self.admin_port, f"/v1/fleet/instances/{name}/state", "PUT", body)
        assert status == 200, text

    async def reload(self) -> tuple[int, bytes]:
        """Have the fleet file read again."""
        return await get(self.admin_port, "/v1/reload", "POST")

    def document(self) -> dict[str, Any]:
        """The fleet file as it stands."""
        document: dict[str, Any] = yaml.safe_load(self.path.read_text())
        return document

    def write(self, document: dict[str, Any]) -> None:
        """Put another fleet in the place of the file, which the proxy watches."""
        written = self.path.with_suffix(".new")
        written.write_text(yaml.safe_dump(document))
        written.replace(self.path)


def fleet_file(urls: list[str], neighbour: str, tables: dict[str, Any]) -> dict[str, Any]:
    """A fleet of `m` at these URLs and `bg` at the neighbour; `tables` are merged in.

    With `kv_transfer` the first instance of `m` reads prompts for the others.
    """
    document: dict[str, Any] = {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "policy": {"name": "rr"},
        "scrape": {"interval_s": 0.05},
        "models": [
            {"name": "m", "instances": [{"name": f"i{n}", "url": url} for n, url in enumerate(urls)]},
            {"name": "bg", "instances": [{"name": "bg0", "url": neighbour}]},
        ],
    }
    for name, table in tables.items():
        if name == "kv_transfer":
            document["models"][0][name] = table
            for number, instance in enumerate(document["models"][0]["instances"]):
                instance["role"] = "decode" if number else "prefill"
            continue
        document[name] = {**document.get(name, {}), **table}
    return document


class Background:
    """Fifty clients that stream from the neighbour, one request after the other, until told to stop."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.completed = 0

    async def start(self) -> None:
        """Begin; returns when every client has had a token."""
        going = [asyncio.Event() for _ in range(BACKGROUND)]
        self._tasks = [asyncio.create_task(self._stream(n, event)) for n, event in enumerate(going)]
        watch = asyncio.gather(*(event.wait() for event in going))
        await asyncio.wait({watch, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        if not watch.done():
            watch.cancel()
            await self.stop()

    async def stop(self) -> None:
        """End the streams and check that each of them was whole."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def _stream(self, number: int, going: asyncio.Event) -> None:
        async with self._rig.client() as client:
            turn = 0
            while not self._stop.is_set():
                label = f"bg{number}-{turn}"
                client.send(request(label, body_of(label, model="bg")))
                answer = await client.first_token()
                going.set()
                await client.rest(answer)
                assert (answer.status, answer.end, answer.done) == (200, "clean", True), answer.body
                assert answer.tokens(label) == self._rig.neighbour.length
                self.completed += 1
                turn += 1


@contextlib.asynccontextmanager
async def engines(
    count: int, *, modes: tuple[str, ...] = ()
) -> AsyncIterator[tuple[list[FaultEngine], FaultEngine]]:
    """That many engines of `m`, and the neighbour."""
    async with contextlib.AsyncExitStack() as stack:
        neighbour = FaultEngine(served="bg")
        neighbour.pace_s, neighbour.length = 0.02, 5
        made = [FaultEngine(modes[n] if n < len(modes) else "ok") for n in range(count)]
        for engine in (*made, neighbour):
            await stack.enter_async_context(engine)
        yield made, neighbour


@contextlib.asynccontextmanager
async def in_process(
    folder: Path,
    made: list[FaultEngine],
    neighbour: FaultEngine,
    tables: dict[str, Any],
    urls: list[str] | None = None,
) -> AsyncIterator[Rig]:
    """A proxy on this event loop. In the end nothing of it may be left."""
    current = asyncio.current_task()
    tasks = asyncio.all_tasks()
    path = folder / "fleet.yaml"
    path.write_text(
        yaml.safe_dump(fleet_file(urls or [engine.url for engine in made], neighbour.url, tables))
    )
    service = PatientService(load_fleet(path), OPTIONS)
    try:
        await service.start()
        rig = Rig(folder, made, neighbour, service.address[1], service.admin.address[1])
        yield rig
    finally:
        await service.stop(0.0)

    async def gone() -> bool:
        await asyncio.sleep(0)
        serving = {task for engine in (*made, neighbour) for task in engine.tasks}
        return not asyncio.all_tasks() - tasks - serving - {current}

    await until(gone, lambda: f"tasks left: {asyncio.all_tasks() - tasks}")


class Process(Rig):
    """A proxy as a process of its own, for what only a process can suffer."""

    process: asyncio.subprocess.Process
    #: What the proxy wrote on stderr so far, where it is read.
    log: bytes

    async def ended(self) -> int:
        """Wait for the end; the exit status."""
        async with asyncio.timeout(HANG_S):
            return await self.process.wait()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)


@contextlib.asynccontextmanager
async def as_process(
    folder: Path,
    made: list[FaultEngine],
    neighbour: FaultEngine,
    tables: dict[str, Any],
    *,
    flags: tuple[str, ...] = (),
    prefix: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    stderr: int | None = None,
    urls: list[str] | None = None,
) -> AsyncIterator[Process]:
    """`hetlb serve` as a process; killed at the end if it is still there.

    `prefix` goes before the command (`prlimit …`), `stderr` is a descriptor for its log.
    """
    path = folder / "fleet.yaml"
    path.write_text(
        yaml.safe_dump(fleet_file(urls or [engine.url for engine in made], neighbour.url, tables))
    )
    command = (*prefix, sys.executable, "-m", "hetlb", "serve", "--config", str(path), *flags)
    with (folder / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=log if stderr is None else stderr,
            env=os.environ | (environment or {}),
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(HANG_S):
            line = (await process.stdout.readline()).decode()
        ports = [int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)", line)]
        assert len(ports) == 2, (line, (folder / "log").read_text())
        rig = Process(folder, made, neighbour, *ports)
        rig.process, rig.pid = process, process.pid
        yield rig
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # or its pipe is closed too late to be seen


class Launcher:
    """What a case that starts the proxy as a process works with: the engines, and maybe a crowd."""

    def __init__(
        self,
        folder: Path,
        made: list[FaultEngine],
        neighbour: FaultEngine,
        tables: dict[str, Any],
        *,
        crowd: bool,
    ) -> None:
        self.folder = folder
        self.engines = made
        self._neighbour = neighbour
        self._tables = tables
        self._crowd = crowd

    def process(self, **how: Any) -> contextlib.AbstractAsyncContextManager[Process]:
        """Start the proxy; see `as_process`."""
        return as_process(self.folder, self.engines, self._neighbour, self._tables, **how)

    @contextlib.asynccontextmanager
    async def unharmed(self, rig: Process, outcomes: Counter[str] | None = None) -> AsyncIterator[None]:
        """What happens inside must leave the proxy as it was, and the crowd must notice nothing."""
        checker = Checker(rig.admin_port, (*self.engines, self._neighbour), pid=rig.pid, own_process=False)
        before = await checker.snapshot()
        background = Background(rig)
        if self._crowd:
            await background.start()
        try:
            yield
        finally:
            await background.stop()
        now = await checker.back_to(before)
        expected = None if outcomes is None else outcomes + Counter(ok=background.completed)
        check_requests(rig, before, now, expected, len(rig.first_bytes) + background.completed)


def check_requests(
    rig: Rig, before: Snapshot, now: Snapshot, expected: Counter[str] | None, sent: int | None
) -> None:
    """I1 and I6: every request ended in exactly one outcome, and none was run too often or too late."""
    ended = now.outcomes - before.outcomes
    if expected is not None:
        assert ended == expected, f"expected the outcomes {dict(expected)}, got {dict(ended)}"
    elif sent is not None:
        assert ended.total() == sent, f"{sent} requests, but {ended.total()} outcomes: {dict(ended)}"
    for engine in rig.engines:
        for visit in engine.visits:
            may = rig.may_run.get(visit.id, 1)
            ran = rig.runs(visit.id)
            assert ran <= may, f"{visit.id} was run {ran} times, {may} allowed"
            first = rig.first_bytes.get(visit.id)
            assert first is None or visit.started_at <= first, (
                f"{visit.id} was run again after its first byte"
            )


__all__ = [
    "Background",
    "Checker",
    "Launcher",
    "Process",
    "Rig",
    "as_process",
    "check_requests",
    "engines",
    "in_process",
]
