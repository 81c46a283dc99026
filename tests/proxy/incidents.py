"""Incidents of a small fleet, as the scheduler and what ended lately show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers import make_scheduler, request, spec
from proxy.rows import ended

from hetlb.balancer.admin.fleet_status import pools, status
from hetlb.balancer.core.facts import AdminStateSet, EngineSample, Probed, ProbeResult
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import AdminState, Capacity, Dispatch, Lease, Outcome
from hetlb.balancer.telemetry.recent import Recent

SLOTS = 8


class Watched:
    """A scheduler of three servers, the requests that ended, and the queue as it was seen."""

    def __init__(self, names: str = "abc", *, slots: int | None = SLOTS) -> None:
        capacity = Capacity(kv_cache_tokens=10**7, kv_tokens_per_request=10**7, max_num_seqs=slots)
        self.scheduler: Scheduler = make_scheduler([spec(name, capacity=capacity) for name in names], "hetlb")
        self.recent = Recent()
        self.leases: list[Lease] = []
        self.number = 0
        self.now = 100.0
        self.reload_refused = ""

    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.number += 1
            commands = self.scheduler.on_arrival(request(self.number), self.now)
            self.leases += [each.lease for each in commands if isinstance(each, Dispatch)]

    def end(self, count: int, outcome: Outcome = Outcome.OK, name: str = "") -> None:
        for lease in [each for each in self.leases if name in ("", each.instance)][:count]:
            self.leases.remove(lease)
            lease.output_tokens, lease.mark = 20, None  # its time teaches nothing about speed
            self.recent.finished(ended(self.now, instance=lease.instance, tokens=20, outcome=outcome))
            if outcome is Outcome.OK:
                self.scheduler.on_first_token(lease, self.now)
                lease.first_mark = None
            for each in self.scheduler.on_lease_ended(lease, outcome, self.now, retry=False):
                if isinstance(each, Dispatch):
                    self.leases.append(each.lease)

    def refuse(self, name: str) -> None:
        self.scheduler.on_instance(Probed(name, ProbeResult.REFUSED, "connection refused"), self.now)

    def look(self) -> dict[str, Any]:
        self.recent.sample(self.scheduler, self.now)
        return status(self.scheduler, pools(self.scheduler), self.recent, self.now, self.reload_refused)


def _hung(fleet: Watched) -> None:
    fleet.arrive(9)
    for _ in range(20):
        fleet.now += 0.5
        fleet.scheduler.on_sweep(dict.fromkeys("bc", fleet.now), fleet.now)


def _slow(fleet: Watched) -> None:
    slow = fleet.scheduler.fleet.instances["a"]
    slow.speed.factor, slow.speed.seen, slow.speed.slow = 3.0, True, True


def _grows(fleet: Watched) -> None:
    for _ in range(60):
        fleet.arrive(12)
        fleet.end(6)
        fleet.now += 1.0
        fleet.look()


def _storm(fleet: Watched) -> None:
    fleet.arrive(12)
    fleet.end(12, Outcome.UPSTREAM_REFUSED)


def _drained(fleet: Watched) -> None:
    fleet.scheduler.on_instance(AdminStateSet("a", AdminState.DRAIN), fleet.now)


def _stale(fleet: Watched) -> None:
    fleet.scheduler.on_scrape("a", EngineSample(0, 0, 0.0), fleet.now)
    fleet.now += 31.0


def _down(fleet: Watched) -> None:
    for name in "abc":
        fleet.refuse(name)


def _hog(fleet: Watched) -> None:
    for number in range(1, 90):
        tenant = "y" if number > 80 else "x"
        fleet.scheduler.on_arrival(request(number, tenant=tenant), fleet.now)


def _not_reloaded(fleet: Watched) -> None:
    fleet.reload_refused = "fleet.yaml: models: expected a list"


def _full(fleet: Watched) -> None:
    fleet.recent.own["clients_refused"] = fleet.now - 5.0, "100 connections, ulimit -n"


def _unlogged(fleet: Watched) -> None:
    fleet.recent.own["log_lost"] = fleet.now - 5.0, "No space left on device"


#: Each with the state and the cause that it makes.
INCIDENTS: dict[str, tuple[Callable[[Watched], None], str, str]] = {
    "dead": (lambda fleet: fleet.refuse("a"), "degraded", "dead"),
    "hung": (_hung, "degraded", "stalled"),
    "slow": (_slow, "degraded", "slow"),
    "saturated": (_grows, "degraded", "long_wait"),
    "client storm": (_storm, "busy", "client_errors"),
    "drained": (_drained, "well", "drained"),
    "refused reload": (_not_reloaded, "degraded", "reload_refused"),
    "no room for clients": (_full, "degraded", "clients_refused"),
    "full disk": (_unlogged, "busy", "log_lost"),
    "stale report": (_stale, "busy", "stale_report"),
    "all down": (_down, "down", "all_down"),
    "tenant hog": (_hog, "busy", "tenant_hog"),
}
