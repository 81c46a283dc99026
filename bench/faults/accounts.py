"""Engines that refuse, hang, stop and return, behind a real `hetlb serve`: how many requests are lost.

    python bench/faults/accounts.py [refusals] [others] [storm] [hung] [stops] [stalls] [full] [silent]
        [falls_silent] [incidents]

Engines are small servers of this process on loopback: an answer is 20 events, one each 20 ms. A line for
each case: requests sent and lost, and the bound. Exit status 1 if a case misses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

TOKENS, PACE_S = 20, 0.02
EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
)
FIRST = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
HEAD = b"HTTP/1.1 %b\r\ncontent-type: %b\r\n"
METRICS = """vllm:num_requests_running{engine="0"} %d
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0.01
vllm:generation_tokens_total{engine="0"} %d
vllm:prompt_tokens_total{engine="0"} %d
vllm:cache_config_info{block_size="16",num_gpu_blocks="8000",engine="0"} 1
"""


def _date() -> bytes:
    return formatdate(time.time() + 3600.0, usegmt=True).encode()


def _whole(
    status: bytes, body: bytes = b'{"error":{"message":"refused"}}', type_: bytes = b"application/json"
) -> bytes:
    return HEAD % (status, type_) + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_HEAD = HEAD % (b"200 OK", b"text/event-stream") + b"transfer-encoding: chunked\r\n\r\n"


def _stream(events: bytes) -> bytes:
    return STREAM_HEAD + (_chunk(events) if events else b"") + b"0\r\n\r\n"


#: Answers of an engine that refuses, by name.
REFUSALS: dict[str, Callable[[], bytes]] = {
    "503 date": lambda: _whole(b"503 X\r\nretry-after: " + _date()),
    "503 zero": lambda: _whole(b"503 X\r\nretry-after: 0"),
    "503 ms": lambda: _whole(b"503 X\r\nretry-after-ms: 1000"),
    **{str(each): functools.partial(_whole, b"%d X" % each) for each in (503, 429, 401, 404, 400, 500)},
}
#: The same of streams alone.
EVENTS: dict[str, Callable[[], bytes]] = {
    "event 429": lambda: _stream(b'data: {"error":{"message":"no","code":429}}\n\ndata: [DONE]\n\n'),
}
#: Answers that are none, and rarer refusals; "reset": the connection breaks behind the head.
OTHERS: dict[str, Callable[[], bytes]] = {
    "200 empty": lambda: _whole(b"200 OK", b""),
    "200 page": lambda: _whole(b"200 OK", b"<html><body>Welcome</body></html>", b"text/html"),
    "200 cut": lambda: _whole(b"200 OK", b'{"id":"c","choices":[{"message":{"content":"x'),
    "200 error": lambda: _whole(b"200 OK"),
    "200 other": lambda: _whole(b"200 OK", b'{"detail":"Not Found"}'),
    "reset": lambda: HEAD % (b"200 OK", b"application/json") + b"content-length: 100\r\n\r\n",
    "redirect": lambda: _whole(b"307 X\r\nlocation: http://127.0.0.1:1/"),
    **{
        str(each): functools.partial(_whole, b"%d X" % each)
        for each in (403, 407, 408, 410, 413, 421, 422, 451, 499, 502, 504, 520, 529)
    },
}
OTHER_EVENTS: dict[str, Callable[[], bytes]] = {
    "event 500": lambda: _stream(b'data: {"error":{"message":"no","code":500}}\n\ndata: [DONE]\n\n'),
    "no event": lambda: _stream(b""),
    "comments": lambda: _stream(b": ping\n\n: ping\n\n"),
    "done alone": lambda: _stream(b"data: [DONE]\n\n"),
    "no end": lambda: _stream(FIRST),
}
KINDS = {**REFUSALS, **EVENTS, **OTHERS, **OTHER_EVENTS}


Fields = dict[str, Any]


class Engine:
    """One engine: `mode` is "well", "hang", "hang-head", "hang-comments" or a key of `KINDS`."""

    def __init__(self, places: int = 1 << 20) -> None:
        self.mode, self.places = "well", places
        self.running = self.tokens = self.prompts = self.answered = 0
        #: Times at which requests came.
        self.visits: list[float] = []
        self.work_s, self.pace_s = 0.0, PACE_S
        #: False: its metrics are not answered.
        self.tells = True
        self.writers: set[asyncio.StreamWriter] = set()
        self.goes = asyncio.Event()
        self.goes.set()
        self.port = 0

    async def start(self) -> Engine:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    def kill(self) -> None:
        """Close its listener and every connection."""
        self.server.close()
        for each in list(self.writers):
            each.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0] or 0)
                body = await reader.readexactly(length)
                await self._answer(head.split()[1], body, writer)
        self.writers.discard(writer)
        writer.close()

    async def _answer(self, path: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == b"/metrics" and not self.tells:
            await asyncio.sleep(30.0)
        elif path == b"/metrics":
            text = METRICS % (self.running, self.tokens, self.prompts)
            writer.write(_whole(b"200 OK", text.encode(), b"text/plain"))
        elif path == b"/v1/models":
            writer.write(_whole(b"200 OK", b'{"object":"list","data":[{"id":"m","object":"model"}]}'))
        elif path in (b"/health", b"/version"):
            writer.write(_whole(b"200 OK", b'{"version":"0.11.0"}'))
        else:
            self.visits.append(time.monotonic())
            await self._generate(json.loads(body), writer)
        await writer.drain()

    async def _generate(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        refusal = KINDS.get(self.mode)
        if asked.get("bad"):
            writer.write(_whole(b"400 X"))
            return
        if self.running >= self.places:
            writer.write(_whole(b"503 X"))
            return
        stream = bool(asked.get("stream"))
        if refusal is not None:
            writer.write(refusal())
            if self.mode == "reset":
                raise OSError
            return
        self.running += 1
        try:
            if stream and self.mode != "hang":
                writer.write(STREAM_HEAD)
            left_s = self.work_s
            await self._wait(writer)
            self.prompts += 10
            if stream:
                writer.write(_chunk(FIRST))
            while left_s > 0.0:  # works and says nothing
                await asyncio.sleep(0.1)
                await self._wait(writer)
                self.tokens += 5
                left_s -= 0.1
            for _ in range(TOKENS):
                await asyncio.sleep(self.pace_s)
                await self._wait(writer)
                self.tokens += 1
                if stream:
                    writer.write(_chunk(EVENT))
                    await writer.drain()
            if stream:
                writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            else:
                writer.write(_whole(b"200 OK", b'{"choices":[{"message":{"content":"x"}}]}'))
            self.answered += 1
        finally:
            self.running -= 1

    async def _wait(self, writer: asyncio.StreamWriter) -> None:
        while self.mode.startswith("hang") or not self.goes.is_set():
            if writer.is_closing():
                raise OSError
            if self.mode == "hang-comments" and time.monotonic() % 1.0 < 0.02:
                writer.write(_chunk(b": ping\n\n"))
            await asyncio.sleep(0.02)
        if writer.is_closing():
            raise OSError


class Serve:
    """`hetlb serve` over engines, as a process of its own."""

    def __init__(
        self, engines: list[Engine], *, instances: Sequence[Fields] | None = None, **tables: Any
    ) -> None:
        """`instances` has further keys of each, `tables` further tables of the fleet file."""
        self.engines, self.tables = engines, tables
        self.instances = instances or [{}] * len(engines)
        #: Seconds until the first byte of each answer.
        self.first_s: list[float] = []

    async def __aenter__(self) -> Serve:
        fleet = {
            "version": 1,
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"host": "127.0.0.1", "port": 0},
            **self.tables,
            "models": [
                {
                    "name": "m",
                    "instances": [
                        {"name": "abcdefgh"[i], "url": f"http://127.0.0.1:{each.port}", **more}
                        for i, (each, more) in enumerate(zip(self.engines, self.instances, strict=True))
                    ],
                }
            ],
        }
        self.folder = tempfile.TemporaryDirectory()
        self.path = path = Path(self.folder.name) / "fleet.yaml"
        path.write_text(json.dumps(fleet))
        self.log = (Path(self.folder.name) / "log").open("wb")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hetlb", "serve", "--config", str(path),
            stdout=asyncio.subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        self.port = int(line.split("http://127.0.0.1:")[1].split()[0])
        self.admin = int(line.split("admin http://127.0.0.1:")[1].split(")")[0])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.terminate()
        await self.process.wait()
        self.log.close()
        self.folder.cleanup()
        for engine in self.engines:
            engine.server.close()

    async def ask_admin(self, line: str, body: bytes = b"") -> str:
        """Return the body of an answer of the admin listener."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.admin)
        head = (
            f"{line} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        text = await reader.read()
        writer.close()
        return text.partition(b"\r\n\r\n")[2].decode()

    async def status(self) -> Fields:
        """Return the body of `GET /v1/status`."""
        found: Fields = json.loads(await self.ask_admin("GET /v1/status"))
        return found

    async def command(self, *words: str) -> str:
        """Return what a command of hetlb prints."""
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hetlb", *words, "--admin", f"http://127.0.0.1:{self.admin}",
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        return (await made.communicate())[0].decode()

    async def ask(
        self, *, stream: bool = True, leaves_s: float = 1e9, headers: bytes = b"", **more: Any
    ) -> bool:
        """Send one request; True if its answer is whole and well."""
        body = json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": "x" * 40}], **more, "stream": stream}
        )
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(leaves_s if leaves_s < 1e9 else None):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(
                        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%b"
                        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                        % (headers, len(body), body.encode())
                    )
                    began = time.monotonic()
                    text = await reader.read(1)
                    self.first_s.append(time.monotonic() - began)
                    text += await reader.read()
                finally:
                    writer.close()
                well = (
                    text.startswith(b"HTTP/1.1 200") and b'"content":"x"' in text and b'"error"' not in text
                )
                return well and (not stream or text.endswith(b"0\r\n\r\n"))
        return False

    async def load(self, count: int, rate: float, rng: random.Random, **how: Any) -> list[bool]:
        """Send `count` requests as a Poisson stream; return which ended well."""
        tasks = []
        for _ in range(count):
            tasks.append(asyncio.create_task(self.ask(**how)))
            await asyncio.sleep(rng.expovariate(rate))
        return list(await asyncio.gather(*tasks))


