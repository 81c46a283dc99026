"""Engines that are lost in the middle of their answers: how many answers are whole, and the same.

Shows: of a number of greedy answers (completions and chats, streamed and plain, with stop strings and
`min_tokens`) during which engines are killed (`kill -9`), stopped (SIGTERM), cut off and hang, at random
points, how many are whole, how many have the text and the usage of an engine that was left alone, and how
often engines were asked for one. An answer of which no text came in two runs is not eligible: by the rule
there is no third. Exit status 1 unless all others are whole and the same.

`.venv/bin/python bench/faults/lost_engines.py [--requests 1000] [--workers 2] [--replace] [--save FILE]`
against four emulated engines, a minute or two; `--vllm MODELS` (of tests/vllm/make_models.py) against three
vLLM servers on CPU, of which one hangs twice, one gets SIGTERM and that which hung is killed; it also says
how many answers the engine that was left alone gives again, with as many others in its batch. They compute in
float32: in bfloat16 a prefill rounds otherwise than the steps that it stands for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "vllm"))

from engines import TINY_FAST, Server, vllm_servers
from helpers import free_port
from proxy.cutter import Cut, Cutter

import hetlb.tools.demo

PROFILE = Path(hetlb.tools.demo.__file__).parent / "fast.yaml"
HETLB = [sys.executable, "-m", "hetlb"]
ENGINES, CLIENTS, REAL_CLIENTS = 4, 24, 2
#: Seconds between two losses, and until an engine that was lost is there again.
LOSS_S, AWAY_S = 0.7, 0.5
#: Tokens of a request to vLLM: what a chat without a limit may fill.
REAL_MODEL_LEN = 512
FLOAT32 = ("--dtype", "float32")
_NAME = re.compile(rb"(?i)\r\nx-request-id: (\S+)\r\n")
WORDS = ("the", "of", "and", "in", "is", "that", "for", "it", "with", "Hello", "Count", "Tell", "me", "story")


class Answer(NamedTuple):
    """Answer as its client has it; `error` says what is wrong, `runs` how often engines were asked."""

    text: str
    finish: str | None
    usage: tuple[int, int, int] | None
    error: str
    runs: int = 0


class Asked(NamedTuple):
    """A request, and what an engine that is left alone answers."""

    path: str
    body: dict[str, Any]
    whole: Answer

    @property
    def tokens(self) -> int:
        """Tokens that an engine generates for it: as the emulated ones end."""
        limit = self.body.get("max_tokens", math.inf)
        return int(max(min(limit, self.body["vllm_xargs"]["output_tokens"]), self.body.get("min_tokens", 0)))


def read(status: int, raw: bytes, *, stream: bool) -> Answer:
    """The answer in the bytes of a body; raises nothing, whatever they are."""
    if status != 200:
        return Answer("", None, None, f"{status} {raw[:200]!r}")
    blocks, error = [raw], ""
    if stream:
        *blocks, rest = raw.split(b"\n\n")
        if rest or not blocks or blocks.pop() != b"data: [DONE]":
            error = f"no end: {raw[-200:]!r}"
    text, finish, usage, roles, names = "", [], None, 0, set()
    try:
        for block in blocks:
            event = json.loads(block.removeprefix(b"data: "))
            names.add((event["id"], event["created"]))
            for choice in event["choices"]:
                part = choice.get("message") or choice.get("delta") or {}
                roles += "role" in part
                text += choice.get("text") or part.get("content") or ""
                finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            if event.get("usage"):
                given = event["usage"]
                usage = given["prompt_tokens"], given["completion_tokens"], given["total_tokens"]
    except (ValueError, KeyError, TypeError, IndexError) as wrong:
        error = error or f"{wrong!r}: {raw[-200:]!r}"
    if len(names) != 1 or len(finish) != 1 or roles > 1:
        error = error or f"ids {names}, ends {finish}, roles {roles}"
    return Answer(text, finish[0] if finish else None, usage, error)


async def ask(session: aiohttp.ClientSession, url: str, name: str, path: str, body: dict[str, Any]) -> Answer:
    """The answer to a request with this `x-request-id`."""
    raw, status = b"", 0
    try:
        async with session.post(url + path, json=body, headers={"x-request-id": name}) as reply:
            status = reply.status
            async for piece in reply.content.iter_any():
                raw += piece
    except aiohttp.ClientError as error:
        if not status:
            return Answer("", None, None, repr(error))
    return read(status, raw, stream=body.get("stream", False))


def request(rng: random.Random, model: str, *, real: bool) -> tuple[str, dict[str, Any]]:
    """A greedy request of any of the kinds."""
    words = " ".join(rng.choices(WORDS, k=rng.randint(4, 30)))
    tokens = rng.randint(30, 120)
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0}
    stream = rng.random() < 0.7
    if stream:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    if not real:
        body["vllm_xargs"] = {"output_tokens": rng.randint(20, 140)}
    if rng.random() < 0.3:
        body["min_tokens"] = rng.randint(1, tokens)
    if rng.random() < 0.3:
        # An emulated engine says every token at once, and holds back nothing for longer ones.
        body["stop"] = rng.sample(["ea", "st", "ing", "oth ", " be"], 2) if real else ["x", "y"]
    if rng.random() < 0.5:
        if rng.random() < 0.4:  # as most chats come: as long as the model has room
            del body["max_tokens"]
            body.pop("min_tokens", None)
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": words}]}
    prompt: Any = words if rng.random() < 0.6 else [rng.randrange(300, 1900) for _ in range(20)]
    return "/v1/completions", {**body, "prompt": prompt}


def serve_engine(port: int, profile: Path, *options: str) -> subprocess.Popen[bytes]:
    more = ["--profile", str(profile), "--port", str(port), "--served-model-name", "m", *options]
    return subprocess.Popen([*HETLB, "engine", *more], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _kill_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for each in processes:
        each.kill()


class Engine:
    """An emulated engine that can be lost and comes back at the same address."""

    def __init__(self, profile: Path = PROFILE, *options: str) -> None:
        self.port = free_port()
        self._serving = partial(serve_engine, self.port, profile, *options)
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        process = self._process = self._serving()
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def gone(self) -> None:
        assert self._process is not None
        await asyncio.to_thread(self._process.wait)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


async def lose(engines: list[Engine], rng: random.Random, lost: Counter[str]) -> None:
    """Lose one engine after the other, each in one of the ways, and have it back."""
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * LOSS_S)
        engine, how = rng.choice(engines), rng.choice(("SIGKILL", "SIGTERM", "SIGSTOP"))
        lost[how] += 1
        engine.send(signal.Signals[how])
        if how == "SIGSTOP":
            await asyncio.sleep(3.0)  # beyond `idle_timeout_s`: what it had has gone on elsewhere
            engine.send(signal.SIGCONT)
            continue
        await engine.gone()
        await asyncio.sleep(AWAY_S)
        await engine.start()


async def lose_servers(servers: list[Server], rng: random.Random, lost: Counter[str]) -> None:
    """Lose all of some vLLM servers but the first, for good in the end."""
    _, hangs, leaves = servers
    for number, server in (
        (signal.SIGSTOP, hangs), (signal.SIGSTOP, hangs), (signal.SIGTERM, leaves), (signal.SIGKILL, hangs),
    ):  # fmt: skip
        await asyncio.sleep(rng.uniform(2.0, 5.0))
        lost[number.name] += 1
        server.signal_group(number)
        if number is signal.SIGSTOP:
            await asyncio.sleep(6.0)
            server.signal_group(signal.SIGCONT)


@contextlib.contextmanager
def fleet_file(
    urls: list[str], workers: int, model: str, idle_s: float = 1.0, first_byte_s: float = 20.0
) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fleet.yaml"
        instances = [{"name": f"i{number}", "url": url} for number, url in enumerate(urls)]
        fleet = {
            "version": 1,
            "listen": {"port": free_port()},
            "admin": {"port": free_port()},
            "proxy": {
                "idle_timeout_s": idle_s,
                "first_byte_timeout_s": first_byte_s,
                "request_log": True,
                "resume": "ids",
                "workers": workers,
            },
            "health": {"slow_start_s": 0.0},
            "models": [{"name": model, "instances": instances}],
        }
        path.write_text(json.dumps(fleet))
        yield path, f"http://127.0.0.1:{fleet['listen']['port']}"  # type: ignore[index]


def serve(path: Path, *more: str) -> subprocess.Popen[bytes]:
    log = open(path.with_suffix(".log"), "ab")  # noqa: SIM115
    return subprocess.Popen(
        [*HETLB, "serve", "--config", str(path), *more], stdout=subprocess.PIPE, stderr=log
    )


async def replace(path: Path, running: list[subprocess.Popen[bytes]]) -> None:
    """Replace the process by another one, again and again."""
    while True:
        await asyncio.sleep(4.0)
        running.append(serve(path, "--replace"))
        stdout = running[-1].stdout
        assert stdout is not None
        await asyncio.to_thread(stdout.readline)


async def clients(url: str, asked: list[Asked], count: int) -> list[tuple[Asked, Answer]]:
    """Ask all of it, `count` at a time; the one with number N has the id `rN`."""
    got: dict[int, Answer] = {}
    todo = list(enumerate(asked))
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:

        async def client() -> None:
            while todo:
                number, each = todo.pop()
                got[number] = await ask(session, url, f"r{number}", each.path, each.body)

        await asyncio.gather(*(client() for _ in range(count)))
    return [(each, got[number]) for number, each in enumerate(asked)]


async def undisturbed(
    url: str, rng: random.Random, count: int, model: str, *, at_once: int, real: bool
) -> list[Asked]:
    """Requests with what an engine that is left alone answers."""
    pairs = [request(rng, model, real=real) for _ in range(count)]
    blank = Answer("", None, None, "")
    got = await clients(url, [Asked(path, body, blank) for path, body in pairs], at_once)
    errors = [each.error for _, each in got if each.error]
    assert not errors, errors[:3]
    return [asked._replace(whole=answer) for asked, answer in got]


async def run(args: argparse.Namespace) -> dict[str, Any]:
    rng, real = random.Random(args.seed), bool(args.vllm)
    at_once = args.clients or (REAL_CLIENTS if real else CLIENTS)
    lost: Counter[str] = Counter()
    cuts: list[Cut] = []
    async with contextlib.AsyncExitStack() as stack:
        engines = [] if real else [Engine() for _ in range(ENGINES + 1)]
        for engine in engines:
            stack.callback(engine.end)
            await engine.start()
        servers: list[Server] = []
        if real:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            specs = [
                dataclasses.replace(
                    TINY_FAST, name=f"v{number}", max_model_len=REAL_MODEL_LEN, extra_args=FLOAT32
                )
                for number in range(3)
            ]
            servers = stack.enter_context(vllm_servers(specs, args.vllm, logs))
        model = servers[0].spec.served_model_name if real else "m"
        urls = [each.url for each in servers or engines[:ENGINES]]
        alone = urls[0] if real else engines[-1].url
        asked = await undisturbed(alone, rng, args.requests, model, at_once=at_once, real=real)
        again = await clients(alone, asked, at_once) if real else []
        ports = [int(url.rpartition(":")[2]) for url in urls]
        cutters = [await stack.enter_async_context(Cutter(port, cuts)) for port in ports]
        path, url = stack.enter_context(
            fleet_file([each.url for each in cutters], args.workers, model, 4.0 if real else 1.0)
        )
        running = [serve(path)]
        stack.callback(_kill_all, running)
        stdout = running[0].stdout
        assert stdout is not None
        await asyncio.to_thread(stdout.readline)
        losing = lose_servers(servers, rng, lost) if real else lose(engines[:ENGINES], rng, lost)
        tasks = [asyncio.create_task(losing)]

        async def cut() -> None:
            while True:
                await asyncio.sleep(rng.uniform(1.0, 3.0) if real else rng.uniform(0.2, 0.6))
                if not cuts:
                    cuts.append(Cut(rng.randrange(300, 12_000), rng.choice(("fin", "rst"))))

        tasks.append(asyncio.create_task(cut()))
        if args.replace:
            tasks.append(asyncio.create_task(replace(path, running)))
        got = await clients(url, asked, at_once)
        for task in tasks:
            task.cancel()
        for failed in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(failed, Exception):
                raise failed
        lost["cut"] = sum(each.cut for each in cutters)
        log = path.with_suffix(".log").read_text().splitlines()
        if args.log:
            print("\n".join(log[-20:]))
    runs = Counter(name for each in cutters for body in each.bodies for name in _NAME.findall(body))
    got = [(each, answer._replace(runs=runs[b"r%d" % n])) for n, (each, answer) in enumerate(got)]
    whole = [(each, answer) for each, answer in got if not answer.error]
    same = [answer for each, answer in whole if answer[:3] == each.whole[:3]]
    for number, (each, answer) in enumerate(got):
        if answer.error:
            print("not whole:", each.path, each.body, answer.runs, "runs:", answer.error)
            print(*[line for line in log if f" request=r{number} " in line], sep="\n")
        elif answer[:3] != each.whole[:3]:
            print("other:", each.path, each.body, answer[:3], "expected", each.whole[:3])
    return {
        "requests": len(got),
        "whole": len(whole),
        "same": len(same),
        **({"same_if_asked_again": sum(a[:3] == each.whole[:3] for each, a in again)} if real else {}),
        "not_eligible": sum(bool(a.error) and not a.text and a.runs == 2 for _, a in got),
        "lost": dict(lost),
        "runs": dict(sorted(Counter(answer.runs for _, answer in got).items())),
        "same_of_those_run_again": sum(answer.runs > 1 for answer in same),
        "most_runs_of_a_plain_one": max((a.runs for e, a in got if not e.body.get("stream")), default=0),
        **({"replaced": len(running) - 1} if args.replace else {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Engines are lost in the middle of their answers.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--replace", action="store_true", help="another process takes over every 4 s")
    parser.add_argument("--vllm", type=Path, metavar="MODELS", help="three vLLM servers on CPU")
    parser.add_argument("--clients", type=int, help="requests at a time (24, of vLLM 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", action="store_true", help="show the end of hetlb's log")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "default"
    result = asyncio.run(run(args))
    print(json.dumps(result, indent=1))
    if args.save is not None:
        args.save.write_text(json.dumps({"command": sys.argv[1:], **result}, indent=1) + "\n")
    return 0 if result["same"] + result["not_eligible"] == result["requests"] else 1


if __name__ == "__main__":
    sys.exit(main())
