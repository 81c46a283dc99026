"""The cost of reading: every reader of bytes from outside, and how its CPU time grows with its input.

A reader is given bytes as a connection would get them, and the CPU time of this thread is taken, the
least of several runs. A ratio of two such times on the same machine is judged: the time of twice as many
bytes, or of a loop in Python over as many bytes (`pass_s`). Neither depends on the machine's speed. What
else runs there can make a time longer and never shorter, so a ratio that is too large is taken again, `TRIES`
times at most, and the least one counts: what is superlinear is so every time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from proxy.memory import End, Proxy

from hetlb import turns
from hetlb.balancer.core.evidence.evidence import Evidence
from hetlb.balancer.core.types import Health
from hetlb.balancer.http import openai_body as bodies
from hetlb.balancer.http.endpoints import Kind
from hetlb.balancer.http.http1 import GateError
from hetlb.errors import TraceError
from hetlb.tools.models.expressions import Expression
from hetlb.tools.openai.answers import AnswerError, EventReader
from hetlb.tools.stage import stage_messages
from hetlb.tools.workload.trace_formats import read_trace

#: Reads of a socket are as large as this at most.
READ = 256 << 10
#: Largest growth of the cost when the bytes grow eightfold.
MOST_GROWTH = 16.0
#: Largest cost of a byte, in turns of an empty loop in Python.
MOST_PASSES = 8.0
#: What one message costs however short it is, in bytes of such a loop.
LEAST_BYTES = 64 << 10
#: A ratio is taken so often before it counts as too large.
TRIES = 20

#: A turn is over by the time that this thread had: one that others interrupt would be cut into more turns.
turns._now = time.thread_time  # type: ignore[misc]

Reader = Callable[[bytes], None]
#: Maker of an input of a size.
Make = Callable[[int], bytes]


def many(unit: bytes, before: bytes = b"", after: bytes = b"") -> Make:
    """As many of these as fit."""
    return lambda size: before + unit * max(1, (size - len(before) - len(after)) // len(unit)) + after


def framed(frame: bytes) -> bytes:
    """A message after its length."""
    return len(frame).to_bytes(4, "big") + frame


def framed_in(data: bytes) -> Iterator[bytes]:
    """Messages that stand one after the other, each after its length in four bytes."""
    at = 0
    while at + 4 <= len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        yield data[at + 4 : end]
        at = end


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


class Kept:
    """A proxy that is used again: making one costs more than most inputs."""

    def __init__(self) -> None:
        self._proxy: Proxy | None = None
        self._engine: End | None = None

    @property
    def proxy(self) -> Proxy:
        if self._proxy is None:
            self._proxy = Proxy(self._listen)
        return self._proxy

    def _listen(self) -> End:
        self._engine = End()
        return self._engine

    def engine(self, request: bytes) -> tuple[End, End]:
        """A client that asked, and the far end of the connection to its engine."""
        client = self.proxy.client()
        self._engine = None
        client.send(request)
        self.proxy.loop.settle(4)
        assert self._engine is not None, "expected the request to reach an engine"
        return client, self._engine

    def done(self, *ends: End) -> None:
        for end in ends:
            end.leave()
        self.proxy.loop.settle(3)
        # Nothing of one input is to be held against the next.
        instance = self.proxy.scheduler.instances[0]
        instance.evidence = Evidence(random.Random(0), 0.0, Health.UP)


KEPT = Kept()


def client(size: int = READ) -> Reader:
    """What a client sends, in reads of `size` bytes."""

    def read(data: bytes) -> None:
        end = KEPT.proxy.client()
        loop = KEPT.proxy.loop
        for piece in pieces(data, size):
            end.send(piece)
            loop.settle(1)
        loop.rest()
        KEPT.done(end)

    return read


ASK = (
    b"POST /v1/completions HTTP/1.1\r\nhost: p\r\ncontent-length: 40\r\n\r\n"
    b'{"model":"m","prompt":"x","stream":true}'
)


def engine(size: int = READ) -> Reader:
    """What an engine answers, in reads of `size` bytes."""

    def read(data: bytes) -> None:
        asker, end = KEPT.engine(ASK)
        loop = KEPT.proxy.loop
        for piece in pieces(data, size):
            end.send(piece)
            loop.settle(1)
        loop.rest()
        KEPT.done(asker, end)

    return read


def json(kind: Kind) -> Reader:
    """A JSON body."""

    def read(data: bytes) -> None:
        with contextlib.suppress(GateError):
            bodies.read_json(kind, data)

    return read


def stage(data: bytes) -> None:
    """Frames of a stage or coordinator one after the other, each after its length in four bytes."""
    for frame in framed_in(data):
        with contextlib.suppress(stage_messages.StageProtocolError):
            stage_messages.decode(frame)


def answers(size: int = 4096) -> Reader:
    """Events of a server under load, in reads of `size` bytes."""

    def read(data: bytes) -> None:
        reader = EventReader()
        with contextlib.suppress(AnswerError):
            for piece in pieces(data, size):
                reader.feed(piece)

    return read


def expression(data: bytes) -> None:
    """An expression of a model's file, and a name that it may match."""
    with contextlib.suppress(ValueError):
        Expression(data.decode("latin-1")).match("a" * 64)


def trace(data: bytes) -> None:
    """A file of requests."""
    path = Path("/proc/self/fd") / str(_trace_file())
    path.write_bytes(data)
    with contextlib.suppress(TraceError):
        read_trace(path)


