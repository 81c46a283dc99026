"""How a case of the fault matrix is written down, and where all of them are found.

A case names its row, what it does, and exactly which outcomes its requests end in; `known` is the
one line that says what the product does not do yet (the test is then expected to fail, and must be mended
when it does not). Nothing but this registry decides what `test_matrix.py` runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from faults.rig import Rig

Body: TypeAlias = Callable[[Any], Awaitable[None]]

#: A limit that a case waits for. It also holds for the fifty streams in the background, on machines where
#: everything takes a tenth of a second now and then.
PATIENCE_S = 2.0


@dataclass(frozen=True)
class Case:
    """One fault and what must come of it."""

    row: str
    name: str
    run: Body
    engines: int = 1
    #: How many requests end in which outcome; None checks the sum of what the case sent through `ask`.
    outcomes: Counter[str] | None = None
    tables: dict[str, Any] = field(default_factory=dict)
    #: What engines answer from the start, by their order.
    modes: tuple[str, ...] = ()
    known: str | None = None
    #: The proxy is a process of its own: the case is given a `Launcher` and starts it itself.
    process: bool = False
    #: Lines of level error that are meant.
    errors: bool = False
    #: Some of its clients leave before they can be called requests: only the ledger is checked.
    uncounted: bool = False
    #: It also runs with fifty streams in the background; not where its own streams are what suffers.
    crowd: bool = True
    #: Whether `known` shows depends on the moment.
    race: bool = False


CASES: list[Case] = []


def case(
    row: str,
    name: str,
    *,
    engines: int = 1,
    outcomes: dict[str, int] | None = None,
    modes: tuple[str, ...] = (),
    known: str | None = None,
    process: bool = False,
    errors: bool = False,
    uncounted: bool = False,
    crowd: bool = True,
    race: bool = False,
    **tables: Any,
) -> Callable[[Body], Body]:
    """Register a case of a row; `tables` are merged into the fleet file."""

    def register(run: Body) -> Body:
        assert all((each.row, each.name) != (row, name) for each in CASES), f"two cases {row} {name}"
        expected = None if outcomes is None else Counter(outcomes)
        CASES.append(
            Case(
                row,
                name,
                run,
                engines,
                expected,
                tables,
                modes,
                known,
                process,
                errors,
                uncounted,
                crowd,
                race,
            )
        )
        return run

    return register


__all__ = ["CASES", "Case", "Rig", "case"]
