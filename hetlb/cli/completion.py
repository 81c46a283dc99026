"""`hetlb completion`: completion for a shell, made from the parser; and suggestions for unknown words."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Collection
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


#: Flags of what is given without one, by how it begins or ends.
_FLAGS_OF = (
    (("http://", "https://"), (), ("--instance", "--admin", "--url")),
    ((), (".yaml", ".yml"), ("--config",)),
    ((), (".csv", ".json", ".jsonl"), ("--trace",)),
)


def suggestion(message: str, arguments: Collection[argparse.Action]) -> str:
    """Return `; did you mean x?` for an error of argparse, or nothing; `arguments` are the command's."""
    flags = {flag for action in arguments for flag in action.option_strings}
    if wrong := re.search(r"invalid choice: '([^']*+)' \(choose from (.*+)", message):
        found = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), n=1)
    elif wrong := re.match(r"unrecognized arguments: (--[\w-]+)", message):
        found = difflib.get_close_matches(wrong[1], sorted(flags), n=1)
    elif wrong := re.match(r"unrecognized arguments: (\S+)", message):
        given = wrong[1]
        meant = [own for begins, ends, own in _FLAGS_OF if given.startswith(begins) or given.endswith(ends)]
        found = [f"{flag} {given}" for own in meant for flag in own if flag in flags]
    else:
        found = []
    return f"; did you mean {found[0]}?" if found else ""
