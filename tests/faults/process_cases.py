"""Rows O that only a process can suffer: signals, death, no descriptors, a clock that jumps, a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from faults.cases import PATIENCE_S, case
from faults.checker import until
from faults.client import Answer, Client, body_of, get, request
from faults.rig import Launcher, Process
from faults.upstream_cases import whole
from helpers import HANG_S, free_port

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
HAS_FAKETIME = FAKETIME.exists()


async def streaming(
    rig: Process, stack: contextlib.AsyncExitStack, count: int
) -> list[tuple[Client, Answer]]:
    """That many streams, each with its first token."""
    begun = []
    for label in [rig.label() for _ in range(count)]:
        client = await stack.enter_async_context(rig.client())
        client.send(request(label, body_of(label)))
        answer = await client.first_token()
        answer.label = label  # type: ignore[attr-defined]
        begun.append((client, answer))
    return begun


async def not_ready(rig: Process) -> None:
    """Wait until readiness says no."""

    async def says_no() -> bool:
        return (await get(rig.port, "/health"))[0] == 503

    await until(says_no, lambda: "readiness never said no")


@case("O3", "sigterm", process=True, crowd=False, proxy={"shutdown_grace_s": 0.5})
async def told_to_end(launcher: Launcher) -> None:
    """What ends within the grace period is whole; what does not is told so; then status 0."""
    engine = launcher.engines[0]
    engine.pace_s, engine.length = 0.02, 1 << 30
    async with launcher.process() as rig, contextlib.AsyncExitStack() as stack:
        ends = await streaming(rig, stack, 20)
        engine.mode = "endless"
        ((client, answer),) = await streaming(rig, stack, 1)
        rig.signal(signal.SIGTERM)

        await not_ready(rig)
        engine.length = 0  # enough
        sent = {visit.id: visit for visit in engine.visits}
        for each, begun in ends:
            assert (await each.rest(begun)).done
            label = begun.label  # type: ignore[attr-defined]
            assert begun.tokens(label) == sent[label].tokens
        await client.rest(answer)
        assert answer.honest
        assert "shutting down" in answer.error["message"]
        assert await rig.ended() == 0


def at_once(name: str, *signals: signal.Signals) -> None:
    @case("O3", name, process=True, crowd=False)
    async def told_to_end_at_once(launcher: Launcher) -> None:
        engine = launcher.engines[0]
        engine.mode, engine.pace_s = "endless", 0.02
        async with launcher.process() as rig, contextlib.AsyncExitStack() as stack:
            begun = await streaming(rig, stack, 10)
            for number in signals[:-1]:
                rig.signal(number)
                await not_ready(rig)  # two signals at once are one
            rig.signal(signals[-1])
            for client, answer in begun:
                assert (await client.rest(answer)).honest
            assert await rig.ended() == 0
        await engine.until(lambda: not engine.working)


at_once("sigint", signal.SIGINT)
at_once("sigterm-twice", signal.SIGTERM, signal.SIGTERM)


def ignored(name: str, *signals: signal.Signals, known: str | None = None) -> None:
    @case("O3", name, process=True, crowd=False, known=known)
    async def goes_on(launcher: Launcher) -> None:
        engine = launcher.engines[0]
        engine.pace_s, engine.length = 0.02, 20
        async with launcher.process() as rig, contextlib.AsyncExitStack() as stack:
            begun = await streaming(rig, stack, 10)
            for number in signals:
                rig.signal(number)
            for client, answer in begun:
                assert (await client.rest(answer)).done
            whole(await rig.ask(), 20)


ignored("sighup", signal.SIGHUP)
ignored("sigpipe", signal.SIGPIPE)
ignored("sigusr1", signal.SIGUSR1)


@case("O4", "sudden-death", process=True, crowd=False)
async def killed_and_back(launcher: Launcher) -> None:
    engine = launcher.engines[0]
    engine.mode, engine.pace_s = "endless", 0.02
    flags = ("--port", str(free_port()))
    async with launcher.process(flags=flags) as rig, contextlib.AsyncExitStack() as stack:
        begun = await streaming(rig, stack, 10)
        rig.process.kill()
        for client, answer in begun:
            await client.rest(answer)
            assert answer.end in ("cut", "reset")
            assert not answer.done
        assert await rig.ended() == -signal.SIGKILL
        await engine.until(lambda: not engine.working)
    engine.mode = "ok"
    async with launcher.process(flags=flags) as rig:  # the address is free at once
        whole(await rig.ask())


@case("O5", "no-descriptors", process=True, proxy={"max_connections": 10_000})
async def out_of_descriptors(launcher: Launcher) -> None:
    """Established streams go on, no instance is blamed, and it is over when the descriptors are back."""
    engine = launcher.engines[0]
    engine.pace_s, engine.length = 0.02, 40
    async with launcher.process(prefix=("prlimit", "--nofile=200:200")) as rig:
        async with launcher.unharmed(rig), contextlib.AsyncExitStack() as stack:
            begun = await streaming(rig, stack, 5)
            rig.first_bytes |= {f"begun{n}": 0.0 for n in range(5)}
            async with contextlib.AsyncExitStack() as idle:
                for _ in range(300):
                    with contextlib.suppress(OSError):
                        await idle.enter_async_context(rig.client())
                for client, answer in begun:
                    assert (await client.rest(answer)).done
                await engine.probed(3)

            async def serves() -> bool:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError, IndexError):
                    return (await get(rig.port, "/health"))[0] == 200
                return False

            await until(serves, lambda: "it never came back")
            whole(await rig.ask(), 40)
            assert await rig.health("i0") == "up"
            assert await rig.metric("hetlb_instance_ejections_total", 'server="i0"') == 0


@case("O7", "stopped", process=True, proxy={"first_byte_timeout_s": PATIENCE_S})
async def stopped_for_a_while(launcher: Launcher) -> None:
    """The engine answered in time, while the proxy was stopped: that is not the engine's delay."""
    engine = launcher.engines[0]
    engine.pace_s = 0.3
    async with launcher.process() as rig, launcher.unharmed(rig, Counter(ok=1)):
        label = rig.label()
        engine.modes[label] = "late"
        async with rig.client() as client:
            client.send(request(label, body_of(label, stream=False)))
            await engine.visit()
            rig.signal(signal.SIGSTOP)
            await asyncio.sleep(PATIENCE_S + 1.0)  # the fault itself: how long the process is stopped
            rig.signal(signal.SIGCONT)
            answer = await client.answer()
        assert (answer.status, answer.end) == (200, "clean"), answer.body
        assert await rig.health("i0") == "up"


