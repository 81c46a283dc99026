"""Overtaking in the queue, against a naive count: exact, bounded, and no fit holds up another."""

from __future__ import annotations

from dataclasses import dataclass

from helpers import request
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetlb.core.admission import MOST_OVERTAKEN, Queue, QueueKey, QueueLimits
from hetlb.core.types import Request

KEY = QueueKey("m", None, False)
FITS = st.integers(0, 2)
PRIORITIES = st.integers(0, 1)
TENANTS = st.sampled_from((None, "x", "y"))
LOOKAHEAD = 16


@dataclass
class Waiting:
    """One waiting request of the naive model."""

    request: Request
    fit: int
    overtaken: int = 0


class OvertakingMachine(RuleBasedStateMachine):
    """A queue before instances of three sizes, served as the scheduler does."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(QueueLimits(max_requests=None, max_bytes=None))
        self.number = 0
        self.waiting: dict[int, Waiting] = {}

    def asked(self, priority: int, tenant: str | None) -> Request:
        self.number += 1
        return request(self.number, priority=priority, tenant=tenant)

    def dispatched(self, served: Request, fit: int, *, waited: bool) -> None:
        """Count in the model what a dispatch to an instance of class `fit` overtakes."""
        for each in self.waiting.values():
            if (
                each.request.id < served.id
                and each.request.priority == served.priority
                and each.fit <= fit
                and (not waited or each.request.tenant == served.tenant)
            ):
                each.overtaken += 1

    @rule(count=st.integers(1, 20), priority=PRIORITIES, tenant=TENANTS, fit=FITS)
    def wait(self, count: int, priority: int, tenant: str | None, fit: int) -> None:
        if len(self.waiting) > 100:
            return
        for _ in range(count):
            asked = self.asked(priority, tenant)
            self.queue.push(asked, float(self.number), size=10, fit=fit)
            self.waiting[asked.id] = Waiting(asked, fit)

    @rule(count=st.integers(1, 100), priority=PRIORITIES, tenant=TENANTS, fit=FITS)
    def arrive(self, count: int, priority: int, tenant: str | None, fit: int) -> None:
        """Requests come while others wait, and may be dispatched at once."""
        for _ in range(count):
            asked = self.asked(priority, tenant)
            if not self.queue.may_pass(asked):
                return
            self.dispatched(asked, fit, waited=False)
            self.queue.passed(asked, 10.0, fit)

    @precondition(lambda self: self.waiting)
    @rule(count=st.integers(1, 60), room=st.sets(FITS, min_size=1), choice=st.integers(0, LOOKAHEAD))
    def serve(self, count: int, room: set[int], choice: int) -> None:
        """Instances of the classes in `room` take requests; one behind the head may suit them better."""
        for _ in range(count):
            self.serve_one(room, choice)

    def serve_one(self, room: set[int], choice: int) -> None:
        queue = self.queue
        ceiling = 3
        for fair, flow, fit in queue.heads(KEY):
            classes = [each for each in sorted(room) if fit <= each < ceiling]
            stopping = fair.stopping(fit)
            if not classes:
                if stopping is not None:
                    ceiling = min(ceiling, fit)
                continue
            entries = [stopping] if stopping else list(flow.by_fit[fit].values())[:LOOKAHEAD]
            for index, entry in enumerate(entries):
                if queue.overtaken(entry) >= MOST_OVERTAKEN:
                    del entries[index + 1 :]
                    break
            chosen, on = entries[choice % len(entries)], classes[choice % len(classes)]
            del self.waiting[chosen.request.id]
            self.dispatched(chosen.request, on, waited=True)
            assert queue.take(chosen.request.id, on) is chosen
            return

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[gone]
        assert self.queue.remove(gone) is not None

    @rule(shift=st.integers(0, 2), every=st.integers(1, 4))
    def refit(self, shift: int, every: int) -> None:
        """The fleet changes: other requests need large instances now."""
        fits = {
            number: (each.fit + shift) % 3 if number % every == 0 else each.fit
            for number, each in self.waiting.items()
        }
        self.queue.refit(lambda asked: fits[asked.id])
        for number, each in self.waiting.items():
            each.fit = fits[number]

    @invariant()
    def counts_are_exact_and_bounded(self) -> None:
        self.queue.check_integrity()
        found = {entry.request.id: (entry.fit, self.queue.overtaken(entry)) for entry in self.queue}
        assert found == {number: (each.fit, each.overtaken) for number, each in self.waiting.items()}
        assert all(each.overtaken <= MOST_OVERTAKEN for each in self.waiting.values())


TestOvertakingMachine = OvertakingMachine.TestCase
TestOvertakingMachine.settings = settings(stateful_step_count=30)


def test_at_the_bound_nothing_passes_until_that_one_is_served() -> None:
    queue = Queue(QueueLimits(max_requests=None, max_bytes=None))
    queue.push(request(1), 0.0, size=10)
    for number in range(MOST_OVERTAKEN):
        assert queue.may_pass(request(100 + number))
        queue.passed(request(100 + number), 10.0, 0)
    assert not queue.may_pass(request(999))
    assert queue.may_pass(request(999, priority=-1)), "a better priority overtakes nothing"
    queue.take(1, 0)
    assert queue.may_pass(request(999))


def test_what_only_large_instances_can_take_is_not_overtaken_on_small_ones() -> None:
    queue = Queue(QueueLimits(max_requests=None, max_bytes=None))
    queue.push(request(1), 0.0, size=10, fit=1)
    for number in range(3 * MOST_OVERTAKEN):
        assert queue.may_pass(request(100 + number))
        queue.passed(request(100 + number), 10.0, 0)
    assert queue.overtaken(next(iter(queue))) == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), FITS, st.integers(1, 100)), min_size=2, max_size=80))
def test_tenants_are_served_fairly_over_all_fits(pushed: list[tuple[str, int, int]]) -> None:
    queue = Queue(QueueLimits(max_requests=None, max_bytes=None))
    left = {"a": 0, "b": 0}
    for number, (tenant, fit, size) in enumerate(pushed):
        queue.push(request(number, tenant=tenant), float(number), size=size, fit=fit)
        left[tenant] += 1
    most = max(size for _, _, size in pushed)
    work = {"a": 0, "b": 0}
    while left["a"] and left["b"]:
        _, flow, fit = queue.heads(KEY)[0]
        entry = next(iter(flow.by_fit[fit].values()))
        queue.take(entry.request.id, 2)
        tenant = str(entry.request.tenant)
        left[tenant] -= 1
        work[tenant] += entry.size
        assert abs(work["a"] - work["b"]) <= 2 * most
        queue.check_integrity()


def test_a_request_at_the_bound_goes_before_older_ones_of_other_fits() -> None:
    """Else one behind the head of another line, chosen because it suits, could overtake it once more."""
    queue = Queue(QueueLimits())
    for number, fit in ((1, 1), (2, 0), (3, 1)):
        queue.push(request(number), float(number), size=10, fit=fit)
    assert [fit for _, _, fit in queue.heads(KEY)] == [1, 0]
    for number in range(MOST_OVERTAKEN):
        queue.passed(request(100 + number), 10.0, 0)
    assert [fit for _, _, fit in queue.heads(KEY)] == [0, 1]


def overtaken(queue: Queue) -> dict[int, tuple[int, int]]:
    """Fit of each waiting request, and by how many it was overtaken."""
    queue.check_integrity()
    return {entry.request.id: (entry.fit, queue.overtaken(entry)) for entry in queue}


def order(queue: Queue) -> list[list[int]]:
    """Requests of each head's line, oldest first."""
    return [[each.request.id for each in flow.by_fit[fit].values()] for _, flow, fit in queue.heads(KEY)]


