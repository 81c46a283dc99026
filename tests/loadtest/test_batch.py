"""A batch loses nothing and asks for nothing twice, whatever the server does and whenever it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
from aiohttp import web
from helpers import HANG_S, free_port, turns_until
from hypothesis import given
from hypothesis import strategies as st

from hetlb.cli.main import main
from hetlb.errors import HetlbError, InputError, TraceError
from hetlb.tools.loadtest.batch_files import BatchJob, BatchJournal, read_jobs
from hetlb.tools.loadtest.batch_run import BatchRun

Answer = Callable[[int, dict[str, Any], web.Request], Awaitable[web.StreamResponse]]


def line(number: int, **more: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": f"q{number}"}], "max_tokens": 4}
    request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(request | more)


def batch(folder: Path, count: int) -> tuple[Path, Path]:
    """Return a file of `count` requests, and where its results go."""
    source = folder / "in.jsonl"
    source.write_text("".join(line(number) + "\n" for number in range(count)))
    return source, folder / "out.jsonl"


def results(path: Path) -> dict[str, Any]:
    """Return the results by id; each is there once."""
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert all(each.keys() == {"id", "custom_id", "response", "error"} for each in found)
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found)
    return by_id


async def good(call: int, body: dict[str, Any], request: web.Request) -> web.Response:
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    text = body["messages"][0]["content"]
    choices = [{"index": 0, "message": {"role": "assistant", "content": f"a{text}"}}]
    return web.json_response({"choices": choices, "usage": usage}, headers={"x-request-id": f"i{call}"})


@dataclass
class Server:
    """A server whose `answer` takes the number of a call, its body and the request."""

    answer: Answer
    models: list[dict[str, Any]] | int = field(default_factory=list)
    url: str = ""
    asked: Counter[str] = field(default_factory=Counter)
    headers: list[dict[str, str]] = field(default_factory=list)
    most: int = 0
    #: Times that its models were asked for.
    listed: int = 0
    port: int = 0
    _now: int = 0

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked[body["messages"][0]["content"]] += 1
        self.headers.append(dict(request.headers))
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            return await self.answer(self.asked.total() - 1, body, request)
        finally:
            self._now -= 1

    async def _get(self, _: web.Request) -> web.Response:
        self.listed += 1
        if isinstance(self.models, int):
            return web.Response(status=self.models)
        return web.json_response({"object": "list", "data": self.models})


@contextlib.asynccontextmanager
async def serving(answer: Answer, **more: Any) -> AsyncIterator[Server]:
    server = Server(answer, **more)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server._post)
    app.router.add_get("/v1/models", server._get)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", server.port)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def run(
    url: str,
    source: Path,
    out: Path,
    *,
    lanes: int | None = None,
    timeout_s: float = HANG_S,
    tell: Callable[[str], None] = print,
) -> BatchRun:
    jobs = read_jobs(source)
    journal = BatchJournal(out, {job.custom_id for job in jobs})
    rest = [job for job in jobs if job.custom_id not in journal.ended]
    work = BatchRun(url, rest, journal, timeout_s, "secret", tell)
    try:
        await work.run(lanes)
    finally:
        journal.close()
    return work


async def test_every_request_has_its_answer_in_openais_form(tmp_path: Path) -> None:
    source, out = batch(tmp_path, 40)
    async with serving(good) as server:
        work = await run(server.url, source, out, lanes=8)
    found = results(out)
    assert found.keys() == {f"r{number}" for number in range(40)}
    for number in range(40):
        response = found[f"r{number}"]["response"]
        assert (response["status_code"], found[f"r{number}"]["error"]) == (200, None)
        assert response["body"]["choices"][0]["message"]["content"] == f"aq{number}"
        assert response["request_id"].startswith("i")
    assert set(server.asked.values()) == {1}
    assert server.most <= 8
    assert {each["Authorization"] for each in server.headers} == {"Bearer secret"}
    assert (work.progress.completed, work.progress.failed, work.progress.output_tokens) == (40, 0, 160)


async def test_a_packed_file_is_read(tmp_path: Path) -> None:
    source, out = batch(tmp_path, 3)
    source.write_bytes(gzip.compress(source.read_bytes()))
    async with serving(good) as server:
        await run(server.url, source, out)
    assert results(out).keys() == {"r0", "r1", "r2"}


async def test_errors_stand_at_their_lines_and_only_some_are_asked_again(tmp_path: Path) -> None:
    source, out = batch(tmp_path, 6)
    odd = {"q1": 400, "q2": 500, "q3": 404}

    async def answer(call: int, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        text = body["messages"][0]["content"]
        if text == "q4":
            return web.Response(body=b"<html>")
        if text in odd:
            return web.json_response({"error": {"message": "no"}}, status=odd[text])
        return await good(call, body, request)

    async with serving(answer) as server:
        work = await run(server.url, source, out)
        assert (work.progress.completed, work.progress.failed) == (2, 4)
        found = results(out)
        statuses = {
            name: each["response"] and each["response"]["status_code"] for name, each in found.items()
        }
        assert statuses == {"r0": 200, "r1": 400, "r2": 500, "r3": 404, "r4": None, "r5": 200}
        assert found["r1"]["response"]["body"] == {"error": {"message": "no"}}
        assert found["r4"]["error"]["code"] == "malformed_answer"
        assert server.asked == {"q0": 1, "q1": 1, "q2": 3, "q3": 1, "q4": 1, "q5": 1}
        odd.clear()
        await run(server.url, source, out)  # the server is mended
        assert server.asked["q2"] == 4
        assert server.asked["q4"] == 2
        assert server.asked.total() == 8 + 2
        assert results(out)["r2"]["response"]["status_code"] == 200
        assert results(out)["r1"]["response"]["status_code"] == 400


async def test_the_first_error_is_printed(tmp_path: Path) -> None:
    source, out = batch(tmp_path, 2)

    async def answer(call: int, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such\nmodel"}}, status=404)

    async with serving(answer) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hetlb", "batch", str(source), str(out), "--url", server.url),
            *("--concurrency", "1"),
            stdout=subprocess.PIPE,
        )
        said, _ = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 1
    (line,) = said.decode().splitlines()
    assert line.startswith(f"{out}: 0 answers, 2 errors; the first error: r0: status 404: no such")


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (200, b"null", {}),
        (200, b'"done"', {}),
        (200, b"", {}),
        (200, b'{"error": {"message": "no"}}', {}),
        (200, b'{"a":' * 100_000, {}),
        (302, b"{}", {"location": "/v1/elsewhere"}),
        (400, b"no", {"x-request-id": "\udce9"}),
    ],
)
async def test_what_is_no_answer_is_an_error_of_its_line_alone(
    tmp_path: Path, status: int, body: bytes, headers: dict[str, str]
) -> None:
    source, out = batch(tmp_path, 3)

    async def answer(call: int, asked: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if asked["messages"][0]["content"] != "q1":
            return await good(call, asked, request)
        return web.Response(status=status, body=body, headers=headers, content_type="application/json")

    async with serving(answer) as server:
        work = await run(server.url, source, out)
    assert (work.progress.completed, work.progress.failed) == (2, 1)
    found = results(out)["r1"]
    assert found["error"]["code"] == "malformed_answer" if status == 200 else found["error"] is None
    assert status == 200 or found["response"]["status_code"] == status
    jobs = {job.custom_id for job in read_jobs(source)}
    again = BatchJournal(out, jobs)
    again.close()
    assert (len(again.ended), again.failed) == ((3, 1) if status == 400 else (2, 0))


async def test_a_full_server_is_asked_again_when_it_says(tmp_path: Path) -> None:
    source, out = batch(tmp_path, 3)

    async def answer(call: int, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if server.asked[body["messages"][0]["content"]] > 1:
            return await good(call, body, request)
        headers = [{"Retry-After": "0"}, {"Retry-After": formatdate(0, usegmt=True)}, {}][call]
        return web.Response(status=[503, 429, 503][call], headers=headers)

    async with serving(answer) as server:
        work = await run(server.url, source, out)
    assert work.progress.completed == 3
    assert set(server.asked.values()) == {2}


@pytest.mark.parametrize(
    ("status", "headers"), [(503, {}), (429, {"Retry-After": "0"}), (503, {"Retry-After": "900"})]
)
async def test_a_server_that_is_always_full_ends_the_run(
    tmp_path: Path, status: int, headers: dict[str, str]
) -> None:
    source, out = batch(tmp_path, 8)

    async def answer(call: int, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if call < 2:
            return await good(call, body, request)
        return web.Response(status=status, headers=headers)

    async with serving(answer) as server:
        with pytest.raises(HetlbError, match=rf"status {status} alone, no result for 0\.5 s \(--timeout\)"):
            await asyncio.wait_for(run(server.url, source, out, lanes=4, timeout_s=0.5), HANG_S)
    assert len(results(out)) == 2


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "0"}])
async def test_all_lanes_together_ask_a_full_server_a_few_times(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    """Sends until the first answer, and then all lines are answered."""
    source, out = batch(tmp_path, 200)
    full = asyncio.Event()
    asyncio.get_running_loop().call_later(2.0, full.set)
    before: list[int] = []

    async def answer(call: int, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if full.is_set():
            return await good(call, body, request)
        before.append(call)
        return web.Response(status=503, headers=headers)

    async with serving(answer) as server:
        await run(server.url, source, out, lanes=64)
    assert len(before) <= 8
    assert len(results(out)) == 200


@pytest.mark.parametrize("lanes", [1, 4])
async def test_a_request_that_is_never_answered_costs_itself_alone(tmp_path: Path, lanes: int) -> None:
    source, out = batch(tmp_path, 8)

    async def answer(call: int, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if body["messages"][0]["content"] == "q3":
            await asyncio.Event().wait()
        return await good(call, body, request)

    async with serving(answer) as server:
        work = await run(server.url, source, out, lanes=lanes, timeout_s=1.0)
    found = results(out)
    assert (len(found), work.progress.failed) == (8, 1)
    assert found["r3"]["error"] == {"code": "timeout", "message": "no answer within 1 s"}


async def test_a_server_that_answers_nothing_ends_the_run(tmp_path: Path) -> None:
    source, out = batch(tmp_path, 50)

    async def answer(call: int, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if call < 10:
            return await good(call, body, request)
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(answer) as server:
        with pytest.raises(HetlbError, match=r"no answer for 0\.5 s"):
            await run(server.url, source, out, lanes=10, timeout_s=0.5)
        answered = sum(each["error"] is None for each in results(out).values())
        assert answered == 10
        assert len(results(out)) <= 12
        server.answer = good
        await run(server.url, source, out)
    assert sum(each["error"] is None for each in results(out).values()) == 50


async def test_a_server_that_is_killed_is_waited_for_and_then_given_up(tmp_path: Path) -> None:
    source, out = batch(tmp_path, 30)
    gone = asyncio.Event()

    async def answer(call: int, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if call == 20:
            gone.set()
        if call >= 20:
            await asyncio.Event().wait()
        return await good(call, body, request)

    async with serving(answer) as server:
        running = asyncio.create_task(run(server.url, source, out, lanes=4, timeout_s=1.0))
        await gone.wait()
    with pytest.raises(HetlbError, match="no answer for 1 s"):
        await running
    assert sum(each["error"] is None for each in results(out).values()) == 20


async def test_a_server_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    source, out = batch(tmp_path, 3)
    port = free_port()
    told: list[str] = []
    refused = asyncio.Event()

    def tell(text: str) -> None:
        told.append(text)
        refused.set()

    running = asyncio.create_task(run(f"http://127.0.0.1:{port}", source, out, tell=tell))
    await refused.wait()
    async with serving(good, port=port, models=503) as server:
        await turns_until(lambda: server.listed)
        server.models = [{"id": "m", "background_class": "later"}]
        work = await running
    assert work.progress.completed == 3
    assert {each["x-hetlb-class"] for each in server.headers} == {"later"}
    assert len(told) == 1
    assert re.fullmatch(
        rf"http://127.0.0.1:{port}: .*refused.*; it is asked again for .* s \(--timeout\)", told[0]
    )


async def test_a_server_that_never_comes_ends_the_run(tmp_path: Path) -> None:
    source, out = batch(tmp_path, 3)
    with pytest.raises(HetlbError, match=r"no answer for 0\.3 s \(--timeout\)"):
        await run(f"http://127.0.0.1:{free_port()}", source, out, timeout_s=0.3)
    assert results(out) == {}


async def test_a_certificate_that_is_not_trusted_ends_the_run_at_once(tmp_path: Path) -> None:
    """It stays so: the run does not ask again for the whole time-out."""
    source, out = batch(tmp_path, 3)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(HetlbError, match=r"its certificate is not trusted: .*SSL_CERT_FILE"):
            await run(url, source, out, timeout_s=HANG_S)


@pytest.mark.parametrize("status", [200, 404])
async def test_hetlbs_background_class_is_taken_where_it_is_stated(tmp_path: Path, status: int) -> None:
    source, out = batch(tmp_path, 2)
    stated: Any = [{"id": "m", "background_class": "later"}, {"id": "other", "background_class": "x"}]
    async with serving(good, models=stated if status == 200 else status) as server:
        await run(server.url, source, out)
    classes = {each.get("x-hetlb-class") for each in server.headers}
    assert classes == ({"later"} if status == 200 else {None})


def test_a_full_disk_hinders_no_new_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half line goes without another file; to leave out results in the middle takes one: one line."""

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hetlb.tools.loadtest.batch_files.whole_file", full)
    out = tmp_path / "out.jsonl"
    lines = [
        json.dumps({"custom_id": f"r{number}", "response": {"status_code": status}}) + "\n"
        for number, status in enumerate((200, 503, 200))
    ]
    out.write_text(lines[0] + lines[2][:9])
    journal = BatchJournal(out, {"r0", "r1", "r2"})
    journal.close()
    assert (journal.ended, out.read_text()) == ({"r0"}, lines[0])
    out.write_text("".join(lines))
    with pytest.raises(InputError, match="expected a file that can be written anew: No space left"):
        BatchJournal(out, {"r0", "r1", "r2"})
    assert out.read_text() == "".join(lines)


