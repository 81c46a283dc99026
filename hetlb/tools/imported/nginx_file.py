"""nginx.conf: `upstream` blocks that a `proxy_pass` leads to, and the settings round it.

The grammar is nginx's own (words, quoted words, `{`, `}`, `;`, comments); of `include` the files are read.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hetlb.errors import ConfigError
from hetlb.files import read_text
from hetlb.tools.imported.draft import DraftInstance, FleetDraft, seconds, server_url

_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<quoted>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<mark>[{};])|(?P<word>(?:\\.|\$\{[^}\s]*\}|[^\s{};"'\\])(?:\\.|\$\{[^}\s]*\}|[^\s{};\\])*)"""
)
#: A piece of a block in Lua: comments and text, whose braces do not count, then one brace or another sign.
_LUA: Final = re.compile(
    r"""--\[(=*)\[.*?\]\1\]|--[^\n]*|\[(=*)\[.*?\]\2\]|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?P<brace>[{}])|.""",
    re.DOTALL,
)
_TIMES: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SECONDS: Final = {"proxy_connect_timeout": "connect_timeout_s", "proxy_read_timeout": "first_byte_timeout_s"}
_MOST_INCLUDES: Final = 8
#: Paths of locations that are not for the API.
_ASIDE: Final = re.compile(r"/(health|healthz|metrics|ping|version|docs|status)\b")


@dataclass(slots=True)
class Directive:
    """One directive with its block, if it has one. `used`: it is in the draft, or read for its contents."""

    where: str
    words: list[str]
    block: list[Directive] | None = None
    used: bool = False

    @property
    def name(self) -> str:
        return self.words[0]

    def inside(self, name: str) -> Iterator[Directive]:
        """Yield the directives of a name in its block, at any depth."""
        for each in self.block or ():
            if each.name == name:
                yield each
            yield from each.inside(name)


@dataclass(slots=True)
class _Reader:
    path: Path
    depth: int = 0
    lines: list[int] = field(default_factory=list)

    def read(self) -> list[Directive]:
        text = read_text(self.path, ConfigError)
        found: list[list[Directive]] = [[]]
        words: list[str] = []
        line = began = 1
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ConfigError(
                    f"{self.path}: line {line}: expected nginx's syntax, got {text[at : at + 20]!r}"
                )
            at = match.end()
            began = line if not words else began
            if match["quoted"]:
                words.append(re.sub(r"\\(.)", r"\1", match["quoted"][1:-1]))
            elif match["word"]:
                words.append(re.sub(r"\\(.)", r"\1", match["word"]))
            elif mark := match["mark"]:
                if mark != "}" and not words:
                    raise ConfigError(f"{self.path}: line {line}: expected a directive before {mark!r}")
                if mark == "}":
                    if len(found) == 1 or words:
                        raise ConfigError(f"{self.path}: line {line}: expected `;` or no {mark!r}")
                    found.pop()
                else:
                    found[-1] += self._directive(str(began), words, opens=mark == "{")
                    if mark == "{" and words[0].endswith("_by_lua_block"):
                        end = _end_of_lua(text, at)
                        line, at = line + text.count("\n", at, end), end
                    elif mark == "{":
                        found.append(found[-1][-1].block or [])
                        found[-2][-1].block = found[-1]
                words = []
            line += match[0].count("\n")
        if words or len(found) > 1:
            raise ConfigError(f"{self.path}: line {line}: expected `;` or `}}` before the end")
        return found[0]

    def _directive(self, where: str, words: list[str], *, opens: bool) -> list[Directive]:
        if self.depth:
            where = f"{self.path.name}:{where}"
        if words[0] != "include" or opens or len(words) != 2 or self.depth == _MOST_INCLUDES:
            return [Directive(where, words, [] if opens else None)]
        files = sorted(glob.glob(str(self.path.parent / words[1])))
        if not files:
            return [Directive(where, words)]
        return [each for file in files for each in _Reader(Path(file), self.depth + 1).read()]


def _end_of_lua(text: str, at: int) -> int:
    """Return where a block in Lua ends that was opened right before; the end of the text if nowhere."""
    depth = 1
    for match in _LUA.finditer(text, at):
        depth += {"{": 1, "}": -1}.get(match["brace"] or "", 0)
        if not depth:
            return match.end()
    return len(text)


