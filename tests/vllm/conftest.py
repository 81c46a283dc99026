"""One real pair, and one proxy in front of it, for the whole run: starting them is most of the time."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))  # engines.py and pair.py, shared with bench/

import pair as real
from engines import Server


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """tiny-fast and tiny-slow, both called `tiny`."""
    with real.pair(tmp_path_factory.mktemp("vllm"), forked=True) as running:
        yield running


@pytest.fixture(scope="session")
def proxy(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[real.Proxy]:
    """hetlb with the two profiles, recording its event log."""
    with real.proxy(servers, tmp_path_factory.mktemp("hetlb")) as running:
        yield running


@pytest.fixture
def bare(servers: list[Server], tmp_path: Path) -> Iterator[real.Proxy]:
    """hetlb as `hetlb serve --instance URL --instance URL` starts it."""
    with real.proxy(servers, tmp_path, profiles=False) as running:
        yield running


@pytest_asyncio.fixture
async def client(proxy: real.Proxy) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, pointed at hetlb; it retries nothing. When a test is over the fleet is idle."""
    async with openai.AsyncOpenAI(
        base_url=f"{proxy.url}/v1", api_key="none", max_retries=0, timeout=600.0
    ) as talking:
        yield talking
    await proxy.idle()


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """For what the official client hides: raw bodies, headers, events."""
    async with httpx.AsyncClient(timeout=600.0) as talking:
        yield talking
