"""An open-loop load generator: requests go out when they are due, whatever the server does.

Promise: the plan is made before the run; nothing waits for an answer before the next request is sent; a
time is taken before a byte is parsed; a first token is the first event with content (a role, an empty
text or a usage event is none). What the generator itself did late is reported, not hidden in latencies.
"""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from hetlb.core.arrivals import PlannedRequest
from hetlb.core.records import Gaps, RequestRecord, percentile, summarize

#: Token ids of made-up prompts: within the vocabulary of any model, away from special tokens.
_FIRST_ID, _LAST_ID = 100, 1999
#: A run whose sends were later than this (99th percentile) says more about the client than the server.
SUSPECT_LAG_S = 0.05


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to send. `answer_cap` None asks for exactly the planned output by `ignore_eos`.

    With a number every request has that `max_tokens`, and the planned length goes along where only an
    emulated engine looks for it (`vllm_xargs`), as the place of its end-of-sequence token: so the router
    cannot read the length of an answer from the request.
    """

    url: str
    model: str
    stream: bool = True
    seed: int = 0
    answer_cap: int | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class LoadResult:
    """What a run gave, and how well the generator itself did."""

    records: list[RequestRecord]
    gaps: Gaps
    errors: dict[str, int]
    send_lag_p99_s: float
    client_cpu_share: float

    @property
    def suspect(self) -> str:
        """Why the figures may be the client's own, "" if there is no reason to think so."""
        if self.send_lag_p99_s > SUSPECT_LAG_S:
            return f"requests were sent up to {self.send_lag_p99_s * 1e3:.0f} ms late (p99)"
        return ""

    def summary(self, policy: str, seed: int, request_rate: str) -> dict[str, Any]:
        """The figures of the run, as `vllm bench serve` names them."""
        names = sorted({record.instance for record in self.records if record.instance})
        return {
            "policy": policy,
            "seed": seed,
            **summarize(self.records, self.gaps, instances=names),
            "request_rate": request_rate,
            "errors": self.errors,
            "send_lag_p99_ms": self.send_lag_p99_s * 1e3,
            "client_cpu_share": self.client_cpu_share,
        }


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Answer)


def request_body(planned: PlannedRequest, options: LoadOptions) -> bytes:
    """The body of one planned request: a prompt of exact length that shares its beginning with no other."""
    rng = random.Random(f"{options.seed}/{planned.index}")
    document: dict[str, Any] = {
        "model": options.model,
        "prompt": [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(planned.prompt_tokens)],
        "temperature": 0,
    }
    output = max(1, planned.output_tokens)
    if options.answer_cap is None:
        document |= {"max_tokens": output, "ignore_eos": True}
    else:
        document |= {
            "max_tokens": max(options.answer_cap, output),
            "vllm_xargs": {"output_tokens": output},
        }
    if options.stream:
        document |= {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(document)


async def run_load(
    plan: Sequence[PlannedRequest],
    options: LoadOptions,
    on_done: Callable[[RequestRecord], None] | None = None,
) -> LoadResult:
    """Send the plan and wait for every answer. Cancelling it closes every connection."""
    loop = asyncio.get_running_loop()
    bodies = [request_body(planned, options) for planned in plan]
    errors: dict[str, int] = {}
    lags: list[float] = []
    gaps = Gaps()
    records = [RequestRecord(0.0, planned.prompt_tokens) for planned in plan]
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=600.0)
    headers = {"content-type": "application/json", **options.headers}
    cpu_before = _cpu_s()
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=1 << 20
    ) as session:
        start = loop.time() + 0.01

        async def one(index: int) -> None:
            record = records[index]
            record.scheduled_s = plan[index].scheduled_s
            lags.append(loop.time() - start - record.scheduled_s)
            error = await _send(session, options, bodies[index], record, gaps, start)
            if error:
                errors[error] = errors.get(error, 0) + 1
            elif on_done is not None:
                on_done(record)

        async with asyncio.TaskGroup() as group:
            for index, planned in enumerate(plan):
                delay = start + planned.scheduled_s - loop.time()
                if delay > 0:
                    await asyncio.sleep(delay)
                group.create_task(one(index))
        elapsed = max(loop.time() - start, 1e-9)
    lags.sort()
    return LoadResult(records, gaps, errors, percentile(lags, 99), (_cpu_s() - cpu_before) / elapsed)


async def _send(
    session: aiohttp.ClientSession,
    options: LoadOptions,
    body: bytes,
    record: RequestRecord,
    gaps: Gaps,
    start: float,
) -> str:
    """One request; fills its record. Returns what went wrong, "" if nothing."""
    loop = asyncio.get_running_loop()
    try:
        async with session.post(f"{options.url}/v1/completions", data=body) as reply:
            record.instance = reply.headers.get("x-hetlb-instance", "")
            if reply.status != 200:
                await reply.read()
                return f"status {reply.status}"
            if options.stream:
                return await _read_stream(reply.content, record, gaps, start)
            answer = await reply.read()
            record.first_token_s = record.last_token_s = loop.time() - start
            usage = _decoder.decode(answer).usage
            if usage is None or usage.completion_tokens is None:
                return "no usage"
            record.output_tokens = usage.completion_tokens
            record.ok = True
            return ""
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        return type(error).__name__


async def _read_stream(content: aiohttp.StreamReader, record: RequestRecord, gaps: Gaps, start: float) -> str:
    loop = asyncio.get_running_loop()
    tail = b""
    done = False
    events = 0
    async for data in content.iter_any():
        now = loop.time() - start
        whole = tail + data if tail else data
        end = whole.rfind(b"\n\n") + 2
        if end < 2:
            tail = whole
            continue
        whole, tail = whole[:end], whole[end:]
        tokens = whole.count(b'"text":"') - whole.count(b'"text":""')
        if tokens:
            events += tokens
            if record.first_token_s is None:
                record.first_token_s = now
                tokens -= 1
            else:
                assert record.last_token_s is not None
                # An event that holds several tokens, or a read that holds several events, is one gap and
                # then gaps of zero: that is what the client saw.
                gaps.add(now - record.last_token_s)
                tokens -= 1
            if tokens:
                gaps.add(0.0, count=tokens)
            record.last_token_s = now
        if b'"choices":[],' in whole or b'"usage":{' in whole:
            for event in whole.split(b"\n\n"):
                if b'"usage":{' in event:
                    usage = _decoder.decode(event.removeprefix(b"data: ")).usage
                    if usage is not None and usage.completion_tokens is not None:
                        record.output_tokens = usage.completion_tokens
        done = done or b"data: [DONE]" in whole
    if not done:
        return "stream broke off"
    if record.first_token_s is None:
        return "no content"
    record.output_tokens = record.output_tokens or events
    record.ok = True
    return ""


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
