"""Names that clients may use besides the engines' own: aliases, and models that stand in for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hetlb.balancer.config.fleet_tables import FleetFile
from hetlb.balancer.http.openai_body import Call
from hetlb.balancer.http.transfer_fields import fields_of


@dataclass(frozen=True, slots=True)
class ModelNames:
    """`aliases` by alias, `fallbacks` by the model that they stand in for."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    fallbacks: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, file: FleetFile) -> ModelNames:
        return cls(
            {alias: model.name for model in file.models for alias in model.aliases},
            {model.name: model.fallback for model in file.models if model.fallback is not None},
        )

    def served(self, asked: str, available: Callable[[str], bool]) -> str:
        """Return the model that serves a request for `asked`: or of its fallback."""
        model = self.aliases.get(asked, asked)
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
    """Return the body with another model; every other value as it stands, `known_bytes` of it in a few."""
    document = fields_of(body, known_bytes)
    document["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(document)


def rename_in_form(body: bytes, at: int, asked: str, model: str) -> bytes:
    """Return a form with another model in the place of `asked`, which stands at `at`."""
    return body[:at] + model.encode() + body[at + len(asked.encode()) :]