def test_what_was_overtaken_stays_so_when_requests_need_other_instances() -> None:
    queue = Queue(QueueLimits())
    for number, fit in ((1, 0), (2, 1), (3, 0)):
        queue.push(request(number), float(number), size=10, fit=fit)
    for number in range(2):
        queue.passed(request(10 + number), 10.0, 0)
    assert overtaken(queue) == {1: (0, 2), 2: (1, 0), 3: (0, 2)}
    fits = {1: 1, 2: 0, 3: 0}
    queue.refit(lambda asked: fits[asked.id])
    assert overtaken(queue) == {1: (1, 2), 2: (0, 0), 3: (0, 2)}
    assert order(queue) == [[1], [2, 3]]
    queue.passed(request(20), 10.0, 0)
    assert overtaken(queue) == {1: (1, 2), 2: (0, 1), 3: (0, 3)}
    queue.passed(request(21), 10.0, 1)
    assert overtaken(queue) == {1: (1, 3), 2: (0, 2), 3: (0, 4)}
    for number in range(MOST_OVERTAKEN - 4):
        assert queue.may_pass(request(100 + number))
        queue.passed(request(100 + number), 10.0, 0)
    assert not queue.may_pass(request(999))
    assert [fit for _, _, fit in queue.heads(KEY)] == [0, 1]
    assert queue.take(3, 0).request.id == 3
    assert queue.may_pass(request(999))


def test_requests_that_need_what_they_needed_are_not_touched() -> None:
    queue = Queue(QueueLimits())
    for number in (1, 2):
        queue.push(request(number), float(number), size=10, fit=1)
    [(fair, flow, _)] = queue.heads(KEY)
    before = flow.by_fit[1]
    queue.refit(lambda _: 1)
    assert flow.by_fit[1] is before
    queue.refit(lambda asked: asked.id - 1)
    assert fair.lines.keys() == {0, 1}
    assert order(queue) == [[1], [2]]


def test_one_taken_from_behind_overtakes_the_older_ones_that_could_have_gone() -> None:
    """Those of its flow before it; of other fits those that came before and need no larger instance."""
    queue = Queue(QueueLimits())
    for number, fit, tenant in ((1, 0, "a"), (2, 1, "a"), (3, 2, "a"), (4, 1, "a"), (5, 0, "a"), (6, 0, "b")):
        queue.push(request(number, tenant=tenant), float(number), size=10, fit=fit)
    queue.take(4, 1)
    counts = {1: (0, 1), 2: (1, 1), 3: (2, 0), 5: (0, 0), 6: (0, 0)}
    assert overtaken(queue) == counts
    queue.take(5, 0)
    assert overtaken(queue) == {1: (0, 2), 2: (1, 1), 3: (2, 0), 6: (0, 0)}
    queue.passed(request(9, tenant="c"), 10.0, 1)
    assert overtaken(queue) == {1: (0, 3), 2: (1, 2), 3: (2, 0), 6: (0, 1)}
