"""Names that clients may use besides those of the engines: aliases, and models that stand in for others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from hetlb.balancer.config.fleet_tables import FleetFile

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FORM_FIELD: Final = (
    rb'((?<=[; \t])name=(?:"model"|model(?![^;\s]))[^\r\n]*(?:\r\n[^\r\n]+)*\r\n\r\n)%b(?=\r\n--)'
)


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
        """The model that serves a request for `asked`: where that one is not available, its fallback."""
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

    def rename(self, body: bytes, asked: str, model: str, *, is_form: bool) -> bytes:
        return rename_in_form(body, asked, model) if is_form else rename_in_json(body, model)


def rename_in_json(body: bytes, model: str) -> bytes:
    """The body with another model; every other value as it stands."""
    document = _OBJECT.decode(body)
    document["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(document)


def rename_in_form(body: bytes, asked: str, model: str) -> bytes:
    """The same of a form, which was read and has one field `model`."""
    pattern = _FORM_FIELD % re.escape(asked.encode())
    return re.sub(pattern, lambda found: found[1] + model.encode(), body, count=1)
