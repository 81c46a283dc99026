"""Keys and tokens: who is let in, what reaches an engine, and that no secret is seen anywhere else."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import turns_until
from proxy.services import Engine, document, said, serving
from proxy.test_proxying import Client, post
from proxy.upstreams import plain

from hetlb.addresses import allowed_address, network_of
from hetlb.balancer.clients.access import EngineAccess, load_access
from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.core.types import Health
from hetlb.cli.main import COMMANDS, build_parser, main
from hetlb.errors import ConfigError, HetlbError
from hetlb.tools.loadtest.fleet_admin import fleet_admin

TOKEN = "t0ken-for-operators"
KEY = "sk-engine-0123456789"
CLIENT_KEY = "sk-client-abcdef"


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return name


# --- the admin token ---


async def test_everything_but_health_needs_the_token(tmp_path: Path) -> None:
    admin = {"token_file": write(tmp_path, "token", TOKEN + "\n"), "registration": True}
    async with Engine() as engine, serving(tmp_path, document(engine, admin=admin)) as running:
        assert (await running.admin("GET", "/healthz")).status == 200
        assert (await running.admin("GET", "/readyz")).status == 200
        for method, path in [
            ("GET", "/metrics"),
            ("GET", "/v1/fleet"),
            ("GET", "/v1/decisions"),
            ("PUT", "/v1/policy"),
            ("POST", "/v1/reload"),
            ("POST", "/v1/fleet/instances"),
            ("DELETE", "/v1/fleet/instances/i0"),
            ("PUT", "/v1/fleet/instances/i0/state"),
            ("GET", "/v1/events"),
            ("GET", "/v1/status"),
            ("GET", "/nothing"),
            ("POST", "/healthz"),
            ("GET", "/%68ealthz/../v1/fleet"),
        ]:
            reply = await running.admin(method, path)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
        assert (await running.admin("GET", "/v1/fleet", **bearer(TOKEN))).status == 200
        assert (await running.admin("GET", "/v1/fleet", authorization=f"bearer  {TOKEN}")).status == 200
        assert (await running.admin("GET", "/metrics", **bearer(TOKEN))).status == 200


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer é",
    ],
)
async def test_what_is_not_the_token(tmp_path: Path, authorization: str) -> None:
    admin = {"token_file": write(tmp_path, "token", TOKEN)}
    async with Engine() as engine, serving(tmp_path, document(engine, admin=admin)) as running:
        assert (await running.admin("GET", "/v1/fleet", authorization=authorization)).status == 401


async def test_the_token_of_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETLB_TOKEN", TOKEN)
    async with Engine() as engine:
        async with serving(tmp_path, document(engine, admin={"token_env": "HETLB_TOKEN"})) as running:
            assert (await running.admin("GET", "/v1/fleet")).status == 401
            assert (await running.admin("GET", "/v1/fleet", **bearer(TOKEN))).status == 200


async def test_a_token_is_changed_by_a_reload_and_never_dropped_elsewhere_than_on_loopback(
    tmp_path: Path,
) -> None:
    admin = {"host": "0.0.0.0", "token_file": write(tmp_path, "token", TOKEN)}
    async with Engine() as engine, serving(tmp_path, document(engine, admin=admin)) as running:
        write(tmp_path, "token", "another-token")
        assert (await running.admin("POST", "/v1/reload", **bearer(TOKEN))).status == 200
        assert (await running.admin("GET", "/v1/fleet", **bearer(TOKEN))).status == 401
        # The listener is still where it was, so a file that says otherwise does not open it.
        running.rewrite(document(engine))
        reply = await running.admin("POST", "/v1/reload", **bearer("another-token"))
        assert reply.status == 400
        assert "admin.host: expected a loopback address like 127.0.0.1, or a token" in reply.message
        assert (await running.admin("GET", "/v1/fleet")).status == 401


async def test_commands_that_ask_the_listener_take_the_token_from_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    admin = {"token_file": write(tmp_path, "token", TOKEN)}
    async with Engine() as engine, serving(tmp_path, document(engine, admin=admin)) as running:
        url = f"http://127.0.0.1:{running.service.admin.address[1]}"
        for token, code in (("wrong", 2), (TOKEN, 0)):
            monkeypatch.setenv("HETLB_ADMIN_TOKEN", token)
            assert await asyncio.to_thread(main, ["explain", "--url", url]) == code
            if code:
                with pytest.raises(HetlbError, match="status 401"):
                    await fleet_admin(url).__aenter__()
                continue
            async with fleet_admin(url) as asked:
                assert await asked.instances() == ["i0"]
    streams = capfd.readouterr()
    assert "Unauthorized" in streams.err
    assert "no decisions yet" in streams.out
    assert "wrong" not in streams.err


@pytest.mark.parametrize("command", COMMANDS)
def test_no_flag_takes_a_secret(command: str) -> None:
    # It would stand in the process list.
    subparsers = next(a for a in build_parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    options = [o for action in subparsers.choices[command]._actions for o in action.option_strings]
    assert options
    secret = re.compile(r"api-key|secret|password|credential|^--token(?!s)|-token$(?<!per-token)")
    assert all(o.endswith(("-env", "-file")) for o in options if secret.search(o))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8081"}, 200),
        ({"host": "[::1]:8081"}, 200),
        ({"host": "rebound.example:8081"}, 403),
        ({"origin": "https://elsewhere.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "localhost:8081", "origin": "http://localhost:8081"}, 200),
        ({"host": "localhost:8081", "origin": "http://localhost:3000"}, 403),
    ],
)
async def test_web_pages_cannot_use_a_listener_without_a_token(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    async with Engine() as engine, serving(tmp_path, document(engine)) as running:
        assert (await running.admin("GET", "/v1/fleet", **headers)).status == status
        assert (await running.admin("GET", "/healthz", **headers)).status == 200


# --- registration ---


@pytest.mark.parametrize(
    ("networks", "address", "allowed"),
    [
        ([], "10.1.2.3", True),
        ([], "127.0.0.1", True),
        ([], "169.254.169.254", False),
        ([], "fe80::1", False),
        ([], "::ffff:169.254.169.254", False),
        ([], "::a9fe:a9fe", False),
        ([], "::ffff:0:169.254.169.254", False),
        ([], "64:ff9b:1::a9fe:a9fe", False),
        ([], "2001:0:0:0:0:0:5601:5601", False),
        ([], "2001:db8::5efe:a9fe:a9fe", False),
        ([], "2001:db8::200:5efe:a9fe:a9fe", False),
        ([], "fe80::1%1", False),
        ([], "::1", True),
        ([], "2001:db8::1", True),
        ([], "2002:a9fe:a9fe::1", False),
        ([], "64:ff9b::a9fe:a9fe", False),
        ([], "fd00:ec2::254", False),
        ([], "100.100.100.200", False),
        ([], "0.0.0.0", False),
        ([], "::", False),
        ([], "224.0.0.1", False),
        ([], "255.255.255.255", False),
        (["10.0.0.0/8"], "10.1.2.3", True),
        (["10.0.0.0/8"], "::ffff:10.1.2.3", True),
        (["10.0.0.0/8"], "11.0.0.1", False),
        (["10.0.0.0/8"], "::1", False),
        (["10.0.0.0/8", "fd00::/8"], "fd00::7", True),
        (["0.0.0.0/0"], "169.254.169.254", False),
        (["169.254.0.0/16"], "169.254.1.2", True),
        (["169.254.169.254"], "169.254.169.254", True),
        (["fd00::/8"], "fd00:ec2::254", False),
    ],
)
def test_where_instances_may_be_registered(networks: list[str], address: str, allowed: bool) -> None:
    inside = tuple(network_of(text, "") for text in networks)
    if allowed:
        assert allowed_address([address], inside) == address
        return
    with pytest.raises(ConfigError, match=r"^url: expected an address that may be registered \("):
        allowed_address([address], inside)


def test_the_first_address_that_is_allowed_is_taken() -> None:
    networks = (network_of("10.0.0.0/8", ""),)
    assert allowed_address(["192.168.0.1", "10.0.0.2", "10.0.0.3"], networks) == "10.0.0.2"


async def test_a_registered_name_is_resolved_once_and_the_address_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = {"registration": True, "registration_networks": ["127.0.0.0/8"]}
    async with Engine() as engine, Engine() as other:
        port = int(other.url.rpartition(":")[2])
        async with serving(tmp_path, document(engine, admin=admin)) as running:
            resolved: list[str] = []

            async def resolve(url: str) -> list[str]:
                resolved.append(url)
                return ["127.0.0.1"]

            monkeypatch.setattr("hetlb.balancer.fleet.members.addresses", resolve)
            body = {"url": f"http://engine.example:{port}", "model": "m", "name": "new"}
            assert (await running.admin("POST", "/v1/fleet/instances", body)).status == 201
            await running.up("new")
            assert {(await running.ask()).headers["x-hetlb-instance"] for _ in range(4)} == {"i0", "new"}
            assert resolved == [f"http://engine.example:{port}"]
            for visit in other.visits:
                assert f"host: engine.example:{port}\r\n".encode() in visit.head.lower()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"url": "http://192.0.2.1:80"},
            "url: expected an address that may be registered (one in 127.0.0.0/8)",
        ),
        ({"url": "http://169.254.169.254"}, "url: expected an address that may be registered (one in 127"),
        ({"url": "http://[fe80::1]:8000"}, "url: expected an address that may be registered (one in 127"),
        (
            {"url": "http://u:pw@127.0.0.1:1"},
            "url: expected a URL like http://host:8000, got 'http://***@127",
        ),
        ({"url": "gopher://127.0.0.1:1"}, "url: expected a URL like http://host:8000"),
        ({"url": "http://a..b:80"}, "url: expected a host with an address, got 'a..b', which has none"),
        ({"url": "http://127.0.0.1:1", "api_key_file": "/etc/shadow"}, "api_key_file: expected none"),
        ({"url": "http://127.0.0.1:1", "api_key_env": "HOME"}, "api_key_env: expected none"),
        ({"url": "https://127.0.0.1:1", "ca_file": "/etc/passwd"}, "ca_file: expected none"),
    ],
)
async def test_registrations_that_are_refused(tmp_path: Path, body: Any, message: str) -> None:
    admin = {"registration": True, "registration_networks": ["127.0.0.0/8"]}
    async with Engine() as engine, serving(tmp_path, document(engine, admin=admin)) as running:
        reply = await running.admin("POST", "/v1/fleet/instances", body)
        assert reply.status == 400
        assert reply.message.startswith(message)
        assert "pw" not in reply.message
        assert running.names == ["i0"]


# --- keys of engines ---


def keyed(engine: Engine, other: Engine, folder: Path, **tables: Any) -> dict[str, Any]:
    """The first instance has a key of its own, the second its model's."""
    fleet = document(engine, other, **tables)
    fleet["models"][0]["api_key_file"] = write(folder, "model.key", "sk-model\n")
    fleet["models"][0]["instances"][0]["api_key_file"] = write(folder, "engine.key", KEY + "\n")
    return fleet


