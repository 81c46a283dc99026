"""Shows that the engine model schedules as vLLM V1 does, loses nothing, and that stretches equal steps.

`PlainEngine` is the statement of vLLM's rules that the fast engine is held to.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from operator import attrgetter

import msgspec
import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.plain_engine import PlainEngine, PlainSequence

from hetlb.balancer.config.profile_file import Profile
from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.step_times import PnormPrefill, PrefillGrid, SplitKv
from hetlb.balancer.core.types import Capacity
from hetlb.tools.sim.block_pool import blocks_for
from hetlb.tools.sim.engine_limits import EngineLimits
from hetlb.tools.sim.engine_model import EngineModel
from hetlb.tools.sim.engine_sequence import EngineSequence, SequenceState
from hetlb.tools.sim.iteration_times import IterationEnd, IterationRule, IterationRun
from hetlb.tools.sim.study import engine_of

MAX_EXAMPLES = examples(60)
LATENCY = LatencyModel(k1=1e-4, k2=1e-3, k3=2e-6, k4=1e-2, k5=5e-8, k6=6e-5, k7=1e-7, k8=1.3e-2)
#: Splits of contexts among 8 blocks, so long that either attention may be the longer.
UNEVEN = replace(LATENCY, split_kv=SplitKv(8.0, 3e-7))
BETTER = PnormPrefill(0.01, 1e-4, 1e-9, 2.0, PrefillGrid((1, 16), (128, 4096), ((0.1, 0.0), (0.0, -0.1))))


# --- strategies --------------------------------------------------------------------------------------


@st.composite
def engine_limits(draw: st.DrawFn) -> EngineLimits:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    blocks = draw(st.integers(1, 40))
    seqs = draw(st.integers(1, 8))
    return EngineLimits(
        kv_cache_tokens=blocks * block_size + draw(st.integers(0, block_size - 1)),
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + draw(st.integers(0, 40)),
        enable_prefix_caching=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        max_loras=draw(st.integers(1, 3)),
    )


@st.composite
def loads(draw: st.DrawFn) -> tuple[EngineLimits, list[tuple[int, int, int]]]:
    """Limits, and (arrival step, prompt, output) of sequences that fit, in order of arrival."""
    limits = draw(engine_limits())
    longest = limits.max_sequence_tokens
    sequences = []
    for arrival in sorted(draw(st.lists(st.integers(0, 60), min_size=1, max_size=12))):
        prompt = draw(st.integers(1, longest - 1))
        output = draw(st.integers(0, longest - prompt))
        sequences.append((arrival, prompt, output))
    return limits, sequences


rules = st.sampled_from(list(IterationRule))
#: LoRA adapters of the sequences, "" for the model itself; seconds to load one.
adapters = st.just([""] * 12) | st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=12, max_size=12)
LOAD_S = 0.3


def boundaries_s(stretch: IterationRun, start_s: float) -> list[float]:
    """The time of every step's end, if the stretch began at `start_s`."""
    return [start_s + stretch.elapsed_s(step) for step in range(1, stretch.steps + 1)]


def held_blocks(engine: EngineModel) -> int:
    size = engine.limits.block_size
    return sum(blocks_for(tokens, size) for tokens in engine.fetches.held.values())


def run(engine: EngineModel) -> list[IterationEnd]:
    """Step until idle."""
    ends = []
    while engine.begin_iteration() is not None:
        engine.check_integrity()
        ends.append(engine.end_iteration())
        engine.check_integrity()
    return ends


# --- properties --------------------------------------------------------------------------------------


