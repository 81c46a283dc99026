"""Faults between client, Envoy, picker and engine: nothing is lost, every lease ends once, figures are zero.

Each case runs beside streams that go on undisturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from helpers import HANG_S, asked_until, free_port, turns_until
from options.pick.rig import GATEWAY_API, STATIC, Engine, Envoy, Rig, answer, rig
from proxy.upstreams import DONE, TOKEN

from hetlb.balancer.core.facts import CapacityLearned
from hetlb.balancer.core.types import Capacity
from hetlb.build import compiled

pytestmark = pytest.mark.envoy

#: Compiled modules are the same behind either configuration of Envoy.
BOTH = pytest.mark.parametrize(
    "base", [GATEWAY_API] if compiled() else [STATIC, GATEWAY_API], ids=lambda path: path.stem
)
#: Streams in the background of a case.
BESIDE = 50


@contextlib.asynccontextmanager
async def beside(made: Rig, *, whole: bool = True) -> AsyncIterator[None]:
    """Streams that are open during a case and end after it, with `whole` all of them well."""
    over = asyncio.Event()
    before = sum(engine.running for engine in made.engines)

    async def slow(request: Any, engine: Engine) -> web.StreamResponse:
        if b"background" not in engine.bodies[-1]:
            return await scripts[engine](request, engine)
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(TOKEN)
        await over.wait()
        await response.write(TOKEN + DONE)
        return response

    scripts = {engine: engine.script for engine in made.engines}
    for engine in made.engines:
        engine.script = slow
    streams = [
        asyncio.create_task(made.ask(stream=True, user="background", prompt="background"))
        for _ in range(BESIDE)
    ]
    await turns_until(lambda: sum(engine.running for engine in made.engines) == before + BESIDE)
    try:
        yield
    finally:
        over.set()
    replies = await asyncio.gather(*streams, return_exceptions=not whole)
    if whole:
        assert {(reply.status, reply.body) for reply in replies} == {(200, TOKEN + TOKEN + DONE)}
    await made.settled()


async def leave(made: Rig, begun: asyncio.Event | None = None) -> None:
    """A client that asks for a stream and leaves once `begun` is set."""
    task = asyncio.create_task(made.ask(stream=True))
    await turns_until(lambda: len(made.picker.driver.exchanges) > BESIDE)
    if begun is not None:
        await begun.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@BOTH
async def test_a_client_leaves_before_its_answer_and_while_it_streams(tmp_path: Path, base: Path) -> None:
    async with rig(tmp_path, base) as made:
        begun = asyncio.Event()

        async def endless(request: Any, engine: Engine) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(TOKEN)
            begun.set()
            await asyncio.Event().wait()
            return response

        async def silent(request: Any, engine: Engine) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError

        for script, event in ((silent, None), (endless, begun)):
            for engine in made.engines:
                engine.script = script
            async with beside(made):
                await leave(made, event)
                await turns_until(lambda: len(made.picker.driver.exchanges) == BESIDE)
                await turns_until(lambda: sum(e.running for e in made.engines) == BESIDE)
        assert made.outcomes.count("client_gone") == 2


@BOTH
async def test_a_client_leaves_before_its_body_is_whole(tmp_path: Path, base: Path) -> None:
    async with rig(tmp_path, base) as made, beside(made):
        streams = made.picker.server.state.streams
        _, writer = await asyncio.open_connection("127.0.0.1", made.envoy.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: 1000\r\n\r\n{")
        await turns_until(lambda: len(streams) == BESIDE + 1)
        writer.transport.abort()
        await turns_until(lambda: len(streams) == BESIDE)
        assert sum(len(engine.bodies) for engine in made.engines) == BESIDE


@BOTH
async def test_a_client_leaves_while_it_waits_in_the_queue(tmp_path: Path, base: Path) -> None:
    async with rig(tmp_path, base, engines=1, policy={"name": "hetlb"}) as made:
        async with beside(made):
            made.picker.roster.change(CapacityLearned("i0", Capacity(max_num_seqs=1)))
            queue = made.picker.scheduler.queue
            sent = [asyncio.create_task(made.ask()) for _ in range(3)]
            await turns_until(lambda: len(queue) == 3)
            sent.pop().cancel()
            await turns_until(lambda: len(queue) == 2)
        assert [(await each).status for each in sent] == [200, 200]
        assert len(made.engines[0].bodies) == BESIDE + 2
        assert made.outcomes.count("client_gone") == 1


@BOTH
@pytest.mark.parametrize("retries", [True, False])
async def test_an_engine_that_refuses(tmp_path: Path, base: Path, retries: bool) -> None:
    def change(envoy: Envoy) -> None:
        if not retries:
            del envoy.route["retry_policy"]
        del envoy.cluster("engines")["health_checks"]

    # Probes are too slow to find out: the request does.
    async with rig(tmp_path, base, change=change, scrape={"interval_s": 60}) as made:
        async with beside(made):
            reply = await made.ask()  # rr: the next is i1
            assert reply.status == 200
            listening = made.engines[1]._runner
            assert listening is not None
            for site in list(listening.sites):
                await site.stop()
            replies = [await made.ask() for _ in range(2)]
            statuses = sorted(each.status for each in replies)
            if retries:
                assert statuses == [200, 200]
            else:
                assert statuses == [200, 502]
                failed = next(each for each in replies if each.status == 502)
                assert failed.json["error"]["code"] == "connect_failed"
                assert made.outcomes.count("connect_failed") == 1


@BOTH
@pytest.mark.parametrize("retries", [True, False])
async def test_an_engine_that_resets_before_an_answer(tmp_path: Path, base: Path, retries: bool) -> None:
    def change(envoy: Envoy) -> None:
        if retries:
            envoy.route["retry_policy"]["retry_on"] = "reset"

    async with rig(tmp_path, base, change=change) as made:

        async def reset(request: web.Request, engine: Engine) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.Event().wait()
            raise AssertionError

        # rr: the next one is the first; with retries the other answers.
        for engine in made.engines[: 1 if retries else 2]:
            engine.script = reset
        async with beside(made):
            reply = await made.ask()
            if retries:
                assert (reply.status, reply.headers["x-hetlb-instance"]) == (200, "i1")
            else:
                assert (reply.status, reply.json["error"]["code"]) == (502, "no_response")
        assert made.outcomes.count("no_response") == (0 if retries else 1)
        assert len(made.outcomes) == BESIDE + 1


@BOTH
@pytest.mark.parametrize("retries", [True, False])
async def test_a_busy_engine_is_left_alone_for_as_long_as_it_said(
    tmp_path: Path, base: Path, retries: bool
) -> None:
    def change(envoy: Envoy) -> None:
        if retries:
            envoy.route["retry_policy"]["retry_on"] = "5xx"

    async with rig(tmp_path, base, change=change, policy={"name": "hetlb"}) as made:
        asked: list[Engine] = []

        async def busy(request: Any, engine: Engine) -> web.StreamResponse:
            asked.append(engine)
            if retries and len(asked) == 2:
                return await answer(request, engine)
            return web.json_response({"error": "later"}, status=503, headers={"retry-after": "30"})

        for engine in made.engines:
            engine.script = busy
        async with beside(made):
            began = made.picker.now()
            reply = await made.ask()
            if retries:  # Envoy asked another one, and keeps what the first one said to itself
                assert (reply.status, len(set(asked))) == (200, 2)
                assert reply.headers["x-hetlb-instance"] == f"i{made.engines.index(asked[1])}"
            else:
                assert (reply.status, reply.json) == (503, {"error": "later"})
        told = [
            each
            for each in made.picker.scheduler.instances
            if each.evidence.room.limit(began + 29.0) < math.inf
        ]
        assert len(told) == (0 if retries else 1)
        assert made.outcomes.count("upstream_busy") == (0 if retries else 1)
        assert len(made.outcomes) == BESIDE + 1


@BOTH
async def test_a_stream_that_is_cut_ends_its_lease_and_is_no_whole_answer(tmp_path: Path, base: Path) -> None:
    async with rig(tmp_path, base) as made:

        async def cut(request: web.Request, engine: Engine) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(TOKEN)
            assert request.transport is not None
            request.transport.abort()
            return response

        async def early(request: web.Request, engine: Engine) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(TOKEN)
            return response

        for script in (cut, early):
            for engine in made.engines:
                engine.script = script
            async with beside(made):
                try:
                    reply = await made.ask(stream=True)
                except aiohttp.ClientError:
                    assert script is cut
                else:
                    assert DONE not in reply.body
                    assert script is cut or b"broken_stream" in reply.body
                await turns_until(lambda: len(made.picker.driver.exchanges) == BESIDE)
        assert made.outcomes.count("broken_stream") >= 1


@BOTH
async def test_envoy_is_killed(tmp_path: Path, base: Path) -> None:
    async with rig(tmp_path, base) as made:
        made.engines[0].released.clear()
        made.engines[1].released.clear()
        sent = [asyncio.create_task(made.ask()) for _ in range(BESIDE)]
        await turns_until(lambda: len(made.picker.driver.exchanges) == BESIDE)
        await made.envoy.kill()
        assert all(
            isinstance(each, Exception) for each in await asyncio.gather(*sent, return_exceptions=True)
        )
        await made.settled()
        assert made.outcomes == ["client_gone"] * BESIDE


async def test_without_a_picker_envoy_goes_on_by_itself_and_one_that_is_back_learns_what_runs(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, policy={"name": "hetlb"}) as made:
        assert "x-hetlb-instance" in (await made.ask()).headers
        await made.picker.stop(0.0)
        for engine in made.engines:
            engine.released.clear()
        sent = [asyncio.create_task(made.ask(stream=True)) for _ in range(20)]
        await turns_until(lambda: sum(engine.running for engine in made.engines) == 20)
        # Envoy's own least-request spreads them.
        assert min(engine.running for engine in made.engines) >= 1
        await made.start_picker(policy={"name": "hetlb"})
        running = [engine.running for engine in made.engines]
        await turns_until(lambda: [i.foreign for i in made.picker.scheduler.instances] == running)
        for engine in made.engines:
            engine.released.set()
        replies = await asyncio.gather(*sent)
        assert {reply.status for reply in replies} == {200}
        assert not any("x-hetlb-instance" in reply.headers for reply in replies)
        await turns_until(lambda: not any(i.foreign for i in made.picker.scheduler.instances))
        await turns_until_picked(made)


@pytest.mark.skipif(compiled(), reason="compiled, an attribute takes no stand-in")
async def test_a_picker_that_fails_costs_no_request_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(tmp_path) as made:
        state = made.picker.server.state
        router, state.router = state.router, object()  # type: ignore[assignment]
        try:
            for _ in range(3):
                reply = await made.ask()
                assert reply.status == 200
                assert "x-hetlb-instance" not in reply.headers
        finally:
            state.router = router
        failed = [each for each in caplog.records if "a request of a gateway failed" in each.getMessage()]
        assert len(failed) == 1
        assert "x-hetlb-instance" in (await made.ask()).headers


async def test_a_timeout_finds_a_picker_process_that_stands_still(tmp_path: Path) -> None:
    def quick(envoy: Envoy) -> None:
        envoy.ext_proc["message_timeout"] = "0.3s"
        del envoy.cluster("picker")["health_checks"]  # a timeout is to find it out, not a check

    async with rig(tmp_path) as made, outside(made, STATIC, quick) as picker:
        await turns_until_picked(made)
        picker.pause()
        for streamed in (False, True):
            reply = await made.ask(stream=streamed)
            assert reply.status == 200
            assert "x-hetlb-instance" not in reply.headers
        picker.go_on()
        await turns_until_picked(made)


@BOTH
async def test_a_picker_process_that_stands_still_for_5_s(tmp_path: Path, base: Path) -> None:
    async with rig(tmp_path) as made, outside(made, base) as picker:
        await turns_until_picked(made)
        async with beside(made):
            async with beside(made):  # these end while it stands still
                picker.pause()
                asyncio.get_running_loop().call_later(5.0, picker.go_on)
                replies = await asyncio.gather(*(made.ask(stream=n % 2 == 0) for n in range(20)))
                # In full duplex a body that is on its way to the picker is given up.
                assert {reply.status for reply in replies} <= ({200} if base is STATIC else {200, 500, 504})
            await turns_until_picked(made)
        await picker.at_rest()


@BOTH
async def test_a_picker_process_that_is_killed_is_back_and_knows_what_runs(
    tmp_path: Path, base: Path
) -> None:
    async with rig(tmp_path) as made, outside(made, base) as picker:
        await turns_until_picked(made)
        async with beside(made, whole=base is STATIC):
            await picker.kill()
            replies = await asyncio.gather(*(made.ask(stream=n % 2 == 0) for n in range(20)))
            # In full duplex a body that is on its way to the picker is lost with it.
            assert {reply.status for reply in replies} <= ({200} if base is STATIC else {200, 500})
            assert not any("x-hetlb-instance" in reply.headers for reply in replies)
            async with asyncio.timeout(HANG_S):
                while (await made.ask()).status != 200:  # until Envoy's checks have found it out
                    pass
            await picker.start()
            await turns_until_picked(made)
            async with asyncio.timeout(HANG_S):
                while await picker.in_flight() != sum(engine.running for engine in made.engines):
                    pass
        await picker.at_rest()


class PickerProcess:
    """`hetlb pick` in a process of its own over a rig's engines: one that can be killed and paused."""

    def __init__(self, made: Rig) -> None:
        self._made = made
        self._process: asyncio.subprocess.Process | None = None
        self._admin = ""
        self.port = free_port()

    async def start(self) -> None:
        command = [sys.executable, "-m", "hetlb", "pick", "--grpc-port", str(self.port), "--admin-port", "0"]
        for engine in self._made.engines:
            command += ["--instance", f"http://{engine.address}"]
        self._process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        found = re.fullmatch(rf"hetlb pick ready on http://127.0.0.1:{self.port} \(admin (\S+)\)\n", line)
        assert found is not None, line
        self._admin = found[1]

    @property
    def memory(self) -> int:
        """Bytes in memory."""
        assert self._process is not None
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        assert await self._process.wait() == 0

    async def _figures(self, path: str) -> bytes:
        async with self._made.session.get(self._admin + path) as reply:
            return await reply.read()

    async def in_flight(self) -> int:
        """Requests at the instances as it knows them, its own and others'."""
        fleet = msgspec.json.decode(await self._figures("/v1/fleet"))
        found = [each for model in fleet["models"] for each in model["instances"]]
        return sum(each["in_flight"] + each["foreign"] for each in found)

    async def at_rest(self) -> None:
        """Wait until its figures are zero, then check that every request had one outcome."""

        async def rests() -> bool:
            return not await self.in_flight()

        await asked_until(rests)
        page = (await self._figures("/metrics")).decode()
        decisions, ended = (
            sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))
            for name in ("hetlb_decisions_total", "hetlb_requests_total")
        )
        assert decisions == ended > 0


