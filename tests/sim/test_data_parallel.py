"""A simulated data-parallel server serves as much as its engines apart."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from hetlb.balancer.config.profile_file import Profile, load_profile
from hetlb.tools.plan.common.fleet_run import SimulatedServer, arrivals, run_fleet
from hetlb.tools.plan.throughput import saturated_rate
from hetlb.tools.sim.alone import full_tokens_per_s, run_alone
from hetlb.tools.sim.fleet_result import FleetResult
from hetlb.tools.sim.iteration_times import IterationRule
from hetlb.tools.sim.study import engine_of
from hetlb.tools.workload.arrivals import make_plan
from hetlb.tools.workload.rows import Row

RANK = load_profile(Path(__file__).parents[2] / "profiling" / "h100_sxm-llama-3.1-8b-tp1.yaml")
ROWS = [(700, 120), (300, 200), (1500, 40)]


def ranks_of(number: int) -> Profile:
    return msgspec.structs.replace(
        RANK, engine=msgspec.structs.replace(RANK.engine, data_parallel_size=number, max_num_seqs=32)
    )


def run(servers: list[SimulatedServer], rate: float, count: int) -> FleetResult:
    planned = arrivals(ROWS, rate, random.Random(0), count)
    return run_fleet(servers, planned, [output for _, output in ROWS])


def test_limits_of_a_profile_are_of_one_rank_and_a_server_has_them_all() -> None:
    one, four = ranks_of(1), ranks_of(4)
    assert four.capacity.kv_cache_tokens == 4 * (one.capacity.kv_cache_tokens or 0)
    assert four.capacity.kv_tokens_per_request == one.engine.kv_cache_tokens
    assert engine_of(four).limits == engine_of(one).limits
    assert engine_of(four).ranks == 4


def test_one_request_is_served_by_one_rank() -> None:
    [lone] = run([SimulatedServer("a", engine_of(ranks_of(1)))], math.inf, 1).records
    [ranked] = run([SimulatedServer("a", engine_of(ranks_of(8)))], math.inf, 1).records
    assert ranked.last_token_s == lone.last_token_s


@pytest.mark.parametrize("rate", [20.0, math.inf])
def test_a_server_of_four_ranks_serves_what_four_servers_serve(rate: float) -> None:
    whole = run([SimulatedServer("a", engine_of(ranks_of(4)))], rate, 600)
    apart = run([SimulatedServer(name, engine_of(ranks_of(1))) for name in "abcd"], rate, 600)
    ends = [max(each.last_token_s or 0.0 for each in result.records) for result in (whole, apart)]
    assert all(each.ok for each in whole.records)
    assert ends[0] == pytest.approx(ends[1], rel=0.05)


def test_rates_of_one_server_count_all_ranks() -> None:
    one, four = engine_of(ranks_of(1)), engine_of(ranks_of(4))
    assert saturated_rate(four, [(1.0, ROWS)]) == pytest.approx(4 * saturated_rate(one, [(1.0, ROWS)]))
    planned = arrivals(ROWS, math.inf, random.Random(0), 400)
    token = IterationRule.TOKEN
    assert full_tokens_per_s(four, planned, token) == pytest.approx(
        4 * full_tokens_per_s(one, planned, token)
    )
    assert run_alone(four, planned, token).requests == 400
    assert run_alone(four, planned, token).seconds < 0.4 * run_alone(one, planned, token).seconds


def test_turns_of_a_chat_find_their_prefix_on_a_rank_as_on_a_server_of_their_own() -> None:
    """48 chats of five turns, 50 ms apart; a chat asks again 30 s later."""
    rows = [
        Row(30.0 * turn + chat / 20, 600 * (turn + 1), 80, session=f"{chat}", turn=f"{turn}")
        for turn in range(5)
        for chat in range(48)
    ]
    planned = make_plan(rows, None, "trace", random.Random(0), hash_block_tokens=512)

    def found(names: str, number: int) -> float:
        engine = replace(engine_of(ranks_of(number)), prefix_cache=True)
        servers = [SimulatedServer(name, engine) for name in names]
        counted = run_fleet(servers, planned, [row.output_tokens for row in rows]).counted
        return math.fsum(each["prefix_hit_tokens"] for each in counted.values())

    apart, together = found("abcd", 1), found("ab", 2)
    assert apart > 0.5 * sum(row.input_tokens for row in rows)
    assert together >= 0.97 * apart
