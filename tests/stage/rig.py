"""Toy stages and a coordinator on real sockets, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import HANG_S, free_port, turns_until
from stage.toy import make_worker

from hetlb.balancer.core.types import RejectReason
from hetlb.tools.stage.checkpoint import load_config
from hetlb.tools.stage.coordinator import Coordinator
from hetlb.tools.stage.stage_messages import Token
from hetlb.tools.stage.stages_file import StagesFile, StageTable, resolve_stages
from hetlb.tools.stage.worker import StageWorker

RANGES = {"a": (0, 7), "b": (0, 6), "c": (5, 12), "d": (6, 12)}


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop its turns until something holds."""
    await turns_until(condition)


class Stage:
    """A worker that can be killed and started again on its port."""

    def __init__(self, folder: Path, name: str, **options: Any) -> None:
        self.folder, self.name, self._options = folder, name, options
        self.first, self.end = RANGES[name]
        self.port = free_port()
        self.worker: StageWorker
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.worker, self.runner, self.pool = make_worker(self.folder, self.first, self.end, **self._options)
        await self.worker.start("127.0.0.1", self.port)
        self._task = asyncio.create_task(self.worker.run())

    async def kill(self) -> None:
        """End all its connections at once, with what it holds."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self.runner.gate.set()
            await self.worker.close()


class Rig:
    """Stages and the coordinator in front of them."""

    def __init__(
        self,
        folder: Path,
        names: str = "abcd",
        *,
        key: bytes = b"",
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self.stages = {name: Stage(folder, name, key=key, peer_tls=tls, **options) for name in names}
        self._tls = tls
        self._folder, self._key = folder, key
        self.events: list[str] = []
        self.coordinator: Coordinator

    def group(self, names: str, **table: Any) -> Any:
        scheme = "http" if self._tls is None else "https"
        urls = {n: f"{scheme}://localhost:{self.stages[n].port}" for n in names}
        workers = tuple(StageTable(name=n, url=url) for n, url in urls.items())
        stages = StagesFile(version=1, model="m", folder="", workers=workers, **{"reconnect_s": 0.01} | table)
        return resolve_stages(stages, self._folder / "stages.yaml")

    async def start(self, **table: Any) -> None:
        for stage in self.stages.values():
            await stage.start()
        self.coordinator = Coordinator(
            self.group("".join(self.stages), **table),
            load_config(self._folder),
            key=self._key,
            tls=self._tls,
            write_event=self.events.append,
        )
        await self.coordinator.start()
        assert await self.coordinator.wait_passable(HANG_S)
        await until(lambda: len(self.coordinator.scheduler.ledgers) == len(self.stages))

    async def idle(self) -> None:
        """Wait until nothing is held anywhere, and check that the books say so."""
        await until(lambda: not any(stage.pool.used for stage in self.stages.values()))
        assert not self.coordinator._sequences
        assert self.coordinator.scheduler.in_flight == self.coordinator.scheduler.waiting == 0
        assert all(not ledger.kv_token_layers for ledger in self.coordinator.scheduler.ledgers.values())
        self.coordinator.scheduler.check_integrity()

    async def close(self) -> None:
        await self.coordinator.close()
        for stage in self.stages.values():
            await stage.kill()


@contextlib.asynccontextmanager
async def rig(
    folder: Path, names: str = "abcd", *, table: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A started rig."""
    made = Rig(folder, names, **options)
    try:
        await made.start(**table or {})
        yield made
    finally:
        await made.close()


class Collector:
    """A receiver that takes `count` tokens."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.tokens: list[int] = []
        self.failure: tuple[RejectReason, str] | None = None

    def token(self, token: Token) -> bool:
        self.tokens.append(token.token)
        return len(self.tokens) < self._count

    def failed(self, reason: RejectReason, message: str) -> None:
        self.failure = reason, message

    @property
    def done(self) -> bool:
        return self.failure is not None or len(self.tokens) >= self._count
