"""User instructions that a chunk of a stream and a plain request cost `hetlb serve`, counted by valgrind.

Shows: of several trees (`.cache/compile/...` of `bench/compile_modules.py build`, or a checkout) the
instructions per chunk and per plain request, each the difference of two runs of which one carries more;
with `NAME:KEY=VALUE` a key of the fleet file's `proxy`, such as `new:resume=ids`. A chunk is sent once the
client has the one before, so that each is a read of its own, with token ids where they are asked for.

`.venv/bin/python bench/proxies/instructions.py base=.cache/compile/a new=.cache/compile/b new:resume=ids`
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from helpers import free_port

METRICS = (
    b'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
    b'vllm:kv_cache_usage_perc{engine="0"} 0\n'
    b'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100000"} 1\n'
)
#: Seconds of a whole answer: one that comes at once, under valgrind, teaches no speed, as a real one does.
ANSWER_S = 0.25
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"


#: Spellings of the same stream, by name: line end, separators of the JSON, what stands before an event.
SPELLINGS = {
    "vllm": ("\n", (",", ":"), "data: "), "crlf": ("\r\n", (",", ":"), "data: "),
    "cr": ("\r", (",", ":"), "data: "), "spaces": ("\n", (", ", ": "), "data: "),
    "crlf-spaces": ("\r\n", (", ", ": "), "data: "), "no-space": ("\n", (",", ":"), "data:"),
    "sorted": ("\n", (",", ":"), "data: "), "id": ("\n", (",", ":"), "id: 7\ndata: "),
    "event": ("\n", (",", ":"), "event: message\ndata: "), "escapes": ("\n", (",", ":"), "data: "),
    "null": ("\n", (", ", ": "), "id: 1\ndata:"),
}  # fmt: skip
spelling = "vllm"


def event(text: str, finish: str | None, ids: bool) -> bytes:
    choice = {
        "index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish,
        "token_ids": [1234] if ids else None,
    }  # fmt: skip
    body = {
        "id": "chatcmpl-3f6c1d0a9be94c47a4c05f2fbe1f6d21", "object": "chat.completion.chunk",
        "created": 1795262400, "model": "m", "choices": [choice],
    }  # fmt: skip
    end, separators, before = SPELLINGS[spelling]
    if spelling == "escapes":
        choice["delta"] = {"content": "\x1b" + text}
    if spelling == "null":
        body["usage"] = None
    text = json.dumps(body, separators=separators, sort_keys=spelling == "sorted")
    data = (before.replace("\n", end) + text + end + end).encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


#: Streams with and without token ids.
streams = {True: 0, False: 0}
#: Chunks that clients have, by the content of their requests.
arrived: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))
numbers = itertools.count(1_000_000)


async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine that answers what hetlb asks, and streams of as many chunks as `max_tokens`."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            found = re.search(rb"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(found[1])) if found else b""
            path = head.split(b" ", 2)[1]
            if path == b"/metrics":
                kind, answer = b"text/plain", METRICS
            elif body and b'"stream":true' not in body:
                usage = b'"usage":{"prompt_tokens":3,"total_tokens":9,"completion_tokens":6}'
                text = b'"message":{"role":"assistant","content":"Paris is the capital of France."}'
                text = b'"choices":[{"index":0,%b,"logprobs":null,"finish_reason":"stop"}]' % text
                kind, answer = b"application/json", b'{"id":"a","model":"m",%b,%b}' % (text, usage)
                await asyncio.sleep(ANSWER_S)
            elif body:
                asked, ids = json.loads(body), b'"return_token_ids":true' in body
                streams[ids] += 1
                writer.write(HEAD % (b"text/event-stream", b"transfer-encoding: chunked"))
                for number in range(asked["max_tokens"]):
                    writer.write(event(f" t{number:06d}", None, ids))
                    await arrived[asked["messages"][0]["content"]].acquire()
                end = SPELLINGS[spelling][0].encode()
                done = b"data: [DONE]" + end + end
                writer.write(event("", "stop", ids) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(done), done))
                continue
            else:
                kind, answer = b"application/json", b'{"version":"0.32.0","data":[{"id":"m"}]}'
            writer.write(HEAD % (kind, b"content-length: %d" % len(answer)) + answer)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def ask(port: int, count: int, tokens: int) -> None:
    """Send `count` requests on one connection, one after the other: streams, or plain ones of no `tokens`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    for _ in range(count):
        name = f"Hello {next(numbers)}"
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": name}]}
        body |= {"max_tokens": tokens, "stream": True} if tokens else {}
        sent = json.dumps(body, separators=(",", ":")).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(sent) + sent)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 OK" in head, head
        if tokens:
            for _ in range(tokens):
                await reader.readuntil(b"\n\n\r\n")
                arrived[name].release()
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            found = re.search(rb"(?i)content-length: (\d+)", head)
            assert found
            await reader.readexactly(int(found[1]))
    writer.close()


