"""Two drivers, one scheduler: what a live proxy recorded, replayed, gives the same decisions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import msgspec
import pytest

from hetlb.balancer.config.fleet import Fleet, fleet_from_urls
from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.fleet.service import Service
from hetlb.cli.main import main
from hetlb.cli.serving_options import OPTIONS
from hetlb.tools.emulator import EmulatedEngine
from hetlb.tools.sim.integrity import check_scheduler

DEMO = Path(__file__).parents[1] / "hetlb" / "tools" / "demo"


async def _serve_some(log: Path, policy: str) -> None:
    fast, slow = load_profile(DEMO / "fast.yaml"), load_profile(DEMO / "slow.yaml")
    async with (
        EmulatedEngine(fast, served_model_names=("m",), time_scale=0.02) as one,
        EmulatedEngine(slow, served_model_names=("m",), time_scale=0.02) as two,
    ):
        fleet: Fleet = fleet_from_urls([one.url, two.url])
        fleet = fleet.with_tables(
            listen=msgspec.structs.replace(fleet.file.listen, port=0),
            admin=msgspec.structs.replace(fleet.file.admin, port=0),
            policy=msgspec.structs.replace(fleet.file.policy, name=policy),
            proxy=msgspec.structs.replace(fleet.file.proxy, request_log=False),
        )
        service = Service(fleet, OPTIONS, log)
        await service.start()
        try:
            url = f"http://127.0.0.1:{service.address[1]}/v1/completions"
            async with aiohttp.ClientSession() as session:

                async def ask(number: int) -> None:
                    body = {
                        "prompt": [1] * (5 + number % 50),
                        "max_tokens": 1 + number % 30,
                        "stream": number % 2 == 0,
                    }
                    async with session.post(url, json=body) as reply:
                        assert reply.status == 200
                        if number % 7 == 3:
                            return  # leaves in the middle
                        await reply.read()

                await asyncio.gather(*(ask(number) for number in range(150)))
        finally:
            await service.stop(10.0)
        check_scheduler(service.scheduler)
        assert service.scheduler.in_flight == 0


@pytest.mark.parametrize("policy", ["hetlb", "paper", "p2c"])
def test_a_recorded_log_replays_to_the_same_decisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    log = tmp_path / "events.jsonl"
    asyncio.run(_serve_some(log, policy))
    assert main(["simulate", "--event-log", str(log), "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["differing_lines"] == []
    assert replayed["decisions"] >= 150
    lines = log.read_text().splitlines()
    assert sum('"kind":"arrival"' in line for line in lines) == 150
    assert "prompt" not in lines[5].replace("prompt_tokens", "").replace("prompt_exact", "")


def test_a_log_that_was_changed_is_not_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "events.jsonl"
    asyncio.run(_serve_some(log, "rr"))
    lines = log.read_text().splitlines()
    arrivals = [i for i, line in enumerate(lines) if '"kind":"arrival"' in line]
    lines[arrivals[3]], lines[arrivals[4]] = lines[arrivals[4]], lines[arrivals[3]]
    log.write_text("\n".join(lines) + "\n")
    assert main(["simulate", "--event-log", str(log)]) == 1
    assert "other decisions" in capsys.readouterr().out
