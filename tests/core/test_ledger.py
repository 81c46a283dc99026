"""Books of an instance against a second account of them, and what notices when they do not add up."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import FAST, dispatched, make_scheduler, request, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.block_index import BlockIndex, BlocksStored, KvEventBatch, block_digests
from hetlb.balancer.core.facts import CapacityLearned, EngineSample, ModelsLearned
from hetlb.balancer.core.instance import Instance
from hetlb.balancer.core.learning import learn_sample
from hetlb.balancer.core.ledger import Ledger
from hetlb.balancer.core.queue import Queue, QueueLimits
from hetlb.balancer.core.scheduler import Scheduler
from hetlb.balancer.core.types import Capacity, Connector, Dispatch, KvLink, Lease, Outcome, Request, Role
from hetlb.tools.sim.integrity import check_instance, check_scheduler

PLACES, CACHE = 8, 5000
#: Figures of a ledger that count something of each live lease.
FIGURES = (
    "work_ns", "kv_tokens", "kv_prompt_tokens", "promised_tokens", "prompt_tokens", "pending_prompt_tokens",
    "in_flight", "sequences",
)  # fmt: skip


def single(**more: Any) -> tuple[Scheduler, Instance]:
    """A scheduler of one instance with `PLACES` and a KV cache of `CACHE` tokens."""
    capacity = Capacity(kv_cache_tokens=CACHE, max_num_seqs=PLACES)
    scheduler = make_scheduler([spec("a", capacity=capacity, **more)], "single")
    [instance] = scheduler.instances
    return scheduler, instance


@dataclass
class Entry:
    """One lease in the second account, with the tokens that its request should book."""

    lease: Lease
    own: int
    kv: int
    prompt: int
    promised: int
    unread: int
    #: Tokens of each sequence of its answer.
    grown: float = 0.0


class Account:
    """One instance with its ledger, and the same kept again from what was asked for."""

    def __init__(self) -> None:
        _, self.instance = single()
        self.ledger = Ledger(Queue(QueueLimits()))
        self.entries: list[Entry] = []
        self.holds: list[int] = []
        self.granted = 0
        self.now = self.last = 0.0
        self.sequence_s = self.token_s = 0.0

    def integrate(self) -> None:
        """Sequence-seconds and token-seconds until now, of what has been running."""
        instance, since = self.instance, self.now - self.last
        here = [entry for entry in self.entries if not entry.lease.incoming]
        all_running = sum(entry.lease.request.sequences for entry in here)
        running = all_running - instance.finished_sequences
        if running:
            decoding = min(running, PLACES)
            grown = sum(entry.lease.request.sequences * entry.grown for entry in here) / all_running
            tokens = sum(entry.prompt for entry in here) * decoding / running + decoding * grown
            batch = min(instance.unfinished_sequences, PLACES)
            step_s = FAST.step_s(batch, tokens)
            self.sequence_s += since * decoding
            self.token_s += since * (tokens + decoding * since / step_s / 2.0)
            for entry in here:
                entry.grown += since / step_s
        for entry in here if since else ():  # whole answers, whose forecast is 0
            entry.unread = 0
        self.last = self.now

    def grant(self, prompt: int, sequences: int, samples: int, predicted: int, elsewhere: bool) -> None:
        """A lease of a whole request, or of a decode leg whose prompt is elsewhere until it begins."""
        self.integrate()
        asked = request(self.granted, prompt=prompt, sequences=sequences, samples=samples)
        lease = self.ledger.grant(asked, self.instance, predicted, 1000 * prompt, self.now)
        if elsewhere:
            lease.unread_tokens, lease.incoming = 1, True
        self.granted += 1
        assert (lease.id, lease.instance, lease.incarnation) == (self.granted, "a", self.instance.incarnation)
        assert (lease.predicted_output, lease.dispatched_at) == (predicted, self.now)
        different = math.ceil(sequences / samples)
        prompts, answers = min(sequences * prompt, CACHE), sequences * predicted
        own = min(different * prompt, CACHE)
        entry = Entry(
            lease,
            own,
            max(own, min(own + answers, CACHE)),
            prompts,
            min(sequences * prompt + answers, CACHE),
            1 if elsewhere else prompts if sequences == 1 else different * prompt,
        )
        self.instance.acquire(lease)
        if elsewhere:
            self.instance.incoming[lease.id] = lease
        self.entries.append(entry)
        sequences_now = sum(each.lease.request.sequences for each in self.entries)
        incoming = len(self.instance.incoming)
        at_once = sequences_now - self.instance.finished_sequences - incoming <= PLACES
        assert (lease.mark == self.instance.speed.mark()) == (at_once and not elsewhere)
        assert (lease.mark is None) == (elsewhere or not at_once)

    def begin(self, number: int) -> None:
        """The prompt of a decode leg has come."""
        coming = [entry for entry in self.entries if entry.lease.incoming]
        if coming:
            self.integrate()
            entry = coming[number % len(coming)]
            self.instance.begin(entry.lease, self.now)
            assert (entry.lease.incoming, entry.lease.dispatched_at) == (False, self.now)

    def first_token(self, number: int) -> None:
        """A first token, perhaps said again."""
        here = [entry for entry in self.entries if not entry.lease.incoming]
        if here:
            entry = here[number % len(here)]
            if entry.lease.first_token_at is None:
                self.integrate()
                self.instance.first_token(entry.lease, self.now)
                assert entry.lease.first_mark == self.instance.speed.mark()
            else:
                self.instance.first_token(entry.lease, self.now)
            entry.unread = 0

    def end(self, number: int) -> None:
        """A lease ends, however far it is."""
        if self.entries:
            self.integrate()
            entry = self.entries.pop(number % len(self.entries))
            assert self.ledger.drop(entry.lease, self.now) is self.instance
            assert (entry.lease.ended, entry.lease.incoming) == (True, False)

    def scrape(self, running: int) -> None:
        """Report the running sequences of the engine: other groups' sequences have ended."""
        learn_sample(self.instance, EngineSample(min(running, self.instance.sequences), 0, 0.5), self.now)

    def hold(self, tokens: int) -> None:
        """A prompt is kept for another instance, or the oldest such is let go."""
        if len(self.holds) > 1:
            self.instance.keep(-self.holds.pop(0))
        else:
            self.holds.append(tokens)
            self.instance.keep(tokens)

    def check(self) -> None:
        """Compare both accounts."""
        instance, entries = self.instance, self.entries
        held = sum(self.holds)
        assert {name: getattr(instance, name) for name in FIGURES} == {
            "work_ns": sum(each.lease.work_ns for each in entries),
            "kv_tokens": held + sum(each.kv for each in entries),
            "kv_prompt_tokens": held + sum(each.own for each in entries),
            "promised_tokens": sum(each.promised for each in entries),
            "prompt_tokens": sum(each.prompt for each in entries),
            "pending_prompt_tokens": sum(each.unread for each in entries),
            "in_flight": len(entries),
            "sequences": sum(each.lease.request.sequences for each in entries),
        }
        assert list(instance.leases.values()) == [each.lease for each in entries]
        assert list(self.ledger.leased) == [each.lease.id for each in entries]
        if instance.speed.last == self.now == self.last:
            mark = instance.speed.mark()
            assert mark.sequence_s == pytest.approx(self.sequence_s, abs=1e-6)
            assert mark.token_s == pytest.approx(self.token_s, abs=1e-3)
        check_instance(instance)


