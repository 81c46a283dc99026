"""Attainment of service classes in `/metrics` of a picker is what `hetlb bench` measured through Envoy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import free_port
from options.pick.rig import STATIC, Envoy
from test_attainment import check, engines, started

from hetlb.tools.loadtest.processes import helper_processes


@pytest.mark.envoy
async def test_attainment_is_the_clients(tmp_path: Path) -> None:
    port = free_port()
    with helper_processes() as helpers:
        urls = await engines(helpers, tmp_path, pick={"port": port})
        *_, admin_url = await started(helpers, tmp_path, "pick")
        ports: Any = [SimpleNamespace(port=int(url.rpartition(":")[2])) for url in urls]
        envoy = Envoy(tmp_path / "envoy", STATIC, [port], ports).patient()
        await envoy.start()
        try:
            await check(f"http://127.0.0.1:{envoy.port}", admin_url, tmp_path)
        finally:
            await envoy.kill()
