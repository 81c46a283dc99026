"""The paper's experiments in simulation: `python bench/paper/run.py 5.1` (or 5.2, 5.3, or all).

Shows: a table and a figure for every section, with the paper's own figure beside ours where it is known.
Everything a result rests on is in the repository (profiles under profiling/, lengths under
bench/data); results go to bench/results/paper-SECTION.json, figures to docs/img, and with --page the tables
into bench/paper/RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

import degrees
import policies
from report import IMAGES, about, read_result, write_block, write_result

EXPERIMENTS = policies.experiments()
SECTIONS = {"5.1": degrees, **dict.fromkeys(EXPERIMENTS, policies)}


def main() -> int:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("section", choices=[*SECTIONS, "all"])
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: the cores)"
    )
    parser.add_argument("--page", action="store_true", help="put the tables into bench/paper/RESULTS.md")
    parser.add_argument("--recorded", action="store_true", help="show the recorded results, run nothing")
    args = parser.parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    for section in SECTIONS if args.section == "all" else [args.section]:
        module = SECTIONS[section]
        runner = partial(policies.run, EXPERIMENTS[section]) if section in EXPERIMENTS else degrees.run
        if args.recorded:
            document = read_result(section)
        else:
            document = runner(args.jobs)
            write_result(section, {"about": about(f"bench/paper/run.py {section}"), **document})
        module.draw(document)
        text = module.show(document)
        if section in EXPERIMENTS:
            print(policies.orderings(document))
        print(f"## Section {section}\n\n{text}\n")
        if args.page:
            write_block(section, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
