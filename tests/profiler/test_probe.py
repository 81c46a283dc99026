"""Host time of an idle server: found to the microsecond on a clock of the test, and refused on a busy one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from profiler.conftest import PROFILE, Start
from profiler.test_live import profile

from hetlb.balancer.config.profile_file import Profile, load_profile
from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.step_times import DecodeTable
from hetlb.balancer.core.types import Capacity
from hetlb.tools.profiler.client import EngineClient, ServerFacts, TokenTimes
from hetlb.tools.profiler.sources import assumed_host
from hetlb.tools.profiler.sweep import BusyError, probe_host

TABLES = msgspec.convert(PROFILE, Profile).latency


HOST = assumed_host(True)
ASSUMED = replace(TABLES, host_s=HOST.iteration_s, host_sequence_s=HOST.sequence_s, request_s=HOST.request_s)


class Clocked(EngineClient):
    """An engine on a clock of its own, with times of a latency model."""

    def __init__(self, latency: LatencyModel, *, busy: bool = False) -> None:
        super().__init__("http://engine")
        self.now = 100.0
        self.asked: list[int] = []
        self._busy = busy
        self._latency = latency

    async def sample(self) -> EngineSample:
        return EngineSample(running=int(self._busy), waiting=0)

    async def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[TokenTimes]:
        (prompt,) = prompts
        self.asked.append(max_tokens)
        self.now += self._latency.request_s + self._latency.prefill_s(len(prompt))
        stamps = [(self.now, 1)]
        for token in range(2, max_tokens + 1):
            self.now += self._latency.step_s(1.0, len(prompt) + token)
            stamps.append((self.now, token))
        return [TokenTimes(tuple(stamps))]


async def probed(client: Clocked, most: int | None = None) -> LatencyModel:
    facts = ServerFacts("m", None, Capacity(max_model_len=most), counts=True, prefix_cache=False)
    return await probe_host(client, facts, ASSUMED, random.Random(1), lambda: client.now)


@pytest.mark.parametrize("times", [0.0, 0.5, 4.0])
async def test_the_host_time_of_an_idle_server_is_found(times: float) -> None:
    true = replace(
        TABLES,
        host_s=times * HOST.iteration_s,
        # One sequence does not show what many add: more than usual is not assumed of them.
        host_sequence_s=min(1.0, times) * HOST.sequence_s,
        request_s=0.003 * times,
    )
    found = await probed(Clocked(true))
    for key in ("host_s", "host_sequence_s", "request_s"):
        assert getattr(found, key) == pytest.approx(getattr(true, key), abs=2e-6), key


async def test_a_server_faster_than_its_tables_has_shorter_decode_steps() -> None:
    """Tables of a slow attention kernel, as models without grouped heads have."""
    table = DecodeTable(5e-8, 0.0, (1, 64), (0.0066, 0.0080))
    tables = replace(ASSUMED, better_decode=table)
    true = replace(
        TABLES, better_decode=replace(table, seconds=tuple(each - 0.0014 for each in table.seconds))
    )
    client = Clocked(true)
    facts = ServerFacts("m", None, Capacity(), counts=True, prefix_cache=False)
    found = await probe_host(client, facts, tables, random.Random(1), lambda: client.now)
    assert found.host_s == found.host_sequence_s == 0.0
    for batch in (1, 8, 64):
        assert found.step_s(batch, 500 * batch) == pytest.approx(true.step_s(batch, 500 * batch), rel=0.01)
    # Within the error of tables nothing changes.
    near, assumed = Clocked(true), replace(true, host_s=4e-4)
    same = await probe_host(near, facts, assumed, random.Random(1), lambda: near.now)
    assert same.better_decode == true.better_decode


async def test_a_probe_ends_in_time_on_a_slow_server_and_fits_a_short_context() -> None:
    slow = Clocked(replace(TABLES, host_s=0.2))
    began = slow.now
    found = await probed(slow)
    assert found.host_s + found.host_sequence_s == pytest.approx(0.2, rel=1e-3)
    assert slow.asked.count(200) == 2  # one to warm up and one that counts
    assert slow.now - began < 100.0
    short = Clocked(TABLES)
    await probed(short, most=64)
    assert max(short.asked) == 32


async def test_a_busy_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetlb.tools.profiler.sweep._SETTLE_TIMEOUT_S", 0.0)
    with pytest.raises(BusyError):
        await probed(Clocked(TABLES, busy=True))


CSV = "phase,batch,length,latency_ms\n" + "".join(
    f"{phase},{batch},{length},{base + 0.001 * batch * length}\n"
    for phase, base in (("prefill", 5), ("decode", 2))
    for batch in (1, 2, 4)
    for length in (64, 256, 512)
)


async def test_a_profile_of_tables_takes_the_host_time_of_a_server(start: Start, tmp_path: Path) -> None:
    engine = await start(time_scale=1.0)
    (tmp_path / "grid.csv").write_text(CSV)
    flags = ("--from", f"csv:{tmp_path}/grid.csv", "--out", str(tmp_path / "p.yaml"))
    assert await profile(*flags, "--probe", f"{engine.url}/v1") == 0
    host = load_profile(tmp_path / "p.yaml").host
    assert host is not None
    # A step of the engine lasts 13 ms, a step of the tables 2: a busy machine can only add to it.
    assert host.iteration_s > 0.009
    assert await profile("--from", "roofline", "--out", str(tmp_path / "q.yaml"), "--probe", engine.url) == 2
