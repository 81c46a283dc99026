"""The admin listener on real sockets: what an operator sees, the switches, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import HANG_S, turns_until
from proxy.services import PLAIN_BODY, Engine, document, said, serving
from proxy.upstreams import Upstream, plain

from hetlb import app_listener
from hetlb.balancer.admin.admin import AdminApi
from hetlb.balancer.fleet import admin_listener

# --- what is seen ---


def leaving(running: Any) -> list[str]:
    return [each.name for each in running.service.scheduler.instances if each.leaves_at is not None]


async def test_health_and_readiness(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        assert (await running.admin("GET", "/healthz")).body == b"ok\n"
        ready = await running.admin("GET", "/readyz")
        assert (ready.status, ready.body) == (200, b"ready\n")
        await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})
        ready = await running.admin("GET", "/readyz")
        assert (ready.status, ready.body) == (503, b"no instance is routable\n")
        # The process is alive all the same.
        assert (await running.admin("GET", "/healthz")).status == 200


async def test_a_fleet_whose_model_no_engine_serves_is_not_ready(tmp_path: Path) -> None:
    async with Engine() as engine:
        engine.served = "other"
        async with serving(tmp_path, document(engine)) as running:
            ready = await running.admin("GET", "/readyz")
            assert (ready.status, ready.body) == (503, b"no instance serves m\n")
            assert (await running.ask()).status == 404


async def test_readiness_says_no_before_the_listener_closes(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        assert (await running.admin("GET", "/readyz")).status == 200
        running.service.availability.stopping = True
        ready = await running.admin("GET", "/readyz")
        assert (ready.status, ready.body) == (503, b"stopping\n")


async def test_every_figure_is_0_at_rest(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        for _ in range(5):
            assert (await running.ask()).status == 200
        await running.settled()
        fleet = (await running.admin("GET", "/v1/fleet")).json
        assert set(fleet) == {"policy", "models", "queue"}
        assert fleet["policy"] == "rr"
        assert fleet["queue"] == {"requests": 0, "bytes": 0}
        [model] = fleet["models"]
        assert model["name"] == "m"
        [instance] = model["instances"]
        assert (instance["name"], instance["url"]) == ("i0", engine.url)
        assert (instance["state"], instance["health"]) == ("ready", "up")
        for figure in ("in_flight", "queued", "workload", "kv_reserved_tokens"):
            assert instance[figure] == 0, figure
        assert {"kv_cache_tokens", "kv_reported", "signal_age_s"} <= set(instance)


async def test_a_large_fleet_is_shown_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document of a thousand instances took 15 ms of the event loop at once."""
    monkeypatch.setattr("hetlb.turns.TURN_S", 0.0)
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine()) for _ in range(20)]
        running = await stack.enter_async_context(serving(tmp_path, document(*engines)))
        rounds = 0

        async def go_round() -> None:
            nonlocal rounds
            while True:
                await asyncio.sleep(0)
                rounds += 1

        other = asyncio.create_task(go_round())
        found = await AdminApi(running.service).whole_fleet()
        other.cancel()
        assert len(found["models"][0]["instances"]) == 20
        assert rounds >= 20