def read_nginx(path: Path) -> FleetDraft:
    """Read an nginx.conf, or a part of one that lies in conf.d."""
    draft = FleetDraft(path, "nginx")
    top = Directive("1", ["main"], _Reader(path).read())
    for block in top.inside("http"):
        block.used = True
    upstreams = {each.words[1]: each for each in top.inside("upstream") if len(each.words) > 1}
    variables = _variables(top)
    streams = list(top.inside("stream"))
    of_streams = [each for block in streams for each in block.inside("server")]
    for server in top.inside("server"):
        if server.block is not None and not any(server is each for each in of_streams):
            _take_server(draft, server, upstreams, variables)
    if not draft.models:  # else a stream leads to something else
        for server in of_streams:
            _take_server(draft, server, upstreams, variables)
        for block in streams:
            block.used = bool(draft.models)
    for each in top.block or ():
        _take_settings(draft, each, inherited=True)
    _leave_unused(draft, top.block or [])
    return draft


def _variables(top: Directive) -> dict[str, list[str]]:
    """Return the values that a `set`, `map` or `split_clients` may give to each variable."""
    found: dict[str, list[str]] = {}
    for each in top.inside("set"):
        if len(each.words) == 3:
            found.setdefault(each.words[1], []).append(each.words[2])
    for each in [*top.inside("map"), *top.inside("split_clients")]:
        if len(each.words) == 3 and each.block is not None:
            values = [line.words[1] for line in each.block if len(line.words) == 2]
            found.setdefault(each.words[2], []).extend(values)
    return found


def _targets(text: str, variables: dict[str, list[str]]) -> list[str]:
    """Return the addresses of a `proxy_pass`; a variable in it stands for each of its values."""
    for match in re.finditer(r"\$\{?(\w+)\}?", text):
        if match[1] == "scheme":  # the client's
            return _targets(text.replace(match[0], "http", 1), variables)
        if values := variables.get(f"${match[1]}"):
            begin, end = text[: match.start()], text[match.end() :]
            each = [f"{begin}{value}{end}" for value in values if "$" not in value]
            return [target for one in each for target in _targets(one, variables)]
    return [text]


def _take_server(
    draft: FleetDraft,
    server: Directive,
    upstreams: dict[str, Directive],
    variables: dict[str, list[str]],
) -> None:
    """Take a server block that leads to upstreams, its locations and its settings."""
    passes = [
        (passed, target)
        for passed in server.inside("proxy_pass")
        if not _is_internal(server, passed)
        for target in _targets(passed.words[1] if len(passed.words) == 2 else "", variables)
    ]
    for passed, address in passes:
        # Without a scheme it is of a `stream`.
        match = re.fullmatch(r"(?:(https?)://)?([^/$]+)(/?\$(?:request_)?uri.*|/.*)?", address)
        if match is None:
            continue
        scheme, target, rest = match[1] or "http", match[2], re.sub(r"\$(request_)?uri.*", "", match[3] or "")
        upstream = upstreams.get(target)
        servers = [] if upstream is None else [each for each in upstream.block or () if each.name == "server"]
        model = draft.model(
            target.partition(":")[0], "named as in nginx.conf; the servers' own names are learnt"
        )
        if upstream is None:
            url = server_url(target, scheme, None)
            passed.used = any(each.url == url for each in model.instances) or draft.add(
                model, DraftInstance(url), passed.where
            )
        else:
            upstream.used = passed.used = True
            key = _key_of(draft, [*(server.block or ()), *_blocks_to(server, passed)], target)
            for each in servers:
                if not each.used:
                    _take_upstream_server(draft, each, scheme, target, key)
        if rest not in ("", "/", "/v1", "/v1/"):
            draft.leave(
                passed.where, f"proxy_pass {passed.words[1]}", "its path: hetlb keeps paths as they are"
            )
    if not any(passed.used for passed, _ in passes):
        return
    server.used = True
    for each in server.block or ():
        _take_settings(draft, each)
    locations = [
        each for each in server.inside("location") if any(passed.used for passed in each.inside("proxy_pass"))
    ]
    api = [each for each in locations if not _ASIDE.search(each.words[-1])]
    for location in locations:
        location.used = True
        if location.words[1:] != ["/"]:
            draft.leave(location.where, " ".join(location.words), "hetlb serves all paths of the API")
        for each in location.block or ():
            if [location] == api:  # else it is of some requests alone
                _take_settings(draft, each)


def _is_internal(server: Directive, passed: Directive) -> bool:
    """Return True for what gets nginx's own requests alone: `internal`, or a named location."""
    named = [each for each in server.inside("location") if each.words[1].startswith("@")]
    return any(each.name == "internal" for each in _blocks_to(server, passed)) or any(
        passed is one for each in named for one in each.inside("proxy_pass")
    )


