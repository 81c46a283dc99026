"""Schedulers that tell each other: equal ledgers when all is said, and nothing left when all has ended."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from helpers import MODEL, dispatched, examples, make_scheduler, request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.core.fleet_state import SchedulerSetup
from hetlb.balancer.core.policies.base import PolicyParams
from hetlb.balancer.core.policies.registry import POLICIES
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Command, Dispatch, Health, Lease, Outcome
from hetlb.options.event_log.eventlog import RecordingScheduler, Replay, encode_setup
from hetlb.options.peers.shared_view import SharedView
from hetlb.options.split.hand_overs import HandOvers
from hetlb.tools.sim.integrity import check_scheduler


class Node:
    """A scheduler with its view, and its own live leases."""

    def __init__(
        self, name: str, seed: int, policy: str = "hetlb", delay_s: float = 0.0, names: str = "ab"
    ) -> None:
        self.name = name
        specs = [spec("a"), spec("b", slower=3.0)][: len(names)]
        self.scheduler = make_scheduler(specs, policy, seed=seed)
        self.view = SharedView(self.scheduler, seed)
        self.view.delay_s = delay_s
        self.live: list[Lease] = []

    def take(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, Dispatch):
                self.live.append(command.lease)

    @property
    def ledger(self) -> dict[str, tuple[int, int, int, int]]:
        return {
            each.name: (each.in_flight, each.work_ns, each.kv_tokens, each.pending_prompt_tokens)
            for each in self.scheduler.instances
        }


def tell(nodes: list[Node], now: float) -> None:
    """Deliver what all have to say until none has any more."""
    while any(said := [(node, node.view.take(0.0)) for node in nodes]) and any(each for _, each in said):
        for node, changes in said:
            for peer in nodes:
                if peer is not node and changes:
                    peer.take(peer.view.receive(node.name, changes, now), now)


steps = st.lists(
    st.tuples(st.sampled_from(["arrive", "begin", "end", "fail", "tell", "die"]), st.integers(0, 1 << 20)),
    max_size=60,
)


@settings(max_examples=examples(60))
@given(steps, st.sampled_from(["hetlb", "paper", "least-requests", "rr"]), st.sampled_from([0.0, 0.5]))
def test_after_all_messages_the_ledgers_are_equal_and_end_empty(
    todo: list[tuple[str, int]], policy: str, delay_s: float
) -> None:
    nodes = [Node(str(n), n, policy, delay_s) for n in range(3)]
    now, next_id = 0.0, 1
    for what, number in todo:
        now += 0.01
        node = nodes[number % 3]
        lease = node.live[number % len(node.live)] if node.live else None
        if what == "arrive":
            asked = request(next_id, prompt=1 + number % 500)
            next_id += 1
            node.take(node.view.on_arrival(asked, now), now)
        elif what == "begin" and lease is not None:
            node.take(node.scheduler.on_first_token(lease, now), now)
        elif what in ("end", "fail") and lease is not None:
            node.live.remove(lease)
            lease.output_tokens = number % 50
            outcome = Outcome.OK if what == "end" else Outcome.BROKEN_STREAM
            node.take(node.scheduler.on_lease_ended(lease, outcome, now, retry=False), now)
        elif what == "tell":
            tell(nodes, now)
        elif what == "die":  # unheard of for a while, then back with all it has
            for peer in nodes:
                if peer is not node:
                    peer.take(peer.view.gone(node.name, now), now)
            changes = node.view.take(0.0)
            del changes
            for peer in nodes:
                if peer is not node:
                    peer.take(peer.view.replace(node.name, node.view.live(now), now), now)
        for each in nodes:
            check_scheduler(each.scheduler)
    tell(nodes, now)
    flights = [{name: figures[0] for name, figures in node.ledger.items()} for node in nodes]
    assert flights[0] == flights[1] == flights[2]
    while any(node.live for node in nodes):
        now += 0.01
        for node in nodes:
            for lease in list(node.live):
                node.live.remove(lease)
                node.take(node.scheduler.on_lease_ended(lease, Outcome.OK, now, retry=False), now)
        tell(nodes, now)
    for node in nodes:
        assert set(node.ledger.values()) == {(0, 0, 0, 0)}
        assert node.scheduler.in_flight == 0
        check_scheduler(node.scheduler)


def test_what_waits_elsewhere_counts() -> None:
    one, two = Node("1", 1), Node("2", 2)
    two.view.receive("1", [], 0.0)
    n = 0
    while not len(one.scheduler.queue):
        n += 1
        one.take(one.scheduler.on_arrival(request(n, prompt=4000), 0.0), 0.0)
    sizes = one.scheduler.queue.waiting_sizes()
    tell([one, two], 0.0)
    assert two.scheduler.placement.elsewhere == sizes == {MODEL: sizes[MODEL]}
    two.view.gone("1", 0.0)
    assert two.scheduler.placement.elsewhere == {}


@pytest.mark.parametrize("part", [1, 2, 100])
def test_a_state_that_comes_again_frees_no_place_until_its_end(part: int) -> None:
    """Else a waiting request gets a place of leases that go on."""
    one, two = Node("1", 1, names="a"), Node("2", 2, names="a")
    numbers = count(1)
    while not len(one.scheduler.queue):
        one.take(one.scheduler.on_arrival(request(next(numbers), prompt=4000), 0.0), 0.0)
    one.scheduler.on_cancelled(next(iter(one.scheduler.queue.held)), 0.0)
    two.view.replace("1", one.view.live(0.0), 0.0)
    assert two.scheduler.on_arrival(request(1, prompt=4000), 0.0) == []
    two.take(two.view.replace("1", one.view.live(0.1), 0.1), 0.1)
    assert not two.live, "nothing has changed"
    begun, ended = one.live[0], one.live.pop()
    one.scheduler.on_first_token(begun, 0.1)
    one.scheduler.on_lease_ended(ended, Outcome.OK, 0.1)
    state = one.view.live(0.1)
    two.take(two.view.replace("1", state[:part], 0.2), 0.2)
    for at in range(part, len(state), part):
        assert not two.live, "it has not been said that a lease has ended"
        two.take(two.view.receive("1", state[at : at + part], 0.2), 0.2)
    assert len(two.live) == 1
    tell([two, one], 0.3)
    assert one.ledger == two.ledger
    check_scheduler(two.scheduler)


@pytest.mark.parametrize("dies", [False, True])
def test_a_place_that_a_third_one_frees_goes_to_the_oldest_request(dies: bool) -> None:
    """The scheduler with the oldest request takes the place, or the next one if it is gone."""
    nodes = [Node(str(number), number, names="a") for number in range(3)]
    freed, older, younger = nodes
    for node in nodes:
        for peer in nodes:
            if peer is not node:
                node.view.receive(peer.name, [], 0.0)
    numbers = count(1)
    while not len(freed.scheduler.queue):
        freed.take(freed.scheduler.on_arrival(request(next(numbers), prompt=4000), 0.0), 0.0)
    freed.scheduler.on_cancelled(next(iter(freed.scheduler.queue.held)), 0.0)
    tell(nodes, 0.0)
    for node, now in ((older, 1.0), (younger, 2.0)):
        node.take(node.view.on_arrival(request(next(numbers), prompt=4000), now), now)
        assert not node.live
        tell(nodes, now)
    if dies:
        for node in (freed, younger):
            node.take(node.view.gone(older.name, 3.0), 3.0)
    lease = freed.live.pop()
    freed.take(freed.scheduler.on_lease_ended(lease, Outcome.OK, 4.0, retry=False), 4.0)
    changes = freed.view.take(4.0)
    younger.take(younger.view.receive(freed.name, changes, 4.0), 4.0)  # it hears of it first
    assert bool(younger.live) is dies
    if not dies:
        older.take(older.view.receive(freed.name, changes, 4.0), 4.0)
        assert older.live


def test_each_scheduler_prefers_a_share_of_its_own_where_it_is_hardly_worse() -> None:
    specs = [spec(name, slower=slower) for slower, name in ((1.0, "a"), (1.0, "b"), (4.0, "c"), (4.0, "d"))]
    views = []
    for number in range(2):
        view = SharedView(make_scheduler(specs, "hetlb", seed=number), number)
        view.receive(str(1 - number), [], 0.0)
        view.delay_s = 0.1
        views.append(view)
    assert [view._share() for view in views] == [("a", "c"), ("b", "d")]
    for heard, chosen in ((False, ["a", "a"]), (True, ["a", "b"])):
        leases = []
        for view in views:
            if heard:
                view._heard(0.0)
            lease = dispatched(view.on_arrival(request(1), 0.0))
            leases.append(lease)
            # By no more than the requests that are unseen; nothing while the peer books nothing.
            assert lease.request.places.preferred_within == pytest.approx(0.1 if heard else 0.0)
        assert [lease.instance for lease in leases] == chosen
        for view, lease in zip(views, leases, strict=True):
            view._scheduler.on_lease_ended(lease, Outcome.OK, 0.0, retry=False)


def test_a_shared_view_replays_to_the_same_decisions() -> None:
    setup = SchedulerSetup(
        (spec("a"), spec("b")), "hetlb", PolicyParams(), make_scheduler([spec("a")]).queue.limits,
        seed=3, initial_health=Health.UP,
    )  # fmt: skip
    lines: list[str] = [encode_setup(setup)]
    scheduler: Scheduler = RecordingScheduler(setup, write=lines.append)
    view, peer = SharedView(scheduler, 1), Node("peer", 9)
    view.delay_s = 2.0
    leases: list[Any] = []
    for n in range(1, 40):
        now = n * 0.01
        peer.take(peer.scheduler.on_arrival(request(n), now), now)
        view.receive("peer", peer.view.take(now), now)
        commands = view.on_arrival(request(n), now)
        leases.extend(command.lease for command in commands if isinstance(command, Dispatch))
        if n % 3 == 0:
            scheduler.on_lease_ended(leases.pop(), Outcome.OK, now, retry=False)
    assert any('"kind":"assume"' in line for line in lines)
    assert any('"preferred":["a"]' in line or '"preferred":["b"]' in line for line in lines)
    replay = list(Replay(lines, HandOvers))
    assert len(replay) == len(lines) - 1
    assert all(fact.same for fact in replay)


def test_every_policy_can_be_shared() -> None:
    for policy in POLICIES:
        if policy in ("single", "planned"):
            continue
        nodes = [Node(str(n), n, policy) for n in range(2)]
        for n in range(1, 9):
            nodes[n % 2].take(nodes[n % 2].view.on_arrival(request(n), 0.0), 0.0)
            tell(nodes, 0.0)
        assert nodes[0].ledger == nodes[1].ledger
