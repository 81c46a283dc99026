"""Requests at the engines that this picker did not send: of a picker before it, of Envoy alone, of others.

The engines' own figures say how many there are. Each is booked as a lease, so that the scheduler knows of the
load; the leases end as the figures fall. What is ours already is not counted twice: only what is above it in
two looks in a row, or in the first look of all.
"""

from __future__ import annotations

from typing import Final

from hetlb.balancer.core.journal import Booked
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command, EngineSample, Lease, Outcome, Request

#: Excess of an engine's figure over the ledger taken for noise, as the two are of different moments:
#: requests, and a share of the own ones.
_SLACK_REQUESTS: Final = 1
_SLACK_SHARE: Final = 0.05
#: Tokens of a prompt if the engine does not say how full its cache is.
_USUAL_PROMPT_TOKENS: Final = 512
#: Maximum foreign leases booked one by one. The work of an unknown request is the paper's, at its own
#: constant.
_MOST_FOREIGN_LEASES: Final = 4096


class ForeignLoad:
    """Leases of other requests than this picker's, by instance."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._leases: dict[str, list[Lease]] = {}
        self._seen: dict[str, int] = {}
        self._next = -1

    def __len__(self) -> int:
        return sum(map(len, self._leases.values()))

    def look(self, name: str, sample: EngineSample, now: float) -> list[Command]:
        """Book or give back leases for the excess of an engine's figures, which the scheduler has read."""
        if sample.running is None and sample.waiting is None:
            return []
        instance = self._scheduler.fleet.instances.get(name)
        if instance is None:
            return self.gone(name, now)
        booked = self._leases.setdefault(name, [])
        own = instance.sequences - len(booked)
        stated = (sample.running or 0) + (sample.waiting or 0)
        foreign = min(_MOST_FOREIGN_LEASES, stated - own)
        if foreign <= _SLACK_REQUESTS + _SLACK_SHARE * own and (own or not foreign):
            foreign = 0
        foreign, self._seen[name] = min(foreign, self._seen.get(name, foreign)), foreign
        if foreign < len(booked):
            return self._give_back(name, len(booked) - foreign, now)
        new = foreign - len(booked)
        if new:
            used = (sample.kv_usage or 0.0) * instance.kv_cache_tokens
            used -= instance.occupancy.expected_kv_tokens(now)
            prompt = max(1, int(used / new)) if used > 0 else _USUAL_PROMPT_TOKENS
            model = instance.served[0] if instance.served else instance.spec.model
            for _ in range(new):
                request = Request(self._next, model, prompt)
                self._next -= 1
                predicted = self._scheduler.predictor.predict(request)
                work_s = instance.paper_work(request, predicted)[2]
                live = Booked(0, name, request, round(work_s * 1e9), predicted, begun=True)
                lease = self._scheduler.restore(live, now, own=False)
                assert lease is not None, "expected an instance that was looked up"
                booked.append(lease)
        return []

    def gone(self, name: str, now: float) -> list[Command]:
        """Forget the load of others at an engine that left or answers no more."""
        self._seen.pop(name, None)
        return self._give_back(name, len(self._leases.get(name, ())), now)

    def _give_back(self, name: str, count: int, now: float) -> list[Command]:
        commands: list[Command] = []
        leases = self._leases.get(name, [])
        for _ in range(count):
            lease = leases.pop(0)
            commands += self._scheduler.on_lease_ended(lease, Outcome.CLIENT_GONE, now, retry=False)
        if not leases:
            self._leases.pop(name, None)
        return commands
