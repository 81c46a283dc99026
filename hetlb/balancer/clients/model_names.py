"""Names of models for clients besides the engines' own: aliases, canaries and fallbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import msgspec

from hetlb.balancer.config.fleet_tables import CanaryTable, FleetFile
from hetlb.balancer.core.types import CanarySide
from hetlb.balancer.http.openai_body import Call
from hetlb.balancer.http.transfer_fields import fields_of

#: Step between the shares of requests without a session: any few of them in a row are spread evenly.
_GOLDEN: Final = (5**0.5 - 1) / 2


class Canary:
    """Canary of one model, and the choice of requests for its share. A session stays on its side.

    A session's side follows from its name alone, so that it is the same at each replica and after a restart.
    A larger share keeps the sessions of a smaller one.
    """

    def __init__(self, table: CanaryTable) -> None:
        self._share = table.share
        #: Model that serves the share, "" for an instance of the same model.
        self.name = table.name or ""
        instance = table.instance or ""
        self._sides = CanarySide(instance, False), CanarySide(instance, True)
        self._last = 0.0

    def takes(self, session: str | None) -> bool:
        """Return True if a request is of the canary's share."""
        if session is not None:
            digest = blake2b(session.encode(), digest_size=6, person=b"canary").digest()
            return int.from_bytes(digest) / (1 << 48) < self._share
        self._last = (self._last + _GOLDEN) % 1.0
        return self._last < self._share

    def side(self, session: str | None) -> CanarySide | None:
        """Return the side of a request, None if the canary is another model."""
        return None if self.name else self._sides[self.takes(session)]


@dataclass(frozen=True, slots=True)
class ModelNames:
    """`aliases` by alias, `fallbacks` by the model that they stand in for, `canaries` by their model."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    canaries: Mapping[str, Canary] = field(default_factory=dict)

    @classmethod
    def of(cls, file: FleetFile) -> ModelNames:
        return cls(
            {alias: model.name for model in file.models for alias in model.aliases},
            {model.name: model.fallback for model in file.models if model.fallback is not None},
            {model.name: Canary(model.canary) for model in file.models if model.canary is not None},
        )

    def served(self, asked: str, available: Callable[[str], bool], session: str | None) -> str:
        """Return the model that serves a request for `asked`: that model, its canary or its fallback."""
        model = self.aliases.get(asked, asked)
        canary = self.canaries.get(model)
        if canary is not None and canary.name and canary.takes(session) and available(canary.name):
            return canary.name
        tried: set[str] = set()
        while (
            not available(model) and model not in tried and (other := self.fallbacks.get(model)) is not None
        ):
            tried.add(model)
            model = self.aliases.get(other, other)
        return model

    def entries(self, models: list[dict[str, Any]]) -> list[dict[str, Any]]:
        known = {entry["id"]: entry for entry in models}
        return [
            {**known[model], "id": alias, "root": model}
            for alias, model in self.aliases.items()
            if model in known and alias not in known
        ]

    def rename(self, call: Call, model: str) -> bytes:
        if call.model_at:
            return rename_in_form(call.body, call.model_at, call.asked, model)
        return rename_in_json(call.body, model, len(call.text) + len(call.tools) + len(call.ids))


def rename_in_json(body: bytes, model: str, known_bytes: int = 0) -> bytes:
    """Return a JSON body with another model and all other values unchanged.

    `known_bytes` of it are in a few values, so that there is little to parse.
    """
    document = fields_of(body, known_bytes)
    document["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(document)


def rename_in_form(body: bytes, at: int, asked: str, model: str) -> bytes:
    """Return a form with another model in the place of `asked`, which stands at `at`."""
    return body[:at] + model.encode() + body[at + len(asked.encode()) :]