@contextlib.asynccontextmanager
async def outside(
    made: Rig, base: Path, change: Callable[[Envoy], None] = lambda envoy: None
) -> AsyncIterator[PickerProcess]:
    """The rig behind an Envoy whose picker is a process of its own."""
    picker, first = PickerProcess(made), made.envoy
    await picker.start()
    made.envoy = Envoy(made.folder / "outside", base, [picker.port], made.engines)
    change(made.envoy)
    try:
        await made.envoy.start()
        yield picker
        await picker.stop()
    finally:
        await made.envoy.kill()
        made.envoy = first
        await picker.kill()


async def turns_until_picked(made: Rig) -> None:
    """Ask until a picker has chosen."""
    async with asyncio.timeout(HANG_S):
        while "x-hetlb-instance" not in (await made.ask()).headers:
            pass


async def test_a_picker_that_shuts_down_lets_what_is_open_end(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        for engine in made.engines:
            engine.released.clear()
        sent = [asyncio.create_task(made.ask(stream=True)) for _ in range(BESIDE)]
        await turns_until(lambda: sum(engine.running for engine in made.engines) == BESIDE)
        stopping = asyncio.create_task(made.picker.stop(HANG_S))
        await turns_until(lambda: made.picker.availability.stopping)
        for engine in made.engines:
            engine.released.set()
        replies = await asyncio.gather(*sent)
        assert {reply.status for reply in replies} == {200}
        assert {reply.headers["x-hetlb-instance"] for reply in replies} == {"i0", "i1"}
        await stopping
        assert not made.picker.driver.exchanges


async def test_nothing_goes_to_a_drained_instance(tmp_path: Path) -> None:
    from options.pick.test_picking import _drain

    async with rig(tmp_path) as made:
        made.picker.roster.change(_drain("i0"))
        replies = await asyncio.gather(*(made.ask() for _ in range(BESIDE)))
        assert {reply.headers["x-hetlb-instance"] for reply in replies} == {"i1"}
        assert not made.engines[0].bodies