async def test_the_figures_of_a_request_in_flight(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        engine.hold()
        asking = asyncio.create_task(running.ask())
        await engine.asked_for()
        [model] = (await running.admin("GET", "/v1/fleet")).json["models"]
        assert model["instances"][0]["in_flight"] == 1
        engine.released.set()
        assert (await asking).status == 200


async def test_the_metrics_page(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        await running.ask()
        page = await running.admin("GET", "/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert (
            b'hetlb_requests_total{outcome="ok",cause="none",phase="answer",model="m",status="2xx"} 1\n'
            in page.body
        )
        assert b'hetlb_instance_in_flight{server="i0"} 0\n' in page.body


async def test_the_last_decisions(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one, two)) as running:
        for _ in range(4):
            await running.ask()
        assert len((await running.admin("GET", "/v1/decisions")).json["decisions"]) == 4
        decisions = (await running.admin("GET", "/v1/decisions?last=3")).json["decisions"]
        assert [each["chosen"] for each in decisions] == ["i1", "i0", "i1"]
        assert [each["instance"] for each in decisions[0]["candidates"]] == ["i0", "i1"]
        assert len((await running.admin("GET", "/v1/decisions?last=1000")).json["decisions"]) == 4


@pytest.mark.parametrize("last", ["0", "-1", "1001", "99999", "ten", "", "1e2", "%C2%B2", "1.0"])
async def test_a_number_of_decisions_that_is_none(tmp_path: Path, last: str) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        reply = await running.admin("GET", f"/v1/decisions?last={last}")
        assert reply.status == 400
        assert reply.message.startswith("last: expected a number from 1 to 1000, got ")


# --- administrative state ---


@pytest.mark.parametrize("state", ["drain", "maint"])
async def test_a_state_that_takes_no_work_and_back(tmp_path: Path, state: str) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one, two)) as running:
        reply = await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": state})
        assert (reply.status, reply.json) == (200, {"name": "i0", "state": state})
        for _ in range(4):
            assert (await running.ask()).headers["x-hetlb-instance"] == "i1"
        [model] = (await running.admin("GET", "/v1/fleet")).json["models"]
        assert [each["state"] for each in model["instances"]] == [state, "ready"]
        await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "ready"})
        served = {(await running.ask()).headers["x-hetlb-instance"] for _ in range(4)}
        assert served == {"i0", "i1"}


async def test_what_is_in_flight_ends_where_it_is(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        engine.hold()
        asking = asyncio.create_task(running.ask())
        await engine.asked_for()
        await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})
        engine.released.set()
        reply = await asking
        assert (reply.status, reply.body) == (200, PLAIN_BODY)


async def test_in_maintenance_nothing_is_probed(tmp_path: Path) -> None:
    async with Engine() as engine, Engine() as other, serving(tmp_path, document(engine, other)) as running:
        await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "maint"})
        # A probe may have been under way; the other engine's clock says that one would have come since.
        await turns_until(lambda: engine.open == 0 or engine.probes > 0)
        before, ticks = engine.probes, other.probes
        await turns_until(lambda: other.probes >= ticks + 4)
        assert engine.probes <= before + 1
        # Setting the same state once more changes nothing; another one begins to probe again.
        await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "maint"})
        await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})
        before = engine.probes
        await turns_until(lambda: engine.probes >= before + 3)
        assert len([task for task in asyncio.all_tasks() if task.get_name() == "watch i0"]) <= 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"state": "off"}, "state: expected ready, drain or maint, got 'off'"),
        ({"state": None}, "state: expected ready, drain or maint, got None"),
        ({"state": ["ready"]}, "state: expected ready, drain or maint, got ['ready']"),
        ({}, "state: expected ready, drain or maint, got None"),
        ({"state": "ready", "stat": 1}, "'stat': unknown key, expected state"),
        ([], "expected a JSON object"),
    ],
)
async def test_states_that_are_none(tmp_path: Path, body: Any, message: str) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        reply = await running.admin("PUT", "/v1/fleet/instances/i0/state", body)
        assert (reply.status, reply.message) == (400, message)
        assert running.instance("i0").admin.value == "ready"


