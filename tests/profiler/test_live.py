"""`hetlb profile --url` against live servers: emulated engines, and stubs that misbehave."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from aiohttp import web

from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.core.types import Capacity
from hetlb.cli import profile_live
from hetlb.cli.main import build_parser, main
from hetlb.cli.profile import Facts
from hetlb.errors import HetlbError, InputError, ProfileError
from hetlb.tools.emulator import EmulatedEngine
from hetlb.tools.profiler.client import (
    CompletionStream,
    EngineClient,
    ServerFailed,
    TokenTimes,
    distinct_prompts,
)
from hetlb.tools.profiler.grid import DEFAULT_GRID, Size, StepKind, clip
from hetlb.tools.profiler.sample_file import Identity, Sample, SampleFile
from hetlb.tools.profiler.sweep import BusyError, Sweep, learn_max_num_seqs

Start = Callable[..., Awaitable[EmulatedEngine]]
#: Time scale of engines whose whole grid is measured: a decode takes a tenth of a second, so that a client
#: that waits for the core sees more of it than its end.
MEASURED = 0.08
GRID = "prefill: [[1, 64], [2, 64], [4, 64], [1, 256], [2, 256], [4, 256], [1, 512], [2, 512], [4, 512]]\n"
GRID += "decode: [[1, 64], [4, 64], [16, 64], [1, 256], [4, 256], [16, 256], [1, 512], [4, 512], [16, 512]]\n"


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """A small grid, measured once, into the folder of the test."""
    (tmp_path / "grid.yaml").write_text(GRID)
    return ["--grid", str(tmp_path / "grid.yaml"), "--repeats", "1", "--out", str(tmp_path / "p.yaml")]


async def profile(*flags: str) -> int:
    """The command as a person runs it, beside the engine's loop."""
    return await asyncio.to_thread(main, ["profile", *flags])


