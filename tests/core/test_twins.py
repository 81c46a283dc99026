"""Two names of one process are found by its counts of tokens, two servers of one script never."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from helpers import all_pairs, dispatched, make_scheduler, request, spec

from hetlb.balancer.admin.rare_causes import of_processes
from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Lease, Outcome

TOKEN_S = 0.02
BEGAN = 1.5e9


@dataclass
class Process:
    """An engine: tokens of ended answers, begins and lengths of running ones."""

    cpu_s: float = 40.0
    done: int = 0
    running: list[tuple[float, int]] = field(default_factory=list)

    def begins(self, tokens: int, now: float) -> None:
        self.running.append((now, tokens))

    def sample(self, now: float) -> EngineSample:
        left = []
        for at, tokens in self.running:
            if now - at >= tokens * TOKEN_S:
                self.done += tokens
            else:
                left.append((at, tokens))
        self.running = left
        answered = self.done + sum(int((now - at) / TOKEN_S) for at, _ in left)
        cpu_s = self.cpu_s + 0.3 * now + 1e-3 * answered
        return EngineSample(len(left), 0, 0.1, Capacity(), answered=answered, began=BEGAN, cpu_s=cpu_s)


def run(
    scheduler: Scheduler,
    processes: dict[str, Process],
    rng: random.Random,
    *,
    rate: float,
    seconds: float,
    others: float = 0.0,
    length: int = 0,
) -> float | None:
    """Send requests at a rate, scrape each second; return when one process is said first, None for never.

    `others`: requests of a second proxy at each instance, as a multiple of hetlb's own.
    """
    now, number, ends = 0.0, 0, list[tuple[float, Lease]]()
    scrapes = {"a": 0.3, "b": 0.31}
    while now < seconds:
        now += rng.expovariate(rate)
        while (at := min(scrapes.values())) <= now:
            name = min(scrapes, key=lambda each: scrapes[each])
            for end, lease in [each for each in ends if each[0] <= at]:
                scheduler.on_first_token(lease, end)
                scheduler.on_lease_ended(lease, Outcome.OK, end)
            ends = [each for each in ends if each[0] > at]
            scheduler.on_scrape(name, processes[name].sample(at), at)
            scrapes[name] += 1.0 + 0.02 * rng.random()
            if of_processes(scheduler.instances):
                return at
        tokens = length or rng.randint(4, 120)
        lease = dispatched(scheduler.on_arrival(request(number), now))
        lease.output_tokens = tokens
        processes[lease.instance].begins(tokens, now)
        ends.append((now + tokens * TOKEN_S, lease))
        number += 1
        for process in set(map(id, processes.values())) if others else ():
            if rng.random() < others / 2.0:
                found = next(each for each in processes.values() if id(each) == process)
                found.begins(length or rng.randint(4, 120), now)
    return None


@pytest.mark.parametrize("length", [0, 20])
@pytest.mark.parametrize("rate", [1.0, 10.0, 60.0])
@pytest.mark.parametrize("seed", range(3))
def test_two_names_of_one_process_are_found_under_load(seed: int, rate: float, length: int) -> None:
    """Load never stops: both counts move at every scrape."""
    process = Process()
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    at = run(
        scheduler, {"a": process, "b": process}, random.Random(seed), rate=rate, seconds=120.0, length=length
    )
    assert at is not None
    assert at <= 14.0 + 35.0 / rate


@pytest.mark.parametrize(
    ("seed", "policy", "others", "length"),
    all_pairs(range(4), ["rr", "least-requests"], [0.0, 1.0], [0, 20]),
)
def test_two_servers_of_one_script_are_two(seed: int, policy: str, others: float, length: int) -> None:
    """They began at the same tick and have equal load, of a second proxy as well."""
    scheduler = make_scheduler([spec("a"), spec("b")], policy)
    processes = {"a": Process(), "b": Process(40.0 + others)}  # no two starts take the same time
    rng = random.Random(seed)
    assert run(scheduler, processes, rng, rate=10.0, seconds=200.0, others=others, length=length) is None


def test_another_process_at_one_name_is_no_twin() -> None:
    process = Process()
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    assert run(scheduler, {"a": process, "b": process}, random.Random(1), rate=10.0, seconds=120.0)
    scheduler.on_scrape("b", EngineSample(0, 0, 0.1, answered=5, began=BEGAN + 9.0, cpu_s=1.0), 130.0)
    assert not of_processes(scheduler.instances)
