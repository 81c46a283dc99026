"""A publisher of KV events that speaks as vLLM's does."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from helpers import HANG_S

SIZE = 4


def stored(ids: list[int], first: int, parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": list(range(first, first + len(ids) // SIZE)),
        "parent_block_hash": parent, "token_ids": ids, "block_size": SIZE, "lora_id": None, "medium": "GPU",
        "lora_name": None,
    }  # fmt: skip


def removed(*names: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """The publisher of vLLM: numbered batches, the last of them again for who asks."""

    def __init__(self, folder: str) -> None:
        self.endpoint, self.replay = f"ipc://{folder}/pub", f"ipc://{folder}/replay"
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.XPUB)
        self.pub.bind(self.endpoint)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(self.replay)
        self.sent: list[bytes] = []
        self.kept_from = 0
        self.task = asyncio.create_task(self._serve())

    async def subscribed(self) -> None:
        async with asyncio.timeout(HANG_S):
            assert await self.pub.recv() == b"\x01"

    async def publish(self, *events: dict[str, Any], silently: bool = False) -> None:
        self.sent.append(msgspec.msgpack.encode([0.5, list(events), 0]))
        if not silently:
            await self.send(len(self.sent) - 1, self.sent[-1])

    async def send(self, number: int, payload: bytes) -> None:
        await self.pub.send_multipart((b"", number.to_bytes(8, "big"), payload))

    def restart(self) -> None:
        self.sent.clear()

    async def _serve(self) -> None:
        while True:
            client, _, first = await self.router.recv_multipart()
            for number in range(max(self.kept_from, int.from_bytes(first, "big")), len(self.sent)):
                frames = (client, b"", b"", number.to_bytes(8, "big"), self.sent[number])
                await self.router.send_multipart(frames)
            end = (-1).to_bytes(8, "big", signed=True)
            await self.router.send_multipart((client, b"", b"", end, b""))

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.context.destroy(linger=0)
