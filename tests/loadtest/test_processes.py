"""Helper processes say where they listen or why they did not start, and are gone when the context is left."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

import hetlb.demo
from hetlb.errors import HetlbError
from hetlb.loadtest.processes import helper_processes

PROFILE = Path(hetlb.demo.__file__).parent / "fast.yaml"
ENGINE = ("engine", "--profile", str(PROFILE), "--port", "0", "--served-model-name", "m")


async def test_a_process_is_ready_at_its_address_and_gone_afterwards() -> None:
    async with aiohttp.ClientSession() as session:
        with helper_processes() as helpers:
            engine = helpers.start("the engine", *ENGINE)
            await engine.ready()
            helpers.check()
            (url,) = engine.urls
            async with session.get(f"{url}/health") as reply:
                assert reply.status == 200
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{url}/health")


async def test_a_process_that_ended_is_noticed() -> None:
    with helper_processes() as helpers:
        engine = helpers.start("the engine", *ENGINE)
        await engine.ready()
        engine.kill()
        with pytest.raises(HetlbError, match=r"the engine ended with status -9: it said nothing"):
            helpers.check()


async def test_a_process_that_does_not_start_says_why(tmp_path: Path) -> None:
    with helper_processes() as helpers:
        engine = helpers.start("the engine", "engine", "--profile", str(tmp_path / "none.yaml"))
        with pytest.raises(HetlbError, match=r"the engine did not start: hetlb engine: .* readable file"):
            await engine.ready()
