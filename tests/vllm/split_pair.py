"""Real vLLM servers of which one reads prompts for the others, and hetlb in front of them.

`kv_wheels` fetches the wheels of NIXL and Mooncake (no dependencies) into .cache/kv where they are missing;
tests/vllm/kv/sitecustomize.py lets several servers share two cores. The servers compute in float32: texts are
compared, and in bfloat16 two tokens are too often equally likely.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes.util
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pair as real
import pytest
import yaml
from engines import REPO_ROOT, SERVED_MODEL_NAME, Server, ServerSpec, free_ports, vllm_servers

from hetlb.tools.loadtest.processes import helper_processes

KV_FOLDER = REPO_ROOT / ".cache" / "kv"
WHEELS = ("nixl==1.5.1", "nixl-cu12==1.5.1", "mooncake-transfer-engine-non-cuda==0.3.13.post1")
#: `nixl-push` is the connector of vLLM in which the prefill engine writes; to a router it is as `nixl`.
CONNECTORS = ("nixl", "nixl-push", "mooncake")
#: Seconds for which the prefill server keeps blocks that were not fetched.
LEASE_S = 12
MODEL = "tiny-fast"
MAX_MODEL_LEN = 4096
READER, DECODER = "reads", "decodes"
READY_S = 600.0


def kv_wheels() -> None:
    """NIXL and Mooncake, in a folder of their own: the environment of the servers stays as it is pinned."""
    if not (KV_FOLDER / "nixl").is_dir():
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(KV_FOLDER)]
        subprocess.run([*install, *WHEELS], check=True, timeout=300)


def skip_without_libraries(connector: str) -> None:
    """Skip a test where the connector lacks a library of the system."""
    if connector == "mooncake" and not (ctypes.util.find_library("ibverbs") or (KV_FOLDER / "lib").is_dir()):
        pytest.skip("no libibverbs on this machine")


def config_of(connector: str, producer: bool, policy: str) -> dict[str, Any]:
    """`--kv-transfer-config` of one server."""
    config: dict[str, Any] = {"kv_role": "kv_producer" if producer else "kv_consumer"}
    if connector.startswith("nixl"):
        config |= {
            "kv_connector": "NixlPushConnector" if connector == "nixl-push" else "NixlConnector",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
    else:
        config |= {
            "kv_connector": "MooncakeConnector",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }
    if not producer:
        config["kv_load_failure_policy"] = policy
    return config


def server_spec(
    name: str, connector: str, bootstrap: int, core: int, policy: str = "fail", blocks: int = 0
) -> ServerSpec:
    """A server; the one called `READER` reads prompts for the others. `blocks` of KV cache, or many."""
    (side_channel,) = free_ports(1)
    libraries = os.pathsep.join([str(KV_FOLDER / "lib"), os.environ.get("LD_LIBRARY_PATH", "")])
    config = config_of(connector, name == READER, policy)
    arguments = ["--dtype", "float32", "--kv-transfer-config", json.dumps(config)]
    return ServerSpec(
        name,
        MODEL,
        core=sorted(os.sched_getaffinity(0))[core % len(os.sched_getaffinity(0))],
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        gpu_blocks=blocks or None,
        extra_args=tuple(arguments),
        extra_env=(
            ("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent / "kv"), str(KV_FOLDER)])),
            ("UCX_TLS", "tcp"),
            ("VLLM_NIXL_SIDE_CHANNEL_PORT", str(side_channel)),
            ("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(bootstrap)),
            ("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", str(LEASE_S)),
            ("LD_LIBRARY_PATH", libraries),
        ),
    )


@contextlib.contextmanager
def started(specs: Sequence[ServerSpec], folder: Path) -> Iterator[list[Server]]:
    """These servers, up."""
    with vllm_servers(specs, real.MODELS, folder, deadline_s=READY_S) as servers:
        yield servers


@dataclass(frozen=True)
class Address:
    """An instance of the fleet file."""

    name: str
    url: str
    role: str


def fleet_of(addresses: Sequence[Address], connector: str, bootstrap: int) -> dict[str, Any]:
    """The servers as a fleet."""
    transfer = {"connector": connector.removesuffix("-push"), "lease_s": LEASE_S}
    profile = str(real.HERE / "profiles" / f"{MODEL}.yaml")
    instances = [
        {
            "name": each.name,
            "url": each.url,
            "profile": profile,
            "role": each.role,
            "kv_bootstrap": f"http://127.0.0.1:{bootstrap}",
        }
        for each in addresses
    ]
    return {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "health": {"slow_start_s": 0},  # what has just come back is no part of a pair until then
        "models": [{"name": SERVED_MODEL_NAME, "kv_transfer": transfer, "instances": instances}],
    }


@contextlib.contextmanager
def split_proxy(
    addresses: Sequence[Address], connector: str, bootstrap: int, folder: Path
) -> Iterator[real.Proxy]:
    """`hetlb serve` in front of them."""
    folder.mkdir(parents=True, exist_ok=True)
    events = folder / "events.jsonl"
    config = folder / "fleet.yaml"
    config.write_text(yaml.safe_dump(fleet_of(addresses, connector, bootstrap), sort_keys=False))
    with helper_processes() as helpers:
        process = helpers.start("hetlb", "serve", "--config", str(config), "--event-log", str(events))
        asyncio.run(process.ready())
        url, admin = process.urls
        running = real.Proxy(url, admin, events)
        asyncio.run(running.idle())
        yield running


async def handovers(proxy: real.Proxy, client: httpx.AsyncClient) -> dict[str, int]:
    """Hand-overs so far, by result."""
    page = (await client.get(proxy.admin + "/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("hetlb_kv_transfers_total{")]
    return {line.split('"')[1]: int(line.rsplit(" ", 1)[1]) for line in lines}


async def quiet(proxy: real.Proxy, servers: Sequence[Server], deadline_s: float = 30.0) -> None:
    """Every figure of the proxy is zero, and no server has a KV block in use."""
    await proxy.idle(deadline_s)

    async def used() -> list[str]:
        usages = [(each.name, await asyncio.to_thread(kv_usage, each)) for each in servers]
        return [f"{name}: {usage}" for name, usage in usages if usage > 0.0]

    await real.until(used, "empty KV caches", deadline_s)


def body_of(tokens: int, seed: object, **more: Any) -> dict[str, Any]:
    """A completion request with a prompt that depends on the seed alone."""
    return {
        "model": SERVED_MODEL_NAME,
        "prompt": random.Random(f"{seed}").choices(range(100, 2000), k=tokens),
        "max_tokens": 10,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


@dataclass(frozen=True)
class Answer:
    """An answer with status 200. `error` is what an event of its stream said, or how it broke off."""

    text: str
    headers: httpx.Headers
    error: str = ""


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    """One request for a completion."""
    if not body.get("stream"):
        answer = await client.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return Answer(answer.json()["choices"][0]["text"], answer.headers)
    received, error = b"", ""
    async with client.stream("POST", f"{url}/v1/completions", json=body) as streamed:
        try:
            async for part in streamed.aiter_bytes():
                received += part
        except httpx.HTTPError as cut:
            error = repr(cut)
    assert streamed.status_code == 200, received
    events = [json.loads(line[6:]) for line in received.decode().split("\n") if line.startswith("data: {")]
    errors = [str(event["error"]) for event in events if "error" in event]
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    return Answer(text, streamed.headers, "; ".join(errors) or error)


async def text_alone(client: httpx.AsyncClient, server: Server, body: dict[str, Any]) -> str:
    """Text of one server that computes all of the prompt itself."""
    salted = {**body, "stream": False, "cache_salt": os.urandom(8).hex()}
    return (await ask(client, server.url, salted)).text


def sums(server: Server, name: str) -> dict[str, float]:
    """A metric of a server by its labels other than engine and model."""
    found: dict[str, float] = {}
    for labels, value in re.findall(
        rf"^{name}(?:{{(.*)}})? (\S+)$", server.get("/metrics")[1].decode(), re.M
    ):
        rest = [
            each for each in re.findall(r'(\w+)="([^"]*)"', labels) if each[0] not in ("engine", "model_name")
        ]
        key = ",".join(value for _, value in rest)
        found[key] = found.get(key, 0.0) + float(value)
    return found


def kv_usage(server: Server) -> float:
    """Share of the KV cache in use."""
    return max(sums(server, "vllm:kv_cache_usage_perc").values())
