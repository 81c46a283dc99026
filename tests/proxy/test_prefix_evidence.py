"""What engines say of their prefix caches reaches the scheduler, over real sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from helpers import turns_until
from proxy.services import Engine, Running, document, serving
from proxy.upstreams import DONE, LAST, SSE_HEAD, chunk, plain

from hetlb.balancer.config.profile_file import load_profile
from hetlb.tools.emulator import EmulatedEngine

PROFILE = Path(__file__).parents[2] / "hetlb" / "tools" / "demo" / "fast.yaml"
PROMPT = list(range(2000))


async def ask(running: Running, **more: Any) -> None:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 2, **more}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://127.0.0.1:{running.port}/v1/completions", json=body) as reply:
            assert reply.status == 200
            await reply.read()
    await turns_until(lambda: not running.scheduler.in_flight)


def usage(cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": 2000, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def answer(stream: bool, cached: int) -> bytes:
    body = {"choices": [] if stream else [{"text": "hi"}], "usage": usage(cached)}
    data = json.dumps(body, separators=(",", ":")).encode()
    if not stream:
        return plain(data)
    return (
        SSE_HEAD
        + chunk(b'data: {"choices":[{"text":"x"}]}\n\n')
        + chunk(b"data: " + data + b"\n\n")
        + chunk(DONE)
        + LAST
    )


async def test_an_engine_that_says_it_caches_nothing_gets_no_discount(tmp_path: Path) -> None:
    """The emulator says so on its metrics page; one that says nothing is taken to have vLLM's default."""
    profile = load_profile(PROFILE)
    async with (
        EmulatedEngine(profile, served_model_names=["m"], time_scale=0.05) as silent,
        Engine(plain(b'{"choices":[{"text":"x"}]}')) as other,
    ):
        for engine, caches in ((silent, False), (other, True)):
            async with serving(tmp_path, document(engine, policy={"name": "hetlb"})) as running:
                await running.up("i0")
                instance = running.instance("i0")
                await turns_until(
                    lambda i=instance, c=caches: i.sample is not None and i.caches_prefixes is c
                )
                for _ in range(2):
                    await ask(running)
                assert bool(instance.tree.nodes) is caches
                page = (await running.admin("GET", "/metrics")).body.decode()
                expected = 1999 if caches else 0
                name = "hetlb_instance_expected_cached_prompt_tokens_total"
                assert f'{name}{{server="i0"}} {expected}' in page


@pytest.mark.parametrize("stream", [False, True])
async def test_fewer_cached_tokens_than_expected_shrink_belief(tmp_path: Path, stream: bool) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        await running.up("i0")
        tree = running.instance("i0").tree
        engine.reply = answer(stream, 1984)
        await ask(running, stream=stream)
        await ask(running, stream=stream)
        assert tree.share == 1.0
        engine.reply = answer(stream, 0)
        await ask(running, stream=stream, n=2)
        assert tree.share == 1.0, "expected several sequences to tell nothing"
        await ask(running, stream=stream)
        assert tree.share == pytest.approx(0.8)