async def test_the_state_of_an_unknown_instance(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        reply = await running.admin("PUT", "/v1/fleet/instances/i9/state", {"state": "drain"})
        assert reply.status == 404
        assert reply.message == "instance: expected one of i0, got 'i9'"


async def test_a_notice_holds_until_it_is_taken_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        path = "/v1/fleet/instances/i0/notice"
        reply = await running.admin("PUT", path, {"deadline_s": 30})
        assert (reply.status, reply.json) == (200, {"name": "i0", "deadline_s": 30})
        assert leaving(running) == ["i0"]
        assert "i0 is set to leave in 30 s" in caplog.text
        for wrong in (-1, "30", True, 1e9):
            reply = await running.admin("PUT", path, {"deadline_s": wrong})
            assert reply.status == 400
            assert reply.message.startswith("deadline_s: expected seconds from 0 to 86400, or null, got ")
        for method, body in (("PUT", {"deadline_s": None}), ("DELETE", None)):
            await running.admin("PUT", path, {"deadline_s": 30})
            reply = await running.admin(method, path, body)
            assert reply.json == {"name": "i0", "deadline_s": None}
            assert not leaving(running)
        await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})
        await running.admin("PUT", path, {"deadline_s": 30})
        assert not running.service.scheduler.instances[0].routable


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_the_example_sends_a_notice(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "configs" / "notices" / "send.sh"
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        url = f"http://127.0.0.1:{running.service.admin.address[1]}"
        sender = await asyncio.create_subprocess_exec(
            script,
            "i0",
            "30",
            env={"PATH": os.environ["PATH"], "HETLB_ADMIN": url},
            stdout=asyncio.subprocess.PIPE,
        )
        assert (await sender.wait(), leaving(running)) == (0, ["i0"])


# --- the policy ---


async def test_the_policy(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        reply = await running.admin("PUT", "/v1/policy", {"name": "least-requests"})
        assert (reply.status, reply.json) == (200, {"policy": "least-requests"})
        assert (await running.admin("GET", "/v1/fleet")).json["policy"] == "least-requests"
        assert (await running.ask()).status == 200
        assert (await running.admin("GET", "/v1/decisions")).json["decisions"][0]["policy"]


@pytest.mark.parametrize("body", [{"name": "fastest"}, {"name": 1}, {"name": ["rr"]}, {}])
async def test_a_policy_that_is_none(tmp_path: Path, body: Any) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        reply = await running.admin("PUT", "/v1/policy", body)
        assert reply.status == 400
        assert reply.message.startswith("name: expected one of rr, wrr, random, ")
        assert (await running.admin("GET", "/v1/fleet")).json["policy"] == "rr"


# --- registration ---


async def test_registration_is_off_unless_asked_for(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        added = await running.admin("POST", "/v1/fleet/instances", {"url": "http://127.0.0.1:9"})
        removed = await running.admin("DELETE", "/v1/fleet/instances/i0")
        for reply in (added, removed):
            assert (reply.status, reply.message) == (403, "admin.registration is false")
        assert running.names == ["i0"]


async def test_an_instance_comes_and_goes(tmp_path: Path) -> None:
    fleet: Callable[..., dict[str, Any]] = document
    async with Engine() as one, Engine() as two:
        async with serving(tmp_path, fleet(one, admin={"registration": True})) as running:
            reply = await running.admin("POST", "/v1/fleet/instances", {"url": two.url, "model": "m"})
            name = two.url.removeprefix("http://")
            assert reply.status == 201
            assert [each["name"] for each in reply.json["models"][0]["instances"]] == ["i0", name]
            await running.up(name)
            served = {(await running.ask()).headers["x-hetlb-instance"] for _ in range(4)}
            assert served == {"i0", name}
            two.hold()
            answers = [asyncio.create_task(running.ask()) for _ in range(2)]
            await two.asked_for(3)
            reply = await running.admin("DELETE", f"/v1/fleet/instances/{name}")
            assert (reply.status, reply.json) == (200, {"name": name})
            assert running.names == ["i0"]
            two.released.set()
            assert {(await each).status for each in answers} == {200}  # what it is answering goes on
            assert (await running.ask()).headers["x-hetlb-instance"] == "i0"
            gone = await running.admin("DELETE", f"/v1/fleet/instances/{name}")
            assert gone.status == 404
            assert gone.message.startswith("instance: expected one of i0, got ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "url: expected a value, but the key is missing"),
        ({"url": "", "name": "a"}, "url: expected a URL like http://host:8000, got ''"),
        ({"name": "a"}, "url: expected a value, but the key is missing"),
        ({"url": 8000}, "url: expected text, got 8000"),
        ({"url": "127.0.0.1:8000"}, "url: expected a URL like http://host:8000"),
        ({"url": "ftp://127.0.0.1:8000"}, "url: expected a URL like http://host:8000"),
        ({"url": "http://u:p@127.0.0.1:8000"}, "url: expected a URL like http://host:8000"),
        ({"url": "http://127.0.0.1:9", "weigth": 1}, "weigth: unknown key, expected one of name"),
        ({"url": "http://127.0.0.1:9", "model": 1}, "model: expected text, got 1"),
        ({"url": "http://127.0.0.1:9", "name": "i0"}, "name: expected a name used once in the fleet"),
        ({"url": "http://127.0.0.1:9", "name": "a b"}, "name: expected letters, digits and"),
        ({"url": "http://127.0.0.1:9", "profile": "/etc/passwd"}, "profile: expected none"),
    ],
)
async def test_registrations_that_are_wrong(tmp_path: Path, body: Any, message: str) -> None:
    async with Engine() as engine:
        async with serving(tmp_path, document(engine, admin={"registration": True})) as running:
            reply = await running.admin("POST", "/v1/fleet/instances", body)
            assert reply.status == 400
            assert reply.message.startswith(message)
            assert running.names == ["i0"]


# --- reload ---


async def test_a_good_file_is_swapped_in_under_requests(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one)) as running:
        one.hold()
        asking = asyncio.create_task(running.ask())
        await one.asked_for()
        fleet = document(one, two, policy={"name": "least-requests"})
        del fleet["models"][0]["instances"][0]
        running.rewrite(fleet)
        reply = await running.admin("POST", "/v1/reload")
        assert (reply.status, reply.json) == (
            200,
            {"reloaded": "1 instances out, 1 in, policy least-requests"},
        )
        assert running.names == ["i1"]
        await running.up("i1")
        assert (await running.ask()).headers["x-hetlb-instance"] == "i1"
        one.released.set()
        reply = await asking
        assert (reply.status, reply.body) == (200, PLAIN_BODY)
        assert reply.headers["x-hetlb-instance"] == "i0"
        await running.settled()
        # What was kept for the old one goes with its last request.
        await turns_until(lambda: len(running.service.driver.pools.all()) == 1)


async def test_what_did_not_change_stays_as_it_is(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one)) as running:
        incarnation = running.instance("i0").incarnation
        await running.admin("PUT", "/v1/fleet/instances/i0/state", {"state": "drain"})
        await running.admin("PUT", "/v1/policy", {"name": "p2c"})
        running.rewrite(document(one, two))
        assert (await running.admin("POST", "/v1/reload")).json == {
            "reloaded": "0 instances out, 1 in, policy p2c"
        }
        assert running.instance("i0").incarnation == incarnation
        assert running.instance("i0").admin.value == "drain"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [", "expected valid YAML"),
        ("version: 1\nmodels: []\n", "models: expected at least one model, got none"),
        ("version: 1\nmodels: [{name: m, instances: [{name: a}]}]\n", "a: url: expected the server's URL"),
        ("version: 1\nmodel: []\n", "model: unknown key"),
        (None, "no such file"),
        (
            'version: 1\nmodels: [{name: m, instances: [{url: "http://h:1"}, {url: "http://h:1"}]}]\n',
            "models[0].instances[1].name: expected a name used once in the fleet, got 'h:1' again",
        ),
    ],
)
async def test_a_bad_file_changes_nothing_and_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, message: str
) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        engine.hold()
        asking = asyncio.create_task(running.ask())
        await engine.asked_for()
        if text is None:
            running.path.unlink()
        else:
            running.path.write_text(text)
        reply = await running.admin("POST", "/v1/reload")
        assert reply.status == 400
        assert reply.message.startswith(f"{running.path}: ")
        assert message in reply.message
        assert len(said(caplog.records, message)) == 1
        assert running.names == ["i0"]
        engine.released.set()
        assert (await asking).status == 200
        assert (await running.ask()).status == 200


