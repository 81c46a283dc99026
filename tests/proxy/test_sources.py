"""Instances of a source: special addresses, registrations that expire, profiles by label, engines asleep."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import turns_until
from proxy.growing import fleet
from proxy.services import METRICS, Engine, Running, document, said, serving
from proxy.upstreams import plain

from hetlb.balancer.config.fleet_parts import parse_selector, select_profile
from hetlb.balancer.fleet.source import Found
from hetlb.errors import ConfigError
from hetlb.tools.sim.integrity import check_scheduler

PROFILE: dict[str, Any] = {
    "version": 1,
    "name": "p",
    "prefill": {"k1": 1e-4, "k2": 1e-3, "k3": 0.0, "k4": 1e-2},
    "decode": {"k5": 5e-8, "k6": 6e-5, "k7": 0.0, "k8": 1e-2},
}


def profile(path: Path, k8: float) -> None:
    path.write_text(yaml.safe_dump({**PROFILE, "decode": {**PROFILE["decode"], "k8": k8}}))


async def test_a_file_that_became_a_pipe_changes_nothing(tmp_path: Path) -> None:
    async with Engine() as one, serving(tmp_path, document(one)) as running:
        running.path.unlink()
        os.mkfifo(running.path)
        answer = await running.admin("POST", "/v1/reload")
        assert answer.status == 400
        assert "not a regular file but a pipe (FIFO)" in str(answer.body)
        assert (await running.ask()).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "0.0.0.0",
        "224.0.0.1",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[fe80::1]",
    ],
)
async def test_no_source_gives_a_special_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    """hetlb would send it the engines' key."""
    async with Engine() as one, serving(tmp_path, document(one)) as running:
        found = [
            Found(name="odd", url=f"http://{host}:80", model="m"),
            Found(name="good", url="http://127.0.0.1:1", model="m"),
        ]
        running.service.roster.members.found("dns x.example", found)
        assert running.names == ["i0", "good"]
        assert len(said(caplog.records, "expected the address of a server")) == 1


# --- registration ---


async def test_a_registration_holds_until_it_expires(tmp_path: Path) -> None:
    async with Engine() as engine:
        document = fleet()
        document["admin"]["registration"] = True
        async with serving(tmp_path, document) as running:
            table = {"name": "job-1", "url": engine.url, "model": "m", "ttl_s": 60, "labels": {"gpu": "H100"}}
            assert (await running.admin("POST", "/v1/fleet/instances", table)).status == 201
            assert (await running.admin("POST", "/v1/fleet/instances", table)).status == 200
            assert running.names == ["job-1"]
            table["ttl_s"] = 0.05
            assert (await running.admin("POST", "/v1/fleet/instances", table)).status == 200
            await turns_until(lambda: running.names == [])
            assert (await running.admin("POST", "/v1/fleet/instances", {**table, "ttl_s": -1})).status == 400


# --- profiles ---


@pytest.mark.parametrize(
    ("labels", "chosen"),
    [
        ({"gpu": "H100"}, "any"),
        ({"gpu": "H100", "tp": "2"}, "tp2"),
        ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "tp": "2"}, "tp2"),
        ({"gpu": "h100"}, "any"),
        ({"gpu": "H1000"}, None),
        ({"gpu": "L40S"}, "l40s"),
        ({}, None),
    ],
)
def test_the_profile_that_labels_choose(labels: dict[str, str], chosen: str | None) -> None:
    profiles = {"gpu=H100": "any", "gpu=H100,tp=2": "tp2", "L40S": "l40s"}
    assert select_profile(labels, profiles) == chosen


@pytest.mark.parametrize("text", ["", "gpu=H100,", ",", "gpu=H100 tp=2", "=x"])
def test_what_is_no_selector(text: str) -> None:
    with pytest.raises(ConfigError, match="expected labels like gpu=H100,tp=2"):
        parse_selector(text, "profiles")


async def test_another_profile_does_not_replace_an_instance(tmp_path: Path) -> None:
    profile(tmp_path / "h100.yaml", 0.01)
    async with Engine() as engine:
        document = fleet()
        document["profiles"] = {"gpu=H100": "h100.yaml"}
        table = {"name": "i0", "url": engine.url, "labels": {"gpu": "H100"}}
        document["models"][0]["instances"] = [table]
        async with serving(tmp_path, document) as running:
            instance = running.instance("i0")
            assert instance.nominal.k8 == 0.01
            engine.hold()
            asking = asyncio.create_task(running.ask())
            await engine.asked_for()
            profile(tmp_path / "h100.yaml", 0.02)
            assert "1 changed" in (await running.admin("POST", "/v1/reload")).json["reloaded"]
            assert running.instance("i0") is instance
            assert (instance.nominal.k8, instance.in_flight) == (0.02, 1)
            check_scheduler(running.scheduler)
            engine.released.set()
            assert (await asking).status == 200


# --- sleep ---


def asleep(running: Running) -> bool:
    return running.instance("e0").asleep


async def test_an_engine_that_sleeps_gets_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    class Sleeper(Engine):
        awake = 1

        async def _route(self, visit: Any) -> None:
            if visit.head.startswith(b"GET /metrics"):
                state = b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} %d\n' % self.awake
                visit.send(plain(METRICS + state))
            else:
                await super()._route(visit)

    async with Sleeper() as one, Engine() as two:
        document = fleet()
        document["models"][0]["instances"] = [
            {"name": f"e{n}", "url": each.url} for n, each in enumerate((one, two))
        ]
        async with serving(tmp_path, document) as running:
            assert isinstance(one, Sleeper)
            one.awake = 0
            await turns_until(lambda: asleep(running))
            before = len(one.asked)
            for _ in range(4):
                assert (await running.ask()).headers["x-hetlb-instance"] == "e1"
            assert len(one.asked) == before
            one.awake = 1
            await turns_until(lambda: not asleep(running))
            assert {(await running.ask()).headers["x-hetlb-instance"] for _ in range(4)} == {"e0", "e1"}
    events = [getattr(record, "event", "") for record in caplog.records]
    assert [each for each in events if each.startswith(("instance_a", "instance_aw"))][-2:] == [
        "instance_asleep",
        "instance_awake",
    ]
