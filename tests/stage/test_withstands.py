"""Strangers, web pages, odd requests, broken devices: what they can do to stages and to other requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import aiohttp
import pytest
from helpers import HANG_S
from stage.rig import Rig, rig, until
from stage.test_serving import prompt_of, submit
from stage.toy import VOCABULARY, answer

from hetlb.tools.stage import stage_channel as auth
from hetlb.tools.stage.stage_channel import check_peer, connect
from hetlb.tools.stage.stage_messages import (
    Close,
    Lost,
    Opening,
    Pass,
    Passes,
    RouteHop,
    Sampling,
    decode,
    encode,
    pack,
)
from hetlb.tools.stage.worker import MOST_STRANGERS

POISON = 250
KEY = b"0123456789abcdef"


@pytest.mark.parametrize("alone", [False, True])
async def test_a_request_that_breaks_its_batch_fails_alone(folder: Path, alone: bool) -> None:
    rng = random.Random(4)
    async with rig(folder, "ac") as made:
        made.stages["a"].runner.poison = POISON
        others = [] if alone else [(p, submit(made, p, 8)[1]) for p in (prompt_of(rng) for _ in range(12))]
        # More than the failures after which a worker with a broken device ends.
        bad = [submit(made, [1, POISON, 2], 8)[1] for _ in range(5)]
        others += [(p, submit(made, p, 8)[1]) for p in (prompt_of(rng) for _ in range(12))]
        await until(lambda: all(each.done for each in (*bad, *(each for _, each in others))))
        for prompt, collector in others:
            assert collector.tokens == answer(prompt, 8)
        for collector in bad:
            assert collector.failure == (None, "The request cannot be computed: no memory.")
        assert made.coordinator.replays == 0
        await made.idle()


async def test_a_request_without_a_next_token_fails_alone(folder: Path) -> None:
    async with rig(folder, "ac") as made:
        banned = Sampling(2, temperature=1.0, top_p=0.9, min_tokens=4, stop=pack(range(VOCABULARY)))
        bad = [submit(made, [1, 2], 4, banned)[1] for _ in range(4)]
        _, good = submit(made, [3, 4], 9)
        await until(lambda: good.done and all(each.done for each in bad))
        assert good.tokens == answer([3, 4], 9)
        assert all(each.failure == (None, "The request cannot be computed: its parameters allow no token.")
                   for each in bad)  # fmt: skip
        assert made.coordinator.replays == 0
        await made.idle()


async def test_a_worker_whose_device_is_broken_ends_and_its_requests_go_elsewhere(folder: Path) -> None:
    async with rig(folder) as made:
        stage = made.stages["a"]
        asked = [(prompt, submit(made, prompt, 30)[1]) for prompt in ([i, 9] for i in range(12))]
        await until(lambda: sum(len(each.tokens) for _, each in asked) > 30)
        stage.runner.broken = True
        await until(lambda: stage._task.done())
        await stage.kill()  # as `hetlb stage` does then
        await until(lambda: all(each.done for _, each in asked))
        for prompt, collector in asked:
            assert collector.tokens == answer(prompt, 30)


async def test_a_hung_batch_is_noticed_and_its_requests_are_not_sent_on(folder: Path) -> None:
    async with rig(folder, deadline_s=0.2, table={"scheduler": "round-robin"}) as made:
        for name in "ab":
            made.stages[name].runner.gate.clear()
        _, collector = submit(made, [1, 2, 3], 5)
        await until(lambda: collector.done)
        assert collector.failure == (None, "The request cannot be computed: its batch did not end in time.")
        hung = [stage for stage in made.stages.values() if stage._task.done()]
        assert [stage.worker.hung for stage in hung] == [True]
        for stage in made.stages.values():
            stage.runner.gate.set()


async def test_a_worker_that_is_stopped_beside_a_batch_that_hangs_does_not_wait_for_it(folder: Path) -> None:
    async with rig(folder, "ac") as made:
        stage = made.stages["a"]
        stage.runner.gate.clear()
        submit(made, [1, 2, 3], 5)
        await until(lambda: stage.worker._computing is not None and stage.worker._computing.running())
        await stage.worker.close()
        assert stage.worker.hung, "`hetlb stage` ends the process where this is so"
        stage.runner.gate.set()


# --- the door ---


async def test_silent_connections_do_not_keep_others_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetlb.tools.stage.worker.STRANGER_S", 0.1)
    async with rig(folder, "ac", key=KEY) as made:
        port = made.stages["a"].port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MOST_STRANGERS)]
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{port}"
            channel, welcome = await connect(http, url, KEY, 5, None)
            assert (welcome.first, welcome.end) == (0, 7)
            await channel.close()
        async with asyncio.timeout(HANG_S):
            for reader, writer in silent:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()


async def test_little_is_read_before_the_proof(folder: Path) -> None:
    async with rig(folder, "ac", key=KEY) as made:
        for begin in (
            b"GET /v1/stage HTTP/1.1\r\n",
            b"POST /v1/stage HTTP/1.1\r\ncontent-length: 1000000000\r\n\r\n",
        ):
            _, writer = await asyncio.open_connection("127.0.0.1", made.stages["a"].port)
            sent = 0
            writer.write(begin)
            async with asyncio.timeout(HANG_S):
                while sent < 64 << 20:
                    try:
                        writer.write(b"x: " + b"y" * 900 + b"\r\n")
                        await writer.drain()
                    except ConnectionError:
                        break
                    sent += 1000
            assert sent < 16 << 20, "what the kernel buffers, and little more"
            writer.close()


async def test_web_pages_are_refused_without_a_key_too(folder: Path) -> None:
    async with rig(folder, "ac") as made:
        url = f"http://127.0.0.1:{made.stages['a'].port}/v1/stage"
        async with aiohttp.ClientSession() as http:
            nonce = auth.new_nonce()
            headers = auth.hello(9, nonce)
            async with http.get(url, headers=headers) as response:
                stage_nonce, _ = auth.challenge(response.headers) or (b"", b"")
            headers |= auth.proof_headers(stage_nonce, auth.client_proof(b"", nonce, stage_nonce, 9))
            for odd in ({"origin": "https://page.example"}, {}):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await http.ws_connect(url, headers=odd | ({} if not odd else headers))
                assert refused.value.status == 403


@pytest.mark.parametrize(
    ("address", "loopback", "allowed"),
    [
        ("127.0.0.1", True, True), ("::1", True, True), ("::ffff:127.0.0.1", True, True),
        ("10.0.0.1", True, False), ("10.0.0.1", False, True), ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False), ("0.0.0.0", False, False),
        ("224.0.0.1", False, False), ("fe80::1", False, False),
        ("100.100.100.200", False, False), ("64:ff9b::a9fe:a9fe", False, False),
    ],
)  # fmt: skip
def test_addresses_of_routes(address: str, loopback: bool, allowed: bool) -> None:
    try:
        check_peer(address, loopback=loopback)
        found = True
    except OSError:
        found = False
    assert found is allowed


@pytest.mark.parametrize("url", ["http://169.254.169.254:80", "http://10.255.255.1:80", "http://0.0.0.0:9"])
async def test_a_route_does_not_make_a_keyless_stage_connect_anywhere(folder: Path, url: str) -> None:
    made = Rig(folder, "a")
    stage = made.stages["a"]
    await stage.start()
    try:
        async with aiohttp.ClientSession() as http:
            channel, _ = await connect(http, f"http://127.0.0.1:{stage.port}", b"", 3, None)
            lease = 3 << 32 | 1
            opening = Opening((RouteHop("", 0, 7), RouteHop(url, 7, 12)), Sampling(1))
            channel.send(encode(Passes([Pass(lease, 0, 0, 1, True, opening)]), pack([1])))
            async for frame in channel.frames(HANG_S):
                message, _ = decode(frame)
                assert isinstance(message, Lost)
                assert "expected an address" in message.reason
                break
            channel.send(encode(Close([lease])))
            await channel.close()
    finally:
        await stage.kill()
