"""Instances that sleep without requests, and are woken for the next one: emulated servers, and commands."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from helpers import free_port, turns_until
from proxy.services import Engine, Running, document, serving
from proxy.upstreams import Visit

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.core.state_transition import Transition
from hetlb.cli.main import main
from hetlb.errors import ConfigError
from hetlb.options.wake.waker import TRANSITIONS, SleepState, Waker
from hetlb.tools.emulator import EmulatedEngine

PROFILE = Path(__file__).parents[3] / "hetlb" / "tools" / "demo" / "fast.yaml"


@asynccontextmanager
async def servers(names: str, wake_s: float = 0.3) -> AsyncIterator[list[EmulatedEngine]]:
    """Emulated servers with a sleep mode, one of each of these models."""
    profile = load_profile(PROFILE)
    made = [
        EmulatedEngine(profile, served_model_names=[name], time_scale=0.1, wake_s=wake_s * 10)
        for name in names
    ]
    for each in made:
        await each.start()
    try:
        yield made
    finally:
        for each in made:
            await each.close()


def fleet_of(engines: list[EmulatedEngine], **wake: Any) -> dict[str, Any]:
    fleet = document(policy={"name": "hetlb"})
    fleet["scrape"]["interval_s"] = 0.2
    fleet["models"] = [
        {
            "name": each._api._reader.served[0],
            "instances": [{"name": f"i-{n}", "url": each.url, "wake": wake}],
        }
        for n, each in enumerate(engines)
    ]
    return fleet


async def asked(running: Running, model: str, tokens: int = 4) -> int:
    url = f"http://127.0.0.1:{running.port}/v1/completions"
    body = {"model": model, "prompt": "hello", "max_tokens": tokens}
    async with running._session.post(url, json=body) as reply:
        await reply.read()
        return reply.status


def state(running: Running, name: str) -> SleepState:
    sleep = running.service._sleep
    assert isinstance(sleep, Waker)
    return sleep.places[name].state


async def test_an_idle_instance_sleeps_and_a_request_wakes_it(tmp_path: Path) -> None:
    async with servers("m") as engines, serving(tmp_path, fleet_of(engines, sleep_after_s=0.3)) as running:
        sleep = engines[0].sleep
        assert sleep is not None
        for turn in (1, 2):
            await turns_until(lambda: state(running, "i-0") is SleepState.ASLEEP)
            assert sleep.asleep
            assert (await running.admin("GET", "/healthz")).status == 200
            assert running.service.availability.routable()  # balancers in front still send requests
            status = (await running.admin("GET", "/v1/status")).json
            assert status["state"] == "well"
            page = (await running.admin("GET", "/metrics")).body.decode()
            assert 'hetlb_instance_asleep{server="i-0"} 1' in page
            statuses = await asyncio.gather(*[asked(running, "m") for _ in range(5)])
            assert statuses == [200] * 5
            assert (sleep.sleeps, sleep.wakes) == (turn, turn)
        page = (await running.admin("GET", "/metrics")).body.decode()
        assert 'hetlb_wake_seconds{server="i-0"} 0.' in page
        entry = (await running.admin("GET", "/v1/fleet")).json["models"][0]["instances"][0]
        assert entry["wake_s"] >= 0.3


async def test_an_instance_that_sleeps_from_the_start_is_woken_even_at_level_2(tmp_path: Path) -> None:
    async with servers("m") as engines:
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{engines[0].url}/sleep?level=2") as reply:
                assert reply.status == 200
        async with serving(tmp_path, fleet_of(engines, level=2)) as running:
            assert await asked(running, "m") == 200


async def test_two_models_that_share_a_gpu_take_turns(tmp_path: Path) -> None:
    """All requests of a mixed load are answered; there is at most one swap in a stay."""
    stay_s = 1.0
    async with servers("ab", wake_s=0.1) as engines:
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{engines[1].url}/sleep") as reply:
                assert reply.status == 200
        fleet = fleet_of(engines, group="gpu", stay_s=stay_s)
        async with serving(tmp_path, fleet) as running:
            loop = asyncio.get_running_loop()
            ends, statuses, awake = loop.time() + 7.0, [], []

            async def client(model: str) -> None:
                while loop.time() < ends:
                    statuses.append(await asked(running, model, 20))

            async def watch() -> None:
                while loop.time() < ends:
                    awake.append(sum(not each.sleep.asleep for each in engines if each.sleep is not None))
                    await asyncio.sleep(0.02)

            began = loop.time()
            await asyncio.gather(*[client(model) for model in "aabb"], watch())
            took_s = loop.time() - began
            assert set(statuses) == {200}
            swaps = sum(each.sleep.wakes for each in engines if each.sleep is not None)
            assert 2 <= swaps <= took_s / stay_s + 1
            assert max(awake) == 1


@pytest.mark.parametrize("busy", [False, True])
async def test_a_second_instance_is_woken_for_load_but_not_for_a_model_at_work(
    tmp_path: Path, busy: bool
) -> None:
    """`i-0` answers `a`, one at a time; `i-1`, asleep, shares a GPU with `i-2`, which serves `b`."""
    async with servers("aab", wake_s=0.2) as engines:
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{engines[1].url}/sleep") as reply:
                assert reply.status == 200
        fleet = fleet_of(engines, group="gpu", stay_s=0.0)
        first, second, other = (each["instances"][0] for each in fleet["models"])
        del first["wake"]
        first["max_num_seqs"] = 1
        fleet["models"] = [{"name": "a", "instances": [first, second]}, {"name": "b", "instances": [other]}]
        async with serving(tmp_path, fleet) as running:
            await turns_until(lambda: state(running, "i-1") is SleepState.ASLEEP)
            waker = running.service._sleep
            assert isinstance(waker, Waker)
            waker.places["i-1"].wakes.mean_s = 0.2
            work = asyncio.create_task(asked(running, "b", 4000 if busy else 1))
            await turns_until(lambda: work.done() or _in_flight(running, "i-2") > 0)
            if not busy:
                await work
            statuses = await asyncio.gather(*[asked(running, "a", 60) for _ in range(12)])
            assert set(statuses) == {200}
            assert work.done() is not busy, "expected work beside all of it, or none"
            woken = engines[1].sleep
            assert woken is not None
            assert woken.wakes == (0 if busy else 1)
            work.cancel()


def _in_flight(running: Running, name: str) -> int:
    return running.service.scheduler.fleet.instances[name].in_flight


async def test_a_server_without_the_endpoints_stays_awake_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine() as engine:
        fleet = document(engine)
        fleet["models"][0]["instances"][0]["wake"] = {"sleep_after_s": 0.2}
        engine.reply = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"
        async with serving(tmp_path, fleet) as running:
            await turns_until(lambda: caplog.text.count("does not sleep") >= 4)
            sleep = running.service._sleep
            assert isinstance(sleep, Waker)
            assert sleep.places["i0"].naps.wait_s(running.service.now()) > 0.0  # the next try waits
            assert "POST /sleep?level=1: status 404" in caplog.text
            await turns_until(lambda: state(running, "i0") is SleepState.AWAKE)
            from proxy.upstreams import plain

            engine.reply = plain()
            assert (await running.ask()).status == 200


class Odd(Engine):
    """It takes a request to sleep, and answers the question whether it does in its own way."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.word = answer

    async def _route(self, visit: Visit) -> None:
        if b"/is_sleeping" in visit.head:
            visit.send(self.word)
        elif b"/sleep" in visit.head:
            visit.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        else:
            await super()._route(visit)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"[" * 100_000,
        b'HTTP/1.1 200 OK\r\ncontent-length: 21\r\n\r\n{"is_sleeping":"true"}',
    ],
    ids=["no page", "no word", "brackets", "a text"],
)
async def test_a_server_that_does_not_say_whether_it_sleeps_stays_awake(
    tmp_path: Path, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It was asked again for 15 minutes, without requests."""
    async with Odd(answer) as engine:
        fleet = document(engine)
        fleet["models"][0]["instances"][0]["wake"] = {"sleep_after_s": 0.2}
        async with serving(tmp_path, fleet) as running:
            await turns_until(lambda: "does not sleep" in caplog.text)
            assert (await running.ask()).status == 200


SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        answer = {"object": "list", "data": [{"id": "m", "object": "model"}]}
        self.reply(json.dumps(answer).encode() if self.path == "/v1/models" else b"")
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.reply(b'{"choices":[{"text":"hi","finish_reason":"stop"}],"usage":{"completion_tokens":1}}')
    def reply(self, body):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_commands_start_and_stop_a_server(tmp_path: Path) -> None:
    port, pid, script = free_port(), tmp_path / "pid", tmp_path / "server.py"
    script.write_text(SERVER)
    start = f"{sys.executable} {script} {port} & echo $! > {pid}"
    commands = {"wake": ["sh", "-c", start], "sleep": ["sh", "-c", f"kill $(cat {pid}); rm {pid}"]}
    fleet = document()
    wake = {"sleep_after_s": 0.5, "stay_s": 0, "command": commands}
    instance = {"name": "i0", "url": f"http://127.0.0.1:{port}", "wake": wake}
    fleet["models"] = [{"name": "m", "instances": [instance]}]
    try:
        async with serving(tmp_path, fleet) as running:
            for _ in range(2):
                await turns_until(lambda: state(running, "i0") is SleepState.ASLEEP)
                assert not pid.exists()
                assert (await running.ask()).status == 200
                assert pid.exists()
    finally:
        if pid.exists():
            await (await asyncio.create_subprocess_exec("sh", "-c", f"kill $(cat {pid})")).wait()


@pytest.mark.parametrize("command", [["false"], ["/no/such/file"]])
async def test_a_wake_that_fails_is_tried_a_few_times_and_requests_are_refused(
    tmp_path: Path, command: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = document(queue={"no_instance_timeout_s": 1.0})
    wake = {"command": {"wake": command, "sleep": ["true"]}}
    instance = {"name": "i0", "url": f"http://127.0.0.1:{free_port()}", "wake": wake}
    fleet["models"] = [{"name": "m", "instances": [instance]}]
    async with serving(tmp_path, fleet) as running:
        await turns_until(lambda: state(running, "i0") is SleepState.ASLEEP)
        reply = await running.ask()
        assert reply.status == 503
        assert 1 <= caplog.text.count("does not wake up") <= 7


async def test_a_reload_without_the_table_leaves_the_instance_awake(tmp_path: Path) -> None:
    async with servers("m") as engines:
        fleet = fleet_of(engines, sleep_after_s=0.2)
        async with serving(tmp_path, fleet) as running:
            await turns_until(lambda: state(running, "i-0") is SleepState.ASLEEP)
            del fleet["models"][0]["instances"][0]["wake"]
            running.rewrite(fleet)
            assert (await running.admin("POST", "/v1/reload")).status == 200
            await turns_until(lambda: running.instance("i-0").asleep)  # by its own page
            assert running.instance("i-0").sleep.reason == ""


# --- mistakes ---


@pytest.mark.parametrize(
    ("wake", "message"),
    [
        ({"level": 3}, "wake.level"),
        ({"sleep_after_s": -1}, "wake.sleep_after_s"),
        ({"command": {"wake": ["x"]}}, "wake.command"),
        ({"command": {"wake": [], "sleep": ["x"]}}, "wake.command.wake"),
        ({"command": {"wake": "x", "sleep": ["x"]}}, "wake.command.wake"),
        ({"minutes": 3}, "wake"),
    ],
)
def test_mistakes_name_the_key(tmp_path: Path, wake: Any, message: str) -> None:
    path = tmp_path / "fleet.yaml"
    instance = {"url": "http://h:1", "wake": wake}
    path.write_text(yaml.safe_dump({"version": 1, "models": [{"name": "m", "instances": [instance]}]}))
    with pytest.raises(ConfigError, match=message):
        load_fleet(path)


def test_proxies_on_several_machines_do_not_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    models = "models: [{name: m, instances: [{url: 'http://h:1', wake: {}}]}]"
    path.write_text(f"version: 1\nshared: {{url: 'redis://h:1'}}\n{models}\n")
    assert main(["serve", "--check", "--config", str(path)]) == 2
    assert "shared: expected none with wake" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="shared: expected none with wake"):
        load_fleet(path)  # as a reload does
    path.write_text(f"version: 1\n{models}\n")
    assert main(["serve", "--check", "--config", str(path), "--workers", "2"]) == 0


async def test_who_may_register_a_server_may_run_no_command(tmp_path: Path) -> None:
    commands = {"wake": ["touch", str(tmp_path / "run")], "sleep": ["true"]}
    async with Engine() as engine:
        fleet = document(engine, admin={"registration": True})
        async with serving(tmp_path, fleet) as running:
            body = {"name": "x", "model": "m", "url": "http://127.0.0.1:9", "wake": {"command": commands}}
            reply = await running.admin("POST", "/v1/fleet/instances", body)
            assert reply.status == 400
            assert "only the fleet file says which servers sleep" in reply.message
    assert not (tmp_path / "run").exists()


# --- the table ---


def test_each_state_is_reached_and_left() -> None:
    rows: tuple[Transition[SleepState], ...] = TRANSITIONS
    assert {row.after for row in rows} == set(SleepState)
    assert {each for row in rows for each in row.before} == set(SleepState)