missed = 0


def report(case: str, found: str, well: bool) -> None:
    """Print a line of the result."""
    global missed
    missed += not well
    print(f"{'ok  ' if well else 'MISS'}  {case:44} {found}", flush=True)


#: Visits before an instance is known to be bad; later ones are trials.
_FIRST_VISITS = 5


async def _refuses(kind: str, stream: bool, count: int, bad: int, turns: asyncio.Semaphore) -> None:
    """`bad` of `count` engines refuse 200 requests in this way, then answer again."""
    async with turns:
        engines = [await Engine().start() for _ in range(count)]
        async with Serve(engines) as serve:
            rng = random.Random(1)
            for each in engines[:bad]:
                each.mode = kind
            answers = await serve.load(200, 25.0, rng, stream=stream)
            lost = answers.count(False)
            trials = [each.visits[_FIRST_VISITS:] for each in engines[:bad]]
            close = sum(b - a < 0.9 for each in trials for a, b in itertools.pairwise(each))
            for each in engines[:bad]:
                each.mode = "well"
            await serve.load(125, 25.0, rng, stream=stream)
            at = engines[0].answered
            await serve.load(75, 25.0, rng, stream=stream)
            back = engines[0].answered - at
    tried = [len(each) for each in trials]
    what = f"lost {lost} of 200, trials {tried}, {close} within a second; then {back} of 75"
    report(
        f"{kind}, {'stream' if stream else 'plain'}, {bad} of {count}",
        what,
        lost <= 20 and back > 5 and not close,
    )


