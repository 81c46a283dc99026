"""Watching the engines: health, what they serve, how full they are. The only user of aiohttp's client.

One request at a time per instance, each with its own deadline; whatever an engine answers, the
watcher goes on. A refused connection is told apart from a slow answer, and trouble of our own (no file
descriptors, no ports) is no instance's failure. A certificate or a key that is not accepted is said once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from hetlb.addresses import confined_socket
from hetlb.config.fleet_tables import ScrapeTable
from hetlb.config.urls import bracketed
from hetlb.core.engine_metrics import parse
from hetlb.core.engine_tables import OTHER_PAGE
from hetlb.core.types import (
    Capacity,
    CapacityLearned,
    EngineSample,
    InstanceChange,
    ModelsLearned,
    Probed,
    ProbeResult,
)
from hetlb.proxy.access import PLAIN_ACCESS, EngineAccess
from hetlb.proxy.engine_pools import LOCAL_ERRNOS
from hetlb.proxy.telemetry.events import Event, tell
from hetlb.served_models import longest_context, read_model_list, read_version

logger = logging.getLogger("hetlb.scrape")

#: A page beyond this is none: vLLM's metrics have some 100 KiB, a list of a thousand models as much.
_MAX_PAGE_BYTES = 1 << 20
#: An engine with such a page is asked for its metrics this seldom.
_TOO_LARGE_PAUSE_S = 60.0
#: The model list is read again after this many rounds, and whenever an instance comes back.
_MODELS_EVERY = 10


class _TooLargeError(Exception):
    """A page beyond `_MAX_PAGE_BYTES`."""


class _LocalTroubleError(Exception):
    """We could not even try."""


class Scraper:
    """One watching task per instance; facts go to the two callbacks, on the event loop."""

    def __init__(
        self,
        table: ScrapeTable,
        *,
        on_change: Callable[[InstanceChange], None],
        on_sample: Callable[[str, EngineSample], None],
        access: Mapping[str, EngineAccess] | None = None,
    ) -> None:
        self._table = table
        #: Keys and certificates of the engines, by instance. The owner of this mapping alone changes it.
        self._access = {} if access is None else access
        #: Reasons logged for instances that are not let in: each is logged once.
        self._told: dict[str, str] = {}
        self._on_change = on_change
        self._on_sample = on_sample
        self._urls: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._first_rounds: dict[str, asyncio.Event] = {}
        self._session: aiohttp.ClientSession | None = None
        #: The same for engines whose names may not lead everywhere.
        self._confined: aiohttp.ClientSession | None = None
        #: The engines' own entries of `/v1/models`, by instance.
        self.models: dict[str, list[dict[str, Any]]] = {}
        #: The engines' `/version`, by instance.
        self.versions: dict[str, str] = {}
        #: Paths of their metrics where that is not `/metrics`.
        self._pages: dict[str, str] = {}
        self.invalid_samples: dict[str, int] = {}

    async def start(self, urls: Mapping[str, str], first_round_s: float = 1.0) -> None:
        """Watch servers, by name; returns after every one has answered once, or after `first_round_s`."""
        self._session = self._make_session()
        self._confined = self._make_session(socket_factory=confined_socket)
        for name, url in urls.items():
            self.add(name, url)
        rounds = [asyncio.create_task(event.wait()) for event in self._first_rounds.values()]
        if rounds:
            _, pending = await asyncio.wait(rounds, timeout=first_round_s)
            for task in pending:
                task.cancel()

    @property
    def started(self) -> bool:
        """True if `start` was called."""
        return self._session is not None

    def add(self, name: str, url: str) -> None:
        """Begin to watch one more server."""
        self._urls[name] = url
        self._first_rounds[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._watch(name), name=f"watch {name}")

    def pause(self, name: str) -> None:
        """Stop watching a server for now; what is known of it stays."""
        if task := self._tasks.pop(name, None):
            task.cancel()

    def watches(self, name: str) -> bool:
        """True if a server is being watched."""
        return name in self._tasks

    def remove(self, name: str) -> None:
        """Stop watching a server for good."""
        self.pause(name)
        for known in (
            self.models, self.versions, self.invalid_samples, self._first_rounds, self._told, self._urls,
            self._pages,
        ):  # fmt: skip
            known.pop(name, None)

    async def close(self) -> None:
        """Stop watching everything."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        for session in (self._session, self._confined):
            if session is not None:
                await session.close()

    async def _watch(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        rounds_until_models = 0
        metrics_after = 0.0
        began: float | None = None
        told_missing = False
        while True:
            started = loop.time()
            result, detail = await self._probe(name)
            if result is ProbeResult.OK and rounds_until_models <= 0:
                # What it serves is known before it is said to be up: another may be at its address by now.
                rounds_until_models = _MODELS_EVERY if await self._read_models(name) else 0
            if result is not None:
                self._on_change(Probed(name, result, detail))
            if result is ProbeResult.OK:
                rounds_until_models -= 1
                sample = None
                if started >= metrics_after:
                    try:
                        sample = await self._read_metrics(name)
                    except _TooLargeError:
                        metrics_after = started + _TOO_LARGE_PAUSE_S
                        self._tell_once(name, f"its /metrics has more than {_MAX_PAGE_BYTES} bytes")
                if sample is not None:
                    if sample.began is None:
                        rounds_until_models = 0  # only its list tells whether it is the process it was
                    elif sample.began != began:
                        if began is not None:
                            await self._read_models(name)  # another process has its address
                        began = sample.began
                    self._on_sample(name, sample)
                    if sample.invalid:
                        self.invalid_samples[name] = self.invalid_samples.get(name, 0) + 1
                    if sample.missing and not told_missing:
                        text, lacking = (
                            "%s does not report %s; its own ledger is used instead",
                            sample.missing,
                        )
                        tell(logger, Event.INSTANCE_METRICS, text, name, ", ".join(lacking), instance=name)
                        told_missing = True
            else:
                # A process that comes back may serve another model.
                rounds_until_models = 0
            self._first_rounds[name].set()
            await asyncio.sleep(max(0.05, started + self._table.interval_s - loop.time()))

    def _make_session(self, **options: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._table.timeout_s),
            # uvicorn closes idle connections after 5 s: ours are given up first.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0, **options),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def _get(self, name: str, path: str) -> tuple[int, bytes]:
        access = self._access.get(name, PLAIN_ACCESS)
        session = self._confined if access.confined else self._session
        assert session is not None, "start() comes first"
        url, headers, hostname = self._urls[name], {}, None
        if access.authorization is not None:
            headers["authorization"] = access.authorization.decode("ascii")
        if access.address is not None:
            parts = urlsplit(url)
            url = f"{parts.scheme}://{bracketed(access.address)}" + (f":{parts.port}" if parts.port else "")
            headers["host"] = parts.netloc
            hostname = parts.hostname if access.tls is not None else None
        try:
            async with session.get(
                url + path,
                headers=headers,
                allow_redirects=False,
                ssl=access.tls or True,
                server_hostname=hostname,
            ) as reply:
                body = bytearray()
                async for piece in reply.content.iter_any():
                    body += piece
                    if len(body) > _MAX_PAGE_BYTES:
                        raise _TooLargeError
                return reply.status, bytes(body)
        except OSError as error:
            if error.errno in LOCAL_ERRNOS:
                raise _LocalTroubleError from error
            raise

    async def _probe(self, name: str) -> tuple[ProbeResult | None, str]:
        """Probe an engine: the result, None where this machine could not try; and how it failed."""
        try:
            status, _ = await self._get(name, "/health")
        except _LocalTroubleError:
            return None, ""
        except aiohttp.ClientSSLError as error:
            detail = f"no TLS connection: {_tls_reason(error)}"
            self._tell_once(name, detail)
            return ProbeResult.FAILED, detail
        except aiohttp.ClientConnectorDNSError as error:
            return ProbeResult.REFUSED, _no_address(self._urls[name], error.os_error)
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                return ProbeResult.REFUSED, "connection refused"
            return ProbeResult.FAILED, f"no connection: {error.os_error.strerror or error.os_error}"
        except TimeoutError:
            return ProbeResult.FAILED, f"no answer to /health within {self._table.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return ProbeResult.FAILED, f"/health: {_one_line(str(error) or type(error).__name__)}"
        except _TooLargeError:
            status = 200
        if status == 200:
            return ProbeResult.OK, ""
        return ProbeResult.FAILED, f"/health answers {status}"

    async def _read_metrics(self, name: str) -> EngineSample | None:
        """Samples of the engine's metrics page. Raises `_TooLargeError`."""
        try:
            status, body = await self._get(name, self._pages.get(name, "/metrics"))
        except (_LocalTroubleError, aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
        if body[:1] == b"[":
            self._pages[name] = OTHER_PAGE
            return None
        return parse(body.decode("utf-8", "replace")) if status == 200 else None

    async def _read_models(self, name: str) -> bool:
        try:
            status, body = await self._get(name, "/v1/models")
            _, version = await self._get(name, "/version")
        except (_LocalTroubleError, _TooLargeError, aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return False
        if status in (401, 403):
            has_key = self._access.get(name, PLAIN_ACCESS).authorization is not None
            told = "refuses the API key" if has_key else "wants an API key"
            self._tell_once(name, f"{told} ({status} at /v1/models)")
        entries = read_model_list(body) if status == 200 else []
        if not entries:
            return False
        self._told.pop(name, None)
        self.models[name] = entries
        if text := read_version(version):
            self.versions[name] = text
        self._on_change(models_learned(name, entries))
        if (longest := longest_context(entries)) is not None:
            self._on_change(CapacityLearned(name, Capacity(max_model_len=longest)))
        return True

    def _tell_once(self, name: str, text: str) -> None:
        if self._told.get(name) != text:
            self._told[name] = text
            event = Event.INSTANCE_METRICS if "/metrics" in text else Event.INSTANCE_ACCESS
            tell(logger, event, "%s: %s", name, text, instance=name)


def _one_line(text: str) -> str:
    """Text of an engine as one line, shortened."""
    return "".join(each if each.isprintable() else "?" for each in text[:200])


def _no_address(url: str, error: OSError) -> str:
    """`the name has no address: engine.example: Name or service not known`."""
    return f"the name has no address: {urlsplit(url).hostname}: {error.strerror or error}"


def _tls_reason(error: aiohttp.ClientSSLError) -> str:
    """OpenSSL's own words: `certificate verify failed: Hostname mismatch, …`."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause: BaseException = error.certificate_error
    else:
        cause = error.os_error
    return getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or type(cause).__name__


def models_learned(name: str, entries: list[dict[str, Any]]) -> ModelsLearned:
    """The fact that an engine lists these; an adapter has a `parent`."""
    names = tuple(dict.fromkeys(entry["id"] for entry in entries))
    return ModelsLearned(name, names, tuple({entry["id"]: None for entry in entries if entry.get("parent")}))
