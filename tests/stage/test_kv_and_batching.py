"""Paged KV and batching: blocks are never shared or lost, passes run in order, the oldest lease proceeds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.stage.batching import Batcher, BlockTable, StageBlocks
from hetlb.tools.stage.stage_messages import Opening, Pass, RouteHop, Sampling

SIZE = 4


def opening(first: int, end: int) -> Opening:
    return Opening((RouteHop("here", first, end), RouteHop("next", end, 99)), Sampling(1))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=30))
def test_blocks_belong_to_one_table_and_come_back(steps: list[tuple[int, int]]) -> None:
    pool = StageBlocks(64, SIZE)
    tables = {i: BlockTable(i, i + 1 + i % 3) for i in range(6)}
    held = dict.fromkeys(tables, 0)
    for which, tokens in steps:
        table = tables[which]
        if held[which] and tokens % 5 == 0:
            pool.release(table)
            held[which] = 0
        elif pool.reserve(table, held[which] + tokens):
            held[which] += tokens
        blocks = [int(block) for each in tables.values() for block in each.blocks.ravel()]
        assert len(set(blocks)) == len(blocks) == pool.used
        for i, each in tables.items():
            assert each.blocks.shape == (each.end - each.first, -(-held[i] // SIZE))
    for table in tables.values():
        pool.release(table)
    assert pool.used == 0


def test_slots_follow_the_table() -> None:
    pool, table = StageBlocks(8, SIZE), BlockTable(3, 5)
    assert pool.reserve(table, 10)
    for layer in (3, 4):
        row = table.rows(layer, layer + 1)[0]
        expected = [int(row[at // SIZE]) * SIZE + at % SIZE for at in range(2, 9)]
        assert table.slots(layer, layer + 1, 2, 7, SIZE)[0].tolist() == expected
    assert table.slots(3, 5, 0, 10, SIZE).shape == (2, 10)
    assert not pool.reserve(BlockTable(0, 1), 100), "nothing is taken where blocks are missing"
    assert pool.used == 6


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 30)), min_size=1, max_size=40),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(8, 60),
)
def test_batches_keep_order_and_limits(
    passes: list[tuple[int, int]], budget: int, seats: int, blocks: int
) -> None:
    pool = StageBlocks(blocks, SIZE)
    batcher = Batcher(pool, max_num_seqs=seats, max_num_batched_tokens=budget)
    sent: dict[int, int] = {}
    computed: dict[int, int] = {}
    gone: set[int] = set()
    for lease, count in passes:
        first = lease not in sent
        rows = memoryview(bytes(4 * count))
        batcher.add(Pass(lease, 0, sent.get(lease, 0), count, True), opening(0, 2) if first else None, rows)
        sent[lease] = sent.get(lease, 0) + count
    for _ in range(2000):
        works = batcher.form(lambda lease: True)
        given_up, batcher.lost = batcher.lost, []
        gone |= {lease for each in given_up for lease in each.leases}
        assert len(works) <= seats
        assert sum(work.count for work in works) <= budget
        assert len({work.lease.id for work in works}) == len(works)
        for work in works:
            assert work.position == computed.get(work.lease.id, 0)
            assert len(work.rows) == 4 * work.count
            computed[work.lease.id] = work.position + work.count
        batcher.done()
        if not works and not given_up:
            finished = [lease for lease in batcher.leases if computed.get(lease, 0) == sent[lease]]
            if not finished:
                break
            for lease in finished:
                batcher.close(lease)
    assert not batcher.leases, "the oldest always proceeds"
    assert pool.used == 0
    assert batcher.waiting == 0
    assert batcher.waiting_bytes == 0
    assert all(computed[lease] == sent[lease] for lease in sent if lease not in gone)


def test_a_lease_closed_while_its_batch_runs_keeps_its_blocks_until_then() -> None:
    pool = StageBlocks(8, SIZE)
    batcher = Batcher(pool, max_num_seqs=4, max_num_batched_tokens=64)
    batcher.add(Pass(1, 0, 0, 4, True), opening(0, 2), memoryview(bytes(16)))
    works = batcher.form(lambda lease: True)
    batcher.close(1)
    assert works[0].lease.table.blocks.size == pool.used == 2
    batcher.done()
    assert pool.used == 0


def test_a_lease_whose_output_cannot_leave_waits() -> None:
    batcher = Batcher(StageBlocks(8, SIZE), max_num_seqs=4, max_num_batched_tokens=64)
    batcher.add(Pass(1, 0, 0, 4, True), opening(0, 2), memoryview(bytes(16)))
    assert batcher.form(lambda lease: False) == []
    assert len(batcher.form(lambda lease: True)) == 1


def test_a_pass_that_skips_tokens_ends_its_lease() -> None:
    batcher = Batcher(StageBlocks(8, SIZE), max_num_seqs=4, max_num_batched_tokens=64)
    batcher.add(Pass(1, 0, 0, 4, True), opening(0, 2), memoryview(bytes(16)))
    batcher.add(Pass(1, 0, 5, 1, True), None, memoryview(bytes(4)))
    batcher.form(lambda lease: True)
    batcher.done()
    assert not batcher.form(lambda lease: True)
    assert [each.leases for each in batcher.lost] == [[1]]
    assert batcher.lost[0].reason
