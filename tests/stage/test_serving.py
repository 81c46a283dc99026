"""Coordinator and stages on real sockets: right tokens whatever path, and nothing held afterwards."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from stage.rig import Collector, Rig, rig, until
from stage.toy import answer, make_worker

from hetlb.balancer.core.types import RejectReason
from hetlb.tools.paths.path_scheduler import dispatches
from hetlb.tools.plan.check import check_path
from hetlb.tools.stage.coordinator import Sequence as Asked
from hetlb.tools.stage.stage_channel import ChannelError, connect
from hetlb.tools.stage.stage_messages import Sampling, pack


class Inline(ThreadPoolExecutor):
    """Runs at once: its results arrive in the next iteration of the loop."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def prompt_of(rng: random.Random, most: int = 60) -> list[int]:
    return [rng.randrange(250) for _ in range(rng.randint(1, most))]


def submit(
    made: Rig, prompt: list[int], count: int, sampling: Sampling | None = None, most: int | None = None
) -> tuple[Asked, Collector]:
    """Ask for `count` tokens; `most` is what the scheduler is told."""
    collector = Collector(count)
    asked = made.coordinator.submit(prompt, sampling or Sampling(len(prompt)), most or count, collector)
    return asked, collector


def check_log(made: Rig) -> Sequence[str]:
    """Check every path of the event log; the stages that begin them."""
    starts = []
    for _, network, hops in dispatches(made.events):
        check_path(network, hops)
        starts.append(hops[0].stage)
    return starts


@pytest.mark.parametrize("policy", ["hetlb", "round-robin", "swarm", "shortest-queue"])
async def test_answers_are_right_over_any_path(folder: Path, policy: str) -> None:
    rng = random.Random(1)
    async with rig(folder, table={"scheduler": policy}) as made:
        asked = [(prompt, *submit(made, prompt, 12)) for prompt in (prompt_of(rng) for _ in range(40))]
        await until(lambda: all(collector.done for _, _, collector in asked))
        for prompt, _, collector in asked:
            assert collector.tokens == answer(prompt, 12)
        await made.idle()
        assert set(check_log(made)) == {"a", "b"}
        assert max(stage.runner.largest for stage in made.stages.values()) > 1, "nothing was batched"


async def test_sampling_is_the_same_over_any_path(folder: Path) -> None:
    prompt = [1, 2, 3]
    sampling = Sampling(3, temperature=0.9, top_p=0.9, seed=5, repetition_penalty=1.2, history=pack(prompt))
    async with rig(folder, table={"scheduler": "round-robin"}) as made:
        asked = [submit(made, prompt, 20, sampling)[1] for _ in range(4)]
        await until(lambda: all(collector.done for collector in asked))
        assert [each.tokens for each in asked] == [answer(prompt, 20, sampling)] * 4
        await made.idle()


async def test_a_client_that_leaves_frees_everything(folder: Path) -> None:
    rng = random.Random(2)
    async with rig(folder) as made:
        asked = [(prompt, *submit(made, prompt, 30)) for prompt in (prompt_of(rng) for _ in range(30))]
        for i, (_, sequence, collector) in enumerate(asked):
            if i % 3 == 0:
                await until(lambda c=collector, n=i: len(c.tokens) >= n % 5)
                made.coordinator.cancel(sequence)
        stay = [(prompt, collector) for i, (prompt, _, collector) in enumerate(asked) if i % 3]
        await until(lambda: all(collector.done for _, collector in stay))
        for prompt, collector in stay:
            assert collector.tokens == answer(prompt, 30)
        await made.idle()


async def test_requests_of_a_killed_stage_go_on_elsewhere(folder: Path) -> None:
    rng = random.Random(3)
    async with rig(folder) as made:
        asked = [(prompt, submit(made, prompt, 40)[1]) for prompt in (prompt_of(rng, 20) for _ in range(24))]
        await until(lambda: sum(len(collector.tokens) for _, collector in asked) > 100)
        await made.stages["a"].kill()
        await until(lambda: all(collector.done for _, collector in asked))
        for prompt, collector in asked:
            assert collector.tokens == answer(prompt, 40)
        assert made.coordinator.replays > 0
        await made.stages["a"].start()
        await until(lambda: made.coordinator.scheduler.ledgers.get("a") is not None)
        await made.idle()
        before = len(check_log(made))
        again = [submit(made, [i], 5)[1] for i in range(20)]
        await until(lambda: all(collector.done for collector in again))
        assert "a" in check_log(made)[before:], "the stage that came back is not used"


async def test_without_a_path_requests_end_with_a_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetlb.tools.stage.coordinator.NO_PATH_S", 0.05)
    async with rig(folder, "ac") as made:
        _, collector = submit(made, [1, 2, 3], 400)
        await until(lambda: bool(collector.tokens))
        await made.stages["c"].kill()
        await until(lambda: collector.done)
        assert collector.failure is not None
        assert collector.failure[0] is RejectReason.NO_INSTANCE
        assert collector.tokens == answer([1, 2, 3], len(collector.tokens))
        await made.idle()


