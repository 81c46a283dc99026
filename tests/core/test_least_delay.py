"""The default policy: room, cost, worth, and who in the queue suits a free instance."""

from __future__ import annotations

import pytest
from helpers import FAST, MODEL, dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.core.admission import MOST_OVERTAKEN
from hetlb.core.instance import EngineLoad
from hetlb.core.latency import DecodeTable, LatencyModel, PnormPrefill, delay_of_reading_s
from hetlb.core.policies.least_delay import FULL, PASSED_OVER
from hetlb.core.predictor import OraclePredictor
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import Capacity, Dispatch, InstanceSpec, Lease, Outcome, Request

#: As fast as `FAST` in decoding, fifty times as slow at reading.
SLOW_READER = LatencyModel(5e-3, 5e-2, 0.0, 1e-2, FAST.k5, FAST.k6, 0.0, FAST.k8)


def capacity(places: int, kv: int = 1_000_000) -> Capacity:
    return Capacity(kv_cache_tokens=kv, kv_tokens_per_request=kv, max_num_seqs=places)


def test_a_long_prompt_goes_where_it_is_read_fast() -> None:
    scheduler = make_scheduler([InstanceSpec("reads-slowly", MODEL, latency=SLOW_READER), spec("a")], "hetlb")
    assert dispatched(scheduler.on_arrival(request(1, prompt=5000), 0.0)).instance == "a"


@pytest.mark.parametrize("caches", [True, False])
def test_samples_of_a_prompt_are_read_once_where_prefixes_are_cached(caches: bool) -> None:
    stated = Capacity(kv_cache_tokens=1_000_000, max_num_seqs=64, enable_prefix_caching=caches)
    scheduler = make_scheduler([spec("a", capacity=stated)], "hetlb")
    [instance] = scheduler.instances
    asked = request(1, prompt=3000, sequences=8, samples=4)
    [candidate], _ = scheduler.explain(asked, 100.0, 0.0)
    read = 2 if caches else 8
    expected = instance.latency.first_token_s(3000, 0.0, 0.0, 0.0, 0.0, instance.token_budget, read)
    assert candidate.terms is not None
    assert candidate.terms["first_token_s"] == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "more"), [(1, 8), (16, 4), (256, 1)])
def test_as_many_more_than_the_slots_as_end_in_one_step(tokens: int, more: int) -> None:
    lengths = dict.fromkeys(range(100), tokens)
    scheduler = make_scheduler(
        [spec("a", capacity=capacity(64))], "hetlb", predictor=OraclePredictor(lengths)
    )
    for i in range(64 + more):
        dispatched(scheduler.on_arrival(request(i, prompt=10, max_tokens=None), 0.0))
    assert scheduler.on_arrival(request(99, prompt=10, max_tokens=None), 0.0) == []


@pytest.mark.parametrize("gap_s", [0.0, 0.2])
def test_the_first_requests_after_a_pause_are_not_the_last_of_a_burst(gap_s: float) -> None:
    """A slow instance stands idle beside a fast one that reads prompts; it decodes ten times as slowly."""
    scheduler = make_scheduler([spec("fast", kv=1_000_000), spec("slow", slower=10.0, kv=1_000_000)], "hetlb")
    for i in range(5):
        asked = request(i, prompt=2000, max_tokens=1, subset=("fast",))
        dispatched(scheduler.on_arrival(asked, 100.0 + i * gap_s))
    last = dispatched(scheduler.on_arrival(request(9, prompt=10, max_tokens=50), 100.0 + 4 * gap_s))
    assert last.instance == ("slow" if gap_s else "fast")


def test_an_idle_instance_is_better_than_one_that_reads_many_prompts() -> None:
    scheduler = make_scheduler([spec("a", kv=1_000_000), spec("b", slower=1.2, kv=1_000_000)], "hetlb")
    chosen = [dispatched(scheduler.on_arrival(request(i, prompt=4000), 0.0)).instance for i in range(2)]
    assert chosen == ["a", "b"]


