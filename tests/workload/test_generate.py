"""Generated traffic has the shape it is named for, and a seed decides all of it."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Callable

import generated_traffic as generate
import pytest
from generated_traffic import AgentTree, Lengths

from hetlb.tools.workload.rows import Row, contents_of

KINDS: dict[str, Callable[[int, random.Random], list[Row]]] = {
    "independent": generate.independent,
    "shared": lambda count, rng: generate.shared_prompts(count, rng, prompts=3),
    "agents": generate.agents,
    "tenants": generate.tenants,
    "samples": lambda count, rng: generate.several_prompts(count, rng, sequences=2, n=4),
    "embeddings": generate.embeddings,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_the_rows(kind: str) -> None:
    first, again, other = (KINDS[kind](200, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == 200
    assert all(row.input_tokens >= 1 and row.output_tokens >= 0 for row in first)


def test_lengths_have_their_median_and_their_ends() -> None:
    rng = random.Random(1)
    drawn = [Lengths(400, 1.0, 100, 5000).draw(rng) for _ in range(4000)]
    assert statistics.median(drawn) == pytest.approx(400, rel=0.08)
    assert (min(drawn), max(drawn)) == (100, 5000)
    assert Lengths(7).draw(rng) == 7


def test_shared_prompts_begin_with_one_of_few() -> None:
    rows = generate.shared_prompts(300, random.Random(1), prompts=5, prefix_tokens=1000)
    spans = {content.spans for content in contents_of(rows)}
    assert spans == {((("", f"prompt-{i}", 1000), 1000),) for i in range(5)}
    assert all(row.input_tokens > 1000 for row in rows)


def test_agents_share_a_tree_and_each_turn_begins_with_the_last() -> None:
    tree = AgentTree(systems=2, toolsets=3, system_tokens=500, tools_tokens=300, open_conversations=10)
    rows = generate.agents(2000, random.Random(4), tree)
    heads = {content.spans[:2] for content in contents_of(rows)}
    assert len(heads) == 6
    assert {head[0] for head in heads} == {(("", f"system-{i}", 500), 500) for i in range(2)}
    turns: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        turns[row.session].append(row)
    for conversation in turns.values():
        assert [row.turn for row in conversation] == [str(i) for i in range(len(conversation))]
        contents = contents_of(conversation)
        for before, after in itertools.pairwise(contents):
            assert after.spans[: len(before.spans)] == before.spans
            assert after.spans[len(before.spans)][0] == before.answer
    assert statistics.mean(len(each) for each in turns.values()) == pytest.approx(6.0, rel=0.2)


def test_a_tenant_explains_about_half_of_how_long_answers_are() -> None:
    rows = generate.tenants(5000, random.Random(2))
    by_tenant = defaultdict(list)
    for row in rows:
        by_tenant[row.tenant].append(row.output_tokens)
    whole = statistics.pvariance([row.output_tokens for row in rows])
    within = sum(len(lengths) * statistics.pvariance(lengths) for lengths in by_tenant.values()) / len(rows)
    assert 0.4 < 1.0 - within / whole < 0.7
    assert max(row.output_tokens for row in rows) == 25_000


def test_others_stand_at_random_places_and_nothing_is_lost() -> None:
    rows = [Row(None, 1, 1)] * 90
    others = [Row(None, 2, 2)] * 10
    mixed = generate.among(rows, others, random.Random(1))
    places = [i for i, row in enumerate(mixed) if row.input_tokens == 2]
    assert len(mixed) == 100
    assert len(places) == 10
    assert max(places) - min(places) > 40
