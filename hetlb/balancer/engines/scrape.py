"""Watch over the engines: health, models and load, for the scheduler and for the log.

Whatever an engine answers, the watch goes on. A refused connection is told apart from a slow answer, and
trouble of our own (no file descriptors, no ports) is no instance's failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp

from hetlb.addresses import confined_socket
from hetlb.balancer.clients.access import PLAIN_ACCESS, EngineAccess
from hetlb.balancer.config.fleet_tables import ScrapeTable
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import (
    AdminState,
    Capacity,
    CapacityLearned,
    EngineSample,
    Health,
    InstanceChange,
    ModelsLearned,
    Probed,
    ProbeResult,
)
from hetlb.balancer.engines.engine_metrics import EnginePage
from hetlb.balancer.engines.engine_pools import LOCAL_ERRNOS
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.inputs.urls import bracketed
from hetlb.logs import escape
from hetlb.served_models import longest_context, read_model_list, read_version
from hetlb.tasks import end, ended
from hetlb.turns import Share

if TYPE_CHECKING:
    from hetlb.balancer.config.profile_file import Profile

logger = logging.getLogger("hetlb.scrape")

#: Maximum bytes of a page of models: a list of a thousand has 100 KiB.
_MAX_PAGE_BYTES = 1 << 20
#: Maximum bytes of a page of metrics, read line by line: each of 32 data-parallel engines has some 60 KiB.
MAX_METRICS_BYTES = 64 << 20
#: Bytes of a page read at a time: between them others have their turn.
_PIECE_BYTES = 8 << 10
#: Seconds until an engine with a larger page is asked again.
_TOO_LARGE_PAUSE_S = 60.0
#: Rounds between reads of the model list, which is also read when an instance comes back.
_MODELS_EVERY_ROUNDS = 10


class _TooLargeError(Exception):
    """A page beyond its limit."""


class _LocalTroubleError(Exception):
    """We could not even try."""


class _Seen:
    """State of the watch over one engine, from round to round."""

    __slots__ = ("began", "metrics_after", "rounds_until_models", "told_missing")

    def __init__(self) -> None:
        self.rounds_until_models = 0
        #: Its metrics are read from this time on.
        self.metrics_after = 0.0
        #: Start of its process by its own clock, None while unknown.
        self.began: float | None = None
        self.told_missing = False


class EngineWatch:
    """One watching task per instance; the scheduler gets its findings."""

    def __init__(
        self, table: ScrapeTable, scheduling: SchedulerDriver, access: Mapping[str, EngineAccess]
    ) -> None:
        self._table = table
        self._scheduling = scheduling
        self._scheduler = scheduling.scheduler
        #: Keys and certificates of the engines, by instance. The owner of this mapping alone changes it.
        self._access = access
        #: Reasons logged for instances that are not let in: each is logged once.
        self._told: dict[str, str] = {}
        self._urls: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._first_rounds: dict[str, asyncio.Event] = {}
        self._session: aiohttp.ClientSession | None = None
        #: The same for engines with names that may not lead everywhere.
        self._confined: aiohttp.ClientSession | None = None
        #: The engines' own entries of `/v1/models`, by instance.
        self.models: dict[str, list[dict[str, Any]]] = {}
        #: The engines' `/version`, by instance.
        self.versions: dict[str, str] = {}
        #: Paths of their metrics where that is not `/metrics`.
        self._pages: dict[str, str] = {}
        self.invalid_samples: dict[str, int] = {}
        #: Called with the name of an instance if its metrics say that nothing runs or waits.
        self.on_idle: Callable[[str], None] = lambda name: None

    async def start(self, profiles: Mapping[str, Profile], most_s: float) -> None:
        """Begin to watch all instances; returns once every one was probed, after `most_s` at the latest."""
        self._session = self._make_session()
        self._confined = self._make_session(socket_factory=confined_socket)
        for instance in self._scheduler.instances:
            if instance.admin is not AdminState.MAINT:
                self.add(instance.name, instance.spec.url)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                for event in list(self._first_rounds.values()):
                    await event.wait()
        for instance in self._scheduler.instances:
            _log_absent(instance)
            name = instance.name
            if (profile := profiles.get(name)) is not None:
                for text in profile.differences(self.models.get(name, []), self.versions.get(name)):
                    tell(logger, Event.INSTANCE_PROFILE, "%s: %s", name, text, instance=name)

    @property
    def started(self) -> bool:
        return self._session is not None

    def add(self, name: str, url: str) -> None:
        self._urls[name] = url
        self._first_rounds[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._watch(name), name=f"watch {name}")

    def pause(self, name: str) -> None:
        """Stop watching a server for now; its state stays."""
        if task := self._tasks.pop(name, None):
            end(task)

    def watches(self, name: str) -> bool:
        return name in self._tasks

    def remove(self, name: str) -> None:
        self.pause(name)
        for known in (
            self.models, self.versions, self.invalid_samples, self._first_rounds, self._told, self._urls,
            self._pages,
        ):  # fmt: skip
            known.pop(name, None)

    async def close(self) -> None:
        await ended(*self._tasks.values())
        self._tasks.clear()
        for session in (self._session, self._confined):
            if session is not None:
                await session.close()

    def reconnected(self, name: str, body: bytes) -> None:
        """Note that an engine that closed connections was asked again: `body` is its `/v1/models`."""
        entries = read_model_list(body)
        listed = models_learned(name, entries)
        instance = self._scheduler.fleet.instances.get(name)
        if entries and instance is not None and instance.served != listed.models:
            self.models[name] = entries
            self._learned(listed)

    def model_list(self) -> list[dict[str, Any]]:
        union: dict[str, dict[str, Any]] = {}
        for instance in self._scheduler.instances:
            if instance.evidence.state is Health.EJECTED:
                continue
            entries = self.models.get(instance.name)
            if entries is None and instance.spec.model:
                entries = [{"id": instance.spec.model, "object": "model", "owned_by": "hetlb"}]
            for entry in entries or ():
                known = union.setdefault(entry["id"], entry)
                longest, mine = known.get("max_model_len"), entry.get("max_model_len")
                if isinstance(mine, int) and (not isinstance(longest, int) or mine > longest):
                    union[entry["id"]] = entry
        return list(union.values())

    def _learned(self, change: InstanceChange) -> None:
        if not isinstance(change, ModelsLearned):
            self._scheduling.change(change)
            return
        instance = self._scheduler.fleet.instances.get(change.name)
        before, model = (None, "") if instance is None else (instance.served, instance.spec.model)
        self._scheduling.change(change)
        if change.models != before:
            _log_models(change.name, model, before, change.models)

    async def _watch(self, name: str) -> None:
        loop, seen = asyncio.get_running_loop(), _Seen()
        while True:
            started = loop.time()
            await self._look(name, seen, started)
            self._first_rounds[name].set()
            await asyncio.sleep(max(0.05, started + self._table.interval_s - loop.time()))

    async def _look(self, name: str, seen: _Seen, now: float) -> None:
        """Probe an engine; where it is well, read its metrics, and its models once in a while."""
        result, detail = await self._probe(name)
        if result is ProbeResult.OK and seen.rounds_until_models <= 0:
            # Its models are read before it counts as up: another server may be at its address by now.
            seen.rounds_until_models = _MODELS_EVERY_ROUNDS if await self._read_models(name) else 0
        if result is not None:
            self._learned(Probed(name, result, detail))
        if result is not ProbeResult.OK:
            seen.rounds_until_models = 0  # a process that comes back may serve another model
            return
        seen.rounds_until_models -= 1
        if now < seen.metrics_after:
            return
        try:
            sample = await self.read_metrics(name)
        except _TooLargeError:
            seen.metrics_after = now + _TOO_LARGE_PAUSE_S
            self._tell_once(name, f"its /metrics has more than {MAX_METRICS_BYTES} bytes")
            return
        if sample is not None:
            await self._take(name, seen, sample)

    async def _take(self, name: str, seen: _Seen, sample: EngineSample) -> None:
        """Take in what an engine's metrics say."""
        if sample.began is None:
            seen.rounds_until_models = 0  # only its list shows whether it is the same process
        elif sample.began != seen.began:
            if seen.began is not None:
                await self._read_models(name)  # another process has its address
            seen.began = sample.began
        self._scheduling.sample(name, sample)
        if sample.running == 0 and not sample.waiting:
            self.on_idle(name)
        if sample.invalid:
            self.invalid_samples[name] = self.invalid_samples.get(name, 0) + 1
        if sample.missing and not seen.told_missing:
            seen.told_missing = True
            text, lacking = "%s does not report %s: hetlb uses its own bookings instead", sample.missing
            tell(logger, Event.INSTANCE_METRICS, text, name, ", ".join(lacking), instance=name)

    def _make_session(self, **options: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._table.timeout_s),
            # uvicorn closes idle connections after 5 s: ours are given up first.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0, **options),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _asked(
        self, name: str, method: str, path: str, **more: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return a request to an engine, with its key and certificates."""
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
        return session.request(
            method,
            url + path,
            headers=headers,
            allow_redirects=False,
            ssl=access.tls or True,
            server_hostname=hostname,
            **more,
        )

    def ask(
        self, name: str, path: str, body: Mapping[str, Any], most_s: float
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return a request of hetlb's own to an engine; its answer may take `most_s` seconds."""
        return self._asked(name, "POST", path, json=body, timeout=aiohttp.ClientTimeout(total=most_s))

    async def _get(self, name: str, path: str, metrics: EnginePage | None = None) -> tuple[int, bytes]:
        """Return status and body of a page; with `metrics`, which are fed it, its first byte alone."""
        try:
            async with self._asked(name, "GET", path) as reply:
                body, size, share = bytearray(), 0, Share()
                most = _MAX_PAGE_BYTES if metrics is None else MAX_METRICS_BYTES
                async for piece in reply.content.iter_any():
                    size += len(piece)
                    if size > most:
                        raise _TooLargeError
                    if metrics is None:
                        body += piece
                        continue
                    body += piece[:1] if not body else b""
                    for at in range(0, len(piece), _PIECE_BYTES):
                        metrics.feed(piece[at : at + _PIECE_BYTES])
                        await share.spent()
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
            host, why = urlsplit(self._urls[name]).hostname, error.os_error.strerror or error.os_error
            return ProbeResult.REFUSED, f"the name has no address: {host}: {why}"
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                return ProbeResult.REFUSED, "connection refused"
            return ProbeResult.FAILED, f"no connection: {error.os_error.strerror or error.os_error}"
        except TimeoutError:
            return ProbeResult.FAILED, f"no answer to /health within {self._table.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            text = (str(error) or type(error).__name__)[:200]
            shown = "".join(each if each.isprintable() else "?" for each in text)
            return ProbeResult.FAILED, f"/health: {shown}"
        except _TooLargeError:
            status = 200
        if status == 200:
            return ProbeResult.OK, ""
        return ProbeResult.FAILED, f"/health answers {status}"

    async def read_metrics(self, name: str) -> EngineSample | None:
        page = EnginePage()
        paths = page.paths
        try:
            path = self._pages.get(name, paths[0])
            status, body = await self._get(name, path, page)
        except (_LocalTroubleError, aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
        if body[:1] == b"[" or status == 404:
            self._pages[name] = paths[(paths.index(path) + 1) % len(paths)]
            return None
        return page.sample() if status == 200 else None

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
        self._learned(models_learned(name, entries))
        if (longest := longest_context(entries)) is not None:
            self._learned(CapacityLearned(name, Capacity(max_model_len=longest)))
        return True

    def _tell_once(self, name: str, text: str) -> None:
        if self._told.get(name) != text:
            self._told[name] = text
            event = Event.INSTANCE_METRICS if "/metrics" in text else Event.INSTANCE_ACCESS
            tell(logger, event, "%s: %s", name, text, instance=name)


def _tls_reason(error: aiohttp.ClientSSLError) -> str:
    """OpenSSL's own words: `certificate verify failed: Hostname mismatch, …`."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause: BaseException = error.certificate_error
    else:
        cause = error.os_error
    return getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or type(cause).__name__


def models_learned(name: str, entries: list[dict[str, Any]]) -> ModelsLearned:
    """Return the fact that an engine lists these; an adapter has a `parent`."""
    names = tuple(dict.fromkeys(entry["id"] for entry in entries))
    return ModelsLearned(name, names, tuple({entry["id"]: None for entry in entries if entry.get("parent")}))


def _log_absent(instance: Instance) -> None:
    """Log that an engine did not answer the first round of probes, if so."""
    if instance.evidence.state is Health.UP:
        return
    url, reason = instance.spec.url, instance.evidence.reason
    tell(
        logger, Event.INSTANCE_ABSENT, "%s (%s) is not answering: %s; the others are served",
        instance.name, url, reason, instance=instance.name, url=url, reason=reason,
    )  # fmt: skip


def _log_models(name: str, model: str, before: tuple[str, ...] | None, now: tuple[str, ...]) -> None:
    """Log that an engine serves other models than `before`, or than the file's `model` ("": none)."""
    shown = ", ".join(map(escape, now))
    if model and model not in now:
        text = "%s serves %s, not %s: it gets requests for what it serves"
        tell(logger, Event.INSTANCE_OTHER_MODEL, text, name, shown, model, instance=name)
    elif before is not None:
        text, old = "%s now serves %s (before: %s)", ", ".join(map(escape, before))
        tell(logger, Event.INSTANCE_MODELS, text, name, shown, old, instance=name)
