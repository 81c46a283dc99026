"""Files with mistakes, names that vanish, registrations that expire, profiles by label, sleeping engines."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import turns_until
from proxy.discovery.conftest import NameServer
from proxy.discovery.test_growth_and_shrinking import fleet, instance_file
from proxy.services import METRICS, Engine, Running, document, said, serving
from proxy.upstreams import plain

from hetlb.balancer.config.discovery import parse_selector, select_profile
from hetlb.balancer.config.fleet import fleet_from_urls
from hetlb.errors import ConfigError
from hetlb.options.instance_files import file_source as files
from hetlb.options.source import Found

PROFILE: dict[str, Any] = {
    "version": 1,
    "name": "p",
    "prefill": {"k1": 1e-4, "k2": 1e-3, "k3": 0.0, "k4": 1e-2},
    "decode": {"k5": 5e-8, "k6": 6e-5, "k7": 0.0, "k8": 1e-2},
}


def profile(path: Path, k8: float) -> None:
    path.write_text(yaml.safe_dump({**PROFILE, "decode": {**PROFILE["decode"], "k8": k8}}))


# --- files ---


async def test_a_file_with_a_mistake_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "instances.d"
    folder.mkdir()
    async with Engine() as one, Engine() as two:
        instance_file(folder / "a.yaml", [one])  # type: ignore[list-item]
        async with serving(tmp_path, fleet(files=["instances.d"])) as running:
            assert running.names == ["e0"]
            (folder / "a.yaml").write_text("models: [")
            await turns_until(lambda: bool(said(caplog.records, "a.yaml")))
            assert running.names == ["e0"]
            instance_file(folder / "a.yaml", [one, two])  # type: ignore[list-item]
            await turns_until(lambda: running.names == ["e0", "e1"])
            (folder / "a.yaml").unlink()
            await turns_until(lambda: running.names == [])


async def test_files_are_read_outside_of_the_loop(tmp_path: Path) -> None:
    """A pipe gives nothing until someone writes: the loop goes on meanwhile."""
    async with Engine() as one, serving(tmp_path, document(one)) as running:
        text = running.path.read_text()
        running.path.unlink()
        os.mkfifo(running.path)
        reload = asyncio.create_task(running.admin("POST", "/v1/reload"))
        with await asyncio.to_thread(running.path.open, "w") as end:  # until it is being read
            assert (await running.ask()).status == 200
            end.write(text)
        assert (await reload).status == 200

    found: list[int] = []
    pipe = tmp_path / "instances.yaml"
    os.mkfifo(pipe)
    task = asyncio.create_task(files.FileSource([pipe], 60.0).run(lambda some: found.append(len(some))))
    with await asyncio.to_thread(pipe.open, "w") as end:
        assert not found
        end.write("models:\n- name: m\n  instances: [{url: 'http://127.0.0.1:1'}]\n")
    await turns_until(lambda: found == [1])
    task.cancel()


def test_gpu_and_slots_in_a_file_count_as_in_a_fleet_file(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    instance = "{url: 'http://h:1', gpu: H100, max_num_seqs: 8, weight: 2}"
    path.write_text(f"models:\n- name: m\n  instances: [{instance}]\n")
    [found] = files.read_instances(path)
    spec = fleet_from_urls([]).resolve_found(found, found.model, {})
    assert (spec.name, spec.model, spec.weight) == ("h:1", "m", 2)
    assert (spec.gpu, spec.capacity.max_num_seqs, spec.slots_stated) == ("H100", 8, True)


async def test_a_name_belongs_to_the_first_that_gives_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "instances.d"
    folder.mkdir()
    async with Engine() as one, Engine() as two:
        document = fleet(files=["instances.d"])
        document["models"][0]["instances"] = [{"name": "e0", "url": one.url}]
        instance_file(folder / "a.yaml", [two])  # type: ignore[list-item]
        async with serving(tmp_path, document) as running:
            [line] = said(caplog.records, "e0 is in the fleet already")
            assert "instances.d" in line
            assert running.instance("e0").spec.url == one.url
            document["models"][0]["instances"] = []
            running.rewrite(document)
            assert (await running.admin("POST", "/v1/reload")).status == 200
            assert running.instance("e0").spec.url == two.url  # its turn has come
            # A reload leaves what a source gave.
            assert (await running.admin("POST", "/v1/reload")).status == 200
            assert running.names == ["e0"]


# --- DNS ---


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


async def test_a_name_that_vanishes_takes_its_instances_along_and_silence_does_not(
    tmp_path: Path, name_server: NameServer
) -> None:
    name_server.records["engines.test", "AAAA"] = ["::1"]
    name_server.records["engines.test", "A"] = ["127.0.0.1", "127.0.0.2"]
    table = {"name": "engines.test", "port": 9, "model": "m", "servers": [name_server.address]}
    async with serving(tmp_path, fleet(dns=[{**table, "interval_s": 0.05}])) as running:
        assert running.names == ["127.0.0.1:9", "127.0.0.2:9"]  # one for each server, not for each address
        name_server.silent = True
        asked = name_server.queries
        await turns_until(lambda: name_server.queries > asked)
        assert len(running.names) == 2
        name_server.silent = False
        del name_server.records["engines.test", "A"]
        await turns_until(lambda: running.names == ["[::1]:9"])
        name_server.records.clear()
        await turns_until(lambda: running.names == [])


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
        document = fleet(files=[])
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
            running.scheduler.check_integrity()
            engine.released.set()
            assert (await asking).status == 200


# --- sleep ---


def asleep(running: Running) -> bool:
    return running.instance("e0").asleep


async def test_an_engine_that_sleeps_gets_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    folder = tmp_path / "instances.d"
    folder.mkdir()

    class Sleeper(Engine):
        awake = 1

        async def _route(self, visit: Any) -> None:
            if visit.head.startswith(b"GET /metrics"):
                state = b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} %d\n' % self.awake
                visit.send(plain(METRICS + state))
            else:
                await super()._route(visit)

    async with Sleeper() as one, Engine() as two:
        instance_file(folder / "a.yaml", [one, two])  # type: ignore[list-item]
        async with serving(tmp_path, fleet(files=["instances.d"])) as running:
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