@given(st.integers(0, 10_000))
def test_a_half_written_line_is_asked_again(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """A process may be killed at any byte."""
    out = tmp_path_factory.mktemp("cut") / "out.jsonl"
    jobs = [BatchJob(f"r{number}", "/v1/completions", msgspec.Raw(b"{}")) for number in range(20)]
    known = {job.custom_id for job in jobs}
    journal = BatchJournal(out, known)
    for job in jobs:
        journal.answered(job, 200, "", b'{"text": "two\\nlines"}')
    journal.close()
    data = out.read_bytes()
    out.write_bytes(data[: cut % (len(data) + 1)])
    whole = out.read_bytes().count(b"\n")
    journal = BatchJournal(out, known)
    assert journal.ended == {f"r{number}" for number in range(whole)}
    for job in jobs:
        if job.custom_id not in journal.ended:
            journal.answered(job, 200, "", b"{}")
    journal.close()
    assert results(out).keys() == known


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected requests of OpenAI's batch"),
        ("{}", "line 1: expected a request of OpenAI's batch: .*custom_id"),
        ("nothing", "line 1: expected a request"),
        (line(1) + "\n" + line(1), "line 2: custom_id: expected each once, got 'r1' again"),
        (line(1, method="GET"), "line 1: method: expected POST, got 'GET'"),
        (line(1, url="http://elsewhere/v1"), "line 1: url: expected a path like"),
        (line(1, body={"stream": True}), r"line 1: body\.stream: expected false"),
        (line(1, body=5), "line 1: expected a request"),
    ],
)
def test_a_batch_that_cannot_be_sent_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        read_jobs(path)
    assert "\n" not in str(caught.value)