async def _all_refuse(plain: Fields, streamed: Fields) -> None:
    turns = asyncio.Semaphore(3)
    cases = [(kind, stream) for kind in plain for stream in (False, True)] + [
        (kind, True) for kind in streamed
    ]
    await asyncio.gather(
        *[_refuses(*case, count, bad, turns) for case in cases for count, bad in ((2, 1), (3, 2))]
    )


async def refusals() -> None:
    """One of two engines refuses, or two of three; the others are well."""
    await _all_refuse(REFUSALS, EVENTS)


async def others() -> None:
    """The same with answers that are none, and rarer refusals."""
    await _all_refuse(OTHERS, OTHER_EVENTS)


async def storm() -> None:
    """Every second request is a client's own 400."""
    engines = [await Engine().start() for _ in range(2)]
    async with Serve(engines) as serve:
        rng = random.Random(1)
        answers, bad = await asyncio.gather(
            serve.load(200, 20.0, rng), serve.load(200, 20.0, rng, bad=True, stream=False)
        )
        shares = [each.answered for each in engines]
        found = f"lost {answers.count(False)} of 200, answered {shares}, 400s {bad.count(False)}"
        report("a client's 400s", found, not any(not each for each in answers))


async def _hangs(mode: str, leaves_s: float) -> None:
    """One of two hangs for a minute, 8 requests/s."""
    engines = [await Engine().start() for _ in range(2)]
    async with Serve(engines) as serve:
        rng = random.Random(2)
        await serve.load(60, 12.0, rng)
        engines[0].mode = mode
        begun, named = time.monotonic(), -1.0
        task = asyncio.create_task(serve.load(480, 8.0, rng, leaves_s=leaves_s))
        while time.monotonic() - begun < 15.0 and named < 0.0:
            await asyncio.sleep(0.5)
            causes = [(each["cause"], each["instance"]) for each in (await serve.status())["causes"]]
            if ("stalled", "a") in causes:
                named = time.monotonic() - begun
        await asyncio.sleep(max(0.0, 62.0 - (time.monotonic() - begun)))
        engines[0].mode = "well"
        lost = (await task).count(False)
    leave = "never" if leaves_s > 1e8 else f"after {leaves_s:g} s"
    found = f"lost {lost} of 480, named after {named:.1f} s"
    report(f"{mode}, clients leave {leave}", found, lost <= 12 and 0 < named <= 10)


