"""A fleet file in the making: servers by model, settings, and the unused parts of another file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from hetlb.errors import ConfigError
from hetlb.inputs.urls import bracketed, check_url

#: Maximum characters of a directive in a line on stderr.
_MOST_SHOWN_CHARACTERS = 400
#: Keys that stand for none.
_NO_KEYS = re.compile(
    r"(?i)|(sk-)?(no|not|none|null|empty|dummy|fake|any|anything|local|placeholder|token-abc123|x+|n/?a|1234)"
    r"([-_ ]?(key|needed|used|required|set))*"
)
_REFERENCE = re.compile(r"(?:os\.environ/|\$\{?)([A-Za-z_][A-Za-z0-9_]*)(?::?[-?+][^}]*)?\}?")
#: A secret behind its name, or the user of a URL.
_SECRET: Final = re.compile(
    r"""(://(?=[^/\s]*@)|(?:password|secret|token|passwd|requirepass|master_key|api[_-]key)['"]?(?:\s*[:=]\s*|\s+)['"]?)[^\s'"@,}]+""",
    re.IGNORECASE,
)


@dataclass(slots=True)
class DraftInstance:
    """A server. `max_num_seqs` is the most requests that it may have at once, where that is stated."""

    url: str
    name: str = ""
    weight: float = 1.0
    max_num_seqs: int | None = None
    api_key_env: str | None = None


@dataclass(slots=True)
class DraftModel:
    """A model, with a `note` where its name is not known for sure."""

    name: str
    note: str = ""
    instances: list[DraftInstance] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    fallback: str | None = None


@dataclass(slots=True)
class FleetDraft:
    """Content of a file. `left_out` has a line for everything that was not carried over."""

    path: Path
    kind: str
    models: dict[str, DraftModel] = field(default_factory=dict)
    listen: dict[str, Any] = field(default_factory=dict)
    proxy: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    #: Names of variables that must hold keys.
    variables: list[str] = field(default_factory=list)

    def leave(self, where: object, what: str, why: str = "") -> None:
        """Note that something was left out, once."""
        what = _SECRET.sub(r"\1***", " ".join(what.split()))[:_MOST_SHOWN_CHARACTERS]
        line = f"{self.path.name}:{where}: {what}" + (f" ({why})" if why else "")
        if line not in self.left_out:
            self.left_out.append(line)

    def model(self, name: str, note: str = "") -> DraftModel:
        """Return the model of a name, a new one at first."""
        return self.models.setdefault(name, DraftModel(name, note))

    def add(self, model: DraftModel, instance: DraftInstance, where: object) -> bool:
        """Add a server to a model; False, with a line, if its address is none."""
        try:
            instance.url = check_url(instance.url, "url")
        except ConfigError as error:
            self.leave(where, f"server {instance.url}", str(error))
            return False
        every = [each for one in self.models.values() for each in one.instances]
        taken = {each.name for each in every}
        parts = urlsplit(instance.url)
        plain = instance.name or f"{parts.hostname}-{parts.port or (443 if parts.scheme == 'https' else 80)}"
        base = name = re.sub(r"[^A-Za-z0-9.-]+", "-", plain).strip("-.") or "server"
        number = 2
        while name in taken:
            name, number = f"{base}-{number}", number + 1
        instance.name = name
        if any(each.url == instance.url for each in every):
            self.leave(where, f"server {instance.url} of {model.name}", "it is there already")
            return False
        model.instances.append(instance)
        return True

    def key_variable(self, value: object, server: str, *, asked: bool = False) -> str | None:
        """Return the variable that holds a key, a new one where the key stands in the file; None of none.

        `asked`: it is what the server asks for, whatever its text; a client may state one that says nothing.
        """
        text = str(value or "").strip()
        if not text or (not asked and _NO_KEYS.fullmatch(text) is not None):
            return None
        if (reference := _REFERENCE.fullmatch(text)) is not None:
            return self._variable(reference[1])
        return self._variable("KEY_" + re.sub(r"[^A-Z0-9]+", "_", server.upper()).strip("_"))

    def _variable(self, name: str) -> str:
        if name not in self.variables:
            self.variables.append(name)
        return name

    def tls(self, where: object, words: str, cert: str, key: str) -> None:
        """Take a certificate for clients, if its files are on this machine."""
        if Path(cert).is_file() and Path(key).is_file():
            self.listen["tls"] = {"cert": cert, "key": key}
        else:
            self.leave(where, words, "not files of this machine: state listen.tls")

    def text(self) -> str:
        """Return the fleet file."""
        lines = [
            f"# From {self.path.name} ({self.kind}) by `hetlb init --from`.",
            "# Check: `hetlb serve --check --config FILE`, then `hetlb doctor --config FILE`.",
            "version: 1",
            f"listen: {_flow({'host': '127.0.0.1', 'port': 8080} | self.listen)}",
            "admin: {host: 127.0.0.1, port: 8081}",
        ]
        if self.proxy:
            lines.append(f"proxy: {_flow(self.proxy)}")
        lines.append("models:")
        for model in self.models.values():
            if not model.instances:
                continue
            lines.append(
                f"  - name: {json.dumps(model.name)}" + (f"    # {model.note}" if model.note else "")
            )
            if model.aliases:
                lines.append(f"    aliases: {json.dumps(model.aliases)}")
            if model.fallback is not None:
                lines.append(f"    fallback: {json.dumps(model.fallback)}")
            lines.append("    instances:")
            for each in model.instances:
                table: dict[str, Any] = {"name": each.name, "url": each.url}
                table |= {} if each.weight == 1 else {"weight": each.weight}
                table |= {} if each.max_num_seqs is None else {"max_num_seqs": each.max_num_seqs}
                table |= {} if each.api_key_env is None else {"api_key_env": each.api_key_env}
                lines.append(f"      - {_flow(table)}")
        return "\n".join(lines) + "\n"


def _flow(table: dict[str, Any]) -> str:
    """Return a table on one line."""
    cells = (
        f"{key}: {_flow(value) if isinstance(value, dict) else json.dumps(value)}"
        for key, value in table.items()
    )
    return "{" + ", ".join(cells) + "}"


def server_url(address: str, scheme: str, port: int | None) -> str:
    """Return the URL of `host`, `host:port`, `1.2.3.4`, `[::1]:80` or `::1`; `port` where it states none."""
    if address.count(":") > 1 and not address.startswith("["):
        address = bracketed(address)
    has_port = re.search(r"\]:\d+$|^[^:\]]*:\d+$", address) is not None
    if has_port or port is None or port == (443 if scheme == "https" else 80):
        return f"{scheme}://{address}"
    return f"{scheme}://{address}:{port}"


def seconds(text: str, units: dict[str, float], usual: str) -> float | None:
    """Return the seconds of `600`, `600s` or `1m 30s`, None of anything else."""
    parts = re.findall(r"(\d+)\s*([a-z]*)\s*", text)
    if not parts or "".join(number + unit for number, unit in parts) != re.sub(r"\s", "", text):
        return None
    sizes = [units.get(unit or usual) for _, unit in parts]
    if None in sizes:
        return None
    return sum(int(number) * (size or 0.0) for (number, _), size in zip(parts, sizes, strict=True))
