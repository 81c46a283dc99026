"""What is fuzzed: readers of bytes from outside, each with what must hold whatever the bytes are.

This file knows where the readers live and what they are called, the `fuzzed.py` of an option knows its own. A
target takes any bytes and returns; whatever it raises is a find. Allowed refusals (`GateError`, `InputError`)
are caught here; everything else about them is checked: that all ways to cut the input give one reading, that
a second parser reads the same, that a figure is within its range, that an error is one line.
"""

# ruff: noqa: PT017, B904 -- what is caught here is judged; nothing else is a test

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
import python_multipart
import python_multipart.exceptions
from fuzz import costs
from fuzz.corpora import corpora, of_rooms
from proxy.stream_spellings import data_of
from stage.toy import make_folder, make_worker

from hetlb.balancer.clients.api_keys import load_api_keys
from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.profile_file import load_profile
from hetlb.balancer.http import http1, multipart, sse, text_shape, transfer_fields
from hetlb.balancer.http import openai_body as bodies
from hetlb.balancer.http.endpoints import Kind
from hetlb.errors import InputError
from hetlb.tools.plan.cluster import load_cluster
from hetlb.tools.stage import stage_messages
from hetlb.tools.stage.runner import run_apart

#: Folder of the toy model whose stage is fuzzed.
TOY = make_folder(Path(tempfile.mkdtemp(prefix="hetlb-fuzz-")))
#: A request that fails alone is no find.
logging.getLogger("hetlb.stage").setLevel(logging.ERROR)
atexit.register(shutil.rmtree, TOY, ignore_errors=True)

#: Where heads are remembered, as the listener and the pools do; they live as long as the fuzzer.
_known_requests: Any = None
_known_responses: Any = None
if hasattr(http1, "KnownHeads"):
    _known_requests = http1.KnownHeads(http1.parse_request_head)
    _known_responses = http1.KnownHeads(lambda head: http1.parse_response_head(head, b"POST"))


def _facts(found: Any) -> dict[str, Any]:
    """Everything a parsed head says, for comparison. The parser gives the head, or it and a length.

    A head that is remembered may have come with another length: the one beside it counts.
    """
    head = _head_of(found)
    facts = {name: getattr(head, name) for name in dir(head) if not name.startswith("__")}
    facts = {name: value for name, value in facts.items() if not callable(value)}
    facts["headers"] = [(name, value) for name, value in head.headers if name != b"content-length"]
    if "fields" in facts:
        facts["fields"] = {name: value for name, value in head.fields.items() if name != b"content-length"}
    return facts | {"length": _length_of(found)}


