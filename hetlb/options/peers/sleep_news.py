"""Sleep and wake of instances among the processes of one proxy: one has the right to decide about them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hetlb.balancer.core.facts import SleepSet
from hetlb.balancer.fleet.shared_fleet import SleepWatch
from hetlb.options.peers.hub import locked
from hetlb.options.peers.lease_wire import PeerChange, WireSlept


class FileRight:
    """Right of the process that has the lock of a file, until it ends or releases it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def held(self) -> bool:
        """Return True if this process has the right; a free one is taken."""
        if self._file < 0:
            with contextlib.suppress(OSError):
                self._file = locked(self._path)
        return self._file >= 0

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SleepNews:
    """Tells peers which instances sleep or wake up, and takes over what peers tell."""

    def __init__(self, watch: SleepWatch, folder: Path, tell: Callable[[], object]) -> None:
        self.watch = watch
        watch.share(FileRight(folder / "wake.lock"), tell)

    def take(self) -> list[PeerChange]:
        return list(map(_told, self.watch.take()))

    def live(self, now: float) -> list[PeerChange]:
        return list(map(_told, self.watch.live()))

    def receive(self, peer: str, changes: Sequence[PeerChange], now: float) -> None:
        for each in changes:
            if isinstance(each, WireSlept):
                told = SleepSet(each.instance, each.reason, wake_s=each.wake_s, fault=each.fault)
                self.watch.adopt(told)

    def gone(self, peer: str, now: float) -> None:
        """Do nothing: what a process that ended has begun is begun again by the next one that decides."""


def _told(change: SleepSet) -> WireSlept:
    return WireSlept(change.name, change.reason, change.wake_s, change.fault)
