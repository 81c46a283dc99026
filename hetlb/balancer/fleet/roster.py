"""Roster of a running fleet: its instances as they come and go, and what an operator sets of each.

An instance that comes is in the scheduler, is watched and has its keys when the call returns; one that goes
has none of them, and what it is answering goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hetlb.balancer.clients.access import Access, EngineAccess
from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.config.fleet_tables import InstanceTable
from hetlb.balancer.core.facts import (
    AdminStateSet,
    InstanceAdded,
    InstanceChange,
    InstanceRemoved,
    InstanceUpdated,
)
from hetlb.balancer.core.types import AdminState, InstanceSpec
from hetlb.balancer.engines.scrape import EngineWatch
from hetlb.balancer.exchange.scheduler_driver import SchedulerDriver
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.inputs.urls import Origin, origin
from hetlb.turns import Share

if TYPE_CHECKING:
    from hetlb.balancer.config.profile_file import Profile
    from hetlb.balancer.fleet.members import Members

logger = logging.getLogger("hetlb.proxy")

#: The source of instances that were registered over HTTP.
REGISTRATION: Final = "registration"
#: Instances that come or go in one turn of the event loop.
TURN_INSTANCES: Final = 64


def _nothing(*_: object) -> None:
    """Do nothing: an unset hook."""


class Roster:
    """The instances of a fleet from all sources; it alone changes `engines`, their keys."""

    def __init__(
        self,
        fleet: Fleet,
        access: Access,
        engines: dict[str, EngineAccess],
        scheduling: SchedulerDriver,
        watch: EngineWatch,
    ) -> None:
        self.fleet = fleet
        self.access = access
        self._engines = engines
        self._scheduling = scheduling
        self._scheduler = scheduling.scheduler
        self._watch = watch
        #: Address of each registered instance; None if its name is resolved at each connection.
        self.registered: dict[str, str | None] = {}
        #: Source of each instance that stands in no file. It is "" for an instance of an earlier process
        #: until a source gives it.
        self.source_of: dict[str, str] = {}
        self._profiles: dict[Path, Profile] = {}
        #: Names of the instances by their addresses.
        self._at: dict[Origin, str] = {origin(spec.url): spec.name for spec in fleet.instances if spec.url}
        #: Called before the scheduler knows a new instance, and before it forgets one.
        self.on_coming: Callable[[InstanceSpec], None] = _nothing
        self.on_gone: Callable[[str], None] = _nothing
        #: Called after each change by an operator or a source.
        self.on_edited: Callable[[], None] = _nothing

    @cached_property
    def members(self) -> Members:
        """Instances that stand in no file, and their sources."""
        from hetlb.balancer.fleet.members import Members

        return Members(self)

    def spec(self, name: str) -> InstanceSpec | None:
        instance = self._scheduler.fleet.instances.get(name)
        return None if instance is None else instance.spec

    def name_at(self, place: Origin) -> str | None:
        return self._at.get(place)

    # --- sources ---

    def resolve(self, table: InstanceTable, model: str) -> InstanceSpec:
        """Return the scheduler's view of an instance that stands in no file. Raises `InputError`."""
        return self.fleet.resolve_found(table, model, self._profiles)

    def join(self, specs: Sequence[InstanceSpec], address: str | None = None) -> None:
        """Add instances that stand in no file.

        Connections go to `address`; without one the names of the hosts are resolved.
        """
        for spec in specs:
            self.registered[spec.name] = address
        self._add(specs, lambda spec: self.access.unlisted(spec.url, spec.model, address))
        self.on_edited()

    def leave(self, names: Sequence[str]) -> None:
        self._leave(names)
        self.on_edited()

    def update(self, spec: InstanceSpec) -> None:
        self.change(InstanceUpdated(spec))
        tell(logger, Event.INSTANCE_UPDATED, "%s has another profile, capacity or weight", spec.name,
             instance=spec.name)  # fmt: skip

    # --- operators ---

    def change(self, change: InstanceChange) -> None:
        self._scheduling.change(change)
        if isinstance(change, AdminStateSet):
            state = change.state if change.deadline_s is None else f"leave in {change.deadline_s:.0f} s"
            text = "%s is set to %s"
            tell(logger, Event.INSTANCE_STATE, text, change.name, state, instance=change.name)
            if change.state is AdminState.MAINT:
                self._watch.pause(change.name)
            elif not self._watch.watches(change.name):
                self._watch.add(change.name, self._scheduler.fleet.instances[change.name].spec.url)
        self.on_edited()

    def notice(self, name: str, deadline_s: float | None) -> None:
        """Note that an instance is gone after some seconds; None takes that back."""
        self.change(AdminStateSet(name, self._scheduler.fleet.instances[name].admin, deadline_s))

    # --- the fleet file ---

    async def replace(self, fleet: Fleet, access: Access) -> str:
        """Take the instances of another fleet file; unchanged ones keep their load. Return the changes."""
        old = {each.name: each.spec for each in self._scheduler.instances}
        new = {spec.name: spec for spec in fleet.instances}
        found = {name for name in old if self.source_of.get(name) not in (None, REGISTRATION)}
        same = {name for name in old if name in new and same_place(old[name], new[name])}
        updated = [new[name] for name in old if name in same and old[name] != new[name]]
        gone = [name for name in old if name not in same and (name in new or name not in found)]
        come = [spec for name, spec in new.items() if name not in same]
        self.fleet, self.access = fleet, access
        self._engines.update(
            {spec.name: access.engines[spec.name] for spec in new.values() if spec.name in same}
        )
        share = Share()
        for begin in range(0, len(gone), TURN_INSTANCES):
            self._leave(gone[begin : begin + TURN_INSTANCES])
            await share.spent()
        for spec in updated:
            self.update(spec)
        for begin in range(0, len(come), TURN_INSTANCES):
            some = come[begin : begin + TURN_INSTANCES]
            self._leave([spec.name for spec in some])  # a source gave one of that name meanwhile
            self._add(some, lambda spec: access.engines[spec.name])
            await share.spent()
        done = f"{len(gone)} instances out, {len(come)} in"
        return done + (f", {len(updated)} changed" if updated else "")

    def refresh(self) -> None:
        """Choose profiles again after `replace`.

        A found server that waited for its name is added if the file uses this name no more.
        """
        self._profiles.clear()
        if "members" in vars(self):
            self.members.refresh()

    def close(self) -> None:
        if "members" in vars(self):
            self.members.close()

    # --- inside ---

    def _add(self, specs: Sequence[InstanceSpec], access: Callable[[InstanceSpec], EngineAccess]) -> None:
        for spec in specs:
            self.on_coming(spec)
            self._engines[spec.name] = access(spec)
            self._at[origin(spec.url)] = spec.name
        if specs:
            self._scheduling.change(InstanceAdded(specs[0], tuple(specs[1:])))
        for spec in specs:
            if self._watch.started:
                self._watch.add(spec.name, spec.url)
            source = self.source_of.get(spec.name) or "file"
            tell(logger, Event.INSTANCE_ADDED, "%s (%s) was added", spec.name, spec.url,
                 instance=spec.name, url=spec.url, source=source)  # fmt: skip

    def _leave(self, names: Sequence[str]) -> None:
        names = [name for name in names if self.spec(name) is not None]
        for name in names:
            if "members" in vars(self):
                self.members.gone(name)
            self.source_of.pop(name, None)
            self.registered.pop(name, None)
            place = origin(self._scheduler.fleet.instances[name].spec.url)
            if self._at.get(place) == name:
                del self._at[place]
            self._watch.remove(name)
            self.on_gone(name)
        if names:
            self._scheduling.change(InstanceRemoved(names[0], tuple(names[1:])))
        for name in names:
            del self._engines[name]
            tell(logger, Event.INSTANCE_REMOVED, "%s was removed", name, instance=name)


def same_place(one: InstanceSpec, other: InstanceSpec) -> bool:
    """Return True if two specs are of one server: only its profile, capacity or weight may differ."""
    return (one.url, one.model) == (other.url, other.model)
