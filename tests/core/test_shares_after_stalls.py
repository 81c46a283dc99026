"""Share of an instance that stood still: virtual time, engines that give each answer a token every 20 ms."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from helpers import all_pairs, make_scheduler, request, spec

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.types import Capacity, Command, Dispatch, Lease, Outcome
from hetlb.tools.sim.integrity import check_scheduler

STEP_S, TOKENS = 0.02, 20
#: Sweeps and scrapes come once in this many steps.
SWEEP, SCRAPE = 25, 50
CAPACITY = Capacity(kv_cache_tokens=10**7, kv_tokens_per_request=10**7, max_num_seqs=64)


class Fleet:
    """Two engines with a scheduler; the first one, a, stands still in `stops` (begin and end, s)."""

    def __init__(
        self, policy: str, rate: float, stops: Sequence[tuple[float, float]], *, profiled: bool, seed: int = 1
    ) -> None:
        specs = [spec(name, capacity=CAPACITY, slower=1.5) for name in "ab"]
        if not profiled:
            specs = [spec(name, capacity=CAPACITY, latency=None) for name in "ab"]
        self.scheduler = make_scheduler(specs, policy)
        self.rng, self.rate, self.stops = random.Random(seed), rate, stops
        self.now, self.step, self.number = 0.0, 0, 0
        self.next_at = 0.0
        #: Running leases with the tokens of each so far; tokens by engine, times of the newest.
        self.running: dict[Lease, int] = {}
        self.generated = {"a": 0, "b": 0}
        self.tokens_at: dict[str, float] = {}
        #: Arrival of each request without a byte, the longest wait for one, and whole answers (time, engine).
        self.waits: dict[int, float] = {}
        self.longest_s = 0.0
        self.ended: list[tuple[float, str]] = []

    def take(self, commands: Sequence[Command]) -> None:
        for each in commands:
            if isinstance(each, Dispatch):
                self.running[each.lease] = 0

    def stands(self) -> bool:
        return any(begin <= self.now < end for begin, end in self.stops)

    def run(self, until: float) -> None:
        while self.now < until:
            self.step += 1
            self.now = now = self.step * STEP_S
            while self.next_at <= now:
                self.number += 1
                self.waits[self.number] = now
                self.take(
                    self.scheduler.on_arrival(request(self.number, max_tokens=None, streamed=True), now)
                )
                self.next_at += self.rng.expovariate(self.rate)
            self.tokens()
            if self.step % SCRAPE == 0:
                for each in self.scheduler.instances:
                    sample = EngineSample(each.sequences, 0, 0.01, generated=self.generated[each.name])
                    self.take(self.scheduler.on_scrape(each.name, sample, now))
            if self.step % SWEEP == 0:
                self.take(self.scheduler.on_sweep(self.tokens_at, now))
                for lease in self.scheduler.failover.stranded(now):
                    commands = self.scheduler.on_stranded(lease, now)
                    if lease.ended:
                        del self.running[lease]
                    self.take(commands)

    def tokens(self) -> None:
        """Give every answer a token."""
        stands = self.stands()
        for lease in list(self.running):
            if (lease.instance == "a" and stands) or lease not in self.running:
                continue
            self.running[lease] += 1
            self.generated[lease.instance] += 1
            self.tokens_at[lease.instance] = self.now
            if self.running[lease] == 1:
                self.longest_s = max(self.longest_s, self.now - self.waits.pop(lease.request.id))
                self.take(self.scheduler.on_first_token(lease, self.now))
            elif self.running[lease] == TOKENS:
                del self.running[lease]
                lease.output_tokens = TOKENS
                self.ended.append((self.now, lease.instance))
                self.take(self.scheduler.on_lease_ended(lease, Outcome.OK, self.now))

    def share(self, since: float, until: float) -> float:
        """Return the share of a in the answers that ended then."""
        names = [name for at, name in self.ended if since <= at < until]
        return names.count("a") / max(1, len(names))


STOP = (60.0, 90.0)
POLICIES_OF_TWO = sorted(POLICIES)


@pytest.mark.parametrize(
    ("rate", "profiled", "seed"), all_pairs([0.5, 2.5, 14.0, 40.0], [True, False], [1, 2])
)
def test_it_has_its_share_again_after_half_a_minute(rate: float, profiled: bool, seed: int) -> None:
    fleet = Fleet("hetlb", rate, [STOP], profiled=profiled, seed=seed)
    fleet.run(150.0)
    usual = fleet.share(10.0, 60.0)
    assert fleet.share(70.0, 90.0) == 0.0
    assert fleet.share(100.0, 130.0) >= 0.6 * usual
    assert fleet.share(120.0, 150.0) >= 0.6 * usual
    assert fleet.longest_s <= 5.0
    check_scheduler(fleet.scheduler)


@pytest.mark.parametrize("policy", POLICIES_OF_TWO)
def test_so_it_is_under_every_policy(policy: str) -> None:
    fleet = Fleet(policy, 14.0, [STOP], profiled=False)
    fleet.run(150.0)
    assert fleet.share(120.0, 150.0) >= 0.7 * fleet.share(10.0, 60.0)
    assert fleet.longest_s <= 5.0


@pytest.mark.parametrize(("rate", "profiled"), [(2.5, True), (8.0, False)])
def test_a_hundred_stalls_by_chance_cost_no_share_for_more_than_ten_seconds(
    rate: float, profiled: bool
) -> None:
    rng, stops, now = random.Random(5), [], 20.0
    for _ in range(100):
        length = rng.uniform(0.5, 3.0)
        stops.append((now, now + length))
        now += length + rng.uniform(3.0, 15.0)
    fleet = Fleet("hetlb", rate, stops, profiled=profiled)
    fleet.run(now + 70.0)
    usual = fleet.share(0.0, 20.0)
    assert fleet.share(20.0, now) >= 0.7 * usual, "while they last"
    assert fleet.share(now + 10.0, now + 60.0) >= 0.9 * usual
    assert fleet.longest_s <= 5.0
