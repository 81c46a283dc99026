"""`hetlb serve`, whole: start-up, the running fleet, reload, shutdown, in this order and in one file.

Promise: the listener opens only after the first round of probes (at most `FIRST_ROUND_S`); an engine that
is not there yet does not keep the others from being served; a bad file at reload changes nothing; after a
stop no task, socket or thread is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from hetlb.config import Fleet, InstanceTable, convert, load_fleet, resolve_instance
from hetlb.core.eventlog import RecordingScheduler, SchedulerSetup, encode_setup
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import Dispatch, Health, InstanceAdded, InstanceChange, InstanceRemoved, InstanceSpec
from hetlb.errors import ConfigError, HetlbError, InputError
from hetlb.proxy.admin import make_app
from hetlb.proxy.driver import Driver
from hetlb.proxy.exchange import Exchange, Phase
from hetlb.proxy.metrics import Totals
from hetlb.proxy.requestlog import LineWriter, escape
from hetlb.proxy.scrape import Scraper, Target
from hetlb.proxy.server import ProxyServer
from hetlb.proxy.sizes import PromptSizes, load_tokenizers

logger = logging.getLogger("hetlb.proxy")

FIRST_ROUND_S = 1.0
#: After SIGTERM readiness says no for this long before the listener closes, so that balancers notice.
READINESS_LAG_S = 5.0


class Service:
    """A running proxy: the driver, the listener, the watcher and the admin surface over one fleet."""

    def __init__(self, fleet: Fleet, event_log: Path | None = None) -> None:
        self.fleet = fleet
        self._event_log = event_log
        self._lines: LineWriter | None = None
        self._events: LineWriter | None = None
        self._event_fd: int | None = None
        self._runner: web.AppRunner | None = None
        self._stop = asyncio.Event()
        self._hurry = False
        loop = asyncio.get_running_loop()
        setup = SchedulerSetup(
            specs=fleet.instances,
            policy=fleet.policy.name,
            params=fleet.policy_params,
            limits=fleet.queue_limits,
            predictor=fleet.policy.predictor or "online",
            seed=fleet.policy.seed,
            lengths=fleet.output_lengths(),
            initial_health=Health.SUSPECT,
            now=loop.time(),
        )
        self.driver = Driver(
            self._build_scheduler(setup),
            fleet.proxy,
            PromptSizes(load_tokenizers(fleet.tokenizers)),
            loop,
            self._log_request if fleet.proxy.request_log else None,
        )
        self.server = ProxyServer(self.driver, self)
        self.scraper = Scraper(fleet.scrape, on_change=self.driver.change, on_sample=self.driver.sample)
        self.address = ("", 0)
        self.admin_address = ("", 0)

    def _build_scheduler(self, setup: SchedulerSetup) -> Scheduler:
        try:
            if self._event_log is None:
                return setup.build(Scheduler)
            try:
                self._event_fd = os.open(self._event_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            except OSError as error:
                raise InputError(
                    f"--event-log: expected a file that can be written, got {str(self._event_log)!r}: "
                    f"{error.strerror}"
                ) from error
            self._events = LineWriter(self._event_fd, "event log")
            self._events.write(encode_setup(setup))
            return setup.build(RecordingScheduler, write=self._events.write)
        except ValueError as error:
            raise ConfigError(f"policy.predictor: {error} (policy.trace names one)") from error

    # --- start-up ---

    async def start(self) -> None:
        """Probe the fleet once, then open both listeners. Raises `HetlbError` if one cannot be bound."""
        if self.fleet.proxy.request_log:
            self._lines = LineWriter(sys.stderr.fileno(), "request log")
        await self.scraper.start(
            (Target(spec.name, spec.url) for spec in self.fleet.instances), FIRST_ROUND_S
        )
        for instance in self.driver.scheduler.instances:
            if instance.health.state is not Health.UP:
                logger.warning(
                    "%s (%s) is not answering: %s; the others are served",
                    instance.name,
                    instance.spec.url,
                    instance.health.reason,
                )
            elif instance.spec.model and instance.served and instance.spec.model not in instance.served:
                logger.warning(
                    "%s serves %s, not %s: nothing goes there",
                    instance.name,
                    ", ".join(instance.served),
                    instance.spec.model,
                )
            self._compare_profile(instance.name)
        listen, admin = self.fleet.listen, self.fleet.admin
        with _named("listen", listen.host, listen.port):
            self.address = await self.server.start(listen.host, listen.port)
        self._runner = web.AppRunner(make_app(self), access_log=None, handle_signals=False)
        await self._runner.setup()
        with _named("admin", admin.host, admin.port):
            site = web.TCPSite(self._runner, admin.host, admin.port)
            await site.start()
        self.admin_address = self._runner.addresses[0][:2]

    def _compare_profile(self, name: str) -> None:
        """Warn where an engine is not what its profile was measured on."""
        profile = self.fleet.profiles.get(name)
        if profile is None:
            return
        entries = self.scraper.models.get(name, [])
        serves = {str(entry[key]) for entry in entries for key in ("id", "root") if entry.get(key)}
        if profile.model is not None and serves and profile.model.name not in serves:
            logger.warning(
                "%s: its profile is of the model %s, it serves %s",
                name,
                profile.model.name,
                ", ".join(sorted(serves)),
            )
        version = self.scraper.versions.get(name)
        if profile.engine.version is not None and version not in (None, profile.engine.version):
            logger.warning(
                "%s: its profile is of vLLM %s, it runs %s", name, profile.engine.version, version
            )

    @property
    def ready_line(self) -> str:
        """What `hetlb serve` prints once requests are accepted."""
        return f"hetlb ready on {_url(self.address)} (admin {_url(self.admin_address)})"

    # --- running ---

    async def run(self) -> None:
        """Serve until told to stop by SIGTERM or SIGINT, then stop. The service was started before."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_stop_signal, False)
        loop.add_signal_handler(signal.SIGINT, self._on_stop_signal, True)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload_signal)
        try:
            await self._stop.wait()
            if not self._hurry and self.server.connections:
                self.stopping_soon = True
                with contextlib.suppress(TimeoutError):
                    self._stop.clear()
                    async with asyncio.timeout(READINESS_LAG_S):
                        await self._stop.wait()
            await self.stop(0.0 if self._hurry else self.fleet.proxy.shutdown_grace_s)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    #: True between SIGTERM and the closing of the listener: not ready, still accepting.
    stopping_soon = False

    def _on_stop_signal(self, hurry: bool) -> None:
        # A second signal, or SIGINT, ends at once.
        self._hurry = self._hurry or hurry or self._stop.is_set() or self.stopping_soon
        self._stop.set()
        if self._hurry:
            for exchange in list(self.driver.exchanges.values()):
                if exchange.phase is not Phase.DONE:
                    exchange.shut_down()

    def _on_reload_signal(self) -> None:
        try:
            logger.info("reloaded: %s", self.reload())
        except InputError as error:
            logger.error("not reloaded, the last good configuration stays: %s", error)

    # --- the fleet view of the listener ---

    def routable(self) -> bool:
        """Whether some instance takes requests."""
        if self.stopping_soon or self.server.stopping:
            return False
        return any(instance.routable for instance in self.driver.scheduler.instances)

    def models(self) -> list[dict[str, Any]]:
        """The union of the instances' models, of those alive or not yet known to be dead."""
        union: dict[str, dict[str, Any]] = {}
        for instance in self.driver.scheduler.instances:
            if instance.health.state is Health.EJECTED:
                continue
            entries = self.scraper.models.get(instance.name)
            if entries is None and instance.spec.model:
                entries = [{"id": instance.spec.model, "object": "model", "owned_by": "hetlb"}]
            for entry in entries or ():
                known = union.setdefault(entry["id"], entry)
                longest, mine = known.get("max_model_len"), entry.get("max_model_len")
                if isinstance(mine, int) and (not isinstance(longest, int) or mine > longest):
                    union[entry["id"]] = entry
        return list(union.values())

    # --- what the admin surface sees and does ---

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler in use."""
        return self.driver.scheduler

    @property
    def totals(self) -> Totals:
        """The driver's counters."""
        return self.driver.totals

    @property
    def invalid_samples(self) -> Mapping[str, int]:
        """Scrapes with absurd values, by instance."""
        return self.scraper.invalid_samples

    @property
    def decisions(self) -> Sequence[Dispatch]:
        """The last dispatches."""
        return self.driver.decisions

    @property
    def registration(self) -> bool:
        """Whether instances may be added and removed through the admin surface."""
        return self.fleet.admin.registration

    def now(self) -> float:
        """The driver's clock, seconds."""
        return self.driver.now()

    def change(self, change: InstanceChange) -> None:
        """An operator changed an instance."""
        self.driver.change(change)

    def set_policy(self, name: str) -> None:
        """An operator switched the policy."""
        self.driver.set_policy(name)

    def register(self, table: Mapping[str, Any]) -> None:
        """Add an instance. Raises `InputError`."""
        fields = dict(table)
        model = fields.pop("model", "")
        if not isinstance(model, str):
            raise ConfigError(f"model: expected text, got {model!r}")
        if fields.get("profile") is not None:
            raise ConfigError("profile: expected none, an instance registered here learns its speed")
        spec, _ = resolve_instance(convert(fields, InstanceTable), model, "instance", Path(), {})
        if any(instance.name == spec.name for instance in self.scheduler.instances):
            raise ConfigError(f"name: expected a name used once in the fleet, got {spec.name!r} again")
        self._add(spec)

    def unregister(self, name: str) -> None:
        """Remove an instance; what it is answering goes on."""
        self._remove(name)

    def reload(self) -> str:
        """Read the fleet file again: whole or not at all. Raises `InputError`."""
        if self.fleet.path is None:
            raise ConfigError("there is no file to reload: hetlb was started with --instance")
        fleet = load_fleet(self.fleet.path)
        require_urls(fleet)
        old = {instance.name: instance.spec for instance in self.scheduler.instances}
        new = {spec.name: spec for spec in fleet.instances}
        gone = [name for name in old if new.get(name) != old[name]]
        come = [spec for name, spec in new.items() if old.get(name) != spec]
        for name in gone:
            self._remove(name)
        for spec in come:
            self._add(spec)
        if fleet.policy.name != self.fleet.policy.name:
            self.driver.set_policy(fleet.policy.name)
        self.fleet = fleet
        return f"{len(gone)} instances out, {len(come)} in, policy {self.scheduler.policy_name}"

    def _add(self, spec: InstanceSpec) -> None:
        self.driver.change(InstanceAdded(spec))
        self.scraper.add(Target(spec.name, spec.url))

    def _remove(self, name: str) -> None:
        self.scraper.remove(name)
        self.driver.change(InstanceRemoved(name))

    # --- the request log ---

    def _log_request(self, exchange: Exchange, phase: Phase) -> None:
        if self._lines is None:
            return
        lease = exchange.lease
        arrived, first, ended = exchange.arrived_at, exchange.first_byte_at, exchange.ended_at
        assert ended is not None
        assert exchange.outcome is not None
        self._lines.write(
            f"request={escape(exchange.label)} model={escape(exchange.request.model)} path={exchange.path} "
            f"instance={lease.instance if lease else '-'} outcome={exchange.outcome.value} "
            f"phase={phase.value} status={exchange.status} "
            f"prompt_tokens={exchange.prompt_tokens_used or exchange.request.prompt_tokens} "
            f"output_tokens={lease.output_tokens if lease else 0} "
            f"predicted_output={lease.predicted_output if lease else 0:.0f} "
            f"queue_s={(exchange.dispatched_at or ended) - arrived:.4f} "
            f"ttft_s={f'{first - arrived:.4f}' if first is not None else '-'} "
            f"total_s={ended - arrived:.4f} retries={exchange.retries}\n"
        )

    # --- shutdown ---

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, let what is open end within `grace_s`, then close everything."""
        self.server.stop_accepting()
        await self.driver.drain(grace_s)
        await self.close()

    async def close(self) -> None:
        """Close everything now; harmless after a start that failed half-way."""
        await self.scraper.close()
        await self.server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self.driver.close()
        for writer in (self._lines, self._events):
            if writer is not None:
                writer.close()
        if self._event_fd is not None:
            os.close(self._event_fd)
            self._event_fd = None


def require_urls(fleet: Fleet) -> None:
    """Raise `ConfigError` unless every instance has an address and the admin listener is on loopback."""
    where = f"{fleet.path}: " if fleet.path else ""
    for spec in fleet.instances:
        if not spec.url:
            raise ConfigError(f"{where}{spec.name}: url: expected the server's URL, but the key is missing")
    host = fleet.admin.host
    try:
        inside = ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = host == "localhost"
    if not inside:
        raise ConfigError(f"{where}admin.host: expected a loopback address like 127.0.0.1, got {host!r}")


@contextlib.contextmanager
def _named(what: str, host: str, port: int) -> Iterator[None]:
    """Turn a failed bind into one line that names the address."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise HetlbError(f"{what}: {host}:{port} cannot be listened on: {reason}") from error


def _url(address: tuple[str, int]) -> str:
    host, port = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
