"""Ties between ways to run the same GPUs."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from hetlb.tools.plan.planning import TIE_SHARE, without_ties
from hetlb.tools.plan.rent_program import Configuration, ConfigurationStage


def made(name: str, gpus: dict[str, int], stages: int, **throughput: float) -> Configuration:
    held = tuple(ConfigurationStage("g", 1, Fraction(1, stages)) for _ in range(stages))
    return Configuration(name, "m", gpus, throughput, stages=held)


def names(*configurations: Configuration) -> list[str]:
    return [each.name for each in without_ties(configurations)]


def test_a_pipeline_that_two_singles_equal_is_left_out() -> None:
    single = made("l40s-tp1", {"L40S": 1}, 1, a=1.0, b=2.0)
    assert names(single, made("l40s-pp2", {"L40S": 2}, 2, a=1.988, b=4.02)) == ["l40s-tp1"]
    better = made("l40s-pp2", {"L40S": 2}, 2, a=1.5, b=4.1)
    assert names(single, better) == ["l40s-tp1", "l40s-pp2"]  # more of type b
    alone = made("l40s-pp2", {"L40S": 2}, 2, a=1.5, b=4.1)
    assert names(alone) == ["l40s-pp2"]  # nothing smaller holds the model


def test_of_as_many_gpus_the_fewest_stages_win() -> None:
    tensor, pipeline = made("tp2", {"g": 2}, 1, a=2.0), made("pp2", {"g": 2}, 2, a=2.01)
    assert names(tensor, pipeline) == ["tp2"]
    assert names(made("tp2", {"g": 2}, 1, a=2.0), made("pp2", {"g": 2}, 2, a=2.2)) == ["tp2", "pp2"]


def test_a_pipeline_of_two_kinds_is_held_against_one_server_of_each() -> None:
    high, low = made("h", {"H": 1}, 1, a=3.0), made("l", {"L": 1}, 1, a=1.0)
    assert names(high, low, made("h-l", {"H": 1, "L": 1}, 2, a=4.03)) == ["h", "l"]
    assert names(high, low, made("h-l", {"H": 1, "L": 1}, 2, a=4.1)) == ["h", "l", "h-l"]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2), st.floats(0.1, 10.0)), max_size=6))
def test_no_more_than_the_tie_is_lost(found: list[tuple[int, int, float]]) -> None:
    all_of_them = [made(str(i), {"g": size}, stages, a=rate) for i, (size, stages, rate) in enumerate(found)]
    kept = without_ties(all_of_them)
    for each in all_of_them:
        (size,) = each.gpus.values()
        per_gpu = max(other.throughput["a"] / other.gpus["g"] for other in kept)
        # A chain of ties loses once per link: sizes double at most twice, stages once.
        assert per_gpu >= each.throughput["a"] / size / (1.0 + TIE_SHARE) ** 6
