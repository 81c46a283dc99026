"""KV events over real sockets: a publisher that speaks as vLLM does, gaps, replays and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from helpers import turns_until
from hypothesis import given
from hypothesis import strategies as st
from proxy.kv_publisher import CLEARED, SIZE, Publisher, removed, stored
from proxy.services import Engine, Running, document, serving

from hetlb.config.fleet import load_fleet
from hetlb.core.block_index import BlocksCleared, BlocksRemoved, BlocksStored, block_digests
from hetlb.errors import ConfigError
from hetlb.proxy.kv_events import read_batch


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
    assert blocks is not None
    return blocks.held("m", (SIZE, block_digests(array("q", ids), SIZE)))


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
            await turns_until(lambda: running.scheduler.fleet.block_tokens == SIZE)
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
    assert read_batch(msgspec.msgpack.encode([1.0, [raw], None])) == (event,)


def test_other_memory_and_other_groups_are_passed_over() -> None:
    raw = [{**stored([1] * 4, 7), "medium": "CPU"}, {**removed(7), "group_idx": 1}]
    assert read_batch(msgspec.msgpack.encode([1.0, raw])) == ()


VALUES = (
    st.sampled_from(["BlockStored", "BlockRemoved"]) | st.integers(-5, 5) | st.none() | st.lists(st.none())
)
KEYS = st.sampled_from(["type", "block_hashes", "token_ids", "block_size"])
BATCHES = st.tuples(st.just(0.5), st.lists(st.dictionaries(KEYS, VALUES)))


@given(st.binary() | st.builds(msgspec.msgpack.encode, BATCHES))
def test_any_other_bytes_are_refused(payload: bytes) -> None:
    with contextlib.suppress(ValueError):  # nothing else may come of it
        read_batch(payload)
