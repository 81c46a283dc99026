"""Limits of the commands that plan: one end of the time over everything, Ctrl-C, progress."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from hetlb.tools.plan.highs import Interrupt, SolveLimits
from hetlb.tools.sim.deadline import ends_when
from hetlb.tools.tables import PlanProgress, plan_progress


@contextmanager
def planning(
    args: argparse.Namespace, words: str, seconds: float, *, seed: int = 0, gap: float = 1e-4
) -> Iterator[tuple[SolveLimits, PlanProgress]]:
    """Yield the limits of a plan, which count from the start of the command, and its progress.

    Every simulation inside ends with the limits, or with Ctrl-C, which is the first one's alone.
    """
    interrupt = Interrupt()
    limits = SolveLimits(gap, args.began_s + seconds, seed, interrupt)
    with interrupt.catching(), plan_progress(words) as progress:

        def over() -> bool:
            progress.tick()
            return limits.over

        with ends_when(over):
            yield limits, progress
