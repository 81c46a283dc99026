"""Flags of commands that send or simulate requests, and the readers of their values."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from hetlb.cli.flags import POSITIVE, declare, whole
from hetlb.errors import InputError, TraceError
from hetlb.inputs import number_of
from hetlb.tools.loadtest.load_result import GOODPUT_METRICS
from hetlb.tools.workload.arrivals import Ramp, Rate, Waves
from hetlb.tools.workload.input_limit import DEFAULT_MIB, TextLines, text_lines
from hetlb.tools.workload.records import METRICS


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a load, common to `bench` and `simulate`."""
    add = declare(parser)
    add("--trace", "requests: hetlb's CSV, or a public trace as it is", "T.csv", Path)
    rates = "requests/s, inf (all at once) or trace (recorded arrivals); several: 2,4,inf"
    add("--request-rate", rates, "R", default="inf")
    add("--burstiness", "gamma shape of the gaps (default 1: Poisson; inf: constant)", "X", POSITIVE, 1.0)
    add("--waves", "seconds of traffic at the rate, seconds of pause", "ON:OFF", read_waves)


def add_input_limit(parser: argparse.ArgumentParser) -> None:
    """Add the flag of commands that read files of requests."""
    text = f"largest file of requests, unpacked (default {DEFAULT_MIB})"
    declare(parser)("--max-input-mib", text, "MIB", whole(1, 1 << 20), DEFAULT_MIB)


@contextlib.contextmanager
def event_log(path: Path) -> Iterator[TextLines]:
    """Yield the lines of an event log. Raises `TraceError` if it cannot be read or followed."""
    try:
        with text_lines(path, endless=True) as lines:
            yield lines
    except ValueError as error:
        raise TraceError(f"{path}: expected an event log of hetlb: {error}") from error


def read_rates(text: str) -> list[Rate]:
    """Parse `--request-rate`: requests/s above 0, `inf`, `trace`, or several separated by commas."""
    rates: list[Rate] = []
    for part in text.split(","):
        rate: Rate = "trace" if part.strip() == "trace" else number_of(part)
        if rate != "trace" and not rate > 0:
            raise InputError(
                f"--request-rate: expected requests/s above 0, inf or trace, or several separated by commas, "
                f"got {text!r}"
            )
        rates.append(rate)
    return list(dict.fromkeys(rates))


def read_goodput(limits: Sequence[str]) -> dict[str, float]:
    """Parse `--goodput ttft:500 tpot:50`: limits in milliseconds, given back in seconds."""
    found: dict[str, float] = {}
    for limit in limits:
        name, _, value = limit.partition(":")
        milliseconds = number_of(value)
        if name not in GOODPUT_METRICS or not 0 < milliseconds < math.inf:
            raise InputError(
                f"--goodput: expected NAME:MILLISECONDS with a name out of {', '.join(GOODPUT_METRICS)}, "
                f"got {limit!r}"
            )
        if name in found:
            raise InputError(f"--goodput: expected one limit for {name}, got two")
        found[name] = milliseconds / 1e3
    return found


def read_metrics(text: str) -> list[str]:
    """Parse `--percentile-metrics`: names of latencies separated by commas."""
    return list(dict.fromkeys(read_known("--percentile-metrics", text, METRICS)))


def read_percentiles(text: str) -> list[float]:
    """Parse `--metric-percentiles`: numbers from 0 to 100 separated by commas."""
    values = [number_of(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise InputError(
            f"--metric-percentiles: expected numbers from 0 to 100 separated by commas, got {text!r}"
        )
    return sorted(set(values))


def read_entry(text: str) -> tuple[str, str]:
    """Parse one `--metadata KEY=VALUE`. Raises `InputError`."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InputError(f"--metadata: expected KEY=VALUE, got {text!r}")
    return key, value


def read_known(flag: str, text: str, known: Collection[str]) -> list[str]:
    """Parse comma-separated names out of `known`."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise InputError(f"{flag}: expected names out of {', '.join(known)}, got {name!r}")
    return names


def read_names(flag: str, text: str, known: Collection[str]) -> list[str]:
    """Parse distinct comma-separated names out of `known`."""
    names = read_known(flag, text, known)
    if len(set(names)) != len(names):
        raise InputError(f"{flag}: expected every name once, got {text!r}")
    return names


def read_ramp(
    strategy: Literal["linear", "exponential"] | None, start_rps: float | None, end_rps: float | None
) -> Ramp | None:
    """Return the three flags of a ramp: all or none."""
    if strategy is None:
        if start_rps is not None or end_rps is not None:
            raise InputError("--ramp-up-strategy: expected linear or exponential beside the rates, got none")
        return None
    if start_rps is None or end_rps is None:
        flag = "--ramp-up-start-rps" if start_rps is None else "--ramp-up-end-rps"
        raise InputError(f"{flag}: expected requests/s above 0, got none")
    return Ramp(strategy, start_rps, end_rps)


def read_waves(text: str) -> Waves:
    """Parse `--waves ON:OFF`. Raises `InputError`."""
    times = [number_of(part) for part in text.split(":")]
    if len(times) != 2 or not all(0 <= each < math.inf for each in times) or times[0] == 0:
        raise InputError(f"--waves: expected seconds on and seconds off, as 5:15, got {text!r}")
    return Waves(*times)