@functools.cache
def _trace_file() -> int:
    return os.memfd_create("trace")


# --- measuring ---


def cost_s(reader: Reader, data: bytes, runs: int = 3) -> float:
    """CPU seconds of one reading, the least of several; without the collector, whose cost is the heap's."""
    least = float("inf")
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(runs):
            began = time.thread_time()
            reader(data)
            least = min(least, time.thread_time() - began)
    finally:
        if collects:
            gc.enable()
    return least


def pass_s(length: int, runs: int = 3) -> float:
    """Return CPU seconds of an empty loop over `length` bytes."""

    def loop(data: bytes) -> None:
        for _ in data:
            pass

    return cost_s(loop, bytes(length), runs)


def least(ratio: Callable[[int], float], limit: float) -> float:
    """The least of up to `TRIES` ratios, none after one within the limit; each is given its number."""
    found = float("inf")
    for number in range(1, TRIES + 1):
        found = min(found, ratio(number))
        if found <= limit:
            break
    return found


def calls(reader: Reader, data: bytes) -> int:
    """Calls and returns of one reading, of functions in Python and in C."""
    count = 0

    def event(frame: object, kind: str, argument: object) -> None:
        nonlocal count
        count += 1

    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(event)
    try:
        reader(data)
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return count


def growth(reader: Reader, small: bytes, large: bytes) -> float:
    """Return the ratio of the cost of the larger input to the smaller one's."""
    return least(lambda number: cost_s(reader, large, 1) / cost_s(reader, small, 3), MOST_GROWTH)


def passes(reader: Reader, data: bytes, limit: float) -> float:
    """How many times the cost of a pass in Python over these bytes (`LEAST_BYTES` at least) they cost."""
    length = max(LEAST_BYTES, len(data))
    return least(lambda _: cost_s(reader, data) / pass_s(length), limit)


# --- oracles of the fuzzer ---

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\n"
FORM = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: p\r\ncontent-type: multipart/form-data; boundary=b\r\n"
)
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
#: Readers, and what stands before the input that is given many times over; options have more (`fuzzed.py`).
PREFIXES: tuple[tuple[Reader, bytes], ...] = (
    (client(), b""),
    (client(), b"GET / HTTP/1.1\r\nhost: p\r\n"),
    (client(), HEAD + b"transfer-encoding: chunked\r\n\r\n"),
    (client(), FORM + b"content-length: 60000000\r\n\r\n--b\r\n"),
    (
        client(),
        FORM + b'content-length: 60000000\r\n\r\n--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n',
    ),
    (engine(), b""),
    (engine(), b"HTTP/1.1 200 OK\r\n"),
    (engine(), SSE),
    (engine(), SSE.replace(b"transfer-encoding: chunked\r\n", b"")),
    (json(Kind.COMPLETION), b'{"model":"m","prompt":['),
    (json(Kind.CHAT), b'{"messages":"'),
    (json(Kind.RESPONSES), b""),
)
#: Of an input given many times over: its sizes, and the passes that a byte may cost. Coverage slows down what
#: it covers, and a whole request in a few bytes is work of its own.
SMALL, FUZZ_PASSES = 64 << 10, 800.0
#: Largest growth of the cost when the bytes double here: coverage blurs small sizes, quadratic is 4.
FUZZ_GROWTH = 3.0


def check_cost(reader: Reader, data: bytes) -> None:
    """An input, whatever it is, costs no more than `FUZZ_PASSES` passes over it."""
    if cost_s(reader, data, 1) > FUZZ_PASSES * _pass_s() * max(1.0, len(data) / LEAST_BYTES):
        found = passes(reader, data, FUZZ_PASSES)
        assert found <= FUZZ_PASSES, f"{len(data)} bytes cost {found:.0f} passes, {FUZZ_PASSES:.0f} allowed"


def check_growth(reader: Reader, before: bytes, unit: bytes) -> None:
    """Check that doubling costs at most `FUZZ_GROWTH` times as much, and a byte `FUZZ_PASSES` passes.

    A reader may take the first bytes in a cheaper way than the rest (whole events are only counted until
    one is cut by a turn). The doubling in which that ends may cost any number of times as much, and so may
    the next one, but not a third: what is superlinear costs too much in each.
    """
    sizes = (SMALL, 2 * SMALL, 4 * SMALL, 8 * SMALL)
    inputs = [before + (unit * (size // len(unit) + 1))[:size] for size in sizes]
    check_cost(reader, inputs[1])
    found = []
    for small, large in pairwise(inputs):
        found.append(_doubled(reader, small, large))
        if found[-1] <= FUZZ_GROWTH:
            return
    raise AssertionError(f"{unit!r}: twice as many cost {min(found):.2f} times as much")


def _doubled(reader: Reader, small: bytes, large: bytes) -> float:
    """Return the ratio of the larger input's cost to the smaller one's; 0 where it is too small to tell."""

    def ratio(number: int) -> float:
        runs = min(number, 6)
        one, two = cost_s(reader, small, runs), cost_s(reader, large, runs)
        return two / one if two >= _pass_s() else 0.0

    return least(ratio, FUZZ_GROWTH)


_passes: list[float] = []


def _pass_s() -> float:
    if not _passes:
        _passes.append(pass_s(LEAST_BYTES))
    return _passes[0]
