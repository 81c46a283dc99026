"""Reader of the KV events that vLLM publishes over ZeroMQ (`--kv-events-config`).

Events reach the scheduler in their order, each once; a gap in the sequence numbers is closed from the replay
endpoint or reported as lost. Token ids leave this module as digests only. A publisher takes a bounded amount
of memory (one message of 1 MiB at a time, decoded by type) and one turn of the event loop at a time.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from hetlb.balancer.config.fleet_tables import KvEventsTable
from hetlb.balancer.core.block_index import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
    block_digests,
)
from hetlb.balancer.telemetry.events import Event, Rarely
from hetlb.options.kv_events.zmtp import ZmtpConnection, ZmtpError
from hetlb.tasks import end, ended
from hetlb.turns import Share

logger = logging.getLogger("hetlb.kv_events")

#: Blocks of one fact for the scheduler: longer events are told in parts, with turns between them.
PART_BLOCKS: Final = 256
#: Memory that one publisher may take, bytes: a message, its numbers, what waits for it.
MOST_PUBLISHER_BYTES: Final = 16 << 20
#: Seconds of silence after which a replay has failed.
_REPLAY_S: Final = 5.0
#: Seconds between attempts to connect again.
_RECONNECT_S: Final = 0.2

BlockHash: TypeAlias = int | bytes
_Hashes: TypeAlias = tuple[BlockHash, ...]
_TokenIds: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**40)], ...]
_AdapterName: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
_BlockSize: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class _BlockStored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    """Fields in the order of vLLM's arrays."""

    block_hashes: _Hashes
    parent_block_hash: BlockHash | None
    token_ids: _TokenIds
    block_size: _BlockSize
    lora_id: int | None = None
    medium: str | None = None
    lora_name: _AdapterName | None = None
    extra_keys: msgspec.Raw = msgspec.Raw(b"\xc0")
    group_idx: int | None = None


class _BlockRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    """Fields in the order of vLLM's arrays."""

    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _AllBlocksCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    """No fields."""


class _MappedEvent(msgspec.Struct, gc=False):
    """An event of any kind as a map, as newer versions write it; other kinds are passed over."""

    type: str
    block_hashes: _Hashes = ()
    parent_block_hash: BlockHash | None = None
    token_ids: _TokenIds = ()
    block_size: _BlockSize = 1
    medium: str | None = None
    lora_name: _AdapterName | None = None
    extra_keys: msgspec.Raw = msgspec.Raw(b"\xc0")
    group_idx: int | None = None


_Most = msgspec.Meta(max_length=1 << 15)


class _Arrays(msgspec.Struct, array_like=True):
    """A batch of events as arrays."""

    ts: float
    events: Annotated[tuple[_BlockStored | _BlockRemoved | _AllBlocksCleared, ...], _Most]


class _Maps(msgspec.Struct, array_like=True):
    """A batch of events as maps."""

    ts: float
    events: Annotated[tuple[_MappedEvent, ...], _Most]


_decode_arrays: Final = msgspec.msgpack.Decoder(_Arrays).decode
_decode_maps: Final = msgspec.msgpack.Decoder(_Maps).decode
_decode_extras: Final = msgspec.msgpack.Decoder(tuple[tuple[Any, ...] | None, ...] | None).decode
#: Maximum bytes of decoded extra keys: they are of any type, and take fifty times as much memory.
_MAX_EXTRA_BYTES: Final = 64 << 10


