"""A rent schedule: a plan for every hour of a table, each following the one before it.

The table is a CSV file with the columns `hour` (any text) and `request_rate` (requests/s), and where they
change `price:GPU` (per GPU and hour) and `available:GPU`; an empty cell keeps the market's value.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetlb.csv_rows import csv_rows
from hetlb.errors import ConfigError
from hetlb.plan.highs import INFINITY, SolveLimits
from hetlb.plan.rent_program import Problem, RentPlan
from hetlb.plan.replan import MoveCost, Moves, Replanned, replan

_MOST_HOURS = 10_000


@dataclass(frozen=True)
class Hour:
    """Demand in one hour, and its differences from the market: prices and numbers of GPUs."""

    name: str
    request_rate: float
    prices: dict[str, float] = field(default_factory=dict)
    available: dict[str, float] = field(default_factory=dict)


def read_hours(path: Path, problem: Problem) -> list[Hour]:
    """Read the table. Raises `ConfigError` naming file, line, column and value."""
    gpus = {gpu for c in problem.configurations for gpu in c.gpus}
    hours = []
    for row in csv_rows(path, ("hour", "request_rate"), ConfigError):
        hour = Hour(row.cells["hour"], row.number("request_rate"))
        for name in row.cells:
            if name in ("hour", "request_rate"):
                continue
            kind, _, gpu = name.partition(":")
            if kind not in ("price", "available") or gpu not in gpus:
                raise ConfigError(
                    f"{path}: header: expected price:GPU or available:GPU of the market, got {name!r}"
                )
            if row.get(name):
                (hour.prices if kind == "price" else hour.available)[gpu] = row.number(name)
        hours.append(hour)
    if not 1 <= len(hours) <= _MOST_HOURS:
        raise ConfigError(f"{path}: expected 1 to {_MOST_HOURS} hours, got {len(hours)}")
    return hours


def schedule(problem: Problem, hours: Sequence[Hour], cost: MoveCost, limits: SolveLimits) -> list[Replanned]:
    """The plan of every hour, from the instances of the hour before."""
    found: list[Replanned] = []
    running: dict[str, int] = {}
    for index, hour in enumerate(hours):
        if hour.request_rate == 0:
            found.append(_nothing(running))
            running = {}
            continue
        left = limits.deadline - time.monotonic()
        part = replace(limits, deadline=time.monotonic() + max(1.0, left / (len(hours) - index)))
        each = replan(at_hour(problem, hour), running, cost, part)
        found.append(each)
        running = dict(each.plan.counts)
    return found


def _nothing(running: dict[str, int]) -> Replanned:
    """An hour in which nothing is asked for: all that runs is stopped."""
    nothing = RentPlan({}, {}, 0.0, 0.0, 0.0)
    moves = Moves({}, dict(running))
    return Replanned(nothing, moves, nothing, moves)


def at_hour(problem: Problem, hour: Hour) -> Problem:
    """The problem of one hour: its rate at least cost, at its prices and with its GPUs."""
    configurations = problem.configurations
    if hour.prices:
        base = _prices(problem)
        configurations = tuple(
            replace(
                c,
                price_per_hour=c.price_per_hour
                + math.fsum(
                    (hour.prices[gpu] - base.get(gpu, 0.0)) * count
                    for gpu, count in c.gpus.items()
                    if gpu in hour.prices
                ),
            )
            for c in configurations
        )
    return replace(
        problem,
        configurations=configurations,
        available={**problem.available, **hour.available},
        request_rate=hour.request_rate,
        budget_per_hour=INFINITY,
    )


def _prices(problem: Problem) -> dict[str, float]:
    """Price per GPU and hour of every kind, from configurations of that kind alone."""
    found: dict[str, float] = {}
    for c in problem.configurations:
        if len(c.gpus) == 1:
            ((gpu, count),) = c.gpus.items()
            found.setdefault(gpu, c.price_per_hour / count)
    return found
