"""Belief about a prefix cache against what its engine reports."""

from __future__ import annotations

import math
from array import array

import pytest
from helpers import dispatched, make_scheduler, request, spec

from hetlb.balancer.core.block_index import (
    BlockIndex,
    BlocksRemoved,
    BlocksStored,
    KvEventBatch,
    block_digests,
)
from hetlb.balancer.core.facts import CapacityLearned
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.prefix_index import LEAST_SHARE, LEAST_TOKENS, PrefixIndex, PrefixKey, Shared, Tree
from hetlb.balancer.core.types import Capacity, Outcome
from hetlb.tools.sim.integrity import check_scheduler, check_tree

KEYS: tuple[PrefixKey, ...] = (("a", 500), ("b", 1000))


def test_a_prefix_that_was_evicted_shrinks_what_is_believed_to_be_kept() -> None:
    tree = Tree(PrefixIndex(), 1)
    tree.detach(tree.attach(KEYS, 1200).node)
    again = tree.attach(KEYS, 1200)
    assert (again.held_tokens, again.idle_tokens) == (1000, 1000)
    tree.correct(again, 992)
    assert tree.share == 1.0
    tree.correct(again, 496)
    assert tree.share < 1.0


def test_a_prefix_that_others_are_reading_says_nothing_of_eviction() -> None:
    tree = Tree(PrefixIndex(), 1)
    tree.attach(KEYS, 1200)
    second = tree.attach(KEYS, 1200)
    assert (second.held_tokens, second.idle_tokens) == (1000, 0)
    tree.correct(second, 0)
    assert tree.share == 1.0


def test_reported_evictions_replace_guesses() -> None:
    tree, blocks = Tree(PrefixIndex(), 1), BlockIndex()
    tree.told = True
    tree.detach(tree.attach(KEYS, 1200).node)
    tree.evict(0)
    assert tree.unused_tokens == 1000
    blocks.evicted(tree, 300)
    assert tree.unused_tokens == 1000
    blocks.evicted(tree, 300)
    assert tree.unused_tokens == 500
    blocks.evicted(tree, math.inf)
    assert tree.unused_tokens == 0
    check_tree(tree)


def used(tree: Tree, *keys: PrefixKey, prompt: int = 5000) -> Shared:
    """What a request brought that has ended."""
    shared = tree.attach(keys, prompt)
    tree.detach(shared.node)
    return shared


def test_a_report_counts_from_a_least_number_of_tokens_that_no_request_used() -> None:
    tree = Tree(PrefixIndex(), 1)
    tree.correct(Shared(None, 0, 0, 63, 63), 0)
    assert tree.share == 1.0
    tree.correct(Shared(None, 0, 0, 64, 64), 0)
    assert tree.share == 0.8
    tree.told = True
    tree.correct(Shared(None, 0, 0, 64, 64), 0)
    assert tree.share == 0.8, "it tells what it evicts"


def test_an_expectation_is_met_from_three_quarters_of_what_no_request_used() -> None:
    tree, shared = Tree(PrefixIndex(), 1), Shared(None, 0, 0, 1000, 400)
    tree.correct(shared, 900)
    assert tree.share == 1.0
    tree.correct(shared, 899)
    assert tree.share == 0.8
    tree.correct(shared, 900)
    assert tree.share == 0.8 * 1.02
    for _ in range(20):
        tree.correct(shared, 2000)
    assert tree.share == 1.0
    for _ in range(40):
        tree.correct(shared, 0)
    assert tree.share == LEAST_SHARE


def test_unused_prefixes_stay_within_their_share_of_the_room() -> None:
    tree = Tree(PrefixIndex(), 1)
    for name in "abcd":
        used(tree, (name, 100))
    tree.evict(400)
    assert list(tree.unused) == ["a", "b", "c", "d"]
    tree.evict(399)
    assert list(tree.unused) == ["b", "c", "d"]
    used(tree, ("b", 100))
    tree.share = 0.5
    tree.evict(400)
    assert list(tree.unused) == ["d", "b"], "the one used last goes last"
    check_tree(tree)


