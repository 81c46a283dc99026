"""The prefix cache finds what vLLM's would: blocks from the beginning on, least recently used evicted first.

`PlainEngine` is the oracle for one request at a time; together, the fast engine must agree with itself step
by step and its books must add up.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.plain_engine import PlainEngine, PlainSequence

from hetlb.balancer.core.latency import LatencyModel
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence, SequenceState
from hetlb.tools.workload.rows import Row, contents_of

LATENCY = LatencyModel(k1=1e-4, k2=1e-3, k3=2e-6, k4=1e-2, k5=5e-8, k6=6e-5, k7=1e-7, k8=1.3e-2)


# --- the oracle --------------------------------------------------------------------------------------


def found_by_the_plain_engine(engine: PlainEngine, ask: Ask, number: int) -> int:
    """One request alone, from its prompt to its last token; the tokens that were found."""
    before = engine.found_tokens
    engine.submit(PlainSequence(number, ask.prompt, ask.output, ask.tokens()))
    while engine.begin() is not None:
        engine.end()
    return engine.found_tokens - before


@dataclass(frozen=True)
class Ask:
    pieces: tuple[tuple[Hashable, int], ...]
    own: int  # prompt tokens that no other request has
    output: int
    answer: Hashable | None

    @property
    def prompt(self) -> int:
        return sum(tokens for _, tokens in self.pieces) + self.own

    def sequence(self) -> EngineSequence:
        return EngineSequence(self.prompt, self.output, pieces=self.pieces, answer=self.answer)

    def tokens(self) -> list[Hashable]:
        """Return a name of every token that gets into the cache."""
        named: list[Hashable] = [(key, i) for key, tokens in self.pieces for i in range(tokens)]
        named += [("own", id(self), i) for i in range(self.own)]
        answer = ("out", id(self)) if self.answer is None else self.answer
        return named + [(answer, i) for i in range(self.output - 1)]


@st.composite
def asks(draw: st.DrawFn) -> list[Ask]:
    """Paths through a small tree of pieces, each with a tail of its own; and the turns of conversations."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=9, max_size=9))
    found = []
    for _ in range(draw(st.integers(1, 25))):
        path = draw(st.lists(st.integers(0, 2), max_size=3))
        pieces = tuple(((depth, key), lengths[3 * depth + key]) for depth, key in enumerate(path))
        found.append(Ask(pieces, draw(st.integers(1, 20)), draw(st.integers(1, 30)), None))
    for session in range(draw(st.integers(0, 3))):
        said: tuple[tuple[Hashable, int], ...] = ()
        for turn in range(draw(st.integers(1, 5))):
            said = (*said, (("says", session, turn), draw(st.integers(1, 20))))
            answer, output = ("answer", session, turn), draw(st.integers(1, 20))
            found.append(Ask(said, 0, output, answer))
            said = (*said, (answer, output))
    return draw(st.permutations(found)) if draw(st.booleans()) else found


def cached_engine(blocks: int, size: int, *, seqs: int = 6, batched: int = 24) -> EngineModel:
    return EngineModel(LATENCY, EngineLimits(blocks * size, size, seqs, batched), prefix_cache=True)


@settings(max_examples=examples(60))
@given(asks(), st.integers(1, 8), st.integers(45, 200))
def test_one_after_the_other_finds_what_the_block_pool_finds(
    requests: list[Ask], size: int, blocks: int
) -> None:
    engine = cached_engine(blocks, size)
    oracle = PlainEngine(LATENCY, engine.limits)
    for number, ask in enumerate(requests):
        if not engine.limits.fits(ask.prompt, ask.output) or (not ask.own and ask.prompt % size == 0):
            continue  # a last block that is computed again is kept twice by vLLM, and once here
        before, computed = engine.kv.hit_tokens, engine.prefilled_tokens
        engine.submit(ask.sequence())
        while engine.begin_run() is not None:
            engine.check_integrity()
            engine.end_iteration()
            engine.check_integrity()
        found = engine.kv.hit_tokens - before
        assert found == found_by_the_plain_engine(oracle, ask, number)
        assert engine.prefilled_tokens - computed == ask.prompt - found
        assert engine.kv.pool.used_blocks == 0


