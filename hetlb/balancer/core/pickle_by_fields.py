"""The base of values that go from one process to another, and the check of their numbers."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from mypy_extensions import mypyc_attr


@mypyc_attr(acyclic=True, allow_interpreted_subclasses=True)
class PickleByFields:
    """Base of dataclasses: pickled by their fields. Compiled classes are made by their constructors alone."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        own: Any = self
        return type(self), tuple([getattr(own, each.name) for each in fields(own)])


def check_numbers(form: object, least: float, *names: str) -> None:
    """Raise `ValueError` unless these fields are finite numbers from `least` on."""
    for name in names:
        value = getattr(form, name)
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name}: expected a number from {least:g}, got {value}")