def _head_of(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def _length_of(found: Any) -> int | None:
    length: int | None = found[1] if isinstance(found, tuple) else found.content_length
    return length


def gate(data: bytes) -> None:
    """Request heads, response heads and chunked bodies."""
    _request_head(data)
    _response_head(data)
    _chunks(data)


def _request_head(data: bytes) -> None:
    try:
        end = http1.head_end(data)
        if not end:
            return
        found = http1.parse_request_head(data[:end])
    except http1.GateError as error:
        assert 400 <= error.status < 500
        if _known_requests is not None and b"\r\n\r\n" in data:
            with contextlib.suppress(http1.GateError):
                _known_requests.find(data[: data.index(b"\r\n\r\n") + 4])
                raise AssertionError("a head that the gate refuses was remembered as good")
        return
    if _known_requests is not None:
        assert _facts(_known_requests.find(data[:end])) == _facts(found), "remembered otherwise than it reads"
    head, length = _head_of(found), _length_of(found)
    assert not (head.chunked and length is not None), "two framings"
    # A second parser reads the same message.
    peer = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    peer.receive_data(data[:end])
    event = peer.next_event()
    assert isinstance(event, h11.Request), event
    target = head.path.encode() + (b"?" + head.query if head.query or b"?" in event.target else b"")
    assert (event.method, event.target) == (head.method, target)
    # h11 takes blanks off values at both ends, and writes `chunked` small.
    ours = [(name, value.strip(b" \t").lower()) for name, value in head.headers]
    assert ours == [(name, value.lower()) for name, value in event.headers]


def _response_head(data: bytes) -> None:
    try:
        end = http1.head_end(data)
        if not end:
            return
        found = http1.parse_response_head(data[:end], b"POST")
    except http1.GateError as error:
        assert error.status in (431, 502)
        return
    if _known_responses is not None:
        assert _facts(_known_responses.find(data[:end])) == _facts(found), (
            "remembered otherwise than it reads"
        )
    head, length = _head_of(found), _length_of(found)
    assert not (head.chunked and length is not None), "two framings"
    assert 100 <= head.status <= 599


def _decode(pieces: list[bytes]) -> tuple[bytes | None, bytes]:
    """Payload and surplus of a chunked body that comes in these pieces; None if it is refused."""
    decoder, payload = http1.ChunkedDecoder(), b""
    try:
        for number, piece in enumerate(pieces):
            if piece:
                payload += decoder.feed(piece)
            if decoder.done:
                return payload, decoder.surplus + b"".join(pieces[number + 1 :])
    except http1.GateError:
        return None, b""
    return payload, b""


def _chunks(data: bytes) -> None:
    whole = _decode([data])
    cuts = sorted({len(data) // 3, len(data) // 2, *(at + 1 for at in range(len(data)) if data[at] == 10)})
    cuts = cuts[:64]
    assert _decode([data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]) == whole
    if len(data) < 200:
        assert _decode([bytes([byte]) for byte in data]) == whole


def body(data: bytes) -> None:
    """Request bodies, as every kind of endpoint reads them; of forms, wherever the reads were cut."""
    for kind in Kind:
        try:
            call = bodies.read_json(kind, data)
        except bodies.GateError as error:
            assert error.status == 400
            assert "\n" not in error.message
            continue
        # What Python reads, and so vLLM: of a repeated key the last.
        try:
            read, sent = json.loads(data), json.loads(call.body)
        except RecursionError:
            continue
        assert isinstance(read, dict)
        assert call.model == read.get("model")
        assert call.stream == bool(read.get("stream"))
        assert call.n >= 1
        assert call.prompts >= 1
        assert call.max_tokens is None or call.max_tokens >= 1
        assert call.prompt_tokens_total is None or call.prompt_tokens_total >= 1
        assert sent.keys().isdisjoint(transfer_fields.FIELDS)
        if call.hold_usage:
            assert sent["stream_options"] == {"include_usage": True}
        elif read.keys().isdisjoint((*transfer_fields.FIELDS, "vllm_xargs", "sampling_params")):
            assert call.body == data.removeprefix(_BOM)
    boundary, _, form = data.partition(b"\n")
    with contextlib.suppress(bodies.GateError):
        multipart.read_form(b"multipart/form-data; boundary=" + boundary, form)


_BOM = b"\xef\xbb\xbf"


def _in_lf(data: bytes) -> bytes:
    """Return a stream with one kind of line ends, and without a byte order mark."""
    return data.removeprefix(_BOM).replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _watch(pieces: list[bytes], hold: bool) -> tuple[bytes, tuple[Any, ...]]:
    watcher = sse.SseWatcher(hold)
    out = b"".join([watcher.feed(piece) for piece in pieces if piece]) + watcher.flush()
    facts = (watcher.done, watcher.failed, watcher.completion_tokens, watcher.prompt_tokens)
    return out, (watcher.events, *facts)


def sse_watcher(data: bytes) -> None:
    """Streams: facts and output do not depend on where the reads were cut, nor the data on its spelling."""
    for hold in (False, True):
        whole = _watch([data], hold)
        if not hold:
            assert whole[0] == _in_lf(data), "bytes were changed"
            with contextlib.suppress(UnicodeDecodeError):
                assert data.startswith(_BOM) or data_of(whole[0]) == data_of(data), "other data"
        cuts = sorted(
            {len(data) // 3, len(data) // 2, *(at + 1 for at in range(len(data)) if data[at] == 10)}
        )
        cuts = cuts[:64]
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert _watch(pieces, hold) == whole
        if len(data) < 200:
            assert _watch([bytes([byte]) for byte in data], hold) == whole
    assert all(count is None or isinstance(count, int) for count in sse.usage_in_tail(data))
    _pass_events(data)


def usage(data: bytes) -> None:
    """Events of usage behind the end of a choice: each is passed on at once, and little is held."""
    held = sse.MAX_HELD_BYTES
    watcher = sse.SseWatcher(True)
    watcher.feed(b'data: {"choices":[{"finish_reason":"stop"}]}\n\n')
    values = data.replace(b"\r", b" ").split(b"\n")
    for number, value in enumerate(values * (1 + 64 // len(values))):
        event = b'data: {"choices":[],"usage":%b,"x":1}\n\n' % value
        out = watcher.feed(event)
        assert number or not watcher.understood or len(out) <= len(event) + 2 * held
        assert len(watcher.release()) <= 2 * held
    watcher.flush()
    assert watcher.between


def _pass_events(data: bytes) -> None:
    """The short way past the watcher counts what the watcher would."""
    first, _, chunks = data.partition(b"\0")
    shape = text_shape.text_shape(first)
    if shape is None:
        return
    count, passed = text_shape.pass_events(chunks, shape)
    if not count:
        return
    payload, surplus = _decode([chunks])
    assert payload is not None
    assert not surplus
    out, facts = _watch([payload], True)
    assert out == _decode([passed])[0]
    assert facts == (count, False, False, None, None)


_folder = Path(tempfile.mkdtemp(prefix="hetlb-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))


@atexit.register
def _clean_up() -> None:
    for path in _folder.iterdir():
        path.unlink()
    _folder.rmdir()


def config_file(data: bytes) -> None:
    """Fleet files, profiles, lists of keys, clusters: read whole, or one line that says why not."""
    path = _folder / f"{os.getpid()}.yaml"
    path.write_bytes(data)
    for load in (load_fleet, load_profile, load_api_keys, load_cluster):
        try:
            load(path)
        except InputError as error:
            assert "\n" not in str(error), str(error)
            assert str(_folder) in str(error), str(error)
    path.unlink()


def engine(data: bytes) -> None:
    """Answers of engines through a whole proxy: one reading wherever they are cut, an honest end, no cost."""
    pieces = _answered([data[at : at + 7] for at in range(0, len(data), 7)])
    assert _answered([data]) == pieces, "what a client can use depends on where the reads were cut"
    costs.check_cost(costs.engine(), data)


def _answered(reads: list[bytes]) -> bytes | None:
    """The body of an answer that comes so, as a client with h11 reads it: None unless it is whole and 200."""
    asker, end = costs.KEPT.engine(costs.ASK)
    for read in reads:
        end.send(read)
        costs.KEPT.proxy.loop.rest()
    got = bytes(asker.got)
    costs.KEPT.done(end, asker)
    assert not costs.KEPT.proxy.driver.exchanges
    if not got:
        return None
    peer = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    peer.send(h11.Request(method="POST", target="/", headers=[("host", "p")]))
    peer.send(h11.EndOfMessage())
    peer.receive_data(got)
    status, body = 0, b""
    while True:
        event = peer.next_event()
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        else:
            return body if status == 200 and isinstance(event, h11.EndOfMessage) else None


def differential(data: bytes) -> None:
    """Forms as python-multipart (vLLM's) reads them, chunked bodies as h11 does: what passes reads alike."""
    boundary, _, form = data.partition(b"\n")
    _compare_form(boundary, form)
    request = b"POST / HTTP/1.1\r\nhost: p\r\ntransfer-encoding: chunked\r\n\r\n"
    payload, surplus = _decode([data])
    if payload is None:
        return
    peer = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    peer.receive_data(request + data)
    body, event = b"", peer.next_event()
    while isinstance(event := peer.next_event(), h11.Data):
        body += bytes(event.data)
    assert body == payload, "h11 reads another body"
    if isinstance(event, h11.EndOfMessage):
        assert peer.trailing_data[0] == surplus


def _compare_form(boundary: bytes, form: bytes) -> None:
    try:
        call = multipart.read_form(b"multipart/form-data; boundary=" + boundary, form)
    except bodies.GateError:
        return
    fields: list[tuple[bytes, bytes]] = []
    parser = python_multipart.FormParser(
        "multipart/form-data",
        lambda field: fields.append((field.field_name or b"", field.value or b"")),
        lambda file: None,
        boundary=boundary.strip(b'"'),
        config={"UPLOAD_KEEP_EXTENSIONS": False, "MAX_MEMORY_FILE_SIZE": 1 << 20},
    )
    try:
        parser.write(form)
        parser.finalize()
    except python_multipart.exceptions.FormParserError:
        return  # it is refused there
    finally:
        parser.close()
    models = [value for name, value in fields if name == b"model"]
    if models:
        assert call.model == models[-1].decode("utf-8", "replace"), (call.model, models)


class _Sink:
    """A coordinator that is told what the stage gives up."""

    def send(self, frame: bytes) -> None:
        assert isinstance(stage_messages.decode(frame)[0], stage_messages.Lost)


def stage_frames(data: bytes) -> None:
    """Frames of a coordinator to a stage: one reading, no batch that breaks it, nothing held afterwards.

    The input is frames one after the other, each after its length in two bytes.
    """
    worker, runner, pool = make_worker(TOY, 0, 6, token_layers=6 * 64)
    batcher = worker._batcher
    worker._coordinators[1] = _Sink()  # type: ignore[assignment]
    at = 0
    while at + 2 <= len(data):
        length = int.from_bytes(data[at : at + 2], "big")
        frame, at = data[at + 2 : at + 2 + length], at + 2 + length
        try:
            message, rows = stage_messages.decode(frame)
            assert stage_messages.decode(stage_messages.encode(message, rows)) == (message, rows)
            worker.receive(message, rows)
        except stage_messages.StageProtocolError:
            continue
        works = batcher.form(lambda lease: True)
        assert all(isinstance(each, stage_messages.Lost) for each in batcher.lost)
        results = run_apart(runner, works) if works else []
        assert len(results) == len(works)
        batcher.done()
        assert pool.used <= pool.blocks
    for lease in list(batcher.leases):
        worker._close(lease)
    batcher.form(lambda lease: True)
    assert pool.used == batcher.waiting_bytes == batcher.waiting == 0


#: All readers whose cost is measured: the balancer's, then the options'.
PREFIXES = [*costs.PREFIXES, *(each for room in of_rooms() for each in getattr(room, "PREFIXES", ()))]


def cost(data: bytes) -> None:
    """CPU per byte: the input many times over, to each reader, and twice as often."""
    if len(data) < 2:
        return
    reader, before = PREFIXES[data[0] % len(PREFIXES)]
    costs.check_growth(reader, before, data[1:65])


TARGETS: dict[str, Callable[[bytes], None]] = {
    "engine": engine,
    "differential": differential,
    "stage": stage_frames,
    "cost": cost,
    "gate": gate,
    "body": body,
    "sse": sse_watcher,
    "usage": usage,
    "config": config_file,
}
for _room in of_rooms():
    TARGETS.update(getattr(_room, "TARGETS", {}))


def seeds(name: str) -> list[Path]:
    """The kept corpus of a target."""
    return sorted(path for path in corpora()[name].iterdir() if path.is_file())
