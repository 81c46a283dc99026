"""`hetlb init` and `hetlb doctor` against servers with one mistake each: it is found, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import io
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from aiohttp import web
from helpers import free_port
from proxy.services import Engine, document, serving

from hetlb.balancer.config.fleet import load_fleet
from hetlb.cli.main import main

METRICS = """vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:{usage}{{engine="0"}} 0
vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="1000",enable_prefix_caching="{caches}"}} 1
process_start_time_seconds {began}
"""


@dataclass(frozen=True)
class Plan:
    """A server: what it says and what is wrong with it."""

    model: str = "m"
    root: str = "org/m"
    key: str | None = None
    metrics: bool = True
    caches: bool = True
    version: str = "0.10.0"
    ahead_s: float = 0.0
    server: str = "uvicorn"
    began: float = 0.0
    several: bool = False
    health: int = 200
    #: Status of every page, 0 for its own.
    down: int = 0
    running: int = 0
    waiting: int = 0
    pages: tuple[tuple[str, str], ...] = ()
    #: Seconds between two tokens of its 1,000.
    token_s: float | None = None


@contextlib.asynccontextmanager
async def server(plan: Plan, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server by plan; gives its URL."""
    began = plan.began or 1.7e9 + free_port()
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        headers = {
            "Server": plan.server,
            "Date": email.utils.formatdate(time.time() + plan.ahead_s, usegmt=True),
        }
        if (
            request.path.startswith("/v1")
            and plan.key
            and request.headers.get("Authorization") != f"Bearer {plan.key}"
        ):
            return web.Response(status=401, headers=headers)
        if plan.down:
            return web.Response(status=plan.down, headers={**headers, "Location": "/login"})
        if plan.pages:
            page = dict(plan.pages).get(request.path)
            return web.Response(status=404 if page is None else 200, text=page, headers=headers)
        if request.path == "/v1/models":
            entry = {"id": plan.model, "object": "model", "root": plan.root, "max_model_len": 4096}
            return web.json_response({"object": "list", "data": [entry]}, headers=headers)
        if request.path == "/version":
            return web.json_response({"version": plan.version}, headers=headers)
        if request.path == "/metrics" and plan.metrics:
            asked += 1
            old = plan.version.startswith("0.6")
            text = METRICS.format(
                usage="gpu_cache_usage_perc" if old else "kv_cache_usage_perc",
                caches=plan.caches,
                running=plan.running,
                waiting=plan.waiting,
                began=began + asked * plan.several,
            )
            if plan.token_s is not None:
                name = f"{'time_per_output_token' if old else 'inter_token_latency'}_seconds"
                for kind, value in (("sum", 1000 * plan.token_s), ("count", 1000)):
                    text += f'vllm:{name}_{kind}{{engine="0",model_name="m"}} {value:e}\n'
            return web.Response(text=text, headers=headers)
        return web.Response(status=plan.health if request.path == "/health" else 404, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def command(*arguments: str, code: int) -> str:
    """Output of a command, run in a thread beside the servers."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert await asyncio.to_thread(main, arguments) == code
    return out.getvalue()


async def wrong(
    folder: Path, urls: list[str], code: int, more: dict[str, Any] | None = None, **tables: Any
) -> list[dict[str, Any]]:
    """Return the checks that a fleet of these servers fails; `more` are keys of the last instance."""
    instances: list[dict[str, Any]] = [{"name": f"s{number}", "url": url} for number, url in enumerate(urls)]
    instances[-1] |= more or {}
    path = folder / "fleet.yaml"
    own: dict[str, Any] = {"listen": {"port": 0}, "admin": {"port": 0}}
    document = {"version": 1, **own, "models": [{"name": "m", "instances": instances}], **tables}
    path.write_text(yaml.safe_dump(document))
    document = json.loads(await command("doctor", "--config", str(path), "--json", code=code))
    assert all(each.keys() == {"name", "ok", "found", "advice"} for each in document["checks"])
    bad = [each for each in document["checks"] if not each["ok"]]
    assert all(each["advice"] for each in bad)
    return bad


GOOD = Plan()
STAGES = (
    ("/health", ""),
    ("/metrics", 'hetlb_stage_up{stage="a"} 1\nhetlb_stage_up{stage="b"} 0\nvllm:num_requests_running 0\n'),
    ("/version", '{"version": "hetlb-1"}'),
)
NO_FIGURES = "sglang:cache_hit_rate 0.5\nsglang:gen_throughput 12\n"
ASLEEP = METRICS.format(usage="kv_cache_usage_perc", caches=True, running=0, waiting=0, began=5)
ASLEEP += 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "root": "org/m"}]})
#: Further mistakes: the server, its check, what is found, and the next step.
NEXT_STEPS = {
    "a page of another version": (
        (("/health", ""), ("/metrics", NO_FIGURES)),
        ("metrics of s1", "names of SGLang, but not sglang:num_running_reqs", "upgrade SGLang"),
    ),
    "Ray, whose figures are others": (
        (("/health", ""), ("/metrics", "ray_vllm_e2e_request_latency_seconds_count 1\n")),
        ("metrics of s1", "names of vLLM, but not vllm:num_requests_running", "--disable-log-stats"),
    ),
    "stages down": (STAGES, ("stages of s1", "down: b", "start them (`hetlb stage`)")),
    "asleep": (
        (("/health", ""), ("/metrics", ASLEEP)),
        ("sleep of s1", "its engine sleeps", "/wake_up"),
    ),
}
MISTAKES = {
    "wrong model": (replace(GOOD, model="other"), "model of s1"),
    "key missing": (replace(GOOD, key="k"), "key of s1"),
    "metrics off": (replace(GOOD, metrics=False), "metrics of s1"),
    "clock": (replace(GOOD, ahead_s=90.0), "clock of s1"),
    "proxy in front": (replace(GOOD, server="nginx/1.25"), "direct way to s1"),
    "several behind it": (replace(GOOD, several=True), "direct way to s1"),
    "prefix caching differs": (replace(GOOD, caches=False), "prefix caching of m"),
    "old vLLM": (replace(GOOD, version="0.6.1"), "version of s1"),
    "other weights under one name": (replace(GOOD, root="org/another"), "weights of m"),
    "ill": (replace(GOOD, health=503), "address of s1"),
}


async def test_a_good_fleet_passes(tmp_path: Path) -> None:
    async with server(GOOD) as one, server(GOOD) as two:
        assert await wrong(tmp_path, [one, two], 0) == []


@pytest.mark.parametrize("name", MISTAKES)
async def test_each_mistake_is_found_and_no_other(tmp_path: Path, name: str) -> None:
    plan, check = MISTAKES[name]
    async with server(GOOD) as one, server(plan) as two:
        assert [each["name"] for each in await wrong(tmp_path, [one, two], 1)] == [check]


@pytest.mark.parametrize("name", NEXT_STEPS)
async def test_the_next_step_is_told(tmp_path: Path, name: str) -> None:
    pages, (check, found, advice) = NEXT_STEPS[name]
    async with server(GOOD) as one, server(replace(GOOD, pages=(*pages, ("/v1/models", MODELS)))) as two:
        [bad] = await wrong(tmp_path, [one, two], 1)
    assert (bad["name"], found in bad["found"], advice in bad["advice"]) == (check, True, True)


async def test_a_redirect_and_a_server_of_another_kind_are_found(tmp_path: Path) -> None:
    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPPermanentRedirect("https://engine.example" + request.path)

    app = web.Application()
    app.router.add_get("/health", moved)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        [found] = await wrong(tmp_path, [f"http://127.0.0.1:{runner.addresses[0][1]}"], 1)
    finally:
        await runner.cleanup()
    assert "308, it redirects to https://engine.example/health" in found["found"]
    assert "url: https://engine.example" in found["advice"]
    async with server(replace(GOOD, pages=(("/docs", "an API of another kind"),))) as other:
        [found] = await wrong(tmp_path, [other], 1)
    assert (found["name"], "no engine" in found["found"]) == ("address of s0", True)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"url": "http://::1:8000"}, "instances[0].url: expected"),
        ({"url": "127.0.0.1:8000"}, "instances[0].url: expected"),
        ({"api_key_file": "no-such-key"}, "no-such-key"),
        ({"api_key_env": "HETLB_NO_SUCH_VARIABLE"}, "HETLB_NO_SUCH_VARIABLE"),
        ({"profile": "no-such-profile.yaml"}, "no-such-profile.yaml"),
        ({"url": "https://127.0.0.1:8000", "ca_file": "no-such-ca.pem"}, "no-such-ca.pem"),
        ({"max_num_seq": 32}, "max_num_seqs"),
    ],
)
async def test_a_mistake_in_the_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any], said: str
) -> None:
    instance = {"name": "s0", "url": f"http://127.0.0.1:{free_port()}"} | more
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "models": [{"name": "m", "instances": [instance]}]}))
    await command("doctor", "--config", str(path), code=2)
    [line] = capsys.readouterr().err.splitlines()
    assert said in line, line


async def test_a_wrong_port_is_found(tmp_path: Path) -> None:
    async with server(GOOD) as one:
        [found] = await wrong(tmp_path, [one, f"http://127.0.0.1:{free_port()}"], 1)
    assert found["name"] == "address of s1"
    assert "refused" in found["found"]


async def test_two_urls_of_one_server_are_found(tmp_path: Path) -> None:
    async with server(GOOD) as one:
        [found] = await wrong(tmp_path, [one, one.replace("127.0.0.1", "localhost")], 1)
    assert (found["name"], found["found"]) == ("one address per server", "s0 and s1 are one process")


async def test_two_listeners_at_one_port_are_found(tmp_path: Path) -> None:
    async with server(GOOD) as one:
        [found] = await wrong(tmp_path, [one], 1, listen={"port": 8099}, admin={"port": 8099})
    assert found["name"] == "listeners"


@pytest.mark.parametrize(
    ("answer", "found", "advice"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP", "it is of another program"),
        (bytes.fromhex("000018040000000000") + bytes(24), "not HTTP", "it is of another program"),
        (b"", "closes the connection", "correct the port"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n<html/>", "no engine", "`vllm serve` prints"),
    ],
)
async def test_the_port_of_another_program_is_found(
    tmp_path: Path, answer: bytes, found: str, advice: str
) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
                if not answer.startswith(b"HTTP"):
                    break
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as other:
        [bad] = await wrong(tmp_path, [f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"], 1)
    assert (bad["name"], found in bad["found"], advice in bad["advice"]) == ("address of s0", True, True)


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
async def test_a_listener_that_cannot_listen_is_found(tmp_path: Path, host: str) -> None:
    async with server(GOOD) as one:
        [found] = await wrong(tmp_path, [one], 1, listen={"host": host, "port": 8099})
    assert found["name"] == "listen.port 8099"
    assert "give an address of this machine" in found["advice"]


async def test_an_expired_certificate_of_a_listener_is_found(tmp_path: Path) -> None:
    expected = {
        None: [],
        2020: [("certificate of listen", "certificate has expired", "renew it")],
        2099: [
            (
                "certificate of listen",
                "certificate is not yet valid",
                "wait until it is valid, or correct the clock of this machine",
            )
        ],
    }
    for until, wanted in expected.items():
        certificate(tmp_path, until=until)
        tls = {"cert": str(tmp_path / "server.pem"), "key": str(tmp_path / "server.key")}
        async with server(GOOD) as one:
            found = await wrong(tmp_path, [one], int(until is not None), listen={"port": 0, "tls": tls})
        names = [(each["name"], each["found"], each["advice"]) for each in found]
        assert names == wanted


async def test_a_short_admin_token_that_others_can_try_is_found(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short\n")
    async with server(GOOD) as one:
        for host, found in (("127.0.0.1", []), ("0.0.0.0", ["5 characters: it can be guessed"])):
            admin = {"host": host, "port": 0, "token_file": str(tmp_path / "token")}
            bad = await wrong(tmp_path, [one], int(bool(found)), admin=admin)
            assert [each["found"] for each in bad] == found


async def test_a_publisher_of_kv_events_that_is_not_there_is_found(tmp_path: Path) -> None:
    async with server(GOOD) as one:
        there = one.replace("http:", "tcp:")
        assert await wrong(tmp_path, [one], 0, {"kv_events": there}) == []
        [found] = await wrong(tmp_path, [one], 1, {"kv_events": f"tcp://127.0.0.1:{free_port()}"})
    assert (found["name"], "--kv-events-config" in found["advice"]) == ("KV events of s0", True)


async def test_instances_that_stand_in_no_fleet_file_are_examined(tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    discovery = {"files": [str(more)]}
    async with server(GOOD) as one, server(replace(GOOD, model="z")) as two:
        instance = {"name": "found", "url": two}
        more.write_text(yaml.safe_dump({"models": [{"name": "m", "instances": [instance]}]}))
        [bad] = await wrong(tmp_path, [one], 1, discovery=discovery)
        assert (bad["name"], bad["found"]) == ("model of found", "serves z, not m")
        more.unlink()
        [bad] = await wrong(tmp_path, [one], 1, discovery=discovery)
    assert (bad["name"], bad["found"]) == (f"source files {more}", "no servers")


@pytest.mark.parametrize(
    ("host", "until", "found", "advice"),
    [
        ("127.0.0.1", 2020, "certificate has expired", "renew"),
        ("127.0.0.1", 2099, "certificate is not yet valid", "correct the clock"),
        ("engine.example", None, "is not valid for '127.0.0.1'", "a name that stands in the certificate"),
    ],
)
async def test_what_is_wrong_with_a_certificate_is_told(
    tmp_path: Path, host: str, until: int | None, found: str, advice: str
) -> None:
    context, ca_file = certificate(tmp_path, host, until)
    async with server(GOOD, context) as one:
        [bad] = await wrong(tmp_path, [one], 1, {"ca_file": str(ca_file)})
    assert (found in bad["found"], advice in bad["advice"]) == (True, True), bad


def certificate(
    folder: Path, host: str = "127.0.0.1", until: int | None = None
) -> tuple[ssl.SSLContext, Path]:
    """Return the TLS context of a server, and the file of the authority that signed for it."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ends = None if until is None else datetime(until, 1, 1, tzinfo=UTC)
    begins = None if until is None else datetime(until - 9, 1, 1, tzinfo=UTC)
    issued = authority.issue_cert(host, not_before=begins, not_after=ends)
    issued.configure_cert(context)
    issued.private_key_pem.write_to_path(str(folder / "server.key"))
    for number, pem in enumerate(issued.cert_chain_pems):
        pem.write_to_path(str(folder / "server.pem"), append=number > 0)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return context, folder / "ca.pem"


async def test_the_other_scheme_is_tried(tmp_path: Path) -> None:
    context, ca_file = certificate(tmp_path)
    async with server(GOOD) as plain, server(GOOD, context) as secret:
        for url in (plain.replace("http:", "https:"), secret.replace("https:", "http:")):
            right = plain if url.startswith("https") else secret
            [found] = await wrong(tmp_path, [url], 1)
            assert found["name"] == "address of s0"
            assert f"but it answers at {right}" in found["found"]
            assert found["advice"] == f"write url: {right}"
        [found] = await wrong(tmp_path, [secret], 1)
        assert "its certificate is not trusted" in found["found"]
        assert "set ca_file" in found["advice"]
        assert await wrong(tmp_path, [secret], 0, {"ca_file": str(ca_file)}) == []


@pytest.mark.parametrize("listener", ["listen", "admin"])
async def test_an_instance_that_is_hetlb_itself_is_found(tmp_path: Path, listener: str) -> None:
    port = free_port()
    tables = {"listen": {"port": 0}, "admin": {"port": 0}} | {listener: {"host": "0.0.0.0", "port": port}}
    token = tmp_path / "token"
    token.write_text("t" * 32)
    tables["admin"] |= {"token_file": str(token)} if listener == "admin" else {}
    async with server(GOOD) as one:
        [found] = await wrong(tmp_path, [one, f"http://localhost:{port}"], 1, **tables)
    assert (found["name"], "hetlb's own address" in found["found"]) == ("address of s1", True)


@pytest.mark.parametrize("listener", ["listen", "admin"])
async def test_a_port_that_another_program_holds_is_found(tmp_path: Path, listener: str) -> None:
    async with server(GOOD) as one, server(replace(GOOD, pages=(("/", "x"),))) as other:
        port = int(other.rpartition(":")[2])
        tables = {"listen": {"port": 0}, "admin": {"port": 0}} | {listener: {"port": port}}
        [found] = await wrong(tmp_path, [one], 1, **tables)
    assert found["name"] == "ports"
    assert f"{listener}.port {port}" in found["found"]
    assert "ss -ltnp" in found["advice"]


@pytest.mark.parametrize(
    ("running", "waiting", "stated", "bad"),
    [(40, 0, 32, True), (8, 5, 256, True), (32, 5, 32, False), (8, 0, 256, False), (40, 9, None, False)],
)
async def test_slots_other_than_the_servers_are_found(
    tmp_path: Path, running: int, waiting: int, stated: int | None, bad: bool
) -> None:
    more = {} if stated is None else {"max_num_seqs": stated}
    async with server(replace(GOOD, running=running, waiting=waiting)) as one:
        found = await wrong(tmp_path, [one], int(bad), more)
    assert [each["name"] for each in found] == (["slots of s0"] if bad else [])
    assert all("--max-num-seqs" in each["advice"] for each in found)


@pytest.mark.parametrize(
    ("model", "kv", "found"),
    [
        ("org/m", 16_000, ""),
        ("M-Instruct", 16_000, ""),
        ("org/m-FP8", 16_000, "it is of the model m-fp8, the server has m"),
        ("org/other", 16_000, "it is of the model other, the server has m"),
        ("org/m", 420_000, "it is of a server with 420,000 KV tokens, this one has 16,000"),
        ("org/m", 6_000, "it is of a server with 6,000 KV tokens, this one has 16,000"),
    ],
)
async def test_a_profile_of_another_server_is_found(tmp_path: Path, model: str, kv: int, found: str) -> None:
    profile = {
        "version": 1,
        "name": "p",
        "model": {"name": model},
        "engine": {"kv_cache_tokens": kv, "block_size": 16},
        "prefill": {"k1": 1e-4, "k2": 1e-3, "k3": 0.0, "k4": 1e-2},
        "decode": {"k5": 5e-8, "k6": 6e-5, "k7": 0.0, "k8": 1e-2},
    }
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(profile))
    async with server(GOOD) as one:
        bad = await wrong(tmp_path, [one], int(bool(found)), {"profile": "p.yaml"})
    assert [each["found"] for each in bad] == ([found] if found else [])
    assert all(each["name"] == "profile of s0" and "hetlb profile --url" in each["advice"] for each in bad)