def authorizations(engine: Engine) -> set[str]:
    found = set()
    for visit in engine.visits:
        for line in visit.head.decode().split("\r\n"):
            if line.lower().startswith(("authorization:", "x-api-key:", "api-key:")):
                found.add(line.partition(": ")[2])
    return found


async def test_every_engine_gets_its_own_key_from_proxy_and_watcher(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two:
        one.key, two.key = KEY, "sk-model"
        async with serving(tmp_path, keyed(one, two, tmp_path)) as running:
            for _ in range(4):
                reply = await running.ask(
                    authorization="Bearer clients-own", x_api_key="clients-other", api_key="third"
                )
                assert reply.status == 200
            models = running.service.availability.models()
            assert [entry["id"] for entry in models] == ["m"]
        assert authorizations(one) == {f"Bearer {KEY}"}
        assert authorizations(two) == {"Bearer sk-model"}
        # Probes, scrapes and requests carry it, every one of them.
        assert all(b"authorization: " in visit.head.lower() for visit in (*one.visits, *two.visits))


async def test_a_key_is_shown_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    admin = {"token_file": write(tmp_path, "token", TOKEN)}
    keys = write(tmp_path, "keys.yaml", yaml.safe_dump([{"name": "ann", "sha256": sha256(CLIENT_KEY)}]))
    async with Engine(plain(b'{"error":"no"}', b"401 Unauthorized")) as one, Engine() as two:
        fleet = keyed(one, two, tmp_path, admin=admin, proxy={"api_keys_file": keys})
        async with serving(tmp_path, fleet) as running:
            keys_shown = (CLIENT_KEY, CLIENT_KEY, "sk-wrong-key")
            seen = [(await running.ask(**bearer(key))).body for key in keys_shown]
            paths = ("/v1/fleet", "/metrics", "/v1/decisions")
            seen += [(await running.admin("GET", path, **bearer(TOKEN))).body for path in paths]
            service = running.service
            shown = [service.fleet, service.access, service._engines, service.scheduling.decisions]
            shown += [vars(running.service), *service.driver.pools.all()]
            seen += [repr(each).encode() for each in shown]
    streams = capfd.readouterr()
    seen += [streams.out.encode(), streams.err.encode(), caplog.text.encode()]
    text = b"\n".join(seen)
    for secret in (KEY, "sk-model", TOKEN, CLIENT_KEY, "sk-wrong-key", sha256(CLIENT_KEY)):
        assert secret.encode() not in text


async def test_a_changed_key_holds_after_a_reload(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two:
        async with serving(tmp_path, keyed(one, two, tmp_path)) as running:
            for _ in range(2):
                await running.ask()
            incarnation = running.instance("i0").incarnation
            write(tmp_path, "engine.key", "sk-second")
            assert (await running.admin("POST", "/v1/reload")).status == 200
            assert running.instance("i0").incarnation == incarnation
            before = len(one.visits)
            for _ in range(2):
                await running.ask()
            await turns_until(lambda: len(one.visits) > before + 4)
            after = {line for visit in one.asked[-1:] for line in visit.head.split(b"\r\n")}
            assert b"authorization: Bearer sk-second" in after
            # A key that cannot be read leaves the last good one.
            (tmp_path / "engine.key").unlink()
            reply = await running.admin("POST", "/v1/reload")
            assert reply.status == 400
            assert "models[0].instances[0].api_key_file: expected a readable file" in reply.message
            for _ in range(2):
                assert (await running.ask()).status == 200
            assert b"authorization: Bearer sk-second" in one.asked[-1].head


async def test_a_key_that_an_engine_refuses_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine() as one, Engine() as two:
        one.key, two.key = "another", "another"
        fleet = keyed(one, two, tmp_path)
        del fleet["models"][0]["api_key_file"]
        async with serving(tmp_path, fleet):
            await turns_until(lambda: one.probes >= 4 and two.probes >= 4)
    assert sorted(said(caplog.records, "API key")) == [
        "i0: refuses the API key (401 at /v1/models)",
        "i1: wants an API key (401 at /v1/models)",
    ]


async def test_the_clients_own_key_goes_through_where_that_is_asked_for(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two:
        fleet = keyed(one, two, tmp_path, proxy={"passthrough_authorization": True})
        del fleet["models"][0]["api_key_file"]
        async with serving(tmp_path, fleet) as running:
            for _ in range(2):
                await running.ask(authorization="Bearer theirs", x_api_key="theirs-too")
        # Not in place of, and not beside, a key of ours.
        assert authorizations(one) == {f"Bearer {KEY}"}
        assert authorizations(two) == {"Bearer theirs", "theirs-too"}


async def test_a_registered_instance_gets_the_key_of_its_model(tmp_path: Path) -> None:
    admin = {"registration": True, "registration_networks": ["127.0.0.0/8"]}
    async with Engine() as one, Engine() as two, Engine() as three:
        three.key = "sk-model"
        async with serving(tmp_path, keyed(one, two, tmp_path, admin=admin)) as running:
            body = {"url": three.url, "model": "m", "name": "new"}
            assert (await running.admin("POST", "/v1/fleet/instances", body)).status == 201
            await running.up("new")
            for _ in range(3):
                assert (await running.ask()).status == 200
        assert three.asked
        assert authorizations(three) == {"Bearer sk-model"}


# --- keys of clients ---


def with_keys(engine: Engine, folder: Path, *keys: dict[str, Any], **tables: Any) -> dict[str, Any]:
    name = write(folder, "keys.yaml", yaml.safe_dump(list(keys)))
    return document(engine, proxy={"api_keys_file": name}, **tables)


ANN = {"name": "ann", "sha256": sha256(CLIENT_KEY)}
BOB = {"name": "bob", "sha256": sha256("sk-bob").upper(), "models": ["other"]}


async def test_without_a_key_no_client_is_let_in(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, with_keys(engine, tmp_path, ANN, BOB)) as running:
        for headers in ({}, bearer("sk-other"), {"authorization": f"Basic {CLIENT_KEY}"}, bearer("")):
            reply = await running.ask(**headers)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            error = reply.json["error"]
            assert (error["type"], error["code"]) == ("AuthenticationError", "invalid_api_key")
            assert reply.headers["x-should-retry"] == "false"
        assert not engine.asked
        assert (await running.ask(**bearer(CLIENT_KEY))).status == 200
        assert (await running.ask(x_api_key=CLIENT_KEY)).status == 200
        assert authorizations(engine) == set()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200), ("GET", "/ping", 200), ("GET", "/version", 401), ("GET", "/v1/models", 401),
        ("GET", "/nothing", 401), ("GET", "/health/", 401), ("POST", "/tokenize", 401),
        ("GET", "/v1/responses/resp_1", 401), ("OPTIONS", "/v1/completions", 401),
    ],
)  # fmt: skip
async def test_what_is_open_without_a_key(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with Engine() as engine, serving(tmp_path, with_keys(engine, tmp_path, ANN)) as running:
        async with Client(running) as client:
            client.send(f"{method} {path} HTTP/1.1\r\nHost: proxy\r\nContent-Length: 0\r\n\r\n".encode())
            assert (await client.answer()).status == status


async def test_a_body_is_not_asked_for_before_the_key_is_known(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, with_keys(engine, tmp_path, ANN)) as running:
        async with Client(running) as client:
            client.send(post(b"", "Expect: 100-continue").replace(b"Content-Length: 0", b"Content-Length: 9"))
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (401, "close")


async def test_a_key_is_for_its_models(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, with_keys(engine, tmp_path, ANN, BOB)) as running:
        async with Client(running) as client:
            key = "Authorization: Bearer sk-bob"
            for body in (
                b'{"model":"m","prompt":"x"}',
                b'{"prompt":"x"}',
                b'{"model":"other","prompt":"x","model":"m"}',
                b'{"model":"other","prompt":"x","mod\\u0065l":"m"}',
            ):
                client.send(post(body, key))
                answer = await client.answer()
                assert answer.status == 403
                assert answer.error["code"] == "model_not_allowed"
            # The same connection goes on, and says what this key may see.
            client.send(f"GET /v1/models HTTP/1.1\r\nHost: p\r\n{key}\r\n\r\n".encode())
            assert json.loads((await client.answer()).body)["data"] == []
            client.send(f"GET /v1/models HTTP/1.1\r\nHost: p\r\nX-Api-Key: {CLIENT_KEY}\r\n\r\n".encode())
            assert len(json.loads((await client.answer()).body)["data"]) == 1
        assert not engine.asked


async def test_a_form_is_for_the_models_of_the_key(tmp_path: Path) -> None:
    part = 'Content-Disposition: form-data; name="{}"\r\n\r\n{}\r\n--b'
    path = "/v1/audio/transcriptions"
    async with Engine() as engine, serving(tmp_path, with_keys(engine, tmp_path, ANN, BOB)) as running:
        async with Client(running) as client:
            for key, parts, status in (
                (CLIENT_KEY, [("model", "m")], 200),
                ("sk-bob", [("model", "m")], 403),
                ("sk-bob", [], 403),
                ("sk-bob", [("model", "other"), ("model", "m")], 400),
            ):
                form = "--b\r\n" + "\r\n".join(part.format(*each) for each in [("file", "wav"), *parts])
                kind = "Content-Type: multipart/form-data; boundary=b"
                client.send(post(f"{form}--\r\n".encode(), f"Authorization: Bearer {key}", kind, path=path))
                assert (await client.answer()).status == status
            # A form in the other coding may read as JSON of another model.
            kind = "Content-Type: application/x-www-form-urlencoded"
            client.send(post(b'{"model":"m","x":"&model=other"}', "X-Api-Key: sk-bob", kind, path=path))
            assert (await client.answer()).status == 415
        assert len(engine.asked) == 1


async def test_the_log_names_the_owner_of_the_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with Engine() as engine:
        async with serving(tmp_path, with_keys(engine, tmp_path, ANN)) as running:
            await running.ask(**bearer(CLIENT_KEY))
        async with serving(tmp_path, document(engine)) as running:
            await running.ask(**bearer(CLIENT_KEY))
    lines = [line for line in capfd.readouterr().err.splitlines() if " request=" in line]
    assert [word for line in lines for word in line.split() if "tenant" in word] == ["tenant=ann", "tenant=-"]
    assert CLIENT_KEY not in "".join(lines)


async def test_keys_are_reloaded_and_a_bad_file_leaves_the_last_good_ones(tmp_path: Path) -> None:
    async with Engine() as engine, serving(tmp_path, with_keys(engine, tmp_path, ANN)) as running:
        carl = {"name": "carl", "sha256": sha256("sk-carl")}
        write(tmp_path, "keys.yaml", yaml.safe_dump([carl]))
        assert (await running.admin("POST", "/v1/reload")).status == 200
        assert (await running.ask(**bearer(CLIENT_KEY))).status == 401
        assert (await running.ask(**bearer("sk-carl"))).status == 200
        for text in ("", "[]", "- {name: x}", "- [", "- sk-carl"):
            write(tmp_path, "keys.yaml", text)
            reply = await running.admin("POST", "/v1/reload")
            assert reply.status == 400
            assert "sk-carl" not in reply.message
            assert (await running.ask(**bearer("sk-carl"))).status == 200
            assert (await running.ask()).status == 401


# --- files that are wrong ---


def problem(folder: Path, text: str) -> str:
    """What is wrong with a fleet file, as one line; every secret in it is `sk-…` and must not be shown."""
    path = folder / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_access(load_fleet(path))
    message = str(caught.value)
    assert message.startswith(f"{folder}/")
    assert "\n" not in message
    assert "sk-" not in message
    return message.partition(": ")[2]


BASE = 'version: 1\nmodels: [{name: m, instances: [{name: a, url: "http://127.0.0.1:9"%s}]%s}]\n'


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("admin: {host: 0.0.0.0}", "admin.host: expected a loopback address like 127.0.0.1, or a token"),
        ("admin: {host: '::'}", "admin.host: expected a loopback address"),
        ("admin: {host: example.org}", "admin.host: expected a loopback address"),
        ("admin: {token_file: a, token_env: B}", "admin.token_file: expected either token_file or token_env"),
        ("admin: {token_file: none}", "admin.token_file: expected a readable file, got "),
        ("admin: {token_file: empty}", "admin.token_file: expected one word of visible ASCII in "),
        ("admin: {token_file: two}", "admin.token_file: expected one word of visible ASCII in "),
        ("admin: {token_file: binary}", "admin.token_file: expected one word of visible ASCII in "),
        ("admin: {token_env: HETLB_NO_SUCH}", "admin.token_env: expected the name of a variable that is set, "
         "got 'HETLB_NO_SUCH'"),
        ("admin: {token_env: sk-pasted}", "admin.token_env: expected the name of a variable that is"),
        ("admin: {token: sk-pasted}", "admin.token: unknown key, expected one of host, port, tls, token"),
        ("admin: {registration_networks: [10.0.0.1/8]}", "admin.registration_networks: expected networks"),
        ("admin: {registration_networks: [intranet]}", "admin.registration_networks: expected networks like"),
        ("proxy: {api_keys_file: keys, passthrough_authorization: true}",
         "proxy.passthrough_authorization: expected false, as proxy.api_keys_file is set, got true"),
        ("proxy: {api_keys_file: none}", "no such file"),
    ],
)  # fmt: skip
def test_tables_that_are_wrong(tmp_path: Path, table: str, message: str) -> None:
    write(tmp_path, "empty", "\n")
    write(tmp_path, "two", "sk-one\nsk-two\n")
    (tmp_path / "binary").write_bytes(b"sk-\xff")
    assert problem(tmp_path, BASE % ("", "") + table).startswith(message)


