"""KV events of two real vLLM servers: what hetlb believes to be cached against what they found in the cache.

The caches are small, so that prefixes are evicted all the time.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pair as real
import pytest
import yaml
from engines import SERVED_MODEL_NAME, Server, ServerSpec, vllm_servers

from hetlb.balancer.engines.engine_metrics import EngineCounters, page_of
from hetlb.tools.loadtest.processes import helper_processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

REQUESTS = 500
#: What two caches of 64 blocks hold is half of what is asked for.
PREFIXES, PREFIX_TOKENS, BLOCKS = 24, (400, 1200), 64
AT_ONCE = 8
READY_S = 600.0


def spec_of(name: str, folder: str) -> ServerSpec:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/{name}",
        "replay_endpoint": f"ipc://{folder}/{name}-replay",
    }
    arguments = ("--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details")
    return ServerSpec(name, "tiny-fast", max_num_seqs=8, gpu_blocks=BLOCKS, extra_args=arguments)


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Server], str]]:
    """Two servers that publish KV events, and the folder of their sockets."""
    real.make_models()
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        specs = [spec_of("kv-a", folder), spec_of("kv-b", folder)]
        logs = tmp_path_factory.mktemp("kv-events")
        with vllm_servers(specs, real.MODELS, logs, deadline_s=READY_S, forked=True) as servers:
            yield servers, folder


def counters(server: Server) -> EngineCounters:
    return page_of(server.get("/metrics")[1].decode()).counters()


def prompts(rng: random.Random) -> list[list[int]]:
    """Prompts of token ids: a hot or cold shared prefix, and a tail of their own."""
    prefixes = [[rng.randrange(1000) for _ in range(rng.randint(*PREFIX_TOKENS))] for _ in range(PREFIXES)]
    chosen = rng.choices(prefixes, weights=[1.0 / (1 + i) for i in range(PREFIXES)], k=REQUESTS)
    return [[*prefix, *(rng.randrange(1000) for _ in range(rng.randint(1, 200)))] for prefix in chosen]


async def send(url: str, bodies: list[list[int]]) -> int:
    """Send all, a few at a time; returns the cached tokens that the answers' usage tells."""
    limit = asyncio.Semaphore(AT_ONCE)

    async with httpx.AsyncClient(timeout=600.0) as client:

        async def one(prompt: list[int]) -> int:
            async with limit:
                body = {"model": SERVED_MODEL_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0}
                answer = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
                details = answer.json()["usage"]["prompt_tokens_details"]
                return (details or {}).get("cached_tokens") or 0

        return sum(await asyncio.gather(*map(one, bodies)))


def test_belief_agrees_with_the_engines_own_hits(
    telling: tuple[list[Server], str], tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    servers, folder = telling
    fleet = real.fleet_file([])
    fleet["models"][0]["instances"] = [
        {
            "name": server.name,
            "url": server.url,
            "profile": str(real.HERE / "profiles" / "tiny-fast.yaml"),
            "kv_events": {
                "endpoint": f"ipc://{folder}/{server.name}",
                "replay": f"ipc://{folder}/{server.name}-replay",
            },
        }
        for server in servers
    ]
    config = tmp_path / "fleet.yaml"
    config.write_text(yaml.safe_dump(fleet))
    rng = random.Random(1)
    with helper_processes() as helpers:
        process = helpers.start("hetlb", "serve", "--config", str(config))
        asyncio.run(process.ready())
        url, admin = process.urls
        proxy = real.Proxy(url, admin, tmp_path)
        asyncio.run(proxy.idle())
        asyncio.run(send(url, prompts(rng)[:16]))  # block sizes are known from here on
        before = [counters(server) for server in servers]
        believed_before = believed(admin)
        reported = asyncio.run(send(url, prompts(rng)))
        asyncio.run(proxy.idle())
        hits = sum((counters(server).cached_tokens or 0) - (old.cached_tokens or 0)
                   for server, old in zip(servers, before, strict=True))  # fmt: skip
        computed = sum((counters(server).prompt_tokens or 0) - (old.prompt_tokens or 0)
                       for server, old in zip(servers, before, strict=True))  # fmt: skip
        expected = believed(admin) - believed_before
        rows = asyncio.run(proxy.instances())
        print(f"believed {expected}, engines' hits {hits}, usage {reported}, prompt tokens {computed}")
        assert [row["kv_events"] for row in rows.values()] == ["live", "live"]
        assert hits > 0.1 * computed, "expected prefixes to be found in the caches"
        assert hits < 0.95 * computed, "expected evictions"
        assert abs(expected - hits) <= 0.05 * hits, (expected, hits)
        # An engine counts a request that was taken back and sent again, and no usage does.
        again = counted(admin, "hetlb_instance_requests_total") - counted(admin, "hetlb_requests_total")
        assert reported == hits or (again > 0 and 0 < hits - reported <= 0.05 * hits), again


def believed(admin: str) -> int:
    """Prompt tokens that hetlb believed to be cached at dispatch, over both instances."""
    return counted(admin, "hetlb_instance_expected_cached_prompt_tokens_total")


def counted(admin: str, name: str) -> int:
    """Sum of a counter over its labels."""
    page = httpx.get(f"{admin}/metrics").text
    return round(sum(float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", page, re.M)))