@settings(max_examples=examples(60))
@given(asks(), st.integers(1, 8), st.integers(12, 90), st.data())
def test_together_stretches_equal_steps_and_the_books_add_up(
    requests: list[Ask], size: int, blocks: int, data: st.DataObject
) -> None:
    fast, slow = cached_engine(blocks, size), cached_engine(blocks, size)
    sent: list[tuple[EngineSequence, EngineSequence]] = []
    waiting = [ask for ask in requests if fast.limits.fits(ask.prompt, ask.output)]
    while waiting or not fast.idle:
        for _ in range(data.draw(st.integers(0 if sent else 1, 4), label="arrivals")):
            if waiting:
                ask = waiting.pop()
                sent.append((ask.sequence(), ask.sequence()))
                fast.submit(sent[-1][0])
                slow.submit(sent[-1][1])
        stretch = fast.begin_run()
        if stretch is None:
            continue
        steps = data.draw(st.integers(1, stretch.steps), label="steps")
        stretch = fast.cut(stretch.elapsed_s(steps) if steps < stretch.steps else stretch.duration_s)
        took = 0.0
        for _ in range(stretch.steps):
            took += slow.begin_iteration() or 0.0
            slow.check_integrity()
            slow.end_iteration()
            slow.check_integrity()
        assert took == pytest.approx(stretch.duration_s)
        fast.check_integrity()
        fast.end_iteration()
        fast.check_integrity()
        for mine, other in sent:
            assert (mine.state, fast.generated(mine)) == (other.state, slow.generated(other))
        assert fast.kv.pool.used_blocks == slow.kv.pool.used_blocks
        assert fast.kv.hit_tokens == slow.kv.hit_tokens
        if data.draw(st.integers(0, 9), label="abort") == 0:
            for mine, other in sent[-1:]:
                fast.abort(mine)
                slow.abort(other)
            fast.check_integrity()
    assert fast.kv.pool.used_blocks == slow.kv.pool.used_blocks == 0
    assert all(mine.state in (SequenceState.FINISHED, SequenceState.ABORTED) for mine, _ in sent)
    assert fast.generated_tokens == slow.generated_tokens


@settings(max_examples=examples(30))
@given(asks(), st.integers(1, 8))
def test_without_anything_in_common_and_with_room_it_changes_nothing(requests: list[Ask], size: int) -> None:
    limits = EngineLimits(4000 * size, size, 6, 24)
    durations = []
    for prefix_cache in (False, True):
        engine = EngineModel(LATENCY, limits, prefix_cache=prefix_cache)
        for ask in requests:
            engine.submit(EngineSequence(ask.prompt, ask.output))
        took = []
        while (stretch := engine.begin_run()) is not None:
            took.append((stretch.steps, stretch.first_s, stretch.increment_s, stretch.decodes))
            engine.end_iteration()
        durations.append(took)
        assert engine.kv.hit_tokens == 0
    assert durations[0] == durations[1]


# --- single cases ------------------------------------------------------------------------------------


def run(engine: EngineModel, *sequences: EngineSequence) -> int:
    """What was found for these, sent together."""
    before = engine.kv.hit_tokens
    for sequence in sequences:
        engine.submit(sequence)
    while engine.begin_run() is not None:
        engine.end_iteration()
        engine.check_integrity()
    return engine.kv.hit_tokens - before


def test_two_that_arrive_together_share_the_prompt_that_the_first_computes() -> None:
    engine = cached_engine(100, 16, batched=2048)
    system = (("system", 64),)
    assert run(engine, EngineSequence(100, 5, pieces=system), EngineSequence(90, 5, pieces=system)) == 64
    assert engine.kv.peak_blocks == 7 + (6 - 4)


