"""A process takes the place of another: nothing is refused, nothing is cut, the ledger of both is one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from helpers import HANG_S, asked_until, turns_until
from proxy.services import Engine, PatientService, document
from proxy.upstreams import SSE_HEAD, Upstream, Visit, chunk, plain

from hetlb import systemd
from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.fleet.service import Service
from hetlb.cli.serve import _ask
from hetlb.cli.serving_options import OPTIONS
from hetlb.errors import HetlbError, InputError
from hetlb.options.peers.offer import HELLO, Offer, local_socket, name_of
from hetlb.options.peers.takeover import Takeover
from hetlb.systemd import NO_LISTENERS, inherited
from hetlb.tools.sim.integrity import check_scheduler

BODY = b'{"model":"m","prompt":"hello","max_tokens":5}'


async def request(session: aiohttp.ClientSession, port: int) -> int:
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", data=BODY) as reply:
        await reply.read()
        return reply.status


@contextlib.asynccontextmanager
async def two(tmp_path: Path, fleet: dict[str, Any]) -> AsyncIterator[tuple[Service, Service]]:
    """A service that runs, and another one of the same file that has not begun."""
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(fleet))
    loaded = load_fleet(tmp_path / "fleet.yaml")
    old, new = PatientService(loaded, OPTIONS), PatientService(loaded, OPTIONS)
    for each in (old, new):
        each.offer = Offer(each)
    try:
        await old.start()
        yield old, new
    finally:
        await new.stop(0.0)
        await old.stop(0.0)


async def take_over(old: Service, new: Service) -> None:
    takeover = await asked_until(lambda: Takeover.ask(old.address))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hetlb.options.peers.takeover.PROVEN_S", 0.0)
        takeover.join(new)
        await new.start(takeover=takeover)
    await turns_until(lambda: old.replaced)


async def test_leases_of_the_old_process_are_booked_in_the_new_one(tmp_path: Path) -> None:
    async with Engine() as engine, two(tmp_path, document(engine)) as (old, new):
        engine.hold()
        async with aiohttp.ClientSession() as session:
            first = asyncio.create_task(request(session, old.address[1]))
            await engine.asked_for()
            await take_over(old, new)
            assert new.address == old.address
            [before], [after] = old.scheduler.instances, new.scheduler.instances
            assert (before.in_flight, after.in_flight) == (1, 1)
            assert after.work_ns == before.work_ns
            assert after.promised_tokens == before.promised_tokens
            # Further requests reach the new process; the old one, which may have some in its queue, is told.
            second = asyncio.create_task(request(session, new.address[1]))
            await engine.asked_for(2)
            await turns_until(lambda: (before.in_flight, after.in_flight) == (2, 2))
            check_scheduler(new.scheduler)
            engine.released.set()
            assert (await first, await second) == (200, 200)
            await turns_until(lambda: after.in_flight == 0)
            check_scheduler(new.scheduler)
            assert after.work_ns == after.kv_tokens == after.promised_tokens == 0


async def test_what_waits_in_the_old_process_has_the_right_of_way(tmp_path: Path) -> None:
    fleet = document(policy={"name": "hetlb"})
    async with Engine() as engine:
        fleet["models"][0]["instances"] = [{"name": "i0", "url": engine.url}]
        async with two(tmp_path, fleet) as (old, new):
            engine.hold()
            for each in (old, new):
                [instance] = each.scheduler.instances
                instance.max_num_seqs = 1
                instance.changed()
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                asking = [asyncio.create_task(request(session, old.address[1])) for _ in range(20)]
                await turns_until(lambda: len(old.scheduler.queue) > 0)
                waiting = len(old.scheduler.queue)
                await take_over(old, new)
                late = [asyncio.create_task(request(session, new.address[1])) for _ in range(3)]
                await turns_until(lambda: len(new.scheduler.queue) + new.scheduler.in_flight >= 3)
                assert waiting > 0
                engine.released.set()
                assert set(await asyncio.gather(*asking, *late)) == {200}
            await turns_until(lambda: not new.scheduler.in_flight)


async def test_a_crash_of_the_old_process_gives_back_what_it_had(tmp_path: Path) -> None:
    async with Engine() as engine, two(tmp_path, document(engine)) as (old, new):
        engine.hold()
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(request(session, old.address[1]))
            await engine.asked_for()
            await take_over(old, new)
            [instance] = new.scheduler.instances
            assert instance.in_flight == 1
            old.sharing._transport.drop()  # its connection breaks, and it says no more
            for task in old.sharing._tasks:
                task.cancel()
            await turns_until(lambda: instance.in_flight == 0)
            engine.released.set()
            assert await asking == 200


async def test_a_kept_connection_gets_one_more_answer_from_the_old_process(tmp_path: Path) -> None:
    async with Engine() as engine, two(tmp_path, document(engine)) as (old, new):
        reader, writer = await asyncio.open_connection(*old.address)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(BODY)
        writer.write(head + BODY)
        answer = await reader.readuntil(b"}}")
        assert b"connection: close" not in answer.lower()
        await take_over(old, new)
        writer.write(head + BODY)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in answer.lower()
        writer.close()
        await writer.wait_closed()


async def test_where_nothing_runs_there_is_nothing_to_replace() -> None:
    assert await Takeover.ask(("127.0.0.1", 1)) is None


async def test_an_old_process_that_falls_silent_in_a_handover_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetlb.balancer.fleet.service.REPLACED_S", 0.1)
    async with Engine() as engine, two(tmp_path, document(engine)) as (_, new):
        end, other = socket.socketpair()
        with other:
            folder = tmp_path / "view"
            await asyncio.to_thread(folder.mkdir)
            takeover = Takeover(end, NO_LISTENERS, folder)
            takeover.join(new)
            with pytest.raises(HetlbError, match="ended, or fell silent, before it handed over"):
                await new.start(takeover=takeover)


async def test_an_event_log_that_cannot_be_moved_aside_is_one_line(tmp_path: Path) -> None:
    """The old process writes on to it."""
    log = tmp_path / "events.jsonl"
    log.write_text("old\n")
    (tmp_path / "events.jsonl.before").mkdir()
    async with Engine() as engine, two(tmp_path, document(engine)) as (old, _):
        fleet = old.fleet
        listen = msgspec.structs.replace(fleet.file.listen, port=old.address[1])
        await turns_until(lambda: _connects_once(old.address))
        with pytest.raises(InputError, match="--event-log: expected a file that can be renamed, got "):
            await _ask(fleet.with_tables(listen=listen), log)
        assert log.read_text() == "old\n"


async def test_a_process_that_does_not_keep_to_the_steps_gets_nothing(tmp_path: Path) -> None:
    async with Engine() as engine, two(tmp_path, document(engine)) as (old, _):
        for words in (b"hello", b"hetlb takeover 3\n", HELLO, b""):
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            end.setblocking(False)
            await turns_until(lambda end=end: _connects(end, old.address))  # type: ignore[misc]
            if words:
                end.send(words)
            end.close()
        assert not old.replaced
        async with aiohttp.ClientSession() as session:
            assert await request(session, old.address[1]) == 200


async def test_one_that_asks_during_a_takeover_is_answered_by_the_successor(tmp_path: Path) -> None:
    async with Engine() as engine, two(tmp_path, document(engine)) as (old, new):
        takeover = await asked_until(lambda: Takeover.ask(old.address))
        asking = asyncio.create_task(Takeover.ask(old.address))
        takeover.join(new)
        await new.start(takeover=takeover)
        late = await asking
        assert old.replaced
        assert late is not None
        assert [each.getsockname() for each in late.listeners.main] == [new.address]
        late.end.close()
        for each in (*late.listeners.main, *late.listeners.admin):
            each.close()


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed")
async def test_a_process_of_another_user_is_not_believed(tmp_path: Path) -> None:
    """Whoever binds the abstract name of a process first gets nothing from one that is to replace it."""
    address = ("127.0.0.1", 2)
    async with holder_of_the_name(address):
        with pytest.raises(HetlbError, match="another user"):
            await Takeover.ask(address)


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed")
async def test_a_name_that_another_user_holds_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = ("127.0.0.1", 2)
    async with Engine() as engine, two(tmp_path, document(engine)) as (old, _):
        offer = Offer(old)
        async with holder_of_the_name(address):
            offer.open(address)
            await turns_until(lambda: "another user holds the name" in caplog.text)
        await turns_until(lambda: _connects_once(address))  # it has the name once that is free
        await offer.close()


async def test_a_process_that_many_ask_is_not_taken_for_another_users() -> None:
    address, loop = ("127.0.0.1", 2), asyncio.get_running_loop()
    with local_socket() as running, contextlib.ExitStack() as others:
        running.bind(name_of(address))
        running.listen(0)
        while _connects(end := others.enter_context(local_socket()), address):
            pass
        asking = asyncio.create_task(Takeover.ask(address))
        for _ in range(5):
            await asyncio.sleep(0)
        end, _ = await loop.sock_accept(running)
        end.close()
        end, _ = await asyncio.wait_for(loop.sock_accept(running), HANG_S)
        with end:
            assert await loop.sock_recv(end, len(HELLO)) == HELLO
            socket.send_fds(end, [HELLO + bytes([0])], [])
            takeover = await asking
        assert takeover is not None
        takeover.end.close()


def _connects_once(address: tuple[str, int]) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        return _connects(end, address)


@contextlib.asynccontextmanager
async def holder_of_the_name(address: tuple[str, int]) -> AsyncIterator[None]:
    """Run a process of another user that waits at the name of a listener's address."""
    script = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM); "
        f"s.bind({name_of(address)!r}); s.listen(1); print(flush=True); s.accept(); sys.stdin.read()"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed")
