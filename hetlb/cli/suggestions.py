"""Suggestions for words that a command does not know."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Collection

#: Flags of what is given without one, by a pattern.
_FLAGS_OF = {
    r"https?://": ("--instance", "--admin", "--url"),
    r".*\.ya?ml$": ("--config",),
    r".*\.(csv|jsonl?)$": ("--trace",),
}


def suggestion(message: str, arguments: Collection[argparse.Action]) -> str:
    """Return `; did you mean x?` for an error of argparse, or nothing; `arguments` are the command's."""
    flags = {flag for action in arguments for flag in action.option_strings}
    if wrong := re.search(r"invalid choice: '([^']*+)' \(choose from (.*+)", message):
        found = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), n=1)
    elif wrong := re.match(r"unrecognized arguments: (--[\w-]+)", message):
        found = difflib.get_close_matches(wrong[1], sorted(flags), n=1)
    elif wrong := re.match(r"unrecognized arguments: (\S+)", message):
        meant = [own for pattern, own in _FLAGS_OF.items() if re.match(pattern, wrong[1])]
        found = [f"{flag} {wrong[1]}" for own in meant for flag in own if flag in flags]
    else:
        found = []
    return f"; did you mean {found[0]}?" if found else ""
