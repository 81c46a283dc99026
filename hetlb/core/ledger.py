"""What processes over the same instances share: each writes its own figures, all read everybody's.

Promise: names and meanings only. Where the figures lie is `workers.ledger`'s business, what follows from
them that of `core.fellows` and `core.shared_queue`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

#: Eight integers. Of an instance: nanoseconds of work, KV tokens, prompt tokens, those of them not read yet,
#: requests, sequences (all of what is booked now), and prompts and prompt tokens read since the beginning.
#: Of a model: the sizes that arrived since the beginning, the sizes that wait, how many wait, when the next
#: to go arrived (ns), its priority, until when (ns) freed room is being handed to somebody else, the key of
#: its flow (see `key_of`), and twice the flow's tag, plus 1 where other tenants wait behind it.
Cell: TypeAlias = tuple[int, int, int, int, int, int, int, int]
#: A cell of one fellow that changed: which, what it held, what it holds.
Change: TypeAlias = tuple[int, Cell, Cell]
#: Of one fellow: requests and bytes that wait, leases of retries that may run twice.
Standing: TypeAlias = tuple[int, int, int]
#: Two integers under a key: see `core.shared_queue`.
Entry: TypeAlias = tuple[int, int]

NOTHING: Cell = (0,) * 8


@dataclass(slots=True)
class Cells:
    """Where in the ledger instances and models stand, by name: the same for all who share it."""

    instances: dict[str, int] = field(default_factory=dict)
    models: dict[str, int] = field(default_factory=dict)


def key_of(*parts: str) -> int:
    """63 bits for some texts, never 0: the same in every process, and no client can choose other texts."""
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return (int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1) or 1


class Ledger:
    """What the fellows have written, and a row of one's own.

    A class and not a protocol: compiled code calls its methods some ten times per request.
    """

    def __init__(self, number: int) -> None:
        #: One's own number: of two that waited equally long the lower goes first.
        self.number = number
        #: The others' standing, as of the last `changed`; another object when it is another one.
        self.standings: Sequence[Standing] = ()

    def changed(self, *, everything: bool = False) -> list[Change]:
        """What has changed in cells of others since the last call.

        With `everything` each one is compared, also those that nobody said have changed.
        """
        raise NotImplementedError

    def follow(self, cell: int) -> Cell:
        """A cell has a (new) meaning: what the others have booked there now; only changes of it are told."""
        raise NotImplementedError

    def anybody_waits(self) -> bool:
        """Whether requests wait elsewhere at this moment."""
        raise NotImplementedError

    def cells(self, cell: int) -> Sequence[tuple[int, Cell]]:
        """What each of the others holds in a cell now, by the fellow's number."""
        raise NotImplementedError

    def write(self, cell: int, figures: Cell) -> None:
        """Write one cell of one's own row."""
        raise NotImplementedError

    def put(self, key: int, first: int, second: int) -> None:
        """Write an entry of one's own. One that nobody needs any more may have to give way to it."""
        raise NotImplementedError

    def entries(self, key: int) -> Sequence[Entry]:
        """What all of them, oneself too, have written under a key."""
        raise NotImplementedError

    def write_standing(self, standing: Standing) -> None:
        """Write one's own standing."""
        raise NotImplementedError

    def wake(self, fellow: int) -> None:
        """Have another call `on_wake`, soon."""
        raise NotImplementedError