def serve(tree: Path, fleet: Path, counts: Path) -> subprocess.Popen[bytes]:
    """Start `hetlb serve` of a tree under valgrind, which writes what it counted at the end."""
    return subprocess.Popen(
        ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null",
         f"--log-file={counts}", sys.executable, "-m", "hetlb", "serve", "--config", str(fleet)],
        cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={"PYTHONHASHSEED": "0", "PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


async def instructions(tree: Path, keys: dict[str, object], loads: list[tuple[int, int]]) -> int:
    """Instructions of a `hetlb serve` that carries these loads: (requests, tokens)."""
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    port, url = free_port(), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        path, counts = Path(folder) / "fleet.json", Path(folder) / "counts"
        fleet = {
            "version": 1, "listen": {"port": port}, "admin": {"port": free_port()},
            "proxy": {"request_log": False, **keys}, "scrape": {"interval_s": 600},
            "models": [{"name": "m", "instances": [{"name": "i0", "url": url}]}],
        }  # fmt: skip
        path.write_text(json.dumps(fleet))
        process = serve(tree, path, counts)
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        await asyncio.sleep(2.0)
        await asyncio.gather(*(ask(port, *load) for load in loads))
        process.terminate()
        await asyncio.to_thread(process.wait)
        server.close()
        found = re.search(r"I\s+refs:\s+([\d,]+)", counts.read_text())
        assert found, counts.read_text()
        return int(found[1].replace(",", ""))


async def measure(args: argparse.Namespace) -> None:
    trees: dict[str, Path] = {}
    for variant in args.variants:
        name, value = variant.split("=", 1)
        name, _, key = name.partition(":")
        if not key:
            trees[name] = args.root / value
        keys: dict[str, object] = {key: {"true": True, "false": False}.get(value, value)} if key else {}
        await instructions(trees[name], keys, [(1, 2)])  # compiles what is not compiled
        count = args.connections
        none = await instructions(trees[name], keys, [(8, 2)] * 8)
        plain = await instructions(trees[name], keys, [(8, 2)] * 8 + [(args.requests, 0)] * count) - none
        each = f"plain {plain / count / args.requests:.0f}"
        if args.chunks:
            chunks = await instructions(trees[name], keys, [(8, 2), (1, args.chunks)] * 8) - none
            each = f"chunk {chunks / 8 / args.chunks:.0f}, {each}"
        with_ids = f"{streams[True]} of {sum(streams.values())} streams with token ids"
        print(f"{variant}: {each}, {with_ids}", flush=True)
        streams.update({True: 0, False: 0})


def main() -> None:
    parser = argparse.ArgumentParser(description="User instructions of a chunk and of a plain request.")
    parser.add_argument("variants", nargs="+", metavar="NAME=TREE or NAME:KEY=VALUE")
    parser.add_argument("--chunks", type=int, default=1000, help="of each of 8 streams; 0 counts none")
    parser.add_argument("--spelling", choices=SPELLINGS, default="vllm", help="of the streams")
    parser.add_argument("--connections", type=int, default=8, help="with plain requests")
    parser.add_argument("--requests", type=int, default=200, help="of each of these connections")
    args = parser.parse_args()
    args.root = Path.cwd()
    global spelling
    spelling = args.spelling
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
