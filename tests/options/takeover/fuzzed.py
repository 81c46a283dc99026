"""Steps of the other process of `--replace`, as a fuzzer gives them."""

from __future__ import annotations

import contextlib

import msgspec
from helpers import make_scheduler, spec

from hetlb.options.remote_leases import RemoteLeases
from hetlb.options.takeover.offer import DECODER, Step
from hetlb.tools.sim.integrity import check_scheduler


def takeover(data: bytes) -> None:
    """Steps of the other process at the socket of `--replace`: read or refused, and bounded."""
    with contextlib.suppress(ValueError, msgspec.DecodeError):
        changes = [each for each in DECODER.decode(data) if not isinstance(each, Step)]
        assert len(changes) <= len(data)
        remote = RemoteLeases(make_scheduler([spec("a")]), arrived=False)
        remote.receive("old", changes, 0.0)
        remote.gone("old", 0.0)
        check_scheduler(remote._scheduler)
        assert remote._scheduler.in_flight == 0


TARGETS = {"takeover": takeover}
