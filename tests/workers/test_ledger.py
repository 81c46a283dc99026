"""The ledger: whatever workers book, give back or take with them when they die, the sums are exact."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
from helpers import request, spec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from workers.many import Many

from hetlb.core.admission import QueueLimits
from hetlb.core.policies import PolicyParams
from hetlb.core.setup import SchedulerSetup
from hetlb.core.types import Command, Dispatch, Health, Lease, Outcome
from hetlb.workers.ledger import ANSWERS, RING, Memory, Onlooker, Row, owner_hash

NUMBER = 3
CELL = (5, 4, 3, 2, 1, 1, 0, 0)


def setup_of(*names: str, policy: str = "hetlb", **limits: object) -> SchedulerSetup:
    return SchedulerSetup(
        specs=tuple(spec(name) for name in names),
        policy=policy,
        params=PolicyParams(),
        limits=dataclasses.replace(QueueLimits(), **limits),  # type: ignore[arg-type]
        predictor="online",
        seed=0,
        initial_health=Health.UP,
    )


class Fellows(RuleBasedStateMachine):
    """Three schedulers over one ledger, as they take requests, answer, break and die."""

    def __init__(self) -> None:
        super().__init__()
        self.many = Many(setup_of("a", "b", max_requests=20), NUMBER)
        self.now = 0.0
        self.next_id = 0
        self.leases: list[Lease] = []

    def teardown(self) -> None:
        self.many.close()

    def carry_out(self, commands: list[Command]) -> None:
        self.leases += [each.lease for each in commands if isinstance(each, Dispatch)]

    @rule(count=st.integers(1, 30), prompt=st.integers(1, 4000), wait=st.floats(0, 0.02))
    def arrive(self, count: int, prompt: int, wait: float) -> None:
        for _ in range(count):
            self.next_id += 1
            self.now += wait
            self.carry_out(self.many.on_arrival(request(self.next_id, prompt=prompt), self.now))

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 10_000))
    def begin(self, index: int) -> None:
        lease = self.leases[index % len(self.leases)]
        self.carry_out(self.many.on_first_token(lease, self.now))

    @precondition(lambda self: self.leases)
    @rule(
        index=st.integers(0, 10_000),
        outcome=st.sampled_from(
            [Outcome.OK, Outcome.CLIENT_GONE, Outcome.NO_RESPONSE, Outcome.CONNECT_FAILED]
        ),
    )
    def end(self, index: int, outcome: Outcome) -> None:
        self.now += 0.01
        lease = self.leases.pop(index % len(self.leases))
        self.carry_out(self.many.on_lease_ended(lease, outcome, self.now))

    @rule()
    def tick(self) -> None:
        self.now += 0.25
        self.carry_out(self.many.on_tick(self.now))

    @rule(index=st.integers(0, NUMBER - 1))
    def die(self, index: int) -> None:
        """Killed at any instant: its requests are gone, its successor begins with nothing."""
        self.leases = [each for each in self.leases if self.many.of(each.request.id) != index]
        self.many.replace(index)

    @invariant()
    def everybody_sees_the_sum(self) -> None:
        self.many.check_integrity()
        for name in ("a", "b"):
            mine = [each for each in self.leases if each.instance == name]
            for index in range(NUMBER):
                seen = self.many.instance(index, name)
                assert seen.work_ns == sum(each.work_ns for each in mine)
                assert seen.kv_tokens == sum(each.kv_tokens for each in mine)
                assert seen.prompt_tokens == sum(each.prompt_tokens for each in mine)
                unread = [each.prompt_tokens for each in mine if each.first_token_at is None]
                assert seen.pending_prompt_tokens == sum(unread)
                assert seen.in_flight == len(mine)
                assert seen.sequences == sum(each.request.sequences for each in mine)
        waiting = sum(len(member.queue) for member in self.many.members)
        for member in self.many.members:
            member.take_in(self.now)
            assert member.queue.elsewhere == waiting - len(member.queue)
            assert len(member.queue) + member.queue.elsewhere <= 20


Fellows.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestFellows = Fellows.TestCase


# --- the memory itself ---


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(3, 8)
    yield made
    made.close()


def test_a_reader_is_told_what_changed_and_nothing_else(memory: Memory) -> None:
    one, two = Row(memory, 0), Row(memory, 1)
    assert two.follow(5) == (0,) * 8
    assert two.changed() == []
    one.write(5, CELL)
    one.write(6, CELL)  # nobody has said what it means
    assert two.changed() == [(5, (0,) * 8, CELL)]
    assert two.changed() == []
    assert one.changed(everything=True) == []


def test_who_looks_late_misses_nothing(memory: Memory) -> None:
    one, two = Row(memory, 0), Row(memory, 1)
    for cell in range(8):
        two.follow(cell)
    rng = random.Random(0)
    for written in (RING - 1, RING, RING + 1, 3 * RING):
        for step in range(written):
            one.write(rng.randrange(8), (step, *CELL[1:]))
        two.changed()
        assert all(two.cells(cell)[0][1] == memory.read(0, cell) for cell in range(8))
        assert [cell for cell, _, _ in two.changed(everything=True)] == []


def test_what_a_dead_worker_had_booked_is_taken_back_and_its_answers_are_not(memory: Memory) -> None:
    one, two = Row(memory, 0), Row(memory, 1)
    two.follow(5)
    one.write(5, CELL)
    one.write_standing((1, 2, 3))
    one.remember("resp_1", 5, "team")
    assert two.changed() == [(5, (0,) * 8, CELL)]
    assert memory.busy(5)
    memory.wipe(0)
    assert not memory.busy(5)
    assert two.changed() == [(5, CELL, (0,) * 8)]
    assert set(two.standings) == {(0, 0, 0)}
    assert two.kept_at("resp_1") == (5, owner_hash("team"))
    successor = Row(memory, 0)
    successor.write(5, CELL)
    assert two.changed() == [(5, (0,) * 8, CELL)]


def test_an_onlooker_sees_all_and_writes_nothing(memory: Memory) -> None:
    rows = [Row(memory, number) for number in range(3)]
    onlooker = Onlooker(memory)
    onlooker.follow(5)
    for row in rows:
        row.write(5, CELL)
        row.write_standing((1, 0, 1))
    assert len(onlooker.changed()) == 3
    assert list(onlooker.standings) == [(1, 0, 1)] * 3
    before = memory.words.tolist()
    onlooker.write(5, CELL)
    onlooker.write_standing((9, 9, 9))
    assert memory.words.tolist() == before


def test_an_answer_is_found_whoever_made_it_until_its_owner_made_many_more(memory: Memory) -> None:
    rows = [Row(memory, number) for number in range(3)]
    for number, row in enumerate(rows):
        row.remember(f"resp_{number}", number, None)
    assert [rows[0].kept_at(f"resp_{n}") for n in range(3)] == [(n, owner_hash(None)) for n in range(3)]
    assert rows[0].kept_at("resp_3") is None
    assert rows[0].kept_at("") is None
    for each in range(ANSWERS):
        rows[1].remember(f"other_{each}", 7, "team")
    # A full row forgets of the owner that has most in it.
    assert rows[2].kept_at("resp_1") == (1, owner_hash(None))
    assert rows[2].kept_at("other_0") is None
    # Whoever begins anew with the row goes on with what is there.
    again = Row(memory, 1)
    for each in range(ANSWERS):
        again.remember(f"more_{each}", 7, None)
    assert rows[2].kept_at("resp_1") is None
    assert rows[2].kept_at("resp_0") is not None
