"""The what-if: the command's own figures for what was asked, in a process that ends with the service."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from proxy.services import Engine, Running, document, serving

from hetlb.proxy.dashboard import whatif

PROFILE = Path(__file__).parents[3] / "hetlb" / "demo" / "fast.yaml"
#: What the scripted engines answer: `PLAIN_BODY`.
PROMPT, OUTPUT = 3, 2


def profiled(*engines: Engine, **tables: Any) -> dict[str, Any]:
    fleet = document(*engines, **tables)
    for instance in fleet["models"][0]["instances"]:
        instance["profile"] = str(PROFILE)
    return fleet


async def finished(running: Running) -> dict[str, Any]:
    """The replay's document when it is over."""
    while (found := (await running.admin("GET", "/v1/what-if")).json)["state"] == "running":
        await asyncio.sleep(0.02)
    result: dict[str, Any] = found
    return result


async def test_the_figures_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Path] = []
    prepare = whatif._Replay._prepare

    def keeping(self: Any, folder: Path) -> dict[str, Any]:
        result = prepare(self, folder)
        for path in folder.iterdir():
            kept.append(tmp_path / "kept" / path.name)
            kept[-1].parent.mkdir(exist_ok=True)
            kept[-1].write_bytes(path.read_bytes())
        return result

    monkeypatch.setattr(whatif._Replay, "_prepare", keeping)
    async with Engine() as one, Engine() as two, serving(tmp_path, profiled(one, two)) as running:
        for _ in range(4):
            await running.ask()
        reply = await running.admin("POST", "/v1/what-if", {"policy": "single"})
        assert (reply.status, reply.json["state"]) == (202, "running")
        result = await finished(running)
    assert result["state"] == "done"
    assert (result["model"], result["current"], result["policy"]) == ("m", "rr", "single")
    assert (result["requests"], result["not_replayed"], result["whole_window"]) == (4, 0, True)
    assert (result["instances"], result["left_out"]) == (["i0", "i1"], {})
    assert result["measured"]["total_input_tokens"] == 4 * PROMPT
    assert result["measured"]["total_output_tokens"] == 4 * OUTPUT
    folder = kept[0].parent
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hetlb", "simulate", "--json", "--request-rate", "trace",
        "--config", str(folder / "fleet.yaml"), "--trace", str(folder / "trace.csv"), "--policy", "rr,single",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert json.loads(out)["runs"] == result["runs"]
    assert [run["policy"] for run in result["runs"]] == ["rr", "single"]
    assert [each["completed"] for each in result["runs"][1]["instances"]] == [4, 0]


async def test_instances_that_take_no_requests_are_left_out(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, profiled(one, two)) as running:
        await running.ask()
        await running.admin("PUT", "/v1/fleet/instances/i1/state", {"state": "drain"})
        assert (await running.admin("POST", "/v1/what-if", {"policy": "rr", "model": "m"})).status == 202
        result = await finished(running)
    assert (result["state"], result["instances"], result["left_out"]) == ("done", ["i0"], {"i1": "drain"})
    assert len(result["runs"]) == 1


async def test_what_did_not_end_well_is_counted_and_not_replayed(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, profiled(engine)) as running:
        await running.ask()
        engine.reply = b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\n{}"
        await running.ask()
        await running.admin("POST", "/v1/what-if", {"policy": "rr"})
        result = await finished(running)
    assert (result["requests"], result["not_replayed"]) == (1, 1)


async def test_nothing_to_replay_is_one_sentence(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, profiled(engine)) as running:
        await running.admin("POST", "/v1/what-if", {"policy": "rr"})
        result = await finished(running)
    assert result["state"] == "failed"
    assert result["message"] == "no answer of this model ended in the last hour: there is nothing to replay"


async def test_a_replay_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, profiled(engine)) as running:
        await running.ask()
        await running.admin("POST", "/v1/what-if", {"policy": "rr"})
        again = await running.admin("POST", "/v1/what-if", {"policy": "rr"})
        assert (again.status, again.message) == (400, "a replay is running; wait for it or cancel it")
        reply = await running.admin("DELETE", "/v1/what-if")
        assert reply.json == {"state": "idle"}
        assert (await running.admin("DELETE", "/v1/what-if")).json == {"state": "idle"}


async def test_a_replay_ends_with_the_service(tmp_path: Path) -> None:
    async with Engine() as engine:
        async with serving(tmp_path, profiled(engine)) as running:
            await running.ask()
            await running.admin("POST", "/v1/what-if", {"policy": "rr"})
        # `serving` checks that no task is left; the process is waited for by its task.


async def test_a_simulation_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whatif, "LIMIT_S", 0.0)
    async with Engine() as engine, serving(tmp_path, profiled(engine)) as running:
        await running.ask()
        await running.admin("POST", "/v1/what-if", {"policy": "rr"})
        result = await finished(running)
    assert result["message"] == "the simulation was ended after 0 s: too many requests"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"policy": "fastest"}, "policy: expected one of rr, wrr, "),
        ({"policy": "rr", "model": "x"}, "model: expected one of m, got 'x'"),
        ({"policy": "rr", "modle": "m"}, 'expected a JSON object {"policy", "model"}'),
        ({}, 'expected a JSON object {"policy", "model"}'),
        ({"policy": 1}, 'expected a JSON object {"policy", "model"}'),
        ([], 'expected a JSON object {"policy", "model"}'),
    ],
)
async def test_questions_that_are_none(tmp_path: Path, body: Any, message: str) -> None:
    async with Engine() as engine, serving(tmp_path, profiled(engine)) as running:
        reply = await running.admin("POST", "/v1/what-if", body)
        assert reply.status == 400
        assert reply.message.startswith(message)
        assert (await running.admin("GET", "/v1/what-if")).json == {"state": "idle"}


async def test_without_profiles_or_instances_it_says_why(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two:
        tables = profiled(one, two)
        del tables["models"][0]["instances"][1]["profile"]
        async with serving(tmp_path, tables) as running:
            reply = await running.admin("POST", "/v1/what-if", {"policy": "rr"})
            assert reply.message == (
                "a simulation needs a profile or a learnt speed of every instance; i1 is "
                "without one until a longer answer has ended there"
            )
            for name in ("i0", "i1"):
                await running.admin("PUT", f"/v1/fleet/instances/{name}/state", {"state": "maint"})
            reply = await running.admin("POST", "/v1/what-if", {"policy": "rr"})
            assert (reply.status, reply.message) == (400, "no instance of the model is routable")