async def test_what_needs_a_restart_is_named(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        pick = {"fallbacks": 3}
        running.rewrite(document(engine, listen={"port": 4}, queue={"max_requests": 3}, pick=pick))
        said_so = (await running.admin("POST", "/v1/reload")).json["reloaded"]
        assert said_so == "0 instances out, 0 in, policy rr; only a restart changes listen.port, queue, pick"
        assert running.service.fleet.file.listen.port == 0
        # It is said for as long as the file asks for it.
        assert (await running.admin("POST", "/v1/reload")).json["reloaded"] == said_so


async def test_the_limits_of_the_data_plane_are_reloaded(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        assert (await running.ask()).status == 200
        running.rewrite(document(engine, proxy={"max_body_bytes": 10}))
        assert (await running.admin("POST", "/v1/reload")).status == 200
        assert (await running.ask()).status == 413


async def test_a_fleet_from_addresses_has_nothing_to_reload(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        running.service.fleet = msgspec.structs.replace(running.service.fleet, path=None)
        reply = await running.admin("POST", "/v1/reload")
        assert (reply.status, reply.message) == (
            400,
            "there is no file to reload: hetlb was started with --instance",
        )


async def test_sighup_reloads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    handlers: list[Any] = []
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one)) as running:
        serve = asyncio.create_task(
            running.service.run(lambda: handlers.append(signal.getsignal(signal.SIGHUP)))
        )
        await turns_until(lambda: bool(handlers))
        assert handlers != [signal.SIG_DFL]  # signals are handled before anything says that it is ready
        running.rewrite(document(one, two))
        os.kill(os.getpid(), signal.SIGHUP)
        await turns_until(lambda: running.names == ["i0", "i1"])
        running.path.write_text("models: [")
        os.kill(os.getpid(), signal.SIGHUP)
        await turns_until(lambda: bool(said(caplog.records, "not reloaded")))
        assert running.names == ["i0", "i1"]
        assert said(caplog.records, "reloaded: 0 instances out, 1 in, policy rr")
        [line] = said(caplog.records, "not reloaded, the last good configuration stays: ")
        assert str(running.path) in line
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(HANG_S):
            await serve
    # The process is this test's: nothing of a service that has ended may end it.
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert not [each for each in timers if each.function is os._exit]


async def test_a_policy_chosen_by_flag_stays_until_the_file_names_another(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine), policy="p2c") as running:
        assert (await running.admin("POST", "/v1/reload")).json["reloaded"].endswith("policy p2c")
        running.rewrite(document(engine, policy={"name": "least-requests"}))
        assert (await running.admin("POST", "/v1/reload")).json["reloaded"].endswith("policy least-requests")


