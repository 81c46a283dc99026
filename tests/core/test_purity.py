"""Scoring reads: the same numbers in any order, subset and repetition, and what comes later is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers import FAST, make_scheduler, request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.core.objective import ServiceClass
from hetlb.core.policies.groups import LARGEST_WHOLE
from hetlb.core.policies.hetlb import NOT_LOOKED_AT
from hetlb.core.policies.registry import POLICIES
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import Candidate, Capacity, Command, Dispatch, EngineSample, Lease, Outcome, Request

#: Policies whose score is of an instance among the others: its turn or place, or a draw.
AMONG_OTHERS = {"rr", "random", "p2c", "peak-ewma", "single"}
CLASSES = (
    ServiceClass(),
    ServiceClass("fast", ttft_s=0.5, tpot_s=0.03),
    ServiceClass("batch", background=True),
)
#: Gap to the event before, prompt, cap of the answer, sequences, prefix, class; or an event of a lease.
ARRIVALS = st.tuples(
    st.sampled_from((0.0, 0.01, 0.3, 4.0)), st.integers(1, 3000), st.integers(1, 400),
    st.sampled_from((1, 1, 1, 4)), st.sampled_from(("", "x", "y")), st.sampled_from(CLASSES),
)  # fmt: skip
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
        scheduler.check_integrity()
        return said


def scored(scheduler: Scheduler, asked: Request, order: list[int], now: float) -> dict[str, Candidate]:
    """Candidates of some instances in an order; draws are taken back."""
    placement, instances = scheduler.placement, scheduler.instances
    draws = scheduler._rng.getstate()
    ctx = placement.context(asked, 60.0, 500, now, None)
    chosen = [instances[i] for i in order]
    placement.policy.choose(ctx, chosen)
    scheduler._rng.setstate(draws)
    candidates = placement.policy.score(ctx, chosen)
    scheduler._rng.setstate(draws)
    return {each.instance: each for each in candidates}


@settings(max_examples=30, deadline=None)
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
                assert (each.terms, each.weights, each.forecast) == (
                    other.terms, other.weights, other.forecast
                )  # fmt: skip
                finite = max(each.score, other.score) < float("inf")  # a shorter prefix than others have
                if policy not in AMONG_OTHERS and each.eligible and other.eligible and finite:
                    assert each.score == other.score
        if policy not in AMONG_OTHERS:
            scheduler.explain(asked, 60.0, later)

    watched, left_alone = Run(policy, look), Run(policy, lambda scheduler, now: None)
    for event in events:
        assert watched.tell(event) == left_alone.tell(event)


@settings(max_examples=8, deadline=None)
@given(
    st.integers(LARGEST_WHOLE + 1, 300),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 300)), min_size=1, max_size=60),
    st.integers(1, 3),
)
def test_the_groups_of_a_large_fleet_rate_and_choose_as_a_look_at_all_of_it_would(
    count: int, asked: list[tuple[int, int]], slots: int
) -> None:
    capacity = Capacity(max_num_seqs=slots, kv_cache_tokens=100_000)
    fleet = [spec(f"i{n}", latency=FAST.scaled(1.0 + n % 5), capacity=capacity) for n in range(count)]
    scheduler = make_scheduler(fleet, "hetlb")
    placement, ready = scheduler.placement, scheduler.fleet.ready["m"]
    for number, (prompt, most) in enumerate(asked):
        one = request(number, prompt=prompt, max_tokens=most)
        ctx = placement.context(one, float(most), 0, 0.0, None)
        whole = {each.instance: each for each in placement.policy.score(ctx, ready.able)}
        choice = placement.policy.choose(ctx, ready.able)
        assert choice is not None
        looked = [each for each in choice.candidates() if each.reason != NOT_LOOKED_AT]
        assert len(looked) < count
        for each in looked:
            assert (each.terms, each.score) == (whole[each.instance].terms, whole[each.instance].score)
        least = min(each.score for each in looked if each.eligible)
        chosen = ready.able[choice.index].name
        assert whole[chosen].score == least
        assert choice.forecast.end_s == whole[chosen].forecast["end_s"]  # type: ignore[index]
        scheduler.on_arrival(one, 0.0)
