"""Facts read from an engine over HTTP, for `hetlb init` and `hetlb doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from hetlb.balancer.config.fleet_tables import ScrapeTable
from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.engines.engine_metrics import page_of
from hetlb.balancer.engines.engine_mistakes import CLOSED, connect_failure, is_hetlb, old_version
from hetlb.balancer.engines.engine_tables import PAGES, VLLM, EngineTable
from hetlb.served_models import longest_context, read_model_list, read_version

#: Workers of a coordinator on its page of metrics.
_STAGES = re.compile(r'^hetlb_stage_up\{stage="([^"\n]*)"\} ([01](?:\.0)?)$', re.MULTILINE)
#: Seconds between the tokens of answers, summed, and their number: of vLLM (old and new), SGLang.
_TOKEN_TIMES = re.compile(
    r"^(?:\w+:)?(?:inter_token_latency|time_per_output_token)_seconds_(sum|count)"
    r"(?:\{[^\n]*\})? ([\d.eE+-]+)$",
    re.MULTILINE,
)
_CPU = re.compile(
    r"^process_cpu_seconds_total ([0-9]{1,18}(?:\.[0-9]{0,18})?(?:e[+-]?[0-9]{1,3})?)$", re.MULTILINE
)
#: Least number of tokens in a mean.
_LEAST_TOKENS = 100
#: Maximum bytes of a page of metrics: 32 data-parallel engines have some 2 MiB.
_MAX_METRICS_BYTES = 64 << 20


@dataclass(slots=True)
class EngineFacts:
    """Facts of one server. A status is 0 without a response; `trouble` says why.

    `entries` come from `/v1/models`; `stages` says which workers of a coordinator (`hetlb stage`) are up;
    `began` holds the process start times seen in two scrapes of its
    metrics; `skew_s` is how far its clock is ahead, in seconds.
    """

    url: str
    trouble: str = ""
    health: int = 0
    models_status: int = 0
    metrics_status: int = 0
    entries: list[dict[str, Any]] = field(default_factory=list)
    version: str | None = None
    sample: EngineSample | None = None
    table: EngineTable | None = None
    #: Mistake in its version, with the next step.
    old: tuple[str, str] | None = None
    #: URL of another server that is the same process, "" for none.
    same_as: str = ""
    #: Reader of its pages.
    page: Callable[[str], Awaitable[_Page]] | None = None
    began: set[float] = field(default_factory=set)
    skew_s: float = 0.0
    proxy: str = ""
    stages: dict[str, bool] = field(default_factory=dict)
    is_ollama: bool = False
    #: Mean seconds between two tokens of an answer, by its own count since it started.
    token_s: float | None = None
    #: Its address with the other scheme (http, https), "" if it does not answer there.
    other_url: str = ""
    #: Target of its redirect.
    moved: str = ""
    #: Name of another program that answers there.
    foreign: str = ""

    @property
    def title(self) -> str:
        """Return its name, with its version if known."""
        if self.coordinates:
            return f"coordinator of stages, {self.version}"
        if self.table is None and (self.is_ollama or self.version is None):
            return f"Ollama {self.version}" if self.is_ollama else "an engine that is not known"
        return f"{(self.table or VLLM).title} {self.version or 'of unknown version'}"

    @property
    def is_no_engine(self) -> bool:
        """Return True if it answers unlike any engine: no figures, no models, no version."""
        asks = self.models_status in (401, 403) or self.models_status >= 500
        return not (self.trouble or asks or self.entries or self.table or self.version or not self.health)

    @property
    def coordinates(self) -> bool:
        """Return True for the coordinator of stages."""
        return (self.version or "").startswith("hetlb-") and bool(self.stages)

    @property
    def names(self) -> list[str]:
        """Return the names of its models."""
        return [entry["id"] for entry in self.entries]

    @property
    def max_model_len(self) -> int | None:
        """Longest context of its models in tokens."""
        return longest_context(self.entries)


class _Page(NamedTuple):
    """Answer of a server; without one the status is 0 and `trouble` says why."""

    status: int = 0
    body: bytes = b""
    headers: Mapping[str, str] = {}
    trouble: str = ""


async def ask_engines(
    urls: Mapping[str, Mapping[str, str]],
    tls: Mapping[str, ssl.SSLContext | None] = {},
    timeout_s: float = ScrapeTable().timeout_s,
) -> dict[str, EngineFacts]:
    """Read the facts of the servers at these URLs, each with its own request headers and TLS context.

    A page must come within `timeout_s`, as it must for `hetlb serve`.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
        asked = (_ask(session, url, headers, tls.get(url)) for url, headers in urls.items())
        found = await asyncio.gather(*asked)
        for one, other in combinations(found, 2):
            if not other.same_as and _alike(one, other) and await _one_process(one, other):
                other.same_as = one.same_as or one.url
    return {facts.url: facts for facts in found}


