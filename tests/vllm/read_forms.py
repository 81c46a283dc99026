"""Says what Starlette's reader of forms, which is vLLM's, takes from forms; run by vLLM's Python.

Input is a JSON line per form, `[content type, body]` in Latin-1; output a JSON line each:
`[[name, value], ...]` with null as the value of a file, or null where the form is refused.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

from starlette.datastructures import Headers
from starlette.formparsers import MultiPartParser


async def read(kind: str, body: str) -> list[list[str | None]] | None:
    """Return the fields of a form, None if it is refused."""

    async def stream() -> AsyncIterator[bytes]:
        yield body.encode("latin-1")
        yield b""

    try:
        form = await MultiPartParser(Headers({"content-type": kind}), stream()).parse()
    except Exception:
        return None
    return [[name, value if isinstance(value, str) else None] for name, value in form.multi_items()]


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asyncio.run(read(*json.loads(line)))))


if __name__ == "__main__":
    main()
