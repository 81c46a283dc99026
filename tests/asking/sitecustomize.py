"""Notes which options each test asks for: on the path of processes where `without_options.py` records."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


def note(option: str) -> None:
    """Write the id of the running test and an option of `hetlb/options` that it asks for."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test:
        with open(os.path.join(os.environ["HETLB_ASKED"], str(os.getpid())), "a") as file:
            file.write(f"{test}\t{option.partition('.')[0]}\n")


def noted(option: Callable[[str], ModuleType]) -> Callable[[str], ModuleType]:
    """Return `hetlb.extras.option`, each call of which is noted."""

    def asked(name: str) -> ModuleType:
        note(name)
        return option(name)

    return asked


class AskedFinder(MetaPathFinder):
    """Sees what is imported for the first time; finds nothing."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.startswith("hetlb.options."):
            note(name.removeprefix("hetlb.options."))


if "HETLB_ASKED" in os.environ:
    sys.meta_path.insert(0, AskedFinder())
