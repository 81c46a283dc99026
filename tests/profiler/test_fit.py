"""The fit: never negative, never falling, recovers known constants, judged on points it has not seen."""

from __future__ import annotations

import csv
import json
import math
import random
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetlb.balancer.core.latency import LatencyModel
from hetlb.balancer.core.step_times import PnormPrefill, PrefillGrid
from hetlb.errors import ProfileError
from hetlb.options.event_log.eventlog import read_value
from hetlb.tools.profiler.fit import (
    DecodeForm,
    PrefillForm,
    assumed_mixed,
    errors_on,
    fit,
    fit_form,
    fit_linear,
    fit_mixed,
    fit_pnorm,
    mixed_s,
    seconds_of,
    with_grid,
)
from hetlb.tools.profiler.grid import (
    DEFAULT_DECODE_GRID,
    DEFAULT_PREFILL_GRID,
    Point,
    StepKind,
    merge_repeats,
    middle,
)

DATA = Path(__file__).parent / "data" / "l40s-llama-3.1-8b.csv"
TRUE = LatencyModel(k1=1.1e-4, k2=1e-3, k3=1e-6, k4=1e-2, k5=5e-8, k6=6e-5, k7=1e-7, k8=1.3e-2)
BATCHES = [*range(1, 10), 12, 15, 16, 17, 24, 32, 48, 64, 96, 128, 200, 256]
LENGTHS = [1, 2, 3, 5, 8, 16, 40, 100, 128, 129, 200, 256, 400, 512, 700, 1024, 1500, 2048, 3000, 4096]
LENGTHS += [4097, 6000, 8192, 16384, 32768]


def measured(tp: int = 1) -> list[Point]:
    with DATA.open() as file:
        return [
            Point(StepKind(r["phase"]), int(r["batch"]), int(r["length"]), float(r["latency_ms"]) / 1e3)
            for r in csv.DictReader(file)
            if int(r["tp"]) == tp
        ]


def synthetic(noise: float = 0.0, repeats: int = 1, seed: int = 0) -> list[Point]:
    rng = random.Random(seed)
    grids = (
        (StepKind.PREFILL, DEFAULT_PREFILL_GRID, TRUE.paper_prefill_s),
        (StepKind.DECODE, DEFAULT_DECODE_GRID, TRUE.paper_step_s),
    )
    return [
        Point(phase, b, n, truth(b, n) * (1 + rng.gauss(0, noise)))
        for phase, grid, truth in grids
        for b, n in grid
        for _ in range(repeats)
    ]


def assert_rises(predict: object, least: float = 0.0) -> None:
    times = np.array([[predict(b, n) for n in LENGTHS] for b in BATCHES])  # type: ignore[operator]
    assert times.min() >= least
    assert times.min() > 0
    assert (np.diff(times, axis=0) >= -1e-12 * times[1:]).all(), "falls with batch"
    assert (np.diff(times, axis=1) >= -1e-12 * times[:, 1:]).all(), "falls with length"


