"""Instances that stand in no fleet file: which source gave each one, and until when registrations hold."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec

from hetlb.addresses import allowed_address, is_special
from hetlb.balancer.config.fleet_tables import InstanceTable
from hetlb.balancer.core.types import InstanceSpec
from hetlb.balancer.fleet.roster import REGISTRATION, TURN_INSTANCES, Roster, same_place
from hetlb.balancer.fleet.source import Found
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.errors import ConfigError, InputError
from hetlb.inputs.urls import Origin, origin
from hetlb.inputs.yaml_file import convert
from hetlb.turns import turns

logger = logging.getLogger("hetlb.discovery")

#: Label of an instance that leaves: when it is gone, in seconds since 1970.
LEAVES_AT: Final = "hetlb-leaves-at"
#: Seconds that the name of a registered instance may take to resolve.
_RESOLVE_S: Final = 5.0


class Members:
    """Keeper of the roster from the sources. A name or an address belongs to the source that gave it first.

    The work for a source's list grows with its changes. Many changes are spread over turns of the event loop.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        #: Servers that each source gave last, and the names of servers that are not in the roster as given.
        self._given: dict[str, dict[str, Found]] = {}
        self._waiting: dict[str, set[str]] = {}
        #: Sources and names that are to be looked at, and whether a name or an address became free.
        self._changed: dict[tuple[str, str], None] = {}
        self._freed = False
        self._told: dict[tuple[str, str], str] = {}
        #: Labels `LEAVES_AT` of instances, as they were given last.
        self._notices: dict[str, str] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    def found(self, source: str, servers: Sequence[Found]) -> None:
        """Set the servers that a source knows now."""
        given = {each.name: each for each in servers}
        before = self._given.get(source, {})
        waiting = self._waiting.setdefault(source, set())
        self._given[source] = given
        gone = [name for name in before if name not in given]
        for name in gone:
            waiting.discard(name)
            self._told.pop((source, name), None)
        waiting.update(
            name for name, each in given.items() if (known := before.get(name)) is not each and known != each
        )
        self._look(source, [*gone, *(name for name in given if name in waiting)] if gone or waiting else ())

    def refresh(self) -> None:
        """Look at all servers again.

        Other profiles may be chosen now, and names of the fleet file may be free.
        """
        for source, given in self._given.items():
            self._look(source, given)

    async def settled(self) -> None:
        while self._changed:
            await turns().next()

    async def register(self, table: Mapping[str, Any]) -> bool:
        """Add an instance, or renew its registration. Return True if it is new. Raises `InputError`."""
        roster, instance = self._roster, read_registration(table)
        discovery, ttl_s = roster.fleet.file.discovery, instance.ttl_s
        if ttl_s is None:
            ttl_s = 0.0 if discovery is None else discovery.ttl_s
        spec = roster.resolve(instance, instance.model)
        known = roster.spec(spec.name)
        ours = roster.source_of.get(spec.name) in (REGISTRATION, "")
        if known is not None and ours and same_place(known, spec):
            self._registered(spec.name, ttl_s)
            if known != spec:
                roster.update(spec)
            return False
        address = allowed_address(await addresses(spec.url), roster.access.networks)
        if roster.spec(spec.name) is not None:
            raise ConfigError(f"name: expected a name used once in the fleet, got {spec.name!r} again")
        if taken := roster.name_at(origin(spec.url)):
            raise ConfigError(
                f"url: expected an address used once in the fleet, got the address of {taken} again"
            )
        self._registered(spec.name, ttl_s)
        roster.join([spec], address)
        return True

    def _registered(self, name: str, ttl_s: float) -> None:
        """Note that an instance is registered for some seconds; 0 is for ever."""
        self._roster.source_of[name] = REGISTRATION
        if timer := self._expiries.pop(name, None):
            timer.cancel()
        if ttl_s > 0:
            loop = asyncio.get_running_loop()
            self._expiries[name] = loop.call_later(ttl_s, self._expire, name, ttl_s)

    def gone(self, name: str) -> None:
        """Note that an instance left otherwise: by an operator, or because the fleet file has its name."""
        source = self._roster.source_of.pop(name, None)
        self._notices.pop(name, None)
        if source and name in self._given.get(source, ()):
            self._waiting[source].add(name)
        if timer := self._expiries.pop(name, None):
            timer.cancel()

    def close(self) -> None:
        self._changed.clear()
        for timer in self._expiries.values():
            timer.cancel()
        self._expiries.clear()

    def _look(self, source: str, names: Iterable[str]) -> None:
        """Put these servers of a source into the roster as it gives them."""
        goes_on = bool(self._changed)
        self._changed.update(((source, name), None) for name in names)
        if not goes_on:
            self._advance()

    def _advance(self) -> None:
        """Look at some of the servers that changed, and at the rest in a later turn."""
        left = TURN_INSTANCES
        while left > 0 and (some := list(islice(self._changed, left))):
            left -= len(some)
            for each in some:
                del self._changed[each]
            gone = [each for each in some if each[1] not in self._given[each[0]]]
            self._leave([name for source, name in gone if self._roster.source_of.get(name) == source])
            for source in dict.fromkeys(source for source, _ in some):
                given = self._given[source]
                self._place(source, [given[name] for by, name in some if by == source and name in given])
            self._freed = self._freed or bool(gone)
            if self._freed and not self._changed:  # a name or an address is free again
                self._freed = False
                self._changed = {(by, name): None for by, names in self._waiting.items() for name in names}
        if self._changed:
            turns().later(self._advance)

    def _expire(self, name: str, ttl_s: float) -> None:
        tell(
            logger, Event.REGISTRATION_EXPIRED, "%s was not registered again within %g s", name, ttl_s,
            instance=name,
        )  # fmt: skip
        self._leave([name])

    def _leave(self, names: Sequence[str]) -> None:
        for name in names:
            self.gone(name)
        if there := [name for name in names if self._roster.spec(name) is not None]:
            self._roster.leave(there)

    def _place(self, source: str, servers: Sequence[Found]) -> None:
        """Bring the roster in line with the sources; a server that cannot be added waits."""
        coming: dict[Origin, InstanceSpec] = {}
        moved: list[str] = []
        for found in servers:
            self._waiting[source].add(found.name)
            spec = self._allowed(source, found, coming)
            if spec is None:
                continue
            self._told.pop((source, found.name), None)
            current = self._roster.spec(found.name)
            if current is not None and (current.url, current.model) == (spec.url, spec.model):
                self._take(source, found.name)
                if current != spec:
                    self._roster.update(spec)
                continue
            if current is not None:
                moved.append(found.name)
            coming[origin(spec.url)] = spec
        if moved:
            self._roster.leave(moved)
        for spec in coming.values():
            self._take(source, spec.name)
        if coming:
            self._roster.join(list(coming.values()))
        for found in servers:
            if self._roster.source_of.get(found.name) == source:
                self._heed(source, found)

    def _heed(self, source: str, found: Found) -> None:
        """Give an instance the notice in its labels, or take back the last one."""
        stated = found.labels.get(LEAVES_AT, "")
        if stated == self._notices.get(found.name, ""):
            return
        if stated and not (stated.isascii() and stated.isdigit()):
            text = f"{found.name}: label {LEAVES_AT}: expected seconds since 1970, got {stated[:40]!r}"
            self._tell_once(source, found.name, Event.DISCOVERY_FAILED, text)
            return
        self._notices[found.name] = stated
        self._roster.notice(found.name, max(0.0, float(stated) - time.time()) if stated else None)

    def _take(self, source: str, name: str) -> None:
        self._roster.source_of[name] = source
        self._waiting[source].discard(name)

    def _allowed(
        self, source: str, found: Found, coming: Mapping[Origin, InstanceSpec]
    ) -> InstanceSpec | None:
        """Return the spec of a server if no other has its name or address; else log why and return None.

        `coming` are the servers that join together with it, by address.
        """
        roster, name = self._roster, found.name
        try:
            spec = roster.resolve(found, found.model)
            if is_special(host := urlsplit(spec.url).hostname or ""):
                raise ConfigError(f"url: expected the address of a server, got {host}")
        except InputError as error:
            self._tell_once(source, name, Event.DISCOVERY_FAILED, f"{name}: {error}")
            return None
        if roster.spec(name) is not None and self._roster.source_of.get(name) not in (source, ""):
            self._tell_once(source, name, Event.DISCOVERY_CONFLICT, f"{name} is in the fleet already")
            return None
        place = origin(spec.url)
        other = coming[place].name if place in coming else roster.name_at(place)
        if other not in (None, name):
            self._tell_once(source, name, Event.DISCOVERY_CONFLICT, f"{name} has the address of {other}")
            return None
        return spec

    def _tell_once(self, source: str, name: str, event: Event, text: str) -> None:
        if self._told.get((source, name)) != text:
            self._told[source, name] = text
            tell(logger, event, "%s: %s", source, text, source=source, instance=name)


class Registration(InstanceTable, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An instance as it registers itself: `model` "" if it names none; it holds for `ttl_s` seconds."""

    model: str = ""
    ttl_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None


def read_registration(table: Mapping[str, Any]) -> Registration:
    for key in ("profile", "api_key_file", "api_key_env", "ca_file"):
        # A right to register is no right to learn about this machine.
        if table.get(key) is not None:
            raise ConfigError(f"{key}: expected none, only the fleet file may name files and variables")
    instance = convert(table, Registration)
    if instance.url is None:
        raise ConfigError("url: expected a value, but the key is missing")
    return instance


async def addresses(url: str) -> list[str]:
    host = urlsplit(url).hostname
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise ConfigError(f"url: expected a host with an address, got {host!r}, which has none") from error
    return [str(sockaddr[0]) for *_, sockaddr in found]