async def test_a_live_server_becomes_a_profile(
    start: Start, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = await start(time_scale=MEASURED)
    assert await profile("--url", engine.url, *flags, "--system", "emu", "--tp", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    made = load_profile(tmp_path / "p.yaml")
    assert document["profile"]["name"] == made.name == "emu-tiny-tp2"
    limits = made.engine
    assert (limits.kv_cache_tokens, limits.block_size, limits.max_num_seqs) == (65536, 16, 32)
    assert (limits.max_num_batched_tokens, limits.max_model_len) == (512, 2048)
    assert limits.version == "0.32.0"
    assert made.source is not None
    assert (made.source.kind, made.source.measured) == ("live", True)
    assert made.grid is not None
    assert made.grid.prefill_passes == (1, 1, 1, 1, 1, 2, 1, 2, 4)
    assert len(made.grid.decode) == 9
    assert sorted(os.listdir(tmp_path)) == ["grid.yaml", "p.yaml"]
    assert (engine.running, engine.waiting) == (0, 0)


async def test_tokens_of_a_step_are_learnt_from_the_engine_with_speculative_decoding(
    start: Start, flags: list[str], tmp_path: Path
) -> None:
    scale = 5.0 * MEASURED  # a decode has 2.5 times fewer steps
    engine = await start(time_scale=scale, tokens_per_step=2.5)
    assert await profile("--url", engine.url, *flags) == 0
    made = load_profile(tmp_path / "p.yaml")
    assert made.engine.tokens_per_step == pytest.approx(2.5, rel=0.01)
    assert made.grid is not None
    # Points are of steps, whose tokens come 2.5 times as fast.
    least_s = 0.7 * scale * 2.5 * engine.models[0].latency.step_s(1, 64)
    assert min(seconds for _, _, seconds in made.grid.decode) > least_s
    assert any(line.startswith("engine.tokens_per_step: 2.5") for line in made.assumed)


async def test_the_time_before_the_engine_has_a_request_is_fitted(
    start: Start, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, send = await start(time_scale=MEASURED), EngineClient.send

    async def send_late(self: EngineClient, prompts: list[list[int]], max_tokens: int) -> CompletionStream:
        await asyncio.sleep(0.05)
        return await send(self, prompts, max_tokens)

    monkeypatch.setattr(EngineClient, "send", send_late)
    assert await profile("--url", engine.url, *flags) == 0
    host = load_profile(tmp_path / "p.yaml").host
    assert host is not None
    assert host.request_s > 0.045


async def test_a_prompt_ahead_outlasts_what_a_server_takes_to_answer_heads(
    start: Start, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine had begun long before: of most prefills nothing was left after the head."""
    engine = await start(time_scale=0.2, max_num_batched_tokens=2048)
    send = EngineClient.send

    async def head_late(self: EngineClient, prompts: list[list[int]], max_tokens: int) -> CompletionStream:
        answer = await send(self, prompts, max_tokens)
        answer.head_s += 0.025
        return answer

    monkeypatch.setattr(EngineClient, "send", head_late)
    assert await profile("--url", engine.url, *flags) == 0
    made, latency = load_profile(tmp_path / "p.yaml"), engine.models[0].latency
    assert made.grid is not None
    shares = [
        seconds / (0.2 * latency.prefill_s(length, batch)) for batch, length, seconds in made.grid.prefill
    ]
    assert median(shares) > 0.6


# Measures step times: on a busy machine a sample may be refused.
@pytest.mark.slow
async def test_mixed_steps_are_measured_in_the_corners_of_a_large_engine(
    start: Start, tmp_path: Path
) -> None:
    limits = {"kv_cache_tokens": 500_000, "max_num_seqs": 300, "max_num_batched_tokens": 8192}
    engine = await start(time_scale=0.05, max_model_len=40_000, **limits)
    async with EngineClient(engine.url) as client:
        facts = await client.facts(None)
        seqs = await learn_max_num_seqs(client, facts, random.Random(1))
        capacity = facts.capacity.updated(Capacity(max_num_seqs=seqs, max_num_batched_tokens=8192))
        corners = [size for size in clip(DEFAULT_GRID, capacity) if size.phase is StepKind.MIXED]
        corners = [size for size in corners if size.tokens > 60_000 or size.length > 30_000]
        assert corners == [
            Size(StepKind.MIXED, 1, 32768, 700),
            Size(StepKind.MIXED, 256, 1024, 700),
            Size(StepKind.MIXED, 299, 256, 300),
        ]
        plain = [Size(StepKind.PREFILL, 4, 512), Size(StepKind.DECODE, 256, 1024)]
        with closing(SampleFile(tmp_path / "samples", Identity("tiny", None, None, None, None))) as file:
            sizes = [*plain, *corners]
            sweep = Sweep(client, facts, sizes, file, budget_s=200, repeats=1, rng=random.Random(0))
            measured = await sweep.run()
    assert measured.given_up == ()
    points = {Size(p.phase, p.batch, p.length, p.prefill_tokens): p.seconds for p in measured.points}
    assert set(points) == {*plain, *corners}
    latency = engine.models[0].latency
    for size in corners:  # no step is shorter than the engine's own
        own_s = latency.mixed_step_s(
            size.prefill_tokens, 1, size.prefill_tokens, size.batch, size.batch * size.length
        )
        assert points[size] > 0.9 * 0.05 * own_s


async def test_an_interrupted_sweep_goes_on(
    start: Start, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start(time_scale=MEASURED)
    args = build_parser("profile").parse_args(["profile", "--url", engine.url, *flags])
    args.facts = Facts()
    samples = tmp_path / "p.yaml.samples"
    kept = SampleFile.add

    def add_and_stop(self: SampleFile, added: list[Sample]) -> None:
        kept(self, added)
        if len(self.samples) == 5:
            raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(SampleFile, "add", add_and_stop)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.to_thread(profile_live.measure, args, None)
    lines = samples.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 5
    samples.write_bytes(b"".join(lines)[:-7])  # the machine went down while the fifth was written
    assert await profile("--url", engine.url, *flags) == 0
    assert not samples.exists()
    grid = load_profile(tmp_path / "p.yaml").grid
    assert grid is not None
    first = json.loads(lines[1])
    row = (first["size"]["batch"], first["size"]["length"], pytest.approx(first["seconds"], rel=1e-5))
    assert row in grid.prefill


async def test_samples_of_another_server_are_refused(
    start: Start, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = await start(time_scale=MEASURED)
    SampleFile(tmp_path / "p.yaml.samples", Identity("tiny", "0.9.1", 65536, 2048, 32)).close()
    assert await profile("--url", engine.url, *flags) == 2
    said = capsys.readouterr().err
    assert "engine_version: expected the server that the sweep was begun on, with 0.9.1, got" in said
    assert "p.yaml.samples" in said
    assert "delete it to start anew" in said
    (tmp_path / "p.yaml.samples").unlink()
    assert await profile("--url", engine.url, *flags) == 0


async def test_a_busy_server_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hetlb.tools.profiler.sweep._SETTLE_TIMEOUT_S", 0.05)
    engine = await start(time_scale=1.0)  # busy for half a minute
    async with EngineClient(engine.url) as client:
        facts = await client.facts(None)
        others = await client.send([[1] * 8], 2000)
        kept = closing(SampleFile(tmp_path / "samples", Identity("tiny", None, None, None, None)))
        sizes = [Size(StepKind.PREFILL, 1, 16)]
        async with others.reading():
            with kept as file, pytest.raises(BusyError, match="busy with the work of others"):
                await Sweep(client, facts, sizes, file, budget_s=60, rng=random.Random(0)).run()


async def test_a_batch_that_is_preempted_is_left_out(start: Start, tmp_path: Path) -> None:
    engine = await start(kv_cache_tokens=1024, max_model_len=512)
    async with EngineClient(engine.url) as client:
        facts = await client.facts(None)
        crowd = Size(StepKind.DECODE, 16, 60)  # 16 prompts fit, their answers do not
        sizes = [crowd, Size(StepKind.DECODE, 1, 60)]
        with closing(SampleFile(tmp_path / "samples", Identity("tiny", None, None, None, None))) as file:
            sweep = Sweep(client, facts, sizes, file, budget_s=60, rng=random.Random(0))
            measured = await sweep.run()
    assert [(point.batch, point.length) for point in measured.points] == [(1, 60)]
    assert measured.given_up == (
        "decode 16 x 60: left out: the engine preempted requests: its KV cache was full",
    )


# Measures step times: on a busy machine a sample may be refused.
@pytest.mark.slow
async def test_decodes_whose_last_blocks_are_read_again_run_before_the_prompt_comes(
    start: Start, tmp_path: Path
) -> None:
    engine = await start(time_scale=0.4, prefix_caching=True, block_size=128)
    async with EngineClient(engine.url) as client:
        facts = await client.facts(None)
        mixed = Size(StepKind.MIXED, 16, 256, 300)  # 16 times up to 128 tokens: several passes
        sizes = [Size(StepKind.PREFILL, 4, 128), Size(StepKind.DECODE, 16, 256), mixed]
        with closing(SampleFile(tmp_path / "samples", Identity("tiny", None, None, None, None))) as file:
            sweep = Sweep(client, facts, sizes, file, budget_s=60, rng=random.Random(0))
            measured = await sweep.run()
    assert mixed in [
        Size(point.phase, point.batch, point.length, point.prefill_tokens) for point in measured.points
    ]
    assert measured.given_up == ()


async def test_a_budget_that_no_server_of_this_speed_meets(start: Start, flags: list[str]) -> None:
    engine = await start()
    args = build_parser("profile").parse_args(["profile", "--url", engine.url, *flags, "--budget", "0.2s"])
    args.facts = Facts()
    with pytest.raises(InputError, match=r"--budget: expected at least \d+s for a server as slow as this"):
        await asyncio.to_thread(profile_live.measure, args, None)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--model", "other", "--model: expected one of tiny, got 'other'"),
        ("--url", "localhost:1", "--url: expected a URL like http://host:8000"),
        ("--budget", "soon", "--budget: expected a time such as 90s or 5m, got 'soon'"),
        ("--repeats", "0", "--repeats: expected a whole number from 1, got 0"),
    ],
)
async def test_wrong_flags_are_one_line(
    start: Start, flags: list[str], flag: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = await start()
    assert await profile("--url", engine.url, *flags, flag, value) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_grid_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("prefill: [[1, 0]]\ndecode: []\n")
    with pytest.raises(ProfileError, match=r"grid.yaml: prefill\[0\]\[1\]: expected"):
        profile_live.read_grid(path)


async def test_no_server_there(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert await profile("--url", "http://127.0.0.1:9", *flags) == 1
    assert "http://127.0.0.1:9/v1/models: no answer: Connection refused\n" in capsys.readouterr().err


# --- servers that do not do what they are asked -------------------------------------------------------


class Stub:
    """A server of one model whose completions are what a test says."""

    def __init__(self, events: Callable[[dict[str, Any]], list[Any]] | None = None, status: int = 200):
        self.events, self.status = events, status

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0]
        return f"http://{host}:{port}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]}, status=self.status)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        assert self.events is not None
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for event in self.events(await request.json()):
            if event is None:
                assert request.transport is not None
                request.transport.abort()
                return answer
            await answer.write(b"data: %b\n\n" % json.dumps(event).encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


def token(usage: int | None = None) -> dict[str, Any]:
    event: dict[str, Any] = {"choices": [{"index": 0, "text": "t"}]}
    if usage is not None:
        event["usage"] = {"completion_tokens": usage}
    return event


def total(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


async def ask(events: list[Any], max_tokens: int) -> list[TokenTimes]:
    async with Stub(lambda _: events) as url, EngineClient(url) as client:
        await client.facts("m")
        return await client.complete([[5, 6, 7]], max_tokens)


async def test_bundled_tokens_are_counted_by_the_running_usage() -> None:
    (times,) = await ask([token(3), token(6), total(6)], 6)
    assert [count for _, count in times.stamps] == [3, 6]


async def test_uncounted_bundles_of_tokens_are_refused() -> None:
    with pytest.raises(ServerFailed, match="bundles tokens"):
        await ask([token(), token(), total(6)], 6)


async def test_a_server_that_counts_at_the_end_alone_will_do() -> None:
    (times,) = await ask([token(), token(), total(2)], 2)
    assert [count for _, count in times.stamps] == [1, 2]


async def test_a_server_that_ignores_ignore_eos() -> None:
    with pytest.raises(ServerFailed, match=r"expected 5 tokens of every prompt \(ignore_eos\), got 2"):
        await ask([token(1), token(2), total(2)], 5)


async def test_a_server_that_goes_away_half_way() -> None:
    with pytest.raises(ServerFailed, match="broke off an answer"):
        await ask([token(1), None], 5)


async def test_a_server_that_reports_an_error() -> None:
    with pytest.raises(ServerFailed, match=r"reported an error: .*out of memory"):
        await ask([token(1), {"error": {"message": "out of memory"}}], 5)


async def test_a_key_that_is_missing() -> None:
    async with Stub(status=401) as url, EngineClient(url) as client:
        with pytest.raises(InputError, match=r"expected an API key that .* accepts"):
            await client.facts(None)


async def test_no_openai_server() -> None:
    async with Stub(status=404) as url, EngineClient(url) as client:
        with pytest.raises(InputError, match="expected an OpenAI-compatible server, got 404"):
            await client.facts(None)


async def test_a_server_of_several_engines_is_refused(start: Start) -> None:
    engine = await start(data_parallel_size=2)
    async with EngineClient(engine.url) as client:
        with pytest.raises(InputError, match="expected a server of one engine, got 2 data-parallel engines"):
            await client.facts(None)


def test_prompts_share_no_beginning() -> None:
    prompts = distinct_prompts(random.Random(1), 64, 20)
    assert len({prompt[0] for prompt in prompts}) == 64
    assert {len(prompt) for prompt in prompts} == {20}


def test_a_step_is_timed_inside_a_span() -> None:
    times = TokenTimes(((1.0, 1), (2.0, 2), (2.5, 4), (3.0, 5), (9.0, 6)))
    assert times.step_s(2.0, 3.0) == pytest.approx(1 / 3)
    assert times.step_s(2.0, 2.4) is None


def test_the_flags_exclude_each_other(tmp_path: Path) -> None:
    out = str(tmp_path / "p.yaml")
    assert main(["profile", "--url", "http://h", "--from", "roofline", "--out", out]) == 2
    assert main(["profile", "--url", "http://h"]) == 2
    assert isinstance(build_parser("profile"), argparse.ArgumentParser)
    assert issubclass(ServerFailed, HetlbError)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_grid_of_too_few_points_is_refused_before_anything_is_measured(
    phase: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {line.partition(":")[0]: line for line in GRID.splitlines()}
    lines[phase] = f"{phase}: [[1, 64], [2, 64]]"
    (tmp_path / "grid.yaml").write_text("\n".join(lines.values()))
    assert await profile("--url", "http://127.0.0.1:1", *flags) == 2
    expected = f"{phase}: expected at least 8 points over 2 batch sizes and 2 lengths, got 2 over 2 and 1"
    assert expected in capsys.readouterr().err


async def test_a_mixed_step_shorter_than_its_decodes_is_measured_again(start: Start, tmp_path: Path) -> None:
    engine = await start()
    async with EngineClient(engine.url) as client:
        facts = await client.facts(None)
        mixed = Size(StepKind.MIXED, 4, 256, 64)
        identity = Identity(facts.model, facts.version, None, None, None)
        with closing(SampleFile(tmp_path / "samples", identity)) as file:
            sweep = Sweep(client, facts, [mixed], file, budget_s=60.0, rng=random.Random(1), force=True)
            sweep._step_s[Size(StepKind.DECODE, 4, 256)] = 0.02
            times = iter([0.01, 0.03, 0.01, 0.01, 0.01])

            async def measured(size: Size) -> tuple[float, int]:
                return next(times), 0

            sweep._mixed = measured  # type: ignore[method-assign]
            assert (await sweep._undisturbed(mixed)).seconds == 0.03
            given_up = await sweep._undisturbed(mixed)
            assert given_up.seconds is None
            assert given_up.reason == "always below the 20 ms of its decodes alone"
