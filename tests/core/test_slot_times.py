"""Slots of an engine without figures, learnt from whole answers: each run is a server in virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from helpers import MODEL, make_scheduler, request
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.admin.beliefs import believed
from hetlb.balancer.core.facts import CapacityLearned, EngineSample
from hetlb.balancer.core.slot_times import CANDIDATES, SlotTimes
from hetlb.balancer.core.types import Capacity, Dispatch, InstanceSpec, Lease, Outcome

STEP_S, PROMPT_S = 0.02, 0.1


class Server:
    """An engine of some slots that answers in the order of arrival, and shows nothing but whole answers."""

    def __init__(self, slots: int, stated: bool) -> None:
        self.slots = slots
        capacity = Capacity(max_num_seqs=slots) if stated else Capacity()
        self.scheduler = make_scheduler([InstanceSpec("a", MODEL, capacity=capacity)], "hetlb")
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count(1)
        self._waiting: list[Lease] = []
        self._running = 0
        self._arrived: dict[int, tuple[float, int]] = {}
        #: Arrival, time taken and tokens of each answer.
        self.answers: list[tuple[float, float, int]] = []
        self.at(0.5, self._sweep)

    def at(self, when: float, do: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (when, next(self._number), do, args))

    def arrive(self, tokens: int) -> None:
        number = next(self._number)
        self._arrived[number] = self.now, tokens
        self._obey(self.scheduler.on_arrival(request(number, max_tokens=400), self.now))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, do, args = heapq.heappop(self._events)
            do(*args)
        self.now = until

    def _sweep(self) -> None:
        self._obey(self.scheduler.on_sweep({}, self.now))
        self._obey(self.scheduler.on_tick(self.now))
        self.at(self.now + 0.5, self._sweep)

    def _obey(self, commands: list[Any]) -> None:
        for command in commands:
            assert isinstance(command, Dispatch)
            self._waiting.append(command.lease)
        while self._waiting and self._running < self.slots:
            lease = self._waiting.pop(0)
            self._running += 1
            tokens = self._arrived[lease.request.id][1]
            self.at(self.now + PROMPT_S + STEP_S * tokens, self._ended, lease, tokens)

    def _ended(self, lease: Lease, tokens: int) -> None:
        self._running -= 1
        lease.output_tokens = tokens
        at = self._arrived[lease.request.id][0]
        self.answers.append((at, self.now - at, tokens))
        self._obey(self.scheduler.on_first_token(lease, self.now))
        self._obey(self.scheduler.on_lease_ended(lease, Outcome.OK, self.now))


def load(server: Server, rng: random.Random, seconds: float) -> float:
    """Send at 65 % of what it can do; return the mean time of an answer."""
    begin, when = server.now, server.now
    while (when := when + rng.expovariate(0.65 * server.slots / (PROMPT_S + STEP_S * 120))) < begin + seconds:
        server.at(when, server.arrive, rng.randint(40, 200))
    server.run(begin + seconds + 60.0)
    took_s = [took for at, took, _ in server.answers if at >= begin]
    return sum(took_s) / len(took_s)


@pytest.mark.parametrize("slots", [1, 4, 8])
def test_a_burst_shows_the_slots_and_spoils_nothing(slots: int) -> None:
    found = {}
    for stated in (True, False):
        rng, server = random.Random(slots), Server(slots, stated)
        load(server, rng, 200.0)
        begin = server.now
        for _ in range(24 * slots):
            server.arrive(rng.randint(40, 200))
        server.run(begin + 600.0)
        tokens = sum(each for at, _, each in server.answers if at == begin)
        rate = tokens / max(took for at, took, _ in server.answers if at == begin)
        found[stated] = rate, load(server, random.Random(7), 200.0)
        instance = server.scheduler.instances[0]
        if not stated:
            document = believed(instance, 1.0, server.now)["max_num_seqs"]
            assert (document["value"], document["source"]) == (slots, "learnt")
    assert found[False][0] >= 0.9 * found[True][0]
    assert found[False][1] <= 1.1 * found[True][1]


def test_answers_one_after_the_other_show_no_slots() -> None:
    server = Server(1, stated=False)
    for _ in range(11):
        server.arrive(60)
        server.run(server.now + 10.0)
    for _ in range(40):
        server.arrive(60)
    assert server.scheduler.instances[0].sequences <= 6


def test_answers_in_turn_keep_a_burst_away_before_the_slots_are_learnt() -> None:
    server = Server(1, stated=False)
    for _ in range(3):
        server.arrive(60)
    server.run(server.now + 30.0)
    assert len(server.answers) == 3
    for _ in range(40):
        server.arrive(60)
    assert server.scheduler.instances[0].sequences == 1


def test_prompts_without_answers_open_the_slots_of_an_engine_without_figures() -> None:
    """Embeddings show no tokens; none of them comes late."""
    scheduler = make_scheduler([InstanceSpec("a", MODEL)], "hetlb")
    commands: list[Any] = []
    for i in range(400):
        commands += scheduler.on_arrival(request(i, generates=False), 0.0)
    now, most = 0.0, 0
    while running := [each.lease for each in commands if isinstance(each, Dispatch)]:
        most, now, commands = max(most, len(running)), now + 0.05, []
        for lease in running:
            commands += scheduler.on_first_token(lease, now)
            commands += scheduler.on_lease_ended(lease, Outcome.OK, now)
    assert most > 100


def test_an_engine_with_room_for_all_is_not_held_back() -> None:
    rng, server = random.Random(3), Server(256, stated=False)
    for _ in range(400):
        server.arrive(rng.randint(40, 200))
        server.run(server.now + 0.1)
    server.run(server.now + 60.0)
    assert len(server.answers) == 400
    assert server.scheduler.instances[0].max_num_seqs == 256


@given(
    slots=st.sampled_from([each for each in CANDIDATES if each <= 16]),
    lengths=st.lists(st.integers(20, 200), min_size=80, max_size=80),
    at_once=st.integers(2, 3),
)
def test_the_slots_of_a_fifo_are_found_whatever_the_lengths(
    slots: int, lengths: list[int], at_once: int
) -> None:
    """Closed loop: first few requests, then `at_once` times as many as there are slots."""
    times, now, believed_slots = SlotTimes(), 0.0, 0
    waiting: list[int] = []
    running: list[tuple[float, int]] = []
    sent = 0
    while sent < len(lengths) or running:
        level = 1 if sent < 12 else at_once * slots
        while sent < len(lengths) and len(waiting) + len(running) < level:
            times.begin(sent, now)
            waiting.append(sent)
            sent += 1
        while waiting and len(running) < slots:
            number = waiting.pop(0)
            heapq.heappush(running, (now + STEP_S * lengths[number], number))
        now, number = heapq.heappop(running)
        times.end(number, now)
        tokens = lengths[number]
        believed_slots = times.answered(number, lambda _, n=tokens: STEP_S * n, now) or believed_slots  # type: ignore[misc]
    assert believed_slots == slots


@pytest.mark.parametrize("later", ["streams", "figures", "slots"])
def test_what_whole_answers_showed_ends_with_better_evidence(later: str) -> None:
    server = Server(1, stated=False)
    for _ in range(3):
        server.arrive(60)
    server.run(server.now + 30.0)
    scheduler = server.scheduler
    instance = scheduler.instances[0]
    if later == "figures":
        scheduler.on_scrape("a", EngineSample(running=0, waiting=0, kv_usage=0.0), server.now)
    elif later == "slots":
        scheduler.on_instance(CapacityLearned("a", Capacity(max_num_seqs=64)), server.now)
    commands: list[Any] = []
    for number in range(100, 160):
        commands += scheduler.on_arrival(request(number, max_tokens=400, streamed=True), server.now)
    most, now = 0, server.now
    while running := [each.lease for each in commands if isinstance(each, Dispatch)]:
        most, now, commands = max(most, len(running)), now + 0.05, []
        for lease in running:
            commands += scheduler.on_first_token(lease, now)
            lease.output_tokens = 60
            commands += scheduler.on_lease_ended(lease, Outcome.OK, now + 1.3)
        now += 1.3
    assert most > 3, instance.max_num_seqs
