"""`hetlb completion`: completion of commands, flags and values for a shell, made from the parser."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from hetlb.cli import main

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell that reads the script")


def run(args: argparse.Namespace) -> int:
    parser = main.build_parser()
    for action in main.actions(parser):
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=args.shell), end="")
    return 0
