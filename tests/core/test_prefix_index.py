"""Belief about prefix caches: counts against a naive model, and what the scheduler makes of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from helpers import dispatched, examples, make_scheduler, request, spec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetlb.balancer.core.facts import InstanceAdded, InstanceRemoved
from hetlb.balancer.core.prefix_index import LEAST_SHARE, PrefixIndex, PrefixKey, Shared, Tree
from hetlb.balancer.core.types import Outcome
from hetlb.tools.sim.integrity import check_scheduler, check_tree

#: Prefixes of a prompt as turns taken in a tree: equal ways are equal prefixes of equal length.
PATHS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map("".join)
TURN_TOKENS = {"a": 100, "b": 70}
MOST_UNUSED_NODES = 6


def length(way: str) -> int:
    return sum(TURN_TOKENS[turn] for turn in way)


def keys_of(path: str) -> tuple[PrefixKey, ...]:
    return tuple((path[: i + 1], length(path[: i + 1])) for i in range(len(path)))


class IndexMachine(RuleBasedStateMachine):
    """Two trees under all that leases and engines do, beside sets of what is used and what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(MOST_UNUSED_NODES)
        self.trees = [Tree(self.index, number) for number in range(2)]
        self.retired: list[Tree] = []
        self.leases: list[tuple[Tree, str, Shared]] = []

    def teardown(self) -> None:
        for tree, _, shared in self.leases:
            tree.detach(shared.node)
        for tree in (*self.trees, *self.retired):
            tree.retire()
            assert (tree.used_tokens, tree.unused_tokens, tree.nodes) == (0, 0, {})
        assert (len(self.index), self.index.unused) == (0, 0)

    def used(self, tree: Tree) -> set[str]:
        """Prefixes that live leases use there."""
        ways = (way for at, way, _ in self.leases if at is tree)
        return {way[: i + 1] for way in ways for i in range(len(way))}

    @rule(number=st.integers(0, 1), path=PATHS, more=st.integers(1, 50))
    def attach(self, number: int, path: str, more: int) -> None:
        tree = self.trees[number]
        before, known = self.used(tree), set(tree.nodes)
        held = max((length(path[:i]) for i in range(1, len(path) + 1) if path[:i] in known), default=0)
        prompt = length(path) + more
        shared = tree.attach(keys_of(path), prompt)
        self.leases.append((tree, path, shared))
        new = self.used(tree) - before
        assert shared.new_tokens == sum(TURN_TOKENS[way[-1]] for way in new)
        assert shared.tokens == length(path)
        assert shared.held_tokens == min(held, prompt - 1)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), answer=st.integers(1, 90), remembers=st.booleans())
    def detach(self, data: st.DataObject, answer: int, remembers: bool) -> None:
        place = data.draw(st.integers(0, len(self.leases) - 1))
        tree, path, shared = self.leases[place]
        if remembers:
            tree.remember("session:" + path, length(path) + answer, shared.node)
        before = self.used(tree)
        del self.leases[place]
        freed = tree.detach(shared.node)
        assert freed == sum(TURN_TOKENS[way[-1]] for way in before - self.used(tree))

    @rule(number=st.integers(0, 1), room=st.integers(-100, 900))
    def evict(self, number: int, room: int) -> None:
        tree = self.trees[number]
        used = self.used(tree)
        tree.evict(room)
        assert tree.unused_tokens <= max(0, room)
        assert used <= tree.nodes.keys()
        assert self.index.unused <= MOST_UNUSED_NODES or not tree.unused

    @rule(number=st.integers(0, 1))
    def retire(self, number: int) -> None:
        tree = self.trees[number]
        tree.retire()
        self.retired.append(tree)
        self.trees[number] = Tree(self.index, tree.cache_id + 2)

    @rule(number=st.integers(0, 1), held=st.integers(0, 500), idle=st.floats(0, 1), share=st.floats(0, 1))
    def correct(self, number: int, held: int, idle: float, share: float) -> None:
        tree = self.trees[number]
        before = tree.share
        shared = Shared(None, held, 0, held, int(idle * held))
        tree.correct(shared, int(share * held))
        assert LEAST_SHARE <= tree.share <= 1.0
        assert tree.share >= before or shared.idle_tokens >= 64

    @rule(path=PATHS, more=st.integers(0, 50))
    def ask(self, path: str, more: int) -> None:
        """`held` is the longest prefix in each tree."""
        prompt = length(path) + more
        found = self.index.held(keys_of(path), prompt)
        expected = {}
        for tree in (*self.trees, *self.retired):
            ways = [path[:i] for i in range(1, len(path) + 1) if path[:i] in tree.nodes]
            if ways:
                expected[tree.cache_id] = min(length(max(ways, key=len)), prompt - 1)
        assert (found.tokens if found else {}) == {k: v for k, v in expected.items() if v}

    @invariant()
    def counts_are_exact(self) -> None:
        for tree in (*self.trees, *self.retired):
            check_tree(tree)
            used = self.used(tree)
            assert {key for key, node in tree.nodes.items() if node.users} == used
            assert tree.used_tokens == sum(TURN_TOKENS[way[-1]] for way in used)
            for way in tree.nodes:
                if not way.startswith("session:") and len(way) > 1:
                    assert way[:-1] in tree.nodes, "a prefix left before what begins with it"
        unused = sum(len(tree.unused) for tree in (*self.trees, *self.retired))
        assert self.index.unused == unused


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_a_chain_with_a_key_skipped_is_booked_and_given_back_all_the_same() -> None:
    """Lengths are estimates: of one text two requests may keep different keys."""
    index = PrefixIndex()
    tree = Tree(index, 1)
    first = tree.attach((("x", 100), ("z", 300)), 400)
    second = tree.attach((("x", 100), ("y", 200), ("z", 300)), 400)
    assert second.tokens == 200
    assert tree.used_tokens == 400
    assert tree.detach(first.node) == 200
    assert tree.detach(second.node) == 200
    check_tree(tree)
    tree.evict(0)
    assert (len(index), index.unused) == (0, 0)