async def test_reloads_disturb_no_request(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two, serving(tmp_path, document(one)) as running:
        statuses: list[int] = []
        over = False

        async def ask_on() -> None:
            while not over:
                statuses.append((await running.ask()).status)

        asking = [asyncio.create_task(ask_on()) for _ in range(4)]
        for number in range(24):
            # One instance stays, the other comes and goes; every third file is no good.
            running.rewrite(document(one, two) if number % 2 else document(one))
            if number % 3 == 2:
                running.path.write_text("models: [")
            reply = await running.admin("POST", "/v1/reload")
            assert reply.status == (400 if number % 3 == 2 else 200)
        await turns_until(lambda: len(statuses) > 40)
        over = True
        await asyncio.gather(*asking)
        assert set(statuses) == {200}
        watches = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("watch")]
        assert watches.count("watch") == 1
        assert set(watches) - {f"watch {name}" for name in running.names} <= {"watch", "watch models"}
        assert len(set(watches)) == len(watches)


async def test_words_of_an_engine_make_no_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine() as engine:
        engine.served = "x\nERROR hetlb: all is lost \x1b[31m"
        async with serving(tmp_path, document(engine)):
            pass
    [line] = said(caplog.records, "i0 serves ")
    shown = "x%0aERROR%20hetlb:%20all%20is%20lost%20%1b[31m"
    assert line == f"i0 serves {shown}, not m: it gets requests for what it serves"


# --- what is refused ---