PACE = {
    "version": 1,
    "name": "p",
    "prefill": {"k1": 1e-4, "k2": 1e-3, "k3": 0.0, "k4": 1e-2},
    "decode": {"k5": 5e-8, "k6": 6e-5, "k7": 0.0, "k8": 1e-2},
}


@pytest.mark.parametrize(
    ("slower", "token_s", "right"),
    [
        (1.0, 0.012, True),
        (1.0, 0.05, True),
        (60.0, 0.012, False),
        (2.0, 0.0102, False),
        (1 / 30, 0.02, False),
    ],
)
async def test_a_profile_beside_what_its_engine_counted(
    tmp_path: Path, slower: float, token_s: float, right: bool
) -> None:
    scaled = {kind: {name: slower * k for name, k in PACE[kind].items()} for kind in ("prefill", "decode")}
    profile = PACE | scaled | {"engine": {"max_num_seqs": 64, "kv_cache_tokens": 16_000, "block_size": 16}}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(profile))
    async with server(replace(GOOD, token_s=token_s)) as one:
        bad = await wrong(tmp_path, [one], int(not right), {"profile": "p.yaml"})
    assert [each["name"] for each in bad] == ([] if right else ["profile of s0"])
    assert all("by the server's own count: another GPU or degree" in each["found"] for each in bad)


