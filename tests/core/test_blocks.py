"""A decision over blocks of a large fleet is the one that a look at each instance makes."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
from helpers import make_scheduler, spec

from hetlb.balancer.core.blocks import Block
from hetlb.balancer.core.demand import LEAST_FLEET
from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.policies.hetlb import Evaluation, Hetlb
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Dispatch, InstanceSpec, Lease, Outcome, Request
from hetlb.tools.sim.integrity import check_scheduler


class Fleet:
    """A large fleet under random traffic."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        kinds = [
            lambda name: InstanceSpec(name, "m"),
            lambda name: spec(name, slower=1.0, capacity=Capacity(max_num_seqs=8, kv_cache_tokens=60_000)),
            lambda name: spec(name, slower=1.5, capacity=Capacity(max_num_seqs=64, kv_cache_tokens=200_000)),
            lambda name: spec(name, slower=rng.uniform(1.0, 1.3)),
        ]
        share = [rng.random() ** 2 for _ in kinds]
        specs = [rng.choices(kinds, share)[0](f"i{n}") for n in range(rng.randint(LEAST_FLEET, 110))]
        self.scheduler: Scheduler = make_scheduler(specs, "hetlb")
        self.now, self.number = 0.0, 0
        self.leases: list[Lease] = []
        self.load = rng.choice((5, 40, 300))
        self.glanced = self.tries = 0

    def compare(self, request: Request) -> None:
        """Decide over blocks, and once more without them."""
        placement = self.scheduler.placement
        ready = self.scheduler.fleet.ready["m"]
        choices = placement.able(request, ready, self.now)
        ctx = placement.context(request, 50.0, 0, self.now)
        ctx.restraints = choices.restraints
        ctx.shares = ctx.held is not None
        policy = cast("Hetlb", placement.policy)
        fast = policy.evaluate(ctx, choices.instances, True)
        answer_s = ctx.answer_s
        if fast.glance is None:
            return
        self.glanced += 1
        blocks, fast.fleet.blocks = fast.fleet.blocks, None
        full = policy.evaluate(ctx, choices.instances, True)
        fast.fleet.blocks = blocks
        found, expected = fast.glance.found, full.best()
        assert found is not None
        assert expected is not None
        assert (found.index, found.score, answer_s) == (expected.index, expected.score, ctx.answer_s)
        if found.instance.spec.latency is None and found.instance.speed.seen:
            self.tries += 1
            assert fast.tried(found).index == full.tried(expected).index
        if self.rng.random() < 0.05:
            assert documents(fast) == documents(full)
        assert blocks is not None
        for block in blocks.at(self.now):
            anew = Block(blocks.members[block.first : block.first + len(block.seen)], block.first, self.now)
            assert figures(block) == figures(anew)

    def arrive(self) -> None:
        rng = self.rng
        self.number += 1
        keys = ((f"k{rng.randrange(3)}", 400),) if rng.random() < 0.2 else ()
        prompt = 500 if keys else int(rng.expovariate(1 / 300)) + 1
        request = Request(self.number, "m", prompt, prefix_keys=keys, streamed=rng.random() < 0.5)
        self.compare(request)
        self.take(self.scheduler.on_arrival(request, self.now))

    def take(self, commands: list[Any]) -> None:
        self.leases += [each.lease for each in commands if isinstance(each, Dispatch)]

    def step(self) -> None:
        rng, scheduler, now = self.rng, self.scheduler, self.now
        kind = rng.random()
        if kind < 0.5 and len(self.leases) < self.load:
            self.arrive()
        elif kind < 0.9 and self.leases:
            lease = rng.choice(self.leases)
            if lease.first_token_at is None and rng.random() < 0.7:
                self.take(scheduler.on_first_token(lease, now))
            else:
                self.leases.remove(lease)
                lease.output_tokens = rng.choice((1, 20, 200))
                lost = rng.random() < 0.03
                outcome = Outcome.BROKEN_STREAM if lost else Outcome.OK
                self.take(scheduler.on_lease_ended(lease, outcome, now))
        elif kind < 0.97:
            instance = rng.choice(scheduler.instances)
            running = instance.sequences + rng.choice((0, 0, 5))
            sample = EngineSample(running=running, waiting=0, kv_usage=rng.random() / 4)
            self.take(scheduler.on_scrape(instance.name, sample, now))
        else:
            self.take(scheduler.on_tick(now))
            self.take(scheduler.on_sweep({}, now))
        self.now += rng.choice((0.0, 0.001, 0.02, rng.expovariate(1.0)))


def documents(evaluation: Evaluation) -> list[dict[str, Any]]:
    return [each.document() for each in evaluation()]


def figures(block: Block) -> list[object]:
    return [getattr(block, name) for name in dir(block) if not name.startswith("_")]


@pytest.mark.parametrize("seed", range(12))
def test_a_choice_over_blocks_is_the_choice_over_all(seed: int) -> None:
    fleet = Fleet(seed)
    for _ in range(400):
        fleet.step()
    assert fleet.glanced > 20
    check_scheduler(fleet.scheduler)
