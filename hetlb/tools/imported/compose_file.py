"""A Compose file: services that run vLLM or SGLang; hetlb beside them reaches them by name."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from hetlb.errors import ConfigError
from hetlb.files import read_text
from hetlb.tools.imported.draft import DraftInstance, FleetDraft

_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?[-?]([^}]*))?\}|\$([A-Za-z_]\w*)")
#: Ports of the programs that are known, by a part of their image or command.
_PORTS: Final = {"vllm": 8000, "sglang": 30000}
#: Programs that are no server of a model: by image or module, and by a word of the command.
_ROUTERS: Final = re.compile(r"(vllm|sglang|semantic|stack)[_-]router|/router\b")
_OTHERS: Final = {"ray", "bench", "run-batch", "chat", "complete", "collect-env", "launch_router", "launch"}
#: Services that extend one another; a ring of them ends.
_MOST_EXTENDS: Final = 8
#: Errors of a text that is no YAML, or too deep.
NOT_YAML: Final = (yaml.YAMLError, RecursionError, ValueError)
#: Keys of a service that are read here.
_READ: Final = {"image", "command", "entrypoint", "environment"}


def read_compose(path: Path, document: Mapping[str, Any]) -> FleetDraft:
    """Read a Compose file; each service with a vLLM server is an instance."""
    draft = FleetDraft(path, "Compose")
    services = document.get("services")
    given = _env_file(path.parent / ".env") | os.environ
    for name in services if isinstance(services, dict) else ():
        service = _whole(path, services, name)
        entry, command = (_words(service.get(key), given) for key in ("entrypoint", "command"))
        words, image = _scripted(entry + command, given), str(service.get("image") or "")
        # Another entrypoint than the image's may be of another program.
        run = f"{'' if entry else image} {' '.join(words[:4])}"
        program = next((program for program in _PORTS if program in run), None)
        if program is not None and not _ROUTERS.search(f"{image} {run}"):
            _take_service(draft, str(name), service, words, _PORTS[program])
        else:
            why = "extends what is not there" if "extends" in service else "a service without vLLM"
            shown = f"{image} {' '.join(words)}" if _ROUTERS.search(f"{image} {run}") else image
            draft.leave(f"services.{name}", shown or why)
    for key, value in document.items():
        if key not in ("services", "version", "name") and not key.startswith("x-"):
            draft.leave(key, ", ".join(value) if isinstance(value, dict) else str(value))
    return draft


def _whole(path: Path, services: Any, name: Any, depth: int = 0) -> dict[str, Any]:
    """Return a service with the one that it extends, here or in another file, merged as Compose merges them.

    Its `extends` stays where that one cannot be read.
    """
    found = services.get(name) if isinstance(services, dict) and isinstance(name, Hashable) else None
    service = dict(found) if isinstance(found, dict) else {}
    base = service.get("extends")
    base = {"service": base} if isinstance(base, str) else base
    if not isinstance(base, dict) or depth > _MOST_EXTENDS:
        return service
    if file := base.get("file"):
        path = path.parent / str(file)
        try:
            document = yaml.safe_load(read_text(path, ConfigError))
        except (ConfigError, *NOT_YAML):
            return service
        services = document.get("services") if isinstance(document, dict) else None
    if not (common := _whole(path, services, base.get("service"), depth + 1)):
        return service
    del service["extends"]
    variables = _environment(common.get("environment")) | _environment(service.get("environment"))
    return {**common, **service, "environment": variables}


def _take_service(
    draft: FleetDraft, name: str, service: Mapping[str, Any], words: list[str], usual_port: int
) -> None:
    where = f"services.{name}"
    flags, plain = _flags(words)
    environment = _environment(service.get("environment"))
    port = flags.pop("port", "") or str(usual_port)
    model = flags.pop("model", "") or flags.pop("model-path", "") or (plain.pop(0) if plain else "")
    model = model or environment.get("MODEL_NAME", "")
    if not _OTHERS.isdisjoint([model, *plain]):
        draft.leave(where, " ".join(words), "no server of a model")
        return
    if "headless" in flags or flags.get("node-rank", "0") not in ("", "0"):
        draft.leave(where, " ".join(words), "it has no API: another service answers for it")
        return
    names = shlex.split(flags.pop("served-model-name", "")) or [model]
    if not names[0] or "$" in names[0]:
        draft.leave(where, f"--model {names[0]}", "a model that is stated outside the file")
        return
    key = flags.pop("api-key", "") or environment.get("VLLM_API_KEY", "")
    most = flags.pop("max-num-seqs", "") or flags.pop("max-running-requests", "")
    variable = draft.key_variable(key, name, asked=True)
    host = "127.0.0.1" if service.get("network_mode") == "host" else name
    scheme = "https" if "ssl-certfile" in flags else "http"
    instance = DraftInstance(f"{scheme}://{host}:{port}", name, api_key_env=variable)
    if most.isdigit() and int(most):
        instance.max_num_seqs = int(most)
    table = draft.model(names[0])
    table.aliases += [alias for alias in names[1:] if alias not in table.aliases]
    if not draft.add(table, instance, where):
        return
    deploy = service.get("deploy")
    replicas = deploy.get("replicas") if isinstance(deploy, dict) else service.get("scale")
    if isinstance(replicas, int) and replicas > 1:
        draft.leave(where, f"{replicas} replicas under one name", f"discovery.dns finds each: {name}:{port}")
    if rest := [*plain, *(f"{_dashed(flag)} {value}".strip() for flag, value in flags.items())]:
        draft.leave(where, f"command: {' '.join(rest)}", "stays with the server")
    left = [key for key in environment if key not in ("VLLM_API_KEY", "MODEL_NAME")]
    if left:
        draft.leave(where, f"environment: {', '.join(left)}", "stays with the server")
    if others := [key for key in service if key not in _READ]:
        draft.leave(where, ", ".join(others), "stays with the server")


_PROGRAMS: Final = {
    "vllm",
    "serve",
    "python",
    "python3",
    "-m",
    "vllm.entrypoints.openai.api_server",
    "sglang",
    "sglang.launch_server",
    "sh",
    "bash",
    "exec",
}


def _dashed(flag: str) -> str:
    return flag if flag.startswith("-") else f"--{flag}"


def _flags(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return flags by name with their values, and the words before the first flag but for vLLM itself.

    A short one (`-tp`) keeps its dash.
    """
    flags: dict[str, str] = {}
    plain: list[str] = []
    last = ""
    for word in words:
        if word.startswith("--"):
            last, equals, value = word[2:].partition("=")
            last = last.replace("_", "-")
            flags[last] = value
            last = "" if equals else last
        elif re.match(r"-[A-Za-z]", word) and word != "-m":
            last = word
            flags[last] = ""
        elif last:
            flags[last] = f"{flags[last]} {word}".strip()
        else:
            plain.append(word)
    return flags, [word for word in plain if word not in _PROGRAMS]