@given(
    load=loads(),
    rule=rules,
    aborts=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 11)), max_size=4),
    contents=st.booleans(),
    adapters=adapters,
    latency=st.sampled_from([LATENCY, UNEVEN]),
)
@settings(max_examples=MAX_EXAMPLES)
def test_same_as_the_plain_engine(
    load: tuple[EngineLimits, list[tuple[int, int, int]]],
    rule: IterationRule,
    aborts: list[tuple[int, int]],
    contents: bool,
    adapters: list[str],
    latency: LatencyModel,
) -> None:
    """Durations, tokens, finishes, preemptions, blocks and queues agree in every iteration.

    With asynchronous scheduling no sequence is aborted: vLLM computes the batch that was fixed with it.
    """
    limits, sequences = load
    contents = contents and limits.enable_prefix_caching
    plain, fast = (
        PlainEngine(latency, limits, rule, LOAD_S),
        EngineModel(latency, limits, rule, prefix_cache=contents, adapter_load_s=LOAD_S),
    )
    arriving = [
        (arrival, EngineSequence(prompt, output, n, adapter=adapters[n]))
        for n, (arrival, prompt, output) in enumerate(sequences)
    ]
    if limits.async_scheduling:
        aborts = []
    generated: dict[int, int] = {}
    for step in itertools.count():
        for at, number in aborts:
            if at == step and number < len(arriving) and arriving[number][0] < step:
                plain.abort(number)
                fast.abort(arriving[number][1])
        idle = fast.idle
        if idle:
            submit(plain, fast, arriving, step)
        expected = plain.begin()
        duration_s = fast.begin_iteration()
        fast.check_integrity()
        if expected is None:
            assert duration_s is None
            if step > 80:
                break
            continue
        assert duration_s == pytest.approx(expected.duration_s, rel=1e-12)
        if not limits.async_scheduling:
            assert fast.kv.pool.used_blocks == expected.used_blocks
        assert fast.kv.pool.used_blocks <= limits.kv_blocks
        if not idle:  # while the batch runs
            submit(plain, fast, arriving, step)
        assert fast.waiting + fast.running >= len(plain.waiting)
        outcome, ended = plain.end(), fast.end_iteration()
        fast.check_integrity()
        got = {s.tag for s in (*fast.decodes.sequences, *ended.finished) if s.output_tokens}
        assert got == set(outcome.tokens)
        assert sorted(s.tag for s in ended.finished) == sorted(outcome.finished)
        assert [s.tag for s in ended.preempted] == [s.number for s in expected.preempted]
        assert fast.kv.hit_tokens <= plain.found_tokens
        if not limits.async_scheduling:
            assert (fast.running, fast.waiting) == (len(plain.running), len(plain.waiting))
            assert fast.kv.hit_tokens == plain.found_tokens
            assert [s.tag for s in fast.decodes.sequences] == [s.number for s in plain.running if s.decodes]
        for number in got:
            generated[number] = generated.get(number, 0) + 1
        assert {s.tag for s in ended.first} == {n for n in got if generated[n] == 1}
        for sequence in (s for _, s in arriving if s.state is not SequenceState.NEW):
            assert fast.generated(sequence) == generated.get(sequence.tag, 0)
    assert fast.kv.pool.used_blocks == 0
    assert fast.generated_tokens == sum(generated.values())
    assert fast.adapters.loads == plain.loads


def submit(
    plain: PlainEngine, fast: EngineModel, arriving: list[tuple[int, EngineSequence]], step: int
) -> None:
    for arrival, sequence in arriving:
        if arrival <= step and sequence.state is SequenceState.NEW:
            plain.submit(
                PlainSequence(
                    sequence.tag,
                    sequence.prompt_tokens,
                    sequence.output_tokens,
                    remote=sequence.remote_tokens,
                    held=sequence.held,
                    adapter=sequence.adapter,
                )
            )
            fast.submit(sequence)


