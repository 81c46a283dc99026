"""Records how a real vLLM server speaks, into tests/vllm/data.

Promises:
- every ``data/NAME.http`` is one HTTP response exactly as its bytes came off a raw socket: status line,
  headers, chunk framing, body. Nothing is parsed, decoded or put in order.
- ``data/index.json`` says for each which request made it (method, path, headers, body; a long body is
  shortened and marked so), its status, and for each read from the socket when it returned (ms after the
  request was sent) and how many bytes it brought, which shows what the server flushes together.
- ``data/observations.json`` holds what a single response cannot show: what a disconnect does to the
  gauges and how soon, what a full or too small KV cache does, how long an idle connection lives, what a
  client sees when the engine dies or the server is told to end.
- ``data/speed.json`` holds how long prefill and decode steps took on the machine that ran this; the
  profiles in tests/vllm/profiles were fitted to it.
- the servers are started by engines.py with their stated flags, and the model folder is given as a
  relative path, so that no path of this machine ends in the files.

Run from the repository root: ``python3 tests/vllm/capture.py MODELS_DIR [--only PART]``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engines import TINY_FAST, TINY_SLOW, Server, vllm_servers

DATA = Path(__file__).resolve().parent / "data"
LONG_BODY = 600
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello, tell me a story."}]
FIVE_GREEDY: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
LONE_SURROGATE = rb'{"model": "tiny", "prompt": "\ud800", "max_tokens": 1}'
LONG_MESSAGES = [{"role": "user", "content": "Tell me a story. " * 380}]
SMALL_ARGS = ("--enable-server-load-tracking", "--max-num-queued-reqs", "40")
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
)


@dataclass
class Exchange:
    """One request and the response as it came."""

    name: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    response: bytes = b""
    reads: list[tuple[float, int]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.response.split(b" ", 2)[1]) if self.response else 0

    def index_entry(self) -> dict[str, Any]:
        body = self.body.decode()
        if len(body) > LONG_BODY:
            body = f"{body[:120]} … shortened, {len(body)} bytes in all … {body[-120:]}"
        return {
            "method": self.method,
            "path": self.path,
            "headers": self.headers,
            "body": body,
            "status": self.status,
            "reads_ms_bytes": self.reads,
        }


def request_bytes(exchange: Exchange, version: str = "HTTP/1.1") -> bytes:
    lines = [f"{exchange.method} {exchange.path} {version}"]
    lines += [f"{name}: {value}" for name, value in exchange.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + exchange.body


def make(
    name: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Exchange:
    """A request; ``body`` may be bytes (sent as they are) or anything that JSON can say."""
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    base = {"Host": "localhost"}
    if body is not None:
        base |= {"Content-Type": "application/json", "Content-Length": str(len(raw))}
    return Exchange(name, method, path, base | (headers or {}), raw)


def complete(data: bytes) -> bool:
    """Whether one whole response has come (content-length, or the last chunk)."""
    head, found, body = data.partition(b"\r\n\r\n")
    if not found:
        return False
    for line in head.lower().split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return len(body) >= int(value)
        if name == b"transfer-encoding":
            return body.endswith(b"0\r\n\r\n")
    return False


def perform(server: Server, exchange: Exchange, *, version: str = "HTTP/1.1") -> Exchange:
    """Send on a connection of its own; read until the response is whole or the server closes."""
    with socket.create_connection((server.host, server.port), timeout=120) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start = time.monotonic()
        connection.sendall(request_bytes(exchange, version))
        while not complete(exchange.response):
            data = connection.recv(1 << 16)
            if not data:
                break
            exchange.response += data
            exchange.reads.append((round((time.monotonic() - start) * 1000, 1), len(data)))
    return exchange


def gauges(server: Server) -> dict[str, float]:
    """The gauges that a balancer reads, summed over series."""
    found: dict[str, float] = {}
    for line in server.get("/metrics")[1].decode().splitlines():
        name = line.partition("{")[0]
        if name in GAUGES:
            short = name.removeprefix("vllm:")
            found[short] = found.get(short, 0.0) + float(line.split()[-1])
    return found


def until(server: Server, reached: Callable[[dict[str, float]], bool], limit_s: float = 60.0) -> float:
    """Seconds until the gauges satisfy ``reached``, polled every few ms; -1 if they never do."""
    start = time.monotonic()
    while time.monotonic() - start < limit_s:
        if reached(gauges(server)):
            return round(time.monotonic() - start, 4)
        time.sleep(0.002)
    return -1.0


def idle(state: dict[str, float]) -> bool:
    return state["num_requests_running"] == 0 and state["num_requests_waiting"] == 0


@contextmanager
def load(server: Server, count: int, body: dict[str, Any]) -> Iterator[list[Exchange]]:
    """``count`` completions at once in the background; they are finished when the block has ended."""
    exchanges = [make(f"load-{i}", "POST", COMPLETIONS, body) for i in range(count)]
    threads = [threading.Thread(target=perform, args=(server, exchange)) for exchange in exchanges]
    for thread in threads:
        thread.start()
    try:
        yield exchanges
    finally:
        for thread in threads:
            thread.join()


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": HELLO[0]["content"], **FIVE_GREEDY, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, **FIVE_GREEDY, **fields}


def without(body: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in keys}


def post(name: str, path: str, body: Any, headers: dict[str, str] | None = None) -> Exchange:
    return make(name, "POST", path, body, headers)


def text(name: str, body: Any, headers: dict[str, str] | None = None) -> Exchange:
    return post(name, COMPLETIONS, body, headers)


def talk(name: str, body: Any) -> Exchange:
    return post(name, CHAT, body)


def good_requests() -> Iterator[Exchange]:
    for path in ("health", "version", "load", "ping", "v1/models", "tokenizer_info", "server_info"):
        yield make(f"get-{path.replace('/', '-')}", "GET", f"/{path}")
    yield post("post-ping", "/ping", {})
    yield make("head-health", "HEAD", "/health", headers={"Connection": "close"})
    yield make("get-v1-models-tiny", "GET", "/v1/models/tiny")
    usage, continuous = {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}
    for kind, path, body in (("completion", COMPLETIONS, completion), ("chat", CHAT, chat)):
        yield post(f"{kind}-plain", path, body())
        yield post(f"{kind}-stream", path, body(stream=True))
        yield post(f"{kind}-stream-usage", path, body(stream=True, stream_options=usage))
        yield post(f"{kind}-stream-usage-continuous", path, body(stream=True, stream_options=continuous))
        yield post(f"{kind}-stream-n2", path, body(stream=True, n=2, max_tokens=3, temperature=1, seed=7))
        yield post(f"{kind}-plain-n2", path, body(n=2, max_tokens=3, temperature=1, seed=7))
        yield post(f"{kind}-stream-one-token", path, body(stream=True, max_tokens=1))
        yield post(
            f"{kind}-plain-logprobs", path, body(max_tokens=2, logprobs=2 if kind == "completion" else True)
        )
        yield post(f"{kind}-plain-x-request-id", path, body(), {"X-Request-Id": "my-id-1"})
        yield post(f"{kind}-stream-x-request-id", path, body(stream=True), {"X-Request-Id": "my-id-2"})
        yield post(f"{kind}-plain-connection-close", path, body(), {"Connection": "close"})
        yield post(f"{kind}-stream-connection-close", path, body(stream=True), {"Connection": "close"})
        yield post(
            f"{kind}-stream-long-prompt",
            path,
            body(stream=True, max_tokens=3)
            | ({"prompt": list(range(10, 1910))} if kind == "completion" else {"messages": LONG_MESSAGES}),
        )
        end_at_once = without(body(logit_bias={"1": 100}), "ignore_eos")
        yield post(f"{kind}-plain-eos-first", path, end_at_once)
        yield post(f"{kind}-stream-eos-first", path, {**end_at_once, "stream": True, "stream_options": usage})
        stop = "cheer" if kind == "completion" else "ean"
        yield post(f"{kind}-plain-stop-string", path, body(stop=[stop], max_tokens=9))
        yield post(f"{kind}-plain-default-max-tokens", path, without(body(), "max_tokens"))
    yield text("completion-plain-token-ids", completion(prompt=[5, 6, 7, 8, 9, 10]))
    yield text(
        "completion-plain-list-n2",
        completion(prompt=["Hello", "Tell me"], n=2, max_tokens=3, temperature=1, seed=7),
    )
    yield text(
        "completion-stream-list-n2",
        completion(
            prompt=["Hello", "Tell me"],
            n=2,
            max_tokens=2,
            temperature=1,
            seed=7,
            stream=True,
            stream_options=usage,
        ),
    )
    yield text("completion-plain-token-id-lists", completion(prompt=[[5, 6, 7], [8, 9]], max_tokens=3))
    yield text("completion-plain-echo", completion(echo=True, max_tokens=2))
    yield text("completion-plain-best-of", completion(best_of=3, max_tokens=2))
    yield text("completion-plain-no-model", without(completion(), "model"))
    yield talk("chat-plain-max-completion-tokens", without(chat(max_completion_tokens=3), "max_tokens"))
    yield talk("chat-plain-both-max-tokens", chat(max_completion_tokens=3, max_tokens=7))
    yield text("completion-plain-max-tokens-null", completion(max_tokens=None))
    yield text("completion-plain-unknown-field", completion(no_such_field=1))
    yield post("tokenize-prompt", "/tokenize", {"model": "tiny", "prompt": "Hello, tell me a story."})
    yield post("tokenize-chat", "/tokenize", {"model": "tiny", "messages": HELLO})
    yield post("detokenize", "/detokenize", {"model": "tiny", "tokens": [300, 301, 302]})
    yield post(
        "responses-plain",
        "/v1/responses",
        {"model": "tiny", "input": "Hello", "max_output_tokens": 3, "temperature": 0},
    )
    yield post(
        "responses-stream",
        "/v1/responses",
        {"model": "tiny", "input": "Hello", "max_output_tokens": 2, "temperature": 0, "stream": True},
    )
    messages = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "temperature": 0}
    yield post("messages-plain", "/v1/messages", messages)
    yield post("messages-stream", "/v1/messages", {**messages, "stream": True})
    yield post(
        "messages-count-tokens", "/v1/messages/count_tokens", without(messages, "max_tokens", "temperature")
    )


def bad_requests() -> Iterator[Exchange]:
    for kind, path, body in (("completion", COMPLETIONS, completion), ("chat", CHAT, chat)):
        yield post(f"error-{kind}-unknown-model", path, body(model="no-such-model"))
        yield post(f"error-{kind}-unknown-model-stream", path, body(model="no-such-model", stream=True))
        for label, value in (
            ("huge", 1_000_000_000),
            ("over-context", 3000),
            ("0", 0),
            ("minus-1", -1),
            ("string", "5"),
            ("float", 1.5),
            ("true", True),
            ("beyond-64-bit", 10**30),
        ):
            yield post(f"error-{kind}-max-tokens-{label}", path, body(max_tokens=value))
        for label, value in (("0", 0), ("minus-1", -1), ("huge", 1_000_000_000), ("string", "2")):
            yield post(f"error-{kind}-n-{label}", path, body(n=value, temperature=1))
        yield post(f"error-{kind}-malformed-json", path, b'{"model": "tiny", "prompt": ')
        yield post(f"error-{kind}-not-an-object", path, [1, 2, 3])
        yield post(f"error-{kind}-empty-body", path, b"")
        yield post(f"error-{kind}-lone-surrogate", path, LONE_SURROGATE)
        yield post(f"error-{kind}-nan", path, body(temperature=float("nan")))
        yield post(f"error-{kind}-temperature", path, body(temperature=-1))
        yield post(
            f"error-{kind}-stream-options-without-stream", path, body(stream_options={"include_usage": True})
        )
        yield post(f"error-{kind}-stream-string", path, body(stream="maybe"))
        yield make(f"error-{kind}-get", "GET", path)
        yield post(f"error-{kind}-n2-greedy", path, body(n=2))
    yield text("error-completion-other-content-type", completion(), {"Content-Type": "text/plain"})
    yield text("error-completion-prompt-too-long", completion(prompt=[5] * 2100))
    yield text("error-completion-prompt-too-long-stream", completion(prompt=[5] * 2100, stream=True))
    yield text("error-completion-prompt-exactly-max", completion(prompt=[5] * 2048, max_tokens=1))
    yield text("error-completion-prompt-text-too-long", completion(prompt="story " * 3000))
    yield talk("error-chat-prompt-too-long", chat(messages=[{"role": "user", "content": "story " * 3000}]))
    yield text("error-completion-prompt-plus-max-tokens", completion(prompt=[5] * 2000, max_tokens=100))
    yield text("error-completion-missing-prompt", without(completion(), "prompt"))
    yield text("error-completion-prompt-null", completion(prompt=None))
    yield text("error-completion-prompt-empty-string", completion(prompt=""))
    yield text("error-completion-prompt-empty-list", completion(prompt=[]))
    yield text("error-completion-prompt-number", completion(prompt=5))
    yield text("error-completion-prompt-mixed-list", completion(prompt=["a", 5]))
    yield text("error-completion-token-out-of-vocabulary", completion(prompt=[5, 999999]))
    yield talk("error-chat-messages-string", chat(messages="Hello"))
    yield talk("error-chat-messages-missing", without(chat(), "messages"))
    yield talk("error-chat-messages-empty", chat(messages=[]))
    yield talk("error-chat-message-without-role", chat(messages=[{"content": "Hello"}]))
    yield make("error-unknown-path", "GET", "/no/such/path")
    yield post("error-unknown-path-post", "/v1/no-such", {})
    yield make("error-models-unknown", "GET", "/v1/models/no-such-model")
    yield post("error-post-models", "/v1/models", {})
    for path in (
        "/v1/embeddings",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/pooling",
        "/classify",
        "/invocations",
    ):
        yield post(f"error-generate-only{path.replace('/', '-')}", path, {"model": "tiny", "input": "Hello"})
    yield post("error-tokenize-unknown-model", "/tokenize", {"model": "no-such-model", "prompt": "x"})
    yield post("error-tokenize-missing-prompt", "/tokenize", {"model": "tiny"})


def save(entries: dict[str, Any], exchange: Exchange) -> None:
    (DATA / f"{exchange.name}.http").write_bytes(exchange.response)
    entries[exchange.name] = exchange.index_entry()


def open_and_leave(server: Server, body: dict[str, Any], stay_s: float) -> float:
    """Send a request, leave after ``stay_s``; seconds from the close until the server is idle."""
    exchange = make("leaver", "POST", COMPLETIONS, body)
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(request_bytes(exchange))
        time.sleep(stay_s)
        if gauges(server)["num_requests_running"] != 1:
            print("  warning: the request was not running when its client left", file=sys.stderr)
    return until(server, idle)


def half_close(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """What a client that only shuts its sending side down (curl never does, some proxies do) gets."""
    exchange = make("half", "POST", COMPLETIONS, body)
    with socket.create_connection((server.host, server.port), timeout=60) as connection:
        connection.sendall(request_bytes(exchange))
        time.sleep(0.3)
        connection.shutdown(socket.SHUT_WR)
        data = b""
        while part := connection.recv(1 << 16):
            data += part
    return {"whole_response_came": complete(data), "bytes": len(data)}


def idle_connection_life(server: Server) -> dict[str, Any]:
    """How long a kept connection lives, and how its end looks."""
    exchange = make("idle", "GET", "/health")
    with socket.create_connection((server.host, server.port), timeout=60) as connection:
        connection.sendall(request_bytes(exchange))
        connection.recv(1 << 16)
        start = time.monotonic()
        data = connection.recv(1 << 16)
        return {"closed_after_s": round(time.monotonic() - start, 2), "bytes_at_close": len(data)}


def pipelined(server: Server) -> dict[str, Any]:
    """Two requests in one write on one connection: are both answered, and in order?"""
    first, second = make("a", "GET", "/version"), make("b", "GET", "/health")
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(request_bytes(first) + request_bytes(second))
        time.sleep(1)
        data = connection.recv(1 << 16)
    return {"responses": data.count(b"HTTP/1.1 "), "version_first": b"version" in data.split(b"HTTP/1.1 ")[1]}


def capture_main(entries: dict[str, Any], notes: dict[str, Any], server: Server) -> None:
    """Everything one server with the normal KV cache can show."""
    save(entries, perform(server, make("metrics-fresh", "GET", "/metrics")))
    for exchange in good_requests():
        if exchange.method == "HEAD":
            with socket.create_connection((server.host, server.port), timeout=10) as connection:
                connection.sendall(request_bytes(exchange))
                while part := connection.recv(1 << 16):
                    exchange.response += part
            save(entries, exchange)
        else:
            save(entries, perform(server, exchange))
    for exchange in bad_requests():
        perform(server, exchange)
        if exchange.status < 400:
            exchange.name = exchange.name.replace("error-", "accepted-", 1)
        save(entries, exchange)
    save(entries, perform(server, make("health-http-1.0", "GET", "/health"), version="HTTP/1.0"))
    with load(server, 80, completion(prompt=[5] * 64, max_tokens=400)) as running:
        until(server, lambda state: state["num_requests_running"] == 64)
        time.sleep(0.5)
        save(entries, perform(server, make("metrics-busy", "GET", "/metrics")))
        save(entries, perform(server, make("load-busy", "GET", "/load")))
        notes["gauges_under_80_requests"] = gauges(server)
    notes["statuses_of_80_requests"] = sorted({exchange.status for exchange in running})
    until(server, idle)
    save(entries, perform(server, make("metrics-idle", "GET", "/metrics")))
    for label, stream in (("plain", False), ("stream", True)):
        body = completion(max_tokens=1900, stream=stream)
        notes[f"idle_after_disconnect_s_{label}"] = [open_and_leave(server, body, 0.5) for _ in range(5)]
    metrics = server.get("/metrics")[1].decode().splitlines()
    notes["request_success_after_disconnects"] = [
        line for line in metrics if line.startswith("vllm:request_success_total") and "abort" in line
    ]
    notes["half_close_plain"] = half_close(server, completion(max_tokens=300))
    notes["half_close_stream"] = half_close(server, completion(max_tokens=300, stream=True))
    notes["idle_connection"] = idle_connection_life(server)
    notes["pipelined"] = pipelined(server)
    until(server, idle)
    notes["gauges_at_end"] = gauges(server)


def capture_small(entries: dict[str, Any], notes: dict[str, Any], server: Server) -> None:
    """What a KV cache that is too small does: queueing, preemption, refusals."""
    save(entries, perform(server, make("small-kv-metrics-idle", "GET", "/metrics")))
    notes["longest_request_of_the_model"] = perform(
        server, make("longest", "POST", COMPLETIONS, completion(prompt=[5] * 1000, max_tokens=1048))
    ).status
    samples: list[dict[str, float]] = []
    with load(server, 40, completion(prompt=[5] * 200, max_tokens=400)) as running:
        while any(not exchange.response for exchange in running) and len(samples) < 2000:
            samples.append(gauges(server))
            if len(samples) == 20:
                save(entries, perform(server, make("small-kv-metrics-busy", "GET", "/metrics")))
                save(entries, perform(server, make("load-busy-with-tracking", "GET", "/load")))
            time.sleep(0.05)
    notes["statuses_of_40_requests"] = sorted({exchange.status for exchange in running})
    notes["most_at_once"] = {key: max(sample[key] for sample in samples) for key in samples[0]}
    notes["gauges_over_time_every_10th"] = samples[::10]
    until(server, idle)
    notes["gauges_at_end"] = gauges(server)
    save(entries, perform(server, make("small-kv-metrics-after", "GET", "/metrics")))
    # The flag --max-num-queued-reqs 40: what does request number 41 get?
    with load(server, 40, completion(max_tokens=1000)):
        until(server, lambda state: state["num_requests_running"] + state["num_requests_waiting"] == 40)
        save(entries, perform(server, text("error-completion-queue-full", completion())))
        save(entries, perform(server, text("error-completion-queue-full-stream", completion(stream=True))))
        save(entries, perform(server, talk("error-chat-queue-full-stream", chat(stream=True))))


def under_fault(server: Server, fault: Callable[[], None], stream: bool) -> dict[str, Any]:
    """What one client sees when ``fault`` strikes in the middle of its generation."""
    exchange = make("fault", "POST", COMPLETIONS, completion(max_tokens=1900, stream=stream))
    with socket.create_connection((server.host, server.port), timeout=60) as connection:
        connection.sendall(request_bytes(exchange))
        time.sleep(0.5)
        fault()
        start = time.monotonic()
        data, end = b"", "closed"
        try:
            while not complete(data) and (part := connection.recv(1 << 16)):
                data += part
        except OSError as error:
            end = type(error).__name__
    head, _, body = data.partition(b"\r\n\r\n")
    return {
        "stream": stream,
        "seconds_until_end": round(time.monotonic() - start, 2),
        "end": end,
        "whole_response_came": complete(data),
        "head": head.decode(),
        "last_bytes": body[-420:].decode(),
    }


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Token ids that no earlier prompt shares, so that the prefix cache gives nothing."""
    return [rng.randrange(300, 2048) for _ in range(length)]


