"""haproxy.cfg: the servers of `backend` and `listen` sections, and the settings round them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hetlb.errors import ConfigError
from hetlb.files import read_text
from hetlb.tools.imported.draft import DraftInstance, FleetDraft, seconds, server_url

_SECTIONS: Final = {
    *(
        "global",
        "defaults",
        "frontend",
        "backend",
        "listen",
        "peers",
        "resolvers",
        "userlist",
        "cache",
        "ring",
    ),
    *("mailers", "program", "http-errors", "log-forward", "fcgi-app", "crt-store", "traces", "acme"),
}
_TIMES: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIMEOUTS: Final = {"connect": "connect_timeout_s", "server": "first_byte_timeout_s"}


@dataclass(slots=True)
class _Entry:
    """One line of a section, without comment and quotes."""

    where: int
    words: list[str]


@dataclass(slots=True)
class _Section:
    where: int
    kind: str
    name: str
    entries: list[_Entry] = field(default_factory=list)


def read_haproxy(path: Path) -> FleetDraft:
    """Read an haproxy.cfg."""
    draft = FleetDraft(path, "HAProxy")
    sections = list(_sections(path, draft))
    inherited: list[_Entry] = []
    alone = sum(section.kind in ("backend", "listen") for section in sections) == 1
    leading = [each for each in sections if each.kind == "listen" or _leads(each)]
    port = next((found[1] for each in leading for entry in each.entries if (found := _bound(entry))), None)
    for section in sections:
        # Sections take the defaults that stand before them.
        if section.kind == "defaults":
            inherited = section.entries
            for entry in section.entries:
                _take_setting(draft, entry)
        elif section.kind in ("backend", "listen"):
            own = next((found[1] for entry in section.entries if (found := _bound(entry))), port)
            _take_servers(draft, section, inherited, own, alone=alone)
        elif section.kind == "frontend":
            for entry in section.entries:
                if _leads(section):
                    _take_front(draft, entry)
                else:
                    draft.leave(
                        entry.where, " ".join(entry.words), f"frontend {section.name} leads to no server"
                    )
        else:
            title = f"{section.kind} {section.name}".strip()
            for entry in section.entries or [_Entry(section.where, [])]:
                draft.leave(entry.where, f"{title}: {' '.join(entry.words)}".strip(": "))
    return draft


def _sections(path: Path, draft: FleetDraft) -> list[_Section]:
    found: list[_Section] = []
    for number, text in enumerate(read_text(path, ConfigError).splitlines(), start=1):
        lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
        lexer.whitespace_split, lexer.commenters = True, "#"
        try:
            words = list(lexer)
        except ValueError as error:
            raise ConfigError(f"{path}: line {number}: expected quotes that end: {error}") from error
        if not words:
            continue
        if words[0] in _SECTIONS and text[:1] not in (" ", "\t"):
            found.append(_Section(number, words[0], words[1] if len(words) > 1 else ""))
        elif words[0].startswith("."):
            draft.leave(number, " ".join(words), "conditions are not read")
        elif not found:
            raise ConfigError(
                f"{path}: line {number}: expected a section such as `backend NAME`, got {words[0]!r}"
            )
        else:
            found[-1].entries.append(_Entry(number, words))
    return found


def _take_servers(
    draft: FleetDraft, section: _Section, inherited: Sequence[_Entry], port: int | None, *, alone: bool
) -> None:
    """Take the servers of a section, and its settings where it is the only one with servers.

    A server without a port has the one that clients connect to.
    """
    entries = section.entries
    usual = [each.words[1:] for each in (*inherited, *entries) if each.words[0] == "default-server"]
    key = _key_of(draft, entries, section.name)
    model = draft.model(section.name, "named as in haproxy.cfg; the servers' own names are learnt")
    for entry in entries:
        if entry.words[0] == "server" and len(entry.words) > 2:
            _take_server(draft, model.name, entry, [word for words in usual for word in words], key, port)
        elif entry.words[0] == "server-template" and len(entry.words) > 3:
            draft.leave(entry.where, " ".join(entry.words), f"discovery.dns finds each: {entry.words[3]}")
        elif entry.words[0] == "bind" or entry.words[:2] == ["http-request", "set-header"]:
            _take_front(draft, entry, key_taken=key is not None)
        elif alone or entry.words[0] != "timeout":
            _take_setting(draft, entry)
        else:
            draft.leave(entry.where, " ".join(entry.words), "it is of some requests alone")


def _take_server(
    draft: FleetDraft, model: str, entry: _Entry, usual: Sequence[str], key: str | None, port: int | None
) -> None:
    name, address, *options = entry.words[1:]
    instance = DraftInstance("", name, api_key_env=key)
    _, _, encrypted = _options(instance, usual)
    left, stopped, own = _options(instance, options)
    scheme = "https" if (encrypted if own is None else own) else "http"
    where = " ".join(entry.words[:3])
    if address.startswith(("unix@", "/", "abns@", "fd@", "rhttp@", "quic")) or "$" in address:
        draft.leave(entry.where, where, "not an address of the network")
        return
    address = re.sub(r"^(ipv4|ipv6|tcp4|tcp6|tcp)@", "", address)
    instance.url = server_url(address, scheme, port)
    if stopped or instance.weight == 0:
        words = " ".join(stopped) or "weight 0"
        draft.leave(entry.where, f"{where} {words}", "hetlb would use it always")
    elif draft.add(draft.model(model), instance, entry.where) and left:
        draft.leave(entry.where, f"server {name}: {' '.join(left)}")


def _options(instance: DraftInstance, words: Sequence[str]) -> tuple[list[str], list[str], bool | None]:
    """Set weight and limit of a server; return the rest, the reason it gets no traffic, and if it has TLS.

    The last is None where no word says it.
    """
    left: list[str] = []
    stopped: list[str] = []
    encrypted: bool | None = None
    rest = iter(words)
    for word in rest:
        if word in ("weight", "maxconn"):
            value = next(rest, "")
            if not value.isdigit():
                left += [word, value]
            elif word == "weight":
                instance.weight = int(value)
            else:
                instance.max_num_seqs = int(value) or None
        elif word in ("backup", "disabled"):
            stopped.append(word)
        elif word in ("ssl", "no-ssl"):
            encrypted = word == "ssl"
        else:
            left.append(word)
    return left, stopped, encrypted


def _key_of(draft: FleetDraft, entries: Sequence[_Entry], name: str) -> str | None:
    """Return the variable of the key that HAProxy sends to the servers."""
    for entry in entries:
        words = entry.words
        if (
            words[:2] == ["http-request", "set-header"]
            and len(words) == 4
            and words[2].lower() == "authorization"
        ):
            value = re.sub(r"(?i)^bearer\s+", "", words[3])
            if "%[" not in value:
                return draft.key_variable(value, name)
    return None


def _leads(section: _Section) -> bool:
    """Return True for a frontend that leads to a backend: another one shows statistics."""
    return any(entry.words[0] in ("default_backend", "use_backend") for entry in section.entries)


def _bound(entry: _Entry) -> tuple[str, int] | None:
    """Return host and port of a `bind`, of its first address; None of other lines."""
    first = entry.words[1].partition(",")[0] if entry.words[0] == "bind" and len(entry.words) > 1 else ""
    match = re.fullmatch(r"(?:ipv[46]@)?(?:\[?([^\]]*?)\]?)?:(\d+)", first)
    every = "::" if first.startswith("ipv6@") else "*"
    return None if match is None else (match[1] or every, int(match[2]))


def _take_front(draft: FleetDraft, entry: _Entry, *, key_taken: bool = False) -> None:
    """Take a line of a frontend."""
    words = entry.words
    if "port" not in draft.listen and (bound := _bound(entry)) is not None:
        host, port = bound
        draft.listen |= {"host": "0.0.0.0" if host == "*" else host, "port": port}
        left = words[2:]
        if "crt" in left[:-1]:
            at = left.index("crt")
            draft.tls(entry.where, f"bind {words[1]} crt {left[at + 1]}", left[at + 1], left[at + 1])
            left = [each for each in (*left[:at], *left[at + 2 :]) if each != "ssl"]
        if more := words[1].partition(",")[2]:
            draft.leave(entry.where, f"bind {more}", "one address for clients: 0.0.0.0 or :: is all")
        if left:
            draft.leave(entry.where, f"bind {words[1]}: {' '.join(left)}")
        return
    if words[0] in ("default_backend", "use_backend") and len(words) == 2 and "%[" not in words[1]:
        return  # each backend is a model
    if key_taken and words[2:3] and words[2].lower() == "authorization":
        return
    _take_setting(draft, entry)


def _take_setting(draft: FleetDraft, entry: _Entry) -> None:
    """Take a timeout that hetlb has; note any other line."""
    words = entry.words
    if words == ["mode", "http"]:
        return
    if words[0] == "timeout" and len(words) == 3 and words[1] in _TIMEOUTS:
        value, key = seconds(words[2], _TIMES, "ms"), _TIMEOUTS[words[1]]
        if value and draft.proxy.setdefault(key, value) == value:
            return
    if words[0] != "default-server":
        draft.leave(entry.where, " ".join(words))
    elif left := _options(DraftInstance(""), words[1:])[0]:
        draft.leave(entry.where, f"default-server {' '.join(left)}")
