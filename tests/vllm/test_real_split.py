"""Prompts read by one real vLLM server and answered by another: right text, and nothing computed twice.

`HETLB_SPLIT_REQUESTS` is how many answers are compared for each connector. Mooncake needs libibverbs1 and
libnl-3 (Debian packages), and is skipped without them.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pair as real
import pytest
import split_pair
from engines import SERVED_MODEL_NAME, Server, free_ports
from split_pair import DECODER, READER, Address

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

REQUESTS = int(os.environ.get("HETLB_SPLIT_REQUESTS", "200"))
#: Requests that are under way at once: one is read while the text of another is compared.
AT_ONCE = 2


@dataclass
class Running:
    connector: str
    reader: Server
    decoder: Server
    proxy: real.Proxy
    folder: Path

    async def quiet(self) -> None:
        await split_pair.quiet(self.proxy, (self.reader, self.decoder))

    async def text_alone(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        """Text of the decode server where it computes all of the prompt itself."""
        return await split_pair.text_alone(client, self.decoder, body)


@pytest.fixture(scope="module", params=split_pair.CONNECTORS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    connector = request.param
    split_pair.skip_without_libraries(connector)
    real.make_models()
    split_pair.kv_wheels()
    folder: Path = tmp_path_factory.mktemp(connector)
    (bootstrap,) = free_ports(1)
    specs = [
        split_pair.server_spec(name, connector, bootstrap, core)
        for core, name in enumerate((READER, DECODER))
    ]
    with split_pair.started(specs, folder) as (reader, decoder):
        addresses = [Address(READER, reader.url, "prefill"), Address(DECODER, decoder.url, "decode")]
        with split_pair.split_proxy(addresses, connector, bootstrap, folder / "hetlb") as proxy:
            yield Running(connector, reader, decoder, proxy, folder)


async def test_every_answer_equals_one_servers_and_no_prompt_is_computed_twice(running: Running) -> None:
    rng = random.Random(running.connector)
    lengths = [rng.randint(100, 3500) for _ in range(REQUESTS)]
    before = split_pair.sums(running.decoder, "vllm:prompt_tokens_by_source_total")
    transferred: list[int] = []
    wrong: list[str] = []
    numbers = iter(range(REQUESTS))
    async with httpx.AsyncClient(timeout=240.0) as client:

        async def work() -> None:
            for number in numbers:
                tokens = lengths[number]
                body = split_pair.body_of(tokens, f"{running.connector}{number}", stream=number % 2 == 0)
                answer = await split_pair.ask(client, running.proxy.url, body)
                assert not answer.error
                assert answer.headers["x-hetlb-instance"] == DECODER
                if answer.headers.get("x-hetlb-prefill-instance") == READER:
                    transferred.append(tokens)
                expected = await running.text_alone(client, body)
                if answer.text != expected:
                    wrong.append(f"{number}: {tokens} tokens, {answer.text!r}, not {expected!r}")

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        await running.quiet()
        done = await split_pair.handovers(running.proxy, client)
    print(
        f"{running.connector}: {len(transferred)} of {REQUESTS} split, {sum(transferred)} tokens sent, {done}"
    )
    assert not wrong
    # On a busy machine a transfer may be too slow for its lease.
    assert len(transferred) >= 0.9 * REQUESTS, done
    after = split_pair.sums(running.decoder, "vllm:prompt_tokens_by_source_total")
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    # Every prompt once more for the comparison, and what was not transferred.
    assert grown["local_compute"] == 2 * sum(lengths) - sum(transferred)
    assert grown["external_kv_transfer"] == sum(transferred)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_every_endpoint_that_generates_is_split(running: Running, path: str) -> None:
    words = " ".join(f"word{number}" for number in random.Random(path).choices(range(1000), k=150))
    given: dict[str, Any] = {"model": SERVED_MODEL_NAME, "temperature": 0}
    if path == "/v1/responses":
        given |= {"input": words, "max_output_tokens": 12}
    else:
        given |= {"messages": [{"role": "user", "content": words}], "max_tokens": 12}
    async with httpx.AsyncClient(timeout=240.0) as client:
        split = await client.post(running.proxy.url + path, json=given)
        whole = await client.post(running.reader.url + path, json=given)
        assert split.status_code == whole.status_code == 200, (split.text, whole.text)
        assert split.headers["x-hetlb-prefill-instance"] == READER
        for key in ("choices", "output", "content"):
            if key in whole.json():
                assert _texts(split.json()[key]) == _texts(whole.json()[key])
        await running.quiet()


def _texts(value: Any) -> list[str]:
    """All generated texts of a part of an answer."""
    if isinstance(value, dict):
        own = [each for key, each in value.items() if key in ("text", "content") and isinstance(each, str)]
        return own + [text for each in value.values() for text in _texts(each)]
    return [text for each in value for text in _texts(each)] if isinstance(value, list) else []


async def test_blocks_of_another_request_give_an_answer_of_its_own(running: Running) -> None:
    """`kv_transfer_params` of another's prompt, as its prefill server gave them, from a client of hetlb."""
    if not running.connector.startswith("nixl"):
        pytest.skip("its parameters name no blocks")
    ask = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    ask |= {"remote_block_ids": None, "remote_host": None, "remote_port": None}
    prefilled = split_pair.body_of(800, "another", max_tokens=1, kv_transfer_params=ask)
    own = split_pair.body_of(800, "own")
    async with httpx.AsyncClient(timeout=240.0) as client:
        expected = await running.text_alone(client, own)
        first = await client.post(f"{running.reader.url}/v1/completions", json=prefilled)
        params = first.json()["kv_transfer_params"]
        assert params["remote_block_ids"]
        for stolen in (
            {"kv_transfer_params": params},
            {"n": 1, "kv_transfer_params": params, "stream": True},
        ):
            answer = await split_pair.ask(client, running.proxy.url, {**own, **stolen})
            assert (answer.text, answer.error) == (expected, "")
        # An answer holds none either, and what is none ends no engine.
        odd = {**own, "vllm_xargs": {"kv_transfer_params": "x"}}
        reply = await client.post(f"{running.proxy.url}/v1/completions", json=odd)
        assert reply.json()["choices"][0]["text"] == expected
        asked = await client.post(
            f"{running.proxy.url}/v1/completions", json={**own, "kv_transfer_params": ask}
        )
        assert not asked.json()["kv_transfer_params"]
        await running.quiet()