def prefill_seconds(server: Server, rng: random.Random, batch: int, length: int) -> float:
    """From sending ``batch`` prompts at once to the last one's only token."""
    bodies = [completion(prompt=random_prompt(rng, length), max_tokens=1) for _ in range(batch)]
    exchanges = [make("prefill", "POST", COMPLETIONS, body) for body in bodies]
    threads = [threading.Thread(target=perform, args=(server, exchange)) for exchange in exchanges[1:]]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    perform(server, exchanges[0])
    for thread in threads:
        thread.join()
    return time.monotonic() - start


def decode_seconds(server: Server, rng: random.Random, batch: int, length: int, steps: int) -> float:
    """Mean step seen by one streamed request while ``batch - 1`` plain ones run beside it.

    The middle half of the stream counts: before it others may still prefill, after it they may be done.
    """
    plain = [completion(prompt=random_prompt(rng, length), max_tokens=steps + 8) for _ in range(batch - 1)]
    threads = [
        threading.Thread(target=perform, args=(server, make("decode", "POST", COMPLETIONS, body)))
        for body in plain
    ]
    for thread in threads:
        thread.start()
    if threads:
        until(server, lambda state: state["num_requests_running"] == len(threads))
    streamed = completion(prompt=random_prompt(rng, length), max_tokens=steps, stream=True)
    exchange = perform(server, make("stream", "POST", COMPLETIONS, streamed))
    for thread in threads:
        thread.join()
    arrivals = [at for at, _ in exchange.reads]
    first, last = len(arrivals) // 4, 3 * len(arrivals) // 4
    events = sum(size for _, size in exchange.reads[first + 1 : last + 1]) / 241  # one event and its framing
    return (arrivals[last] - arrivals[first]) / 1000 / events


