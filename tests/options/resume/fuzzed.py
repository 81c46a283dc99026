"""Streams that go on elsewhere, as a fuzzer gives them."""

from __future__ import annotations

import json

from fuzz.costs import Make, Reader, many

from hetlb.balancer.exchange.exchange import EngineRequest
from hetlb.balancer.http import http1
from hetlb.balancer.http import openai_body as bodies
from hetlb.balancer.http.endpoints import Kind
from hetlb.options.resume.continuation import Continuation
from hetlb.options.resume.progress import Kept
from hetlb.options.resume.resume_fields import read_asked

#: Tokens of a request whose answer may go on.
MODEL_LEN = 512


def _resumed(kind: Kind, call: bodies.Call, first: list[bytes], second: bytes) -> bytes | None:
    """Return the request for the rest of a stream that came in these reads, None where it does not go on."""
    kept = Kept()
    rest = Continuation(
        kind, EngineRequest(http1.RequestHead(), call.body, "l"), kept,
        streamed=call.stream, asks_ids=b'"return_token_ids"' not in call.body, hides_usage=call.hold_usage,
    )  # fmt: skip
    assert rest.dispatched(True, MODEL_LEN)
    stream = rest.stream(True)
    for piece in first:
        stream.read(piece, 0.0)
    draft = None if stream.done or stream.part_is_out else rest.draft()
    if draft is None:
        assert (
            rest.why or (rest.progress is not None and rest.progress.why) or stream.done or stream.part_is_out
        )
    else:
        assert rest.progress is not None
        fields = json.loads(draft.body)
        assert fields["stream_options"]["include_usage"] is True
        assert 1 <= fields.get("max_tokens", 1) <= MODEL_LEN or rest.progress.most_tokens is None
        assert draft.generated == sum(map(len, draft.ids)) <= (rest.progress.most_tokens or MODEL_LEN)
        assert len(fields.get("prompt", ())) <= len(call.body) + 1024 + draft.generated
        rest.take(draft)
        assert rest.dispatched(True, MODEL_LEN)
        again = rest.stream(True)
        for event in again.read(second, 0.0).partition(b"[DONE]")[0].split(b"\n\n")[:-1]:
            said = [line[6:] for line in event.split(b"\n") if line.startswith(b"data: {")]
            if len(said) == 1 and not (again.part_is_out or again.failed or again.lost is not None):
                json.loads(said[0])
    rest.close()
    assert kept.bytes == 0, "what was kept is still counted"
    return None if draft is None else draft.body


def continuation(data: bytes) -> None:
    """Bodies, the first part of their answers and the rest of these: one request wherever it was cut.

    The input is a body, a line feed, what came of the first engine, NUL, what comes of the second one.
    """
    body, _, streams = data.partition(b"\n")
    first, _, second = streams.partition(b"\0")
    for kind in (Kind.CHAT, Kind.COMPLETION):
        try:
            call = bodies.read_json(kind, body)
        except bodies.GateError:
            continue
        found = _resumed(kind, call, [first], second)
        cuts = sorted({len(first) // 3, *(at + 1 for at in range(len(first)) if first[at] == 10)})[:64]
        pieces = [first[a:b] for a, b in zip([0, *cuts], [*cuts, len(first)], strict=True) if a < b]
        assert _resumed(kind, call, pieces, second) == found, "another request by where the reads were cut"


def asked(data: bytes) -> None:
    """The body of a chat that may go on."""
    read_asked(data, chat=True)


TARGETS = {"continuation": continuation}
CHAT = b'{"messages":[{"role":"user","content":"x"}],'
#: name -> (reader, input of a size, the smaller size).
GROWTH: dict[str, tuple[Reader, Make, int]] = {
    "tools of a body that may go on": (asked, many(b"[],", CHAT + b'"tools":[', b"1]}"), 256 << 10),
    "objects of a body that may go on": (
        asked, many(b'"a":1,', CHAT + b'"vllm_xargs":{', b'"a":1}}'), 256 << 10,
    ),
    "fields of a body that may go on": (asked, many(b'"n":1,', CHAT, b'"n":1}'), 256 << 10),
}  # fmt: skip