def test_results_of_another_batch_are_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = batch(tmp_path, 2)
    for text, message in (
        ('{"id": "x", "custom_id": "other", "response": null, "error": null}\n', "got 'other'"),
        ("# notes\n", "expected results of a batch"),
    ):
        out.write_text(text)
        assert main(["batch", str(source), str(out), "--url", "http://127.0.0.1:1"]) == 2
        assert message in capsys.readouterr().err
        assert out.read_text() == text
    assert main(["batch", str(source), str(source), "--url", "http://127.0.0.1:1"]) == 2
    assert "expected another file" in capsys.readouterr().err
    out.unlink()
    journal = BatchJournal(out, {"r0"})
    assert main(["batch", str(source), str(out), "--url", "http://127.0.0.1:1"]) == 2
    assert "expected no other batch that writes to it" in capsys.readouterr().err
    journal.close()
    assert main(["batch", str(source), str(out), "--url", "http://127.0.0.1:1", "--timeout", "0.1"]) == 1
    assert "0 of 2 results are in" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_stopped_at_any_time_it_goes_on_where_it_was(tmp_path: Path, number: int) -> None:
    source, out = batch(tmp_path, 60)
    halfway = asyncio.Event()

    async def answer(call: int, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if call >= 30 and not halfway.is_set():
            halfway.set()
            await asyncio.Event().wait()
        return await good(call, body, request)

    async def started(*flags: str) -> tuple[asyncio.subprocess.Process, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hetlb", "batch", str(source), str(out), "--url", f"{server.url}/v1/"),
            *("--concurrency", "4", *flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OPENAI_API_KEY": "k"},
        )
        if not halfway.is_set():
            await halfway.wait()
            process.send_signal(number)
        said, err = await asyncio.wait_for(process.communicate(), HANG_S)
        return process, said.decode(), err.decode()

    async with serving(answer) as server:
        process, said, err = await started()
        before = len(results(out))
        assert before >= 27
        if number != signal.SIGKILL:
            assert (process.returncode, said) == (1, "")
            assert (
                err
                == f"hetlb batch: interrupted; {before} of 60 results are in {out}: run it again to go on\n"
            )
        process, said, err = await started("--json")
    assert (process.returncode, err) == (0, "")
    document = json.loads(said)
    assert (document["requests"], document["completed"], document["resumed"]) == (60, 60, before)
    assert len(results(out)) == 60
    assert server.asked.total() <= 60 + 4  # what was in flight alone was asked for twice
