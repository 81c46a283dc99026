"""Every end of a lease is a row of one table, which the docs show and the health tracker obeys."""

from __future__ import annotations

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.evidence.table import Verdict, verdict
from hetlb.balancer.core.types import Health
from hetlb.balancer.exchange import ends, exchange_states
from hetlb.balancer.exchange.ends import ENDS, End
from hetlb.balancer.exchange.exchange_states import Phase, Response

#: What a row says, said once more: a change of blame is a change here.
COUNTS = {
    "answered": Verdict.WELL, "unseen": Verdict.NOTHING, "refused": Verdict.REFUSED, "busy": Verdict.LOST,
    "server-error": Verdict.LOST, "no-answer": Verdict.LOST,
    "not-accepted": Verdict.ABSENT, "loop": Verdict.ABSENT, "moved": Verdict.ABSENT,
    "dropped": Verdict.LOST, "junk": Verdict.LOST, "silent": Verdict.LOST, "broken": Verdict.LOST,
    "stalled": Verdict.LOST, "error-event": Verdict.LOST,
    "refused-in-stream": Verdict.REFUSED,
    "not-handed-over": Verdict.NOTHING,
    "unread": Verdict.NOTHING, "held-up": Verdict.NOTHING, "idle": Verdict.NOTHING,
    "left": Verdict.NOTHING, "local": Verdict.NOTHING, "fault": Verdict.NOTHING,
    "stopped": Verdict.NOTHING, "last-missing": Verdict.LOST, "head-cut": Verdict.LOST,
    "otherwise": Verdict.NOTHING, "notice": Verdict.NOTHING, "short-of-room": Verdict.NOTHING,
}  # fmt: skip


def test_every_row_is_judged_here() -> None:
    declared = [each for each in vars(ends).values() if isinstance(each, End)]
    assert sorted(each.name for each in declared) == sorted(COUNTS)
    assert set(map(id, declared)) == set(map(id, ENDS))


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.name)
def test_an_end_counts_as_its_row_says(end: End) -> None:
    assert verdict(end.told) is COUNTS[end.name]
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    for number in range(5):
        (one,) = (each for each in scheduler.instances if each.name == "a")
        commands = scheduler.on_arrival(request(number), float(number))
        lease = dispatched(commands)
        if lease.instance != "a":
            scheduler.on_lease_ended(lease, ends.LEFT.told, float(number), retry=False)
            break
        scheduler.on_lease_ended(lease, end.told, float(number), retry=False)
    known = one.evidence
    if verdict(end.told) is Verdict.ABSENT:
        assert known.health.state is Health.EJECTED
    elif verdict(end.told) is Verdict.LOST:
        assert known.answers.doubted
    else:
        assert known.health.state is Health.UP
        assert not known.answers.doubted
        assert known.health.clean


def test_every_transition_leads_on_and_every_phase_can_end() -> None:
    reached = {row.after for row in exchange_states.TRANSITIONS} | {Phase.QUEUED}
    assert reached == set(Phase)
    assert set(exchange_states.ENDED.before) == set(Phase) - {Phase.DONE}
    assert {row.after for row in exchange_states.RESPONSE_TRANSITIONS} == set(Response) - {Response.NOTHING}