def test_a_full_instance_is_waited_for_where_the_other_reads_many_prompts_first() -> None:
    fleet = [spec("fast", capacity=capacity(4)), spec("slow", slower=2.0, capacity=capacity(64))]
    scheduler = make_scheduler(fleet, "hetlb")
    for i in range(5):  # requests keep coming
        dispatched(scheduler.on_arrival(request(i, subset=("fast",)), 100.0 + 0.2 * i))
    reading = [
        dispatched(scheduler.on_arrival(request(10 + i, prompt=4000, subset=("slow",)), 100.8))
        for i in range(10)
    ]
    assert scheduler.on_arrival(request(20), 100.9) == []
    reasons = [each.reason for each in scheduler.explain(request(20), 50.0, 100.9)[0]]
    assert reasons[0].startswith(FULL)
    assert reasons[1].startswith(f"{PASSED_OVER}: the first token")
    for lease in reading:
        scheduler.on_first_token(lease, 101.0)
    reading[0].output_tokens = 50
    assert dispatched(scheduler.on_lease_ended(reading[0], Outcome.OK, 101.0)).instance == "slow"


def test_an_instance_gets_no_more_than_it_does_until_faster_ones_are_done_with_all() -> None:
    """Short answers, known to be: each is done in time on the slow one, all of them are not."""
    slower = LatencyModel(
        SLOW_READER.k1, SLOW_READER.k2, 0.0, SLOW_READER.k4, FAST.k5, 100 * FAST.k6, 0.0, FAST.k8
    )
    slow = InstanceSpec("slow", MODEL, latency=slower, capacity=capacity(256))
    lengths = {i: 400 if i % 2 else 2 for i in range(1000)}
    fleet = [spec("fast", capacity=capacity(64)), slow]
    scheduler = make_scheduler(fleet, "hetlb", predictor=OraclePredictor(lengths))
    placed = [
        command.lease.instance
        for i in lengths
        for command in scheduler.on_arrival(request(i, prompt=100, max_tokens=None), 0.0)
        if isinstance(command, Dispatch)
    ]
    mix = scheduler.placement.demand(MODEL).mix
    fast_s, slow_s = (mix.size / mix.speed(instance) for instance in scheduler.instances)
    assert 0 < placed.count("slow") * slow_s < len(lengths) * fast_s


def test_a_prompt_goes_where_fewer_are_to_come() -> None:
    """Of two alike, that have read the same by now, one read prompts all the time until lately."""
    scheduler = make_scheduler([spec("a", kv=1_000_000), spec("b", kv=1_000_000)], "hetlb")
    for i in range(50):
        asked = request(i, prompt=500, max_tokens=1, subset=("a",))
        lease = dispatched(scheduler.on_arrival(asked, 0.2 * i))
        scheduler.on_first_token(lease, 0.2 * i + 0.1)
        scheduler.on_lease_ended(lease, Outcome.OK, 0.2 * i + 0.1)
    command = scheduler.on_arrival(request(99, prompt=500), 10.0)[0]
    assert isinstance(command, Dispatch)
    a, b = command.candidates
    assert a.terms is not None
    assert b.terms is not None
    assert a.terms["first_token_s"] == b.terms["first_token_s"]
    assert a.terms["coming_s"] > 0.0
    assert "coming_s" not in b.terms
    assert command.lease.instance == "b"


def test_terms_add_up_to_something_one_can_read() -> None:
    scheduler = make_scheduler([spec("a"), spec("b", slower=2.0)], "hetlb")
    command = scheduler.on_arrival(request(1), 0.0)[0]
    assert isinstance(command, Dispatch)
    a, b = command.candidates
    assert a.terms is not None
    assert b.terms is not None
    assert set(a.terms) == {"first_token_s", "own_s", "others_s", "late_s"}
    assert 0 < a.terms["first_token_s"] < a.terms["own_s"]
    assert b.terms["own_s"] > a.terms["own_s"]
    assert a.terms["others_s"] == 0.0


@pytest.mark.parametrize(("tokens", "chosen"), [(100, "slow"), (5000, "fast")])
def test_an_answer_known_to_be_long_gets_the_shorter_step(tokens: int, chosen: str) -> None:
    lengths = dict.fromkeys(range(60), 1000) | {60: tokens}
    fleet = [spec(name, slower=slower, kv=1_000_000) for name, slower in (("fast", 1.0), ("slow", 1.5))]
    scheduler = make_scheduler(fleet, "hetlb", predictor=OraclePredictor(lengths))
    for i in range(60):
        busy = request(i, prompt=1, max_tokens=None, subset=("fast",))
        scheduler.on_first_token(dispatched(scheduler.on_arrival(busy, float(i))), float(i))
    asked = scheduler.on_arrival(request(60, prompt=1, max_tokens=None), 60.0)
    assert dispatched(asked).instance == chosen