STEP = st.tuples(
    st.sampled_from(("grant", "grant", "elsewhere", "begin", "first_token", "end", "end", "scrape", "hold")),
    st.integers(0, 50),
    st.sampled_from((0.0, 0.25, 1.0, 3.0)),
)


@given(st.lists(STEP, min_size=10, max_size=40), st.integers(1, 700))
def test_both_accounts_agree_after_every_step_and_end_at_nothing(
    steps: list[tuple[str, int, float]], prompt: int
) -> None:
    account = Account()
    for kind, number, seconds in steps:
        account.now += seconds
        if kind == "grant":
            sequences, samples = 1 + number % 6, 1 + number % 3
            account.grant(prompt + number, sequences, samples, 7 * number, False)
        elif kind == "elsewhere":
            account.grant(prompt + number, 1, 1, 7 * number, True)
        elif kind == "hold":
            account.hold(prompt)
        else:
            getattr(account, kind)(number)
        account.check()
    account.now += 1.0
    while account.entries:
        account.end(0)
        account.check()
    while account.holds:
        account.instance.keep(-account.holds.pop())
    account.check()
    assert {getattr(account.instance, name) for name in FIGURES} == {0}
    assert (account.instance.finished_sequences, account.instance.finished_kv_tokens) == (0, 0.0)


