"""Flags and readers of commands that take files of requests."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from hetlb.cli.flags import POSITIVE, declare, whole
from hetlb.errors import TraceError
from hetlb.tools.loadtest.options import read_waves
from hetlb.tools.workload.input_limit import DEFAULT_MIB, TextLines, text_lines


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