async def test_another_user_gets_no_listeners_and_floods_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine() as engine, two(tmp_path, document(engine)) as (old, _):
        script = (
            "import os, socket\nos.setuid(65534)\nfor _ in range(300):\n"
            "    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n"
            f"    s.connect({name_of(old.address)!r})\n    assert s.recv(9) == b''\n"
        )
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        await turns_until(lambda: _connects(end, old.address))
        end.close()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0
        told = [record for record in caplog.records if getattr(record, "event", "") == "handover_refused"]
        assert len(told) <= 2


async def test_a_successor_that_dies_leaves_the_old_process_serving(tmp_path: Path) -> None:
    async with Engine() as engine, two(tmp_path, document(engine)) as (old, new):
        takeover = await asked_until(lambda: Takeover.ask(old.address))
        takeover.join(new)
        starting = asyncio.create_task(new.start(takeover=takeover))
        await turns_until(lambda: new.address == old.address)  # it accepts
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await new.stop(0.0)
        async with aiohttp.ClientSession() as session:
            assert await request(session, old.address[1]) == 200
        assert not old.replaced
        again = PatientService(load_fleet(tmp_path / "fleet.yaml"), OPTIONS)
        again.offer = Offer(again)
        try:
            await take_over(old, again)
        finally:
            await again.stop(0.0)


