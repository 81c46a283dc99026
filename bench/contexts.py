"""Contexts of each sequence in a log of iterations that tells only their number, sum and variance.

A sequence in a decode step grows by one token. So going backwards from the last iteration, which holds one
or two sequences, the sums say how many tokens the sequences that left had, and the variances which of them
came.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import pstdev

#: Tokens and share of the deviation that rounding (variances have three digits) and a first token leave.
_TOKENS, _SHARE = 5.0, 0.005

Row = dict[str, float]


def longest_contexts(rows: Sequence[Row]) -> dict[int, float]:
    """The longest context of iterations by `counter_id`, from the last one back until one cannot be told."""
    found: dict[int, float] = {}
    contexts: list[float] = []
    for index in range(len(rows) - 1, -1, -1):
        row = rows[index]
        if index + 1 < len(rows) and rows[index + 1]["counter_id"] != row["counter_id"] + 1:
            break
        before = _before(contexts, row) if contexts else _last(row)
        if before is None or not _agrees(before, row):
            break
        contexts = before
        if contexts:
            found[int(row["counter_id"])] = max(contexts)
    return found


def _last(row: Row) -> list[float] | None:
    """Contexts of one sequence, or of two by their mean and deviation."""
    number, tokens, deviation = _stated(row)
    if number > 2:
        return None
    return [tokens / number + sign * deviation for sign in (1, -1)[:number]] if number else []


def _before(after: Sequence[float], row: Row) -> list[float] | None:
    """Return the contexts of an iteration from the next one's."""
    number, tokens, deviation = _stated(row)
    kept = [each - 1.0 for each in after]
    more = number - len(kept)
    if more > 0:  # as many left after it; two are told apart by the deviation
        rest = tokens - sum(kept)
        if more == 1:
            return [*kept, rest]
        squares = number * (deviation**2 + (tokens / number) ** 2) - sum(each**2 for each in kept)
        half = max(0.0, 2.0 * squares - rest**2) ** 0.5 / 2.0
        return [*kept, rest / 2.0 + half, rest / 2.0 - half] if more == 2 else None
    candidates = [_without(kept, joined) for joined in combinations(range(len(kept)), -more)]
    best = min(candidates, key=lambda each: abs(sum(each) - tokens))
    if _agrees(best, row):
        return best
    # One more came than it seems, and another one left.
    replaced = (_without(kept, joined) for joined in combinations(range(len(kept)), 1 - more))
    told = ([*each, tokens - sum(each)] for each in replaced)
    return min(told, key=lambda each: abs(pstdev(each) - deviation), default=None)


def _without(contexts: Sequence[float], indices: Iterable[int]) -> list[float]:
    left_out = set(indices)
    return [each for index, each in enumerate(contexts) if index not in left_out]


def _agrees(contexts: Sequence[float], row: Row) -> bool:
    number, tokens, deviation = _stated(row)
    if len(contexts) != number or abs(sum(contexts) - tokens) > _TOKENS or any(each < 1 for each in contexts):
        return False
    return number == 0 or abs(pstdev(contexts) - deviation) <= max(_TOKENS, _SHARE * deviation)


def _stated(row: Row) -> tuple[int, float, float]:
    """Number of decoding sequences, their tokens, and the standard deviation of these."""
    return int(row["num_decode_requests"]), row["sum_decode_kv_tokens"], row["var_decode_kv_tokens"] ** 0.5