async def test_a_profile_far_from_the_one_of_another_server_is_found(tmp_path: Path) -> None:
    scaled = {kind: {name: 60 * k for name, k in PACE[kind].items()} for kind in ("prefill", "decode")}
    for name, each in (("p", PACE), ("slow", PACE | scaled)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(each))
    async with server(GOOD) as one, server(GOOD) as two:
        instances = [
            {"name": f"s{number}", "url": url, "profile": f"{name}.yaml"}
            for number, (url, name) in enumerate([(one, "p"), (two, "slow")])
        ]
        bad = await wrong(tmp_path, [one], 1, models=[{"name": "m", "instances": instances}])
    assert [each["name"] for each in bad] == ["profiles of m"]
    assert bad[0]["found"] == "a step of one sequence takes 10.1 ms of s0, 604 ms of s1"


async def test_a_profile_of_another_gpu_and_one_that_fits_badly_are_found(tmp_path: Path) -> None:
    figures = {"mean_error": 0.37, "p95_error": 0.4, "max_error": 0.45, "points": 9}
    profile = {
        "version": 1,
        "name": "p",
        "hardware": {"gpu": "h100_sxm", "gpus": 1},
        "prefill": {"k1": 1e-4, "k2": 1e-3, "k3": 0.0, "k4": 1e-2},
        "decode": {"k5": 5e-8, "k6": 6e-5, "k7": 0.0, "k8": 1e-2},
        "fit": {**figures, "decode": {"form": "paper", **figures}},
    }
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(profile))
    for gpu, found in (("L40S", "it is of the GPU h100_sxm, the instance states L40S"), ("H100", "decode: ")):
        async with server(GOOD) as one:
            bad = await wrong(tmp_path, [one], 1, {"profile": "p.yaml", "gpu": gpu})
        assert [each["found"][: len(found)] for each in bad] == [found]


