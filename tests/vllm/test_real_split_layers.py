"""Two real vLLM servers whose numbers of KV layers differ, as for a pipeline stage and a whole model.

Every pull fails at the handshake, the decode server computes the prompt anew, and its answer is right. hetlb
sees that by the decode server's counters, and stops splitting requests between both within 20.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pair as real
import pytest
import split_pair
from engines import Server, ServerSpec, free_ports
from split_pair import DECODER, READER, Address

from hetlb.options.split.transfers import MAX_MISSED_TRANSFERS, MAX_UNJUDGED_TRANSFERS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

#: Requests within which the pair is to be left alone.
REQUESTS = 20


def without_a_layer(name: str) -> str:
    """Return the folder of the model with one layer less, whose weights are made up."""
    folder = real.MODELS / f"{name}-less"
    if not folder.is_dir():
        shutil.copytree(real.MODELS / name, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"] -= 1
        (folder / "config.json").write_text(json.dumps(config))
    return folder.name


def unchecked(spec: ServerSpec) -> ServerSpec:
    """Return a server that compares no names of models, only what it is to fetch."""
    arguments = list(spec.extra_args)
    at = arguments.index("--kv-transfer-config") + 1
    config = json.loads(arguments[at])
    config.setdefault("kv_connector_extra_config", {})["enforce_handshake_compat"] = False
    arguments[at] = json.dumps(config)
    return replace(spec, extra_args=tuple(arguments))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    real.make_models()
    split_pair.kv_wheels()
    folder: Path = tmp_path_factory.mktemp("layers")
    (bootstrap,) = free_ports(1)
    reader = split_pair.server_spec(READER, "nixl", bootstrap, 0)
    reader = replace(reader, model=without_a_layer(reader.model))
    reader = replace(reader, extra_args=(*reader.extra_args, "--load-format", "dummy"))
    decoder = split_pair.server_spec(DECODER, "nixl", bootstrap, 1, policy="recompute")
    with split_pair.started([unchecked(reader), unchecked(decoder)], folder) as running:
        yield running


@pytest.fixture
def proxy(servers: list[Server], tmp_path: Path) -> Iterator[real.Proxy]:
    reader, decoder = servers
    (bootstrap,) = free_ports(1)
    addresses = [Address(READER, reader.url, "prefill"), Address(DECODER, decoder.url, "decode")]
    with split_pair.split_proxy(addresses, "nixl", bootstrap, tmp_path / "hetlb") as running:
        yield running


async def test_a_pair_of_other_layers_is_left_alone_within_20_requests(
    servers: list[Server], proxy: real.Proxy
) -> None:
    decoder = servers[1]
    async with httpx.AsyncClient(timeout=240.0) as client:
        for number in range(REQUESTS):
            body = split_pair.body_of(400 + 10 * number, f"layers{number}", stream=number % 2 == 0)
            answer = await split_pair.ask(client, proxy.url, body)
            assert not answer.error
            assert answer.text == await split_pair.text_alone(client, decoder, body)
        answer = await split_pair.ask(client, proxy.url, split_pair.body_of(500, "last"))
        assert "x-hetlb-prefill-instance" not in answer.headers
        await split_pair.quiet(proxy, servers)
        await asyncio.sleep(2.0)  # another scrape
        results = await split_pair.handovers(proxy, client)
        status = (await client.get(proxy.admin + "/v1/status")).json()
    print(results, status["advice"])
    assert results["done"] == 0
    assert MAX_MISSED_TRANSFERS <= results["not_fetched"] <= MAX_UNJUDGED_TRANSFERS
    assert f"read at {READER} do not reach {DECODER}" in status["advice"]
    sources = split_pair.sums(decoder, "vllm:prompt_tokens_by_source_total")
    assert sources["external_kv_transfer"] == 0.0