def _words(command: Any, given: Mapping[str, str]) -> list[str]:
    """Return the words of a command, with the variables that are `given`."""
    if isinstance(command, str):
        try:
            words = shlex.split(_filled(command, given))
        except ValueError:
            return []
    else:
        words = [_filled(str(word), given) for word in command or ()]
    return [word for word in words if word.strip() and word != "\\"]


def _scripted(words: list[str], given: Mapping[str, str]) -> list[str]:
    """Return the words of a command; inside `sh -c`, of the step that starts a server."""
    if len(words) < 3 or not words[0].endswith("sh") or words[1] not in ("-c", "-lc"):
        return words
    script = " ".join(words[2:])
    steps = [step for step in re.split(r"&&|\|\||;", script) if any(map(step.__contains__, _PORTS))]
    return _words(steps[-1] if steps else script, given)


def _env_file(path: Path) -> dict[str, str]:
    """Return the variables of the `.env` beside a Compose file; none where it is not there."""
    try:
        lines = read_text(path, ConfigError).splitlines()
    except ConfigError:
        return {}
    pairs = (
        line.strip().removeprefix("export ").partition("=") for line in lines if line.lstrip()[:1] != "#"
    )
    return {name.strip(): text.strip().strip("'\"") for name, equals, text in pairs if equals}


def _filled(text: str, given: Mapping[str, str]) -> str:
    """Return a text with Compose's variables that are given or have a default; others stay."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if "KEY" in name or "TOKEN" in name:
            return f"${{{name}}}"
        if (found := given.get(name)) is not None:
            return found
        default = match[2] if match[1] and "-" in match[0] else None
        return match[0] if default is None else default

    return _VARIABLE.sub(value, text.replace("$$", "$"))


def _environment(value: Any) -> dict[str, str]:
    """Return the variables of a service, stated as a table or as a list."""
    if isinstance(value, dict):
        return {str(key): "" if each is None else str(each) for key, each in value.items()}
    pairs = (str(each).partition("=") for each in value or ())
    return {name: text for name, _, text in pairs}
