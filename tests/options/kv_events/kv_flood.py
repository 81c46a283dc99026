"""A publisher that floods a reader of KV events, as a process: a thread would leave it no more than the rest.

`kv_flood.py ENDPOINT KIND` sends the messages of a kind again and again, and ends by itself after `FLOOD_S`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

#: Seconds of a flood: longer than a reader that leaves the event loop to others needs to show it.
FLOOD_S = 20.0
IDS = list(range(4000))
STORED = {"type": "BlockStored", "block_hashes": IDS[:1000], "token_ids": IDS, "block_size": 4}
REMOVED = {"type": "BlockRemoved", "block_hashes": IDS[:1000]}
BATCH = msgspec.msgpack.encode([0.5, [STORED, REMOVED]])
KINDS: dict[str, list[list[bytes]]] = {
    "events": [[b"", number.to_bytes(8, "big"), BATCH] for number in range(50)],
    "numbers": [[b"", (7 * number).to_bytes(8, "big"), b"\x93\x00\x90\x00"] for number in range(500)],
    "rubbish": [[b"", bytes(8), b"\xff"], [b"x"], [b"", b"", b"", b""]] * 200,
}


@contextlib.contextmanager
def flooding(endpoint: str, kind: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process, until the end of the block."""
    process = subprocess.Popen([sys.executable, str(Path(__file__)), endpoint, kind])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main(endpoint: str, kind: str) -> None:
    """Flood the readers."""
    publisher = zmq.Context().socket(zmq.PUB)
    publisher.setsockopt(zmq.SNDHWM, 0)
    publisher.bind(endpoint)
    ends = time.monotonic() + FLOOD_S
    while time.monotonic() < ends:
        for message in KINDS[kind]:
            publisher.send_multipart(message)
        time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
