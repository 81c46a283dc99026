"""Roster of a running fleet: its instances as they come and go, and what an operator sets of each.

An instance that comes is in the scheduler, is watched and has its keys when the call returns; one that goes
has none of them, and what it is answering goes on. Instances come with the fleet file, from a source
(`discovery/`) or by registration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hetlb.addresses import allowed_address, is_special
from hetlb.config.fleet import Fleet
from hetlb.config.fleet_tables import InstanceTable
from hetlb.config.urls import Origin, origin
from hetlb.core.types import (
    AdminState,
    AdminStateSet,
    InstanceAdded,
    InstanceChange,
    InstanceRemoved,
    InstanceSpec,
    InstanceUpdated,
)
from hetlb.errors import ConfigError
from hetlb.proxy.access import Access, EngineAccess
from hetlb.proxy.discovery.members import AT_ONCE, REGISTRATION, Members
from hetlb.proxy.discovery.source import Found
from hetlb.proxy.scheduler_driver import SchedulerDriver
from hetlb.proxy.scrape import Scraper
from hetlb.proxy.telemetry.events import Event, tell
from hetlb.turns import Share

if TYPE_CHECKING:
    from hetlb.config.profile_file import Profile

logger = logging.getLogger("hetlb.proxy")


def _nothing(*_: object) -> None:
    """Do nothing: a hook that is not set."""


class Roster:
    """The instances of a fleet, wherever they are from.

    `engines` are their keys and certificates, by instance: the driver and the scraper read it, the roster
    alone changes it.
    """

    def __init__(
        self,
        fleet: Fleet,
        access: Access,
        engines: dict[str, EngineAccess],
        scheduling: SchedulerDriver,
        scraper: Scraper,
    ) -> None:
        self._fleet = fleet
        self._access = access
        self._engines = engines
        self._scheduling = scheduling
        self._scheduler = scheduling.scheduler
        self._scraper = scraper
        #: Instances that stand in no file, and where they are from.
        self.members = Members(self)
        #: Address that each of them must have; None where its name resolves itself.
        self.registered: dict[str, str | None] = {}
        self._profiles: dict[Path, Profile] = {}
        #: Names of the instances by their addresses.
        self._at: dict[Origin, str] = {origin(spec.url): spec.name for spec in fleet.instances if spec.url}
        #: Called before the scheduler knows a new instance, and before it forgets one.
        self.on_coming: Callable[[InstanceSpec], None] = _nothing
        self.on_gone: Callable[[str], None] = _nothing
        #: Called after each change by an operator or a source.
        self.on_edited: Callable[[], None] = _nothing

    def specs(self) -> Mapping[str, InstanceSpec]:
        """All instances, by name."""
        return {each.name: each.spec for each in self._scheduler.instances}

    def spec(self, name: str) -> InstanceSpec | None:
        """An instance, None where there is none of that name."""
        instance = self._scheduler.fleet.instances.get(name)
        return None if instance is None else instance.spec

    def name_at(self, place: Origin) -> str | None:
        """The instance at an address, None where there is none."""
        return self._at.get(place)

    # --- sources ---

    def spec_of(self, found: Found) -> InstanceSpec:
        """The scheduler's view of a server that was found. Raises `InputError`."""
        table = InstanceTable(
            name=found.name,
            url=found.url,
            profile=found.profile or None,
            weight=found.weight,
            labels=dict(found.labels),
        )
        spec = self._fleet.resolve_found(table, found.model, self._profiles)
        if is_special(host := urlsplit(spec.url).hostname or ""):
            raise ConfigError(f"url: expected the address of a server, got {host}")
        return spec

    def join(self, specs: Sequence[InstanceSpec], address: str | None = None) -> None:
        """Instances that stand in no file came; their names resolve to `address`, or themselves."""
        for spec in specs:
            self.registered[spec.name] = address
        self._add(specs, lambda spec: self._access.unlisted(spec.url, spec.model, address))
        self.on_edited()

    def leave(self, names: Sequence[str]) -> None:
        """Instances go; what they are answering goes on."""
        self._leave(names)
        self.on_edited()

    def update(self, spec: InstanceSpec) -> None:
        """An instance has another profile or weight."""
        self.change(InstanceUpdated(spec))
        tell(logger, Event.INSTANCE_UPDATED, "%s has another profile, capacity or weight", spec.name,
             instance=spec.name)  # fmt: skip

    # --- operators ---

    def change(self, change: InstanceChange) -> None:
        """An operator changed an instance."""
        self._scheduling.change(change)
        if isinstance(change, AdminStateSet):
            text = "%s is set to %s"
            tell(logger, Event.INSTANCE_STATE, text, change.name, change.state, instance=change.name)
            if change.state is AdminState.MAINT:
                self._scraper.pause(change.name)
            elif not self._scraper.watches(change.name):
                self._scraper.add(change.name, self._scheduler.fleet.instances[change.name].spec.url)
        self.on_edited()

    def notice(self, name: str, deadline_s: float | None) -> None:
        """An instance is gone after so many seconds; None takes that back."""
        self.change(AdminStateSet(name, self._scheduler.fleet.instances[name].admin, deadline_s))

    def take_out(self, name: str) -> None:
        """An instance is this proxy itself: it stays out until an operator sets it ready."""
        self.change(AdminStateSet(name, AdminState.MAINT))

    async def register(self, table: Mapping[str, Any]) -> bool:
        """Add an instance, or say again that it is there. True where it is new. Raises `InputError`."""
        from hetlb.proxy.registration import addresses, read_registration

        default_ttl_s = 0.0 if self._fleet.file.discovery is None else self._fleet.file.discovery.ttl_s
        instance, model, ttl_s = read_registration(table, default_ttl_s)
        spec = self._fleet.resolve_found(instance, model, self._profiles)
        known = self.spec(spec.name)
        ours = self.members.source_of(spec.name) in (REGISTRATION, "")
        if known is not None and ours and _same_place(known, spec):
            self.members.registered(spec.name, ttl_s)
            if known != spec:
                self.update(spec)
            return False
        address = allowed_address(await addresses(spec.url), self._access.networks)
        if self.spec(spec.name) is not None:
            raise ConfigError(f"name: expected a name used once in the fleet, got {spec.name!r} again")
        if taken := self.name_at(origin(spec.url)):
            raise ConfigError(f"url: expected an address used once in the fleet, got that of {taken} again")
        self.members.registered(spec.name, ttl_s)
        self.join([spec], address)
        return True

    # --- the fleet file ---

    async def replace(self, fleet: Fleet, access: Access) -> str:
        """Take the instances of another fleet file; what is the same keeps its load. Says what changed.

        Many instances go and come in turns of the event loop.
        """
        old, new = self.specs(), {spec.name: spec for spec in fleet.instances}
        found = {name for name in old if self.members.source_of(name) not in (None, REGISTRATION)}
        same = {name for name in old if name in new and _same_place(old[name], new[name])}
        updated = [new[name] for name in old if name in same and old[name] != new[name]]
        gone = [name for name in old if name not in same and (name in new or name not in found)]
        come = [spec for name, spec in new.items() if name not in same]
        self._fleet, self._access = fleet, access
        self._engines.update(
            {spec.name: access.engines[spec.name] for spec in new.values() if spec.name in same}
        )
        share = Share()
        for begin in range(0, len(gone), AT_ONCE):
            self._leave(gone[begin : begin + AT_ONCE])
            await share.spent()
        for spec in updated:
            self.update(spec)
        for begin in range(0, len(come), AT_ONCE):
            some = come[begin : begin + AT_ONCE]
            self._leave([spec.name for spec in some])  # a source gave one of that name meanwhile
            self._add(some, lambda spec: access.engines[spec.name])
            await share.spent()
        done = f"{len(gone)} instances out, {len(come)} in"
        return done + (f", {len(updated)} changed" if updated else "")

    def refresh(self) -> None:
        """Choose profiles again after `replace`, and have what was found since names became free."""
        self._profiles.clear()
        self.members.refresh()

    def adopt(self, spec: InstanceSpec, address: str | None) -> None:
        """Adopt an instance of an earlier process; the first source that gives it takes it over."""
        self.registered[spec.name] = address
        self._engines[spec.name] = self._access.unlisted(spec.url, spec.model, address)
        self._at[origin(spec.url)] = spec.name
        self._scheduling.change(InstanceAdded(spec))
        self.members.adopt(spec.name)

    # --- inside ---

    def _add(self, specs: Sequence[InstanceSpec], access: Callable[[InstanceSpec], EngineAccess]) -> None:
        for spec in specs:
            self.on_coming(spec)
            self._engines[spec.name] = access(spec)
            self._at[origin(spec.url)] = spec.name
        if specs:
            self._scheduling.change(InstanceAdded(specs[0], tuple(specs[1:])))
        for spec in specs:
            if self._scraper.started:
                self._scraper.add(spec.name, spec.url)
            source = self.members.source_of(spec.name) or "file"
            tell(logger, Event.INSTANCE_ADDED, "%s (%s) came", spec.name, spec.url,
                 instance=spec.name, url=spec.url, source=source)  # fmt: skip

    def _leave(self, names: Sequence[str]) -> None:
        """Those of these instances that are there go."""
        names = [name for name in names if self.spec(name) is not None]
        for name in names:
            self.members.gone(name)
            self.registered.pop(name, None)
            place = origin(self._scheduler.fleet.instances[name].spec.url)
            if self._at.get(place) == name:
                del self._at[place]
            self._scraper.remove(name)
            self.on_gone(name)
        if names:
            self._scheduling.change(InstanceRemoved(names[0], tuple(names[1:])))
        for name in names:
            del self._engines[name]
            tell(logger, Event.INSTANCE_REMOVED, "%s went", name, instance=name)


def _same_place(one: InstanceSpec, other: InstanceSpec) -> bool:
    """True if two specs are of one server: only its profile, capacity or weight may differ."""
    return (one.url, one.model) == (other.url, other.model)
