"""Which instance was last sent a prompt that begins alike: its prefix cache may still hold that beginning.

Promise: bounded; what it says is a hope, worth the seconds of reading that it would save and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from hetlb.core.instance import Instance
from hetlb.core.types import Request

#: So many beginnings are remembered, the ones used last.
REMEMBERED = 65_536

_Key: TypeAlias = tuple[str, str]


class Affinity:
    """Beginnings of prompts, by model and name, and who was sent them last."""

    __slots__ = ("_homes",)

    def __init__(self) -> None:
        self._homes: OrderedDict[_Key, tuple[str, int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def sent(self, request: Request, instance: Instance, predicted_output: float) -> None:
        """A request goes to an instance, which will hold its prompt and its answer."""
        homes = self._homes
        for name, tokens in request.beginnings:
            key = (request.model, name)
            held = request.prompt_tokens + round(predicted_output) if tokens is None else tokens
            homes[key] = (instance.name, instance.incarnation, held)
            homes.move_to_end(key)
        while len(homes) > REMEMBERED:
            homes.popitem(last=False)

    def held(self, request: Request) -> dict[tuple[str, int], int]:
        """Tokens of the prompt that an instance, by name and incarnation, may hold; one is always read."""
        found: dict[tuple[str, int], int] = {}
        for name, tokens in request.beginnings:
            home = self._homes.get((request.model, name))
            if home is None:
                continue
            instance, incarnation, held = home
            if tokens is not None and held > tokens:
                held = tokens
            held = min(held, request.prompt_tokens - 1)
            key = (instance, incarnation)
            if held > found.get(key, 0):
                found[key] = held
        return found