async def _ask(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None
) -> EngineFacts:
    facts = EngineFacts(url)

    async def page(path: str) -> _Page:
        trust = True if tls is None else tls
        try:
            async with session.get(
                url + path, headers=dict(headers), allow_redirects=False, ssl=trust
            ) as reply:
                body = bytearray()
                async for piece in reply.content.iter_any():
                    body += piece
                    if len(body) > _MAX_METRICS_BYTES:
                        break
                return _Page(reply.status, bytes(body), reply.headers)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            host = urlsplit(url).hostname or ""
            return _Page(trouble=_trouble(error, host, path, session.timeout.total or 0.0))

    facts.page = page
    health = await page("/health")
    facts.health, facts.trouble = health.status, health.trouble
    if facts.trouble or (health.status == 400 and b"HTTPS" in health.body):
        facts.trouble = facts.trouble or "it speaks TLS"
        facts.other_url = await _other_url(session, url)
        return facts
    _read_head(facts, health.headers)
    if 300 <= health.status < 400:
        facts.moved = health.headers.get("Location", "")
        return facts
    metrics, text = await _read_metrics(page, facts)
    models = await page("/v1/models")
    facts.models_status = models.status
    facts.entries = read_model_list(models.body) if models.status == 200 else []
    facts.version = read_version((await page("/version")).body)
    if facts.table is None or facts.table is VLLM:
        facts.old = old_version(facts.version, text)
    if facts.version is None and facts.table is None:
        facts.version = read_version((await page("/api/version")).body)
        facts.is_ollama = facts.version is not None
    if is_hetlb(metrics.headers):
        facts.foreign = "another hetlb"
    elif facts.table is None:
        facts.foreign = await _foreign(page, facts)
    return facts


async def _read_metrics(page: Callable[[str], Awaitable[_Page]], facts: EngineFacts) -> tuple[_Page, str]:
    """Read the metrics of a server twice. Two starts of a process show that two processes answer."""
    text = ""
    for _ in range(2):
        for path in PAGES:
            metrics = await page(path)
            facts.metrics_status = facts.metrics_status or metrics.status
            if metrics.status == 200 and metrics.body[:1] != b"[":
                facts.metrics_status = 200
                break
        if metrics.status == 200:
            text = metrics.body.decode("utf-8", "replace")
            read = page_of(text)
            facts.table, facts.sample = read.table, read.sample()
            facts.token_s = _mean_token_s(text)
            facts.stages = {name: float(up) > 0 for name, up in _STAGES.findall(text)}
            if facts.sample.began is not None:
                facts.began.add(facts.sample.began)
    return metrics, text


async def _cpu_s(facts: EngineFacts) -> float | None:
    """Return the CPU seconds of a server's process by its metrics, None without them."""
    if facts.page is None:
        return None
    found = _CPU.search((await facts.page(PAGES[0])).body.decode("utf-8", "replace"))
    return None if found is None else float(found[1])