@given(
    load=loads(),
    kinds=st.lists(st.sampled_from(["plain", "held", "remote", "partly remote"]), min_size=12, max_size=12),
    waits=st.lists(st.integers(0, 9), min_size=12, max_size=12),
    contents=st.booleans(),
)
@settings(max_examples=MAX_EXAMPLES)
def test_transfers_are_the_same_as_in_the_plain_engine(
    load: tuple[EngineLimits, list[tuple[int, int, int]]], kinds: list[str], waits: list[int], contents: bool
) -> None:
    """Held blocks and fetches, each `waits` batches long, agree in durations and blocks; none is left."""
    limits, sequences = load
    limits = replace(limits, async_scheduling=False)
    plain = PlainEngine(LATENCY, limits)
    fast = EngineModel(LATENCY, limits, prefix_cache=contents and limits.enable_prefix_caching)
    arriving = []
    for n, (arrival, prompt, output) in enumerate(sequences):
        remote = {"remote": prompt, "partly remote": prompt // 2}.get(kinds[n], 0)
        one = EngineSequence(prompt, output, n, remote_tokens=remote, held=kinds[n] == "held")
        arriving.append((arrival, one))
    fetching: dict[EngineSequence, int] = {}
    held: dict[EngineSequence, int] = {}
    done: set[int] = set()
    for step in itertools.count():
        assert step < 50_000, "expected an end"
        submit(plain, fast, arriving, step)
        for sequence in [s for s, at in fetching.items() if at <= step]:
            del fetching[sequence]
            fast.complete_fetch(sequence)
            plain.fetched(sequence.tag)
        for sequence in [s for s, at in held.items() if at <= step]:
            del held[sequence]
            fast.release_held(sequence)
            plain.release(sequence.tag)
        expected, duration_s = plain.begin(), fast.begin_iteration()
        fast.check_integrity()
        fetches = fast.fetches.take_begun()
        assert [s.tag for s in fetches] == [s.number for s in plain.fetching if s.number not in
                                            {f.tag for f in fetching}]  # fmt: skip
        fetching |= {s: step + 1 + waits[s.tag] for s in fetches}
        assert all(s.state is SequenceState.FETCHING and s.fetch_tokens > 0 for s in fetches)
        assert fast.kv.pool.used_blocks == limits.kv_blocks - len(plain.free)
        if expected is None:
            assert duration_s is None
            if step > 60 and len(done) == len(sequences) and not held:
                break
            continue
        assert duration_s == pytest.approx(expected.duration_s, rel=1e-12)
        outcome, ended = plain.end(), fast.end_iteration()
        fast.check_integrity()
        assert sorted(s.tag for s in ended.finished) == sorted(outcome.finished)
        assert [s.tag for s in fast.decodes.sequences] == [s.number for s in plain.running if s.decodes]
        done |= set(outcome.finished)
        held |= {s: step + waits[s.tag] for s in ended.finished if s.held}
        assert held_blocks(fast) == sum(len(s.blocks) for s in plain.finished_held) or contents
    assert done == set(range(len(sequences)))
    assert fast.kv.pool.used_blocks == 0
    assert fast.idle


def test_a_transferred_prompt_costs_one_token_and_a_failed_one_all_of_it() -> None:
    limits = EngineLimits(kv_cache_tokens=64, block_size=4)
    for loaded, computed in ((True, 1), (False, 13)):
        engine = EngineModel(LATENCY, limits)
        engine.submit(sequence := EngineSequence(13, 3, remote_tokens=13))
        assert engine.begin_iteration() is None
        assert engine.fetches.take_begun() == [sequence]
        assert engine.kv.pool.used_blocks == 4
        engine.complete_fetch(sequence, loaded=loaded)
        run(engine)
        assert engine.prefilled_tokens == computed
        assert sequence.state is SequenceState.FINISHED


@pytest.mark.parametrize("complete", [False, True])
def test_a_sequence_aborted_during_its_transfer_leaves_nothing(complete: bool) -> None:
    engine = EngineModel(LATENCY, EngineLimits(kv_cache_tokens=64, block_size=4))
    engine.submit(sequence := EngineSequence(13, 3, remote_tokens=13))
    assert engine.begin_iteration() is None
    if complete:
        assert engine.fetches.take_begun() == [sequence]
        engine.complete_fetch(sequence)
    engine.abort(sequence)
    assert engine.fetches.take_begun() == []
    assert (engine.idle, engine.waiting, engine.kv.pool.used_blocks) == (True, 0, 0)


@given(load=loads(), rule=rules)
def test_every_sequence_gets_exactly_its_tokens(
    load: tuple[EngineLimits, list[tuple[int, int, int]]], rule: IterationRule
) -> None:
    """Nothing is lost, whatever was preempted; the idle engine holds nothing."""
    limits, rows = load
    engine = EngineModel(LATENCY, limits, rule)
    sequences = [EngineSequence(prompt, output) for _, prompt, output in rows]
    for sequence in sequences:
        engine.submit(sequence)
    ends = run(engine)
    finished = [s for end in ends for s in end.finished]
    assert sorted(map(id, finished)) == sorted(map(id, sequences))
    assert all(s.state is SequenceState.FINISHED for s in sequences)
    assert all(engine.generated(s) == s.output_tokens for s in sequences)
    first = [s for end in ends for s in end.first]
    assert first == sorted((s for s in sequences if s.output_tokens), key=sequences.index), "FCFS"
    assert engine.generated_tokens == sum(s.output_tokens for s in sequences)
    assert engine.preemptions == sum(s.preemptions for s in sequences)
    assert engine.preemptions == sum(len(end.preempted) for end in ends)
    assert engine.idle
    assert (engine.running, engine.waiting, engine.kv.pool.used_blocks, engine.kv.pool.usage) == (
        0,
        0,
        0,
        0.0,
    )


def timeline(
    limits: EngineLimits,
    rule: IterationRule,
    rows: list[tuple[float, int, int]],
    cancels: dict[int, float],
    adapters: list[str],
    *,
    stretches: bool,
    horizon: bool,
) -> tuple[list[tuple[float, int]], list[tuple[int, float, str]], EngineModel, int]:
    """One engine in virtual time: (time, tokens) of every step, (number, time, event), calls made."""
    engine = EngineModel(LATENCY, limits, rule, adapter_load_s=LOAD_S)
    sequences = [
        EngineSequence(prompt, output, n, adapter=adapters[n]) for n, (_, prompt, output) in enumerate(rows)
    ]
    happenings = sorted(
        [(at, 0, n) for n, (at, _, _) in enumerate(rows)]
        + [(max(at, rows[n][0]), 1, n) for n, at in cancels.items() if n < len(rows)]
    )
    steps: list[tuple[float, int]] = []
    events: list[tuple[int, float, str]] = []
    now, begun, calls = 0.0, 0.0, 0
    aborting: list[EngineSequence] = []
    while True:
        for sequence in aborting:
            engine.abort(sequence)
        aborting = []
        while happenings and happenings[0][0] <= now:
            _, kind, number = happenings.pop(0)
            if kind == 0:
                engine.submit(sequences[number])
            else:
                engine.abort(sequences[number])
        calls += 1
        stretch = engine.begin_run() if stretches else None
        if stretch is not None and happenings and horizon:
            stretch = engine.cut(happenings[0][0] - now)
        if not stretches and engine.begin_iteration() is not None:
            stretch = engine.in_flight
        if stretch is None:
            if not happenings:
                break
            now = happenings[0][0]
            continue
        begun = now
        while happenings and happenings[0][0] < begun + stretch.duration_s:
            at, kind, number = happenings.pop(0)
            if kind == 0:
                if stretches and not engine.admission_blocked:
                    stretch = engine.cut(at - begun, for_arrival=True)
                engine.submit(sequences[number], at - begun)
            else:
                if stretches:
                    stretch = engine.cut(at - begun)
                aborting.append(sequences[number])
        ended = engine.end_iteration()
        stretch = ended.stretch
        steps += [(at, stretch.decodes) for at in boundaries_s(stretch, begun)]
        now = begun + stretch.duration_s
        steps[-1] = (now, stretch.decodes + len(ended.first) + len(ended.resumed))
        events += [(s.tag, begun, "preempted") for s in ended.preempted]
        events += [(s.tag, now, "first") for s in ended.first]
        events += [(s.tag, now, "resumed") for s in ended.resumed]
        events += [(s.tag, now, "finished") for s in ended.finished]
        engine.check_integrity()
    return steps, events, engine, calls


@given(
    load=loads(),
    rule=rules,
    gaps=st.lists(st.floats(0, 0.5), min_size=12, max_size=12),
    cancels=st.dictionaries(st.integers(0, 11), st.floats(0, 3), max_size=4),
    horizon=st.booleans(),
    adapters=adapters,
)
@settings(max_examples=MAX_EXAMPLES)
def test_stretches_equal_steps(
    load: tuple[EngineLimits, list[tuple[int, int, int]]],
    rule: IterationRule,
    gaps: list[float],
    cancels: dict[int, float],
    horizon: bool,
    adapters: list[str],
) -> None:
    """The same tokens at the same times (1e-9), the same events in the same order, the same counters.

    Arrivals and aborts cut stretches, or bound them in advance; both are the boundary that a stepping
    driver would use.
    """
    limits, rows = load
    arrivals = list(itertools.accumulate(gaps))
    timed = [(arrivals[n], prompt, output) for n, (_, prompt, output) in enumerate(rows)]
    steps, events, stepped, _ = timeline(
        limits, rule, timed, cancels, adapters, stretches=False, horizon=False
    )
    fast_steps, fast_events, stretched, _ = timeline(
        limits, rule, timed, cancels, adapters, stretches=True, horizon=horizon
    )
    assert [tokens for _, tokens in fast_steps] == [tokens for _, tokens in steps]
    assert [at for at, _ in fast_steps] == pytest.approx([at for at, _ in steps], rel=1e-9)
    assert [(n, what) for n, _, what in fast_events] == [(n, what) for n, _, what in events]
    assert [at for _, at, _ in fast_events] == pytest.approx([at for _, at, _ in events], rel=1e-9)
    for counter in (
        *("preemptions", "generated_tokens", "prefilled_tokens"),
        *("kv.pool.used_blocks", "kv.peak_blocks", "adapters.loads"),
    ):
        of = attrgetter(counter)
        assert of(stretched) == of(stepped)


@given(
    steps=st.integers(1, 10_000),
    first=st.floats(1e-6, 10),
    growth=st.floats(-1, 10),
    fraction=st.floats(0, 1.2),
)
def test_steps_until_is_the_first_boundary_at_or_after(
    steps: int, first: float, growth: float, fraction: float
) -> None:
    """For any stretch of positive steps: the boundary found is late enough, the one before is not."""
    stretch = IterationRun(steps, first, growth * first / steps * 0.99, 1)
    elapsed = fraction * stretch.duration_s
    found = stretch.steps_until(elapsed)
    assert 1 <= found <= steps
    assert stretch.elapsed_s(found) >= elapsed or found == steps
    assert found == 1 or stretch.elapsed_s(found - 1) < elapsed
    completed = stretch.steps_completed(elapsed)
    assert 0 <= completed <= found
    assert completed == 0 or stretch.elapsed_s(completed) <= elapsed
    assert completed == steps or stretch.elapsed_s(completed + 1) > elapsed


# --- single cases ------------------------------------------------------------------------------------


def test_one_request_by_hand() -> None:
    """16 prompt tokens and 4 output tokens: one prefill, three decode steps over 17, 18, 19 tokens."""
    engine = EngineModel(LATENCY, EngineLimits(kv_cache_tokens=64))
    engine.submit(EngineSequence(16, 4))
    k = LATENCY
    assert engine.begin_iteration() == pytest.approx(k.k1 * 16 + k.k2 + k.k3 * 16 + k.k4)
    assert engine.kv.pool.used_blocks == 1
    ended = engine.end_iteration()
    assert len(ended.first) == 1
    assert ended.finished == []
    for cached in (17, 18, 19):
        assert engine.begin_iteration() == pytest.approx(k.step_s(1, cached))
        assert engine.kv.pool.used_blocks == 2
        ended = engine.end_iteration()
    assert len(ended.finished) == 1
    assert engine.begin_iteration() is None


@given(
    prompt=st.integers(1, 30_000),
    output=st.integers(1, 500),
    budget=st.sampled_from([64, 300, 2048]),
    better=st.booleans(),
)
def test_the_models_prediction_of_a_lone_request_is_what_the_engine_takes(
    prompt: int, output: int, budget: int, better: bool
) -> None:
    """One latency truth: `first_token_s` and `answer_s` on an idle engine, chunks of prompts included."""
    model = replace(LATENCY, better_prefill=BETTER) if better else LATENCY
    engine = EngineModel(
        model, EngineLimits(kv_cache_tokens=40_000, max_num_seqs=64, max_num_batched_tokens=budget)
    )
    engine.submit(EngineSequence(prompt, output))
    first_s = total_s = 0.0
    while (stretch := engine.begin_run()) is not None:
        total_s += stretch.duration_s
        if engine.end_iteration().first:
            first_s = total_s
    assert first_s == pytest.approx(model.first_token_s(prompt, 0, 0, 0, 0, budget), rel=1e-9)
    assert total_s - first_s == pytest.approx(model.answer_s(prompt, output - 1), rel=1e-9, abs=1e-12)


def test_a_lone_request_is_two_calls() -> None:
    """A stretch covers a whole answer, and its sum is the paper's closed form shifted by one token."""
    engine = EngineModel(LATENCY, EngineLimits(kv_cache_tokens=100_000))
    engine.submit(EngineSequence(1000, 5001))
    assert engine.begin_run() is not None
    engine.end_iteration()
    stretch = engine.begin_run()
    assert stretch is not None
    assert stretch.steps == 5000
    assert stretch.duration_s == pytest.approx(LATENCY.paper_decode_s(1, 1000, 5000), rel=1e-12)
    assert len(engine.end_iteration().finished) == 1
    assert engine.begin_run() is None


def test_a_long_prompt_is_prefilled_in_chunks_beside_the_decodes() -> None:
    """Decodes come first; the prompt takes what is left of the budget, blocks as it goes."""
    engine = EngineModel(
        LATENCY, EngineLimits(kv_cache_tokens=1600, max_num_seqs=4, max_num_batched_tokens=100)
    )
    engine.submit(EngineSequence(10, 50))
    engine.begin_iteration()
    engine.end_iteration()
    engine.submit(EngineSequence(250, 2))
    prefilled = []
    for _ in range(3):
        before = engine.prefilled_tokens
        assert engine.begin_iteration() is not None
        prefilled.append(engine.prefilled_tokens - before)
        assert engine.running == 2
        ended = engine.end_iteration()
        assert ended.stretch.decodes == 1
    assert prefilled == [99, 99, 52]
    assert len(ended.first) == 1


def test_the_latest_admitted_is_preempted_and_recomputed() -> None:
    """Two sequences outgrow the cache: the second waits in front of a third, and starts over."""
    engine = EngineModel(LATENCY, EngineLimits(kv_cache_tokens=64, block_size=16))
    one, two, three = (
        EngineSequence(30, 30, "one"),
        EngineSequence(20, 20, "two"),
        EngineSequence(5, 1, "three"),
    )
    for sequence in (one, two, three):
        engine.submit(sequence)
    order = []
    while engine.begin_iteration() is not None:
        ended = engine.end_iteration()
        order += [(s.tag, "preempted") for s in ended.preempted]
        order += [(s.tag, "finished") for s in ended.finished]
    assert order == [("two", "preempted"), ("one", "finished"), ("three", "finished"), ("two", "finished")]
    assert two.preemptions == 1
    assert engine.prefilled_tokens == 30 + 20 + 5 + (20 + 3)


def test_an_abort_in_flight_frees_at_once_and_gets_no_token() -> None:
    """Decoding, prefilling and waiting sequences leave in the middle of an iteration."""
    limits = EngineLimits(kv_cache_tokens=160, max_num_seqs=3, max_num_batched_tokens=20)
    engine = EngineModel(LATENCY, limits)
    decode, whole, part, waits = (
        EngineSequence(8, 9),
        EngineSequence(5, 5),
        EngineSequence(40, 5),
        EngineSequence(1, 1),
    )
    engine.submit(decode)
    engine.begin_iteration()
    engine.end_iteration()
    for sequence in (whole, part, waits):
        engine.submit(sequence)
    engine.begin_iteration()
    assert (engine.running, engine.waiting) == (3, 1)
    for sequence in (part, decode, waits, whole):
        engine.abort(sequence)
        engine.check_integrity()
    assert engine.generated(decode) == 1
    assert (engine.running, engine.waiting, engine.kv.pool.used_blocks) == (0, 0, 0)
    ended = engine.end_iteration()
    assert (ended.first, ended.resumed, ended.finished, ended.preempted) == ([], [], [], [])
    assert ended.stretch.decodes == 0
    assert engine.begin_iteration() is None
    engine.abort(decode)  # twice is harmless
    assert decode.state is SequenceState.ABORTED


def test_no_output_ends_with_its_prefill() -> None:
    """An embedding: the prompt is computed, no token comes."""
    engine = EngineModel(LATENCY, EngineLimits(kv_cache_tokens=160))
    engine.submit(EngineSequence(20, 0))
    engine.begin_iteration()
    ended = engine.end_iteration()
    assert len(ended.finished) == 1
    assert ended.first == []
    assert engine.generated_tokens == 0
    assert engine.idle


def test_limits_of_a_batch_that_a_profile_leaves_out_are_vllms_on_its_gpu() -> None:
    profile = msgspec.convert(
        {
            "version": 1,
            "name": "p",
            "engine": {"kv_cache_tokens": 100_000},
            "hardware": {"gpu": "H100", "gpus": 1},
            "prefill": {"k1": 1e-4, "k2": 1e-3, "k3": 0.0, "k4": 1e-2},
            "decode": {"k5": 5e-8, "k6": 6e-5, "k7": 0.0, "k8": 1.3e-2},
        },
        Profile,
    )

    def limits(**engine: object) -> tuple[int, int]:
        changed = msgspec.structs.replace(profile.engine, **engine)
        found = engine_of(msgspec.structs.replace(profile, engine=changed)).limits
        return found.max_num_batched_tokens, found.max_num_seqs

    assert limits() == (8192, 1024)
    assert limits(max_num_batched_tokens=512) == (512, 512)
    assert limits(max_num_seqs=10_000) == (10_000, 10_000)
    assert limits(name="sglang") == (2048, 256)
    # `serve` masks by the figures that the profile states.
    assert profile.capacity.max_num_seqs is None


def test_limits_come_from_a_capacity() -> None:
    """Missing figures are vLLM's defaults, a missing KV capacity is named, contradictions too."""
    assert EngineLimits.from_capacity(Capacity(kv_cache_tokens=1000)) == EngineLimits(1000, 16, 256, 2048)
    assert EngineLimits.from_capacity(Capacity(kv_cache_tokens=1000, max_num_seqs=4096)) == EngineLimits(
        1000, 16, 4096, 4096
    )
    assert EngineLimits.from_capacity(
        Capacity(kv_cache_tokens=1000, max_num_batched_tokens=100)
    ) == EngineLimits(1000, 16, 100, 100)
    with pytest.raises(ValueError, match=r"engine\.kv_cache_tokens: .*missing"):
        EngineLimits.from_capacity(Capacity(max_num_seqs=4))
    with pytest.raises(ValueError, match=r"engine\.kv_cache_tokens: expected at least one block"):
        EngineLimits.from_capacity(Capacity(kv_cache_tokens=10))
    with pytest.raises(ValueError, match=r"engine\.max_num_batched_tokens: expected at least"):
        EngineLimits.from_capacity(
            Capacity(kv_cache_tokens=1000, max_num_seqs=256, max_num_batched_tokens=100)
        )


def test_what_can_never_fit_is_the_callers_to_refuse() -> None:
    engine = EngineModel(LATENCY, EngineLimits(kv_cache_tokens=32))
    assert engine.limits.fits(20, 13)
    assert not engine.limits.fits(20, 14)
    assert not engine.limits.fits(33, 0)
    with pytest.raises(AssertionError, match="at most 33 tokens"):
        engine.submit(EngineSequence(20, 14))
