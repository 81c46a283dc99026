"""Hand-over parameters of a request that the emulator cannot follow."""

from __future__ import annotations

import asyncio

import pytest
from emulator.conftest import Start
from emulator.wire import ask
from helpers import HANG_S

from hetlb.tools.emulator.kv_transfer import KvSettings


@pytest.mark.parametrize("prompt", ["a prompt", ""])
async def test_a_fetch_from_nowhere_is_none(start: Start, prompt: str) -> None:
    engine = await start(kv=KvSettings("nixl"))
    params = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r"}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "kv_transfer_params": params}
    async with asyncio.timeout(HANG_S):
        answer = await ask(engine.url, "POST", "/v1/completions", body)
    assert answer.status == (200 if prompt else 400)
    assert engine.kv is not None
    assert (engine.kv.failed, engine.kv.fetched_tokens) == (0, 0)
