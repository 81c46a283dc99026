"""Removal of configurations that simpler ones equal: ties go to the fewest GPUs a server, then stages.

A larger server that serves neither a type nor the mix more than `TIE_SHARE` better than simpler servers on
the same GPUs is left out: it costs as much, fails as a whole, and its form may never have been started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from hetlb.tools.plan.rent_program import Configuration

#: Relative gain of a larger server that is no gain: throughputs are simulated on a sample.
TIE_SHARE = 0.01


def without_ties(configurations: Sequence[Configuration]) -> list[Configuration]:
    """Return the configurations that gain on some type over simpler ones on their GPUs."""
    return [each for each in configurations if not _equalled(each, configurations)]


def _size(configuration: Configuration) -> tuple[int, int]:
    return sum(configuration.gpus.values()), len(configuration.stages)


def _equalled(larger: Configuration, configurations: Sequence[Configuration]) -> bool:
    for parts in _divisions(larger, configurations):
        together = [(_rates(part), count) for part, count in parts]
        if all(
            rate <= (1.0 + TIE_SHARE) * sum(count * rates.get(name, 0.0) for rates, count in together)
            for name, rate in _rates(larger).items()
        ):
            return True
    return False


def _rates(configuration: Configuration) -> dict[str, float]:
    """Return the requests/s of each type alone, and of the whole mix where it was measured."""
    whole = {} if configuration.mix_rate is None else {"": configuration.mix_rate}
    return {**configuration.throughput, **whole}


def _divisions(
    larger: Configuration, configurations: Sequence[Configuration]
) -> Iterator[list[tuple[Configuration, int]]]:
    """Yield simpler servers of one kind of GPU each, with their numbers, on the GPUs of a larger one."""
    choices = []
    for gpu, count in larger.gpus.items():
        simpler = [
            (each, count // each.gpus[gpu])
            for each in configurations
            if each.model == larger.model
            and list(each.gpus) == [gpu]
            and count % each.gpus[gpu] == 0
            and _size(each) < _size(larger)
        ]
        choices.append(simpler)
    yield from (list(parts) for parts in product(*choices))
