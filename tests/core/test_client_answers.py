"""One client alone moves no account: lost answers are weighed by the answers of the same client elsewhere."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers import MODEL, all_pairs, dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.evidence.clients import ClientAnswers
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Dispatch, Outcome, PassOn, Request
from hetlb.tools.sim.integrity import check_scheduler


def ask(
    scheduler: Scheduler,
    asked: Request,
    bad: set[str],
    now: float,
    how: Outcome,
    tried: Counter[str] | None = None,
) -> bool:
    """Send a request that instances in `bad` lose, counted in `tried`; return True if it is answered."""
    commands = scheduler.on_arrival(asked, now)
    while commands and isinstance(commands[0], Dispatch):
        lease = commands[0].lease
        if tried is not None:
            tried[lease.instance] += 1
        if lease.instance not in bad:
            scheduler.on_first_token(lease, now + 0.01)
            lease.output_tokens = 20
            scheduler.on_lease_ended(lease, Outcome.OK, now + 0.02)
            return True
        if how is Outcome.UPSTREAM_ERROR:
            commands = scheduler.on_refused(lease, 500, None, now)
            if isinstance(commands[0], PassOn):
                scheduler.on_lease_ended(lease, how, now)
        else:
            if how is Outcome.BROKEN_STREAM:
                scheduler.on_first_token(lease, now)
            commands = scheduler.on_lease_ended(lease, how, now)
    return False


HOWS = [Outcome.UPSTREAM_ERROR, Outcome.NO_RESPONSE, Outcome.BROKEN_STREAM]


@pytest.mark.parametrize(
    ("policy", "pinned", "own", "how"),
    all_pairs(
        ["hetlb", "rr", "least-requests"],
        [False, True],
        [{"client": "10.0.0.9"}, {"tenant": "x"}, {"session": "s"}],
        HOWS,
    ),
)
def test_one_client_that_loses_everywhere_moves_nothing(
    policy: str, pinned: bool, own: dict[str, str], how: Outcome
) -> None:
    scheduler = make_scheduler([spec("a"), spec("b", slower=2.0), spec("c", slower=2.0)], policy)
    if "session" in own:
        own = {"prefix_keys": (("session:m//s", None),), "client": "10.0.0.1"}  # type: ignore[dict-item]
    doubts = 0
    for i in range(300):
        now = i / 30
        subset = ("a",) if pinned else None
        ask(scheduler, request(2 * i, subset=subset, **own), set("abc"), now, how)
        assert ask(scheduler, request(2 * i + 1, client="10.0.0.1", tenant="other"), set(), now, how)
        scheduler.on_sweep({}, now)
        doubts += sum(each.evidence.answers.doubted for each in scheduler.instances)
    assert doubts == 0
    check_scheduler(scheduler)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("clients", [1, 20])
@pytest.mark.parametrize(("fleet", "bad"), [("ab", "a"), ("abc", "a"), ("abc", "ab")])
def test_an_instance_that_loses_everything_is_found_also_by_one_client(
    fleet: str, bad: str, clients: int, how: Outcome
) -> None:
    scheduler = make_scheduler([spec(each, slower=1.0 + (each not in bad)) for each in fleet], "hetlb")
    lost = 0
    tried = Counter[str]()
    for i in range(300):
        now = i / 10
        asked = request(i, client=f"10.0.0.{i % clients}")
        lost += not ask(scheduler, asked, set(bad), now, how, tried)
        scheduler.on_sweep({}, now)
    # A trial every three seconds; a broken stream cannot be tried elsewhere.
    assert lost <= (10 if how is Outcome.BROKEN_STREAM or bad == "ab" else 1) * len(bad) + 4
    # One answer says nothing: the client may never come again to the one that lost it.
    doubted = {each.name for each in scheduler.instances if each.evidence.answers.doubted}
    assert doubted == {name for name in bad if tried[name] > 1}


@given(
    st.lists(
        st.tuples(st.sampled_from("xyz"), st.integers(1, 4), st.booleans(), st.floats(0.1, 1.0)), max_size=60
    ),
    st.floats(0.0, 20.0),
)
def test_no_more_counts_than_was_lost(ends: list[tuple[str, int, bool, float]], lost: float) -> None:
    answers = ClientAnswers()
    for client, instance, well, keep in ends:
        if well:
            answers.well(request(1, client=client), instance)
        else:
            answers.lost(f"@{client}", instance)
        answers.age(keep)
    for client in "xyz":
        for instance in range(1, 5):
            assert 0.0 <= answers.counted(f"@{client}", instance, lost) <= lost + 1e-9


def test_the_oldest_clients_are_forgotten() -> None:
    answers = ClientAnswers()
    for i in range(1000):
        answers.lost(str(i), 1)
    assert len(answers.known) == 256
    assert "999" in answers.known


def test_answers_that_are_odd_everywhere_end_a_doubt() -> None:
    """Engines that give no finish reason: all their answers are odd."""
    scheduler = make_scheduler([spec("a"), spec("b", slower=2.0)], "hetlb")
    at: Counter[str] = Counter()
    for i in range(400):
        now = i / 10
        bad = {"a"} if 5.0 <= now < 15.0 else set()
        commands = scheduler.on_arrival(request(i, client="10.0.0.1"), now)
        while commands and isinstance(commands[0], Dispatch):
            lease = commands[0].lease
            if lease.instance in bad:
                commands = scheduler.on_refused(lease, 503, None, now)
                continue
            scheduler.on_first_token(lease, now + 0.01)
            lease.output_tokens, lease.odd = 20, True
            at[lease.instance] += now >= 25.0
            commands = scheduler.on_lease_ended(lease, Outcome.OK, now + 0.02)
        scheduler.on_sweep({}, now)
        if now == 14.0:
            assert scheduler.fleet.instances["a"].evidence.answers.doubted
    assert not scheduler.fleet.instances["a"].evidence.answers.doubted
    assert at["a"] > 100


def test_what_one_model_answers_says_nothing_about_the_instances_of_another() -> None:
    """A client's short answers of one model, which are odd, beside its long ones of another model."""
    scheduler = make_scheduler([spec("a"), spec("b", slower=9.0), spec("c", model="other")], "hetlb")
    for i in range(40):
        now = i / 10
        for model in ("other", MODEL):
            asked = request(2 * i + (model == MODEL), model=model, client="10.0.0.1")
            lease = dispatched(scheduler.on_arrival(asked, now))
            scheduler.on_first_token(lease, now + 0.01)
            lease.output_tokens, lease.odd = 20, model == MODEL
            scheduler.on_lease_ended(lease, Outcome.OK, now + 0.02)
        scheduler.on_sweep({}, now)
        assert not any(each.evidence.wary(now) for each in scheduler.instances)
