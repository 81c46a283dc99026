"""Discovery with several processes: each worker finds what is there."""

from __future__ import annotations

from pathlib import Path

from options.peers.workers.processes import Serve
from proxy.growing import fleet, instance_file
from proxy.services import Engine


async def test_what_is_found_is_served_by_every_worker(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "instances.d"
    folder.mkdir()
    async with Engine() as one, Engine() as two:
        instance_file(folder / "a.yaml", [one])  # type: ignore[list-item]
        proxy = await serve(fleet(files=[str(folder)]), workers=2)
        assert {reply.status for reply in await proxy.both_serve()} == {200}
        instance_file(folder / "a.yaml", [one, two])  # type: ignore[list-item]
        await proxy.fleet_until(lambda each: len(each["models"][0]["instances"]) == 2)
        await proxy.both_serve()
        while not two.asked:
            assert (await proxy.ask()).status == 200
        instance_file(folder / "a.yaml", [two])  # type: ignore[list-item]
        await proxy.fleet_until(
            lambda each: (
                [i["name"] for i in each["models"][0]["instances"]] == ["e0"]
                and each["models"][0]["instances"][0]["url"] == two.url
            )
        )
        assert {reply.status for reply in await proxy.both_serve()} == {200}
