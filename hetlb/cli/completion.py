"""`hetlb completion`: completion of commands, flags and values for a shell, made from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import shtab

from hetlb.cli import main

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hetlb completion`."""
    parser.add_argument("shell", choices=SHELLS, help="shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    parser = main.build_parser()
    for each in _with_subparsers(parser):
        for action in each._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=args.shell), end="")
    return 0


def _with_subparsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                yield from _with_subparsers(each)