def _alike(one: EngineFacts, other: EngineFacts) -> bool:
    """Return True if two servers began at once and describe themselves alike."""
    if not one.began or one.began != other.began or one.sample is None or other.sample is None:
        return False
    roots = [[entry.get("root") for entry in each.entries] for each in (one, other)]
    of_one = (one.version, one.names, roots[0], one.sample.capacity)
    return of_one == (other.version, other.names, roots[1], other.sample.capacity)


async def _one_process(one: EngineFacts, other: EngineFacts) -> bool:
    """Return True if the CPU seconds of two servers, read in turns, fit one process.

    Two servers of one script may have begun within one tick of the clock.
    """
    seconds = [await _cpu_s(each) for each in (one, other, one, other)]
    known = [each for each in seconds if each is not None]
    return len(known) < len(seconds) or known == sorted(known)


async def _other_url(session: aiohttp.ClientSession, url: str) -> str:
    """Return the URL of the other scheme if a server answers there, else ""; asked without a key."""
    scheme, _, rest = url.partition(":")
    other = f"{'https' if scheme == 'http' else 'http'}:{rest}"
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ValueError):
        async with session.get(f"{other}/health", allow_redirects=False, ssl=False) as reply:
            return "" if reply.status == 400 else other
    return ""


def _mean_token_s(page: str) -> float | None:
    """Return the mean seconds between two tokens by a page of metrics, None if too few were counted."""
    sums = {"sum": 0.0, "count": 0.0}
    for kind, value in _TOKEN_TIMES.findall(page):
        with contextlib.suppress(ValueError):
            sums[kind] += float(value)
    return sums["sum"] / sums["count"] if sums["count"] >= _LEAST_TOKENS and sums["sum"] > 0.0 else None


#: Begins of the `Server` header of engines.
_ENGINES = ("uvicorn", "hetlb", "python", "llama.cpp")
#: Programs that answer as an engine does, and others, by a page of their own: its path, and what it holds.
_GATEWAYS = (("LiteLLM", "/health/liveliness", "alive"),)
_PROGRAMS = (
    *_GATEWAYS,
    ("hetlb's admin listener", "/v1/fleet", '"policy"'),
    ("Ollama", "/", "Ollama is running"),
    ("Ollama", "/api/version", '"version"'),
    ("Triton", "/v2", '"name":"triton'),
    ("Prometheus", "/-/healthy", "Prometheus"),
    ("Grafana", "/api/health", '"database"'),
)


async def _foreign(page: Callable[[str], Awaitable[_Page]], facts: EngineFacts) -> str:
    """Return the name of a foreign program, by its pages or its `Server` header; "" if unknown."""
    answers = bool(facts.entries) or facts.models_status in (401, 403)
    for name, path, mark in _GATEWAYS if answers else _PROGRAMS:
        found = await page(path)
        if found.status == 200 and mark in re.sub(r"(?<=[:,{])\s", "", found.body.decode("utf-8", "replace")):
            return name
    server = "" if answers else (await page("/")).headers.get("Server", "")
    return "" if server.lower().startswith(_ENGINES) else server


def _trouble(error: BaseException, host: str, path: str, timeout_s: float) -> str:
    """Return the reason why a page did not come, in the words of `hetlb status`."""
    if isinstance(error, TimeoutError):
        return f"no answer to {path} within {timeout_s:g} s"
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
    if isinstance(cause, OSError):
        return connect_failure(cause, host)
    if isinstance(error, aiohttp.ServerDisconnectedError | OSError):
        return CLOSED
    return "what answers there is not HTTP"


def _read_head(facts: EngineFacts, headers: Mapping[str, str]) -> None:
    """Read clock skew and signs of a proxy from response headers."""
    server = headers.get("Server", "")
    if "Via" in headers or "x-hetlb-instance" in headers:
        facts.proxy = headers.get("Via", "another hetlb")
    elif server and not server.lower().startswith(_ENGINES):
        facts.proxy = server
    told = email.utils.parsedate_tz(headers.get("Date", ""))
    if told is not None:
        # Date has whole seconds: add the mean of what is cut off.
        facts.skew_s = email.utils.mktime_tz(told) + 0.5 - time.time()
