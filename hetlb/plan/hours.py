"""A rent schedule: a plan for every hour of a table, each following the one before it.

The table is a CSV file with the columns `hour` (any text) and `request_rate` (requests/s), and where they
change `price:GPU` (per GPU and hour) and `available:GPU`; an empty cell keeps the market's value.
"""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable file: {os.strerror(error.errno or 0)}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: expected comma-separated values in UTF-8") from error
    header = [name.strip() for name in rows[0]] if rows else []
    if header[:2] != ["hour", "request_rate"]:
        raise ConfigError(f"{path}: header: expected hour,request_rate first, got {','.join(header)!r}")
    for name in header[2:]:
        kind, _, gpu = name.partition(":")
        if kind not in ("price", "available") or gpu not in gpus:
            raise ConfigError(
                f"{path}: header: expected price:GPU or available:GPU of the market, got {name!r}"
            )
    hours = []
    for number, cells in enumerate(rows[1:], start=2):
        if not cells:
            continue
        if len(cells) != len(header):
            raise ConfigError(f"{path}: line {number}: expected {len(header)} columns, got {len(cells)}")
        hour = Hour(cells[0], _number(path, number, header[1], cells[1]))
        for name, cell in zip(header[2:], cells[2:], strict=True):
            if cell.strip():
                kind, _, gpu = name.partition(":")
                (hour.prices if kind == "price" else hour.available)[gpu] = _number(path, number, name, cell)
        hours.append(hour)
    if not 1 <= len(hours) <= _MOST_HOURS:
        raise ConfigError(f"{path}: expected 1 to {_MOST_HOURS} hours, got {len(hours)}")
    return hours


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"{path}: line {line}: {column}: expected a number from 0, got {text!r}")
    return value


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
