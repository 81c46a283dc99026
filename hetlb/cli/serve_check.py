"""`hetlb serve --check`: finds unfilled placeholders, and with `--connect` unreachable servers."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from hetlb.cli.engine_facts import ask_engines
from hetlb.config.fleet import Fleet
from hetlb.errors import ConfigError

#: Domain of placeholder hosts in generated plans.
_PLACEHOLDER = ".invalid"


def check_filled_in(fleet: Fleet) -> None:
    """Raise `ConfigError`, one line per placeholder and per missing file of stages."""
    found = [
        f"{fleet.where}instance {spec.name}: url: expected the host in place of {host}"
        for spec in fleet.instances
        if spec.name not in fleet.stages and (host := _host(spec.url)).endswith(_PLACEHOLDER)
    ]
    for name, group in fleet.stages.items():
        where = f"{fleet.where}stages {name}"
        found += [
            f"{where}: worker {worker}: url: expected the host in place of {host}"
            for worker, url in group.workers.items()
            if (host := _host(url)).endswith(_PLACEHOLDER)
        ]
        if not (group.folder / "config.json").is_file():
            found.append(f"{where}: folder: expected the model's config.json in it, got {group.folder}")
        if group.key_file is not None and not group.key_file.is_file():
            found.append(f"{where}: key_file: expected the key that the workers have, got {group.key_file}")
    if found:
        raise ConfigError("\n".join(found))


def check_connected(fleet: Fleet) -> list[str]:
    """Probe every server and stage; returns one line per unreachable one."""
    whats = {spec.url: f"instance {spec.name}" for spec in fleet.instances if spec.name not in fleet.stages}
    for name, group in fleet.stages.items():
        whats |= {url: f"stages {name}: worker {worker}" for worker, url in group.workers.items()}
    # Any response below 500 counts: keys and paths are not checked here.
    answers = {
        url: facts.trouble or (f"status {facts.health}" if facts.health >= 500 else "")
        for url, facts in asyncio.run(ask_engines({url: {} for url in whats})).items()
    }
    return [
        f"{fleet.where}{whats[url]}: expected an answer from {url}/health, got {answer}"
        for url, answer in answers.items()
        if answer
    ]


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""