def read_batch(payload: bytes) -> Iterator[KvEvent]:
    """Yield parts (`PART_BLOCKS`) of a message that concern the engine's own cache. Raises `ValueError`."""
    try:
        yield from _events(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _events(payload: bytes) -> Iterator[KvEvent]:
    try:
        batch: _Arrays | _Maps = _decode_arrays(payload)
    except msgspec.ValidationError:
        batch = _decode_maps(payload)
    for raw in batch.events:
        kind = raw.type if isinstance(raw, _MappedEvent) else type(raw).__name__.removeprefix("_")
        if kind == "AllBlocksCleared":
            yield BlocksCleared()
        # Copies in other memory, and the further groups of hybrid models, add nothing.
        elif isinstance(raw, _AllBlocksCleared) or raw.medium not in (None, "GPU") or raw.group_idx:
            continue
        elif kind == "BlockRemoved":
            for at in range(0, len(raw.block_hashes), PART_BLOCKS):
                yield BlocksRemoved(tuple(map(_name, raw.block_hashes[at : at + PART_BLOCKS])))
        elif kind == "BlockStored" and not isinstance(raw, _BlockRemoved):
            yield from _stored(raw)


def _stored(raw: _BlockStored | _MappedEvent) -> Iterator[BlocksStored]:
    """Yield the parts of a `BlockStored`: each one's parent is the last block of the part before."""
    size, adapter, parent = raw.block_size, raw.lora_name or "", raw.parent_block_hash
    extras = _extras(raw.extra_keys, adapter)
    blocks = min(len(raw.block_hashes), len(raw.token_ids) // size)
    for at in range(0, max(1, blocks), PART_BLOCKS):
        end = min(blocks, at + PART_BLOCKS)
        hashes = tuple(map(_name, raw.block_hashes[at:end]))
        contents = block_digests(array("q", raw.token_ids[at * size : end * size]), size, extras[at:end])
        yield BlocksStored(hashes, None if parent is None else _name(parent), contents, size, adapter)
        parent = hashes[-1] if hashes else parent


def _name(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[:8], "big") if isinstance(block_hash, bytes) else block_hash


def _extras(raw: msgspec.Raw, adapter: str) -> list[str]:
    """Return the extra keys of each block: its salt, its images. The adapter is a name of its own."""
    if len(raw) > _MAX_EXTRA_BYTES:
        raise ValueError(f"expected at most {_MAX_EXTRA_BYTES} bytes of extra keys, got {len(raw)}")
    return ["\0".join(str(key) for key in keys or () if key != adapter) for keys in _decode_extras(raw) or ()]


class KvEventReader:
    """One reading task per instance that publishes events; facts go to the callback, on the event loop."""

    def __init__(self, on_events: Callable[[str, KvEventBatch], None]) -> None:
        self._on_events = on_events
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tables: dict[str, KvEventsTable] = {}

    def set(self, name: str, table: KvEventsTable | None) -> None:
        """Read the events of an instance from these addresses from now on, None: no more."""
        if self._tables.get(name) == table:
            return
        task = self._tasks.pop(name, None)
        if task is not None:
            end(task)
            del self._tables[name]
            self._on_events(name, KvEventBatch(lost="its events are not read any more"))
        if table is not None:
            self._tables[name] = table
            self._tasks[name] = asyncio.get_running_loop().create_task(self._read(name, table))

    async def close(self) -> None:
        await ended(*self._tasks.values())
        self._tasks.clear()
        self._tables.clear()

    async def _read(self, name: str, table: KvEventsTable) -> None:
        stream = _Stream(name, table, self._on_events)
        while True:
            try:
                await stream.run()
            except (OSError, EOFError, TimeoutError):
                pass  # the engine is not there: missed events show by their numbers
            except ZmtpError as error:
                stream.lose(str(error))
            except Exception:  # never the end of serving
                stream.lose("reading its events failed", exc_info=True)
            await asyncio.sleep(_RECONNECT_S)


class _Stream:
    """The events of one engine in their order, over any number of connections."""

    def __init__(
        self, name: str, table: KvEventsTable, on_events: Callable[[str, KvEventBatch], None]
    ) -> None:
        self._name = name
        self._table = table
        self._on_events = on_events
        self._share = Share()
        #: The sequence number that comes next, None while it is not known which events were missed.
        self._next: int | None = None
        #: Events before this one have come by replay.
        self._replayed = 0
        self._losses = Rarely()

    async def run(self) -> None:
        """Read until the connection ends. Raises `OSError`, `EOFError` or `ZmtpError`."""
        connection = await ZmtpConnection.open(self._table.endpoint, "SUB")
        try:
            connection.send(b"\x01")  # every topic
            if self._next is None and self._table.replay is not None:
                await self._replay(0)
            while True:
                frames = await connection.receive()
                if len(frames) == 3 and len(frames[1]) == 8:
                    await self._message(int.from_bytes(frames[1], "big"), frames[2])
        finally:
            connection.close()

    def lose(self, reason: str, *, exc_info: bool = False) -> None:
        name, text = self._name, "%s: %s; what it has cached is estimated"
        self._losses.tell(
            logger, Event.INSTANCE_KV_EVENTS, text, name, reason, exc_info=exc_info, instance=name
        )
        self._on_events(self._name, KvEventBatch(lost=reason))

    async def _message(self, number: int, payload: bytes) -> None:
        if 0 < number < self._replayed:
            return  # it came before the replay that had it
        self._replayed = 0
        if number and number != self._next:
            first = self._next if self._next is not None and number > self._next else 0
            if not await self._replay(first, number):
                self.lose(f"its KV events {first} to {number - 1} were missed")
            elif self._next is not None and self._next > number:
                self._replayed = self._next
                return
        await self._apply(number, payload)

    async def _apply(self, number: int, payload: bytes) -> None:
        """Give the scheduler a batch, a part in each turn."""
        self._next = number + 1
        begins, blocks = number == 0, 0
        part: list[KvEvent] = []
        try:
            for event in read_batch(payload):
                part.append(event)
                blocks += 1 if isinstance(event, BlocksCleared) else len(event.hashes)
                if blocks >= PART_BLOCKS:
                    await self._tell(part, begins)
                    part, begins, blocks = [], False, 0
            if part or begins:
                await self._tell(part, begins)
        except ValueError as error:
            self.lose(f"expected vLLM's batch of KV events: {' '.join(str(error).split())[:200]}")

    async def _tell(self, part: list[KvEvent], begins: bool) -> None:
        await self._share.spent()
        self._on_events(self._name, KvEventBatch(tuple(part), begins))

    async def _replay(self, first: int, before: int | None = None) -> bool:
        """Ask for the batches from `first` on. Return True if all batches before `before` came."""
        if self._table.replay is None:
            return False
        try:
            connection = await ZmtpConnection.open(self._table.replay, "DEALER")
        except (OSError, EOFError, TimeoutError, ZmtpError):
            return False
        expected = first
        try:
            connection.send(b"", first.to_bytes(8, "big"))
            while True:
                async with asyncio.timeout(_REPLAY_S):
                    frames = await connection.receive()
                number = int.from_bytes(frames[-2], "big", signed=True) if len(frames) > 1 else -1
                if number < 0:
                    break
                if number != expected:
                    return False
                await self._apply(number, frames[-1])
                expected = number + 1
        except (OSError, EOFError, TimeoutError, ZmtpError):
            return False
        finally:
            connection.close()
        if first == expected == 0:  # nothing was published yet
            self._next = 0
            self._on_events(self._name, KvEventBatch(begins=True))
        self._replayed = expected
        return before is None or expected >= before
