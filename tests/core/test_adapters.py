"""LoRA adapters: what an engine is believed to have in its slots, and what that is worth to a decision."""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict

import pytest
from helpers import make_scheduler, spec
from hypothesis import given
from hypothesis import strategies as st

from hetlb.core.adapters import AdapterSlots
from hetlb.core.engine_metrics import parse
from hetlb.core.scheduler import Scheduler
from hetlb.core.types import Capacity, CapacityLearned, Dispatch, Lease, ModelsLearned, Outcome, Request

NAMES = tuple(f"lora-{n}" for n in range(8))
LOAD_S = 0.5


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=80))
def test_slots_hold_what_runs_and_what_was_used_last(slots: int, steps: list[tuple[bool, int]]) -> None:
    belief = AdapterSlots(frozenset(NAMES))
    belief.slots = slots
    running: Counter[str] = Counter()
    for begins, number in steps:
        name = NAMES[number]
        if begins:
            belief.begin(name)
            running[name] += 1
            assert belief.held[-1] == name
        elif running[name]:
            belief.end(name)
            running[name] -= 1
        live = {each for each, count in running.items() if count}
        assert belief.count() == {each: running[each] for each in live}
        assert live <= set(belief.held)
        assert len(belief.held) <= max(slots, len(live) + 1)
        for each in NAMES:
            cost = belief.cost_s(each, 1.0, 10.0)
            assert cost in (0.0, 1.0, 2.0, 12.0)
            assert (cost == 0.0) == (each in belief.held)


def test_what_is_no_adapter_costs_nothing() -> None:
    belief = AdapterSlots(frozenset({"a", "b"}))
    belief.begin("m")
    belief.begin("a")
    assert belief.cost_s("m", 1.0, 10.0) == 0.0
    belief.told(["b", "m"])
    assert belief.held == ("a", "b")  # `a` runs, `b` was used last
    belief.end("m")
    belief.end("a")
    assert belief.held == ("b",)


def test_vllm_tells_its_slots() -> None:
    page = (
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="a",waiting_lora_adapters=""} 1.7e9\n'
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="b,c",waiting_lora_adapters="a"} 1.8e9\n'
    )
    sample = parse(page)
    assert (sample.capacity.max_loras, sample.adapters) == (2, ("b", "c"))
    assert parse("").adapters is None


def fleet(count: int, *, told: bool, slots: int = 2) -> Scheduler:
    scheduler = make_scheduler([spec(f"i{n}") for n in range(count)], "hetlb")
    for n in range(count):
        scheduler.on_instance(CapacityLearned(f"i{n}", Capacity(max_loras=slots, max_num_seqs=8)), 0.0)
        scheduler.on_instance(ModelsLearned(f"i{n}", ("m", *NAMES), NAMES if told else ()), 0.0)
    return scheduler


def lease_of(commands: object) -> Lease:
    assert isinstance(commands, list)
    [dispatch] = [each for each in commands if isinstance(each, Dispatch)]
    return dispatch.lease


def test_an_adapter_goes_where_it_is_and_explain_says_why() -> None:
    scheduler = fleet(2, told=True)
    first = lease_of(scheduler.on_arrival(Request(1, NAMES[0], 100), 0.0))
    again = lease_of(scheduler.on_arrival(Request(2, NAMES[0], 100), 0.0))
    other = lease_of(scheduler.on_arrival(Request(3, NAMES[1], 100), 0.0))
    assert again.instance == first.instance
    assert other.instance != first.instance
    candidates, _ = scheduler.explain(Request(9, NAMES[0], 100), 100.0, 0.0)
    terms = {each.instance: each.terms or {} for each in candidates}
    assert "adapter_s" not in terms[first.instance]
    assert terms[other.instance]["adapter_s"] > 0.0
    for each in candidates:
        weights = each.weights or {}
        total = sum(value * weights.get(name, 1.0) for name, value in (each.terms or {}).items())
        assert each.score == pytest.approx(total)
    # A request for the base model knows nothing of it.
    candidates, _ = scheduler.explain(Request(9, "m", 100), 100.0, 0.0)
    assert not any("adapter_s" in (each.terms or {}) for each in candidates)
    scheduler.check_integrity()


def test_balance_wins_where_the_server_with_the_adapter_is_loaded() -> None:
    scheduler = fleet(2, told=True)
    instances = [lease_of(scheduler.on_arrival(Request(n, NAMES[0], 100), 0.0)).instance for n in range(16)]
    assert set(instances) == {"i0", "i1"}


class Server:
    """A server of 8 places and 2 slots: an adapter is loaded into a slot in which nothing runs."""

    def __init__(self) -> None:
        self.slots: OrderedDict[str, int] = OrderedDict()
        self.waiting: list[Lease] = []
        self.running = self.loads = 0

    def start(self) -> list[tuple[Lease, float]]:
        """Requests that begin now, and their seconds of service, oldest first where their adapter may run."""
        began: list[tuple[Lease, float]] = []
        for lease in list(self.waiting):
            name = lease.request.model
            if self.running >= 8:
                break
            load_s = 0.0
            if name not in self.slots:
                idle = [each for each, count in self.slots.items() if not count]
                if len(self.slots) >= 2:
                    if not idle:
                        continue
                    del self.slots[idle[0]]
                self.slots[name] = 0
                load_s = LOAD_S
                self.loads += 1
            self.slots.move_to_end(name)
            self.slots[name] += 1
            self.running += 1
            self.waiting.remove(lease)
            began.append((lease, load_s + 2.0))
        return began


def simulate(*, told: bool, seed: int, rate: float = 7.0, count: int = 1500) -> tuple[list[float], int]:
    """Seconds from arrival to end of every request, and how often an adapter was loaded.

    Four equal servers at 44 % of their places; adapters are asked for by Zipf's law.
    """
    rng = random.Random(seed)
    scheduler, servers = fleet(4, told=told), {f"i{n}": Server() for n in range(4)}
    weights = [1.0 / (n + 1) for n in range(len(NAMES))]
    events: list[tuple[float, int, Lease | str]] = []
    now = 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        heapq.heappush(events, (now, number, rng.choices(NAMES, weights)[0]))
    arrived: dict[int, float] = {}
    took: list[float] = []
    number = count
    while events:
        now, key, what = heapq.heappop(events)
        if isinstance(what, str):
            arrived[key] = now
            commands = scheduler.on_arrival(Request(key, what, 200, 100), now)
        else:
            server = servers[what.instance]
            server.running -= 1
            server.slots[what.request.model] -= 1
            what.output_tokens = 100
            took.append(now - arrived[what.request.id])
            commands = scheduler.on_lease_ended(what, Outcome.OK, now)
        touched = {what.instance} if isinstance(what, Lease) else set()
        for command in commands:
            if isinstance(command, Dispatch):
                servers[command.lease.instance].waiting.append(command.lease)
                touched.add(command.lease.instance)
        for name in touched:
            for lease, seconds in servers[name].start():
                number += 1
                heapq.heappush(events, (now + seconds, number, lease))
    scheduler.check_integrity()
    assert len(took) == count
    return took, sum(server.loads for server in servers.values())


@pytest.mark.parametrize("seed", range(3))
def test_affinity_beats_none_and_starves_no_adapter(seed: int) -> None:
    with_it, loads = simulate(told=True, seed=seed)
    without, more_loads = simulate(told=False, seed=seed)
    assert loads < 0.7 * more_loads
    assert sum(with_it) < sum(without)
    assert sorted(with_it)[1484] <= sorted(without)[1484]
    assert max(with_it) <= max(without)
