"""A fleet of 2, 8 and 3 instances under load, by the fleet file itself: no client notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.growing import SIZES, converged, fleet, load
from proxy.services import Engine, serving


async def test_by_the_fleet_file_itself(tmp_path: Path, engines: list[Engine]) -> None:
    document = {**fleet(), "watch": True}

    def write(size: int) -> dict[str, Any]:
        instances = [{"name": f"e{n}", "url": engine.url} for n, engine in enumerate(engines[:size])]
        document["models"] = [{"name": "m", "instances": instances}]
        return document

    async with serving(tmp_path, write(2)) as running, load(running):
        for size in SIZES:
            running.rewrite(write(size))
            await converged(running, engines, size)
