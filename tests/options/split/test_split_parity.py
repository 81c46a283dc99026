"""A log of split requests, replayed: the same decisions."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from helpers import HANG_S
from options.split.split_rig import rig

from hetlb.cli.main import main


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_a_recorded_log_with_pairs_replays_to_the_same_decisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], connector: str
) -> None:
    log = tmp_path / "events.jsonl"

    async def serve() -> None:
        roles = ("prefill", "decode", "both", "both")
        async with rig(tmp_path, connector, roles=roles, lease_s=1.0, log=log) as fleet:

            async def ask(number: int) -> None:
                with contextlib.suppress(TimeoutError):
                    await fleet.ask(
                        prompt=[number] * (20 + 37 * number % 3000),
                        stream=number % 2 == 0,
                        timeout_s=0.05 if number % 7 == 3 else HANG_S,
                    )

            await asyncio.gather(*(ask(number) for number in range(120)))
            if connector == "nixl":  # one that is not fetched in time, and goes to one instance
                for engine in fleet.engines.values():
                    assert engine.kv is not None
                    engine.kv.answering.clear()
                await fleet.ask(stream=True)
            await fleet.service.stop(10.0)

    asyncio.run(serve())
    text = log.read_text()
    assert text.count('"kind":"prefilled"') >= 5
    assert main(["simulate", "--event-log", str(log), "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["differing_lines"] == []
    assert replayed["decisions"] >= 100
