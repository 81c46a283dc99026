"""`serve`: the command with several processes, checked in the end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from options.peers.workers.processes import Serve, Serving, at_rest


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Start a fleet file with `workers` workers; in the end all figures must be zero and no process left."""
    running: list[Serving] = []

    async def start(fleet: dict[str, Any], *flags: str, workers: int = 2) -> Serving:
        path = tmp_path / "fleet.yaml"
        path.write_text(yaml.safe_dump(fleet))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hetlb", "serve", "--config", str(path), "--workers", str(workers), *flags,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        serving = Serving(process, path)
        running.append(serving)
        await serving.ready()
        return serving

    try:
        yield start
        for serving in running:
            if serving.process.returncode is None:
                try:
                    await serving.fleet_until(at_rest)
                except aiohttp.ClientError as error:
                    raise AssertionError(serving.errors) from error
                assert await serving.end() == 0
    finally:
        for serving in running:
            await serving.kill()
