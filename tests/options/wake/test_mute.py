"""Servers that do not wake up, or do not sleep, in every way: their group goes on, and each is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import turns_until
from options.wake.test_wake import asked, state
from proxy.services import Engine, Running, document, said, serving
from proxy.upstreams import Visit, plain

from hetlb.options.wake import doors, waker
from hetlb.options.wake.waker import LEAST_LATE_S, Pace, SleepState, Waker

#: Seconds in place of the limits of a real fleet.
SHORT_S = 0.4


class Sleepy(Engine):
    """A server with a sleep mode, whose answers to `/wake_up` and `/sleep` a test chooses.

    `well`: it does so; `says`: it answers and does not; `mute`: no answer, until `freed` is set; `error`:
    500; `closes`: the connection ends without an answer; `cut`: within one; `odd`: no HTTP.
    """

    def __init__(self, model: str, asleep: bool, **ways: str) -> None:
        super().__init__()
        self.served = model
        self.asleep = asleep
        self.ways = {"wake_up": "well", "sleep": "well"} | ways
        self.calls: list[str] = []
        self.freed = asyncio.Event()
        self.foreign = 0

    async def _route(self, visit: Visit) -> None:
        path = visit.head.split()[1].decode().split("?")[0].removeprefix("/")
        if path == "metrics":
            page = b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
            state = b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} %d\n' % (not self.asleep)
            visit.send(plain(page % self.foreign + state))
        elif path == "is_sleeping":
            visit.send(plain(b'{"is_sleeping":%s}' % (b"true" if self.asleep else b"false")))
        elif path in self.ways:
            self.calls.append(path)
            await self._turn(visit, path, self.ways[path])
        else:
            await super()._route(visit)

    async def _turn(self, visit: Visit, path: str, way: str) -> None:
        if way == "mute":
            await self.freed.wait()
        if way in ("mute", "well"):
            self.asleep = path == "sleep"
        if way == "closes":
            visit.writer.close()
        elif way == "cut":
            visit.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab")
            visit.reset()
        elif way == "odd":
            visit.send(b"220 ready\r\n\r\n")
            visit.writer.close()
        else:
            visit.send(plain(b"", b"500 Internal Server Error") if way == "error" else plain(b""))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every limit be short; none of them decides whether a test passes."""
    monkeypatch.setattr(doors, "_FROM_MEMORY_S", SHORT_S)
    monkeypatch.setattr(doors.Door, "first_wake_s", SHORT_S)
    for name in ("LEAST_LATE_S", "FIRST_SLEEP_S", "OTHERS_S", "_STALE_S"):
        monkeypatch.setattr(waker, name, SHORT_S)


@asynccontextmanager
async def group(folder: Path, *engines: Engine, **wake: Any) -> AsyncIterator[Running]:
    """A service of servers that share a GPU, one of each model; what is left asleep is known so."""
    fleet = document(policy={"name": "hetlb"}, queue={"no_instance_timeout_s": 1.0})
    fleet["models"] = [
        {
            "name": each.served,
            "instances": [
                {"name": f"i-{n}", "url": each.url, "wake": {"group": "gpu", "stay_s": 0.0, **wake}}
            ],
        }
        for n, each in enumerate(engines)
    ]
    async with serving(folder, fleet) as running:
        for n, each in enumerate(engines):
            if isinstance(each, Sleepy) and each.asleep:
                await turns_until(lambda n=n: state(running, f"i-{n}") is SleepState.ASLEEP)  # type: ignore[misc]
        yield running


def place(running: Running, name: str) -> waker.Sleeper:
    sleep = running.service._sleep
    assert isinstance(sleep, Waker)
    return sleep.places[name]


async def causes(running: Running) -> list[tuple[str, str]]:
    found = (await running.admin("GET", "/v1/status")).json["causes"]
    return [(each["cause"], each["instance"]) for each in found]