@pytest.mark.parametrize("seed", range(5))
def test_known_constants_come_back_from_noisy_repeats(seed: int) -> None:
    latency = fit(synthetic(noise=0.01, repeats=4, seed=seed), form=PrefillForm.PAPER).latency
    for name in ("k1", "k5", "k6", "k8"):
        assert getattr(latency, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    for b, n in [(1, 128), (3, 900), (16, 4096), (8, 2000)]:
        assert latency.paper_prefill_s(b, n) == pytest.approx(TRUE.paper_prefill_s(b, n), rel=0.02)
    for b, n in [(1, 256), (5, 900), (128, 4096), (64, 2000)]:
        assert latency.paper_step_s(b, n) == pytest.approx(TRUE.paper_step_s(b, n), rel=0.02)


def test_without_noise_the_constants_are_exact() -> None:
    latency = fit(synthetic(), form=PrefillForm.PAPER).latency
    for index in range(1, 9):
        assert getattr(latency, f"k{index}") == pytest.approx(getattr(TRUE, f"k{index}"), rel=1e-3)


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("form", [PrefillForm.PAPER, PrefillForm.PNORM, PrefillForm.GRID])
def test_a_measured_prefill_never_falls(form: PrefillForm, tp: int) -> None:
    assert_rises(
        partial(seconds_of, fit_form([p for p in measured(tp) if p.phase is StepKind.PREFILL], form))
    )


@pytest.mark.parametrize("tp", [1, 8])
def test_a_measured_decode_never_falls(tp: int) -> None:
    decode = [p for p in measured(tp) if p.phase is StepKind.DECODE]
    assert_rises(partial(seconds_of, fit_form(decode, DecodeForm.PAPER)))


@settings(max_examples=15)
@given(off=st.lists(st.floats(0.2, 5.0), min_size=12, max_size=12), form=st.sampled_from(list(PrefillForm)))
def test_nothing_falls_whatever_was_measured(off: list[float], form: PrefillForm) -> None:
    points = [
        Point(StepKind.PREFILL, b, n, TRUE.paper_prefill_s(b, n) * factor)
        for (b, n), factor in zip(DEFAULT_PREFILL_GRID, off, strict=True)
    ]
    try:
        fitted = fit_form(points, form)
    except ProfileError:
        return  # no fit at all is a fair answer to points that have no order
    assert_rises(partial(seconds_of, fitted))


def test_points_too_odd_for_the_better_forms_leave_the_paper_form() -> None:
    odd = [
        Point(p.phase, p.batch, p.length, 0.015625 if (p.batch, p.length) == (1, 2048) else 1.0)
        if p.phase is StepKind.PREFILL
        else p
        for p in synthetic()
    ]
    result = fit(odd)
    assert_rises(result.latency.paper_prefill_s)
    assert result.warnings


def test_the_grid_form_passes_through_what_rises() -> None:
    points = [p for p in synthetic() if p.phase is StepKind.PREFILL]
    better = with_grid(fit_pnorm(points), points)
    for p in points:
        assert better.prefill_s(p.batch, p.length) == pytest.approx(p.seconds, rel=0.02)


def test_default_points_predict_the_others() -> None:
    points = [p for p in measured(1) if p.phase is StepKind.PREFILL]
    train = [p for p in points if (p.batch, p.length) in DEFAULT_PREFILL_GRID]
    test = [p for p in points if (p.batch, p.length) not in DEFAULT_PREFILL_GRID]
    assert (
        errors_on(fit_form(train, PrefillForm.PAPER), test).mean() < 0.12
    )  # one of the worst of 95 configurations
    assert errors_on(fit_form(train, PrefillForm.GRID), test).mean() < 0.06


def test_plain_least_squares_is_worse_where_it_is_small() -> None:
    points = [p for p in measured(1) if p.phase is StepKind.PREFILL]
    terms = [(p.batch * p.length, p.batch, p.length, 1.0) for p in points]
    plain, *_ = np.linalg.lstsq(terms, [p.seconds for p in points])
    errors = [errors_on(constants, points) for constants in (fit_linear(points), tuple(plain))]
    assert errors[0].mean() < errors[1].mean()


def test_the_report_names_the_worst_point_and_warns() -> None:
    points = [
        Point(p.phase, p.batch, p.length, p.seconds * (9 if (p.batch, p.length) == (4, 512) else 1))
        for p in synthetic()
    ]
    result = fit(points)
    assert any(line.startswith("prefill: the largest") and "length 512" in line for line in result.warnings)
    assert not [line for line in result.warnings if line.startswith("decode")]
    assert fit(synthetic()).warnings == ()
    assert result.reports["prefill"].max_error > 0.3


def test_repeats_count_by_the_ones_near_their_median() -> None:
    (point,) = merge_repeats(Point(StepKind.DECODE, 1, 8, s) for s in (1.0, 9.0, 2.0))
    assert point.seconds == 1.5
    assert point.uncertainty == pytest.approx(0.5 / 1.5)
    assert merge_repeats([point]) == [point]


def test_samples_of_a_clock_of_milliseconds_count_by_their_mean_and_are_never_sure_at_once() -> None:
    rng = random.Random(3)

    def sample() -> float:
        began = rng.random()
        return (math.ceil(began + 6.3) - math.ceil(began)) / 1e3

    for _ in range(50):
        seconds = [sample() for _ in range(45)]
        assert middle(seconds[:3], 4e-4)[1] > 0.03
        found, uncertainty = middle(seconds, 4e-4)
        assert uncertainty <= 0.012
        assert abs(found / 6.3e-3 - 1.0) < 4.0 * uncertainty
    (point,) = merge_repeats((Point(StepKind.PREFILL, 1, 8, s) for s in (6e-3, 6e-3, 6e-3)), 4e-4)
    assert point.uncertainty == pytest.approx(4e-4 / 3**0.5 / 6e-3)


def test_unsure_points_weigh_less_and_the_profile_says_so() -> None:
    sure = fit(synthetic()).latency
    off = [
        replace(p, seconds=p.seconds * 1.5, uncertainty=0.2) if (p.batch, p.length) == (4, 512) else p
        for p in synthetic()
    ]
    errors = []
    for points in (off, [replace(p, uncertainty=0.0) for p in off]):
        found = fit(points, form=PrefillForm.PNORM)
        errors.append(abs(found.latency.prefill_s(512, 4) / sure.prefill_s(512, 4) - 1.0))
        said = [line for line in found.warnings if "prefill: samples differ: the standard error" in line]
        assert bool(said) == (points is off)
    assert errors[0] < 0.3 * errors[1]


def test_unsure_mixed_points_leave_the_assumed_term() -> None:
    latency = fit(synthetic()).latency
    known = [Point(StepKind.MIXED, b, 1024, 1.0, 1, p) for b in (4, 32) for p in (300, 1500)]
    shares = (0.2, -0.1, 0.1, -0.2)
    noisy = [
        replace(p, seconds=mixed_s(latency, p) * (1.0 + off)) for p, off in zip(known, shares, strict=True)
    ]
    taken, left = (
        [mixed_s(replace(latency, mixed=fit_mixed(latency, points)), p) for p in known]
        for points in (noisy, [replace(p, uncertainty=0.15) for p in noisy])
    )
    assumed = [mixed_s(replace(latency, mixed=assumed_mixed(latency)), p) for p in known]

    def off(found: list[float]) -> float:
        return max(abs(one / other - 1.0) for one, other in zip(found, assumed, strict=True))

    assert off(left) < 0.7 * off(taken)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([p for p in synthetic() if p.phase is StepKind.DECODE], "prefill: expected at least 8 points"),
        ([p for p in synthetic() if p.batch == 1], "prefill: expected at least 8 points"),
        (
            [*synthetic(), Point(StepKind.DECODE, 2, 2, 0.0)],
            "decode at batch 2, length 2: expected a time above 0",
        ),
    ],
)
def test_too_few_or_impossible_points(points: list[Point], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        fit(points)


def test_the_better_form_times_iterations_and_the_paper_keeps_its_constants() -> None:
    grid = PrefillGrid((1, 16), (128, 4096), ((0.1, 0.0), (0.0, -0.1)))
    better = PnormPrefill(0.01, 1e-4, 1e-9, 2.0, grid)
    constants = [getattr(TRUE, f"k{i}") for i in range(1, 9)]
    model = LatencyModel(*constants, better)

    def iteration(tokens: int, decodes: int) -> float:
        return model.mixed_step_s(tokens, 1 if tokens else 0, tokens, decodes, 1000 * decodes)

    assert iteration(512, 0) == better.prefill_s(1, 512)
    assert iteration(0, 8) == pytest.approx(TRUE.paper_step_s(8, 1000))
    assert iteration(1, 8) >= iteration(0, 8)
    assert iteration(512, 8) > iteration(512, 0)
    assert model.paper_prefill_s(4, 512) == TRUE.paper_prefill_s(4, 512)
    assert model.prefill_s(512, 4) == better.prefill_s(4, 512)
    assert model.scaled(2.0).prefill_s(512) == pytest.approx(2 * iteration(512, 0))


def test_an_event_log_keeps_the_better_form() -> None:
    grid = PrefillGrid((1, 16), (128, 4096), ((0.1, 0.0), (0.0, -0.1)))
    model = LatencyModel(1, 2, 3, 4, 5, 6, 7, 8, PnormPrefill(0.01, 1e-4, 1e-9, 2.0, grid))
    assert read_value(LatencyModel, json.loads(json.dumps(asdict(model)))) == model
    old = {f"k{i}": float(i) for i in range(1, 9)}
    assert read_value(LatencyModel, old) == LatencyModel(1, 2, 3, 4, 5, 6, 7, 8)


def test_long_prompts_are_read_by_their_own_slope() -> None:
    """Short prompts lie on a plane, which has the least median error; a part attends to earlier ones."""

    def pass_s(batch: int, tokens: int, computed: int = 0) -> float:
        plane_s = 0.01 + 1e-3 * batch + 1e-5 * batch * tokens
        return plane_s + 1e-10 * batch * tokens * (tokens + 2 * computed)

    def long_s(length: int) -> float:
        return sum(pass_s(1, 8192, start) for start in range(0, length, 8192))

    points = [
        Point(StepKind.PREFILL, b, n, pass_s(b, n)) for b in (1, 2, 4, 8) for n in (128, 512, 1024, 2048)
    ]
    points += [Point(StepKind.PREFILL, 1, n, long_s(n), n // 8192) for n in (32768, 131072)]
    points += [
        Point(StepKind.DECODE, b, n, 0.01 + 1e-8 * b * n) for b in (1, 4, 16) for n in (256, 1024, 4096)
    ]
    latency = fit(points).latency
    for length in (32768, 65536, 131072):
        assert latency.first_token_s(length, 0, 0, 0, 0, 8192) == pytest.approx(long_s(length), rel=0.1)
