"""Planted mistakes: of a file, refused in one line; of a server, named by `doctor` and by `status` alike.

And right fleets: `doctor` calls none of them wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from cli.test_doctor import GOOD, MODELS, NEXT_STEPS, Plan, server, wrong
from helpers import asked_until, free_port, turns_until
from proxy.services import Engine, serving
from proxy.test_tls import Authority

from hetlb.cli.main import main

TWO = "models: [{name: m, instances: [{name: a, url: 'http://a:1'}, {name: b, url: 'http://b:1'}]}]\n"


def one(more: str = "", model: str = "", url: str = "http://a:1") -> str:
    return f"models: [{{name: m{model}, instances: [{{name: a, url: '{url}'{more}}}]}}]\n"


#: A fleet file (without its version), and what the line about it says.
FILES = {
    "a list": ("- a\n", "line"),
    "a tab": ("\tmodels: []\n", "found a tab character"),
    "a bracket that is open": ("models: [{name: m\n", "expected valid YAML"),
    "a key twice": (TWO + "listen: {port: 1}\nlisten: {port: 2}\n", "the key 'listen' stands here twice"),
    "no models": ("watch: true\n", "models: expected a value, but the key is missing"),
    "an empty list of models": ("models: []\n", "models: expected at least one model"),
    "models as a mapping": ("models: {name: m}\n", "models: expected a list"),
    "a table misspelt": (TWO + "listn: {port: 1}\n", "did you mean listen?"),
    "a key misspelt": (TWO + "listen: {prt: 1}\n", "did you mean port?"),
    "a key of an instance misspelt": (one(", max_num_seq: 2"), "did you mean max_num_seqs?"),
    "a port that is text": (TWO + "listen: {port: http}\n", "listen.port: expected a whole number"),
    "a port too large": (TWO + "listen: {port: 70000}\n", "<= 65535, got 70000"),
    "two listeners at one port": (TWO + "listen: {port: 8081}\n", "admin.port: expected another than"),
    "an instance twice": (TWO.replace("name: b", "name: a"), "expected a name used once"),
    "an address twice": (TWO.replace("b:1", "a:1"), "expected an address used once"),
    "no scheme": (one(url="a:1"), "did you mean http://a:1?"),
    "another scheme": (one(url="ftp://a:1"), "expected a URL like http://host:8000"),
    "a path": (one(url="http://a:1/v1/chat/completions"), "expected a URL like"),
    "IPv6 without brackets": (one(url="http://::1:8000"), "expected a URL like"),
    "no url": (TWO.replace(", url: 'http://a:1'", ""), "url: expected the server's URL"),
    "a placeholder": (one(url="http://h100-0.invalid:8000"), "expected the host in place of"),
    "a weight of 0": (one(", weight: 0"), "weight: expected a number > 0"),
    "a weight that is no number": (one(", weight: .nan"), "weight: expected a finite number"),
    "slots with a point": (one(", max_num_seqs: 2.5"), "max_num_seqs: expected a whole number"),
    "no such profile": (one(", profile: no.yaml"), "no.yaml"),
    "no such role": (one(", role: prefil"), "did you mean prefill?"),
    "two keys": (one(", api_key_env: X, api_key_file: y"), "expected either"),
    "no such key file": (one(", api_key_file: y"), "api_key_file: expected a readable file"),
    "no such file of clients' keys": (TWO + "proxy: {api_keys_file: y.yaml}\n", "y.yaml: no such file"),
    "an alias that is a model": (one(model=", aliases: [m]"), "aliases: expected names used once"),
    "a fallback to nothing": (one(model=", fallback: z"), "fallback: expected another model"),
    "a canary that is no instance": (one(model=", canary: {instance: b, share: 0.1}"), "expected one of a"),
    "a canary of more than all": (one(model=", canary: {instance: a, share: 5}"), "canary.share: expected"),
    "a pattern": ("models: [{name: 'm*', instances: [{url: 'http://a:1'}]}]\n", "got the pattern 'm*'"),
    "a target below zero": (one(model=", classes: {a: {ttft_ms: -5}}"), "ttft_ms: expected a number"),
    "a background class with targets": (
        one(model=", classes: {a: {ttft_ms: 5, background: true}}"),
        "expected either targets or background",
    ),
    "no such connector": (one(model=", kv_transfer: nixll"), "expected nixl or mooncake"),
    "no such policy": (TWO + "policy: {name: hetlbb}\n", "did you mean hetlb?"),
    "another case": (TWO + "policy: {name: HETLB}\n", "did you mean hetlb?"),
    "another hyphen": (TWO + "policy: {name: Least_Requests}\n", "did you mean least-requests?"),
    "a key with hyphens": (one(", max-num-seqs: 2"), "did you mean max_num_seqs?"),
    "servers for instances": ("models: [{name: m, servers: [{url: 'http://a:1'}]}]\n", "unknown key"),
    "instances beside models": (TWO + "instances: [{url: 'http://a:1'}]\n", "instances: unknown key"),
    "URLs alone": ("models: [{name: m, instances: ['http://a:1']}]\n", "expected a mapping of keys"),
    "an address for listen": (TWO + "listen: 0.0.0.0:8080\n", "listen: expected a mapping of keys"),
    "a unit": (TWO + "queue: {timeout_s: 5s}\n", "queue.timeout_s: expected a number, got '5s'"),
    "a share in percent": (
        one(model=", canary: {instance: a, share: 5%}"),
        "canary.share: expected a number",
    ),
    "a variable": (one(url="http://${HOST}:8000"), "expected a URL like"),
    "a model twice": (
        "models: [{name: m, instances: [{url: 'http://a:1'}]}, {name: m, instances: [{url: 'http://b:1'}]}]\n",
        "expected a name used once",
    ),
    "one alias for two": (
        "models: [{name: m, aliases: [x], instances: [{url: 'http://a:1'}]},"
        " {name: n, aliases: [x], instances: [{url: 'http://b:1'}]}]\n",
        "models[1].aliases: expected names used once",
    ),
    "an authority without TLS": (one(", ca_file: c.pem"), "expected none unless the url begins with https"),
    "a role without a connector": (one(", role: prefill"), "role: expected both without kv_transfer"),
    "a key of the wrong table": (TWO + "proxy: {log_format: json}\n", "did you mean request_log_format?"),
    "no such weight": (TWO + "policy: {weights: {first_token: 1}}\n", "did you mean first_token_s?"),
    "no such predictor": (TWO + "policy: {predictor: magic}\n", "predictor: expected one of"),
    "a plan of another fleet": (TWO + "policy: {worth: {z: 1}}\n", "policy.worth: expected one of a, b"),
    "a time below zero": (TWO + "queue: {timeout_s: -1}\n", "queue.timeout_s: expected a number > 0"),
    "no interval": (TWO + "scrape: {interval_s: 0}\n", "scrape.interval_s: expected a number > 0"),
    "a header with a space": (TWO + "proxy: {session_header: 'x y'}\n", "expected the name of a header"),
    "a header of the message": (TWO + "proxy: {forward_headers: [host]}\n", "expected one that neither"),
    "an origin without a scheme": (
        TWO + "proxy: {cors_origins: [chat.example]}\n",
        "expected an origin like",
    ),
    "a network that is none": (TWO + "proxy: {trusted_proxies: [300.0.0.0/8]}\n", "expected networks like"),
    "a log format": (TWO + "proxy: {request_log_format: xml}\n", "expected keyvalue or json"),
    "half a certificate": (TWO + "listen: {tls: {cert: a.pem}}\n", "listen.tls.key: expected a value"),
    "an open admin listener": (TWO + "admin: {host: 0.0.0.0}\n", "admin.host: expected a loopback address"),
    "a shared view by HTTP": (TWO + "shared: {url: 'http://x'}\n", "shared.url: expected redis://"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_mistake_in_a_file_is_one_line_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text, said = FILES[name]
    monkeypatch.chdir(tmp_path)
    Path("fleet.yaml").write_text(f"version: 1\n{text}")
    assert main(["serve", "--config", "fleet.yaml", "--check"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert line.startswith("hetlb serve: ")
    assert ".yaml" in line


def test_a_version_and_an_empty_file_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    for text, said in (
        ("version: 2\n" + TWO, "version: expected 1"),
        (TWO, "version: "),
        ("", "an empty file"),
    ):
        path.write_text(text)
        assert main(["serve", "--config", str(path), "--check"]) == 2
        assert said in capsys.readouterr().err


async def test_a_gpu_that_decides_nothing_is_told(tmp_path: Path) -> None:
    async with server(GOOD) as url:
        [found] = await wrong(tmp_path, [url], 1, {"gpu": "H10O"})
        assert found["name"] == "GPU of s0"
        assert "got 'H10O'; did you mean H100 or" in found["found"]
        assert await wrong(tmp_path, [url], 0, {"gpu": "NVIDIA H100 80GB HBM3"}) == []


# --- servers ---

PAGE = """vllm:num_requests_running{{engine="0"}} 0
vllm:num_requests_waiting{{engine="0"}} 0
vllm:{usage}{{engine="0"}} 0
vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="{blocks}",enable_prefix_caching="True"}} 1
process_start_time_seconds {began}
"""
SGLANG_2024 = 'sglang:num_running_req{name="m"} 0\nsglang:token_usage{name="m"} 0.1\n'


def page(blocks: int = 1000, usage: str = "kv_cache_usage_perc", began: float = 5.0, more: str = "") -> Plan:
    """A server whose pages are all its own."""
    text = PAGE.format(blocks=blocks, usage=usage, began=began) + more
    pages = (
        ("/health", ""),
        ("/metrics", text),
        ("/v1/models", MODELS),
        ("/version", '{"version": "0.32.0"}'),
    )
    return replace(GOOD, pages=pages)


@dataclass(frozen=True)
class Planted:
    """A server with one mistake: its check, what is found, the next step; the cause that `status` names."""

    plan: Plan
    check: str
    found: str
    advice: str
    cause: str = ""


SERVERS = {
    "another model": Planted(
        replace(GOOD, model="other"), "model", "serves other, not m", "--served-model-name m", "other_model"
    ),
    "a key": Planted(replace(GOOD, key="k"), "key", "refuses hetlb's key (401", "--api-key"),
    "no metrics": Planted(replace(GOOD, metrics=False), "metrics", "status 404", "--disable-log-stats"),
    "SGLang of 2024": Planted(
        replace(GOOD, pages=(("/health", ""), ("/metrics", SGLANG_2024), ("/v1/models", MODELS))),
        "metrics",
        "names of SGLang, but not sglang:num_running_reqs, sglang:num_queue_reqs",
        "upgrade SGLang",
        "no_load",
    ),
    "a KV cache of 512 tokens": Planted(
        page(blocks=32),
        "KV cache",
        "the KV cache holds only 512 tokens",
        "gpu-memory-utilization",
        "small_cache",
    ),
    "an old vLLM": Planted(replace(GOOD, version="0.6.1"), "version", "vLLM 0.6.1", "upgrade it to 0.8"),
    "metrics of another vLLM": Planted(
        page(usage="gpu_cache_usage_perc"),
        "version",
        "names of an older one",
        "which server answers /metrics",
    ),
    "a clock": Planted(replace(GOOD, ahead_s=90.0), "clock", "+90 s", "NTP"),
    "a proxy": Planted(replace(GOOD, server="nginx/1.25"), "direct way", "nginx/1.25", "reach each engine"),
    "several behind one address": Planted(
        replace(GOOD, several=True), "direct way", "two processes", "itself"
    ),
    "ill": Planted(replace(GOOD, health=503), "address", "/health answers 503", "has loaded", "dead"),
    "gated": Planted(
        replace(GOOD, health=403), "address", "/health answers 403", "let that path through", "dead"
    ),
    "a loading gateway": Planted(replace(GOOD, down=503), "address", "/health answers 503", "loaded", "dead"),
    "a log-in": Planted(replace(GOOD, down=302), "address", "no engine", "without a path", "dead"),
    "asleep": Planted(
        replace(GOOD, pages=(*NEXT_STEPS["asleep"][0], ("/v1/models", MODELS))), "sleep", "sleeps", "wake_up"
    ),
    "slots": Planted(
        replace(GOOD, running=40), "slots", "40 requests run, max_num_seqs states 32", "--max-num-seqs"
    ),
    "other weights": Planted(replace(GOOD, root="org/another"), "weights of m", "org/another", "one model"),
    "other caching": Planted(replace(GOOD, caches=False), "prefix caching of m", "off: s1", "everywhere"),
    "a page of nothing": Planted(
        replace(GOOD, pages=(("/docs", "x"),)), "address", "no engine", "without a path", "dead"
    ),
    "Ollama": Planted(
        replace(GOOD, pages=(("/", "Ollama is running"),)),
        "address",
        "Ollama answers there",
        "vllm serve",
        "dead",
    ),
}


def stated(name: str) -> dict[str, Any]:
    return {"max_num_seqs": 32} if name == "slots" else {}


@pytest.mark.parametrize("name", SERVERS)
async def test_a_mistake_at_a_server_is_found_and_no_other(tmp_path: Path, name: str) -> None:
    planted = SERVERS[name]
    async with server(GOOD) as right, server(planted.plan) as bad:
        [found] = await wrong(tmp_path, [right, bad], 1, stated(name))
        assert found["name"].startswith(planted.check)
        assert planted.found in found["found"]
        assert planted.advice in found["advice"]
        if planted.cause:
            await same_words(tmp_path, [right, bad], planted.cause, found)


async def same_words(folder: Path, urls: list[str], cause: str, found: dict[str, Any]) -> None:
    """Serve the fleet, and compare what `status` says of its last instance."""
    instances = [{"name": f"s{i}", "url": url} for i, url in enumerate(urls)]
    tables = {"version": 1, "listen": {"port": 0}, "admin": {"port": 0}, "scrape": {"interval_s": 0.05}}
    async with serving(folder, {**tables, "models": [{"name": "m", "instances": instances}]}) as running:
        causes: list[dict[str, Any]] = []

        async def named() -> bool:
            causes[:] = (await running.admin("GET", "/v1/status")).json["causes"]
            return any((each["cause"], each["instance"]) == (cause, "s1") for each in causes)

        await asked_until(named)
    [told] = [each for each in causes if each["cause"] == cause]
    advice = told["advice"].removesuffix(".")
    if cause == "dead" and "/health" not in found["found"]:
        return  # `doctor` looks at more pages of what is no engine
    assert (advice[:1].lower() + advice[1:]) == found["advice"]
    assert found["found"].removeprefix(f"{urls[1]}: ") in told["sentence"]


async def test_a_slow_health_page_is_too_slow_for_both(tmp_path: Path) -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_get("/health", slow)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with server(GOOD) as right:
            [found] = await wrong(tmp_path, [right, url], 1, scrape={"timeout_s": 0.3})
            assert found["found"] == f"{url}: no answer to /health within 0.3 s"
            assert "scrape.timeout_s" in found["advice"]
    finally:
        await runner.cleanup()


async def test_nothing_at_an_address_is_told_alike(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    async with server(GOOD) as right:
        [found] = await wrong(tmp_path, [right, url], 1)
        assert found["found"] == f"{url}: connection refused"
        assert found["advice"].startswith("start it, wait if it is loading, or check its network")


async def test_an_instance_that_is_hetlb_is_told_to_have_the_wrong_address(tmp_path: Path) -> None:
    port = free_port()
    async with server(GOOD) as right:
        instances = [{"name": "a", "url": right}, {"name": "bad", "url": f"http://127.0.0.1:{port}"}]
        tables = {
            "version": 1,
            "listen": {"port": port},
            "admin": {"port": 0},
            "scrape": {"interval_s": 0.05},
        }
        async with serving(
            tmp_path, {**tables, "models": [{"name": "m", "instances": instances}]}
        ) as running:
            await turns_until(lambda: running.instance("bad").routable)
            running.service.scheduling.came_back("bad")
            status = (await running.admin("GET", "/v1/status")).json
    [cause] = [each for each in status["causes"] if each["cause"] == "own_address"]
    assert cause["sentence"] == "bad is hetlb's own address, or leads back to it"
    assert cause["advice"] == "Give the address of the engine in its url."
    assert status["state"] == "degraded"


async def test_a_wrong_scheme_and_an_authority_are_found(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with server(GOOD) as right, Engine(tls=authority.server()) as secret:
        mistakes = {
            right.replace("http:", "https:"): ("it does not speak TLS", f"write url: {right}"),
            secret.url.replace("https:", "http:"): ("it closes the connection", f"write url: {secret.url}"),
            secret.url: ("its certificate is not trusted", "set ca_file"),
        }
        for url, (found, advice) in mistakes.items():
            [told] = await wrong(tmp_path, [right, url], 1)
            assert found in told["found"]
            assert advice in told["advice"]


async def test_two_addresses_of_one_server_are_found(tmp_path: Path) -> None:
    async with server(page()) as one:
        [told] = await wrong(tmp_path, [one, one.replace("127.0.0.1", "localhost")], 1)
        assert told["name"] == "one address per server"


# --- right fleets ---

CPU = "process_cpu_seconds_total {}\n"
TOKENS = 'vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 12\nvllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 1000\n'  # noqa: E501
LLAMA = "llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n"
SGLANG = 'sglang:num_running_reqs{model_name="m"} 0\nsglang:num_queue_reqs{model_name="m"} 0\nsglang:token_usage{model_name="m"} 0\n'  # noqa: E501
TRT = "trtllm_num_requests_running 0\ntrtllm_num_requests_waiting 0\ntrtllm_kv_cache_utilization 0\n"
TGI = "tgi_batch_current_size 0\ntgi_queue_size 0\n"


def other(metrics: str) -> Plan:
    return replace(GOOD, pages=(("/health", ""), ("/metrics", metrics), ("/v1/models", MODELS)))


#: Plans of the servers of right fleets.
RIGHT: dict[str, tuple[Plan, ...]] = {
    "one": (GOOD,),
    "two": (GOOD, GOOD),
    "three of one script": (
        page(more=CPU.format(31.5)),
        page(more=CPU.format(30.25)),
        page(more=CPU.format(32)),
    ),
    "two of one tick that differ in cache": (page(blocks=1000), page(blocks=2000)),
    "two of one tick, one with another adapter": (
        page(),
        replace(
            page(),
            pages=(*page().pages[:2], ("/v1/models", MODELS.replace("org/m", "m"))),
        ),
    ),
    "vLLM 0.8": (replace(GOOD, version="0.8.5"),),
    "vLLM 0.9 with its names": (
        replace(
            GOOD, pages=(*page(usage="gpu_cache_usage_perc").pages[:3], ("/version", '{"version": "0.9.2"}'))
        ),
    ),
    "a development version": (replace(GOOD, version="0.32.1.dev12+gabcdef"),),
    "busy": (replace(GOOD, running=30, waiting=0), GOOD),
    "a full queue": (replace(GOOD, running=256, waiting=90), GOOD),
    "no caching anywhere": (replace(GOOD, caches=False), replace(GOOD, caches=False)),
    "a small cache": (page(blocks=256),),
    "SGLang": (other(SGLANG),),
    "llama.cpp": (other(LLAMA),),
    "TensorRT-LLM": (other(TRT),),
    "TGI": (other(TGI),),
    "of two makers": (GOOD, other(SGLANG)),
    "counted tokens": (replace(GOOD, token_s=0.02),),
    "a second behind": (replace(GOOD, ahead_s=-1.0), GOOD),
    "a server without a name": (replace(GOOD, server=""),),
    "five": (GOOD,) * 5,
    "no /health": (replace(GOOD, pages=(("/v1/models", MODELS), ("/metrics", SGLANG))),),
}


@pytest.mark.parametrize("name", RIGHT)
async def test_a_right_fleet_has_nothing_wrong(tmp_path: Path, name: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(server(plan)) for plan in RIGHT[name]]
        found = [
            each
            for each in await _checks(tmp_path, urls)
            if not each["ok"] and not each["name"].startswith(("weights", "prefix caching"))
        ]
    assert found == []


async def _checks(folder: Path, urls: list[str]) -> list[dict[str, Any]]:
    path = folder / "fleet.yaml"
    instances = [{"name": f"s{i}", "url": url} for i, url in enumerate(urls)]
    tables: dict[str, Any] = {"listen": {"port": 0}, "admin": {"port": 0}}
    path.write_text(
        yaml.safe_dump({"version": 1, **tables, "models": [{"name": "m", "instances": instances}]})
    )
    out: list[dict[str, Any]] = []
    from cli.test_doctor import command

    try:
        text = await command("doctor", "--config", str(path), "--json", code=0)
    except AssertionError:
        text = await command("doctor", "--config", str(path), "--json", code=1)
    out += json.loads(text)["checks"]
    return out


def test_there_are_as_many_as_were_planted() -> None:
    assert len(FILES) >= 42
    assert len(SERVERS) >= 19
    assert len(RIGHT) >= 20
