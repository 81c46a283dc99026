"""Which instance was last sent a prompt that begins alike: its prefix cache may still hold that beginning.

Promise: bounded; what it says is a hope, worth the seconds of reading that it would save and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeAlias

from hetlb.core.instance import Instance
from hetlb.core.types import Request

#: So many beginnings are remembered, the ones used last.
REMEMBERED: Final = 65_536

_Key: TypeAlias = tuple[str, str]


class Affinity:
    """Beginnings of prompts, by model and name, and who was sent them last."""

    __slots__ = ("_homes", "_most")

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._homes: OrderedDict[_Key, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def sent(self, request: Request, instance: Instance, predicted_output: float) -> None:
        """A request goes to an instance, which will hold its prompt and its answer."""
        homes = self._homes
        for name, tokens in request.beginnings:
            key = (request.model, name)
            held = request.prompt_tokens + round(predicted_output) if tokens is None else tokens
            homes[key] = (instance.cache_id, held)
            homes.move_to_end(key)
        while len(homes) > self._most:
            homes.popitem(last=False)

    def held(self, request: Request) -> dict[int, int]:
        """Tokens of the prompt that a prefix cache, by `Instance.cache_id`, may hold; one is always read."""
        found: dict[int, int] = {}
        homes, model, most = self._homes, request.model, request.prompt_tokens - 1
        for name, tokens in request.beginnings:
            home = homes.get((model, name))
            if home is None:
                continue
            cache_id, held = home
            if tokens is not None and held > tokens:
                held = tokens
            if held > most:
                held = most
            if held > found.get(cache_id, 0):
                found[cache_id] = held
        return found
