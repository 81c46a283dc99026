"""Answers that stand still on an engine that no longer reports them count as lost until they go on."""

from __future__ import annotations

import math

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.evidence import missing
from hetlb.balancer.core.facts import EngineSample
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Lease, Outcome


def begun(scheduler: Scheduler, number: int, name: str, now: float, *, streamed: bool = True) -> Lease:
    asked = request(number, subset=(name,), streamed=streamed, client=f"10.0.0.{number}")
    lease = dispatched(scheduler.on_arrival(asked, now))
    scheduler.on_first_token(lease, now + 0.1)
    return lease


def fleet(*, streamed: bool = True) -> tuple[Scheduler, list[Lease]]:
    """Return a fleet with ten answers at `a` of which four stand still, and good answers at `b`."""
    scheduler = make_scheduler([spec("a"), spec("b")], "rr")
    for number in range(8):
        lease = begun(scheduler, number, "b", 0.0)
        lease.output_tokens = 9
        scheduler.on_lease_ended(lease, Outcome.OK, 1.0)
    return scheduler, [begun(scheduler, 20 + number, "a", 1.0, streamed=streamed) for number in range(10)]


def swept(scheduler: Scheduler, silent: list[Lease], now: float) -> list[int]:
    """Sweep with tokens of now for all but the silent streams; return the leases that are counted."""
    at = {lease.id: 1.2 for lease in silent}
    still = missing.still(scheduler.instances, lambda lease: at.get(lease.id, now), now)
    scheduler.on_sweep({"a": now}, now, still=still)
    return still


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("reported", "counts"), [(6, True), (10, False), (8, False)])
def test_answers_that_stand_count_if_the_engine_lacks_as_many(
    reported: int, counts: bool, streamed: bool
) -> None:
    """One that is silent while its engine computes it, as tools are parsed whole, is no fault.

    An engine has ended a whole answer before it begins to send it.
    """
    scheduler, streams = fleet(streamed=streamed)
    running = reported if streamed else reported - 6
    for second in (3.5, 4.5):
        scheduler.on_scrape("a", EngineSample(running, 0, 0.1), second)
        swept(scheduler, streams[:4], second + 0.1)
    (a, _) = scheduler.instances
    assert a.evidence.answers.doubted is counts
    assert [lease.judged for lease in streams] == [counts] * 4 + [False] * 6


def test_an_answer_that_its_client_does_not_read_explains_what_is_missing() -> None:
    """The engine has ended it; a stream beside it is silent while a tool call is parsed."""
    scheduler, streams = fleet()
    scheduler.on_scrape("a", EngineSample(9, 0, 0.1), 4.0)
    at = {streams[0].id: math.inf, streams[1].id: 1.2}
    assert not missing.still(scheduler.instances, lambda lease: at.get(lease.id, 4.1), 4.1)


def test_streams_that_go_on_do_not_count_any_more() -> None:
    scheduler, streams = fleet()
    scheduler.on_scrape("a", EngineSample(6, 0, 0.1), 3.0)
    assert swept(scheduler, streams[:4], 3.3) == [lease.id for lease in streams[:4]]
    assert not swept(scheduler, streams[:4], 3.8), "once is enough"
    (a, _) = scheduler.instances
    for lease in streams:
        lease.output_tokens = 20
        scheduler.on_lease_ended(lease, Outcome.OK, 5.0)
    assert not a.evidence.answers.doubted
    assert a.evidence.answers.lost == 0.0


def test_an_old_report_says_nothing() -> None:
    scheduler, streams = fleet()
    scheduler.on_scrape("a", EngineSample(0, 0, 0.1), 1.1)
    assert not swept(scheduler, streams[:4], 4.0), "they came after it"
    scheduler.on_scrape("a", EngineSample(6, 0, 0.1), 5.0)
    assert not swept(scheduler, streams[:4], 20.0)
