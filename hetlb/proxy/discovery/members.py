"""Instances that stand in no fleet file: which source gave each one, and until when registrations hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from hetlb.config.fleet import same_server
from hetlb.core.types import InstanceSpec
from hetlb.errors import InputError
from hetlb.proxy.discovery.source import Found
from hetlb.proxy.telemetry.events import Event, tell

logger = logging.getLogger("hetlb.discovery")

#: The source of instances that were registered over HTTP.
REGISTRATION: Final = "registration"


class RosterSide(Protocol):
    """Interface of the roster that members join and leave."""

    def specs(self) -> Mapping[str, InstanceSpec]:
        """All instances now, by name."""

    def spec_of(self, found: Found) -> InstanceSpec:
        """The scheduler's view of a server, its profile chosen. Raises `InputError`."""

    def join(self, spec: InstanceSpec) -> None: ...
    def leave(self, name: str) -> None: ...
    def update(self, spec: InstanceSpec) -> None: ...


class Members:
    """Keeps the roster as the sources say. A name or an address belongs to the source that gave it first."""

    def __init__(self, roster: RosterSide) -> None:
        self._roster = roster
        self._source_of: dict[str, str] = {}
        #: Instances that each source gave last.
        self._given: dict[str, dict[str, Found]] = {}
        self._told: dict[tuple[str, str], str] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    def source_of(self, name: str) -> str | None:
        """The source that an instance is from; None for one of the fleet file."""
        return self._source_of.get(name)

    def adopt(self, name: str) -> None:
        """An instance of an earlier process: the first source that gives it takes it over."""
        self._source_of[name] = ""

    def found(self, source: str, servers: Sequence[Found]) -> None:
        """A source knows these servers now, and no others."""
        given = {each.name: each for each in servers}
        before, self._given[source] = self._given.get(source, {}), given
        for name in [name for name, owner in self._source_of.items() if owner == source]:
            if name not in given:
                self._leave(name)
        for each in given.values():
            self._place(source, each)
        if before.keys() - given.keys():  # a name or an address is free again
            for other, known in self._given.items():
                for name in known.keys() - self._roster.specs().keys():
                    self._place(other, known[name])

    def refresh(self) -> None:
        """Profiles may be chosen otherwise now, and names of the fleet file may be free."""
        for source, given in self._given.items():
            for each in given.values():
                self._place(source, each)

    def registered(self, name: str, ttl_s: float) -> None:
        """An instance was registered, for so many seconds; 0 is for ever."""
        self._source_of[name] = REGISTRATION
        if timer := self._expiries.pop(name, None):
            timer.cancel()
        if ttl_s > 0:
            loop = asyncio.get_running_loop()
            self._expiries[name] = loop.call_later(ttl_s, self._expire, name, ttl_s)

    def gone(self, name: str) -> None:
        """An instance left otherwise: by an operator, or because the fleet file has its name."""
        self._source_of.pop(name, None)
        if timer := self._expiries.pop(name, None):
            timer.cancel()

    def close(self) -> None:
        """Stop the timers."""
        for timer in self._expiries.values():
            timer.cancel()
        self._expiries.clear()

    def _expire(self, name: str, ttl_s: float) -> None:
        tell(
            logger, Event.REGISTRATION_EXPIRED, "%s was not registered again within %g s", name, ttl_s,
            instance=name,
        )  # fmt: skip
        self._leave(name)

    def _leave(self, name: str) -> None:
        self.gone(name)
        if name in self._roster.specs():
            self._roster.leave(name)

    def _place(self, source: str, found: Found) -> None:
        """Have one server in the roster as its source gives it."""
        roster, name = self._roster, found.name
        try:
            spec = roster.spec_of(found)
        except InputError as error:
            self._tell_once(source, name, Event.DISCOVERY_FAILED, f"{name}: {error}")
            return
        specs = roster.specs()
        current, owner = specs.get(name), self._source_of.get(name)
        if current is not None and owner not in (source, ""):
            self._tell_once(source, name, Event.DISCOVERY_CONFLICT, f"{name} is in the fleet already")
            return
        for other in specs.values():
            if other.name != name and same_server(other.url, spec.url):
                text = f"{name} has the address of {other.name}"
                self._tell_once(source, name, Event.DISCOVERY_CONFLICT, text)
                return
        self._told.pop((source, name), None)
        self._source_of[name] = source
        if current is None:
            roster.join(spec)
        elif (current.url, current.model) != (spec.url, spec.model):
            roster.leave(name)
            self._source_of[name] = source
            roster.join(spec)
        elif current != spec:
            roster.update(spec)

    def _tell_once(self, source: str, name: str, event: Event, text: str) -> None:
        if self._told.get((source, name)) != text:
            self._told[source, name] = text
            tell(logger, event, "%s: %s", source, text, source=source, instance=name)
