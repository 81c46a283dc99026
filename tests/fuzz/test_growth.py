"""A byte of input costs the same however many there are: in calls, CPU time and memory.

Worst cases, each generated in any size; options have more (`fuzzed.py`).
"""

from __future__ import annotations

import contextlib
import re
import runpy
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import costs
from fuzz.corpora import of_rooms
from fuzz.costs import Make, Reader, framed, many

from hetlb.balancer.http.endpoints import Kind
from hetlb.build import compiled
from hetlb.served_models import read_model_list
from hetlb.tools.stage.stage_messages import (
    MOST_PASSES,
    Close,
    Pass,
    Passes,
    StageProtocolError,
    decode,
    encode,
)

ROOT = Path(__file__).parents[2]
TABLES = runpy.run_path(str(ROOT / "configs" / "site" / "readers.py"))
READERS = TABLES["READERS"]
#: Calls that read a file or a connection, or decode what was read.
READS = re.compile(
    r"json\.loads\(|(json|msgpack)\.(decode|Decoder)\(|pickle\.loads|yaml\.(compose|load)|read(line|exactly|until)\("
    r"|(text|numbered)_lines\(|read_(text|bytes)\(|[^_]content\(path|\.recv\(|from_buffer"
)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: p\r\n"
FORM_HEAD = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: p\r\ncontent-type: multipart/form-data; boundary=b\r\n"
)
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
PART = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\ny\r\n'
MODEL = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'


def sized(unit: bytes, before: bytes = b"", after: bytes = b"", head: bytes = HEAD) -> Make:
    """A request with such a body."""

    def make(size: int) -> bytes:
        body = many(unit, before, after)(size)
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)

    return make