@pytest.mark.parametrize(
    "path",
    ["/none", "/v1", "/v1/fleet/", "/v1/fleet/instances/i0", "/v1/models", "/v1/fleet/instances/a/b/state"],
)
async def test_paths_at_which_nothing_is(tmp_path: Path, path: str) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        reply = await running.admin("GET", path)
        assert reply.status in (404, 405)
        assert reply.json["error"]["code"] == reply.status


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/healthz", "GET, HEAD"),
        ("DELETE", "/v1/fleet", "GET, HEAD"),
        ("GET", "/v1/policy", "PUT"),
        ("GET", "/v1/reload", "POST"),
        ("PUT", "/v1/reload", "POST"),
        ("GET", "/v1/fleet/instances", "POST"),
        ("POST", "/v1/fleet/instances/i0/state", "PUT"),
        ("POST", "/v1/decisions", "GET, HEAD"),
    ],
)
async def test_methods_that_are_wrong(tmp_path: Path, method: str, path: str, allowed: str) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        reply = await running.admin(method, path)
        assert reply.status == 405
        assert reply.json["error"]["code"] == 405
        assert ", ".join(sorted(reply.headers["allow"].replace(" ", "").split(","))) == allowed


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/v1/policy"), ("PUT", "/v1/fleet/instances/i0/state"), ("POST", "/v1/fleet/instances")],
)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"null", 400), (b'"text"', 400), (b"\xff\xfe", 400), (b"[" * 5000, 400),
        (b'{"name": NaN}', 400), (b'{"name": "' + b"x" * (64 << 10) + b'"}', 413),
    ],
)  # fmt: skip
async def test_bodies_that_are_wrong(
    tmp_path: Path, method: str, path: str, body: bytes, status: int
) -> None:
    async with Engine() as engine:
        async with serving(tmp_path, document(engine, admin={"registration": True})) as running:
            reply = await running.admin(method, path, raw=body)
            assert reply.status == status
            assert reply.json["error"]["code"] == status
            assert len(reply.message) < 200
            assert (running.names, running.scheduler.placement.policy_name) == (["i0"], "rr")


async def test_an_engine_that_is_gone_leaves_the_admin_listener_alone(tmp_path: Path) -> None:
    async with Upstream(plain(b"", b"500 Oops")) as engine, serving(tmp_path, document(engine)) as running:
        assert (await running.admin("GET", "/healthz")).status == 200
        assert (await running.admin("GET", "/v1/fleet")).status == 200
        assert (await running.admin("GET", "/metrics")).status == 200


async def test_half_heads_hold_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_listener, "MOST_CONNECTIONS", 20)
    monkeypatch.setattr(app_listener, "_SWEEP_S", 0.01)
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        address = running.service.admin.address
        half = [await asyncio.open_connection(*address) for _ in range(60)]
        for _, writer in half:
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nx-")
        # The oldest are dropped first; the newest stay until they are idle for too long.
        for reader, writer in half[:40]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        assert (await running.admin("GET", "/healthz")).status == 200
        running.service.admin.idle_s = 0.0
        for reader, writer in half[40:]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()


async def test_labels_hold_no_control_characters(tmp_path: Path) -> None:
    async with Engine() as engine:
        engine.served = "m\x1b[31m\r\u2028\n"
        async with serving(tmp_path, document(engine)) as running:
            await running.up("i0")
            await turns_until(lambda: running.instance("i0").served == (engine.served,))
            page = (await running.admin("GET", "/metrics")).body.decode()
            assert 'model="m?[31m???"' in page
            assert all(line.isprintable() for line in page.split("\n"))


ODD = (
    b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 9000),
    b"GET /metrics HTTP/1.1\r\nHost: [::\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: h:99999\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
    b"PUT /v1/policy HTTP/1.1\r\nHost: \xc3\xa9\xff\r\nContent-Length: 2\r\n\r\n{}",
    b"GET http://[::/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: a.\xc3\xbc..b\r\n\r\n",
    b"junk\r\n\r\n",
)


@pytest.mark.parametrize("sent", ODD, ids=range(len(ODD)))
async def test_an_odd_request_is_no_error_of_the_server(
    tmp_path: Path, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        reader, writer = await asyncio.open_connection(*running.service.admin.address)
        writer.write(sent)
        async with asyncio.timeout(HANG_S):
            status = await reader.readline()
        assert status.split()[1] in (b"200", b"400", b"403"), status
        writer.close()
    assert not [record for record in caplog.records if record.exc_info]
