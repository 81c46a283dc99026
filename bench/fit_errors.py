"""Errors of the fit on points it has not seen, over every configuration that fits in memory.

    python bench/fit_errors.py DIR

DIR holds aic_vllm.csv and aic_kv_capacity.csv. Fitted on the default 12 + 12 points, tested on all
others; `best` is the form chosen by held-out error within the 12.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from hetlb.tools.profiler.fit import (
    DecodeForm,
    PrefillForm,
    errors_on,
    fit_form,
    held_out_errors,
)
from hetlb.tools.profiler.grid import DEFAULT_DECODE_GRID, DEFAULT_PREFILL_GRID, Point, StepKind


def main() -> None:
    """Print median and largest mean error per phase and form."""
    folder = Path(sys.argv[1])
    with (folder / "aic_kv_capacity.csv").open() as file:
        fits = {(r["system"], r["model"], r["tp"]) for r in csv.DictReader(file) if r["fits"] == "1"}
    points: dict[tuple[str, str, str], list[Point]] = defaultdict(list)
    with (folder / "aic_vllm.csv").open() as file:
        for r in csv.DictReader(file):
            key = (r["system"], r["model"], r["tp"])
            if key in fits:
                size = (int(r["batch"]), int(r["length"]))
                points[key].append(Point(StepKind(r["phase"]), *size, float(r["latency_ms"]) / 1e3))
    errors: dict[str, list[float]] = defaultdict(list)
    for of_configuration in points.values():
        for phase, grid in ((StepKind.PREFILL, DEFAULT_PREFILL_GRID), (StepKind.DECODE, DEFAULT_DECODE_GRID)):
            of_phase = [p for p in of_configuration if p.phase is phase]
            train = [p for p in of_phase if (p.batch, p.length) in grid]
            test = [p for p in of_phase if (p.batch, p.length) not in grid]
            of_tables = (PrefillForm.PAPER, PrefillForm.PNORM, PrefillForm.GRID)
            forms = of_tables if phase is StepKind.PREFILL else tuple(DecodeForm)
            unseen: dict[str, float] = {
                form: float(errors_on(fit_form(train, form), test).mean()) for form in forms
            }
            best = min(forms, key=lambda form, train=train: median(held_out_errors(train, form)))
            for form in forms:
                errors[f"{phase} {form}"].append(unseen[form])
            errors[f"{phase} best"].append(unseen[best])
    print(f"{len(points)} configurations")
    for name, values in errors.items():
        print(f"{name:16} median of mean errors {median(values):.4f}, largest {max(values):.4f}")


if __name__ == "__main__":
    main()