@given(
    slower=st.sampled_from((1.0, 3.7)),
    prompt=st.integers(1, 9000),
    cached=st.integers(0, 9000),
    sequences=st.integers(1, 40),
)
def test_the_first_token_on_an_idle_instance_is_the_latency_model_s(
    slower: float, prompt: int, cached: int, sequences: int
) -> None:
    scheduler = make_scheduler([spec("a", slower=slower, kv=1_000_000)], "hetlb")
    [instance] = scheduler.instances
    keys = (("x", cached),) if 0 < cached <= prompt else ()
    if keys:
        earlier = dispatched(scheduler.on_arrival(request(1, prompt=cached, prefix_keys=keys), 0.0))
        scheduler.on_first_token(earlier, 1.0)
        scheduler.on_lease_ended(earlier, Outcome.CLIENT_GONE, 1.0)
    asked = request(2, prompt=prompt, sequences=sequences, prefix_keys=keys)
    [candidate], _ = scheduler.explain(asked, 100.0, 2.0)
    held = min(cached, prompt - 1) if keys else 0
    expected = instance.latency.first_token_s(prompt, held, 0.0, 0.0, 0.0, instance.token_budget, sequences)
    assert candidate.terms is not None
    assert candidate.terms["first_token_s"] == pytest.approx(expected, rel=1e-9)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6000), st.integers(1, 600), st.integers(1, 20), st.sampled_from(("", "x", "y"))
        ),
        min_size=1,
        max_size=40,
    ),
    st.booleans(),
)
def test_terms_with_their_weights_add_up_to_the_score(
    asked: list[tuple[int, int, int, str]], busy: bool
) -> None:
    fleet = [spec("a", kv=200_000), spec("b", slower=2.0, kv=200_000), spec("c", kv=200_000)]
    scheduler = make_scheduler(fleet, "hetlb")
    for number, (prompt, output, sequences, key) in enumerate(asked):
        keys = ((key, prompt),) if key else ()
        commands = scheduler.on_arrival(
            request(number, prompt=prompt, max_tokens=output, sequences=sequences, prefix_keys=keys), 0.0
        )
        for command in commands:
            if isinstance(command, Dispatch):
                if busy:
                    scheduler.on_busy(command.lease, 30.0, 0.0)
                for each in command.candidates:
                    assert each.terms is not None
                    terms = dict(each.terms)
                    total = 20.0 * terms.pop("first_token_s") + sum(terms.values())
                    assert each.score == pytest.approx(total, rel=1e-9, abs=1e-9)


def test_a_decision_that_is_explained_changes_no_later_one() -> None:
    """Tokens read lately are part of a score: a page that asks for the terms does not count them anew."""

    def choices(looked_at: bool) -> list[tuple[str, list[float]]]:
        scheduler = make_scheduler([spec(name, kv=1_000_000) for name in "abc"], "hetlb")
        chosen = []
        for number in range(30):
            now = 0.3 * number
            [command] = scheduler.on_arrival(request(number, prompt=1500), now)
            assert isinstance(command, Dispatch)
            if looked_at:
                assert command.candidates
                scheduler.explain(request(1000 + number, prompt=900), 100.0, now + 0.1)
            scheduler.on_first_token(command.lease, now + 0.2)
            read_per_s = [each.speed.read_per_s(now, explaining=True) for each in scheduler.instances]
            chosen.append((command.lease.instance, read_per_s))
        return chosen

    assert choices(looked_at=True) == choices(looked_at=False)


BENT = LatencyModel(
    *(2e-5, 1e-3, 0.0, 1e-2, 3e-8, 5e-5, 2e-7, 8e-3),
    better_prefill=PnormPrefill(8e-3, 2.2e-5, 1e-10, 1.7),
    better_decode=DecodeTable(4e-8, 2e-8, (1, 8, 64), (7e-3, 8e-3, 1e-2)),
)
ASKED = st.tuples(
    st.integers(1, 9000),
    st.integers(1, 600),
    st.sampled_from((1, 1, 1, 3, 20)),
    st.sampled_from(("", "", "x")),
)


