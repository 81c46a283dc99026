"""Kinds of traffic made from a seed: shared prompts, agents, tenants, many sequences, embeddings.

Every function gives the same rows for the same arguments and the same state of `rng`. Lengths are in tokens.
When the rows are due is decided elsewhere (`arrivals`); they are in an order in which they could arrive.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetlb.tools.workload.rows import Row


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of lengths: `spread` is the deviation of the logarithm. Cut at both ends."""

    median: float
    spread: float = 0.0
    least: int = 1
    most: int = 1 << 20

    def draw(self, rng: random.Random) -> int:
        """One length."""
        drawn = self.median * math.exp(rng.gauss(0.0, self.spread)) if self.spread else self.median
        return min(self.most, max(self.least, round(drawn)))


#: Chat: a short question, a few hundred tokens of answer.
QUESTION = Lengths(120, 0.8, 8, 2000)
ANSWER = Lengths(160, 0.8, 4, 1000)


def independent(
    count: int, rng: random.Random, *, prompt: Lengths = QUESTION, answer: Lengths = ANSWER
) -> list[Row]:
    """Requests that share nothing."""
    return [Row(None, prompt.draw(rng), answer.draw(rng)) for _ in range(count)]


def shared_prompts(
    count: int,
    rng: random.Random,
    *,
    prompts: int = 1,
    prefix_tokens: int = 4096,
    question: Lengths = QUESTION,
    answer: Lengths = ANSWER,
) -> list[Row]:
    """Generate requests that begin with one of `prompts` shared prompts, drawn uniformly."""
    rows = []
    for _ in range(count):
        name = f"prompt-{rng.randrange(prompts)}={prefix_tokens}"
        rows.append(Row(None, prefix_tokens + question.draw(rng), answer.draw(rng), hash_ids=(name,)))
    return rows


@dataclass(frozen=True, slots=True)
class AgentTree:
    """Agents: `systems` system prompts, with `toolsets` lists of tools after each, then a conversation.

    A conversation has `turns` turns on average (geometric); what a turn adds to the prompt is `step` tokens
    (a tool's result, a question), the answer `answer`. `open_conversations` take turns.
    """

    systems: int = 2
    toolsets: int = 4
    system_tokens: int = 2048
    tools_tokens: int = 1536
    turns: float = 6.0
    step: Lengths = Lengths(250, 1.0, 10, 4000)
    answer: Lengths = Lengths(90, 0.8, 5, 800)
    open_conversations: int = 64
    longest_tokens: int = 30_000


def agents(count: int, rng: random.Random, tree: AgentTree = AgentTree()) -> list[Row]:
    """Turns of conversations that share a tree of prefixes: system prompt, tools, conversation."""
    conversations: list[Iterator[Row]] = []
    rows: list[Row] = []
    begun = 0
    while len(rows) < count:
        while len(conversations) < tree.open_conversations:
            conversations.append(_conversation(f"c{begun}", rng, tree))
            begun += 1
        index = rng.randrange(len(conversations))
        row = next(conversations[index], None)
        if row is None:
            conversations[index] = conversations[-1]
            conversations.pop()
        else:
            rows.append(row)
    return rows


def _conversation(session: str, rng: random.Random, tree: AgentTree) -> Iterator[Row]:
    system, tools = rng.randrange(tree.systems), rng.randrange(tree.toolsets)
    head = (f"system-{system}={tree.system_tokens}", f"tools-{system}-{tools}={tree.tools_tokens}")
    tokens, turn = tree.system_tokens + tree.tools_tokens, 0
    while True:
        tokens += tree.step.draw(rng)
        answer = tree.answer.draw(rng)
        if tokens + answer > tree.longest_tokens:
            return
        yield Row(None, tokens, answer, session=session, turn=str(turn), hash_ids=head)
        tokens += answer
        turn += 1
        if rng.random() < 1.0 / tree.turns:
            return


def tenants(
    count: int,
    rng: random.Random,
    *,
    tenants: int = 6,
    shortest: int = 500,
    longest: int = 12_000,
    spread: float = 0.8,
    prompt: Lengths = Lengths(300, 0.8, 16, 4000),
    most: int = 25_000,
) -> list[Row]:
    """Tenants whose answers are of different lengths, each with a heavy tail of its own.

    The tenants' medians lie evenly, on a logarithmic scale, between `shortest` and `longest` tokens.
    """
    kinds = [
        Lengths(shortest * (longest / shortest) ** (i / max(1, tenants - 1)), spread, 16, most)
        for i in range(tenants)
    ]
    rows = []
    for _ in range(count):
        tenant = rng.randrange(tenants)
        rows.append(Row(None, prompt.draw(rng), kinds[tenant].draw(rng), tenant=f"tenant-{tenant}"))
    return rows


def among(rows: list[Row], others: list[Row], rng: random.Random) -> list[Row]:
    """Both, in an order in which the `others` come at random places among the `rows`."""
    places = sorted(rng.sample(range(len(rows) + len(others)), len(others)))
    mixed = list(rows)
    for place, row in zip(places, others, strict=True):
        mixed.insert(place, row)
    return mixed


def several_prompts(
    count: int,
    rng: random.Random,
    *,
    sequences: int = 1,
    n: int = 1,
    prompt: Lengths = QUESTION,
    answer: Lengths = ANSWER,
) -> list[Row]:
    """Completions of `sequences` prompts, with `n` answers to each."""
    return [
        replace(row, sequences=sequences, n=n)
        for row in independent(count, rng, prompt=prompt, answer=answer)
    ]


def embeddings(
    count: int, rng: random.Random, *, inputs: int = 64, prompt: Lengths = Lengths(200, 0.6, 8, 2000)
) -> list[Row]:
    """Requests for the embeddings of `inputs` texts each."""
    return [Row(None, prompt.draw(rng), 0, sequences=inputs, endpoint="embeddings") for _ in range(count)]