FOREIGN = {
    "Ollama": (("/", "Ollama is running"), ("/health", "404 page")),
    "Triton": (("/v2", '{"name": "triton", "version": "2.50"}'), ("/health", "")),
    "LiteLLM": (("/health/liveliness", '"I am alive"'), ("/health", ""), ("/v1/models", MODELS)),
    "hetlb's admin listener": (("/v1/fleet", '{"policy": "hetlb", "models": []}'), ("/health", "")),
    "nginx/1.29": (("/", "<h1>Welcome to nginx!</h1>"),),
}


@pytest.mark.parametrize("name", FOREIGN)
async def test_a_foreign_server_is_named(tmp_path: Path, name: str) -> None:
    plan = replace(GOOD, pages=FOREIGN[name], server=name if "/" in name else "uvicorn")
    async with server(GOOD) as one, server(plan) as two:
        [found] = await wrong(tmp_path, [one, two], 1)
    assert found["name"] == "address of s1"
    assert f"{name} answers there" in found["found"]


@pytest.mark.parametrize(
    ("plan", "name", "advice"),
    [
        (
            replace(GOOD, server="llama.cpp", pages=(("/health", ""), ("/v1/models", MODELS))),
            "metrics of s1",
            "with --metrics",
        ),
        (replace(GOOD, server="llama.cpp", down=503), "address of s1", "until it has loaded its model"),
        (replace(GOOD, health=403), "address of s1", "let that path through"),
        (replace(GOOD, down=302), "address of s1", "without a path"),
    ],
    ids=["llama.cpp without figures", "a model that loads", "a gateway", "a page to log in"],
)
async def test_what_is_no_vllm_gets_its_own_next_step(
    tmp_path: Path, plan: Plan, name: str, advice: str
) -> None:
    async with server(GOOD) as one, server(plan) as two:
        [found] = await wrong(tmp_path, [one, two], 1)
    assert found["name"] == name
    assert advice in found["advice"]


