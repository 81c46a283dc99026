"""Scoring reads: the same numbers in any order, subset and repetition, and what comes later is the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from helpers import examples, make_scheduler, request, spec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.objective import ServiceClass
from hetlb.balancer.core.policies.hetlb import Evaluation
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.policies.score_terms import TERMS
from hetlb.balancer.core.policies.sight import ROOM
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Candidate, Capacity, Command, Dispatch, Lease, Outcome, Request
from hetlb.cli.explain import explained
from hetlb.tools.sim.integrity import check_scheduler

#: Policies whose score is of an instance among the others: its turn or place, or a draw.
AMONG_OTHERS = {"rr", "random", "p2c", "peak-ewma", "single"}
CLASSES = (
    ServiceClass(),
    ServiceClass("fast", ttft_s=0.5, tpot_s=0.03),
    ServiceClass("batch", background=True),
)
#: Terms that count only once no more requests come, or only until then.
AMONG_TERMS = ("finish_s", "coming_s")
#: Gap to the event before, prompt, cap of the answer, sequences, prefix, class; or an event of a lease.
ARRIVALS = st.tuples(
    st.sampled_from((0.0, 0.01, 0.3, 4.0)), st.integers(1, 3000), st.integers(1, 400),
    st.sampled_from((1, 1, 1, 4)), st.sampled_from(("", "x", "y")), st.sampled_from(CLASSES),
)  # fmt: skip
WEIGHTS = tuple(term.weight for term in TERMS)
EVENTS = st.lists(
    st.one_of(ARRIVALS, ARRIVALS, st.sampled_from(("first", "end", "scrape", "fail"))),
    min_size=1,
    max_size=40,
)


class Run:
    """A scheduler that is told events; `looked` is called before each."""

    def __init__(self, policy: str, looked: Callable[[Scheduler, float], None]) -> None:
        slots = Capacity(kv_cache_tokens=20_000, kv_tokens_per_request=20_000, max_num_seqs=6)
        fleet = [spec(f"i{n}", slower=1.0 + n, capacity=slots) for n in range(4)]
        self.scheduler = make_scheduler(fleet, policy, seed=3)
        self._looked = looked
        self._running: list[Lease] = []
        self._now = 0.0
        self._number = 0

    def tell(self, event: object) -> list[object]:
        """What comes of an event, bit by bit."""
        scheduler = self.scheduler
        self._looked(scheduler, self._now)
        commands: list[Command] = []
        if isinstance(event, tuple):
            gap, prompt, most, sequences, key, service = event
            self._now += gap
            self._number += 1
            keys = ((key, prompt),) if key else ()
            asked = request(
                self._number, prompt=prompt, max_tokens=most, sequences=sequences, prefix_keys=keys,
                service=service, streamed=True,
            )  # fmt: skip
            commands = scheduler.on_arrival(asked, self._now)
        elif event == "scrape":
            commands = scheduler.on_scrape("i1", EngineSample(running=2, waiting=0, kv_usage=0.3), self._now)
        elif self._running:
            self._now += 0.2
            lease = self._running[0]
            if event == "first":
                commands = scheduler.on_first_token(lease, self._now)
            else:
                del self._running[0]
                lease.output_tokens = 20 * lease.request.sequences
                outcome = Outcome.OK if event == "end" else Outcome.UPSTREAM_ERROR
                commands = scheduler.on_lease_ended(lease, outcome, self._now)
        said: list[object] = []
        for command in commands:
            if isinstance(command, Dispatch):
                self._running.append(command.lease)
                documents = [each.document() for each in command.candidates]
                said.append((command.request_id, command.lease.instance, command.lease.work_ns, documents))
            else:
                said.append(repr(command))
        check_scheduler(scheduler)
        return said


def scored(scheduler: Scheduler, asked: Request, order: list[int], now: float) -> dict[str, Candidate]:
    """Candidates of some instances in an order; draws are taken back."""
    placement, instances = scheduler.placement, scheduler.instances
    draws = scheduler._rng.getstate()
    ctx = placement.context(asked, 60.0, 500, now)
    chosen = [instances[i] for i in order]
    placement.policy.choose(ctx, chosen)
    scheduler._rng.setstate(draws)
    candidates = placement.policy.score(ctx, chosen)
    scheduler._rng.setstate(draws)
    return {each.instance: each for each in candidates}


def _own_terms(each: Candidate) -> dict[str, float]:
    """Return the terms of the instance alone, without terms for which it matters whether requests come."""
    return {name: seconds for name, seconds in (each.terms or {}).items() if name not in AMONG_TERMS}


def _own_score(each: Candidate) -> float:
    weights, terms = each.weights or {}, each.terms or {}
    return each.score - sum(weights.get(name, 0.0) * terms.get(name, 0.0) for name in AMONG_TERMS)


@settings(max_examples=examples(30), deadline=None)
@given(EVENTS, st.permutations(range(4)), st.integers(1, 4), ARRIVALS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_scoring_changes_nothing_and_an_instance_s_numbers_are_its_own(
    policy: str, events: list[object], order: list[int], count: int, probe: tuple[object, ...]
) -> None:
    _, prompt, most, sequences, key, service = probe
    asked = request(
        999, prompt=prompt, max_tokens=most, sequences=sequences, service=service,
        prefix_keys=((key, prompt),) if key else (),
    )  # fmt: skip

    def look(scheduler: Scheduler, now: float) -> None:
        later = now + 0.05
        whole = scored(scheduler, asked, [0, 1, 2, 3], later)
        again = scored(scheduler, asked, [0, 1, 2, 3], later)
        assert {k: v.document() for k, v in whole.items()} == {k: v.document() for k, v in again.items()}
        for some in (order, order[:count], order[::-1]):
            for name, each in scored(scheduler, asked, some, later).items():
                other = whole[name]
                assert (_own_terms(each), each.weights, each.forecast) == (
                    _own_terms(other), other.weights, other.forecast
                )  # fmt: skip
                finite = max(each.score, other.score) < float("inf")  # a shorter prefix than others have
                if policy not in AMONG_OTHERS and each.eligible and other.eligible and finite:
                    assert _own_score(each) == pytest.approx(_own_score(other), rel=1e-9)
        if policy not in AMONG_OTHERS:
            explained(scheduler, asked, 60.0, later)

    watched, left_alone = Run(policy, look), Run(policy, lambda scheduler, now: None)
    for event in events:
        assert watched.tell(event) == left_alone.tell(event)


@settings(max_examples=examples(25), deadline=None)
@given(EVENTS, ARRIVALS, st.integers(0, 5000), st.booleans(), st.booleans())
@example(
    events=[(0.0, 106, 1, 1, "", CLASSES[0]), (0.0, 1, 1, 1, "", CLASSES[0]), "first"],
    probe=(0.0, 1, 1, 1, "", CLASSES[0]),
    waiting=0,
    stopped=False,
    throttled=False,
)
def test_the_choice_is_the_least_score_and_candidates_stay_what_they_were(
    events: list[object], probe: tuple[object, ...], waiting: int, stopped: bool, throttled: bool
) -> None:
    """Instances without room are rated when people look: later changes must not show."""
    _, prompt, most, sequences, key, service = probe
    asked = request(
        999, prompt=prompt, max_tokens=most, sequences=sequences, service=service,
        prefix_keys=((key, prompt),) if key else (),
    )  # fmt: skip

    numbers = itertools.count(10_000)

    def look(scheduler: Scheduler, now: float) -> None:
        later = now + (100.0 if stopped else 0.05)
        names = [each.name for each in scheduler.instances]
        restraints = dict.fromkeys((names[1], names[2]), "throttled") if throttled else None
        ctx = scheduler.placement.context(asked, 60.0, waiting, later)
        ctx.restraints = restraints
        instances = scheduler.instances
        glanced, rated = Evaluation(ctx, instances, WEIGHTS, True), Evaluation(ctx, instances, WEIGHTS, True)
        found, everyone = glanced.best(), rated.ratings
        able = [each for each in everyone if each.state == ROOM]
        best = min(able, key=lambda each: each.score, default=None)
        assert (found and found.index) == (best and best.index)
        assert (found and found.score) == (best and best.score)
        scheduler.on_arrival(request(next(numbers), prompt=50), later)  # they tell of what was before
        assert [each.document() for each in glanced()] == [each.document() for each in rated()]

    run = Run("hetlb", look)
    for event in events:
        run.tell(event)