def test_more_sequences_than_places_run_in_turns() -> None:
    """12 sequences in 8 places for 2 s, each of a prompt of 100 tokens, at the pace of 8."""
    account = Account()
    account.grant(100, 12, 12, 20, False)
    account.now = 2.0
    account.end(0)
    mark = account.instance.speed.mark()
    grown = 2.0 / FAST.step_s(8, 8 * 100) / 2.0
    assert (mark.sequence_s, mark.token_s) == (16.0, pytest.approx(2.0 * 8 * (100 + grown)))


def test_a_prompt_that_is_elsewhere_does_not_run_here() -> None:
    account = Account()
    account.grant(100, 1, 1, 20, True)
    account.grant(40, 1, 1, 10, False)
    account.now = 2.0
    account.begin(0)
    mark = account.instance.speed.mark()
    tokens = 2.0 / FAST.step_s(2, 40)
    assert (mark.sequence_s, mark.token_s) == (2.0, pytest.approx(2.0 * (40 + tokens / 2)))
    account.now = 3.0
    account.end(0)
    more = 1.0 / FAST.step_s(2, 140 + tokens)
    mark = account.instance.speed.mark()
    assert mark.sequence_s == 4.0
    assert mark.token_s == pytest.approx(2.0 * (40 + tokens / 2) + 140 + tokens + more)


def test_a_lease_books_the_work_of_its_score_in_whole_nanoseconds() -> None:
    """Of more than 10 s, so that a part in a thousand million shows."""
    scheduler = make_scheduler([spec("a", latency=FAST.scaled(1000.0))], "paper")
    [instance] = scheduler.instances
    [command] = scheduler.on_arrival(request(1, prompt=2000), 0.0)
    assert isinstance(command, Dispatch)
    [candidate] = command.candidates
    assert candidate.processing_s is not None
    assert candidate.processing_s > 10.0
    assert command.lease.work_ns == instance.work_ns == round(candidate.processing_s * 1e9)


# --- prefixes and blocks ---


def test_requests_that_fill_the_cache_push_unused_prefixes_out() -> None:
    scheduler, instance = single()
    first = dispatched(scheduler.on_arrival(request(1, prompt=3000, prefix_keys=(("k", 3000),)), 0.0))
    scheduler.on_lease_ended(first, Outcome.OK, 1.0)
    assert instance.tree.unused_tokens == 3000
    dispatched(scheduler.on_arrival(request(2, prompt=1900, max_tokens=100), 1.0))
    assert instance.tree.unused_tokens == 3000, "there is room for both"
    dispatched(scheduler.on_arrival(request(3, prompt=1000, max_tokens=1), 1.0))
    assert instance.tree.unused_tokens == 0
    check_scheduler(scheduler)


