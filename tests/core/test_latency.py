"""The latency formulas agree with the sums they stand for, computed the long way."""

import math
import pickle
from bisect import bisect_left, bisect_right
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetlb.balancer.core.latency import LatencyModel, ideal_batch, processing_s
from hetlb.balancer.core.step_times import DecodeTable, MixedTerm, PnormPrefill, PrefillGrid, SplitKv
from hetlb.tools.sim.iteration_times import IterationRule, iteration_s, uneven_s

MODEL = LatencyModel(k1=1.1e-4, k2=1e-3, k3=2e-6, k4=1e-2, k5=5e-8, k6=6e-5, k7=3e-7, k8=1.3e-2)


@given(st.integers(1, 256), st.integers(1, 4096), st.integers(1, 400))
def test_closed_form_of_decode_is_the_sum_of_its_steps(batch: int, inputs: int, outputs: int) -> None:
    total = math.fsum(MODEL.paper_step_s(batch, inputs + j) for j in range(1, outputs + 1))
    assert MODEL.paper_decode_s(batch, inputs, outputs) == pytest.approx(total, rel=1e-12)


def test_processing_time_of_a_hand_computed_case() -> None:
    # kv 690000, I 512, O 128: floor(690000 / 640) = 1078, capped at 256.
    assert ideal_batch(690_000, 512, 128, 256) == 256
    prefill = 1.1e-4 * 256 * 512 + 1e-3 * 256 + 2e-6 * 512 + 1e-2
    decode = 128 * (6e-5 * 256 + 1.3e-2) + (5e-8 * 256 + 3e-7) * (128 * 512 + 128 * 129 / 2)
    assert processing_s(MODEL, 256, 512, 128) == pytest.approx((prefill + decode) / 256, rel=1e-14)


@pytest.mark.parametrize(
    ("kv", "inputs", "outputs", "cap", "expected"),
    [(1000, 100, 100, None, 5), (1000, 100, 101, None, 4), (10, 100, 1, None, 1), (1000, 1, 0, 7, 7)],
)
def test_ideal_batch(kv: int, inputs: int, outputs: float, cap: int | None, expected: int) -> None:
    assert ideal_batch(kv, inputs, outputs, cap) == expected


def test_pure_iterations_are_as_fitted() -> None:
    for rule in IterationRule:
        assert iteration_s(MODEL, rule, 512, 1, 512, 0, 0) == pytest.approx(
            MODEL.paper_prefill_s(1, 512), rel=1e-14
        )
        assert iteration_s(MODEL, rule, 0, 0, 0, 8, 8 * 700) == pytest.approx(
            MODEL.paper_step_s(8, 700), rel=1e-14
        )


def test_mixed_iterations_follow_their_rules() -> None:
    p, n, longest, d, c = 600, 2, 400, 8, 5600
    prefill = MODEL.k1 * p + MODEL.k2 * n + MODEL.k3 * longest
    attention = MODEL.k5 * c + MODEL.k7 * c / d
    assert iteration_s(MODEL, IterationRule.SUM, p, n, longest, d, c) == pytest.approx(
        prefill + MODEL.k4 + attention + MODEL.k6 * d + MODEL.k8, rel=1e-14
    )
    assert MODEL.mixed_step_s(p, n, longest, d, c) == pytest.approx(
        max(MODEL.k4, MODEL.k8) + prefill + MODEL.k6 * d + 1.5 * attention, rel=1e-14
    )


def test_a_constant_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="k5: expected a finite number, got nan"):
        LatencyModel(0, 0, 0, 1, math.nan, 0, 0, 1)


@given(
    *(st.floats(0, 4096), st.integers(1, 64), st.floats(1, 1e5)),
    *(st.floats(1, 8192), st.sampled_from([256, 2048, 8192])),
)
def test_the_delay_of_others_is_the_first_token_less_the_steps_they_would_have_made(
    cached: float, batch: int, kv: float, new: float, budget: int
) -> None:
    prompt = cached + new
    delay_s = MODEL.read_delay_s(prompt, cached, batch, kv, budget)
    first_s = MODEL.first_token_s(prompt, cached, 0, batch, kv, budget)
    iterations = math.ceil(new / (budget - batch))
    assert delay_s == pytest.approx(max(0, first_s - iterations * MODEL.step_s(batch, kv)), abs=1e-12)
    assert MODEL.read_delay_s(prompt, cached, 0, 0, budget) == 0


def test_prompts_that_wait_are_read_first_and_decodes_run_beside_them() -> None:
    k = MODEL
    alone = k.first_token_s(500, 0, 0, 0, 0, 2048)
    assert alone == pytest.approx(k.prefill_s(500))
    behind = k.first_token_s(500, 0, 3596, 0, 0, 2048)
    assert behind == pytest.approx(k.prefill_s(2048) + k.mixed_step_s(2048, 1, 500, 0, 0))
    assert k.first_token_s(500, 400, 0, 0, 0, 2048) == pytest.approx(k.prefill_s(500, 1, 400))
    beside = k.first_token_s(500, 0, 0, 8, 5600, 2048)
    assert beside == pytest.approx(k.mixed_step_s(500, 1, 500, 8, 5600))


