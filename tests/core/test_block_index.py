"""The index of an engine's blocks: what it says is held is what an LRU cache of blocks holds."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.block_index import (
    BlockIndex,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEventBatch,
    block_digests,
)

SIZE = 4


def digests(ids: list[int]) -> tuple[int, tuple[int, ...]]:
    return SIZE, block_digests(array("q", ids), SIZE)


class Cache:
    """Blocks by the ids up to their end, evicted least recently used first, with the events of that."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self.named = 0

    def read(self, ids: list[int]) -> KvEventBatch:
        ends = range(SIZE, len(ids) + 1, SIZE)
        parent, stored, names = None, [], []
        events: list[BlocksStored | BlocksRemoved] = []
        for end in ends:
            key = tuple(ids[:end])
            if key in self.blocks and not stored:
                parent = self.blocks[key]
            else:
                self.named += 1
                self.blocks[key] = self.named
                stored.append(key)
                names.append(self.named)
        for end in reversed(ends):  # the end of a prompt is evicted before its beginning
            self.blocks.move_to_end(tuple(ids[:end]))
        if stored:
            contents = block_digests(array("q", [i for key in stored for i in key[-SIZE:]]), SIZE)
            events.append(BlocksStored(tuple(names), parent, contents, SIZE))
        gone = []
        while len(self.blocks) > self.room:
            gone.append(self.blocks.popitem(last=False)[1])
        if gone:
            events.append(BlocksRemoved(tuple(gone)))
        return KvEventBatch(tuple(events))

    def held(self, ids: list[int]) -> int:
        count = 0
        while (end := (count + 1) * SIZE) <= len(ids) and tuple(ids[:end]) in self.blocks:
            count += 1
        return count * SIZE


@given(st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=30), st.integers(1, 12))
def test_it_says_what_a_cache_holds(prompts: list[list[int]], room: int) -> None:
    cache, index = Cache(room), BlockIndex()
    index.apply(KvEventBatch(begins=True))
    for ids in prompts:
        if index.block_tokens:
            assert index.held("m", digests(ids)) == cache.held(ids)
        index.apply(cache.read(ids))
    assert index.stored_tokens == len(cache.blocks) * SIZE


def stored(ids: list[int], names: tuple[int, ...], **more: object) -> BlocksStored:
    return BlocksStored(names, None, digests(ids)[1], SIZE, **more)  # type: ignore[arg-type]


def live(*events: BlocksStored | BlocksRemoved | BlocksCleared) -> BlockIndex:
    index = BlockIndex()
    index.apply(KvEventBatch(events, begins=True))
    return index


def test_a_block_that_is_there_twice_is_removed_twice() -> None:
    ids = [1, 2, 3, 4]
    index = live(stored(ids, (7,)), stored(ids, (7,)))
    index.apply(KvEventBatch((BlocksRemoved((7,)),)))
    assert index.held("m", digests(ids)) == 4
    index.apply(KvEventBatch((BlocksRemoved((7,)),)))
    assert index.held("m", digests(ids)) == 0


def test_missed_events_end_belief_until_the_cache_is_known_to_be_empty() -> None:
    ids = [1, 2, 3, 4]
    index = live(stored(ids, (7,)))
    index.apply(KvEventBatch(lost="3 to 5 were missed"))
    assert (index.live, index.reason) == (False, "3 to 5 were missed")
    index.apply(KvEventBatch((stored(ids, (8,)),)))
    assert index.held("m", digests(ids)) == 0
    index.apply(KvEventBatch((BlocksCleared(), stored(ids, (9,)))))
    assert (index.live, index.held("m", digests(ids))) == (True, 4)
    index.apply(KvEventBatch((BlocksStored((11,), 10, (1,), SIZE),)))
    assert not index.live


def test_prompts_on_their_way_are_held_until_they_end() -> None:
    index = live(stored([9] * SIZE, (1,)))
    blocks = digests([1, 2, 3, 4, 5, 6, 7, 8])
    index.begin(1, "m", blocks)
    index.begin(2, "m", blocks)
    index.end(1)
    assert index.held("m", blocks) == 8
    index.end(2)
    index.end(3)
    assert index.held("m", blocks) == 0


def test_adapters_and_salts_have_blocks_of_their_own() -> None:
    ids = [1, 2, 3, 4]
    index = live(stored(ids, (1,), adapter="lora"))
    assert (index.held("lora", digests(ids)), index.held("m", digests(ids))) == (4, 0)
    salted = block_digests(array("q", ids), SIZE, ("salt",))
    assert salted != digests(ids)[1]