def test_the_next_turn_finds_the_last_ones_prompt_and_answer() -> None:
    engine = cached_engine(100, 16, batched=2048)
    first = (("t0", 50),)
    assert run(engine, EngineSequence(50, 40, pieces=first, answer="a0")) == 0
    # 50 + 39 tokens were in the cache (the last one never is): five whole blocks.
    second = (*first, ("a0", 40), ("t1", 30))
    assert run(engine, EngineSequence(120, 10, pieces=second, answer="a1")) == 80


def test_a_turn_sent_before_the_last_answer_has_ended_keeps_blocks_of_its_own() -> None:
    engine = cached_engine(100, 16, batched=64)
    first = (("t0", 48),)
    early = (*first, ("a0", 64), ("t1", 100))
    assert (
        run(
            engine,
            EngineSequence(48, 64, pieces=first, answer="a0"),
            EngineSequence(212, 9, pieces=early, answer="a1"),
        )
        == 48
    )
    assert engine.kv.pool.used_blocks == 0
    late = (*early, ("a1", 9), ("t2", 20))
    assert run(engine, EngineSequence(241, 3, pieces=late)) >= 96


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    engine = cached_engine(4, 16)
    prompt = (("p", 64),)
    assert run(engine, EngineSequence(64, 1, pieces=prompt)) == 0
    assert run(engine, EngineSequence(64, 1, pieces=prompt)) == 48
    assert run(engine, EngineSequence(64, 1, pieces=prompt)) == 48


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning() -> None:
    engine = cached_engine(10, 16, batched=2048)

    def ask(name: str, tokens: int = 65) -> int:
        return run(engine, EngineSequence(tokens, 1, pieces=((name, 64),)))

    assert [ask("a"), ask("b"), ask("a")] == [0, 0, 64]
    run(engine, EngineSequence(33, 1))  # three blocks, of b and of the tails of their own
    assert ask("b") < 64
    assert ask("b") == 64


def test_a_preempted_sequence_finds_what_it_had_computed() -> None:
    engine = cached_engine(12, 16, batched=2048)
    first, second = EngineSequence(80, 60), EngineSequence(80, 60)
    assert run(engine, first, second) > 0
    assert second.preemptions > 0
    assert engine.generated_tokens == 120


# --- what traces say ---------------------------------------------------------------------------------


def row(prompt: int, output: int, session: str = "", turn: str = "", hash_ids: str = "") -> Row:
    return Row(None, prompt, output, session=session, turn=turn, hash_ids=tuple(hash_ids.split()))


def test_hash_ids_are_blocks_and_the_last_one_may_be_short() -> None:
    first, second = contents_of([row(1200, 5, hash_ids="0 1 2"), row(1100, 5, hash_ids="0 1 2")])
    assert first.spans[:2] == second.spans[:2] == ((("", "0", 512), 512), (("", "1", 512), 512))
    assert first.spans[2] != second.spans[2]
    assert sum(tokens for _, tokens in first.spans) == 1200
    assert first.answer is None


def test_turns_of_a_session_begin_with_what_was_said() -> None:
    rows = [
        row(10, 20, session="s", turn="0"),
        row(7, 5, session="other", turn="0"),
        row(45, 0, session="s", turn="1"),
        row(60, 5, session="s", turn="2"),
        row(30, 5, session="s", turn="3"),
    ]
    named = contents_of(rows)
    assert named[2].spans[:2] == (*named[0].spans, (named[0].answer, 20))
    assert named[3].spans[:4] == (*named[2].spans, (named[2].answer, 1))
    assert [sum(tokens for _, tokens in each.spans) for each in named] == [10, 7, 45, 60, 30]
    assert len(named[4].spans) == 1, "expected a shorter prompt to begin anew"
    assert len({each.answer for each in named}) == 5
