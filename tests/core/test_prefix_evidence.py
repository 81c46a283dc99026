"""Belief about a prefix cache against what its engine reports."""

from __future__ import annotations

from array import array

from helpers import dispatched, make_scheduler, request, spec

from hetlb.core.block_index import BlocksRemoved, BlocksStored, KvEventBatch, block_digests
from hetlb.core.instance import Instance
from hetlb.core.prefix_index import PrefixIndex, PrefixKey, Tree
from hetlb.core.types import Capacity, CapacityLearned, Outcome

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
    tree = Tree(PrefixIndex(), 1)
    tree.told = True
    tree.detach(tree.attach(KEYS, 1200).node)
    tree.evict(0)
    assert tree.unused_tokens == 1000
    tree.evicted(300)
    assert tree.unused_tokens == 1000
    tree.evicted(300)
    assert tree.unused_tokens == 500
    tree.clear()
    assert tree.unused_tokens == 0
    tree.check_integrity()


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
    scheduler.check_integrity()
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
    scheduler.check_integrity()


def test_blocks_that_an_engine_told_of_and_those_on_their_way_are_not_read_again() -> None:
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
    scheduler.check_integrity()