@case("O7", "clock-jumps", process=True, proxy={"first_byte_timeout_s": 60.0})  # less than any jump
async def the_wall_clock_jumps(launcher: Launcher) -> None:
    if not HAS_FAKETIME:
        pytest.skip("libfaketime is not installed (Debian package faketime)")
    engine = launcher.engines[0]
    engine.pace_s, engine.length = 0.02, 30
    stamp = launcher.folder / "clock"
    stamp.write_text("+0")
    faked = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(stamp),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    async with launcher.process(environment=faked) as rig, launcher.unharmed(rig):
        for jump in ("+1h", "-3h"):
            async with contextlib.AsyncExitStack() as stack:
                begun = await streaming(rig, stack, 5)
                rig.first_bytes |= {f"{jump}{n}": 0.0 for n in range(5)}
                stamp.write_text(jump)
                for client, answer in begun:
                    assert (await client.rest(answer)).done
            whole(await rig.ask(), 30)
            assert await rig.health("i0") == "up"


@case("O8", "the-log-is-not-read", process=True)
async def the_logs_reader_is_gone(launcher: Launcher) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        async with launcher.process(stderr=writing) as rig, launcher.unharmed(rig, Counter(ok=20)):
            for _ in range(20):
                whole(await rig.ask())
    finally:
        os.close(writing)


def stuck(name: str, *, says: bool, known: str | None = None) -> None:
    """The pipe of the log is full and not read. `says`: there are events besides requests."""

    @case("O8", name, process=True, crowd=False, engines=2, known=known)
    async def the_logs_reader_is_stuck(launcher: Launcher) -> None:
        reading, writing = os.pipe()
        try:
            async with launcher.process(stderr=writing) as rig:
                full = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY | os.O_NONBLOCK)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        os.write(full, b"x")
                os.close(full)
                if says:
                    await launcher.engines[0].stop()
                async with asyncio.timeout(HANG_S):
                    for _ in range(20):
                        whole(await rig.ask())
        finally:
            os.close(reading)
            os.close(writing)


stuck("request-log-is-stuck", says=False)
stuck(
    "log-is-stuck",
    says=True,
)


@case("O8", "disk-full", process=True)
async def the_disk_is_full(launcher: Launcher) -> None:
    async with (
        launcher.process(flags=("--event-log", "/dev/full")) as rig,
        launcher.unharmed(rig, Counter(ok=20)),
    ):
        for _ in range(20):
            whole(await rig.ask())
        status, text = await get(rig.admin_port, "/v1/decisions?last=1")
        assert (status, len(json.loads(text)["decisions"])) == (200, 1)
