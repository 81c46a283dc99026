"""Messages of KV events, as a fuzzer and the tests of growth give them."""

from __future__ import annotations

import contextlib
from collections import deque

from fuzz.costs import Make, Reader, check_cost
from msgspec import msgpack

from hetlb.balancer.core.block_index import BlocksCleared, BlocksStored
from hetlb.options.kv_events.kv_events import PART_BLOCKS, read_batch


def read(data: bytes) -> None:
    """A message of KV events, all parts of it."""
    with contextlib.suppress(ValueError):
        deque(read_batch(data), maxlen=0)


def kv_events(data: bytes) -> None:
    """Messages of KV events: parts of a bounded size, or one line that says why not."""
    try:
        for event in read_batch(data):
            assert isinstance(event, BlocksCleared) or len(event.hashes) <= PART_BLOCKS
            assert not isinstance(event, BlocksStored) or len(event.hashes) == len(event.contents)
    except ValueError as error:
        assert "\n" not in str(error), str(error)  # noqa: PT017 -- what is caught is judged
    check_cost(read, data)


def blocks(size: int, tokens: int = 16) -> bytes:
    """Return KV events that store `size` bytes of blocks."""
    count = size // (tokens + 1)
    return msgpack.encode([0.5, [["BlockStored", [1] * count, None, [1] * (tokens * count), tokens]]])


TARGETS = {"kv_events": kv_events}
PREFIXES: tuple[tuple[Reader, bytes], ...] = ((read, b""), (read, b"\x92\xc0\xdd\x00\x00\x70\x00"))
#: name -> (reader, input of a size, the smaller size).
GROWTH: dict[str, tuple[Reader, Make, int]] = {
    "blocks that are stored": (read, blocks, 64 << 10),
    "blocks of one token": (read, lambda size: blocks(size, 1), 64 << 10),
    "blocks that are removed": (
        read, lambda size: msgpack.encode([0.5, [["BlockRemoved", [1]]] * (size // 16)]),
        128 << 10,
    ),
    "events of other kinds": (
        read, lambda size: msgpack.encode([0.5, [{"type": "x"}] * (size // 8)]), 64 << 10,
    ),
}  # fmt: skip