async def test_another_hetlb_is_no_engine(tmp_path: Path) -> None:
    (folder := tmp_path / "other").mkdir()
    async with Engine() as engine, serving(folder, document(engine)) as running:
        [found] = await wrong(tmp_path, [f"http://127.0.0.1:{running.port}"], 1)
    assert found["name"] == "address of s0"
    assert "another hetlb answers there" in found["found"]


async def test_a_name_of_several_engines_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = socket.getaddrinfo

    def several(host: str, port: int, *rest: Any, **more: Any) -> list[Any]:
        found = asked("127.0.0.1" if host == "vllm" else host, port, *rest, **more)
        return found + ([(*found[0][:4], ("127.0.0.2", port))] if host == "vllm" else [])

    monkeypatch.setattr(socket, "getaddrinfo", several)
    async with server(GOOD) as one:
        [found] = await wrong(tmp_path, [one.replace("127.0.0.1", "vllm")], 1)
    assert found["name"] == "direct way to s0"
    assert found["found"] == "its name has 2 addresses: 127.0.0.1, 127.0.0.2"
    assert "discovery.dns" in found["advice"]


async def test_times_in_milliseconds_are_found(tmp_path: Path) -> None:
    profile = {"version": 2, "name": "a", "prefill": {"k1": 0.1, "k2": 1, "k3": 0.0, "k4": 10}}
    profile["decode"] = {"k5": 5e-5, "k6": 6e-2, "k7": 0.0, "k8": 1e4}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(profile))
    async with server(GOOD) as one:
        bad = await wrong(tmp_path, [one], 1, {"profile": "p.yaml"}, scrape={"interval_s": 1000})
    times, steps = bad
    assert (times["name"], times["found"]) == ("times", "scrape.interval_s 1000 (default 1)")
    assert steps["name"] == "profile of s0"
    assert "its times are in seconds" in steps["found"]


