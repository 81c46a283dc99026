"""Instances that keep an answer for later requests, by the id of the answer (`/v1/responses/ID`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

#: Most known ids. Beyond that, the key with the most ids loses its oldest one.
MOST_IDS: Final = 16_384
#: Longest id.
MOST_ID_CHARACTERS: Final = 256


class Place(NamedTuple):
    """Instance that keeps an answer, the model of it, and the name of the key that asked for it."""

    instance: str
    model: str
    owner: str | None


class KeptPlaces:
    """Places by id. With peers, `tell` is called when `take` has new ones for them."""

    def __init__(self) -> None:
        self.by_id: dict[str, Place] = {}
        #: Ids by key, the oldest first.
        self._owned: dict[str | None, dict[str, None]] = {}
        #: Key that had the most when one was noted last.
        self._most: str | None = None
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
        known = self.by_id.get(response_id)
        if known is not None:
            if known.owner != place.owner:
                return False
            self._forget(response_id)
        own = self._owned.setdefault(place.owner, {})
        own[response_id] = None
        self.by_id[response_id] = place
        most = self._owned.get(self._most, {})
        if len(own) > len(most):
            self._most, most = place.owner, own
        if len(self.by_id) > MOST_IDS:
            self._forget(next(iter(most if len(most) > 1 else self.by_id)))
        return True

    def _forget(self, response_id: str) -> None:
        owner = self.by_id.pop(response_id).owner
        own = self._owned[owner]
        del own[response_id]
        if not own:
            del self._owned[owner]

    def of(self, response_id: str, owner: str | None) -> Place | None:
        """Return the place of an answer that a key asked for, None if it is not known."""
        place = self.by_id.get(response_id)
        return None if place is None or place.owner != owner else place

    def take(self) -> list[tuple[str, Place]]:
        """Return the changes for peers since the last call."""
        unsent, self._unsent = self._unsent, []
        return [(each, self.by_id[each]) for each in unsent if each in self.by_id]
