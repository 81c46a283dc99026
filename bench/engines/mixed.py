"""A fleet of llama.cpp and vLLM, both real and on this machine, without profiles.

Shows: tokens per second of both servers at once, each driven for itself, and of hetlb in front of both with
as many clients; rounds of the two in turn, and the ratio of their medians. Exit status 1 below 0.9.

`.venv/bin/python bench/engines/mixed.py --llama-server BIN --gguf FILE --models FOLDER [--rounds 3]`: a build
of llama.cpp's server, a model for it, and the folder of tests/vllm/make_models.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "vllm"))

from engines import SERVED_MODEL_NAME, TINY_FAST, vllm_servers
from helpers import free_port

#: Clients of each server, and what they ask for: tokens of prompts and answers.
CLIENTS, PROMPT, OUTPUT = 24, (16, 200), (16, 160)
REQUIRED = 0.9


@contextlib.contextmanager
def llama_server(args: argparse.Namespace, log: Path) -> Iterator[str]:
    """Run llama.cpp's server on the second core, with a slot for each of its clients."""
    port = free_port()
    command = [
        "taskset", "-c", "1", str(args.llama_server), "--model", str(args.gguf), "--host", "127.0.0.1",
        "--port", str(port), "--parallel", str(CLIENTS), "--ctx-size", str(512 * CLIENTS), "--threads", "1",
        "--alias", SERVED_MODEL_NAME, "--metrics",
    ]  # fmt: skip
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@contextlib.contextmanager
def fleet(urls: list[str], folder: Path) -> Iterator[str]:
    """Run hetlb in front of these servers."""
    port = free_port()
    table = {
        "version": 1, "listen": {"port": port}, "admin": {"port": free_port()},
        "proxy": {"request_log": False},
        "models": [{"name": SERVED_MODEL_NAME, "instances": [{"url": url} for url in urls]}],
    }  # fmt: skip
    (folder / "fleet.json").write_text(json.dumps(table))
    command = [sys.executable, "-m", "hetlb", "serve", "--config", str(folder / "fleet.json")]
    with (
        (folder / "hetlb.log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


async def drive(url: str, clients: int, seconds: float, seed: int) -> float:
    """Return the tokens per second of `clients` clients, always with a request, after the first 3 s."""
    rng, tokens = random.Random(seed), 0
    counts_from = time.monotonic() + 3.0
    until = counts_from + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal tokens
        while time.monotonic() < until:
            prompt = " ".join(rng.choices(("the", "of", "Hello", "Count", "story"), k=rng.randint(*PROMPT)))
            body = {
                "model": SERVED_MODEL_NAME, "prompt": prompt, "max_tokens": rng.randint(*OUTPUT),
                "ignore_eos": True, "stream": True,
            }  # fmt: skip
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                async for line in reply.content:
                    now = time.monotonic()
                    if line[:7] == b"data: {" and counts_from <= now < until:
                        tokens += 1

    # A server closes a connection that is idle for 5 s, and on a busy machine clients notice late.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return tokens / seconds


async def rounds(args: argparse.Namespace, urls: list[str], proxy: str) -> dict[str, Any]:
    alone: list[list[float]] = []
    together: list[float] = []
    for number in range(args.rounds):
        alone.append(list(await asyncio.gather(*(drive(url, CLIENTS, args.seconds, number) for url in urls))))
        together.append(await drive(proxy, CLIENTS * len(urls), args.seconds, number))
        print(f"alone at once {alone[-1]}, together {together[-1]:.0f} tokens/s", flush=True)
    ratio = statistics.median(together) / statistics.median(sum(each) for each in alone)
    return {"vllm_and_llama_cpp": alone, "hetlb": together, "ratio": round(ratio, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description="A fleet of llama.cpp and vLLM without profiles.")
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        other = stack.enter_context(llama_server(args, folder / "llama.log"))
        [server] = stack.enter_context(vllm_servers([TINY_FAST], args.models, folder))
        urls = [server.url, other]
        result = asyncio.run(rounds(args, urls, stack.enter_context(fleet(urls, folder))))
    print(json.dumps(result, indent=1))
    if args.save is not None:
        args.save.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["ratio"] >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