@pytest.mark.parametrize(("sequences", "samples", "prompts"), [(1, 1, 1), (3, 2, 2), (4, 4, 1), (2, 1, 2)])
def test_each_prompt_of_a_request_reads_what_it_does_not_share(
    sequences: int, samples: int, prompts: int
) -> None:
    """Of 500 tokens 200 are a prefix: they are read once and used once, the others by each prompt."""
    scheduler, instance = single()
    asked = request(1, prompt=500, sequences=sequences, samples=samples, prefix_keys=(("k", 200),))
    lease = instance_lease(scheduler, asked)
    assert (lease.kv_prompt_tokens, lease.unread_tokens) == (prompts * 300, prompts * 300 + 200)
    assert instance.kv_prompt_tokens == prompts * 300 + 200
    again = instance_lease(scheduler, request(2, prompt=500, prefix_keys=(("k", 200),)))
    assert (again.kv_prompt_tokens, again.unread_tokens) == (300, 300)
    check_scheduler(scheduler)


def instance_lease(scheduler: Scheduler, asked: Request) -> Lease:
    return dispatched(scheduler.on_arrival(asked, 0.0))


def published(stored: int, **more: Any) -> tuple[Scheduler, Instance, tuple[int, ...]]:
    """Return an instance that published `stored` blocks of 100 tokens, and the digests of 12 blocks."""
    scheduler, instance = single(**more)
    digests = block_digests(array("q", range(1200)), 100)
    event = BlocksStored(tuple(range(stored)), None, digests[:stored], 100)
    scheduler.on_kv_events("a", KvEventBatch((event,), begins=True), 0.0)
    return scheduler, instance, digests


def test_exact_blocks_replace_the_belief_about_a_prefix() -> None:
    """By its tree nothing of the prompt is held; by its own word 8 blocks are."""
    scheduler, _, digests = published(8)
    asked = request(1, prompt=1200, blocks=(100, digests), prefix_keys=(("k", 1000),))
    lease = instance_lease(scheduler, asked)
    assert lease.shared is not None
    assert (lease.shared.tokens, lease.shared.new_tokens, lease.shared.held_tokens) == (1000, 1000, 800)
    # 200 beyond the prefix, and of the prefix what is not held.
    assert (lease.kv_prompt_tokens, lease.unread_tokens) == (200, 400)
    check_scheduler(scheduler)


def test_exact_blocks_without_a_prefix_share_no_part_of_the_books() -> None:
    scheduler, instance, digests = published(8)
    lease = instance_lease(scheduler, request(1, prompt=1200, blocks=(100, digests)))
    shared = lease.shared
    assert shared is not None
    assert (shared.node, shared.tokens, shared.new_tokens, shared.held_tokens) == (None, 0, 0, 800)
    assert (lease.kv_prompt_tokens, lease.unread_tokens, instance.kv_prompt_tokens) == (1200, 400, 1200)
    unknown = instance_lease(scheduler, request(2, prompt=700))
    assert (unknown.shared, unknown.unread_tokens) == (None, 700)
    pair = instance_lease(scheduler, request(3, prompt=700, sequences=2, samples=2))
    assert (pair.shared, pair.unread_tokens) == (None, 700)
    for each in (lease, unknown, pair):
        scheduler.on_lease_ended(each, Outcome.CLIENT_GONE, 1.0)
    check_scheduler(scheduler)
    assert instance.kv_tokens == 0


def test_an_engine_without_a_prefix_cache_reads_every_prompt() -> None:
    scheduler, instance, digests = published(8)
    scheduler.on_instance(CapacityLearned("a", Capacity(enable_prefix_caching=False)), 0.0)
    asked = request(1, prompt=1200, sequences=3, samples=3, blocks=(100, digests), prefix_keys=(("k", 1000),))
    lease = instance_lease(scheduler, asked)
    assert (lease.shared, lease.unread_tokens, lease.kv_prompt_tokens) == (None, 3600, 3600)
    assert instance.tree.nodes == {}


