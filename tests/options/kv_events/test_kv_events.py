"""KV events over real sockets: a publisher that speaks as vLLM does, gaps, replays and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from helpers import turns_are_short, turns_until
from hypothesis import given
from hypothesis import strategies as st
from options.kv_events.kv_flood import KINDS, flooding
from options.kv_events.kv_publisher import CLEARED, SIZE, Publisher, removed, stored
from proxy.services import Engine, Running, document, serving

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.fleet_tables import KvEventsTable
from hetlb.balancer.core.block_index import (
    MAX_ADAPTERS,
    BlockIndex,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEventBatch,
    block_digests,
)
from hetlb.errors import ConfigError
from hetlb.options.kv_events import kv_events, zmtp
from hetlb.options.kv_events.kv_events import MOST_PUBLISHER_BYTES, PART_BLOCKS, read_batch
from hetlb.options.kv_events.zmtp import MAX_MESSAGE_BYTES, ZmtpConnection, ZmtpError

#: Seconds of silence and between questions, and the number of questions.
KEEP_ALIVE = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)


@pytest_asyncio.fixture
async def publisher() -> AsyncIterator[Publisher]:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        made = Publisher(folder)
        yield made
        await made.close()


def fleet(engine: Engine, table: object) -> dict[str, Any]:
    made = document(engine, policy={"name": "hetlb"})
    made["models"][0]["instances"][0]["kv_events"] = table
    return made


def held(running: Running, ids: list[int]) -> int:
    blocks = running.instance("i0").blocks
    assert isinstance(blocks, BlockIndex)
    return blocks.held("m", (SIZE, block_digests(array("q", ids), SIZE)))


def stored_tokens(running: Running, name: str) -> int:
    blocks = running.instance(name).blocks
    return blocks.stored_tokens if isinstance(blocks, BlockIndex) else 0


def state(running: Running) -> str:
    blocks = running.instance("i0").blocks
    return "none" if blocks is None else blocks.reason or "live"


async def test_what_is_held_follows_the_events(tmp_path: Path, publisher: Publisher) -> None:
    ids = list(range(16))
    async with Engine() as engine, serving(tmp_path, fleet(engine, publisher.endpoint)) as running:
        await publisher.subscribed()
        await publisher.publish(stored(ids[:8], 100), stored(ids[8:], 102, 101))
        await turns_until(lambda: state(running) == "live")
        assert held(running, ids) == 16
        await publisher.publish(removed(103))
        await turns_until(lambda: held(running, ids) == 12)
        [model] = (await running.admin("GET", "/v1/fleet")).json["models"]
        assert model["instances"][0]["kv_events"] == "live"
        await publisher.publish(CLEARED)
        await turns_until(lambda: held(running, ids) == 0)
        # A batch that never came: belief ends, and the reason is shown.
        await publisher.publish(stored(ids, 200), silently=True)
        await publisher.publish(removed(200))
        await turns_until(lambda: state(running) == "its KV events 3 to 3 were missed")
        # The engine starts again with an empty cache.
        publisher.restart()
        await publisher.publish(stored(ids, 1))
        await turns_until(lambda: state(running) == "live")
        assert held(running, ids) == 16
        await publisher.send(1, b"\xc1 no batch")
        await turns_until(lambda: state(running).startswith("expected vLLM's batch"))


async def test_what_was_missed_is_replayed(tmp_path: Path, publisher: Publisher) -> None:
    ids = list(range(16))
    table = {"endpoint": publisher.endpoint, "replay": publisher.replay}
    await publisher.publish(stored(ids[:8], 100), silently=True)  # before hetlb was there
    async with Engine() as engine, serving(tmp_path, fleet(engine, table)) as running:
        await turns_until(lambda: state(running) == "live")
        assert held(running, ids) == 8
        await publisher.publish(stored(ids[8:], 102, 101), silently=True)
        await publisher.publish(removed(103))
        await turns_until(lambda: held(running, ids) == 12)
        publisher.kept_from = 4
        await publisher.publish(silently=True)
        await publisher.publish()
        await turns_until(lambda: state(running) == "its KV events 3 to 3 were missed")


async def test_a_prompt_of_ids_goes_where_its_blocks_are(tmp_path: Path, publisher: Publisher) -> None:
    ids = list(range(4000))
    async with Engine() as first, Engine() as second:
        made = document(first, second, policy={"name": "hetlb"})
        made["models"][0]["instances"][1]["kv_events"] = publisher.endpoint
        async with serving(tmp_path, made) as running:
            await running.up("i0")
            await running.up("i1")
            await publisher.subscribed()
            await publisher.publish(stored(ids, 1))
            await turns_until(lambda: stored_tokens(running, "i1") == 4000)
            scheduler = running.scheduler
            request = msgspec.json.encode({"model": "m", "prompt": [*ids, 5, 6], "max_tokens": 1})
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(request), request)
            )
            assert b"x-hetlb-instance: i1" in (await reader.readuntil(b"\r\n\r\n")).lower()
            writer.close()
            await turns_until(lambda: not scheduler.in_flight)
            page = (await running.admin("GET", "/metrics")).body.decode()
            assert 'hetlb_instance_expected_cached_prompt_tokens_total{server="i1"} 4000' in page


@pytest.mark.parametrize("address", ["tcp://*:5557", "http://host:1", "host:5557", "tcp://host", "ipc://x"])
def test_an_address_that_cannot_be_connected_to(tmp_path: Path, address: str) -> None:
    path = tmp_path / "fleet.yaml"
    table = {"url": "http://h:1", "kv_events": address}
    path.write_bytes(msgspec.json.encode({"version": 1, "models": [{"name": "m", "instances": [table]}]}))
    with pytest.raises(ConfigError, match=r"models\[0\].instances\[0\].kv_events: expected an address"):
        load_fleet(path)


def events() -> Iterator[tuple[Any, Any]]:
    """Events as vLLM writes them, and what they mean."""
    contents = block_digests(array("q", [1, 2, 3, 4]), SIZE)
    new = stored([1, 2, 3, 4], 7)
    yield new, BlocksStored((7,), None, contents, SIZE)
    yield list(new.values()), BlocksStored((7,), None, contents, SIZE)
    yield ["BlockRemoved", [b"\0" * 7 + b"\x09" + b"x" * 24]], BlocksRemoved((9,))
    yield ["AllBlocksCleared"], BlocksCleared()
    salted = block_digests(array("q", [1, 2, 3, 4]), SIZE, ("s",))
    adapted = {**new, "lora_name": "a", "extra_keys": [["a", "s"]]}
    yield adapted, BlocksStored((7,), None, salted, SIZE, "a")


@pytest.mark.parametrize(("raw", "event"), list(events()))
def test_both_shapes_of_events_are_read(raw: Any, event: Any) -> None:
    assert tuple(read_batch(msgspec.msgpack.encode([1.0, [raw], None]))) == (event,)


def test_other_memory_and_other_groups_are_passed_over() -> None:
    raw = [{**stored([1] * 4, 7), "medium": "CPU"}, {**removed(7), "group_idx": 1}]
    assert tuple(read_batch(msgspec.msgpack.encode([1.0, raw]))) == ()


VALUES = (
    st.sampled_from(["BlockStored", "BlockRemoved"]) | st.integers(-5, 5) | st.none() | st.lists(st.none())
)
KEYS = st.sampled_from(["type", "block_hashes", "token_ids", "block_size"])
BATCHES = st.tuples(st.just(0.5), st.lists(st.dictionaries(KEYS, VALUES)))


@given(st.binary() | st.builds(msgspec.msgpack.encode, BATCHES))
def test_any_other_bytes_are_refused(payload: bytes) -> None:
    with contextlib.suppress(ValueError):  # nothing else may come of it
        list(read_batch(payload))


def parts(*events: Any) -> list[Any]:
    return list(read_batch(msgspec.msgpack.encode([1.0, list(events)])))


def test_a_long_event_is_told_in_parts_that_mean_the_same() -> None:
    ids = list(range(1000 * SIZE))
    salts = [["s"], None, ["t"]] + [None] * 600 + [["u"]]
    whole, split = BlockIndex(), BlockIndex()
    for index in (whole, split):
        index.apply(KvEventBatch(begins=True))
    for event in parts({**stored(ids, 5), "extra_keys": salts}, removed(*range(900, 1005))):
        assert len(event.hashes) <= PART_BLOCKS
        split.apply(KvEventBatch((event,)))
    extras = ["s", "", "t"] + [""] * 600 + ["u"]
    contents = block_digests(array("q", ids), SIZE, extras)
    whole.apply(KvEventBatch((BlocksStored(tuple(range(5, 1005)), None, contents, SIZE),)))
    whole.apply(KvEventBatch((BlocksRemoved(tuple(range(900, 1005))),)))
    assert split.stored_tokens == whole.stored_tokens == 895 * SIZE
    assert split.held("m", (SIZE, contents)) == whole.held("m", (SIZE, contents)) == 895 * SIZE


def test_adapters_without_end_are_forgotten() -> None:
    index = BlockIndex()
    index.apply(KvEventBatch(begins=True))
    contents = block_digests(array("q", range(SIZE)), SIZE)
    for number in range(2 * MAX_ADAPTERS + 1):
        index.apply(KvEventBatch((BlocksStored((number,), None, contents, SIZE, f"a{number}"),)))
    assert len(index._adapters) == 1
    assert index.held(f"a{number}", (SIZE, contents)) == SIZE
    with pytest.raises(ValueError, match="length <= 1024"):
        parts({**stored([1] * SIZE, 5), "lora_name": "x" * 1025})


async def test_a_connection_to_a_machine_that_is_gone_is_lost() -> None:
    """A machine without power says no end: the kernel asks for it."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(zmtp._GREETING + b"\x04\x06\x05READY")
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        connection = await ZmtpConnection.open(f"tcp://127.0.0.1:{address[1]}", "SUB")
        used = connection._writer.get_extra_info("socket")
        assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        of = [used.getsockopt(socket.IPPROTO_TCP, each) for each in KEEP_ALIVE]
        assert of[0] + of[1] * of[2] <= 60
        connection.close()


