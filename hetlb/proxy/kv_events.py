"""Reading the KV events that vLLM publishes over ZeroMQ (`--kv-events-config`). The only user of pyzmq.

Events reach the scheduler in their order, each once; a gap in the sequence numbers is closed from
the replay endpoint or told as lost, and said once in the log. Token ids leave this module as digests only.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from hetlb.config.fleet import KvEventsTable
from hetlb.core.block_index import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
    block_digests,
)
from hetlb.errors import ConfigError
from hetlb.proxy.telemetry.events import Event, tell

logger = logging.getLogger("hetlb.kv_events")

#: A message beyond this is none.
_MAX_MESSAGE_BYTES: Final = 64 << 20
#: Seconds that a replay may take.
_REPLAY_S: Final = 5.0
#: After a failure of ours reading begins again so much later.
_AGAIN_S: Final = 1.0
#: Fields of vLLM's events in the order in which versions that write them as arrays have them.
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys", "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip


def check_installed(where: str) -> None:
    """Raise `ConfigError` unless events can be read."""
    try:
        import zmq.asyncio  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{where}kv_events: expected the package 'pyzmq' (pip install 'hetlb[kv-events]')"
        ) from error


def read_batch(payload: bytes) -> tuple[KvEvent, ...]:
    """The events of one message that concern the engine's own cache. Raises `ValueError`.

    Newer versions write events as maps with a `type`, older ones as arrays that begin with it.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
        return tuple(event for raw in batch[1] if (event := _event(_named(raw))) is not None)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"expected vLLM's batch of KV events: {error!r}") from error


def _named(raw: Any) -> dict[str, Any]:
    if isinstance(raw, dict):
        return raw
    kind = raw[0]
    return {"type": kind, **dict(zip(_FIELDS[kind], raw[1:], strict=False))}


def _event(raw: dict[str, Any]) -> KvEvent | None:
    kind = raw["type"]
    if kind == "AllBlocksCleared":
        return BlocksCleared()
    # Copies in other memory, and the further groups of hybrid models, say nothing of their own.
    if raw.get("medium") not in (None, "GPU") or raw.get("group_idx"):
        return None
    hashes = tuple(map(_name, raw["block_hashes"]))
    if kind == "BlockRemoved":
        return BlocksRemoved(hashes)
    if kind != "BlockStored":
        return None
    size, parent, adapter = raw["block_size"], raw["parent_block_hash"], raw.get("lora_name") or ""
    if not isinstance(size, int) or size < 1:
        raise TypeError(f"block_size {size!r}")
    contents = block_digests(array("q", raw["token_ids"]), size, _extras(raw.get("extra_keys"), adapter))
    return BlocksStored(hashes, None if parent is None else _name(parent), contents, size, adapter)


def _name(block_hash: int | bytes) -> int:
    return int.from_bytes(block_hash[:8], "big") if isinstance(block_hash, bytes) else int(block_hash)


def _extras(raw: Sequence[Sequence[Any] | None] | None, adapter: str) -> list[str]:
    """Extra keys of each block beside its tokens: its salt, its images. The adapter is a name of its own."""
    return ["\0".join(str(key) for key in keys or () if key != adapter) for keys in raw or ()]


class KvEventReader:
    """One reading task per instance that publishes events; facts go to the callback, on the event loop."""

    def __init__(self, on_events: Callable[[str, KvEventBatch], None]) -> None:
        self._on_events = on_events
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tables: dict[str, KvEventsTable] = {}
        self._context: Any = None

    def set(self, name: str, table: KvEventsTable | None) -> None:
        """Read the events of an instance from there from now on; None: no more."""
        if self._tables.get(name) == table:
            return
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            del self._tables[name]
            self._on_events(name, KvEventBatch(lost="its events are not read any more"))
        if table is not None:
            self._tables[name] = table
            self._tasks[name] = asyncio.get_running_loop().create_task(self._read(name, table))

    async def close(self) -> None:
        """Stop reading."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._tables.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _read(self, name: str, table: KvEventsTable) -> None:
        while True:
            try:
                await _Stream(self._zmq(), name, table, self._on_events).run()
            except Exception:  # never the end of serving
                tell(
                    logger,
                    Event.INSTANCE_KV_EVENTS,
                    "%s: reading its KV events failed",
                    name,
                    exc_info=True,
                    instance=name,
                )
                self._on_events(name, KvEventBatch(lost="reading its events failed"))
            await asyncio.sleep(_AGAIN_S)

    def _zmq(self) -> Any:
        if self._context is None:
            import zmq.asyncio

            self._context = zmq.asyncio.Context()
        return self._context


class _Stream:
    """The events of one engine in their order."""

    def __init__(
        self,
        context: Any,
        name: str,
        table: KvEventsTable,
        on_events: Callable[[str, KvEventBatch], None],
    ) -> None:
        self._context = context
        self._name = name
        self._table = table
        self._on_events = on_events
        #: The sequence number that comes next, None while it is not known which events were missed.
        self._next: int | None = None
        #: Events before this one have come by replay.
        self._replayed = 0

    async def run(self) -> None:
        """Read until cancelled."""
        import zmq

        with self._context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SUBSCRIBE, self._table.topic.encode())
            socket.connect(self._table.endpoint)
            if self._table.replay is not None:
                await self._replay(0)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    await self._message(int.from_bytes(frames[1], "big"), frames[2])

    async def _message(self, number: int, payload: bytes) -> None:
        if 0 < number < self._replayed:
            return  # it came before the replay that had it
        self._replayed = 0
        if number and number != self._next:
            first = self._next if self._next is not None and number > self._next else 0
            if not await self._replay(first, number):
                self._lose(f"its KV events {first} to {number - 1} were missed")
            elif self._next is not None and self._next > number:
                self._replayed = self._next
                return
        self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        try:
            events = read_batch(payload)
        except ValueError as error:
            self._lose(" ".join(str(error).split())[:200])
            return
        self._on_events(self._name, KvEventBatch(events, begins=number == 0))

    def _lose(self, reason: str) -> None:
        tell(
            logger,
            Event.INSTANCE_KV_EVENTS,
            "%s: %s; what it has cached is estimated",
            self._name,
            reason,
            instance=self._name,
        )
        self._on_events(self._name, KvEventBatch(lost=reason))

    async def _replay(self, first: int, before: int | None = None) -> bool:
        """Ask for the batches from `first` on. Whether all were there, up to `before`."""
        import zmq

        if self._table.replay is None:
            return False
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._table.replay)
            try:
                async with asyncio.timeout(_REPLAY_S):
                    await socket.send_multipart((b"", first.to_bytes(8, "big")))
                    expected = first
                    while True:
                        frames = await socket.recv_multipart()
                        number = int.from_bytes(frames[-2], "big", signed=True)
                        if number < 0:
                            break
                        if number != expected:
                            return False
                        self._apply(number, frames[-1])
                        expected = number + 1
            except TimeoutError:
                return False
        if first == expected == 0:  # nothing was published yet
            self._next = 0
            self._on_events(self._name, KvEventBatch(begins=True))
        self._replayed = expected
        return before is None or expected >= before
