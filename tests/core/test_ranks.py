"""Data-parallel engines of one server as places: what is booked, and where the turns of a chat go."""

from __future__ import annotations

from helpers import dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.facts import CapacityLearned
from hetlb.balancer.core.prefix_index import PrefixKey
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Lease, Outcome
from hetlb.tools.sim.integrity import check_scheduler


def ranked(count: int, names: str = "a", policy: str = "hetlb") -> Scheduler:
    scheduler = make_scheduler([spec(name) for name in names], policy)
    for name in names:
        capacity = Capacity(engines=count, rank_header=True, kv_cache_tokens=100_000 * count)
        scheduler.on_instance(CapacityLearned(name, capacity), 0.0)
    return scheduler


def ask(
    scheduler: Scheduler, number: int, now: float, keys: tuple[PrefixKey, ...], prompt: int = 4000
) -> Lease:
    return dispatched(scheduler.on_arrival(request(number, prompt=prompt, prefix_keys=keys), now))


def test_an_engine_is_chosen_only_if_the_server_reads_the_choice() -> None:
    for capacity in (Capacity(engines=2), Capacity(engines=1, rank_header=True)):
        scheduler = make_scheduler([spec("a")])
        scheduler.on_instance(CapacityLearned("a", capacity), 0.0)
        assert ask(scheduler, 1, 1.0, ()).rank == -1
    assert ask(ranked(2), 1, 1.0, ()).rank >= 0


def test_requests_at_once_go_to_all_engines() -> None:
    scheduler = ranked(4)
    leases = [ask(scheduler, number, 1.0, ()) for number in range(8)]
    assert sorted(each.rank for each in leases) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_turns_of_a_chat_stay_at_one_engine() -> None:
    scheduler = ranked(4)
    ranks: dict[int, set[int]] = {}
    number, now = 0, 1.0
    for turn in range(5):
        leases = []
        for chat in range(8):
            number += 1
            keys = tuple((f"{chat}/{at}", 1000 * (at + 1)) for at in range(turn + 1))
            leases.append((chat, ask(scheduler, number, now, keys, prompt=1000 * (turn + 1) + 10)))
        for chat, lease in leases:
            ranks.setdefault(chat, set()).add(lease.rank)
            scheduler.on_first_token(lease, now + 0.1)
            lease.output_tokens = 10
            scheduler.on_lease_ended(lease, Outcome.OK, now + 0.2, retry=False)
        now += 1.0
    assert all(len(each) == 1 for each in ranks.values())
    assert {next(iter(each)) for each in ranks.values()} == {0, 1, 2, 3}


def test_chats_one_after_the_other_use_all_caches() -> None:
    scheduler = ranked(3)
    ranks = []
    for number in range(9):
        lease = ask(scheduler, number, float(number), ((f"{number}", 4000),))
        ranks.append(lease.rank)
        scheduler.on_first_token(lease, number + 0.1)
        scheduler.on_lease_ended(lease, Outcome.OK, number + 0.2, retry=False)
    assert [ranks.count(each) for each in range(3)] == [3, 3, 3]


def test_a_report_of_one_engine_says_nothing_of_the_other_caches() -> None:
    """A prompt is read anew where it is not held: what the server is believed to hold stays."""
    scheduler = ranked(2)
    [instance] = scheduler.instances
    keys = (("x", 4000),)
    first = ask(scheduler, 1, 1.0, keys)
    scheduler.on_first_token(first, 1.1)
    scheduler.on_lease_ended(first, Outcome.OK, 1.2, retry=False)
    beside = [ask(scheduler, 2, 2.0, (), prompt=1000), ask(scheduler, 3, 2.0, (), prompt=9000)]
    assert [each.rank for each in beside] == [1 - first.rank, first.rank]
    again = ask(scheduler, 4, 2.0, keys)
    assert again.rank != first.rank
    scheduler.on_first_token(again, 2.1)
    again.reported_cached_tokens = 0
    scheduler.on_lease_ended(again, Outcome.OK, 2.2, retry=False)
    assert instance.tree.share == 1.0


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "begin", "end", "leave"]), st.integers(0, 5), st.integers(1, 4000)),
    max_size=60,
)


@given(steps, st.integers(2, 4))
def test_each_rank_is_the_sum_of_its_leases(todo: list[tuple[str, int, int]], count: int) -> None:
    scheduler = ranked(count, "ab", "rr")
    live: list[Lease] = []
    for number, (what, which, size) in enumerate(todo):
        now = 1.0 + number
        if what == "ask":
            keys: tuple[PrefixKey, ...] = ((f"k{which}", size), (f"s{which}", None))
            live.append(ask(scheduler, number, now, keys, prompt=size + 10))
        elif live:
            lease = live[which % len(live)]
            if what == "begin":
                scheduler.on_first_token(lease, now)
            else:
                live.remove(lease)
                outcome = Outcome.OK if what == "end" else Outcome.CLIENT_GONE
                scheduler.on_lease_ended(lease, outcome, now, retry=False)
        check_scheduler(scheduler)
        for instance in scheduler.instances:
            assert instance.ranks is not None
            for place, rank in enumerate(instance.ranks.each):
                here = [each for each in live if each.instance == instance.name and each.rank == place]
                assert rank.in_flight == len(here)
                assert rank.sequences == sum(each.request.sequences for each in here)
                assert rank.kv_tokens >= 0
                assert rank.unread_tokens >= 0
    for lease in live:
        scheduler.on_lease_ended(lease, Outcome.OK, 1000.0, retry=False)
    for instance in scheduler.instances:
        assert instance.ranks is not None
        assert all(
            not (rank.in_flight or rank.kv_tokens or rank.unread_tokens) for rank in instance.ranks.each
        )