async def test_targets_in_seconds_are_found(tmp_path: Path) -> None:
    async with server(GOOD) as one:
        classes = {"chat": {"ttft_ms": 0.5}, "slow": {"ttft_ms": 500, "tpot_ms": 50}}
        models = [{"name": "m", "classes": classes, "instances": [{"url": one}]}]
        [found] = await wrong(tmp_path, [one], 1, models=models)
    assert (found["name"], found["found"]) == ("targets of m", "chat: ttft_ms 0.5")
    assert "in milliseconds" in found["advice"]


async def test_a_host_without_an_address_is_found(tmp_path: Path) -> None:
    async with server(GOOD) as one:
        [found] = await wrong(tmp_path, [one, "http://no-such-host.invalid:8000"], 1)
    assert found["name"] == "address of s1"
    assert "correct the host" in found["advice"]


async def test_a_wrong_key_is_found(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("wrong")
    async with server(replace(GOOD, key="right")) as one:
        [found] = await wrong(tmp_path, [one], 1, {"api_key_file": str(tmp_path / "key")})
    assert found["name"] == "key of s0"


async def test_a_running_hetlb_is_asked(tmp_path: Path) -> None:
    """It holds its own ports; another one of the same ports, or an instance that it lost, is named."""

    def fleet(**health: str) -> str:
        instances = [{"name": name, "health": state} for name, state in health.items()]
        return json.dumps({"policy": "hetlb", "models": [{"instances": instances}]})

    async with server(GOOD) as one:
        for document, names in (
            (fleet(s0="up"), []),
            (fleet(other="up"), ["running hetlb"]),
            (fleet(s0="ejected"), ["its instances"]),
        ):
            async with server(replace(GOOD, pages=(("/v1/fleet", document),))) as running:
                port = int(running.rpartition(":")[2])
                found = await wrong(tmp_path, [one], int(bool(names)), admin={"port": port})
                assert [each["name"] for each in found] == names


async def test_init_writes_a_fleet_file_that_doctor_accepts(tmp_path: Path) -> None:
    async with server(GOOD) as one, server(GOOD) as two, server(replace(GOOD, model="n")) as three:
        gone = f"http://127.0.0.1:{free_port()}"
        text = await command("init", one, two + "/v1", three, gone, code=0)
        path = tmp_path / "fleet.yaml"
        # Others of this machine may hold the usual ports.
        path.write_text(text.replace("port: 8080", f"port: {free_port()}").replace("port: 8081", "port: 0"))
        fleet = load_fleet(path)
        assert [(each.model, each.url) for each in fleet.instances] == [("m", one), ("m", two), ("n", three)]
        assert "# vLLM 0.10.0, context 4,096 tokens, KV cache 16,000 tokens, prefix caching on" in text
        assert f"# left out: {gone}: connection refused" in text
        await command("doctor", "--config", str(path), code=0)
        await command("serve", "--config", str(path), "--check", code=0)


async def test_init_of_nothing_that_answers_fails() -> None:
    await command("init", f"http://127.0.0.1:{free_port()}", code=1)
