"""A prefix cache in the emulator: which tokens of a prompt are found, and what the engine says of it."""

from __future__ import annotations

from typing import Any

import pytest
from emulator.conftest import Start, make_profile
from emulator.wire import Client, ask

from hetlb.balancer.engines.engine_metrics import parse
from hetlb.errors import ConfigError
from hetlb.tools.emulator import EmulatedEngine
from hetlb.tools.emulator.kv_transfer import KvSettings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
#: Four blocks of 16 tokens of 4 bytes, all different.
SHARED = "".join(f"{number:>4}" for number in range(64))


async def complete(engine: EmulatedEngine, prompt: object) -> None:
    """Ask for one token after a prompt."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 1}
    path = COMPLETIONS
    if isinstance(prompt, dict):
        path, body["messages"] = CHAT, [prompt]
    else:
        body["prompt"] = prompt
    assert (await ask(engine.url, "POST", path, body)).status == 200


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (SHARED + "question one", SHARED + "question two", 64),
        (SHARED, SHARED, 48),  # the last token is always computed
        (SHARED[:100], SHARED, 16),  # whole blocks alone
        ("x" + SHARED, SHARED, 0),
        (list(range(40)), [*range(35), 9, 9, 9, 9, 9], 32),
        (list(range(40)), list(range(1, 41)), 0),
        ({"role": "user", "content": SHARED}, {"role": "user", "content": SHARED + "more"}, 64),
    ],
)
async def test_blocks_of_an_earlier_prompt_are_found(
    start: Start, first: object, second: object, found: int
) -> None:
    engine = await start(prefix_caching=True)
    await complete(engine, first)
    assert engine.model.kv.hit_tokens == 0
    await complete(engine, second)
    assert engine.model.kv.hit_tokens == found


async def test_metrics_say_that_prefixes_are_cached_and_count_hits(start: Start) -> None:
    engine = await start(prefix_caching=True)
    for _ in range(2):
        await complete(engine, SHARED)
    async with await Client.connect(engine.url) as client:
        text = (await client.ask("GET", "/metrics")).body.decode()
    assert parse(text).capacity.enable_prefix_caching is True
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 48.0' in text
    assert 'vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 128.0' in text


async def test_nothing_is_cached_by_default(engine: EmulatedEngine) -> None:
    for _ in range(2):
        await complete(engine, SHARED)
    assert engine.model.kv.hit_tokens == 0


async def test_a_full_cache_evicts_and_serves_on(start: Start) -> None:
    """Ten times the cache in prompts, twice: the last ones are found, the first are gone."""
    engine = await start(make_profile(kv_cache_tokens=512), prefix_caching=True)
    prompts = [[number] * 100 for number in range(50)]
    for prompt in prompts:
        await complete(engine, prompt)
    await complete(engine, prompts[-1])
    assert engine.model.kv.hit_tokens == 96
    await complete(engine, prompts[0])
    assert engine.model.kv.hit_tokens == 96


def test_not_together_with_a_connector() -> None:
    with pytest.raises(ConfigError, match="--enable-prefix-caching: expected"):
        EmulatedEngine(make_profile(), kv=KvSettings("nixl", 30.0, 5e9, "fail"), prefix_caching=True)