@pytest.mark.parametrize(
    ("instance", "model", "message"),
    [
        (", api_key_file: none", "", "models[0].instances[0].api_key_file: expected a readable file, got "),
        (", api_key_env: HETLB_NO_SUCH", "", "models[0].instances[0].api_key_env: expected the name of"),
        (", api_key_env: A, api_key_file: b", "", "models[0].instances[0].api_key_file: expected either"),
        (", api_key: sk-inline", "", "models[0].instances[0].api_key: unknown key"),
        ("", ", api_key_file: none", "models[0].api_key_file: expected a readable file"),
        ("", ", api_key_env: A, api_key_file: b", "models[0].api_key_file: expected either api_key_file or"),
    ],
)  # fmt: skip
def test_keys_of_engines_that_are_wrong(tmp_path: Path, instance: str, model: str, message: str) -> None:
    assert problem(tmp_path, BASE % (instance, model)).startswith(message)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (", api_key_file: key", ""),
        ("", "}\nproxy: {passthrough_authorization: true"),
        ("", ", host: 0.0.0.0, token_file: key"),
    ],
)
def test_where_registration_could_do_harm_networks_are_named(tmp_path: Path, model: str, more: str) -> None:
    write(tmp_path, "key", "sk-model")
    text = BASE % ("", model) + "admin: {registration: true%s%s}\n"
    assert problem(tmp_path, text % ("", more)).startswith(
        "admin.registration_networks: expected the networks in which instances may be registered (keys"
    )
    (tmp_path / "fleet.yaml").write_text(text % (", registration_networks: [10.0.0.0/8]", more))
    access = load_access(load_fleet(tmp_path / "fleet.yaml"))
    assert access.model_keys == ({"m": b"sk-model"} if model else {})
    # Without registration there is nothing to confine.
    (tmp_path / "fleet.yaml").write_text((text % ("", more)).replace("registration: true", "port: 1"))
    assert load_access(load_fleet(tmp_path / "fleet.yaml")).networks == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file: expected a list of {name, sha256, models}, at least one"),
        ("{}", "the file: expected a list of"),
        ("- sk-plain", "the file: expected a list of"),
        (f"- {{name: a, sha256: {'0' * 63}g}}", "[0].sha256: expected the 64 hex digits (in quotes) that"),
        ("- {name: a, sha256: sk-plain}", "[0].sha256: expected the 64 hex digits"),
        ("- {name: a, sha256: 17}", "[0].sha256: expected the 64 hex digits"),
        ("- {name: a}", "[0].sha256: expected a value, but the key is missing"),
        ("- {name: a, key: sk-plain}", "[0].key: unknown key, expected one of name, sha256, models"),
        (f"- {{name: 'a b', sha256: '{'a' * 64}'}}", "[0].name: expected letters, digits and . _ -"),
        (f"- {{name: a, sha256: '{'a' * 64}', models: []}}", "[0].models: expected at least one model"),
        (f"- {{name: a, sha256: '{'a' * 64}'}}\n- {{name: b, sha256: '{'A' * 64}'}}",
         "[1].sha256: expected every key once"),
        (f"- {{name: a, sha256: '{'a' * 64}', limits: {{in_flight: 1}}}}\n"
         f"- {{name: a, sha256: '{'b' * 64}'}}\n"
         f"- {{name: a, sha256: '{'c' * 64}', limits: {{in_flight: 2}}}}",
         "[2].limits: expected the ones of the other key named a, or none"),
    ],
)  # fmt: skip
def test_keys_of_clients_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "keys.yaml", text)
    assert problem(tmp_path, BASE % ("", "") + "proxy: {api_keys_file: keys.yaml}").startswith(message)