GRID = PrefillGrid((1, 4, 16), (128, 1024), ((-0.08, 0.06), (0.02, -0.05), (0.0, 0.04)))


@given(
    st.sampled_from(
        (None, PnormPrefill(0.01, 1e-4, 1e-9, 2.0, GRID), PnormPrefill(0.01, 1e-4, 1e-9, 4.0, None, 128))
    ),
    st.sampled_from((None, MixedTerm(1e-5, 1e-8, 1e-7, 2e-7))),
    st.tuples(st.integers(1, 9000), st.integers(0, 9000), st.integers(0, 20_000), st.integers(0, 300)),
    st.sampled_from((1.0, 0.5, 3.0)),
)
def test_a_prompt_token_takes_at_least_its_least_time_whatever_runs_beside_it(
    better: PnormPrefill | None, mixed: MixedTerm | None, load: tuple[int, int, int, int], scale: float
) -> None:
    prompt, cached, pending, batch = load
    model = replace(MODEL, better_prefill=better, mixed=mixed).scaled(scale)
    new = max(1, prompt - cached)
    seconds = model.first_token_s(prompt, min(cached, prompt), pending, batch, 900.0 * batch, 2048)
    assert 0.0 < model.least_token_s * (new + pending) <= seconds * (1.0 + 1e-9)


@st.composite
def tables(draw: st.DrawFn) -> DecodeTable:
    """Tables with few and many points, of small batches and of very large ones."""
    batches = sorted(draw(st.sets(st.integers(1, 40) | st.integers(1, 100_000), min_size=2, max_size=12)))
    steps = draw(st.lists(st.floats(0.0, 1.0), min_size=len(batches), max_size=len(batches)))
    seconds = [0.01 + sum(steps[: i + 1]) for i in range(len(batches))]
    return DecodeTable(1e-7, draw(st.floats(0.0, 1e-6)), tuple(batches), tuple(seconds))


@given(tables(), st.floats(0.1, 120_000.0) | st.integers(1, 100_001).map(float), st.data())
def test_a_table_gives_what_a_search_for_the_batch_does(
    table: DecodeTable, batch: float, data: st.DataObject
) -> None:
    """To the last bit, between its points, on them and beyond both ends, also after a change of process."""
    near = data.draw(st.sampled_from([-0.5, 0.0, 0.5])) + data.draw(st.sampled_from(table.batches))
    for each in (batch, near):
        i = min(max(1, bisect_left(table.batches, each)), len(table.batches) - 1)
        (low, high), (low_s, high_s) = table.batches[i - 1 : i + 1], table.seconds[i - 1 : i + 1]
        own_s = low_s + (each - low) * (high_s - low_s) / (high - low)
        if each <= table.batches[0]:
            own_s = table.seconds[0]
        expected = (own_s, table.token_s + table.context_s / each)
        assert table.step_line(each) == expected
        assert pickle.loads(pickle.dumps(table)).step_line(each) == expected


@given(
    st.sets(st.integers(1, 100_000), min_size=2, max_size=9).map(sorted),
    st.floats(0.5, 200_000.0),
    st.data(),
)
def test_a_grid_is_linear_in_logarithms_between_its_points(
    lengths: list[int], length: float, data: st.DataObject
) -> None:
    """To the last bit what a search for the cell gives, also on points and beyond the edges."""
    row = data.draw(st.lists(st.floats(-2.0, 2.0), min_size=len(lengths), max_size=len(lengths)))
    grid = PrefillGrid((1, 4), tuple(lengths), (tuple(row), tuple(row)))
    for each in (length, float(data.draw(st.sampled_from(lengths)))):
        j = min(max(bisect_right(lengths, each) - 1, 0), len(lengths) - 2)
        share = math.log(each / lengths[j]) / math.log(lengths[j + 1] / lengths[j])
        if each <= lengths[0]:
            share = 0.0
        elif each >= lengths[-1]:
            share = 1.0
        assert grid.factor(1.0, each) == math.exp(row[j] + share * (row[j + 1] - row[j]))


@given(st.integers(1, 200), st.integers(1, 5000), st.floats(0.2, 0.4))
def test_contexts_of_one_length_are_no_longer_where_some_blocks_read_as_fast_as_all(
    batch: int, context: int, share: float
) -> None:
    split = SplitKv(37.0, share * 37.0 * MODEL.k5)
    assert uneven_s(replace(MODEL, k7=0.0, split_kv=split), batch, batch * context, context) == 0.0


def test_a_long_context_among_short_ones_has_the_blocks_of_its_padded_batch() -> None:
    model = replace(MODEL, k7=0.0, split_kv=SplitKv(37.0, 1e-6))
    for batch, splits in ((1, 37), (3, 12), (8, 4), (9, 2), (16, 2), (17, 1), (24, 1), (100, 1)):
        tokens = 30_000 + 100 * (batch - 1)
        expected = max(0.0, 1e-6 * 30_000 / splits - MODEL.k5 * tokens)
        assert uneven_s(model, batch, tokens, 30_000) == pytest.approx(expected, abs=1e-12)
    assert uneven_s(model.scaled(2.0), 24, 32_300, 30_000) == pytest.approx(
        2.0 * uneven_s(model, 24, 32_300, 30_000)
    )
