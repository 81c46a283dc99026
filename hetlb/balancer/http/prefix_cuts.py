"""Positions in a prompt: its beginning up to each gets a prefix key.

A position depends on nothing that comes after it, so two prompts that begin alike are cut alike up to where
they part. Cuts lie at the ends of parts (messages, turns), where prompts usually part, but never closer than
1/64 of what came before; inside a long part they come at most 1/8 of what came before apart. So a shared
beginning is found but for its last eighth at the worst, at the cost of some forty keys for 64 KiB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

#: Tokens of the shortest prefix with a key; four bytes of text count as a token.
FIRST_TOKENS: Final = 256
BYTES_PER_TOKEN: Final = 4
#: Most keys of a prompt: longer prefixes share the last one.
_MOST_KEYS: Final = 96


def cuts(ends: Iterable[int], length: int, first: int) -> Iterator[int]:
    """Yield positions of the cuts, from `first` on, in a prompt of `length` units with parts to `ends`."""
    last = count = 0
    for end in ends:
        while count < _MOST_KEYS:
            step = first if last < 8 * first else last // 8
            inner = last + step
            if inner < end and inner <= length:
                pass
            elif end <= length and end - last >= (first if not last else max(1, last // 64)):
                inner = end
            else:
                break
            yield inner
            last = inner
            count += 1
            if inner == end:
                break