async def test_a_stage_that_joins_by_reload_is_used(folder: Path) -> None:
    async with rig(folder) as made:
        await made.coordinator.reconfigure(made.group("ac"))
        assert set(made.coordinator.scheduler.ledgers) == {"a", "c"}
        await made.coordinator.reconfigure(made.group("abcd"))
        await until(lambda: len(made.coordinator.scheduler.ledgers) == 4)
        asked = [submit(made, [i], 10)[1] for i in range(30)]
        await until(lambda: all(collector.done for collector in asked))
        assert {"a", "b"} <= set(check_log(made))
        await made.idle()


async def test_preempted_requests_go_on_with_the_right_tokens(folder: Path) -> None:
    # Short answers at first, so that the long ones are booked as short: two of 90 tokens do not fit into 128.
    async with rig(folder, "ac", token_layers=7 * 128, table={"high_water": 1.0}) as made:
        for number in range(40):
            _, collector = submit(made, [number], 2, most=100)
            await until(lambda c=collector: c.done)
        asked = [(prompt, submit(made, prompt, 70, most=100)[1]) for prompt in ([i] * 20 for i in range(5))]
        await until(lambda: all(collector.done for _, collector in asked))
        for prompt, collector in asked:
            assert collector.tokens == answer(prompt, 70)
        assert made.coordinator.preemptions > 0
        await made.idle()


async def test_only_holders_of_the_key_are_let_in(folder: Path) -> None:
    key = b"0123456789abcdef"
    async with rig(folder, "ac", key=key) as made:
        _, collector = submit(made, [5], 5)
        await until(lambda: collector.done)
        assert collector.tokens == answer([5], 5)
        url = f"http://127.0.0.1:{made.stages['a'].port}"
        async with aiohttp.ClientSession() as http:
            for wrong in (b"", b"fedcba9876543210"):
                with pytest.raises(ChannelError, match="it has another key"):
                    await connect(http, url, wrong, 1, None)
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await http.ws_connect(f"{url}/v1/stage")
            assert refused.value.status == 403
            async with http.get(f"{url}/metrics") as response:
                assert "vllm:kv_cache_usage_perc" in await response.text()


async def test_stages_speak_tls(folder: Path) -> None:
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(client)
    async with rig(folder, "ac", tls=client, server_tls=server, key=b"0123456789abcdef") as made:
        _, collector = submit(made, [5, 6], 8)
        await until(lambda: collector.done)
        assert collector.tokens == answer([5, 6], 8)
        await made.idle()
        async with aiohttp.ClientSession() as http:
            url = f"https://localhost:{made.stages['a'].port}"
            with pytest.raises(ChannelError, match="certificate verify failed"):
                await connect(http, url, b"0123456789abcdef", 1, None)


async def test_a_coordinator_that_goes_leaves_nothing_behind(folder: Path) -> None:
    async with rig(folder) as made:
        asked = [submit(made, [i] * 9, 400)[1] for i in range(10)]
        await until(lambda: all(collector.tokens for collector in asked))
        assert any(stage.pool.used for stage in made.stages.values())
        await made.coordinator.close()
        await until(lambda: not any(stage.pool.used for stage in made.stages.values()))
        assert all(collector.failure is not None for collector in asked)


async def test_a_prompt_in_chunks_shares_batches_with_others(folder: Path) -> None:
    async with rig(folder, "ac", max_num_batched_tokens=8) as made:
        long = list(range(1, 201))
        asked = [(p, submit(made, p, 6)[1]) for p in (long, [1], [2, 3])]
        await until(lambda: all(collector.done for _, collector in asked))
        for prompt, collector in asked:
            assert collector.tokens == answer(prompt, 6)
        assert made.stages["a"].runner.batches >= 25
        await made.idle()


async def test_a_coordinator_that_falls_silent_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetlb.tools.stage.worker.SILENCE_S", 0.3)
    monkeypatch.setattr("hetlb.tools.stage.stage_channel.HEARTBEAT_S", 1000.0)
    async with rig(folder, "ac") as made:
        made.stages["c"].runner.gate.clear()  # no token comes, so nothing is sent
        _, collector = submit(made, [1, 2, 3], 5)
        await until(lambda: made.stages["a"].pool.used > 0)
        await until(lambda: made.stages["a"].pool.used == 0)
        made.stages["c"].runner.gate.set()
        assert collector.failure is None


@pytest.mark.parametrize("turns", range(6))
async def test_a_worker_can_be_cancelled_when_a_batch_just_ended(folder: Path, turns: int) -> None:
    worker, _, _ = make_worker(folder, 0, 7)
    worker._thread = Inline()
    batch = asyncio.create_task(worker._batch([]))
    for _ in range(turns):
        await asyncio.sleep(0)
    cancelled = batch.cancel()
    await asyncio.gather(batch, return_exceptions=True)
    assert batch.cancelled() == cancelled
