"""Aliases and fallbacks: the engine gets a name that it knows, and everything else as it came."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from helpers import HANG_S, request, turns_until
from hypothesis import given
from hypothesis import strategies as st
from proxy.services import METRICS, Engine, Running, document, serving
from proxy.upstreams import Visit, plain

from hetlb.balancer.clients.model_names import rename_in_form, rename_in_json
from hetlb.balancer.clients.service_classes import ServiceClasses
from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.types import Health, Reject
from hetlb.balancer.http.http1 import GateError, RequestHead
from hetlb.errors import ConfigError


def fleet(large: Engine, small: Engine, **more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "listen": {"port": 0},
        "admin": {"port": 0},
        "scrape": {"interval_s": 0.05},
        "models": [
            {"name": "large", "aliases": ["gpt-4o"], "fallback": "small",
             "instances": [{"name": "l", "url": large.url}]},
            {"name": "small", "instances": [{"name": "s", "url": small.url}]},
        ],
        **more,
    }  # fmt: skip


async def ask(running: Running, model: str, key: str = "") -> tuple[int, str | None]:
    url = f"http://127.0.0.1:{running.port}/v1/chat/completions"
    body = {"model": model, "messages": [{"role": "user", "content": "\u00e9"}], "max_tokens": 5}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as reply:
        return reply.status, reply.headers.get("x-hetlb-instance")


class Keeping(Engine):
    """Its metrics page says when it was started, and it loads and unloads models meanwhile."""

    async def _route(self, visit: Visit) -> None:
        if b"GET /metrics" in visit.head:
            visit.send(plain(METRICS + b"process_start_time_seconds 1.7e+09\n"))
        else:
            await super()._route(visit)


@pytest.mark.parametrize("status", [404, 400, 403])
async def test_an_engine_that_unloads_its_model_is_looked_at_once_it_refuses(
    status: int, tmp_path: Path
) -> None:
    """Its list is read once in ten intervals otherwise: half a minute of 404 for all."""
    async with Keeping() as engine:
        missing = b'{"error":{"message":"The model `m` does not exist.","code":404}}'
        table = document(engine, scrape={"interval_s": 3.0, "timeout_s": HANG_S})
        async with serving(tmp_path, table) as running:
            well, engine.reply = engine.reply, plain(missing, b"%d Refused" % status)
            assert (await running.ask()).status == status  # it still lists the model: the client is told
            engine.served = ""
            asked = []

            async def ask_until_one_waits() -> None:
                while running.instance("i0").evidence.health.state is Health.UP:
                    asked.append((await running.ask()).status)
                    await asyncio.sleep(0.1)

            async with asyncio.timeout(15.0):
                await ask_until_one_waits()
            assert set(asked) <= {status}
            waits = asyncio.create_task(running.ask())
            engine.served, engine.reply = "m", well
            assert (await waits).status == 200


async def test_models_name_the_background_class_that_a_key_may_use(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    hashed = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("all", "some")}
    rows = [{"name": "all", "sha256": hashed["all"]}]
    rows.append({"name": "some", "sha256": hashed["some"], "classes": ["now"]})  # type: ignore[dict-item]
    keys.write_text(yaml.safe_dump(rows))
    async with Engine() as large, Engine() as small:
        large.served, small.served = "large", "small"
        config = fleet(large, small, proxy={"api_keys_file": str(keys)})
        config["models"][0]["classes"] = {"now": {"ttft_ms": 500}, "later": {"background": True}}
        async with serving(tmp_path, config) as running, aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{running.port}/v1/models"
            for key, stated in (("all", "later"), ("some", None)):
                async with session.get(url, headers={"authorization": f"Bearer {key}"}) as reply:
                    entries = {each["id"]: each for each in (await reply.json())["data"]}
                found = {name: entry.get("background_class") for name, entry in entries.items()}
                assert found == {"large": stated, "gpt-4o": stated, "small": None}


async def test_an_alias_and_a_model_that_stands_in(tmp_path: Path) -> None:
    async with Engine() as large, Engine() as small:
        large.served, small.served = "large", "small"
        async with serving(tmp_path, fleet(large, small)) as running:
            assert await ask(running, "gpt-4o") == (200, "l")
            sent = msgspec.json.decode(large.asked[0].body)
            assert sent == {
                "model": "large", "messages": [{"role": "user", "content": "\u00e9"}], "max_tokens": 5,
            }  # fmt: skip
            url = f"http://127.0.0.1:{running.port}/v1/models"
            async with aiohttp.ClientSession() as session, session.get(url) as reply:
                entries = {each["id"]: each for each in (await reply.json())["data"]}
            assert set(entries) == {"large", "small", "gpt-4o"}
            assert entries["gpt-4o"]["root"] == "large"
            await running.admin("PUT", "/v1/fleet/instances/l/state", {"state": "drain"})
            assert await ask(running, "gpt-4o") == (200, "s")
            assert await ask(running, "large") == (200, "s")
            assert msgspec.json.decode(small.asked[-1].body)["model"] == "small"
            await running.admin("PUT", "/v1/fleet/instances/l/state", {"state": "ready"})
            assert await ask(running, "large") == (200, "l")
            assert (await ask(running, "gpt-5"))[0] == 404
            reject = running.scheduler.on_arrival(request(99, model="gpt-5"), running.service.driver.now())[0]
            assert isinstance(reject, Reject)
            assert reject.detail == "The model `gpt-5` does not exist. Valid names: large, small, gpt-4o."


async def test_the_right_to_an_alias(tmp_path: Path) -> None:
    rows = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "models": [model]}
        for name, model in (("a", "gpt-4o"), ("b", "large"), ("c", "small"))
    ]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(rows))
    async with Engine() as large, Engine() as small:
        large.served, small.served = "large", "small"
        tables = fleet(large, small, proxy={"api_keys_file": "keys.yaml"})
        async with serving(tmp_path, tables) as running:
            await turns_until(lambda: len(running.scheduler.fleet.ready) == 2)
            statuses = {(key, model): (await ask(running, model, key))[0]
                        for key in "abc" for model in ("gpt-4o", "large", "small")}  # fmt: skip
    assert {pair for pair, status in statuses.items() if status == 200} == {
        ("a", "gpt-4o"), ("b", "gpt-4o"), ("b", "large"), ("c", "small"),
    }  # fmt: skip
    assert set(statuses.values()) == {200, 403}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(st.dictionaries(st.text(), values), st.text(), st.text())
def test_nothing_but_the_model_changes(document: dict[str, Any], asked: str, model: str) -> None:
    document["model"] = asked
    renamed = msgspec.json.decode(rename_in_json(msgspec.json.encode(document), model))
    assert renamed == {**document, "model": model}
    assert list(renamed) == list(document)


def test_a_body_of_very_many_fields_has_no_alias() -> None:
    """Each of its fields would be an object of its own; as many in one value are none."""
    fields = b",".join(b'"f%07d":1' % n for n in range(100_000))
    with pytest.raises(GateError, match="too many fields"):
        rename_in_json(b'{"model":"a",%b}' % fields, "b")
    body = b'{"model":"a","messages":[{%b}]}' % fields
    assert rename_in_json(body, "b", len(fields)) == body.replace(b'"a"', b'"b"')


def test_the_field_of_a_form() -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ngpt-4o\r\n'
        b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\ngpt-4o\r\n--b--\r\n'
    )
    at = body.index(b"gpt-4o")
    assert rename_in_form(body, at, "gpt-4o", "large") == body.replace(b"gpt-4o", b"large", 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"aliases": ["m"]}, r"models\[0\].aliases: expected names used once, got 'm' again"),
        ({"fallback": "m"}, r"models\[0\].fallback: expected another model of this file, got 'm'"),
        ({"fallback": "none"}, r"models\[0\].fallback: expected another model of this file, got 'none'"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, model: dict[str, Any], message: str) -> None:
    table = {"name": "m", "instances": [{"url": "http://h:1"}], **model}
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"version": 1, "models": [table]}))
    with pytest.raises(ConfigError, match=message):
        load_fleet(tmp_path / "fleet.yaml")


@pytest.mark.parametrize("stated", [b"1.7e308", b"1e-300", b"nan", b"-1", b"inf", b"x"])
def test_a_target_within_which_scores_are_numbers(stated: bytes) -> None:
    head = RequestHead()
    head.fields = {b"x-hetlb-slo-e2e-ms": stated}
    classes = ServiceClasses({"m": {"a": ServiceClass("a", e2e_s=1.0)}})
    with pytest.raises(GateError) as caught:
        classes.of("m", head, None)
    assert caught.value.message == "x-hetlb-slo-e2e-ms: expected milliseconds, 0.001 to 1e+09."