def _blocks_to(block: Directive, target: Directive) -> list[Directive]:
    """Return the directives beside `target`, in its own block."""
    for each in block.block or ():
        if each is target:
            return block.block or []
        if found := _blocks_to(each, target):
            return found
    return []


def _key_of(draft: FleetDraft, directives: Sequence[Directive], upstream: str) -> str | None:
    """Return the variable of the key that nginx sends to the servers."""
    for each in directives:
        if (
            each.name == "proxy_set_header"
            and len(each.words) == 3
            and each.words[1].lower() == "authorization"
        ):
            value = re.sub(r"(?i)^bearer\s+", "", each.words[2])
            if not value.startswith("$"):
                each.used = True
                return draft.key_variable(value, upstream)
    return None


def _take_upstream_server(
    draft: FleetDraft, server: Directive, scheme: str, upstream: str, key: str | None
) -> None:
    address, *rest = server.words[1:] or [""]
    instance = DraftInstance(server_url(address, scheme, 80), api_key_env=key)
    left = []
    for word in rest:
        name, _, value = word.partition("=")
        if name == "weight" and value.isdigit() and int(value):
            instance.weight = int(value)
        elif name == "max_conns" and value.isdigit():
            instance.max_num_seqs = int(value) or None
        else:
            left.append(word)
    server.used = True
    if away := {"down", "backup"} & set(left):
        draft.leave(server.where, " ".join(server.words), f"{' '.join(away)}: hetlb would use it always")
    elif draft.add(draft.model(upstream), instance, server.where) and left:
        draft.leave(server.where, f"server {address}: {' '.join(left)}")


def _take_settings(draft: FleetDraft, each: Directive, *, inherited: bool = False) -> None:
    """Take a setting that hetlb has; a nearer one stands before one that is inherited."""
    if inherited and each.name == "http":
        for inner in each.block or ():
            _take_settings(draft, inner, inherited=True)
        return
    name, values = each.name, each.words[1:]
    if name in _SECONDS and len(values) == 1:
        value = seconds(values[0], _TIMES, "s")
        each.used = bool(value) and draft.proxy.setdefault(_SECONDS[name], value) == value
    elif name == "client_max_body_size" and (
        match := re.fullmatch(r"(\d+)([kmg]?)", " ".join(values).lower())
    ):
        size = int(match[1]) * _SIZES[match[2]]
        each.used = bool(size) and draft.proxy.setdefault("max_body_bytes", size) == size
    elif name == "listen" and values and not inherited:
        _take_listen(draft, each)
    elif name == "ssl_certificate" and len(values) == 1 and not inherited:
        draft.listen.setdefault("_cert", (each, values[0]))
    elif name == "ssl_certificate_key" and len(values) == 1 and not inherited:
        draft.listen.setdefault("_key", (each, values[0]))


def _take_listen(draft: FleetDraft, listen: Directive) -> None:
    address, *rest = listen.words[1:]
    if "$" in address:  # filled in by another program
        return
    match = re.fullmatch(r"(?:(\[[0-9a-f:.]*\]|[^:\[\]]+):)?(\d+)", address) or re.fullmatch(
        r"([^:\d][^:]*|[\d.]+\.\d+)()", address
    )
    if match is None or "port" in draft.listen or (match[1] or "").startswith("unix"):
        return
    host = (match[1] or "*").strip("[]")
    draft.listen |= {"host": "0.0.0.0" if host == "*" else host, "port": int(match[2] or 80)}
    listen.used = True
    if rest:
        draft.leave(listen.where, f"listen {address}: {' '.join(rest)}")


def _text(each: Directive) -> str:
    """Return a directive with its whole block, on one line."""
    words = " ".join(word or '""' for word in each.words)
    return f"{words};" if each.block is None else f"{words} {{ {' '.join(map(_text, each.block))} }}"


def _leave_unused(draft: FleetDraft, directives: Sequence[Directive]) -> None:
    """Note each directive that is not in the draft; of a block that was not read, the block alone."""
    cert, key = draft.listen.pop("_cert", None), draft.listen.pop("_key", None)
    if cert and key:
        cert[0].used = key[0].used = True
        draft.tls(cert[0].where, f"ssl_certificate {cert[1]}, ssl_certificate_key {key[1]}", cert[1], key[1])
    for each in directives:
        if not each.used:
            draft.leave(each.where, _text(each).removesuffix(";"))
        elif each.block is not None:
            _leave_unused(draft, each.block)