def test_blocks_on_their_way_belong_to_the_adapter_of_the_request() -> None:
    scheduler, instance, digests = published(8)
    scheduler.on_instance(ModelsLearned("a", ("m", "lora"), ("lora",)), 0.0)
    event = BlocksStored((100,), None, digests[:1], 100, "lora")
    scheduler.on_kv_events("a", KvEventBatch((event,)), 0.0)
    first = instance_lease(scheduler, request(1, prompt=1200, blocks=(100, digests), model="lora"))
    assert first.unread_tokens == 1100
    assert instance_lease(scheduler, request(2, prompt=1200, blocks=(100, digests))).unread_tokens == 400
    second = instance_lease(scheduler, request(3, prompt=1200, blocks=(100, digests), model="lora"))
    assert second.unread_tokens == 1
    assert isinstance(instance.blocks, BlockIndex)
    for lease in (first, second):
        scheduler.on_lease_ended(lease, Outcome.CLIENT_GONE, 1.0)
    assert instance.blocks.held("lora", (100, digests)) == 100


def test_a_prompt_without_blocks_is_none_of_the_index() -> None:
    scheduler, instance, digests = published(2)
    assert isinstance(instance.blocks, BlockIndex)
    instance_lease(scheduler, request(1, prompt=1200))
    assert instance.blocks.held("m", (100, digests)) == 200


# --- noticing ---


def booked() -> tuple[Scheduler, Instance, Lease]:
    """An instance that answers one request of several sequences."""
    scheduler, instance = single()
    return scheduler, instance, instance_lease(scheduler, request(1, sequences=2, max_tokens=9))


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("off", [1, -1])
def test_a_figure_that_is_off_by_one_is_noticed(figure: str, off: int) -> None:
    scheduler, instance, _ = booked()
    check_scheduler(scheduler)
    setattr(instance, figure, getattr(instance, figure) + off)
    with pytest.raises(AssertionError):
        check_scheduler(scheduler)


@pytest.mark.parametrize("figure", FIGURES)
def test_a_ledger_that_falls_below_zero_is_noticed(figure: str) -> None:
    _, instance, lease = booked()
    setattr(instance, figure, getattr(instance, figure) - 1)
    with pytest.raises(AssertionError, match=r"^the ledger of a fell below zero when <?.* was released$"):
        instance.release(lease, 1.0)


def test_what_is_no_lease_of_an_instance_cannot_be_given_back_there() -> None:
    _, instance, lease = booked()
    _, other, stranger = booked()
    with pytest.raises(AssertionError, match=r"is not booked on a$"):
        instance.release(stranger, 1.0)
    instance.release(lease, 1.0)
    with pytest.raises(AssertionError, match=r"was released before$"):
        instance.release(lease, 1.0)
    assert (instance.in_flight, other.in_flight) == (0, 1)


def test_no_negative_work_or_tokens_are_booked_and_none_at_all_may_be() -> None:
    _, instance = single()
    ledger = Ledger(Queue(QueueLimits()))
    instance.acquire(ledger.grant(request(1, prompt=0), instance, 0.0, 0, 0.0))
    assert (instance.in_flight, instance.kv_tokens, instance.work_ns) == (1, 0, 0)
    for name in ("work_ns", "kv_tokens", "kv_prompt_tokens"):
        lease = ledger.grant(request(2, prompt=0), instance, 0.0, 0, 0.0)
        setattr(lease, name, -1)
        with pytest.raises(AssertionError, match=r" books negative (work|KV tokens)$"):
            instance.acquire(lease)


def test_ended_sequences_are_bounded_by_running_ones() -> None:
    scheduler, instance, _ = booked()
    for finished, right in ((0, True), (1, True), (2, False), (-1, False)):
        instance.finished_sequences = finished
        instance.last_occupancy = None
        if right:
            check_scheduler(scheduler)
        else:
            with pytest.raises(AssertionError):
                check_scheduler(scheduler)


def link() -> KvLink:
    return KvLink(Connector.NIXL, lease_s=10.0, bandwidth_bytes_per_s=1e10, latency_s=0.001)


