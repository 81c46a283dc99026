"""Knowledge read from the engines themselves: probes, metrics, lists of models.

It goes to the scheduler as it is; what it changes for an operator is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hetlb.config.fleet_tables import ScrapeTable
from hetlb.core.instance import Instance
from hetlb.core.types import AdminState, EngineSample, Health, InstanceChange, ModelsLearned
from hetlb.proxy.access import EngineAccess
from hetlb.proxy.scheduler_driver import SchedulerDriver
from hetlb.proxy.scrape import Scraper, models_learned
from hetlb.proxy.telemetry.access_log import escape
from hetlb.proxy.telemetry.events import Event, tell
from hetlb.served_models import read_model_list

if TYPE_CHECKING:
    from hetlb.config.profile_file import Profile

logger = logging.getLogger("hetlb.proxy")


class EngineWatch:
    """The scraper of a fleet, and what it finds out, for the scheduler."""

    def __init__(
        self, table: ScrapeTable, scheduling: SchedulerDriver, engines: Mapping[str, EngineAccess]
    ) -> None:
        self._scheduling = scheduling
        self._scheduler = scheduling.scheduler
        self.scraper = Scraper(table, on_change=self._learned, on_sample=self._sampled, access=engines)

    async def start(self, profiles: Mapping[str, Profile], most_s: float) -> None:
        """Begin to probe; returns after the first round, after `most_s` at the latest."""
        instances = self._scheduler.instances
        watched = (each for each in instances if each.admin is not AdminState.MAINT)
        await self.scraper.start({each.name: each.spec.url for each in watched}, most_s)
        for instance in self._scheduler.instances:
            _log_absent(instance)
            if (profile := profiles.get(instance.name)) is not None:
                entries = self.scraper.models.get(instance.name, [])
                _log_other_than_profiled(
                    instance.name, profile, entries, self.scraper.versions.get(instance.name)
                )

    def reconnected(self, name: str, body: bytes) -> None:
        """An engine that closed connections was asked what it serves now: `body` is its `/v1/models`."""
        entries = read_model_list(body)
        names = tuple(dict.fromkeys(entry["id"] for entry in entries))
        instance = self._instance(name)
        if names and instance is not None and instance.served != names:
            self.scraper.models[name] = entries
            self._learned(models_learned(name, entries))

    def models(self) -> list[dict[str, Any]]:
        """The union of the instances' models, of those alive or not yet known to be dead."""
        union: dict[str, dict[str, Any]] = {}
        for instance in self._scheduler.instances:
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

    def _instance(self, name: str) -> Instance | None:
        return self._scheduler.fleet.instances.get(name)

    def _learned(self, change: InstanceChange) -> None:
        """The scraper found something out about an engine."""
        if not isinstance(change, ModelsLearned):
            self._scheduling.change(change)
            return
        instance = self._instance(change.name)
        before, model = (None, "") if instance is None else (instance.served, instance.spec.model)
        self._scheduling.change(change)
        if change.models != before:
            _log_models(change.name, model, before, change.models)

    def _sampled(self, name: str, sample: EngineSample) -> None:
        """The scraper read an engine's metrics."""
        instance = self._instance(name)
        slept = instance is not None and instance.asleep
        self._scheduling.sample(name, sample)
        if instance is not None and instance.asleep is not slept:
            event = Event.INSTANCE_ASLEEP if instance.asleep else Event.INSTANCE_AWAKE
            now = "sleeps: it gets no requests" if instance.asleep else "woke up"
            tell(logger, event, "%s %s", name, now, instance=name)


def _log_absent(instance: Instance) -> None:
    """Log that an engine did not answer the first round of probes, if so."""
    if instance.health.state is Health.UP:
        return
    url, reason = instance.spec.url, instance.health.reason
    tell(
        logger, Event.INSTANCE_ABSENT, "%s (%s) is not answering: %s; the others are served",
        instance.name, url, reason, instance=instance.name, url=url, reason=reason,
    )  # fmt: skip


def _log_models(name: str, model: str, before: tuple[str, ...] | None, now: tuple[str, ...]) -> None:
    """Log that an engine serves other models than `before`, or than `model`, that of the file ("": none)."""
    shown = ", ".join(map(escape, now))
    if model and model not in now:
        text = "%s serves %s, not %s: it gets requests for what it serves"
        tell(logger, Event.INSTANCE_OTHER_MODEL, text, name, shown, model, instance=name)
    elif before is not None:
        text, old = "%s now serves %s (before: %s)", ", ".join(map(escape, before))
        tell(logger, Event.INSTANCE_MODELS, text, name, shown, old, instance=name)


def _log_other_than_profiled(
    name: str, profile: Profile, entries: Sequence[Mapping[str, Any]], version: str | None
) -> None:
    """Warn where an engine is not what its profile was measured on; `entries` are of its `/v1/models`."""
    serves = {str(entry[key]) for entry in entries for key in ("id", "root") if entry.get(key)}
    if profile.model is not None and serves and profile.model.name not in serves:
        shown = ", ".join(sorted(map(escape, serves)))
        text = "%s: its profile is of the model %s, it serves %s"
        tell(logger, Event.INSTANCE_PROFILE, text, name, profile.model.name, shown, instance=name)
    if profile.engine.version is not None and version not in (None, profile.engine.version):
        shown, text = escape(str(version)), "%s: its profile is of vLLM %s, it runs %s"
        tell(logger, Event.INSTANCE_PROFILE, text, name, profile.engine.version, shown, instance=name)
