"""Shows that the emulator answers as a real vLLM 0.32 did: every recorded request is asked again.

`tests/vllm/data` holds what a real server (CPU, a tiny model, `--max-model-len 2048`) sent. Compared are
status, header lines, framing, the number of events, and all that our JSON says: every key is vLLM's and every
value as there; of errors the body's form and code. Not compared is what a model makes up (texts), what a
tokenizer counts, and how vLLM words an error.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from emulator.conftest import Start, make_profile
from emulator.wire import Client, request_bytes

DATA = Path(__file__).parents[1] / "vllm" / "data"

#: Recorded, and not emulated: log probabilities, stop strings, EOS by logit bias, Anthropic's messages and
#: OpenAI's responses, an endpoint for another platform, load tracking, a bounded engine queue, `true` as a
#: number; pages that are compared elsewhere; and embeddings, which the recorded model cannot make.
NOT_EMULATED = re.compile(
    r".*(logprobs|stop-string|eos-first|invocations|with-tracking|queue-full.*|v1-embeddings|-true)"
    r"|(messages|responses)-.*|.*metrics-.*"
)
#: Values that belong to a model, a tokenizer or a moment.
FREE = {
    *("id", "item_id", "created", "created_at", "text", "content", "delta", "system_fingerprint", "root"),
    *("tokens", "count", "prompt", "prompt_tokens", "total_tokens", "input_tokens"),
}


def recorded(name: str) -> tuple[list[str], bytes]:
    """Header lines and body of a recording."""
    head, _, body = (DATA / f"{name}.http").read_bytes().partition(b"\r\n\r\n")
    return head.decode().split("\r\n"), body


def exchanges() -> list[Any]:
    index = json.loads((DATA / "index.json").read_text())
    return [
        pytest.param(name, entry, id=name)
        for name, entry in index.items()
        if not NOT_EMULATED.fullmatch(name) and "… shortened" not in str(entry.get("body"))
    ]


def check(ours: Any, theirs: Any, key: str = "") -> None:
    """All that our JSON says is in theirs."""
    if isinstance(ours, dict):
        assert isinstance(theirs, dict), key
        for name, value in ours.items():
            assert name in theirs, name
            check(value, theirs[name], name)
    elif isinstance(ours, list) and key not in FREE:
        assert len(ours) == len(theirs), key
        for one, other in zip(ours, theirs, strict=True):
            check(one, other)
    elif key in FREE and ours is not None:
        assert type(ours) is type(theirs), key
    else:
        assert ours == theirs, key


def by_choice(events: list[Any]) -> list[Any]:
    """Return a stream's events, the first choice's first: choices take turns as the engine likes."""
    return sorted(events, key=lambda event: re.findall(r"'index': (\d+)", str(event))[:1] or ["9"])


def comparable_head(lines: list[str]) -> tuple[str, list[str]]:
    """Status and headers, whose order and case mean nothing; the values of two of them are not comparable."""
    named = (line.split(": ", 1) for line in lines[1:])
    headers = sorted(f"{name.lower()}: {value}" for name, value in named)
    return lines[0].split(" ", 1)[1], [re.sub(r"^(date|content-length): .*", r"\1", each) for each in headers]


def events(body: bytes) -> list[Any]:
    """The chunks of a stream: (event lines before the data, the data)."""
    result = []
    while body:
        size, _, body = body.partition(b"\r\n")
        chunk, body = body[: int(size, 16)], body[int(size, 16) + 2 :]
        if not chunk:
            break
        assert chunk.endswith(b"\n\n")
        before, _, data = chunk.decode().rstrip("\n").rpartition("data: ")
        result.append((before, data if data == "[DONE]" else json.loads(data)))
    assert body == b""
    return result


@pytest.mark.parametrize(("name", "entry"), exchanges())
async def test_as_recorded(start: Start, name: str, entry: dict[str, Any]) -> None:
    lines, body = recorded(name)
    engine = await start(make_profile(), max_model_len=2048, time_scale=1e-4)
    raw = request_bytes(
        entry["method"],
        entry["path"],
        entry["body"].encode() if entry.get("body") else None,
        entry["headers"],
    )
    if name.endswith("http-1.0"):
        raw = raw.replace(b"HTTP/1.1", b"HTTP/1.0")
    async with await Client.connect(engine.url) as client:
        client.writer.write(raw)
        head = (await client.reader.readuntil(b"\r\n\r\n")).decode().removesuffix("\r\n\r\n").split("\r\n")
        assert comparable_head(head) == comparable_head(lines)
        if "Transfer-Encoding: chunked" in head:
            answer = await client.reader.readuntil(b"\r\n0\r\n\r\n")
            for (ours, said), (theirs, told) in zip(
                by_choice(events(answer)), by_choice(events(body)), strict=True
            ):
                assert ours == theirs
                check(said, told)
            return
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:])}
        if entry["method"] == "HEAD":
            return
        answer = await client.reader.readexactly(int(headers["content-length"]))
    if answer or body:
        ours, theirs = json.loads(answer), json.loads(body)
        if "error" in theirs:
            assert ours["error"].keys() == theirs["error"].keys()
            assert ours["error"]["code"] == theirs["error"]["code"]
            return
        if name == "chat-plain-default-max-tokens":  # fills the context, whatever the prompt has left of it
            assert ours["usage"]["total_tokens"] == theirs["usage"]["total_tokens"] == 2048
            ours["usage"] = theirs["usage"]
        check(ours, theirs)


async def test_metrics_are_a_part_of_the_recorded_ones(start: Start) -> None:
    """Every name, type and set of label names that the emulator sends is one that vLLM sends."""

    def series(page: str) -> set[tuple[str, tuple[str, ...]]]:
        found = re.findall(r"^(vllm:\w+)\{(.*)\} ", page, re.MULTILINE)
        return {(name, tuple(re.findall(r'(\w+)="', labels))) for name, labels in found}

    engine = await start()
    async with await Client.connect(engine.url) as client:
        response = await client.ask("GET", "/metrics")
    lines, body = recorded("metrics-idle")
    assert f"content-type: {response.headers['content-type']}" in lines
    ours, theirs = response.body.decode(), body.decode()
    info = "vllm:cache_config_info"
    assert {item for item in series(ours) if item[0] != info} <= series(theirs)
    (labels,) = (labels for name, labels in series(ours) if name == info)
    assert set(labels) < set(next(labels for name, labels in series(theirs) if name == info))
    types = re.findall(r"^# TYPE .*", ours, re.MULTILINE)
    assert set(types) <= set(re.findall(r"^# TYPE .*", theirs, re.MULTILINE))