def chunked(unit: bytes, piece: int, head: bytes = HEAD) -> Make:
    """The same in chunks of `piece` bytes."""

    def make(size: int) -> bytes:
        body = unit * (size // (len(unit) + 5 * len(unit) // piece))
        chunks = b"".join(
            b"%x\r\n%b\r\n" % (len(body[at : at + piece]), body[at : at + piece])
            for at in range(0, len(body), piece)
        )
        return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"

    return make


def answer(unit: bytes, piece: int, head: bytes = SSE) -> Make:
    """An answer of an engine in chunks of `piece` bytes."""

    def make(size: int) -> bytes:
        body = unit * max(1, size // (len(unit) + 5 * len(unit) // piece))
        return head + b"".join(
            b"%x\r\n%b\r\n" % (len(body[at : at + piece]), body[at : at + piece])
            for at in range(0, len(body), piece)
        )

    return make


TOKEN = b'data: {"id":"c","choices":[{"index":0,"text":"x"}]}\n\n'
USED = b'data: {"choices":[],"usage":{"prompt_tokens":1},"x":"%b"}\n\n' % (b"x" * 400)
ENDED = b'data: {"choices":[{"finish_reason":"stop"}]}\n\n'
PROMPT = b'{"model":"m","prompt":'
PLAIN = JSON + b"transfer-encoding: chunked\r\n\r\n"
ROWS = b"arrival_s,input_tokens,output_tokens\n"
RECORD = b'{"arrival_s":1,"input_tokens":1,"output_tokens":1}\n'
HEADER = b"a: b\r\n"
PING = b"GET /ping HTTP/1.1\r\nhost: p\r\n\r\n"
NUMBERED = b"GET /ping HTTP/1.1\r\nhost: p\r\nx-n: %07d\r\n\r\n"


#: name -> (reader, input of a size, the smaller size).
CASES: dict[str, tuple[Reader, Make, int]] = {
    "blank lines": (costs.client(), many(b"\r\n"), 128 << 10),
    "blank lines in small reads": (costs.client(64), many(b"\r\n"), 16 << 10),
    "a head without end": (costs.client(), many(b"a", b"GET /"), 128 << 10),
    "a head byte by byte": (costs.client(1), many(HEADER, b"GET / HTTP/1.1\r\nhost: p\r\n"), 4 << 10),
    "a head of short headers": (costs.client(), many(HEADER, HEAD, b"\r\n"), 64 << 10),
    "pipelined requests": (costs.client(), many(PING), 64 << 10),
    # A turn of the loop is over within the first 16 KiB of these.
    "requests whose heads differ": (
        costs.client(), lambda size: b"".join(NUMBERED % n for n in range(size // 55)), 128 << 10,
    ),
    "pipelined requests in small reads": (costs.client(100), many(PING), 32 << 10),
    "a body in large chunks": (costs.client(), chunked(b"x" * 4096, 4096), 512 << 10),
    "a body in chunks of 64 bytes": (costs.client(), chunked(b"x" * 64, 64), 256 << 10),
    "a body in chunks of one byte": (costs.client(), chunked(b"x", 1), 96 << 10),
    "a body in chunks, byte by byte": (costs.client(1), chunked(b"x" * 64, 64), 4 << 10),
    "chunk sizes with zeros": (
        costs.client(), many(b"000001\r\nx\r\n", HEAD + b"transfer-encoding: chunked\r\n\r\n"), 64 << 10,
    ),
    "a body in small reads": (costs.client(10), sized(b"x"), 16 << 10),
    "lists of lists": (costs.json(Kind.COMPLETION), many(b"[],", PROMPT + b"[", b"[1]]}"), 512 << 10),
    "few lists of lists": (costs.json(Kind.COMPLETION), many(b"[1,2],", PROMPT + b"[", b"[1]]}"), 48 << 10),
    "empty strings": (costs.json(Kind.COMPLETION), many(b'"",', PROMPT + b"[", b'""]}'), 512 << 10),
    "escaped quotes": (costs.json(Kind.COMPLETION), many(b'\\"', PROMPT + b'["', b'"]}'), 512 << 10),
    "escaped backslashes": (costs.json(Kind.COMPLETION), many(b"\\\\", PROMPT + b'["', b'"]}'), 512 << 10),
    "commas of strings": (costs.json(Kind.COMPLETION), many(b" , ", PROMPT + b'["', b'"]}'), 512 << 10),
    "token ids": (costs.json(Kind.COMPLETION), many(b"1,", PROMPT + b"[", b"1]}"), 512 << 10),
    "nested lists": (
        costs.json(Kind.COMPLETION), lambda size: PROMPT + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
        256 << 10,
    ),
    "repeated keys": (costs.json(Kind.CHAT), many(b'"model":"m",', b"{", b'"n":1}'), 256 << 10),
    "unknown keys": (costs.json(Kind.CHAT), many(b'"a":{},', b"{", b'"n":1}'), 256 << 10),
    "blanks": (costs.json(Kind.CHAT), many(b" ", b'{"model":', b'"m"}'), 1 << 20),
    "digits": (costs.json(Kind.CHAT), many(b"7", b'{"x":', b"}"), 1 << 20),
    "pictures without end": (
        costs.json(Kind.CHAT), many(b'\\"data:;base64,', b'{"messages":"', b'"}'), 512 << 10,
    ),
    "data urls": (costs.json(Kind.CHAT), many(b'"data:x;base64,A",', b'{"messages":[', b'""]}'), 512 << 10),
    "UTF-8": (costs.json(Kind.CHAT), many("é".encode(), b'{"messages":"', b'"}'), 512 << 10),
    "parts of a form": (costs.client(), sized(PART, MODEL, b"--b--\r\n", FORM_HEAD), 128 << 10),
    "headers of a part": (
        costs.client(), sized(PART[:-5] + b"a:\r\n" * 900 + PART[-5:], MODEL, b"--b--\r\n", FORM_HEAD),
        128 << 10,
    ),
    "almost boundaries": (costs.client(), sized(b"\r\n--a", MODEL + PART[:-1], b"", FORM_HEAD), 512 << 10),
    "line ends in a file": (costs.client(1000), sized(b"\r\n", MODEL + PART[:-1], b"", FORM_HEAD), 64 << 10),
    "interim answers": (costs.engine(), many(b"HTTP/1.1 100 Continue\r\n\r\n"), 128 << 10),
    "an answer's head byte by byte": (costs.engine(1), many(HEADER, b"HTTP/1.1 200 OK\r\n"), 4 << 10),
    "an answer in chunks of one byte": (costs.engine(), answer(b"x", 1, PLAIN), 96 << 10),
    "a stream in chunks of one byte": (costs.engine(), answer(TOKEN, 1), 96 << 10),
    "tokens": (costs.engine(), answer(TOKEN, len(TOKEN)), 256 << 10),
    # Whole events are only counted until one is cut by a turn: 64 KiB cost 3.5 times as much as 32.
    "tokens of many events": (costs.engine(), answer(b"data: {}\n\n", 10), 512 << 10),
    "events with usage": (costs.engine(), answer(b'data: {"usage":{}}\n\n', 20), 64 << 10),
    "events of usage after the end of a choice": (
        costs.engine(), answer(USED, len(USED), SSE + b"%x\r\n%b\r\n" % (len(ENDED), ENDED)), 256 << 10,
    ),
    "events with errors": (costs.engine(), answer(b'data: {"error":{}}\n\n', 4000), 64 << 10),
    "empty events": (costs.engine(), answer(b"\n\n", 4000), 64 << 10),
    "an event without end": (costs.engine(), answer(b"x", 4000), 512 << 10),
    "an event without end, byte by byte": (costs.engine(1), answer(b"data: x", 7), 4 << 10),
    "a stream in small reads": (costs.engine(30), answer(TOKEN, len(TOKEN)), 32 << 10),
    "a plain answer in small reads": (costs.engine(10), many(b"x", JSON + b"\r\n"), 16 << 10),
    "answers of a server": (costs.answers(), many(b'data: {"choices":[{"text":"x"}]}\n\n'), 64 << 10),
    "answers of a server without a line end": (costs.answers(), many(b"x"), 512 << 10),
    "a list of models": (read_model_list, many(b'{"id":"m"},', b'{"data":[', b"{}]}"), 64 << 10),
    "names in a list of models": (read_model_list, many(b"\\u001b", b'{"data":[{"id":"', b'"}]}'), 64 << 10),
    "rows of a trace in CSV": (costs.trace, many(b"1,2,3\n", ROWS), 32 << 10),
    "cells of a trace in CSV": (costs.trace, many(b"1,", ROWS), 256 << 10),
    "columns of a trace in CSV": (costs.trace, many(b"a,"), 256 << 10),
    "lines of a row of a trace in CSV": (costs.trace, many(b'"\n",', ROWS), 64 << 10),
    "blank lines of a trace in CSV": (costs.trace, many(b"\n", ROWS), 64 << 10),
    "line ends of a trace in CSV": (costs.trace, many(b"\r", ROWS), 64 << 10),
    "records of a trace in JSON": (costs.trace, many(RECORD), 64 << 10),
    "ids of a trace in JSON": (costs.trace, many(b"1,", b'{"timestamp":0,"hash_ids":[', b"1]}"), 64 << 10),
    "objects of a trace in JSON": (costs.trace, many(b"{},", b"[", b"{}]"), 64 << 10),
    "objects in objects of a trace in JSON": (costs.trace, many(b'{"a":', b"[", b"]"), 64 << 10),
    "a string of a trace in JSON": (costs.trace, many(b"\\\"", b'{"a":"', b'"}'), 256 << 10),
    "expressions of a model": (costs.expression, many(b"(a|b*)"), 3 << 10),
    "repeats in expressions of a model": (costs.expression, many(b"(?:a*)*"), 3 << 10),
    "frames of a stage": (costs.stage, many(framed(encode(Close([1])))), 64 << 10),
    "frames of many passes": (
        costs.stage, many(framed(encode(Passes([Pass(1, 0, 0, 1, True)] * MOST_PASSES)))), 64 << 10,
    ),
    "frames of too many passes": (
        costs.stage, many(framed(encode(Passes([Pass(1, 0, 0, 1, True)] * 9 * MOST_PASSES)))), 256 << 10,
    ),
}  # fmt: skip
for _room in of_rooms():
    CASES.update(getattr(_room, "GROWTH", {}))


def test_every_reader_has_its_cases_and_every_case_its_reader() -> None:
    without = {name for name in CASES if not any(part in name for each in READERS for part in each.cases)}
    assert without == set()
    for each in READERS:
        for part in each.cases:
            assert any(part in name for name in CASES), f"{each.reads}: {part}"


def test_every_module_that_reads_is_in_the_table() -> None:
    rows, modules = {each.reads for each in READERS}, TABLES["MODULES"]
    assert modules.keys() - {""} <= rows
    known = {name for names in modules.values() for name in names.split()}
    package = ROOT / "hetlb"
    found = {
        path.relative_to(package).with_suffix("").as_posix()
        for path in package.rglob("*.py")
        if READS.search(path.read_text())
    }
    assert found == known


@pytest.mark.skipif(compiled(), reason="what is compiled makes no calls that the interpreter sees")
@pytest.mark.parametrize("name", CASES)
def test_calls_per_byte_are_few_and_flat_over_three_doublings(name: str) -> None:
    """Counted, not timed: the same in every run, but for what begins a turn of the event loop.

    Counted again where they are too many: the loop now and then drops its cancelled timers, also of earlier
    tests.
    """
    reader, make, size = CASES[name]
    inputs = [make(size // 8 << doubling) for doubling in range(4)]
    reader(inputs[0])
    most = allowed(name)[0] * len(inputs[3]) + TURNS
    for _ in range(2):
        counts = [costs.calls(reader, data) for data in inputs]
        # The third doubling adds 4/3 of what two add before it: over two, what chance adds weighs less.
        before, last = counts[2] - counts[0], counts[3] - counts[2]
        flat = last <= 4 / 3 * 1.15 * max(0, before) + TURNS
        if flat and counts[3] <= most:
            break
    assert flat, f"{name}: {counts} calls for twice as much each"
    assert counts[3] <= most, f"{name}: {counts[3] / len(inputs[3]):.2f} calls a byte"


@pytest.mark.parametrize("name", CASES)
def test_eight_times_the_input_costs_eight_times_as_much(name: str) -> None:
    """CPU time too: what C code copies and compares is no call. A cost that grows with the square is 64."""
    reader, make, size = CASES[name]
    small, large = make(size // 4), make(2 * size)
    reader(small)
    found = costs.growth(reader, small, large)
    assert found <= costs.MOST_GROWTH, f"{name}: eight times as much costs {found:.1f} times as much"


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_takes_little_memory(name: str) -> None:
    """A few bytes for each of its own, of which the reads that this test cuts it into are one."""
    reader, make, size = CASES[name]
    data = make(size)
    reader(data)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        reader(data)
        found = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert found <= allowed(name)[1] * len(data) + (64 << 10), f"{name}: {found} bytes for {len(data)}"


FIELDS = b"".join(b'"f%07d":1,' % n for n in range(300_000))
#: Fields of which each once made hetlb read all fields of a body again, one at a time.
SECOND = {
    "a lax limit": b'"max_tokens":"3"',
    "a lax truth value": b'"stream":"yes"',
    "lax numbers of each kind": b'"n":1.0,"best_of":true,"priority":"-5","max_output_tokens":3e0',
    "an object for vLLM": b'"vllm_xargs":{"a":1}',
    "many fields for vLLM": b'"vllm_xargs":{' + FIELDS + b'"b":1}',
    "sampling parameters": b'"sampling_params":{"extra_args":{"a":1}}',
    "a transfer field": b'"kv_transfer_params":{"a":1}',
    "a transfer field in an object for vLLM": b'"vllm_xargs":{"kv_transfer_par\\u0061ms":{}}',
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.COMPLETION], ids=lambda kind: kind.name)
def test_a_body_of_many_fields_is_read_once(name: str, kind: Kind) -> None:
    """No field makes hetlb read all others again: at most 1.5 times the cost of as many without meaning."""
    body = b"{" + FIELDS + b'%b,"prompt":"x"}'
    special, plain = body % SECOND[name], body % SECOND[name].replace(b"vllm_xargs", b"others")
    if special == plain:
        plain = body % b'"a":1'
    reader = costs.json(kind)
    found = costs.least(
        lambda number: costs.cost_s(reader, special, number) / costs.cost_s(reader, plain, number), 1.5
    )
    assert found <= 1.5, f"{name}: {found:.2f} times the cost of a plain body"


@pytest.mark.parametrize("dearer", [2.0, 3.5, 10.0, 100.0])
@pytest.mark.parametrize("end", [0.5, 1.0, 1.2, 1.5, 1.9, 2.5, 3.5, 6.0, 9.0])
def test_the_fuzzer_takes_no_step_for_growth(
    monkeypatch: pytest.MonkeyPatch, dearer: float, end: float
) -> None:
    """Bytes after the first `end` times the smallest input cost `dearer` times as much."""
    cheap = end * costs.SMALL
    judged(monkeypatch, lambda size: min(size, cheap) + dearer * max(0.0, size - cheap))


def test_the_fuzzer_takes_a_square_for_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"twice as many cost 4\.00 times as much"):
        judged(monkeypatch, lambda size: size * size / costs.SMALL)


def judged(monkeypatch: pytest.MonkeyPatch, cost: Callable[[int], float]) -> None:
    """Judge a reader whose cost is a function of the size, in turns of a loop."""
    monkeypatch.setattr(costs, "cost_s", lambda reader, data, runs=3: cost(len(data)))
    monkeypatch.setattr(costs, "_pass_s", lambda: float(costs.LEAST_BYTES))
    costs.check_growth(lambda data: None, b"", b"x")


#: Calls that do not depend on the input: requests before it, and turns of the event loop.
TURNS = 1500
#: Calls and returns that a byte of a case may cost, and bytes that it may hold, by its name: each
#: read, message, frame, event and line is work and an object of its own.
UNITS = (
    ("a list of models", 4.0, 64.0),
    ("a trace in", 30.0, 128.0),  # records are kept
    ("byte by byte", 250.0, 16.0),
    ("small reads", 25.0, 16.0),
    ("a file of", 20.0, 32.0),
    ("of a byte", 10.0, 16.0),
    ("requests", 10.0, 16.0),
    ("one token", 8.0, 16.0),
    ("short lines of a first", 12.0, 16.0),  # read by two readers, once for each engine
    ("short lines", 8.0, 16.0),
    ("lists in a line", 1.0, 32.0),
    ("empty events", 7.0, 32.0),
    ("one byte", 4.0, 16.0),
    ("zeros", 4.0, 16.0),
    ("of a peer", 4.0, 4.0),
    ("a name server", 50.0, 64.0),
    ("event", 3.0, 16.0),
    ("blocks", 3.0, 16.0),
    ("stage", 2.0, 4.0),
    ("messages", 2.5, 4.0),
    ("few lists", 0.7, 16.0),
    ("two metrics", 4.0, 16.0),  # read whole, and by the places that are remembered, until these are known
    ("metrics", 0.7, 8.0),
    ("", 0.7, 4.0),
)


def allowed(name: str) -> tuple[float, float]:
    """Calls a byte, and bytes held a byte, of a case."""
    return next((calls, held) for unit, calls, held in UNITS if unit in name)


@pytest.mark.parametrize("passes", [MOST_PASSES, 8 * MOST_PASSES])
def test_a_frame_of_a_stage_takes_little_memory(passes: int) -> None:
    """Whatever a frame decodes to takes twice its bytes, and what the fewest of them allow."""
    frame = encode(Passes([Pass(1, 0, 0, 1, True)] * passes))
    tracemalloc.start()
    try:
        with contextlib.suppress(StageProtocolError):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(frame) + (1 << 20)
    finally:
        tracemalloc.stop()
