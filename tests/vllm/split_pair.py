"""Two real vLLM servers, one of which reads prompts for the other, and hetlb in front of them.

`kv_wheels` fetches the wheels of NIXL and Mooncake (no dependencies) into .cache/kv where they are missing;
tests/vllm/kv/sitecustomize.py lets both servers share two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pair as real
import yaml
from engines import REPO_ROOT, SERVED_MODEL_NAME, Server, ServerSpec, free_ports, vllm_servers

from hetlb.loadtest.processes import helper_processes

KV_FOLDER = REPO_ROOT / ".cache" / "kv"
WHEELS = ("nixl==1.5.1", "nixl-cu12==1.5.1", "mooncake-transfer-engine-non-cuda==0.3.13.post1")
#: Seconds for which the prefill server keeps blocks that were not fetched.
LEASE_S = 12
MODEL = "tiny-fast"
MAX_MODEL_LEN = 4096
NAMES = ("reads", "decodes")
READY_S = 600.0


def kv_wheels() -> None:
    """NIXL and Mooncake, in a folder of their own: the environment of the servers stays as it is pinned."""
    if not (KV_FOLDER / "nixl").is_dir():
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(KV_FOLDER)]
        subprocess.run([*install, *WHEELS], check=True, timeout=300)


def config_of(connector: str, producer: bool, folder: Path, policy: str) -> dict[str, Any]:
    """`--kv-transfer-config` of one server."""
    config: dict[str, Any] = {"kv_role": "kv_producer" if producer else "kv_consumer"}
    if connector == "nixl":
        extra = {"kv_lease_duration": LEASE_S}
        config |= {
            "kv_connector": "NixlConnector",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": extra,
        }
    elif connector == "mooncake":
        config |= {
            "kv_connector": "MooncakeConnector",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }
    else:
        extra = {"shared_storage_path": str(folder / "blocks")}
        config |= {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    if not producer and connector != "shared-storage":
        config["kv_load_failure_policy"] = policy
    return config


@contextlib.contextmanager
def split_servers(
    connector: str, folder: Path, *, policy: str = "fail"
) -> Iterator[tuple[list[Server], int]]:
    """A server that reads prompts and one that decodes, and the port of the former's bootstrap server."""
    real.make_models()
    kv_wheels()
    ports = free_ports(3)
    path = os.pathsep.join([str(Path(__file__).parent / "kv"), str(KV_FOLDER)])
    specs = [
        ServerSpec(
            name,
            MODEL,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=16,
            extra_args=("--kv-transfer-config", json.dumps(config_of(connector, index == 0, folder, policy))),
            extra_env=(
                ("PYTHONPATH", path),
                ("UCX_TLS", "tcp"),
                ("VLLM_NIXL_SIDE_CHANNEL_PORT", str(ports[index])),
                ("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(ports[2])),
                ("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", str(LEASE_S)),
                (
                    "LD_LIBRARY_PATH",
                    os.pathsep.join([str(KV_FOLDER / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]),
                ),
            ),
        )
        for index, name in enumerate(NAMES)
    ]
    with vllm_servers(specs, real.MODELS, folder, deadline_s=READY_S) as servers:
        yield servers, ports[2]


def fleet_of(servers: Sequence[Server], connector: str, bootstrap: int) -> dict[str, Any]:
    """Both servers as a fleet."""
    return {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "models": [
            {
                "name": SERVED_MODEL_NAME,
                "kv_transfer": {"connector": connector}
                if connector == "shared-storage"
                else {"connector": connector, "lease_s": LEASE_S},
                "instances": [
                    {
                        "name": server.name,
                        "url": server.url,
                        "profile": str(real.HERE / "profiles" / f"{MODEL}.yaml"),
                        "role": role,
                        "kv_bootstrap": f"http://127.0.0.1:{bootstrap}",
                    }
                    for server, role in zip(servers, ("prefill", "decode"), strict=True)
                ],
            }
        ],
    }


@contextlib.contextmanager
def split_proxy(
    servers: Sequence[Server], connector: str, bootstrap: int, folder: Path
) -> Iterator[real.Proxy]:
    """`hetlb serve` in front of both."""
    folder.mkdir(parents=True, exist_ok=True)
    events = folder / "events.jsonl"
    config = folder / "fleet.yaml"
    config.write_text(yaml.safe_dump(fleet_of(servers, connector, bootstrap), sort_keys=False))
    with helper_processes() as helpers:
        process = helpers.start("hetlb", "serve", "--config", str(config), "--event-log", str(events))
        asyncio.run(process.ready())
        url, admin = process.urls
        running = real.Proxy(url, admin, events)
        asyncio.run(running.idle())
        yield running


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
