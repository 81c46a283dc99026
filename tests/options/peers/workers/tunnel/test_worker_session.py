"""A WebSocket session through a worker."""

from __future__ import annotations

import asyncio

import pytest
from helpers import HANG_S
from options.peers.workers.processes import (
    Serve,
    in_flight,
)
from options.tunnel.test_realtime import Talker
from proxy.services import document
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed


async def test_a_session_through_a_worker(serve: Serve) -> None:
    async with Talker() as engine:
        proxy = await serve(document(engine), workers=2)
        async with connect(proxy.url.replace("http", "ws") + "/v1/realtime", open_timeout=HANG_S) as client:
            await client.recv()
            figures = await proxy.fleet_until(lambda fleet: in_flight(fleet) == 1)
            assert figures["models"][0]["instances"][0]["in_flight"] == 1
            (await engine.asked_for()).left.set()
        await proxy.metric_until('hetlb_websocket_session_seconds_count{model="m"}', 1)
        # At a shutdown it is closed, after the grace.
        async with connect(proxy.url.replace("http", "ws") + "/v1/realtime", open_timeout=HANG_S) as client:
            await client.recv()
            ending = asyncio.create_task(proxy.end())
            with pytest.raises(ConnectionClosed):
                await client.recv()
            assert await ending == 0