def _connects(end: socket.socket, address: tuple[str, int]) -> bool:
    try:
        end.connect(name_of(address))
    except (BlockingIOError, ConnectionRefusedError):
        return False
    return True


# --- processes ---


class Streams:
    """An engine of streams that end when told to, and of short answers."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.begun = 0

    async def __call__(self, visit: Visit) -> None:
        path = visit.head.split()[1]
        if path == b"/v1/completions" and b'"stream"' in visit.body:
            self.begun += 1
            text = b'data: {"choices":[{"index":0,"text":"t"}]}\n\n'
            visit.send(SSE_HEAD + chunk(text))
            await self.end.wait()
            visit.send(chunk(text) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        elif path == b"/v1/models":
            visit.send(plain(b'{"object":"list","data":[{"id":"m"}]}'))
        elif path == b"/metrics":
            visit.send(plain(b"vllm:num_requests_running 0\n"))
        else:
            visit.send(plain())


class Process:
    """A running `hetlb serve`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.errors = asyncio.create_task(process.stderr.read())  # type: ignore[union-attr]

    @classmethod
    async def start(cls, *flags: str, fds: tuple[int, ...] = (), **environment: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hetlb", "serve", *flags,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            pass_fds=fds, env={**os.environ, **environment},
        )  # fmt: skip
        return cls(process)

    async def ready(self) -> tuple[int, int]:
        assert self.process.stdout is not None
        line = (await asyncio.wait_for(self.process.stdout.readline(), HANG_S)).decode()
        assert " ready on " in line, (await self.errors).decode()
        main, admin = map(int, re.findall(r":(\d+)\b", line))
        return main, admin

    async def ended(self) -> str:
        await asyncio.wait_for(self.process.wait(), HANG_S)
        return (await self.errors).decode()


#: Numbers of workers of the processes that replace each other in turns: one by one, one by two, and so on.
WORKERS = (1, 1, 2, 2)


@pytest.mark.slow
async def test_ten_upgrades_under_200_streams_and_200_requests_a_second(tmp_path: Path) -> None:
    await upgrades(tmp_path, 10, 200, WORKERS)


@pytest.mark.light
async def test_upgrades_under_load(tmp_path: Path) -> None:
    await upgrades(tmp_path, len(WORKERS), 20, WORKERS)