@given(
    asked=st.lists(ASKED, min_size=1, max_size=60), equals=st.integers(1, 3), engines=st.sampled_from((1, 4))
)
def test_a_decision_is_the_least_exact_score_made_of_the_formulas_of_the_latency_model(
    asked: list[tuple[int, int, int, str]], equals: int, engines: int
) -> None:
    fleet = [
        InstanceSpec(
            f"{factor}-{i}",
            MODEL,
            latency=BENT.scaled(factor),
            capacity=Capacity(kv_cache_tokens=400_000, max_num_seqs=12, engines=engines),
        )
        for factor in (1.0, 1.9)
        for i in range(equals)
    ]
    scheduler = make_scheduler(fleet, "hetlb")
    instances = {instance.name: instance for instance in scheduler.instances}
    for number, (prompt, output, sequences, key) in enumerate(asked):
        keys = ((key, prompt // 2),) if key and prompt > 1 else ()
        new = request(number, prompt=prompt, max_tokens=output, sequences=sequences, prefix_keys=keys)
        before = {
            name: (each.sequences, each.prompt_tokens, each.pending_prompt_tokens, each.load)
            for name, each in instances.items()
        }
        for command in scheduler.on_arrival(new, float(number)):
            assert isinstance(command, Dispatch)
            if number % 3 == 0:
                scheduler.on_first_token(command.lease, float(number))
            able = [each for each in command.candidates if each.eligible]
            assert command.lease.instance == min(able, key=lambda each: each.score).instance
            if keys:
                continue
            states = {
                name: State(
                    *figures, scheduler.placement.demands[MODEL].mix.output, BENT_OF[name[:3]], engines
                )
                for name, figures in before.items()
            }
            for each in command.candidates:
                alike = [state for name, state in states.items() if name[:3] == each.instance[:3]]
                expected = plain_terms(states[each.instance], alike, new, command.lease.predicted_output)
                assert each.terms is not None
                for term, seconds in expected.items():
                    assert each.terms[term] == pytest.approx(seconds, rel=1e-9, abs=1e-12), term


class State:
    """Sequences and tokens of an instance before a decision, per engine."""

    def __init__(
        self,
        sequences: int,
        prompts: int,
        pending: int,
        load: EngineLoad,
        output: float,
        model: LatencyModel,
        engines: int,
    ) -> None:
        self.over = sequences / engines - load.slots
        self.slots, self.batch, self.model, self.engines = load.slots, load.batch, model, engines
        self.context = (prompts + sequences * output / 2.0) * load.context_share
        self.pending = pending / engines


def plain_terms(state: State, alike: list[State], asked: Request, output: float) -> dict[str, float]:
    """Terms of a score straight from the latency model: nothing kept, bounded or left out."""
    model, prompt = state.model, float(asked.prompt_tokens)
    own = max(1.0, asked.sequences / state.engines)
    own_context = own * (prompt + output / 2.0)
    first_s = model.first_token_s(prompt, 0.0, state.pending, state.batch, state.context, 2048.0, own)
    first_s += 0.5 * model.step_s(state.batch, state.context)
    decode_s = output * model.step_s(state.batch + own, state.context + own_context)
    decode_s *= 1.0 + max(0.0, state.over + own) / state.slots
    # Of equal instances the mean one counts.
    batch = sum(each.batch for each in alike) / len(alike)
    context = sum(each.context for each in alike) / len(alike)
    now_s = model.step_s(batch, context)
    read_s = model.first_token_s(prompt, 0.0, 0.0, batch, context, 2048.0, own)
    delay_s = delay_of_reading_s(read_s, own * prompt, batch, now_s, 2048.0)
    delay_s += output * max(0.0, model.step_s(batch + own, context + own_context) - now_s)
    others_s = asked.sequences / own * batch * delay_s
    return {"first_token_s": first_s, "own_s": first_s + decode_s, "others_s": others_s}


BENT_OF = {f"{factor}": BENT.scaled(factor) for factor in (1.0, 1.9)}


def test_terms_are_those_of_the_moment_of_the_decision() -> None:
    """They are looked at later, when the instance has changed."""
    scheduler = make_scheduler([spec("a", kv=10_000)], "hetlb")
    command = scheduler.on_arrival(request(1, prompt=1000), 0.0)[0]
    assert isinstance(command, Dispatch)
    [candidate] = command.candidates
    assert candidate.kv_utilization == 0.0


def filled(scheduler: Scheduler) -> list[Lease]:
    """Requests of the mean size until one has to wait."""
    leases: list[Lease] = []
    for i in range(10_000):
        commands = scheduler.on_arrival(request(i, prompt=1000, max_tokens=400), 0.0)
        if not commands:
            return leases
        leases.append(dispatched(commands))
    raise AssertionError("it never fills")


def test_a_better_fit_overtakes_but_the_head_is_not_starved() -> None:
    fleet = [
        InstanceSpec("reads-slowly", MODEL, latency=SLOW_READER, capacity=capacity(8)),
        spec("a", capacity=capacity(8)),
    ]
    scheduler = make_scheduler(fleet, "hetlb")
    leases = filled(scheduler)
    head = next(iter(scheduler.queue)).request.id
    for i in range(
        2 * MOST_OVERTAKEN
    ):  # behind it come short prompts, which may take what the head was passed over for
        commands = scheduler.on_arrival(request(100_000 + i, prompt=10, max_tokens=400), 0.0)
        leases += [command.lease for command in commands if isinstance(command, Dispatch)]
    assert len(scheduler.queue) > MOST_OVERTAKEN
    slow = [lease for lease in leases if lease.instance == "reads-slowly"]
    taken: list[int] = []
    for now in range(1, 2 * MOST_OVERTAKEN):
        lease = slow.pop(0)
        lease.output_tokens = 400
        for command in scheduler.on_lease_ended(lease, Outcome.OK, now / 10):
            assert isinstance(command, Dispatch)
            taken.append(command.request_id)
            if command.lease.instance == "reads-slowly":
                slow.append(command.lease)
        if head in taken:
            break
    assert taken[0] != head, "a short prompt suits the slow reader better"
    assert head in taken
    assert len(taken) <= MOST_OVERTAKEN + 1


@given(
    st.lists(
        st.tuples(st.integers(1, 4000), st.integers(1, 500), st.integers(0, 3)), min_size=1, max_size=80
    ),
    st.integers(1, 5),
)
def test_no_request_waits_for_ever_and_all_is_given_back(
    asked: list[tuple[int, int, int]], instances: int
) -> None:
    fleet = [spec(f"i{i}", slower=1.0 + 3 * i, capacity=capacity(2 + i, 20_000)) for i in range(instances)]
    scheduler = make_scheduler(fleet, "hetlb")
    running: list[Lease] = []
    seen: set[int] = set()

    def take(commands: list[object]) -> None:
        for command in commands:
            assert isinstance(command, Dispatch)
            assert command.request_id not in seen
            seen.add(command.request_id)
            running.append(command.lease)

    now = 0.0
    for i, (prompt, output, gap) in enumerate(asked):
        now += gap
        take(scheduler.on_arrival(request(i, prompt=prompt, max_tokens=output), now))  # type: ignore[arg-type]
    for _ in range(len(asked)):
        if not running:
            break
        lease = running.pop(0)
        now += 0.5
        scheduler.on_first_token(lease, now)
        lease.output_tokens = lease.request.max_tokens or 1
        now += 0.5
        take(scheduler.on_lease_ended(lease, Outcome.OK, now))  # type: ignore[arg-type]
        scheduler.check_integrity()
    assert seen == set(range(len(asked)))
    assert len(scheduler.queue) == 0
    assert all(instance.sequences == 0 for instance in scheduler.instances)


@pytest.mark.parametrize(
    ("gap_s", "tokens", "last"), [(0.0, 4000, True), (0.0, 40, False), (0.1, 4000, False)]
)
def test_of_requests_at_once_the_last_to_end_waits_for_the_server_on_which_it_ends_first(
    gap_s: float, tokens: int, last: bool
) -> None:
    """The fast one is full, with as many as end in one step."""
    lengths = {**dict.fromkeys(range(40), 200), 99: tokens}
    fleet = [spec("fast", capacity=capacity(16)), spec("slow", slower=2.0, capacity=capacity(64))]
    scheduler = make_scheduler(fleet, "hetlb", predictor=OraclePredictor(lengths))
    for i in range(40):
        asked = request(i, prompt=10, max_tokens=None, subset=("fast" if i < 17 else "slow",))
        dispatched(scheduler.on_arrival(asked, 100.0 + i * gap_s))
    asked = request(99, prompt=10, max_tokens=None)
    (_, slow), _ = scheduler.explain(asked, float(tokens), 100.0 + 40 * gap_s)
    assert ("the last to end" in slow.reason) is last
    assert slow.eligible or scheduler.on_arrival(asked, 100.0 + 40 * gap_s) == []
