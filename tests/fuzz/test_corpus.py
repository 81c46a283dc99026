"""Every input that was ever of interest to a fuzzer still gives no find; and a little mutation of each."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz.run_target import mutate
from fuzz.targets import TARGETS, seeds


@pytest.mark.parametrize(
    ("name", "path"),
    [pytest.param(name, path, id=f"{name}-{path.name}") for name in TARGETS for path in seeds(name)],
)
def test_the_kept_corpus(name: str, path: Path) -> None:
    TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_small_changes_of_it(name: str) -> None:
    rng = random.Random(1)
    kept = [path.read_bytes() for path in seeds(name)]
    for _ in range(150):
        TARGETS[name](mutate(rng, rng.choice(kept), kept))
