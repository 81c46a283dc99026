"""The yardstick: the shortest reverse proxy that one writes with aiohttp, uvloop, one log line a request."""

from __future__ import annotations

import asyncio
import itertools
import sys

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "date", "server"}


async def _serve(port: int, engines: list[str]) -> None:
    session = ClientSession(
        connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None), auto_decompress=False
    )
    turn = itertools.cycle(engines)

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        async with session.request(
            request.method, next(turn) + request.path_qs, headers=headers, data=body
        ) as got:
            kept = {k: v for k, v in got.headers.items() if k.lower() not in _HOP_BY_HOP}
            answer = web.StreamResponse(status=got.status, headers=kept)
            if got.content_length is not None:
                answer.content_length = got.content_length
            await answer.prepare(request)
            async for piece in got.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
        print(request.method, request.path_qs, got.status, file=sys.stderr)
        return answer

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=8192).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2:]))