async def upgrades(tmp_path: Path, times: int, count: int, workers: tuple[int, ...]) -> None:
    """Replace the process `times` times, each with `count` open streams and 200 requests/s beside them."""
    streams = Streams()
    async with Upstream(streams) as engine:
        fleet = document(engine, proxy={"request_log": False})
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(fleet))
        flags = ["--config", str(tmp_path / "fleet.yaml")]
        running = await Process.start(*flags, "--workers", str(workers[0]))
        port, admin = await running.ready()
        flags += ["--port", str(port), "--admin-port", str(admin), "--replace"]
        statuses: list[int] = []
        tails: list[bytes] = []
        over = False
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def stream() -> None:
                body = b'{"model":"m","prompt":"hello","max_tokens":5,"stream":true}'
                async with session.post(f"http://127.0.0.1:{port}/v1/completions", data=body) as reply:
                    tails.append((await reply.read())[-20:])

            async def requests() -> None:
                while not over:
                    statuses.append(await request(session, port))
                    await asyncio.sleep(0.05)

            asking = [asyncio.create_task(requests()) for _ in range(10)]
            ended = []
            for turn in range(times):
                streams.end.clear()
                streams.begun = 0
                open_ = [asyncio.create_task(stream()) for _ in range(count)]
                await turns_until(lambda: streams.begun == count)
                before = len(statuses)
                number = workers[(turn + 1) % len(workers)]
                successor = await Process.start(*flags, "--workers", str(number))
                assert await successor.ready() == (port, admin), turn
                await turns_until(lambda before=before: len(statuses) > before + 20)  # type: ignore[misc]
                streams.end.set()
                await asyncio.gather(*open_)
                ended.append(asyncio.create_task(running.ended()))
                running = successor
            over = True
            await asyncio.gather(*asking)
            for log in await asyncio.gather(*ended):
                assert "Traceback" not in log
            # The ends of the old processes' leases reach the last one a moment after the replies.
            figures = [1]
            async with asyncio.timeout(HANG_S):
                while any(figures):
                    async with session.get(f"http://127.0.0.1:{admin}/v1/fleet") as reply:
                        [instance] = (await reply.json())["models"][0]["instances"]
                    figures = [instance[key] for key in ("in_flight", "workload", "kv_reserved_tokens")]
        assert set(statuses) == {200}
        assert len(tails) == times * count
        assert all(tail.endswith(b"data: [DONE]\n\n") for tail in tails)
        running.process.send_signal(signal.SIGTERM)
        await running.ended()


@pytest.mark.parametrize("workers", [1, 2])
async def test_sockets_that_systemd_listens_on_outlive_the_process(tmp_path: Path, workers: int) -> None:
    """`LISTEN_FDS`, `LISTEN_FDNAMES` and `NOTIFY_SOCKET`, as systemd sets them."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    state = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    state.bind(str(tmp_path / "notify"))
    state.setblocking(False)
    loop = asyncio.get_running_loop()
    async with Engine() as engine:
        fleet = document(engine, proxy={"workers": workers})
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(fleet))
        one, other = (each.fileno() for each in listening)
        # The sockets become descriptors 3 and 4 and the process their owner, as systemd has it.
        place = (
            "import os, sys, fcntl; one, other = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (%d, %d)); "
            "os.dup2(one, 3); os.dup2(other, 4); "
            "os.environ['LISTEN_PID'] = str(os.getpid()); "
            "os.execv(sys.executable, [sys.executable, '-m', 'hetlb', 'serve', '--config', sys.argv[1]])"
        )
        ports = [each.getsockname()[1] for each in listening]
        for _ in range(2):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", place % (one, other), str(tmp_path / "fleet.yaml"),
                pass_fds=(one, other),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "LISTEN_FDS": "2", "LISTEN_FDNAMES": "http:admin",
                     "NOTIFY_SOCKET": str(tmp_path / "notify")},
            )  # fmt: skip
            running = Process(process)
            async with aiohttp.ClientSession() as session:
                # Asked before it accepts, and answered: the socket was there all the time.
                asking = asyncio.create_task(request(session, ports[0]))
                assert list(await running.ready()) == ports
                assert await asking == 200
                told = (await loop.sock_recv(state, 4096)).decode().splitlines()
                assert told[:2] == ["READY=1", f"MAINPID={process.pid}"]
                process.send_signal(signal.SIGHUP)
                assert (await loop.sock_recv(state, 4096)).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
                assert await loop.sock_recv(state, 4096) == b"READY=1"
            process.send_signal(signal.SIGTERM)
            assert "Traceback" not in await running.ended()
            assert await loop.sock_recv(state, 4096) == b"STOPPING=1"
    for each in (*listening, state):
        each.close()


def test_sockets_for_another_process_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "2")
    monkeypatch.setenv("LISTEN_PID", "1")
    assert inherited() == systemd.NO_LISTENERS
    assert "LISTEN_FDS" not in os.environ
