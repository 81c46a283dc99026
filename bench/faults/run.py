"""How hetlb behaves when clients leave, come all at once, or the operator reloads and stops it: measured.

Shows: for each subcommand a table of what is promised, what was measured, and whether it was kept.
Hetlb is a process of its own with its ordinary settings unless a subcommand names others;
engines are emulated; results go to bench/results/behaviour-NAME.json with the machine, the command and its
load average. Exit status 1 where a promise was not kept.

`.venv/bin/python bench/faults/run.py leave` (or `drain`, `overload`, `reload`, `terminate`): 1 to 5
minutes each; `attacks` takes 10.
Everything runs on this machine, so other work on it shows in the times.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys

import uvloop

SUBCOMMANDS = ("attacks", "drain", "leave", "overload", "reload", "terminate")


def main() -> int:
    """Run one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    subparsers = parser.add_subparsers(dest="name", required=True)
    modules = {name: importlib.import_module(name) for name in SUBCOMMANDS}
    for name, module in modules.items():
        subparser = subparsers.add_parser(name, description=(module.__doc__ or "").splitlines()[0])
        subparser.add_argument("--recorded", help="the date in the result (default today)")
        module.add_arguments(subparser)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return int(runner.run(modules[args.name].run(args)))


if __name__ == "__main__":
    sys.exit(main())
