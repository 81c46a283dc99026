"""What carries the messages of peers: a hub, or a Redis or Valkey server on a port of its own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import asked_until, free_port

from hetlb.options.peers.hub import Hub

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(SERVER is None, reason="needs valkey-server or redis-server")


class Server:
    """A Redis or Valkey server on a port of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        assert SERVER is not None
        self.process = await asyncio.create_subprocess_exec(
            SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await asked_until(self.answers)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def answers(self) -> bool:
        """True if it takes connections."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class HubServer:
    """A hub, in place of a server."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "hub.sock"
        self._hub: Hub | None = None

    @property
    def url(self) -> str:
        return f"hub:{self._path}"

    async def start(self) -> None:
        if self._path.is_dir():
            self._path.rmdir()
        self._hub = Hub()
        await self._hub.start(self._path)

    async def kill(self) -> None:
        """End the hub; the path stays another's, so that no peer is the next one."""
        assert self._hub is not None
        await self._hub.close()
        self._path.unlink()
        self._path.mkdir()


Carrier = Server | HubServer
MAKE: dict[str, Callable[[Path], Carrier]] = {"hub": HubServer, "redis": lambda folder: Server()}


CARRIERS = ["hub", pytest.param("redis", marks=needs_server)]
