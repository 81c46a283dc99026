"""Instances that keep an answer for later requests, by the id of the answer (`/v1/responses/ID`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

#: Ids known at a time; the oldest goes first.
MOST_IDS: Final = 16_384
#: Longest id.
MOST_ID_CHARACTERS: Final = 256


class Place(NamedTuple):
    """Instance that keeps an answer, the model of it, and the name of the key that asked for it."""

    instance: str
    model: str
    owner: str | None


class KeptPlaces:
    """Places by id. `tell`, where there are peers, is called when `take` has new ones for them."""

    def __init__(self) -> None:
        self.by_id: dict[str, Place] = {}
        self.tell: Callable[[], object] | None = None
        self._unsent: list[str] = []

    def note(self, response_id: str, place: Place) -> None:
        """Note an answer of this process."""
        if self.adopt(response_id, place) and self.tell is not None:
            self._unsent.append(response_id)
            if len(self._unsent) == 1:
                self.tell()

    def adopt(self, response_id: str, place: Place) -> bool:
        """Note an answer, of a peer too. Return False if it belongs to another key already."""
        known = self.by_id.pop(response_id, None)
        if known is not None and known.owner != place.owner:
            self.by_id[response_id] = known
            return False
        self.by_id[response_id] = place
        if len(self.by_id) > MOST_IDS:
            del self.by_id[next(iter(self.by_id))]
        return True

    def of(self, response_id: str, owner: str | None) -> Place | None:
        """Return the place of an answer that a key asked for, None if it is not known."""
        place = self.by_id.get(response_id)
        return None if place is None or place.owner != owner else place

    def take(self) -> list[tuple[str, Place]]:
        """Return the changes for peers since the last call."""
        unsent, self._unsent = self._unsent, []
        return [(each, self.by_id[each]) for each in unsent if each in self.by_id]