BOMBS = [
    [[]] * (MAX_MESSAGE_BYTES - 16),
    [["BlockRemoved", []]] * (MAX_MESSAGE_BYTES // 15 - 1),
    [["BlockRemoved", [1] * (MAX_MESSAGE_BYTES - 64)]],
    [["BlockStored", [1], None, [1] * (MAX_MESSAGE_BYTES - 64), 1]],
    [["BlockStored", [1] * (MAX_MESSAGE_BYTES // 2 - 64), None, [1] * (MAX_MESSAGE_BYTES // 2), 1]],
    [["BlockStored", [1], None, [1], 1, None, None, None, [[]] * (MAX_MESSAGE_BYTES - 64)]],
    [{"type": "x"}] * (MAX_MESSAGE_BYTES // 8),
    [{"type": "BlockStored", "block_hashes": [1], "token_ids": [2**63], "block_size": 1}],
    [{"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 0}],
]


@pytest.mark.parametrize("number", range(len(BOMBS)))
def test_a_message_takes_a_bounded_amount_of_memory(number: int) -> None:
    payload = msgspec.msgpack.encode([1.0, BOMBS[number]])
    assert len(payload) <= MAX_MESSAGE_BYTES + 64
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            assert len(list(islice(read_batch(payload), 3))) <= 3
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * MOST_PUBLISHER_BYTES


@pytest.mark.parametrize("kind", KINDS)
async def test_a_flood_of_events_leaves_the_loop_to_others(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"ipc://{tmp_path}/flood"
    async with Engine() as engine, serving(tmp_path, fleet(engine, endpoint)) as running:
        await running.up("i0")
        with flooding(endpoint, kind) as process:
            await turns_until(lambda: state(running) not in ("none", "no event has come yet"))
            for _ in range(20):
                assert (await running.admin("GET", "/healthz")).status == 200
            assert process.poll() is None, "the others had no turn until the flood was over"
        lines = [each for each in caplog.records if "what it has cached is estimated" in each.getMessage()]
        assert len(lines) <= 2


async def test_a_long_replay_comes_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand batches that are there at once: no part of their CPU is more than a small share of it."""
    count = 10_000
    batch = msgspec.msgpack.encode([0.5, [stored([1, 2, 3, 4], 1)]])
    messages = [[b"", n.to_bytes(8, "big"), batch] for n in range(count)]
    messages.append([b"", (-1).to_bytes(8, "big", signed=True), b""])

    class There:
        """A connection whose messages have come."""

        def send(self, *frames: bytes) -> None: ...
        def close(self) -> None: ...
        async def receive(self) -> list[bytes]:
            return messages.pop(0)

    async def opened(*_: object) -> There:
        return There()

    monkeypatch.setattr(kv_events.ZmtpConnection, "open", opened)
    table = KvEventsTable(endpoint="ipc://a", replay="ipc://b")
    told: list[KvEventBatch] = []
    stream = kv_events._Stream("i0", table, lambda _, batch: told.append(batch))
    async with turns_are_short():
        assert await stream._replay(0)
    assert len(told) == count


async def test_a_message_without_end_ends_its_connection(tmp_path: Path) -> None:
    """libzmq would keep the frames of one message until the last has come."""
    greetings = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = await reader.readexactly(64)
        greetings.append(greeting)
        ready = b"\x05READY\x0bSocket-Type\0\0\0\x03PUB"
        writer.write(greeting + bytes([4, len(ready)]) + ready)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"\x01\x01x" * 1000)
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "endless")
    endpoint = f"ipc://{tmp_path}/endless"
    async with server, Engine() as engine, serving(tmp_path, fleet(engine, endpoint)) as running:
        await turns_until(lambda: "frames of a message" in state(running))
        await turns_until(lambda: len(greetings) > 1)  # and it is tried again


SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(64), "expected a peer that speaks ZMTP 3"),
        (SIGNATURE + b"\x01" + bytes(53), "expected a peer that speaks ZMTP 3"),
        (SIGNATURE + b"\x03\x00" + b"CURVE".ljust(52, b"\0"), "expected a peer without authentication"),
        (SIGNATURE + b"\x03\x00" + b"NULL".ljust(52, b"\0") + b"\x00\x01x", "expected a peer that is ready"),
        (SIGNATURE + b"\x03\x00" + b"NULL".ljust(52, b"\0") + b"\xf0\x01x", "expected the flags of a frame"),
        (SIGNATURE + b"\x03\x00" + b"NULL".ljust(52, b"\0") + b"\x06" + b"\xff" * 8, "expected at most 10"),
    ],
)  # fmt: skip
async def test_a_peer_that_does_not_speak_zeromq(tmp_path: Path, sent: bytes, message: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "other"):
        with pytest.raises(ZmtpError, match=message):
            await ZmtpConnection.open(f"ipc://{tmp_path}/other", "SUB")
