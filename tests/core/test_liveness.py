"""Liveness: below capacity every request is dispatched within a stated time, under every policy.

Time passes in rounds of a second. A fleet of one large and two small instances of 64 places gets bursts of
requests, each burst only when the large instance alone, at half its speed, has had time for the one before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from helpers import MODEL, examples, make_scheduler, request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.core.evidence.table import HealthParams
from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.predictor import OnlinePredictor
from hetlb.balancer.core.types import (
    Capacity,
    Command,
    Dispatch,
    Lease,
    Outcome,
    PassOn,
    Request,
)  # fmt: skip
from hetlb.tools.sim.integrity import check_scheduler

PLACES = 64
#: Rounds that a request takes for each 64 sequences.
ROUNDS = 3
#: Seconds that an instance may be throttled at the start of a burst: busy or starting slowly.
RESTRAINED_S = 5.0
MOST_SEQUENCES = 320
LONGEST_S = ROUNDS * math.ceil(MOST_SEQUENCES / PLACES)


def sized(name: str, max_model_len: int, slower: float) -> object:
    capacity = Capacity(kv_cache_tokens=3_000_000, max_num_seqs=PLACES, max_model_len=max_model_len)
    return spec(name, capacity=capacity, slower=slower)


def rounds_of(asked: Request) -> int:
    return ROUNDS * math.ceil(asked.sequences / PLACES)


@dataclass
class Driver:
    """A driver whose requests take a known number of rounds."""

    policy: str
    now: float = 0.0
    arrived: dict[int, tuple[Request, float]] = field(default_factory=dict)
    running: dict[int, tuple[Lease, float]] = field(default_factory=dict)
    waited_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fleet = [sized("large", 131_072, 1.5), sized("small-a", 8192, 1.0), sized("small-b", 8192, 3.0)]
        self.scheduler = make_scheduler(
            fleet,  # type: ignore[arg-type]
            self.policy,
            predictor=OnlinePredictor(),
            health_params=HealthParams(slow_start_s=RESTRAINED_S),
        )

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            assert isinstance(command, Dispatch), command
            lease = command.lease
            asked, since = self.arrived[command.request_id]
            if command.request_id not in self.waited_s:  # else it is tried again
                self.waited_s[asked.id] = self.now - since
            self.running[lease.id] = (lease, self.now + rounds_of(asked))

    def arrive(self, asked: Request) -> None:
        self.arrived[asked.id] = (asked, self.now)
        self.carry_out(self.scheduler.on_arrival(asked, self.now))

    def restrain(self, how: str) -> None:
        if how == "slow start":
            for began in (self.now, self.now + 0.5):
                sample = EngineSample(began=began)
                self.carry_out(self.scheduler.on_scrape("small-a", sample, self.now))
        elif how == "busy" and self.running:
            lease, _ = self.running[next(iter(self.running))]
            commands = self.scheduler.on_refused(lease, 503, RESTRAINED_S, self.now)
            if commands != [PassOn(lease.request.id, lease)]:
                del self.running[lease.id]
                self.carry_out(commands)

    def round(self) -> None:
        self.now += 1.0
        for lease, ends_at in list(self.running.values()):
            if lease.first_token_at is None:
                self.carry_out(self.scheduler.on_first_token(lease, self.now))
            if ends_at <= self.now:
                del self.running[lease.id]
                lease.output_tokens = lease.request.sequences * (lease.request.max_tokens or 1)
                self.carry_out(self.scheduler.on_lease_ended(lease, Outcome.OK, self.now))
        deadline = self.scheduler.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.carry_out(self.scheduler.on_tick(self.now))


REQUESTS = st.tuples(
    st.sampled_from((100, 2000, 6000, 9000, 60_000)),
    st.one_of(st.just(1), st.integers(1, 32), st.integers(1, MOST_SEQUENCES)),
    st.sampled_from((10, 200, 2000)),
    st.integers(-1, 1),
    st.sampled_from((None, "x", "y")),
    st.booleans(),
)
BURSTS = st.lists(
    st.tuples(st.sampled_from(("", "slow start", "busy")), st.lists(REQUESTS, min_size=1, max_size=30)),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=examples(15))
@given(bursts=BURSTS)
def test_every_request_is_dispatched_in_time(
    policy: str, bursts: list[tuple[str, list[tuple[int, int, int, int, str | None, bool]]]]
) -> None:
    """Within twice what the large instance alone takes for the burst, its restraint, and one request."""
    driver = Driver(policy)
    number = 0
    for how, burst in bursts:
        driver.restrain(how)
        work = 0
        first = number + 1
        for prompt, sequences, output, priority, tenant, generates in burst:
            number += 1
            asked = request(
                number, prompt=prompt, sequences=sequences, max_tokens=output if generates else None,
                priority=priority, tenant=tenant, generates=generates, model=MODEL,
            )  # fmt: skip
            work += min(PLACES, sequences) * rounds_of(asked)
            driver.arrive(asked)
        bound_s = math.ceil(2 * work / PLACES) + LONGEST_S + RESTRAINED_S
        for _ in range(math.ceil(bound_s)):
            driver.round()
            check_scheduler(driver.scheduler)
            if not driver.running and not len(driver.scheduler.queue):
                break
        late = [n for n in range(first, number + 1) if driver.waited_s.get(n, math.inf) > bound_s]
        assert not late, f"not dispatched within {bound_s} s: {late}"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_stream_of_small_requests_does_not_hold_up_a_large_one(policy: str) -> None:
    """300 sequences of one tenant come when every place is taken and hundreds of another's wait."""
    driver = Driver(policy)
    for number in range(1, 701):
        driver.arrive(request(number, prompt=100, max_tokens=50, tenant="small"))
    driver.arrive(request(1000, prompt=100, max_tokens=50, tenant="large", sequences=300))
    for number in range(1001, 3000):
        if number % 60 == 0:
            driver.round()
        driver.arrive(request(number, prompt=100, max_tokens=50, tenant="small"))
        check_scheduler(driver.scheduler)
        if 1000 in driver.waited_s:
            break
    assert driver.waited_s[1000] <= 2 * ROUNDS
