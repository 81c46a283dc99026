"""`hetlb simulate --tune`: searches weights of the default policy that improve a figure."""

from __future__ import annotations

import argparse
import sys

from hetlb.balancer.config.fleet import Fleet
from hetlb.balancer.core.policies.score_terms import TERMS, UNSTATED
from hetlb.cli.flags import print_document
from hetlb.errors import InputError
from hetlb.tools.sim.simulation_sweep import Study
from hetlb.tools.sim.tune import FIGURES, losses, search

#: Number of held-out seeds on which the gain is measured.
_HELD_OUT_SEEDS = 6


def check_tune(args: argparse.Namespace, fleet: Fleet) -> None:
    """Raise `InputError` unless the figure exists."""
    if args.tune not in FIGURES:
        raise InputError(f"--tune: expected one of {', '.join(FIGURES)}, got {args.tune!r}")
    if args.tune == "attainment" and not any(fleet.service_classes.values()):
        raise InputError("--tune: expected a fleet with models[].classes for attainment, got none")


def run_tune(
    args: argparse.Namespace, fleet: Fleet, study: Study, rate: float | str, seeds: list[int]
) -> int:
    """Search weights; their gain goes to stderr, significantly better ones to stdout, as YAML."""
    stated = dict(fleet.policy_params.weights)
    start = {
        term.name: stated.get(term.name, term.weight)
        for term in TERMS
        if term.name in stated or term.weight != UNSTATED
    }
    if not any(row.adapter for row in study.load.rows):
        start.pop("adapter_s", None)
    if not any(each.stated for each in study.classes.values()):
        start.pop("loss_s")
    start.pop("own_s")  # only the ratios to one of them matter
    held_back = [max(seeds) + 1 + i for i in range(_HELD_OUT_SEEDS)]
    found = search(
        stated, start, args.tune, lambda weights, seed: losses(study, rate, weights, seed), seeds, held_back
    )
    lines = "".join(f"    {name}: {weight:g}\n" for name, weight in found.weights.items())
    document = {
        "figure": args.tune, "start": start, "weights": found.weights if found.certain else start,
        "gain": found.gain, "others": found.others, "interval": [found.low, found.high],
        "certain": found.certain, "runs": found.runs,
    }  # fmt: skip
    told = (
        f"{args.tune}: {found.gain:+.1%} better on {_HELD_OUT_SEEDS} seeds that the search did not see "
        f"(95 % interval {found.low:+.1%} to {found.high:+.1%}; {found.runs} runs)\n"
    )
    costs = ", ".join(f"{name} {gain:+.1%}" for name, gain in found.others.items())
    told += f"Every other figure on the same seeds (below 0 is worse): {costs}\n"
    if not found.certain:
        told += "The interval holds zero: the weights stay as they are.\n"
    print(told, end="", file=sys.stderr)
    found_yaml = f"policy:\n  weights:\n{lines}" if found.certain else ""
    return print_document(args, document, lambda: print(found_yaml, end=""))