async def hung() -> None:
    """Nine fleets at a time: with heads, without heads, with comments that go on; clients leave or stay."""
    modes, leaves = ("hang-head", "hang", "hang-comments"), (5.0, 20.0, 1e9)
    await asyncio.gather(*[_hangs(*case) for case in itertools.product(modes, leaves)])


async def _stops(rate: float, faster: float, profiled: bool) -> None:
    """One of two, the faster or one of two equals, stands still for 30 s, then goes on."""
    engines = [await Engine().start() for _ in range(2)]
    engines[0].pace_s = PACE_S / faster
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{each}.yaml" for each in range(2)]
        for path, engine in zip(paths, engines, strict=True):
            path.write_text(PROFILE.replace("k8: 0.1", f"k8: {engine.pace_s}").replace("seqs: 8", "seqs: 64"))
        instances = [{"profile": str(path)} for path in paths] if profiled else [{}, {}]
        async with Serve(engines, instances=instances) as serve:
            rng = random.Random(3)
            await serve.load(round(rate * 20), rate, rng)
            before = [each.answered for each in engines]
            await serve.load(round(rate * 30), rate, rng)
            usual = (engines[0].answered - before[0]) / max(1.0, rate * 30)
            engines[0].goes.clear()
            serve.first_s.clear()
            lost = (await serve.load(round(rate * 30), rate, rng, leaves_s=40.0)).count(False)
            engines[0].goes.set()
            await serve.load(round(rate * 40), rate, rng)
            longest = max(serve.first_s)
            before = [each.answered for each in engines]
            await serve.load(round(rate * 20), rate, rng)
            share = (engines[0].answered - before[0]) / max(1.0, rate * 20)
    how = f"{rate:g} req/s, {faster:g} times as fast, {'with' if profiled else 'no'} profiles"
    found = f"lost {lost}; share {usual:.2f}, then {share:.2f}; longest first byte {longest:.1f} s"
    report(f"stops 30 s, {how}", found, share >= 0.7 * usual and longest <= 20.0)


async def stops() -> None:
    """Twelve fleets at a time."""
    cases = itertools.product((0.5, 2.5, 14.0), (2.0, 1.0), (False, True))
    await asyncio.gather(*[_stops(*case) for case in cases])


