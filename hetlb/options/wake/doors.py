"""Ways to let a server sleep and to wake it: endpoints of vLLM in development mode, or commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from hetlb.balancer.config.fleet_tables import WakeCommands, WakeTable
from hetlb.balancer.engines.engine_pools import EnginePool
from hetlb.balancer.engines.upstream import UnansweredError, answer_of

#: Seconds between questions whether a server is awake.
_LOOK_S: Final = 0.25
#: Longest first wake that others of its group wait for, in seconds: from memory, with weights that are read
#: again, and of a server that is started.
_FROM_MEMORY_S: Final = 60.0
_READ_AGAIN_S: Final = 180.0
_STARTED_S: Final = 300.0
_RELOAD: Final = b'{"method":"reload_weights"}'
_JSON: Final = b"content-type: application/json\r\n"


class DoorError(Exception):
    """A server does not sleep, or does not wake up; the message is one line."""


class NotReadyError(DoorError):
    """A server is not reached, or says that it is not ready. It is asked again."""


class Sleeping(msgspec.Struct):
    """Answer of vLLM's `/is_sleeping`."""

    is_sleeping: bool


class Door(ABC):
    """Way to let one server sleep, and to wake it. Each raises `DoorError`.

    `first_wake_s`: longest first wake that others of its group wait for.
    """

    first_wake_s = _STARTED_S

    def __init__(self, pool: Callable[[], EnginePool]) -> None:
        self._pool = pool

    @abstractmethod
    async def sleep(self) -> None:
        """Return when the server sleeps."""

    @abstractmethod
    async def wake(self) -> None:
        """Return when the server answers."""

    async def ask(self, line: str, body: bytes = b"", expected: Sequence[int] = (200,)) -> bytes:
        """Return the answer of the server to a request. Raises `DoorError`."""
        pool = self._pool()
        head = pool.head(line.encode("ascii"), _JSON if body else b"content-length: 0\r\n")
        try:
            status, answer = await answer_of(pool, head, body)
        except UnansweredError as error:
            raise NotReadyError(f"{line}: {error.detail}") from error
        if status not in expected:
            raise (NotReadyError if status >= 500 else DoorError)(f"{line}: status {status}")
        return answer

    async def until(
        self, line: str, holds: Callable[[bytes], bool], expected: Sequence[int] = (200,)
    ) -> None:
        """Return when an answer of the server is as expected. Raises `DoorError` if none ever will be."""
        while True:
            with contextlib.suppress(NotReadyError):
                if holds(await self.ask(line, expected=expected)):
                    return
            await asyncio.sleep(_LOOK_S)


class EngineDoor(Door):
    """vLLM's `/sleep`, `/wake_up` and `/is_sleeping` (`VLLM_SERVER_DEV_MODE=1`, `--enable-sleep-mode`)."""

    def __init__(self, pool: Callable[[], EnginePool], level: int) -> None:
        super().__init__(pool)
        self._level = level
        self.first_wake_s = _FROM_MEMORY_S if level == 1 else _READ_AGAIN_S

    async def sleep(self) -> None:
        await self.ask(f"POST /sleep?level={self._level}")
        await self.until("GET /is_sleeping", _sleeps)

    async def wake(self) -> None:
        if self._level == 1:
            await self.ask("POST /wake_up")
        else:  # the weights are gone
            await self.ask("POST /wake_up?tags=weights")
            await self.ask("POST /collective_rpc", _RELOAD)
            await self.ask("POST /wake_up?tags=kv_cache")
        await self.until("GET /is_sleeping", lambda answer: not _sleeps(answer))


class CommandDoor(Door):
    """Commands of the operator, which stop and start a server."""

    def __init__(self, pool: Callable[[], EnginePool], commands: WakeCommands) -> None:
        super().__init__(pool)
        self._commands = commands

    async def sleep(self) -> None:
        await _run(self._commands.sleep)

    async def wake(self) -> None:
        await _run(self._commands.wake)
        await self.until("GET /health", lambda answer: True, (200, 404))  # some servers have no such page


def door(table: WakeTable, pool: Callable[[], EnginePool]) -> Door:
    """Return the way that a fleet file states."""
    return EngineDoor(pool, table.level) if table.command is None else CommandDoor(pool, table.command)


def _sleeps(answer: bytes) -> bool:
    try:
        return msgspec.json.decode(answer, type=Sleeping).is_sleeping
    except (msgspec.DecodeError, RecursionError) as error:
        raise DoorError("GET /is_sleeping: expected is_sleeping true or false") from error


async def _run(command: Sequence[str]) -> None:
    """Run a command to its end; what it prints is dropped. Raises `DoorError`."""
    null = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=null, stdout=null, stderr=null, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise DoorError(f"{command[0]}: {error}") from error
    try:
        status = await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    if status:
        raise DoorError(f"{command[0]}: exit status {status}")
