"""A `hetlb serve` of its own process."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from helpers import HANG_S


@asynccontextmanager
async def serve_process(*arguments: str) -> AsyncIterator[tuple[str, str]]:
    """Run Python with these arguments, a `serve`; give the URLs of both listeners, then stop it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    async with asyncio.timeout(HANG_S):
        said = [await process.stdout.readline()]
        while b" ready on " not in said[-1]:
            assert said[-1], b"".join(said)
            said.append(await process.stdout.readline())
        main, admin = (f"http://127.0.0.1:{port}" for port in re.findall(r":(\d+)\b", said[-1].decode()))
        yield main, admin
        process.terminate()
        assert await process.wait() == 0