async def _stalls(seed: int) -> tuple[float, float, int]:
    """One of two equal engines stands still 25 times for 0.5 to 3 s, then no more; 14 requests/s."""
    engines = [await Engine().start() for _ in range(2)]
    async with Serve(engines) as serve:
        rng = random.Random(seed)
        await serve.load(280, 14.0, rng)
        before = [each.answered for each in engines]
        load = asyncio.create_task(serve.load(9000, 14.0, rng, leaves_s=40.0))
        for _ in range(25):
            engines[0].goes.clear()
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            engines[0].goes.set()
            await asyncio.sleep(rng.uniform(1.0, 6.0))
        during = [each.answered - was for each, was in zip(engines, before, strict=True)]
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await load
        await serve.load(140, 14.0, rng)
        before = [each.answered for each in engines]
        lost = (await serve.load(280, 14.0, rng)).count(False)
        after = [each.answered - was for each, was in zip(engines, before, strict=True)]
    return during[0] / sum(during), after[0] / sum(after), lost


async def stalls() -> None:
    """A hundred stalls, in four fleets."""
    for during, after, lost in await asyncio.gather(*[_stalls(seed) for seed in range(4)]):
        found = f"share while they last {during:.2f}, 10 s after {after:.2f}, lost then {lost}"
        report("25 stalls of 0.5 to 3 s", found, after >= 0.35 and not lost)


async def full() -> None:
    """Two engines of four places refuse what is more with 503 and no header, 60 requests/s."""
    engines = [await Engine(places=4).start() for _ in range(2)]
    for each in engines:
        each.work_s = 0.0
    async with Serve(engines) as serve:
        answers = await serve.load(360, 60.0, random.Random(4), stream=False)
        report("a full queue", f"answered {answers.count(True)} of 360", answers.count(True) >= 240)


async def silent() -> None:
    """Work of 320 s, not streamed; streams that say nothing for 65 s while counters move."""
    engines = [await Engine().start()]
    async with Serve(engines) as serve:
        engines[0].work_s = 65.0
        streams = asyncio.gather(*[serve.ask() for _ in range(20)])
        await asyncio.sleep(1.0)
        engines[0].work_s = 320.0
        plain = asyncio.create_task(serve.ask(stream=False, headers=b"x-stainless-read-timeout: 600\r\n"))
        whole = (await streams).count(True)
        report("streams silent for 65 s", f"{whole} of 20 whole", whole == 20)
        report("a plain answer of 320 s", "delivered" if await plain else "lost", plain.result())


async def falls_silent() -> None:
    """The only engine hangs in the middle of 20 streams."""
    engines = [await Engine().start()]
    engines[0].pace_s = 1.0
    async with Serve(engines) as serve:
        streams = [asyncio.create_task(serve.ask()) for _ in range(20)]
        await asyncio.sleep(5.0)
        engines[0].mode = "hang-head"
        begun = time.monotonic()
        await asyncio.wait(streams, timeout=60.0)
        took = time.monotonic() - begun
        report("streams of an engine that hangs", f"ended after {took:.1f} s", took <= 30.0)


#: Of engines that keep their profile on a busy machine.
_SLOW_PACE_S = 0.1
PROFILE = """
version: 1
name: p
engine: {kv_cache_tokens: 128000, max_num_seqs: 8, block_size: 16}
prefill: {k1: 1.0e-5, k2: 1.0e-3, k3: 0.0, k4: 1.0e-3}
decode: {k5: 1.0e-9, k6: 1.0e-6, k7: 0.0, k8: 0.1}
"""