def test_nothing_is_read_for_a_fleet_that_is_not_served(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(BASE % (", api_key_file: none", ", api_key_env: NOT_SET") + "admin: {token_file: none}\n")
    assert len(load_fleet(path).instances) == 1


def test_a_repr_shows_no_key() -> None:
    assert "sk-" not in repr(EngineAccess(b"Bearer sk-secret"))


@pytest.mark.parametrize("status", [b"401 Unauthorized", b"403 Forbidden"])
async def test_no_work_goes_to_a_server_that_refuses_the_key_of_hetlb(tmp_path: Path, status: bytes) -> None:
    """It says so at its list of models, before the first client. Once it takes the key it gets work."""
    async with Engine() as locked, Engine() as two:
        locked.key, two.key, locked.key_status = "sk-another", "sk-model", status
        async with serving(tmp_path, keyed(locked, two, tmp_path, scrape={"interval_s": 0.1})) as running:
            for _ in range(6):
                assert (await running.ask()).status == 200
            assert not locked.asked
            found, code = (await running.admin("GET", "/v1/status")).json, status[:3].decode()
            assert [each["cause"] for each in found["causes"]] == ["key_refused"]
            assert f"i0 refuses hetlb's key ({code})" in found["advice"]
            locked.key = KEY
            await turns_until(lambda: running.instance("i0").evidence.health.state is Health.UP)


async def test_a_server_that_keeps_its_list_from_a_good_key_gets_work(tmp_path: Path) -> None:
    async with Engine() as one, Engine() as two:
        one.key, two.key, one.served = KEY, "sk-model", None
        async with serving(tmp_path, keyed(one, two, tmp_path, scrape={"interval_s": 0.1})) as running:
            assert (await running.admin("GET", "/v1/status")).json["causes"] == []
            before = len(one.asked)
            for _ in range(6):
                assert (await running.ask()).status == 200
            assert len(one.asked) > before