def test_an_index_forgets_the_oldest_beyond_its_number_whatever_the_room() -> None:
    index = PrefixIndex(most_unused=3)
    tree, other = Tree(index, 1), Tree(index, 2)
    used(other, ("z", 10))
    for name in "abc":
        used(tree, (name, 100))
    tree.told = True
    tree.evict(10**9)
    assert (list(tree.unused), list(other.unused), index.unused) == (["b", "c"], ["z"], 3)


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    tree, blocks = Tree(PrefixIndex(), 1), BlockIndex()
    used(tree, ("x", 100), ("y", 300), ("z", 350))
    assert [(node.key, node.own, node.tokens) for node in tree.unused.values()] == [
        ("z", 50, 350),
        ("y", 200, 300),
        ("x", 100, 100),
    ]
    blocks.evicted(tree, 49)
    assert tree.unused_tokens == 350
    blocks.evicted(tree, 1)
    assert tree.unused_tokens == 300
    blocks.evicted(tree, 1000)
    assert (tree.unused_tokens, tree.nodes) == (0, {})
    used(tree, ("x", 100))
    blocks.evicted(tree, 99)
    assert tree.unused_tokens == 100, "what was evicted beyond all of it counts no more"


def test_keys_that_do_not_go_on_are_passed_over() -> None:
    """Ends that do not grow, or that lie behind the end of the prompt."""
    tree = Tree(PrefixIndex(), 1)
    shared = tree.attach((("a", 100), ("b", 100), ("c", 90), ("d", 200), ("e", 201)), 200)
    assert (shared.tokens, shared.new_tokens, list(tree.nodes)) == (200, 200, ["a", "d"])
    again = tree.attach((("a", 100), ("d", 200)), 200)
    assert (again.tokens, again.new_tokens, again.held_tokens, again.idle_tokens) == (200, 0, 199, 0)
    assert tree.detach(again.node) == 0
    assert tree.detach(shared.node) == 200
    idle = tree.attach((("a", 100), ("x", 150)), 200)
    assert (idle.held_tokens, idle.idle_tokens, idle.new_tokens) == (100, 100, 150)


def test_a_conversation_is_remembered_once_and_from_its_longest_turn() -> None:
    index = PrefixIndex()
    tree = Tree(index, 1)
    tree.remember("s", 300, None)
    tree.remember("s", 500, None)
    assert (tree.unused_tokens, len(index), index.unused) == (500, 1, 1)
    shared = tree.attach((("x", 400),), 450)
    tree.remember("t", 400, shared.node)
    tree.remember("t", 400 + LEAST_TOKENS, shared.node)
    assert (tree.nodes["t"].own, tree.nodes["t"].tokens) == (LEAST_TOKENS, 400 + LEAST_TOKENS)
    check_tree(tree)
    tree.remember("t", 399 + LEAST_TOKENS, shared.node)
    assert "t" not in tree.nodes, "there is little beyond its prefix"
    check_tree(tree)


def test_short_conversations_are_not_kept() -> None:
    """Clients that say a word and never come again."""
    scheduler = make_scheduler([spec("a")], "hetlb")
    for number in range(100):
        keys = ((f"session:{number}", None),)
        lease = dispatched(scheduler.on_arrival(request(number, prompt=9, prefix_keys=keys), float(number)))
        scheduler.on_lease_ended(lease, Outcome.OK, number + 0.5, generated=LEAST_TOKENS - 10)
    assert not len(scheduler.fleet.prefixes)


def test_each_engine_holds_what_its_own_tree_does() -> None:
    index = PrefixIndex()
    trees = [Tree(index, number) for number in range(3)]
    for _ in range(2):
        trees[0].attach((("x", 1000),), 2000)
    trees[0].attach((("x", 1000), ("y", 1600)), 2000)
    used(trees[1], ("x", 1000))
    trees[2].remember("s", 700, None)
    keys: tuple[PrefixKey, ...] = (("s", None), ("x", 1000), ("y", 1600), ("z", 1700))
    found = index.held(keys, 2000)
    assert found is not None
    assert found.tokens == {0: 1600, 1: 1000, 2: 700}
    short = index.held(keys, 1301)
    assert short is not None
    assert short.tokens == {0: 1300, 1: 1000, 2: 700}
    assert index.held((("none", None), ("z", 1700)), 2000) is None
    assert index.held((("none", 10), ("x", 1000)), 2000) is None
    behind = index.held((("none", None), ("x", 1000)), 2000)
    assert behind is not None
    assert behind.tokens == {0: 1000, 1: 1000}


