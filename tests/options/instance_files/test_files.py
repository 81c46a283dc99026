"""Files of instances: fleets that grow and shrink under load, mistakes, names that are taken."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from helpers import turns_until
from proxy.growing import SIZES, converged, fleet, instance_file, load
from proxy.services import Engine, said, serving

from hetlb.balancer.config.fleet import fleet_from_urls
from hetlb.options.instance_files import file_source as files


async def test_by_files(tmp_path: Path, engines: list[Engine]) -> None:
    folder = tmp_path / "instances.d"
    folder.mkdir()
    instance_file(folder / "a.yaml", engines[:2])
    async with serving(tmp_path, fleet(files=["instances.d"])) as running, load(running):
        for size in SIZES:
            instance_file(folder / "a.yaml", engines[:size])
            await converged(running, engines, size)


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


async def test_a_pipe_is_a_mistake_and_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[int] = []
    pipe = tmp_path / "instances.yaml"
    os.mkfifo(pipe)
    task = asyncio.create_task(files.FileSource([pipe], 60.0).run(lambda some: found.append(len(some))))
    await turns_until(lambda: found == [0])
    assert said(caplog.records, "not a regular file but a pipe (FIFO)")
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