def test_a_conversation_is_held_with_its_answer_until_its_next_turn_takes_it_over() -> None:
    index = PrefixIndex()
    tree = Tree(index, 1)
    turn = (("session:s", None), ("x", 100))
    shared = tree.attach(turn, 150)
    assert shared.held_tokens == 0
    tree.remember("session:s", 170, shared.node)
    tree.detach(shared.node)
    assert tree.unused_tokens == 170
    following = tree.attach(turn, 200)
    assert following.held_tokens == 170
    assert "session:s" not in tree.nodes


# --- in the scheduler ---

SESSION = (("session:a", None),)


def turn(i: int, prompt: int = 3000, **more: Any) -> Any:
    return request(i, prompt=prompt, prefix_keys=SESSION, **more)


def fleet() -> Any:
    return make_scheduler([spec("a", kv=1_000_000), spec("b", kv=1_000_000)], "hetlb")


def test_a_conversation_returns_to_its_instance() -> None:
    scheduler = fleet()
    lease = dispatched(scheduler.on_arrival(turn(1), 0.0))
    busy = dispatched(scheduler.on_arrival(request(2, prompt=3000), 0.0))
    assert (lease.instance, busy.instance) == ("a", "b")
    for each in (busy, lease):
        scheduler.on_first_token(each, 0.5)
        scheduler.on_lease_ended(each, Outcome.OK, 1.0)
    running = dispatched(scheduler.on_arrival(request(3, prompt=100), 1.5))
    assert running.instance == "a"
    scheduler.on_first_token(running, 1.9)
    # `a` still answers one, `b` is idle: another request goes to `b`, the next turn to `a`.
    other = dispatched(scheduler.on_arrival(request(4, prompt=3000), 2.0))
    assert other.instance == "b"
    scheduler.on_lease_ended(other, Outcome.OK, 2.5)
    assert dispatched(scheduler.on_arrival(turn(5, prompt=3200), 3.0)).instance == "a"


def test_never_against_balance() -> None:
    scheduler = fleet()
    chosen = [dispatched(scheduler.on_arrival(turn(i), 0.0)).instance for i in range(12)]
    assert set(chosen) == {"a", "b"}


def test_an_instance_that_left_holds_nothing() -> None:
    scheduler = fleet()
    leases = [dispatched(scheduler.on_arrival(turn(i), 0.0)) for i in (1, 2)]
    for lease in leases:
        scheduler.on_first_token(lease, 0.5)
    scheduler.on_lease_ended(leases[0], Outcome.OK, 1.0)
    for name in "ab":
        scheduler.on_instance(InstanceRemoved(name), 2.0)
        scheduler.on_instance(InstanceAdded(spec(name, kv=1_000_000)), 3.0)
    scheduler.on_lease_ended(leases[1], Outcome.OK, 4.0)
    assert (len(scheduler.fleet.prefixes), scheduler.fleet.prefixes.unused) == (0, 0)


def test_requests_that_share_a_prompt_book_it_once() -> None:
    scheduler = make_scheduler([spec("a", kv=1_000_000)], "hetlb")
    keys = (("x", 2000), ("y", 4000))
    [instance] = scheduler.instances
    leases = []
    for number in range(8):
        asked = request(number, prompt=4100, max_tokens=10, prefix_keys=keys)
        leases.append(dispatched(scheduler.on_arrival(asked, 0.0)))
    answers = sum(lease.kv_tokens - lease.kv_prompt_tokens for lease in leases)
    assert instance.kv_tokens == 4000 + 8 * 100 + answers
    assert instance.promised_tokens == 8 * 4100 + answers
    assert instance.pending_prompt_tokens == 4100 + 7 * 100
    for before, after in pairwise(leases):
        assert after.unread_tokens <= before.unread_tokens
    for lease in leases:
        scheduler.on_lease_ended(lease, Outcome.OK, 1.0)
        check_scheduler(scheduler)
    assert instance.kv_tokens == 0


def test_samples_of_one_prompt_book_it_once() -> None:
    scheduler = make_scheduler([spec("a", kv=1_000_000)], "hetlb")
    asked = request(1, prompt=1000, max_tokens=10, sequences=8, samples=8)
    lease = dispatched(scheduler.on_arrival(asked, 0.0))
    assert (lease.kv_prompt_tokens, lease.unread_tokens) == (1000, 1000)
    assert lease.prompt_tokens == 8000


def test_an_engine_without_a_prefix_cache_shares_nothing() -> None:
    capacity = spec("a", kv=1_000_000).capacity.updated(type(spec("a").capacity)(enable_prefix_caching=False))
    scheduler = make_scheduler([spec("a", capacity=capacity)], "hetlb")
    for number in range(2):
        asked = request(number, prompt=1000, prefix_keys=(("x", 900),))
        assert dispatched(scheduler.on_arrival(asked, 0.0)).unread_tokens == 1000
    assert len(scheduler.fleet.prefixes) == 0