@pytest.mark.parametrize("sleep", ["well", "mute", "error"])
@pytest.mark.parametrize("wake_up", ["mute", "says", "error", "closes", "cut", "odd"])
async def test_a_server_that_does_not_wake_up_holds_up_no_other_of_its_group(
    tmp_path: Path, wake_up: str, sleep: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A mute one held its group for 900 s, and nothing was said before."""
    async with Sleepy("a", True, wake_up=wake_up, sleep=sleep) as odd, Sleepy("b", True) as good:
        async with group(tmp_path, odd, good) as running:
            first = asyncio.create_task(asked(running, "a"))
            await turns_until(lambda: "wake_up" in odd.calls)
            assert await asked(running, "b") == 200
            assert await first == 503
            await turns_until(lambda: state(running, "i-0") is SleepState.ASLEEP)
            lines = said(caplog.records, "i-0 does not wake up")
            assert len(lines) == odd.calls.count("wake_up"), "one line for each try"
            if wake_up in ("mute", "says"):
                assert "not awake after" in lines[0]
                assert len(lines) == 1, "a late one is left alone for a multiple of its time"
            assert not said(caplog.records, "could not be decided")
            status = (await running.admin("GET", "/v1/status")).json
            [model] = [each for each in status["models"] if each["model"] == "a"]
            assert model["state"] == "down"
            assert "i-0 does not wake up" in model["advice"]
            odd.ways = {"wake_up": "well", "sleep": "well"}
            odd.freed.set()


async def test_a_wake_that_ends_after_its_limit_is_one_and_is_learnt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Sleepy("a", True, wake_up="mute") as late, Sleepy("b", True) as other:
        async with group(tmp_path, late, other) as running:
            first = asyncio.create_task(asked(running, "a"))
            await turns_until(lambda: bool(said(caplog.records, "i-0 does not wake up")))
            assert await first == 503, "no request waits for it"
            assert state(running, "i-0") is SleepState.WAKING, "nobody else needs its GPU"
            late.freed.set()
            assert await asked(running, "a") == 200
            assert late.calls == ["wake_up"]
            wakes = place(running, "i-0").wakes
            assert wakes.mean_s is not None
            assert wakes.mean_s >= SHORT_S
            assert wakes.limit_s == waker.LATE_FACTOR * wakes.mean_s
            assert await causes(running) == []


async def test_one_that_is_awake_after_all_is_found_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hetlb.wake")
    async with Sleepy("a", True, wake_up="error") as odd:
        async with group(tmp_path, odd) as running:
            assert await asked(running, "a") == 503
            odd.asleep = False
            await turns_until(lambda: state(running, "i-0") is SleepState.AWAKE)
            assert said(caplog.records, "i-0 answers after all")
            assert await asked(running, "a") == 200
            assert await causes(running) == []


async def test_one_that_is_awake_after_all_beside_another_is_put_back_to_sleep(tmp_path: Path) -> None:
    async with Sleepy("a", True, wake_up="mute", sleep="mute") as odd, Sleepy("b", True) as good:
        async with group(tmp_path, odd, good) as running:
            first = asyncio.create_task(asked(running, "a"))
            await turns_until(lambda: "wake_up" in odd.calls)
            assert await asked(running, "b") == 200
            await first
            odd.ways["sleep"], odd.asleep = "well", False
            await turns_until(lambda: odd.asleep and state(running, "i-0") is SleepState.ASLEEP)
            assert place(running, "i-0").fault == ""
            assert not good.asleep
            odd.freed.set()


@pytest.mark.parametrize("sleep", ["mute", "says", "error", "closes", "cut"])
async def test_a_server_that_does_not_sleep_serves_on_and_is_named(
    tmp_path: Path, sleep: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Sleepy("a", False, sleep=sleep) as odd, Sleepy("b", True) as other:
        async with group(tmp_path, odd, other) as running:
            waits = asyncio.create_task(asked(running, "b"))
            await turns_until(lambda: place(running, "i-0").naps.wait_s(running.service.now()) > 0.0)
            assert said(caplog.records, "i-0 does not sleep")
            assert await asked(running, "a") == 200
            while ("no_sleep", "i-0") not in await causes(running):
                pass
            odd.ways["sleep"] = "well"
            odd.freed.set()
            place(running, "i-0").naps.well()
            assert await waits == 200
            assert odd.asleep
            assert await causes(running) == []


async def test_a_server_that_is_gone_leaves_its_gpu_to_its_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It could not be told to sleep: no other one of its group was ever woken."""
    async with Sleepy("b", True) as other:
        async with AsyncExitStack() as stack:
            gone = await stack.enter_async_context(Sleepy("a", False))
            async with group(tmp_path, gone, other) as running:
                assert await asked(running, "a") == 200
                await stack.aclose()
                assert await asked(running, "b") == 200
                assert place(running, "i-0").fault.startswith("it is down")
                assert await asked(running, "a") == 503


async def test_others_that_go_on_using_a_server_keep_it_awake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An instance that was to sleep got no requests for as long as others used it."""
    async with Sleepy("a", False) as used, Sleepy("b", True) as other:
        async with group(tmp_path, used, other) as running:
            used.foreign = 3
            await turns_until(lambda: running.instance("i-0").foreign == 3)
            waits = asyncio.create_task(asked(running, "b"))
            await turns_until(lambda: bool(said(caplog.records, "i-0 does not sleep: others go on using it")))
            assert await asked(running, "a") == 200
            used.foreign = 0
            place(running, "i-0").naps.well()
            assert await waits == 200


async def test_a_mute_instance_of_a_model_is_no_reason_to_leave_the_second_asleep(tmp_path: Path) -> None:
    async with Sleepy("a", True, wake_up="mute") as mute, Sleepy("a", True) as good:
        fleet = document(policy={"name": "hetlb"})
        instances = [{"name": f"i-{n}", "url": each.url, "wake": {}} for n, each in enumerate((mute, good))]
        fleet["models"] = [{"name": "a", "instances": instances}]
        async with serving(tmp_path, fleet) as running:
            for name in ("i-0", "i-1"):
                await turns_until(lambda name=name: state(running, name) is SleepState.ASLEEP)  # type: ignore[misc]
            place(running, "i-1").wakes.mean_s = 100.0  # it costs more
            assert await asked(running, "a") == 200
            assert mute.calls == ["wake_up"]
            assert good.calls == ["wake_up"]
            mute.freed.set()


@pytest.mark.parametrize("sleeps", [True, False])
async def test_a_command_that_hangs_is_killed_once_another_is_called(
    tmp_path: Path, sleeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    began, ended = tmp_path / "began", tmp_path / "slept"
    hang = "exec sleep 1000"
    wake = ["sh", "-c", f"echo $$ > {began}; {hang}"]
    commands = {"wake": wake, "sleep": ["sh", "-c", f"echo > {ended}; {'true' if sleeps else hang}"]}
    async with Sleepy("b", True) as good:
        fleet = document(policy={"name": "hetlb"}, queue={"no_instance_timeout_s": 1.0})
        nobody = {"name": "i-0", "url": "http://127.0.0.1:9", "wake": {"group": "gpu", "command": commands}}
        fleet["models"] = [
            {"name": "a", "instances": [nobody]},
            {"name": "b", "instances": [{"name": "i-1", "url": good.url, "wake": {"group": "gpu"}}]},
        ]
        async with serving(tmp_path, fleet) as running:
            await turns_until(lambda: state(running, "i-0") is SleepState.ASLEEP)
            await turns_until(lambda: state(running, "i-1") is SleepState.ASLEEP)
            first = asyncio.create_task(asked(running, "a"))
            await turns_until(lambda: began.exists() and bool(began.read_text()))
            process = Path("/proc") / began.read_text().strip()
            assert await asked(running, "b") == 200
            assert ended.exists(), "what is half started holds memory of the GPU"
            assert await first == 503
            assert len(said(caplog.records, "i-0 does not wake up")) == 1
            await turns_until(lambda: not process.exists())


async def test_two_mute_servers_and_one_that_is_well(tmp_path: Path) -> None:
    async with (
        Sleepy("a", True, wake_up="mute", sleep="mute") as one,
        Sleepy("b", True, wake_up="says", sleep="closes") as two,
        Sleepy("c", True) as good,
    ):
        async with group(tmp_path, one, two, good) as running:
            statuses = await asyncio.gather(*[asked(running, model) for model in "abcabc"])
            assert statuses == [503, 503, 200] * 2
            one.freed.set()


# --- times ---


def test_the_limit_follows_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waker, "LEAST_LATE_S", LEAST_LATE_S)
    pace = Pace(60.0)
    assert pace.limit_s == 60.0
    pace.took(2.0)
    assert pace.limit_s == LEAST_LATE_S, "a short one has a floor"
    pace.took(98.0)
    assert pace.limit_s == waker.LATE_FACTOR * 50.0


def test_pauses_grow_and_a_mute_one_has_a_small_part_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waker, "LEAST_LATE_S", LEAST_LATE_S)
    pace, now, limits, tries = Pace(60.0), 1000.0, [], []
    for _ in range(8):
        now += pace.wait_s(now)
        assert pace.take(now)
        tries.append(now)
        limits.append(pace.limit_s)
        now += pace.limit_s
        pace.failed(pace.limit_s, True, now)
        assert not pace.take(now)
    assert limits == [60.0, 120.0, 240.0, *[240.0] * 5]
    assert sum(limits) <= 0.25 * (now - tries[0] + 4 * limits[-1])
    pace.well()
    assert (pace.wait_s(now), pace.limit_s) == (0.0, 60.0)


def test_a_refusal_at_once_costs_no_pause_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, now, tries = Pace(60.0), 1000.0, 0
    while now < 1600.0:
        if pace.take(now):
            tries += 1
            pace.failed(0.0, False, now)
        now += waker.LOOK_S
    assert 20 <= tries <= 40
