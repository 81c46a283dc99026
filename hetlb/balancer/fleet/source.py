"""The interface of a source of instances, and the task that keeps one running."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from hetlb.balancer.config.fleet_tables import InstanceTable
from hetlb.balancer.telemetry.events import Event, tell
from hetlb.errors import HetlbError
from hetlb.tasks import ended

logger = logging.getLogger("hetlb.discovery")

#: Seconds after a failure until a source is asked again, twice as long each time, and the cap.
BACKOFF_S = 0.5
BACKOFF_CAP_S = 15.0


class Found(InstanceTable, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An instance that stands in no fleet file. `model` is "" if none is named."""

    name: str
    url: str
    model: str = ""


#: Takes all servers that a source knows now.
Publish: TypeAlias = Callable[[Sequence[Found]], None]


class SourceFailedError(HetlbError):
    """A source could not be read."""


class Source(Protocol):
    """One place that knows servers. `name` stands in events."""

    @property
    def name(self) -> str: ...

    async def run(self, publish: Publish) -> None:
        """Publish all servers at the beginning and after each change, until cancelled.

        Raises `SourceFailedError` or `OSError` where the source cannot be read: `run` is then called again,
        and what was published last stays.
        """


class Sources:
    """Runs the sources of a fleet; each one's servers go to `publish` with its name."""

    def __init__(self, sources: Sequence[Source], publish: Callable[[str, Sequence[Found]], None]) -> None:
        self._sources = sources
        self._publish = publish
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, most_s: float) -> None:
        """Begin; returns when each source has published once, after `most_s` at the latest."""
        first = [asyncio.Event() for _ in self._sources]
        self._tasks = [
            asyncio.create_task(self._keep(source, event), name=f"discover {source.name}")
            for source, event in zip(self._sources, first, strict=True)
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                for event in first:
                    await event.wait()

    async def close(self) -> None:
        await ended(*self._tasks)
        self._tasks.clear()

    async def _keep(self, source: Source, first: asyncio.Event) -> None:
        told, pause_s = "", BACKOFF_S

        def publish(found: Sequence[Found]) -> None:
            nonlocal told, pause_s
            told, pause_s = "", BACKOFF_S
            self._publish(source.name, found)
            first.set()

        while True:
            try:
                await source.run(publish)
            except (SourceFailedError, OSError, TimeoutError) as error:
                text = str(error) or type(error).__name__
                if text != told:
                    told = text
                    tell(
                        logger, Event.DISCOVERY_FAILED, "%s: %s; its last list stays in force", source.name,
                        text, source=source.name,
                    )  # fmt: skip
            except Exception:  # a fault in one source ends neither the others nor the proxy
                tell(
                    logger, Event.DISCOVERY_FAILED, "%s failed", source.name,
                    exc_info=True, source=source.name,
                )  # fmt: skip
            await asyncio.sleep(pause_s)
            pause_s = min(BACKOFF_CAP_S, 2 * pause_s)