class Incident:
    """An incident: causes of which one must lead, states, words of its sentence, load in requests/s.

    It is looked for after `known_s`, and after a minute.
    """

    def __init__(
        self, leads: str, states: str, words: str, rate: float = 1.5, known_s: float = 5.0, **how: Any
    ) -> None:
        self.leads, self.states, self.words = leads.split(), states.split(), words.split("|")
        self.rate, self.known_s, self.how = rate, known_s, how

    async def run(self, name: str) -> None:
        """Look twice after it began, in status, metrics, the page's stream and `top`."""
        engines = [await Engine(places=8).start() for _ in range(2)]
        for each in engines:
            each.pace_s = _SLOW_PACE_S
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "p.yaml").write_text(PROFILE)
            instances = [{"profile": str(Path(folder) / "p.yaml"), "max_num_seqs": 8}] * 2
            proxy = {"tenant_header": "x-tenant"}
            async with Serve(engines, instances=instances, proxy=proxy) as serve:
                load = asyncio.create_task(serve.load(10**6, 1.5, random.Random(1)))
                await asyncio.sleep(10.0)
                loads = [load, *await self.begin(name, engines, serve)]
                began = time.monotonic()
                for at in (self.known_s, 60.0):
                    await asyncio.sleep(began + at - time.monotonic())
                    await self.look(name, at, serve)
                for task in loads:
                    task.cancel()
                await asyncio.gather(*loads, return_exceptions=True)

    async def begin(self, name: str, engines: list[Engine], serve: Serve) -> list[asyncio.Task[Any]]:
        """Make it happen; return the load that it brings."""
        rng, a = random.Random(2), engines[0]
        more = self.how
        if name in ("dead", "all down"):
            for each in engines[: 1 if name == "dead" else 2]:
                each.kill()
        elif name == "hung":
            a.mode = "hang-head"
        elif name == "slow":
            a.pace_s = 4.0 * _SLOW_PACE_S
        elif name == "drained":
            await serve.ask_admin("PUT /v1/fleet/instances/a/state", b'{"state": "drain"}')
        elif name == "stale report":
            a.tells = False
        elif name == "refused reload":
            serve.path.write_text(serve.path.read_text().replace('"models"', '"modles"'))
            await serve.ask_admin("POST /v1/reload")
        return [asyncio.create_task(serve.load(10**6, self.rate, rng, **more))]

    async def look(self, name: str, at: float, serve: Serve) -> None:
        """Look for state and sentence in each of the four places."""
        status, metrics, stream, top, line = await asyncio.gather(
            serve.status(),
            serve.ask_admin("GET /metrics"),
            serve.command("top", "--json"),
            serve.command("top", "--once"),
            serve.command("status"),
        )
        shown = json.loads(stream)["status"]
        wrong = [place for place, text in (("status", line), ("top", top)) if not self.said(text)]
        if not (shown["state"] in self.states and self.said(f"{shown['state']} {shown['advice']}")):
            wrong.append("page")
        causes = [each["cause"] for each in status["causes"]]
        lead = causes[0] if causes else ""
        # The places are asked side by side: what leads may change from one to the next.
        if lead not in self.leads or not any(
            f'hetlb_cause{{cause="{each}"' in metrics for each in self.leads
        ):
            wrong.append("metrics")
        where = f" WRONG IN {', '.join(wrong)}" if wrong else ""
        report(f"{name} after {at:g} s", f"{line.strip()[:150]}{where}", not wrong)

    def said(self, text: str) -> bool:
        """Return True if the first words of a text are a state of it, and its sentence is there."""
        flat = " ".join(text.split())
        return flat.startswith(tuple(self.states)) and any(each in flat.lower() for each in self.words)


INCIDENTS: dict[str, Incident] = {
    "dead": Incident("dead", "degraded", "a is down"),
    "hung": Incident("stalled", "degraded", "a has stalled"),
    "slow": Incident("slow", "degraded", "a takes"),
    "saturated": Incident("saturated long_wait", "busy degraded", "requests wait, the oldest for", 12.0),
    "client storm": Incident("client_errors", "busy", "clients' mistakes", 12.0, bad=True, stream=False),
    "drained": Incident("drained", "well busy", "a is drained"),
    "refused reload": Incident("reload_refused", "degraded", "the edited fleet file was rejected"),
    "stale report": Incident("stale_report", "busy", "the last report of a", known_s=35.0),
    "all down": Incident("all_down", "down", "a and b are down"),
    "tenant hog": Incident(
        "tenant_hog long_wait", "busy degraded", "tenant hog has|requests wait, the oldest for", 12.0,
        headers=b"x-tenant: hog\r\n",
    ),
}  # fmt: skip


async def incidents() -> None:
    """Ten incidents, five at a time."""
    names = list(INCIDENTS)
    for first in range(0, len(names), 5):
        await asyncio.gather(*[INCIDENTS[name].run(name) for name in names[first : first + 5]])


CASES: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
    "refusals": refusals, "others": others, "storm": storm, "hung": hung, "stops": stops, "stalls": stalls,
    "full": full, "silent": silent, "falls_silent": falls_silent, "incidents": incidents,
}  # fmt: skip


async def main() -> int:
    """Run the cases that are named, all without a name."""
    for name in sys.argv[1:] or CASES:
        await CASES[name]()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