def speed(server: Server, seed: int, quick: bool) -> dict[str, Any]:
    """The grid of one server: medians of repeats, in seconds."""
    rng = random.Random(seed)
    prefill, decode = [], []
    for length in (64, 128, 256, 512, 1024):
        for batch in (1, 2) if quick else (1, 2, 4):
            runs = [prefill_seconds(server, rng, batch, length) for _ in range(3 if quick else 5)]
            prefill.append([batch, length, round(statistics.median(runs), 5)])
    for length in (64, 768):
        for batch in (1, 8, 32):
            runs = [decode_seconds(server, rng, batch, length, 64) for _ in range(3)]
            decode.append([batch, length + 32, round(statistics.median(runs), 6)])
    return {"prefill_batch_input_seconds": prefill, "decode_batch_context_seconds": decode}


def capture_speed(models: Path, logs: Path) -> dict[str, Any]:
    """How fast the pair is: each server with the other one idle, then both measured at the same time."""
    found: dict[str, Any] = {}
    with vllm_servers([TINY_FAST, TINY_SLOW], models, logs) as servers:
        for server in servers:
            speed(server, 1, quick=True)  # warms every shape up
        found["alone"] = {server.name: speed(server, 2, quick=False) for server in servers}
        together: dict[str, Any] = {}
        threads = [
            threading.Thread(target=lambda s=server: together.__setitem__(s.name, speed(s, 3, quick=True)))
            for server in servers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found["together"] = dict(sorted(together.items()))
        body = completion(prompt=[7] * 128, max_tokens=128)
        for server in servers:
            start = time.monotonic()
            with load(server, 64, body):
                pass
            found.setdefault("alone_64_requests_128_128_tokens_per_s", {})[server.name] = round(
                64 * 128 / (time.monotonic() - start), 1
            )
        start = time.monotonic()
        with load(servers[0], 32, body) as left, load(servers[1], 32, body) as right:
            pass
        found["both_32_requests_128_128"] = {
            "statuses": sorted({exchange.status for exchange in [*left, *right]}),
            "seconds": round(time.monotonic() - start, 2),
            "seconds_of": {
                server.name: round(max(exchange.reads[-1][0] for exchange in part) / 1000, 2)
                for server, part in zip(servers, (left, right), strict=True)
            },
        }
    return found


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_core(server: Server) -> int:
    """The process of the engine behind the API server."""
    for child in children(server.process.pid):
        if Path(f"/proc/{child}/comm").read_text().startswith("VLLM::Engine"):
            return child
    raise RuntimeError("no engine process")


def capture_faults(notes: dict[str, Any], models: Path, logs: Path) -> None:
    """The engine process killed, and the server told to end, each under a plain and a streamed request."""
    for label in ("engine_killed", "server_sigterm"):
        notes[label] = []
        for stream in (False, True):
            with vllm_servers([replace(TINY_FAST, name=f"{label}-{stream}")], models, logs) as [server]:
                if label == "engine_killed":
                    target, number = engine_core(server), signal.SIGKILL
                else:
                    target, number = server.process.pid, signal.SIGTERM
                seen = under_fault(server, lambda t=target, n=number: os.kill(t, n), stream)  # type: ignore[misc]
                start = time.monotonic()
                health: list[tuple[float, Any]] = []
                while time.monotonic() - start < 20 and server.process.poll() is None:
                    try:
                        answer: Any = server.get("/health", timeout_s=1)[0]
                    except OSError as error:
                        answer = type(error).__name__
                    if not health or health[-1][1] != answer:
                        health.append((round(time.monotonic() - start, 2), answer))
                    time.sleep(0.05)
                seen["health_afterwards"] = health
                seen["exit_status_after_s"] = (server.process.poll(), round(time.monotonic() - start, 2))
                notes[label].append(seen)


def refused(server_args: dict[str, Any], models: Path, logs: Path) -> dict[str, Any]:
    """Start a server that should refuse to start; the last error line of its log comes back."""
    spec = replace(TINY_FAST, name="refused", **server_args)
    try:
        with vllm_servers([spec], models, logs, deadline_s=120):
            return {"arguments": server_args, "started": True}
    except RuntimeError as error:
        log = (logs / "refused.log").read_text(errors="replace")
        lines = [line for line in log.splitlines() if "ValueError:" in line] or [str(error).splitlines()[0]]
        return {"arguments": server_args, "started": False, "message": lines[-1].strip()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Record how a real vLLM server speaks.")
    parser.add_argument("models", type=Path, help="the folder that make_models.py filled (relative)")
    parser.add_argument(
        "--only",
        choices=("main", "small", "faults", "speed"),
        help="only this part; the rest of the files stays",
    )
    parser.add_argument("--logs", type=Path, default=Path(".cache/vllm-logs"))
    options = parser.parse_args(argv)
    if options.models.is_absolute():
        parser.error("give the model folder as a relative path: it ends up in the captures")
    DATA.mkdir(exist_ok=True)
    index_file, notes_file = DATA / "index.json", DATA / "observations.json"
    entries: dict[str, Any] = json.loads(index_file.read_text()) if index_file.exists() else {}
    notes: dict[str, Any] = json.loads(notes_file.read_text()) if notes_file.exists() else {}
    if options.only in (None, "main"):
        with vllm_servers([TINY_FAST], options.models, options.logs) as [server]:
            notes["main"] = {}
            capture_main(entries, notes["main"], server)
    if options.only in (None, "small"):
        # 12 blocks of 128 tokens are fewer than one request of max_model_len 2,048 may need.
        notes["refused_at_start"] = refused({"gpu_blocks": 12}, options.models, options.logs)
        small = replace(TINY_FAST, name="small-kv", gpu_blocks=60, extra_args=SMALL_ARGS)
        with vllm_servers([small], options.models, options.logs) as [server]:
            notes["small"] = {}
            capture_small(entries, notes["small"], server)
    if options.only in (None, "faults"):
        notes["faults"] = {}
        capture_faults(notes["faults"], options.models, options.logs)
    if options.only in (None, "speed"):
        found = capture_speed(options.models, options.logs)
        (DATA / "speed.json").write_text(json.dumps(found, indent=1) + "\n")
    index_file.write_text(json.dumps(dict(sorted(entries.items())), indent=1, ensure_ascii=False) + "\n")
    notes_file.write_text(json.dumps(notes, indent=1) + "\n")
    print(f"{len(entries)} captures in {DATA.name}/", file=sys.stderr)


if __name__ == "__main__":
    main()
