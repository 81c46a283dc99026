"""Host time that a profile of tables assumes: measured unasked on an idle engine, shown, and written down."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from helpers import HANG_S, turns_until
from proxy.services import Engine, Running, document, said, serving
from proxy.upstreams import plain

from hetlb.balancer.config.profile_file import Profile, load_profile
from hetlb.tools.emulator import EmulatedEngine

#: A real engine whose lone step takes 13 ms, by tables that say 2 ms.
REAL: dict[str, Any] = {
    "version": 1,
    "name": "real",
    "model": {"name": "m"},
    "engine": {"kv_cache_tokens": 8192, "max_num_seqs": 32, "max_model_len": 64},
    "prefill": {"k1": 1e-4, "k2": 1e-3, "k3": 0.0, "k4": 5e-3},
    "decode": {"k5": 5e-8, "k6": 6e-5, "k7": 0.0, "k8": 1.3e-2},
}
TABLES: dict[str, Any] = {
    **REAL,
    "version": 2,
    "name": "tables",
    "decode": {**REAL["decode"], "k8": 2e-3},
    "host": {"iteration_s": 4e-4, "sequence_s": 1.2e-5, "request_s": 4e-3},
    "assumed": ["host: 0.4 ms an iteration", "prompts beyond 2048 tokens: extrapolated"],
}


def fleet_of(folder: Path, *engines: Any, profile: dict[str, Any] = TABLES) -> dict[str, Any]:
    """Return a fleet whose engines share a profile."""
    (folder / "p.yaml").write_text(yaml.safe_dump(profile, sort_keys=False))
    fleet = document(*engines)
    for instance in fleet["models"][0]["instances"]:
        instance["profile"] = "p.yaml"
    return fleet


async def host_of(running: Running) -> dict[str, Any]:
    fleet = (await running.admin("GET", "/v1/fleet")).json
    found: dict[str, Any] = fleet["models"][0]["instances"][0]["believes"]["host"]
    return found


async def measured(running: Running) -> None:
    await turns_until(lambda: not running.instance("i0").spec.host_assumed_in)


@pytest.mark.parametrize("free", [True, False])
async def test_an_idle_engine_is_measured_and_the_profile_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, free: bool
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("os.access", lambda *_: free)
    async with EmulatedEngine(msgspec.convert(REAL, Profile)) as engine:
        fleet = fleet_of(tmp_path, engine)
        path = tmp_path / "p.yaml"
        path.write_text(f"# ours\n{path.read_text()}# the end\n")
        before = path.read_text()
        async with serving(tmp_path, fleet) as running:
            assert (await host_of(running))["source"] == "assumed"
            await measured(running)
            host = await host_of(running)
            assert host["source"] == "measured"
            # A machine that is busy can only add to it.
            assert host["value"] > 0.009
            (line,) = said(caplog.records, "its host adds")
            model = running.instance("i0").latency
    if not free:
        assert "not written" in line
        assert path.read_text() == before
        return
    written = load_profile(path)
    assert written.latency == model
    assert not written.host_assumed
    assert "prompts beyond 2048 tokens: extrapolated" in written.assumed
    # The points' own times stay, and so does what people wrote.
    assert written.decode.k8 == 2e-3
    kept = [line for line in path.read_text().splitlines() if line in before.splitlines()]
    assert kept[0] == "# ours"
    assert kept[-1] == "# the end"
    assert len(kept) > 15


async def test_a_request_of_a_client_ends_a_measurement_and_the_next_idle_moment_is_another_try(
    tmp_path: Path,
) -> None:
    async with Engine() as engine:
        engine.hold()
        async with serving(tmp_path, fleet_of(tmp_path, engine)) as running:
            probe = await engine.asked_for(1)
            assert b"ignore_eos" in probe.body
            asking = asyncio.create_task(running.ask())
            client = await engine.asked_for(2)
            assert b"hello" in client.body
            async with asyncio.timeout(HANG_S):
                await probe.until_left()
            engine.released.set()
            assert (await asking).status == 200
            assert b"ignore_eos" in (await engine.asked_for(3)).body
            assert (await host_of(running))["source"] == "assumed"


async def test_an_engine_that_does_not_complete_is_asked_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with Engine(plain(b'{"error":"no"}', b"404 Not Found")) as engine:
        async with serving(tmp_path, fleet_of(tmp_path, engine)):
            await turns_until(lambda: bool(said(caplog.records, "could not be measured")))
            probes = engine.probes
            await turns_until(lambda: engine.probes > probes + 5)
            assert len(engine.asked) == 1
        assert load_profile(tmp_path / "p.yaml").host_assumed


async def test_what_is_known_is_not_measured(tmp_path: Path) -> None:
    known = {**TABLES, "assumed": []}
    async with Engine() as engine, serving(tmp_path, fleet_of(tmp_path, engine, profile=known)) as running:
        await turns_until(lambda: engine.probes > 5)
        assert engine.asked == []
        assert (await host_of(running))["source"] == "measured"


async def test_a_slow_server_is_asked_if_it_still_is_while_others_have_its_work(tmp_path: Path) -> None:
    known = {**REAL, "assumed": []}
    async with EmulatedEngine(msgspec.convert(REAL, Profile)) as slow, Engine() as other:
        other.hold()
        async with serving(tmp_path, fleet_of(tmp_path, slow, other, profile=known)) as running:
            state, instance = "/v1/fleet/instances/i0/state", running.instance("i0")
            instance.speed.slow = True
            probes = other.probes
            await turns_until(lambda: other.probes > probes + 5)
            assert not instance.speed.answers, "no client waits for what it would show"
            await running.admin("PUT", state, {"state": "drain"})
            asking = asyncio.create_task(running.ask())
            await other.asked_for(1)
            await running.admin("PUT", state, {"state": "ready"})
            await turns_until(lambda: not instance.speed.in_doubt)  # after three good answers
            other.released.set()
            assert (await asking).status == 200
            assert instance.speed.answers == 3
            assert len(other.asked) == 1
