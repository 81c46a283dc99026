"""The generator and the emulated vLLM agree on every token, streamed or plain, however lengths are fixed."""

from __future__ import annotations

from pathlib import Path

import pytest

import hetlb.tools.demo
from hetlb.balancer.config.profile_file import load_profile
from hetlb.tools.emulator import EmulatedEngine
from hetlb.tools.loadtest.bodies import RequestBodies
from hetlb.tools.loadtest.generator import run_load
from hetlb.tools.workload.arrivals import PlannedRequest
from hetlb.tools.workload.rows import Row

PROFILE = load_profile(Path(hetlb.tools.demo.__file__).parent / "fast.yaml")
PLAN = [PlannedRequest(i, 0.0, Row(None, 5 + 11 * i, 1 + i % 7)) for i in range(20)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("eos_max_tokens", [None, 100])
async def test_every_token_is_counted_once(stream: bool, eos_max_tokens: int | None) -> None:
    async with EmulatedEngine(PROFILE, served_model_names=["m"], time_scale=0.05) as engine:
        bodies = RequestBodies("m", PLAN, "0", stream=stream, eos_max_tokens=eos_max_tokens)
        result = await run_load(PLAN, bodies, engine.url)
    assert result.errors == {}
    for planned, record in zip(PLAN, result.records, strict=True):
        assert (record.prompt_tokens, record.output_tokens) == (planned.prompt_tokens, planned.output_tokens)
        if stream:
            assert record.itl_s is not None
            assert len(record.itl_s) == planned.output_tokens - 1
    assert result.summary()["client"]["mismatched_lengths"] == 0
