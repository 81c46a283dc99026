"""Kinds of requests that one instance refuses go where they are answered; nothing else changes."""

from __future__ import annotations

import pytest
from helpers import dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.evidence.kinds import RefusedKinds
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Dispatch, Outcome, PassOn, Request
from hetlb.tools.sim.integrity import check_scheduler

CHAT = "/v1/chat/completions"


def ask(
    scheduler: Scheduler, asked: Request, refusing: set[str], status: int, now: float
) -> tuple[bool, list[str]]:
    """Send a request that the instances in `refusing` refuse; return whether it is answered, and the way."""
    commands, way = scheduler.on_arrival(asked, now), []
    features = asked.features or ()
    while True:
        (first,) = commands
        assert isinstance(first, Dispatch)
        lease = first.lease
        way.append(lease.instance)
        if lease.instance not in refusing:
            scheduler.on_first_token(lease, now + 0.01)
            lease.output_tokens = 20
            scheduler.on_lease_ended(lease, Outcome.OK, now + 0.02)
            return True, way
        commands = scheduler.on_refused(lease, status, None, now, features=features)
        if isinstance(commands[0], PassOn):
            scheduler.on_lease_ended(lease, Outcome.UPSTREAM_REFUSED, now)
            return False, way


@pytest.mark.parametrize("status", [400, 404, 413, 422, 501])
@pytest.mark.parametrize(("features", "size"), [(("tool_choice", "tools"), 100), ((), 50_000)])
@pytest.mark.parametrize("policy", ["hetlb", "rr", "least-requests", "single"])
def test_a_kind_goes_where_it_is_answered(
    policy: str, features: tuple[str, ...], size: int, status: int
) -> None:
    scheduler = make_scheduler([spec("a"), spec("b", slower=3.0)], policy)
    asked_at_a, others_at_a, others = 0, 0, 0
    for i in range(200):
        now = i / 10
        if i % 4 == 3:
            own = request(i, path=CHAT, features=features, body_bytes=size)
            answered, way = ask(scheduler, own, {"a"}, status, now)
            assert answered
            asked_at_a += "a" in way
        else:
            answered, way = ask(scheduler, request(i, path=CHAT, body_bytes=90), set(), 0, now)
            others_at_a += way == ["a"]
            others += 1
        scheduler.on_sweep({}, now)
    assert asked_at_a <= (8 if features or status in (413,) else 12)
    if policy != "rr" and (status not in (404, 501) or features):
        assert others_at_a >= 0.9 * others
    assert not any(each.evidence.answers.doubted for each in scheduler.instances)
    check_scheduler(scheduler)


def test_a_client_s_own_mistakes_are_asked_about_a_few_times_alone() -> None:
    scheduler = make_scheduler([spec("a"), spec("b")], "single")
    twice = 0
    for i in range(300):
        answered, way = ask(scheduler, request(i, path=CHAT, client="10.0.0.1"), {"a", "b"}, 400, i / 30)
        assert not answered
        twice += len(way) > 1
    assert 5 <= twice <= 11
    answered, way = ask(scheduler, request(999, path=CHAT, client="10.0.0.2"), {"a"}, 400, 10.0)
    assert answered, "another client's refusal is asked about"
    assert not scheduler.placement.retries.attempts


def test_a_server_that_takes_a_kind_again_gets_it_again() -> None:
    scheduler = make_scheduler([spec("a"), spec("b", slower=3.0)], "single")
    kind = {"path": CHAT, "features": ("tools",)}
    for i in range(10):
        ask(scheduler, request(i, **kind), {"a"}, 400, i / 10)
    back = [
        i for i in range(10, 400) if ask(scheduler, request(i, **kind), set(), 0, 1.0 + i / 10)[1] == ["a"]
    ]
    assert 1.0 + back[0] / 10 <= 6.0
    assert len(back) >= 350


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]), st.booleans(), st.integers(0, 5000),
            st.sets(st.sampled_from(["tools", "logprobs", "n"])), st.sampled_from([400, 404, 413, 401]),
        ),
        max_size=40,
    )
)  # fmt: skip
def test_after_an_answer_of_a_kind_nothing_stands_against_it(
    ends: list[tuple[str, bool, int, set[str], int]],
) -> None:
    kinds = RefusedKinds()
    for now, (instance, served, size, features, status) in enumerate(ends):
        asked = request(now, path=CHAT, body_bytes=size, features=tuple(sorted(features)))
        if served:
            kinds.served(asked, instance, float(now))
            assert instance not in kinds.against(asked, float(now), again=True)
        else:
            kinds.refused(asked, instance, status, float(now))
            assert instance in kinds.against(asked, float(now), again=True)
            other = request(now, path="/v1/embeddings", body_bytes=size, features=asked.features)
            assert not kinds.against(other, float(now), again=True)


def test_the_table_is_bounded() -> None:
    kinds = RefusedKinds()
    for i in range(1000):
        kinds.refused(request(i, path=CHAT, features=(f"field-{i}",)), "a", 400, float(i))
        kinds.asked_in_vain(request(i, client=str(i)), float(i))
    assert len(kinds.by_key) == 256
    kinds.age(2000.0)
    assert not kinds.by_key


def test_requests_that_wait_for_the_servers_of_their_kind_delay_no_others() -> None:
    capacity = Capacity(kv_cache_tokens=10**7, kv_tokens_per_request=10**7, max_num_seqs=4)
    scheduler = make_scheduler([spec(name, capacity=capacity) for name in "ab"], "hetlb")
    kind = {"path": CHAT, "features": ("tools",)}
    scheduler.fleet.account().kinds.refused(request(0, **kind), "a", 400, 0.0)
    running = []
    for i in range(1, 9):
        running += [
            each.lease
            for each in scheduler.on_arrival(request(i, path=CHAT), 0.1)
            if isinstance(each, Dispatch)
        ]
    assert len(running) >= 8
    assert not scheduler.on_arrival(request(20, **kind), 0.2), "it waits for b"
    for each in [lease for lease in running if lease.instance == "a"]:
        scheduler.on_lease_ended(each, Outcome.OK, 0.3)
    assert len(scheduler.queue) == 1
    assert dispatched(scheduler.on_arrival(request(21, path=CHAT), 0.4)).instance == "a"
    freed = next(lease for lease in running if lease.instance == "b")
    assert dispatched(scheduler.on_lease_ended(freed, Outcome.OK, 0.5)).request.id == 20


@pytest.mark.parametrize("streams", [True, False])
def test_streams_alone_or_all_others_go_where_they_are_answered(streams: bool) -> None:
    """Bodies are of one length: neither a field nor a size tells the refused ones."""
    scheduler = make_scheduler([spec("a"), spec("b", slower=3.0)], "rr")
    refused_at_a = others_at_a = 0
    for i in range(200):
        now, bad = i / 10, i % 4 == 3
        own = request(i, path=CHAT, features=(), body_bytes=90, streamed=streams if bad else not streams)
        answered, way = ask(scheduler, own, {"a"} if bad else set(), 400, now)
        assert answered
        refused_at_a += bad and "a" in way
        others_at_a += not bad and way == ["a"]
        scheduler.on_sweep({}, now)
    assert refused_at_a <= 14
    assert others_at_a >= 60
