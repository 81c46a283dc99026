"""Names: fleets that grow and shrink under load, and names that vanish."""

from __future__ import annotations

from pathlib import Path

from helpers import turns_until
from options.dns.conftest import NameServer
from proxy.growing import SIZES, converged, fleet, load
from proxy.services import Engine, serving


async def test_by_dns(tmp_path: Path, engines: list[Engine], name_server: NameServer) -> None:
    def answer(size: int) -> None:
        ports = [engine.url.rpartition(":")[2] for engine in engines[:size]]
        name_server.records["engines.test", "SRV"] = [f"0 1 {port} localhost." for port in ports]

    answer(2)
    table = {"name": "engines.test", "type": "SRV", "model": "m", "servers": [name_server.address]}
    async with serving(tmp_path, fleet(dns=[{**table, "interval_s": 0.05}])) as running, load(running):
        for size in SIZES:
            answer(size)
            await converged(running, engines, size)


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
