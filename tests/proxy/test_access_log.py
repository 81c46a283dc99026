"""Lines are written in order by a thread; a reader that is slow or gone costs lines, never the event loop.
A request is one line in either format, whatever its client calls itself, its request and its model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from helpers import most_file_bytes, turns_until
from hypothesis import given
from hypothesis import strategies as st
from proxy.services import Engine, document, serving

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.core.types import Lease, Outcome, Request
from hetlb.balancer.exchange.exchange_states import Phase
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.telemetry.access_log import FORMATS, json_line, keyvalue_line
from hetlb.balancer.telemetry.request_record import RequestRecord
from hetlb.errors import ConfigError
from hetlb.logs import LogWriter, escape


async def test_lines_arrive_whole_and_in_order() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(writing, "test")
    for number in range(500):
        writer.write(f"line={number}\n")
    writer.close()
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert lines.read().split() == [f"line={number}" for number in range(500)]
    assert writer.lost == 0


async def test_a_reader_that_is_gone_costs_lines_only() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = LogWriter(writing, "test")
    writer.write("a\n")
    writer.write("b\n")
    writer.close()
    os.close(writing)
    assert writer.lost == 2


async def test_a_reader_that_does_not_read_blocks_no_request() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(writing, "test")
    for _ in range(2000):
        writer.write("x" * 1000 + "\n")
        writer.flush()
    assert writer.lost > 0
    os.close(reading)
    writer.close()
    os.close(writing)


async def test_after_a_full_disk_lines_begin_anew(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        writer, why = LogWriter(file.fileno(), "test"), list[str]()
        writer.on_lost = why.append
        with most_file_bytes(50):
            writer.write("x" * 99 + "\n")
            writer.flush()
            await turns_until(lambda: why == ["File too large"])
        assert writer.lost == 1
        writer.write("y\n")
        writer.close()
    assert (tmp_path / "log").read_text() == "x" * 50 + "\ny\n"


@given(st.text())
def test_text_from_outside_is_one_harmless_word(text: str) -> None:
    word = escape(text)
    assert word
    assert all("!" <= character <= "~" for character in word)
    assert not set(word) & set('"\\=')


@pytest.mark.parametrize(
    ("text", "word"), [("abc-1", "abc-1"), ("", "-"), ("a\nb=c", "a%0ab%3dc"), ("é", "%c3%a9")]
)
def test_examples(text: str, word: str) -> None:
    assert escape(text) == word


def over(**facts: Any) -> RequestRecord:
    """A request that is over, as it is without `facts`: refused."""
    request = Request(id=1, model=facts.pop("model", "m"), prompt_tokens=7)
    ended = RequestRecord(
        request, Kind.COMPLETION, b"POST", "/v1/completions", "r-1", None, 10.0, request.prompt_tokens
    )
    told = {"outcome": Outcome.REJECTED_FULL, "status": 429, "ended_at": 10.25, **facts}
    for name, value in told.items():
        setattr(ended, name, value)
    return ended


def served() -> RequestRecord:
    lease = Lease(
        1, over().request, "a", 1, work_ns=0, kv_tokens=0, kv_prompt_tokens=0, promised_tokens=0,
        prompt_tokens=7, unread_tokens=0, predicted_output=12.4,
        dispatched_at=10.5,
    )  # fmt: skip
    lease.output_tokens = 5
    return over(
        tenant="ann", lease=lease, outcome=Outcome.OK, ended_in=Phase.STREAMING, status=200, retries=1,
        usage_prompt_tokens=9, cached_tokens=4, dispatched_at=10.5, first_byte_at=11.0, ended_at=12.0,
    )  # fmt: skip


def test_a_line_of_words() -> None:
    assert keyvalue_line(served()) == (
        "time=1970-01-01T00:00:12.000+00:00 level=info client=- "
        "request=r-1 tenant=ann model=m path=/v1/completions instance=a outcome=ok phase=answer status=200 "
        "prompt_tokens=9 cached_tokens=4 output_tokens=5 predicted_output=12 queue_s=0.5000 "
        "ttft_s=1.0000 total_s=2.0000 retries=1\n"
    )
    assert keyvalue_line(over()) == (
        "time=1970-01-01T00:00:10.250+00:00 level=warning client=- "
        "request=r-1 tenant=- model=m path=/v1/completions instance=- outcome=rejected_full phase=queue "
        "status=429 prompt_tokens=7 cached_tokens=- output_tokens=0 predicted_output=0 "
        "queue_s=0.2500 ttft_s=- total_s=0.2500 retries=0\n"
    )


def test_a_line_of_json_has_the_same_keys_and_a_time() -> None:
    document = json.loads(json_line(served(), 1.0e9))
    words = dict(word.split("=") for word in keyvalue_line(served()).split())
    assert list(document) == list(words)
    assert words.pop("time") == "1970-01-01T00:00:12.000+00:00"
    assert (words.pop("client"), document["client"]) == ("-", None)
    assert document["time"] == "2001-09-09T01:46:52.000+00:00"
    for key, word in words.items():
        expected = type(document[key])(word)
        assert document[key] == (pytest.approx(expected, abs=0.5) if key == "predicted_output" else expected)
    rejected = json.loads(json_line(over(), 0.0))
    assert (rejected["tenant"], rejected["instance"], rejected["ttft_s"]) == (None, None, None)
    assert rejected["total_s"] == 0.25


FORGED = 'x\nrequest=forged outcome=ok\r\n{"request":"forged"}\u2028\u0085 a=b"\\'


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_a_client_cannot_forge_a_line(write: Callable[[RequestRecord, float], str]) -> None:
    for name in ("label", "model", "tenant", "path"):
        line = write(over(**{name: FORGED}), 0.0)
        assert line.splitlines() == [line[:-1]]
        assert not line.startswith(("request=forged", '{"request":"forged"'))


@given(st.text(), st.text(), st.none() | st.text())
def test_any_text_is_part_of_one_line(label: str, model: str, tenant: str | None) -> None:
    ended = over(label=label, model=model, tenant=tenant)
    line = keyvalue_line(ended)
    assert line.isascii()
    assert [word.count("=") for word in line.split()] == [1] * 19
    line = json_line(ended, 0.0)
    assert line.splitlines() == [line[:-1]]
    document = json.loads(line)
    if label.isprintable():
        assert document["request"] == label


async def test_the_file_chooses_the_format(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with Engine() as engine:
        fleet = document(engine, proxy={"request_log_format": "json"})
        async with serving(tmp_path, fleet) as running:
            assert (await running.ask(x_request_id="mine")).status == 200
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    logged = json.loads(line)
    assert {key: logged[key] for key in ("request", "model", "instance", "outcome", "status")} == {
        "request": "mine", "model": "m", "instance": "i0", "outcome": "ok", "status": 200,
    }  # fmt: skip
    assert abs(datetime.fromisoformat(logged["time"]) - datetime.now(UTC)) < timedelta(minutes=5)


async def test_a_request_that_does_not_pass_has_an_id_and_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    long = "/v1/" + "x" * 500
    async with Engine() as engine:
        fleet = document(engine, proxy={"request_log_format": "json"})
        async with serving(tmp_path, fleet) as running, aiohttp.ClientSession() as session:
            base = f"http://127.0.0.1:{running.port}"
            for path, status in (("/v1/completions", 400), (long, 404)):
                async with session.post(base + path, data=b"{", headers={"x-request-id": "mine"}) as reply:
                    assert (reply.status, reply.headers["x-request-id"]) == (status, "mine")
            async with session.get(base + "/v1/completions", headers={"x-request-id": "not mine"}) as reply:
                assert (reply.status, reply.headers["allow"]) == (405, "POST")
                made = reply.headers["x-request-id"]
            assert not engine.asked
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith('{"time')]
    assert [(line["request"], line["path"], line["status"]) for line in lines] == [
        ("mine", "/v1/completions", 400),
        ("mine", long[:128] + "...", 404),
        (made, "/v1/completions", 405),
    ]
    assert made.startswith("hetlb-")
    assert {(line["outcome"], line["phase"], line["instance"]) for line in lines} == {
        ("bad_request", "queue", None)
    }
    assert all(line["total_s"] >= 0.0 for line in lines)


async def test_a_key_that_is_wrong_is_not_logged_as_the_one_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    digest = hashlib.sha256(b"sk-a").hexdigest()
    (tmp_path / "keys.yaml").write_text(f"- {{name: alice, sha256: {digest}}}\n")
    async with Engine() as engine:
        fleet = document(engine, proxy={"request_log_format": "json", "api_keys_file": "keys.yaml"})
        async with serving(tmp_path, fleet) as running, aiohttp.ClientSession() as session:
            for key, status in (("sk-a", 400), ("sk-b", 401)):
                headers = {"authorization": f"Bearer {key}"}
                url = f"http://127.0.0.1:{running.port}/v1/completions"
                async with session.post(url, data=b"{", headers=headers) as reply:
                    assert reply.status == status
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith('{"time')]
    assert [(line["status"], line["tenant"]) for line in lines] == [(400, "alice"), (401, None)]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    models = "models: [{name: m, instances: [{url: http://127.0.0.1:1}]}]"
    path.write_text(f"version: 1\n{models}\nproxy: {{request_log_format: xml}}\n")
    with pytest.raises(ConfigError, match=r"fleet.yaml: proxy.request_log_format: .*'xml'"):
        load_fleet(path)


@pytest.mark.parametrize(
    ("trusted", "forwarded", "client"),
    [
        ([], "203.0.113.9", "127.0.0.1"),
        (["127.0.0.0/8"], "203.0.113.9", "203.0.113.9"),
        (["127.0.0.0/8", "10.0.0.0/8"], "198.51.100.1, 203.0.113.9, 10.1.2.3", "203.0.113.9"),
        (["127.0.0.0/8"], "forged, 203.0.113.9", "203.0.113.9"),
        (["127.0.0.0/8"], "x=y z", "127.0.0.1"),
        (["10.0.0.0/8"], "203.0.113.9", "127.0.0.1"),
    ],
)
async def test_the_address_of_a_client_is_before_the_last_trusted_proxy(
    tmp_path: Path, trusted: list[str], forwarded: str, client: str
) -> None:
    async with Engine() as engine:
        fleet = document(engine, proxy={"trusted_proxies": trusted})
        async with serving(tmp_path, fleet) as running:
            records: list[RequestRecord] = []
            running.service.driver.on_ended = records.extend
            await running.ask(X_Forwarded_For=forwarded)
            await turns_until(lambda: bool(running.service.driver.totals.requests and records))
    assert [record.address for record in records] == [client]