def split() -> tuple[Scheduler, Lease, Lease]:
    """A request that one instance prefills for another, and the leases of both legs."""
    specs = [
        spec(name, kv=100_000, role=role, kv_transfer=link())
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    ]
    scheduler = make_scheduler(specs, "hetlb")
    lease = dispatched(scheduler.on_arrival(request(1, prompt=2000, splittable=True, streamed=True), 0.0))
    assert lease.decode is not None
    return scheduler, lease, lease.decode


def lost_prefill(scheduler: Scheduler, lease: Lease, decode: Lease) -> None:
    lease.decode = None


def not_incoming(scheduler: Scheduler, lease: Lease, decode: Lease) -> None:
    decode.incoming = False


def another_incoming(scheduler: Scheduler, lease: Lease, decode: Lease) -> None:
    d = scheduler.ledger.leased[decode.id]
    d.incoming[decode.id] = Lease(
        decode.id, decode.request, "d", d.incarnation, work_ns=0, kv_tokens=0, kv_prompt_tokens=0,
        promised_tokens=0, prompt_tokens=0, unread_tokens=0, predicted_output=1.0, dispatched_at=0.0,
    )  # fmt: skip
    d.incoming[decode.id].incoming = True
    decode.incoming = False
    lease.decode = None


def unknown_lease(scheduler: Scheduler, lease: Lease, decode: Lease) -> None:
    leased = scheduler.ledger.leased
    leased[99] = leased.pop(lease.id)


def lease_of_none(scheduler: Scheduler, lease: Lease, decode: Lease) -> None:
    del scheduler.ledger.leased[lease.id]


def ended_lease(scheduler: Scheduler, lease: Lease, decode: Lease) -> None:
    lease.ended = True


def forgotten_group(scheduler: Scheduler, lease: Lease, decode: Lease) -> None:
    scheduler.ledger.leased[lease.id].groups[lease.id] = lease


def waits_too(scheduler: Scheduler, lease: Lease, decode: Lease) -> None:
    for waits in (lease.request, request(5)):
        scheduler.queue.push(waits, 0.0)


def retry_of_none(scheduler: Scheduler, lease: Lease, decode: Lease) -> None:
    scheduler.placement.retries.leases.add(99)


def attempts_of_none(scheduler: Scheduler, lease: Lease, decode: Lease) -> None:
    scheduler.placement.retries.attempts[99]  # the question notes it


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (lost_prefill, "^a decode leg is booked without its prefill leg"),
        (not_incoming, None),
        (another_incoming, None),
        (unknown_lease, r"^lease 99 is not booked on p"),
        (lease_of_none, None),
        (ended_lease, "^p"),
        (forgotten_group, "^p"),
        (waits_too, r"^requests \{1\} wait and are leased"),
        (retry_of_none, "^a retry outlived its lease"),
        (attempts_of_none, "^retry notes outlived their request"),
    ],
)
def test_books_that_do_not_add_up_are_noticed(
    breaks: Callable[[Scheduler, Lease, Lease], None], says: str | None
) -> None:
    scheduler, lease, decode = split()
    check_scheduler(scheduler)
    breaks(scheduler, lease, decode)
    with pytest.raises(AssertionError, match=says):
        check_scheduler(scheduler)


def test_prompts_of_whole_answers_are_read_when_their_forecast_says_so() -> None:
    """Forecasts beside whole answers equal forecasts beside streams."""
    forecasts = []
    for streamed in (True, False):
        scheduler, instance = single()
        for number in range(4):
            lease = instance_lease(scheduler, request(number, prompt=400, streamed=streamed))
            read_at = lease.forecast_first_s
        assert instance.seen(0.9 * read_at).unread > 0.0
        if streamed:
            for lease in list(instance.leases.values()):
                scheduler.on_first_token(lease, read_at)
        assert instance.seen(read_at).unread == 0.0
        forecasts.append(dispatched(scheduler.on_arrival(request(9), 2 * read_at)).forecast_first_s)
        check_scheduler(scheduler)
    assert forecasts[0] == forecasts[1]