def test_others_pay_for_what_more_of_them_use_than_its_holders_have_in_the_mean() -> None:
    index = PrefixIndex()
    trees = [Tree(index, number) for number in range(3)]
    for _ in range(8):
        trees[0].attach((("system", 1000), ("tools", 1400)), 2000)
    trees[1].attach((("system", 1000),), 2000)
    keys: tuple[PrefixKey, ...] = (("system", 1000), ("tools", 1400))
    found = index.held(keys, 2000, 3.0)
    assert found is not None
    # Of the first 1000 tokens 9 - 2 * 3 others pay, of the next 400 8 - 3.
    assert found.paid_tokens(2) == pytest.approx(1000 * 3 / 4 + 400 * 5 / 6)
    assert found.paid_tokens(1) == pytest.approx(400 * 5 / 6)
    assert found.paid_tokens(0) == 0.0
    usual = index.held(keys, 2000, 8.0)
    assert usual is not None
    assert usual.paid_tokens(2) == 0.0, "each engine can serve its own"


def test_a_tree_whose_counts_are_wrong_is_noticed() -> None:
    def wrong_used(tree: Tree) -> None:
        tree.used_tokens += 1

    def wrong_unused(tree: Tree) -> None:
        tree.unused_tokens -= 1

    def negative(tree: Tree) -> None:
        tree.nodes["a"].users = -1
        tree.used_tokens = 100

    def lost(tree: Tree) -> None:
        tree.unused_tokens -= tree.unused.pop("b").own

    for break_it, says in (
        (wrong_used, "^tokens in use"),
        (wrong_unused, "^unused tokens"),
        (negative, "^negative users"),
        (lost, "^unused nodes"),
    ):
        tree = Tree(PrefixIndex(), 1)
        tree.attach((("a", 100),), 500)
        used(tree, ("b", 100))
        check_tree(tree)
        break_it(tree)
        with pytest.raises(AssertionError, match=says):
            check_tree(tree)


def ended(first: str, **facts: object) -> tuple[Instance, str]:
    scheduler = make_scheduler([spec("x", kv=100_000), spec("y", kv=100_000)], "hetlb")
    for name, caches in facts.items():
        scheduler.on_instance(CapacityLearned(name, Capacity(enable_prefix_caching=bool(caches))), 0.0)
    for number in (1, 2):
        lease = dispatched(
            scheduler.on_arrival(request(number, prompt=5000, prefix_keys=(("k", 5000),)), 0.0)
        )
        scheduler.on_first_token(lease, 1.0)
        scheduler.on_lease_ended(lease, Outcome.OK, 2.0)
    check_scheduler(scheduler)
    return next(each for each in scheduler.instances if each.name == first), lease.instance


def test_an_engine_without_a_cache_gets_no_discount() -> None:
    instance, _ = ended("x", x=True, y=True)
    assert instance.tree.nodes
    instance, _ = ended("x", x=False, y=False)
    assert not instance.tree.nodes


def test_events_of_blocks_take_the_tree_s_part_of_what_was_evicted() -> None:
    scheduler = make_scheduler([spec("x", kv=100_000)], "hetlb")
    lease = dispatched(scheduler.on_arrival(request(1, prompt=5000, prefix_keys=KEYS), 0.0))
    names = tuple(range(100))
    stored = BlocksStored(names, None, names, 100)
    scheduler.on_kv_events("x", KvEventBatch((stored,), begins=True), 0.5)
    scheduler.on_first_token(lease, 1.0)
    scheduler.on_lease_ended(lease, Outcome.OK, 2.0)
    [instance] = scheduler.instances
    assert instance.tree.unused_tokens == 1000
    scheduler.on_kv_events("x", KvEventBatch((BlocksRemoved(names[50:]),)), 3.0)
    assert instance.tree.unused_tokens == 500  # half of all blocks
    check_scheduler(scheduler)


def test_blocks_that_are_published_or_on_their_way_are_not_read_again() -> None:
    digests = block_digests(array("q", range(1200)), 100)
    scheduler = make_scheduler([spec("x", kv=100_000)], "hetlb")
    stored = BlocksStored(tuple(range(8)), None, digests[:8], 100)
    scheduler.on_kv_events("x", KvEventBatch((stored,), begins=True), 0.0)
    sent = request(1, prompt=1200, blocks=(100, digests))
    first = dispatched(scheduler.on_arrival(sent, 1.0))
    assert first.shared is not None
    assert (first.unread_tokens, first.shared.held_tokens, first.shared.tokens) == (400, 800, 0)
    second = dispatched(scheduler.on_arrival(request(2, prompt=1200, blocks=(100, digests)), 1.0))
    assert second.unread_tokens == 1  # the first one is about to read the rest
    for lease in (first, second):
        scheduler.on_lease_ended(lease, Outcome.CLIENT_GONE, 2.0)
    third = dispatched(scheduler.on_arrival(request(3, prompt=1200, blocks=(100, digests)), 3.0))
    assert third.unread_tokens == 400
    check_scheduler(scheduler)
