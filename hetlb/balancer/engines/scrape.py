"""Watch over the engines: health, models and load, for the scheduler and for the log.

Whatever an engine answers, the watch goes on. A refused connection is told apart from a slow answer, and
trouble of our own (no file descriptors, no ports) is no instance's failure. An engine that answers clients is
up; it is probed at each third look, so that a failing `/health` is noticed. One that is idle and well is
looked at more and more rarely (`rounds.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from hetlb.balancer.clients.access import PLAIN_ACCESS, EngineAccess
from hetlb.balancer.config.fleet_tables import ProxyTable, ScrapeTable
from hetlb.balancer.core.evidence.table import KEY_REFUSED, KEY_STATUSES
from hetlb.balancer.core.facts import (
    CapacityLearned,
    EngineSample,
    InstanceChange,
    ModelsLearned,
    Probed,
    ProbeResult,
)
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.types import AdminState, Capacity, Health
from hetlb.balancer.engines.engine_pools import EnginePool
from hetlb.balancer.engines.engine_tables import PAGES
from hetlb.balancer.engines.last_page import MAX_HELD_BYTES, LastPage, NextPage
from hetlb.balancer.engines.rounds import MOST_LOOKS, Looked, Rounds
from hetlb.balancer.engines.upstream import MAX_PAGE_BYTES, TOO_LONG, UnansweredError, answer_of
from hetlb.balancer.exchange import ends
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.errors import visible
from hetlb.logs import escape
from hetlb.served_models import lists_nothing, longest_context, read_model_list, read_version, version_numbers
from hetlb.tasks import end, ended

if TYPE_CHECKING:
    from hetlb.balancer.config.profile_file import Profile
    from hetlb.balancer.engines.engine_history import HistoryPage
    from hetlb.balancer.engines.look_ups import LookUps

logger = logging.getLogger("hetlb.scrape")

#: Maximum bytes of a page of metrics, read line by line: each of 32 data-parallel engines has some 60 KiB.
MAX_METRICS_BYTES = 64 << 20
#: Seconds until an engine is asked again whose page is too large, or that has none.
_NO_PAGE_PAUSE_S: Final = 60.0
#: Statuses of an engine that does not know a path.
UNKNOWN_PATH: Final = frozenset({404, 405, 501})
#: Seconds for which an idle connection is kept: uvicorn closes it after 5 s.
_IDLE_S: Final = 3.0


_HEALTH: Final = "/health"
_MODELS: Final = "/v1/models"
#: Least round trip of a packet over a slow network, in seconds, and times the shortest one.
_FAR_S: Final = 0.02
_FARTHER: Final = 8.0
_EMPTY_CHAT: Final = b"POST /v1/chat/completions"
#: Begin of the detail of a probe without an answer in time.
_LATE: Final = "no answer to"
#: Detail of a probe that finds an empty list of models.
_NO_MODEL: Final = "loading: it lists no model"
#: Detail of a look that finds another page there: no OpenAI server answers.
_NO_LIST: Final = "its /v1/models is no list of models"

#: Version of vLLM from which a request may choose an engine of its server.
_RANK_VERSION: Final = (0, 12)


class _TooLargeError(Exception):
    """A page beyond its limit."""


class EngineWatch:
    """Looks at the engines in rounds; the scheduler gets its findings."""

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
        self._seen: dict[str, Looked] = {}
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._first_looks: dict[str, asyncio.Event] = {}
        #: Connections of the watch by instance, and the access that they were made with.
        self._pools: dict[str, tuple[EnginePool, EngineAccess]] = {}
        self._rounds = Rounds(table.interval_s, self._scheduler)
        self._now = asyncio.get_running_loop().time
        self._proxy = ProxyTable(connect_timeout_s=2.0 * table.timeout_s, upstream_idle_s=_IDLE_S)
        self._running: asyncio.Task[None] | None = None
        #: Looks at all lists of models at once, None before the first.
        self._look_ups: LookUps | None = None
        #: The engines' own entries of `/v1/models`, by instance.
        self.models: dict[str, list[dict[str, Any]]] = {}
        #: The engines' `/version`, by instance.
        self.versions: dict[str, str] = {}
        #: Paths of their metrics, "" for none.
        self._pages: dict[str, str] = {}
        self.invalid_samples: dict[str, int] = {}
        #: Called with an instance that is up if nothing runs or waits there, as far as is known.
        self.on_idle: Callable[[Instance], None] = lambda instance: None

    async def start(self, profiles: Mapping[str, Profile], most_s: float) -> None:
        """Begin to watch all instances; returns once every one was probed, after `most_s` at the latest."""
        self._running = asyncio.create_task(self._run(), name="watch")
        for instance in self._scheduler.instances:
            if instance.admin is not AdminState.MAINT:
                self.add(instance.name, instance.spec.url)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                for event in list(self._first_looks.values()):
                    await event.wait()
        for instance in self._scheduler.instances:
            _log_absent(instance)
            name = instance.name
            if (profile := profiles.get(name)) is not None:
                for text in profile.differences(self.models.get(name, []), self.versions.get(name)):
                    tell(logger, Event.INSTANCE_PROFILE, "%s: %s", name, text, instance=name)

    @property
    def started(self) -> bool:
        return self._running is not None

    def add(self, name: str, url: str) -> None:
        self._urls[name] = url
        self._first_looks[name] = asyncio.Event()
        self._seen[name] = Looked()
        self._begin(name)

    def pause(self, name: str) -> None:
        """Stop watching a server for now; its state stays."""
        self._seen.pop(name, None)
        if task := self._looks.pop(name, None):
            end(task)
        if name in self._pools:
            self._pools.pop(name)[0].close()

    def watches(self, name: str) -> bool:
        return name in self._seen

    def remove(self, name: str) -> None:
        self.pause(name)
        for known in (
            self.models, self.versions, self.invalid_samples, self._first_looks, self._told, self._urls,
            self._pages,
        ):  # fmt: skip
            known.pop(name, None)

    async def close(self) -> None:
        running = () if self._running is None else (self._running,)
        await ended(*running, *self._looks.values())
        if self._look_ups is not None:
            await self._look_ups.close()
        for name in list(self._seen):
            self.pause(name)

    def reconnected(self, name: str, body: bytes) -> None:
        """Note that an engine that closed connections was asked again: `body` is its `/v1/models`."""
        if lists_nothing(body):
            self.learned(Probed(name, ProbeResult.LOADING, _NO_MODEL))
            return
        entries = read_model_list(body)
        listed = models_learned(name, entries)
        instance = self._scheduler.fleet.instances.get(name)
        if entries and instance is not None and instance.served != listed.models:
            self.models[name] = entries
            self.learned(listed)

    def look_up_models(self, done: Callable[[], None]) -> bool:
        """Read the lists of all engines that are up, then call `done`. False: they were read just now."""
        if self._look_ups is None:
            from hetlb.balancer.engines.look_ups import LookUps

            self._look_ups = LookUps(self._scheduler, self._seen, self._read_models, self._rounds)
        return self._look_ups.look(done)

    def learned(self, change: InstanceChange) -> None:
        """Pass a finding on to the scheduler."""
        if not isinstance(change, ModelsLearned):
            self._scheduling.change(change)
            return
        instance = self._scheduler.fleet.instances.get(change.name)
        before, model = (None, "") if instance is None else (instance.served, instance.spec.model)
        self._scheduling.change(change)
        if change.models != before:
            _log_models(change.name, model, before, change.models)

    # --- one look ---

    async def _run(self) -> None:
        """Begin looks as they come due, one after the other, within a share of the time of the event loop."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._rounds.scan_s)
            for name in self._rounds.due(self._seen, self._looks, clock()):
                if name in self._seen and len(self._looks) < MOST_LOOKS:
                    self._begin(name)
                    await asyncio.sleep(self._rounds.pause_s)

    def _begin(self, name: str) -> None:
        """Begin a look at an engine."""

        def over(done: asyncio.Task[None]) -> None:
            if self._looks.get(name) is done:
                del self._looks[name]

        task = asyncio.create_task(self._look(name, self._seen[name]), name=f"watch {name}")
        self._looks[name] = task
        task.add_done_callback(over)

    async def _look(self, name: str, seen: Looked) -> None:
        """Look at an engine, and set the time of the next look."""
        now, since = self._now(), seen.looked_at
        seen.looked_at = now
        instance = self._scheduler.fleet.instances.get(name)
        evidence = None if instance is None else instance.evidence
        answers = (
            evidence is not None and evidence.health.state is Health.UP and evidence.silence.token_at > since
        )
        result: ProbeResult | None = ProbeResult.OK
        detail = ""
        # The answers of one that answers are the better probe; of an idle one its page is one now and then.
        light = not answers and self._rounds.light(seen, instance, now)
        read = light and await self._measure(name, seen, now)
        if not answers and not read:
            result, detail = await self._probe(name, seen, instance)
            self._note_health(seen, instance, result, detail, now)
        elif answers and self._rounds.probe_due(seen, now):
            self._note_health(seen, instance, *await self._probe(name, seen, instance), now)
        if result is ProbeResult.OK and self._rounds.models_due(seen, instance, now):
            # Its models are read before it counts as up: another server may be at its address by now.
            listed, why = await self._read_models(name, seen, instance)
            if listed is ProbeResult.LOADING:
                result, detail = listed, why
            elif instance is not None and why == _NO_LIST:
                instance.unhealthy, seen.models_at = why, -math.inf
        if result is not None and not ((answers or read) and result is ProbeResult.OK):
            self.learned(Probed(name, result, detail))
        if result is not ProbeResult.OK:
            seen.models_at = seen.metrics_after = -math.inf  # another process may come back
        elif not read:
            await self._measure(name, seen, now)
        self._note_network(name, seen, instance)
        if result is ProbeResult.OK and instance is not None and not instance.in_flight:
            sample = instance.sample
            if sample is None or not (sample.running or sample.waiting):
                self.on_idle(instance)
        self._first_looks[name].set()
        if not self._rounds.looked(seen, instance, now) and name in self._pools:
            self._pools[name][0].sweep(math.inf)  # the engine would close them before the next look

    def _note_health(
        self, seen: Looked, instance: Instance | None, result: ProbeResult | None, detail: str, now: float
    ) -> None:
        """Note on an instance why probes fail; a page that is late only if it is so twice in a row."""
        late, seen.late = seen.late, result is ProbeResult.FAILED and detail.startswith(_LATE)
        seen.probed_at = now
        if instance is not None and result is not None and (late or not seen.late):
            no_list = instance.unhealthy == _NO_LIST and seen.models_at == -math.inf
            if result is ProbeResult.FAILED or not no_list:
                instance.unhealthy = detail if result is ProbeResult.FAILED else ""

    def _note_network(self, name: str, seen: Looked, instance: Instance | None) -> None:
        """Note on an instance how long a packet takes if that is far longer than before."""
        trip_s = self._pools[name][0].round_trip_s() if name in self._pools else 0.0
        if instance is None or not trip_s:
            return
        seen.least_trip_s = min(seen.least_trip_s, trip_s)
        far = trip_s >= max(_FAR_S, _FARTHER * seen.least_trip_s)
        if far or (instance.in_flight and instance.speed.slowed_since is None):
            instance.far_s = trip_s if far else 0.0

    async def _measure(self, name: str, seen: Looked, now: float) -> bool:
        """Read the metrics of an engine and pass them on. Return True if there were some."""
        if now < seen.metrics_after:
            return False
        try:
            sample = await self.read_metrics(name)
        except _TooLargeError:
            seen.metrics_after = now + _NO_PAGE_PAUSE_S
            self._tell_once(name, f"its /metrics has more than {MAX_METRICS_BYTES} bytes")
            return False
        if sample is None:
            if self._pages.get(name) == "":
                instance = self._scheduler.fleet.instances.get(name)
                if instance is None or instance.sample is None:
                    seen.metrics_after = now + _NO_PAGE_PAUSE_S
                if instance is not None:
                    instance.pageless = True
            return False
        await self._take(name, seen, sample)
        return True

    async def _take(self, name: str, seen: Looked, sample: EngineSample) -> None:
        """Take in what an engine's metrics say."""
        seen.anonymous = sample.began is None
        if sample.began is not None and sample.began != seen.began:
            if seen.began is not None:
                seen.models_at = -math.inf  # another process has its address
                await self._read_models(name, seen, self._scheduler.fleet.instances.get(name))
            seen.began = sample.began
        self._scheduling.sample(name, sample)
        if sample.invalid:
            self.invalid_samples[name] = self.invalid_samples.get(name, 0) + 1
        if sample.missing and not seen.told_missing:
            seen.told_missing = True
            text, lacking = "%s does not report %s: hetlb uses its own bookings instead", sample.missing
            tell(logger, Event.INSTANCE_METRICS, text, name, ", ".join(lacking), instance=name)

    # --- requests to engines ---

    def _pool(self, name: str) -> EnginePool:
        """Return the connections of the watch to an engine, with its key and certificates of now."""
        access = self._access.get(name, PLAIN_ACCESS)
        if name not in self._pools:
            pool = EnginePool(self._urls[name], asyncio.get_running_loop(), access, self._proxy)
        elif self._pools[name][1] is access:
            return self._pools[name][0]
        else:
            pool = self._pools[name][0]
            pool.configure(access, self._proxy)
        self._pools[name] = pool, access
        return pool

    async def ask(
        self,
        name: str,
        line: bytes,
        body: bytes = b"",
        *,
        most_s: float,
        most_bytes: int = MAX_PAGE_BYTES,
        feed: Callable[[bytes], None] | None = None,
        held_bytes: int = 0,
    ) -> tuple[int, bytes]:
        """Return status and body of an engine's answer to a request of hetlb's own; `feed` gets the body.

        Raises `TimeoutError` after `most_s`, `UnansweredError`, or `_TooLargeError`.
        """
        pool = self._pool(name)
        head = pool.head(line, b"content-type: application/json\r\n" if body else b"")
        try:
            async with asyncio.timeout(most_s):
                return await answer_of(
                    pool, head, body, feed=feed, most_bytes=most_bytes, held_bytes=held_bytes
                )
        except UnansweredError as error:
            if error.detail is TOO_LONG:
                raise _TooLargeError from error
            raise

    async def _get(self, name: str, path: str) -> tuple[int, bytes]:
        return await self.ask(name, b"GET " + path.encode(), most_s=self._table.timeout_s)

    async def _probe(
        self, name: str, seen: Looked, instance: Instance | None
    ) -> tuple[ProbeResult | None, str]:
        """Probe an engine: the result, None if this machine could not try; and how it failed.

        An engine without `/health` (Ollama, LM Studio) is up if it lists its models.
        """
        if seen.door == _HEALTH:
            status = 200
            try:
                with contextlib.suppress(_TooLargeError):
                    status, _ = await self._get(name, _HEALTH)
            except (UnansweredError, TimeoutError) as error:
                return self._failed(name, _HEALTH, error)
            if status == 200:
                return ProbeResult.OK, ""
            if status not in UNKNOWN_PATH:
                return _unready(_HEALTH, status, instance)
        result, detail = await self._read_models(name, seen, instance)
        seen.door = _MODELS if result is ProbeResult.OK else _HEALTH
        return result, detail

    def _failed(
        self, name: str, path: str, error: UnansweredError | TimeoutError
    ) -> tuple[ProbeResult | None, str]:
        """Return the result of a probe without an answer, None if this machine could not try."""
        if isinstance(error, TimeoutError):
            return ProbeResult.FAILED, f"{_LATE} {path} within {self._table.timeout_s:g} s"
        why = error.error
        if error.end is ends.LOCAL:
            return None, ""
        from hetlb.balancer.engines.engine_mistakes import REFUSED, connect_failure

        if why is None:
            return ProbeResult.FAILED, f"{path}: {visible(error.detail)[:200]}"
        detail = connect_failure(why, urlsplit(self._urls[name]).hostname or "")
        if isinstance(why, ssl.SSLError):
            self._tell_once(name, detail)
        refused = detail == REFUSED or isinstance(why, socket.gaierror)
        return ProbeResult.REFUSED if refused else ProbeResult.FAILED, detail

    async def read_metrics(self, name: str) -> EngineSample | None:
        """Return the figures of an engine's page, None without one. Raises `_TooLargeError`."""
        known, seen = self._pages.get(name), self._seen.get(name)
        for path in (known,) if known else PAGES:
            if seen is None:
                break
            try:
                found, sample = await self._read_page(name, path, seen)
            except (UnansweredError, TimeoutError):
                return None
            self._pages[name] = path if found else ""
            if found:
                return sample
        return None

    async def _read_page(self, name: str, path: str, seen: Looked) -> tuple[bool, EngineSample | None]:
        """Return True if metrics are at a path, and what they say."""
        page, first, spent_s = self._page_of(name, seen), b"", 0.0
        clock = time.perf_counter

        def feed(data: bytes) -> None:
            nonlocal first, spent_s
            began_s = clock()
            first = first or data[:1]
            page.feed(data)
            spent_s += clock() - began_s

        asked_at = self._now()
        status, _ = await self.ask(
            name, b"GET " + path.encode(), most_s=self._table.timeout_s, most_bytes=MAX_METRICS_BYTES,
            feed=feed, held_bytes=MAX_HELD_BYTES if isinstance(page, NextPage) else 0,
        )  # fmt: skip
        if first == b"[" or status in UNKNOWN_PATH:
            return False, None
        if status != 200:
            return True, None
        began_s = clock()
        sample = page.sample()
        self._rounds.spent(spent_s + clock() - began_s)
        seen.page = seen.page or LastPage()
        return True, replace(sample, age_s=self._now() - asked_at)

    def _page_of(self, name: str, seen: Looked) -> NextPage | HistoryPage:
        """Return a page to be fed. The first one of an instance of unknown speed tells its history."""
        if seen.page is None:
            instance = self._scheduler.fleet.instances.get(name)
            known = instance is None or instance.profiled or instance.speed.seen
            if instance is not None and not known and instance.sample is None:
                from hetlb.balancer.engines.engine_history import HistoryPage

                return HistoryPage()
            seen.page = LastPage()
        return NextPage(seen.page)

    async def _accepts_work(self, name: str) -> bool:
        """Return True if a server takes hetlb's key for a chat; the one sent is empty, which it refuses."""
        try:
            status, _ = await self.ask(name, _EMPTY_CHAT, b"{}", most_s=self._table.timeout_s)
        except (UnansweredError, TimeoutError, _TooLargeError):
            return False
        return status not in KEY_STATUSES

    async def _read_models(
        self, name: str, seen: Looked, instance: Instance | None
    ) -> tuple[ProbeResult | None, str]:
        """Read an engine's list of models: the result, None if this machine could not try, and why.

        An engine that refuses hetlb's own key gets no work. One that wants the client's key is there.
        """
        try:
            status, body = await self._get(name, _MODELS)
        except (UnansweredError, TimeoutError) as error:
            return self._failed(name, _MODELS, error)
        except _TooLargeError:
            return ProbeResult.FAILED, f"{_MODELS}: {TOO_LONG}"
        if status in KEY_STATUSES:
            has_key = self._access.get(name, PLAIN_ACCESS).authorization is not None
            if has_key and status != 401 and await self._accepts_work(name):
                seen.models_at = self._now()
                return ProbeResult.OK, ""  # the list alone is kept from this key
            told = "refuses the API key" if has_key else "wants an API key"
            self._tell_once(name, f"{told} ({status} at {_MODELS})")
            return (ProbeResult.LOADING, f"{KEY_REFUSED} ({status})") if has_key else (ProbeResult.OK, "")
        if status != 200:
            return _unready(_MODELS, status, instance)
        entries = read_model_list(body)
        if not entries:
            empty = lists_nothing(body)
            return (ProbeResult.LOADING, _NO_MODEL) if empty else (ProbeResult.FAILED, _NO_LIST)
        self._told.pop(name, None)
        if seen.models_at == -math.inf:
            await self._read_version(name)
        seen.models_at = self._now()
        self.models[name] = entries
        self.learned(models_learned(name, entries))
        if (longest := longest_context(entries)) is not None:
            self.learned(CapacityLearned(name, Capacity(max_model_len=longest)))
        return ProbeResult.OK, ""

    async def _read_version(self, name: str) -> None:
        for path in ("/version", "/api/version"):
            with contextlib.suppress(UnansweredError, TimeoutError, _TooLargeError):
                status, body = await self._get(name, path)
                if status == 200 and (text := read_version(body)):
                    self.versions[name] = text
                    if path == "/version" and reads_rank(text):
                        self.learned(CapacityLearned(name, Capacity(rank_header=True)))
                    return

    def _tell_once(self, name: str, text: str) -> None:
        if self._told.get(name) != text:
            self._told[name] = text
            event = Event.INSTANCE_METRICS if "/metrics" in text else Event.INSTANCE_ACCESS
            tell(logger, event, "%s: %s", name, text, instance=name)


def reads_rank(version: str) -> bool:
    """Return True if vLLM of a version reads `X-data-parallel-rank`."""
    return version_numbers(version) >= _RANK_VERSION


def _unready(path: str, status: int, instance: Instance | None) -> tuple[ProbeResult, str]:
    """Return the result of a probe that a page answers by a status; an engine that loads says 503."""
    text = f"{path} answers {status}"
    if status == 503 and (instance is None or instance.evidence.health.unproven):
        return ProbeResult.LOADING, f"loading: {text}"
    return ProbeResult.FAILED, text


def models_learned(name: str, entries: list[dict[str, Any]]) -> ModelsLearned:
    """Return the fact that an engine lists these; an adapter has a `parent`."""
    names = tuple(dict.fromkeys(entry["id"] for entry in entries))
    return ModelsLearned(name, names, tuple({entry["id"]: None for entry in entries if entry.get("parent")}))


def _log_absent(instance: Instance) -> None:
    """Log that an engine did not answer the first round of probes, if so."""
    if instance.evidence.health.state is Health.UP:
        return
    url, reason = instance.spec.url, instance.evidence.health.reason
    tell(
        logger, Event.INSTANCE_ABSENT, "%s (%s) is not answering: %s; serving with the others",
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
